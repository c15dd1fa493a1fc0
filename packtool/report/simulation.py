"""A simulation as lines of a terminal, and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from packtool import storage
from packtool.report.markup import escape
from packtool.report.page import command_line, document, figure_list, headline, section
from packtool.report.statistics import Line
from packtool.report.timeline import STYLE, compare_html, duration, legend_html, lines_of, timeline_html
from packtool.simulate.outcomes import Outcome
from packtool.simulate.run import Simulation

_COLUMNS = ("step", "speed-up", "balance", "comm.", "memory", "out of memory", "micro-batches", "sequences")
_ALIKE = ("padded", "context-parallel", "skrull")
_MEANINGS = (
    "step: mean time of an optimizer step; sequences: in it, and micro-batches: one after the other on a GPU.",
    "balance: the busiest GPU's computing over the mean GPU's. comm.: share of the time that GPUs wait for links.",
)


def title_of(found: Simulation) -> str:
    """What was simulated, on a line."""
    return f"{found.source}: {found.model} on {_machine(found)}"


def _machine(found: Simulation) -> str:
    machine = found.options.machine
    return f"{machine.world_size:,} x {machine.hardware.name}"


def table_lines(found: Simulation) -> list[str]:
    """A line for each strategy, as wide as they are: a table that is cut off or wrapped cannot be read."""
    rows = [(outcome.title, *_cells(outcome, found.baseline)) for outcome in found.outcomes]
    table = [("", *_COLUMNS), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return [*lines, "", *notes(found)]


def _cells(outcome: Outcome, baseline: Outcome) -> tuple[str, ...]:
    figures = outcome.figures(baseline)
    full = figures["out_of_memory_steps"]
    return (
        duration(figures["step_seconds"]) + "*" * bool(full),
        f"{figures['speedup']:.2f}x" + "*" * bool(full),
        f"{figures['balance']:.2f}",
        f"{figures['communication_share']:.1%}",
        f"{figures['peak_memory_gb']:.1f} GB",
        f"{full} of {figures['steps']}" if full else "-",
        f"{figures['micro_batches']:.1f}",
        f"{figures['sequences_per_step']:,.0f}",
    )


def notes(found: Simulation) -> list[str]:
    """What a reader must know to read the table."""
    options = found.options
    most = max(outcome.num_steps for outcome in found.outcomes)
    lines = [
        f"speed-up: tokens a second over those of {found.baseline.title!r}. {most} "
        f"{'step was' if most == 1 else 'steps were'} simulated, in {found.seconds:.1f} s.",
        *_MEANINGS,
    ]
    if any(outcome.out_of_memory.any() for outcome in found.outcomes):
        lines.append("*: timed as if memory sufficed; out of memory tells in how many steps it does not.")
    if found.num_left_out:
        lines.append(
            f"{found.num_left_out:,} of {found.num_left_out + found.num_sequences:,} sequences were left out: over "
            f"{options.longest:,} tokens, or --max-length."
        )
    return lines


def assumption_lines(found: Simulation) -> list[Line]:
    """What the times rest on."""
    machine, options = found.options.machine, found.options
    hardware, constants, sizes = machine.hardware, machine.constants, machine.sizes
    matmul, attention = constants.matmul_half_tokens, constants.attention_half_tokens
    launches = f"{constants.kernels_per_layer} kernels a layer of {constants.launch_us:g} us"
    node = f"{hardware.intra_node_gb_per_s:g} GB/s among {hardware.gpus_per_node} GPUs"
    activations = f"{sizes.token_bytes(recompute=machine.recompute) / 1e6:.2f} MB a token"
    return [
        ("model", f"{sizes.num_parameters / 1e9:.2f} billion weights, {sizes.num_layers} layers"),
        ("peak", f"{hardware.peak_tflops:g} TFLOP/s, bfloat16"),
        ("  matrix products", f"{hardware.matmul_share:.0%} of it x n / (n + {matmul:g}) for n tokens on a GPU"),
        ("  attention", f"{hardware.attention_share:.0%} of it x q / (q + {attention:g}) for q queries of a sequence"),
        ("  launching a micro-batch", f"{duration(machine.launch_seconds)}: {launches}"),
        ("links", f"{node}, {hardware.inter_node_gb_per_s:g} GB/s from each to other nodes"),
        ("  collectives", f"reach {hardware.link_share:.0%} of it, and take {hardware.latency_us:g} us at least"),
        ("memory", f"{hardware.memory_gb:g} GB, of which {constants.usable_memory:.0%} can be filled"),
        ("  weights, gradients, optimizer", f"{sizes.state_bytes(machine.world_size) / 1e9:.1f} GB on a GPU (ZeRO-2)"),
        ("  activations", activations + ", computed again in backward" * machine.recompute),
        ("  tokens on a GPU", f"{options.bucket_size:,} at most, {options.packing_length:,} in a pack"),
        ("groups that share a sequence", f"{options.num_groups:,} of {options.num_sharing} GPUs"),
        ("global batch", f"{options.sequences_per_step:,} sequences, {options.sequences_per_rank} for each group"),
        ("  rows of a micro-batch", f"{options.rows} in padded, {options.shared_rows} in context parallel"),
    ]


def assumption_text(found: Simulation) -> list[str]:
    """The same for a terminal: names and values side by side, never wrapped."""
    lines = assumption_lines(found)
    width = max(len(name) for name, _ in lines)
    return [f"{name:<{width}}  {value}" for name, value in lines]


def simulation_page(found: Simulation, command: str) -> str:
    """The page as text."""
    kinds = {kind for outcome in found.outcomes for kind, share in outcome.timing.shares.items() if share > 0}
    body = [
        headline(_headline(found)),
        section(
            "Time for the same tokens",
            legend_html(list(kinds)) + compare_html(_compared(found)),
            "How long all GPUs together take for as many tokens, and what for: twice as long is half as fast. "
            f"Speed-up over {found.baseline.title}.{_faded(found)}",
        ),
        section("All strategies", _table(found), " ".join(notes(found)[1:3])),
        *(_drawn(found, outcome) for outcome in found.outcomes),
        section("What the times rest on", figure_list(assumption_lines(found)), " ".join(notes(found)[3:])),
        section("How to get here again", command_line("This page was made by", command)),
    ]
    title = f"{found.name}: {storage.name(found.model)} on {_machine(found)}"
    return document(title, "packtool simulate", "".join(body), STYLE)


def _best(found: Simulation) -> Outcome:
    """The fastest of those that fit; of all, if none does."""
    fitting = [outcome for outcome in found.outcomes if not outcome.out_of_memory.any()]
    return min(fitting or found.outcomes, key=lambda outcome: outcome.seconds_per_token)


def _headline(found: Simulation) -> list[tuple[str, str, str]]:
    best = _best(found)
    figures = best.figures(found.baseline)
    fits = "of those that fit, the fastest" if not best.out_of_memory.any() else "nothing fits into memory"
    return [
        (f"{figures['speedup']:.2f}x", best.title, f"over {found.baseline.title}; {fits}"),
        (duration(figures["step_seconds"]), "a step", f"{figures['sequences_per_step']:,.0f} sequences"),
        (f"{figures['mfu']:.0%}", "of the peak is used", f"{figures['communication_share']:.1%} communication"),
        (f"{figures['peak_memory_gb']:.0f} GB", "at most on a GPU", f"balance {figures['balance']:.2f}"),
    ]


def _compared(found: Simulation) -> list[tuple[str, float, dict[str, float], str, str, bool]]:
    longest = max(outcome.seconds_per_token for outcome in found.outcomes)
    rows = []
    for outcome in found.outcomes:
        full = int(outcome.out_of_memory.sum())
        remark = f"out of memory in {full} of {outcome.num_steps} steps" if full else ""
        length = outcome.seconds_per_token / longest
        figure = f"{outcome.speedup_over(found.baseline):.2f}x"
        rows.append((outcome.title, length, outcome.timing.shares, figure, remark, bool(full)))
    return rows


def _faded(found: Simulation) -> str:
    """What a pale bar means, where there are any."""
    if not any(outcome.out_of_memory.any() for outcome in found.outcomes):
        return ""
    return " Pale bars are of strategies that would run out of memory: timed as if they did not."


def _table(found: Simulation) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = [row((outcome.title, *_cells(outcome, found.baseline)), "td") for outcome in found.outcomes]
    return f"<div class=wide><table>{row(('', *_COLUMNS), 'th')}{''.join(rows)}</table></div>"


def _drawn(found: Simulation, outcome: Outcome) -> str:
    """A step of median time; those that see the same sequences in the same steps are drawn in the same step."""
    timing = outcome.timing
    alike = outcome if outcome.name not in _ALIKE else found.baseline
    times = alike.timing.step_seconds
    step = int(times.argsort(kind="stable")[len(times) // 2])
    seconds = float(timing.step_seconds[step])
    lines = lines_of(timing, step)
    num_gpus = outcome.options.machine.world_size
    sequences = int((timing.schedule.cell_steps[timing.schedule.cells] == step).sum())
    note = f"Step {step + 1}: {sequences:,} sequences in {duration(seconds)}. Each line is a GPU."
    if len(lines) < num_gpus:
        note += f" {len(lines)} of {num_gpus:,} are drawn: the first ones, the slowest and the fastest."
    if outcome.out_of_memory[step]:
        note += " This step would run out of memory; it is drawn as if it did not."
    kinds = {piece.kind for line in lines for piece in line.pieces}
    return section(outcome.title, legend_html(list(kinds)) + timeline_html(lines, seconds), note)


def simulation_json(found: Simulation) -> dict[str, Any]:
    """What ``packtool simulate --json`` prints."""
    figures = found.figures()
    figures["model_sizes"] = dataclasses.asdict(found.options.machine.sizes)
    return figures
