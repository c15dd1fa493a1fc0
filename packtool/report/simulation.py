"""A simulation as lines of a terminal and as a page, with a timeline of every strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool import storage
from packtool.report.drawing import SIZE, Boxes, Drawing, Rectangle, render
from packtool.report.statistics import Line
from packtool.report.tables import table
from packtool.simulate.cost import Timing
from packtool.simulate.run import Outcome, Simulation

_LINE, _GAP = 11, 3  # CSS pixels of a GPU's line, and below it
_MOST_LINES = 32
_FIRST = 16  # lines of the first GPUs where not all can be drawn

TIME_KINDS = {
    "local": ("c0", "local sequences"),
    "sharded": ("c2", "sharded sequences"),
    "communication": ("c1", "exposed communication"),
    "launching": ("c4", "waiting for launches or weights"),
    "synchronisation": ("c3", "gradients and weights"),
    "waiting": ("wait", "waiting for others"),
}
"""What a GPU's time goes to: how it looks, and how a legend calls it."""


@dataclass(frozen=True)
class StepTimeline:
    """One step of GPUs below one another.

    Args:
        gpus: their names.
        drawing: a line for each.
        times: labels below, at equal distances from the step's beginning to its end.
        legend: (look, text) of what is drawn.
    """

    gpus: list[str]
    drawing: Drawing
    times: list[str]
    legend: list[tuple[str, str]]


def timeline(timing: Timing, step: int) -> StepTimeline:
    """A step of every GPU; of many, the first ones, the slowest and the fastest."""
    seconds = float(timing.step_seconds[step])
    gpus = _shown_gpus(timing, step)
    places: dict[str, list[Rectangle]] = {}
    for number, gpu in enumerate(gpus):
        for kind, start, length in _pieces(timing, step, gpu):
            place = (start / seconds * SIZE, number * (_LINE + _GAP), length / seconds * SIZE, _LINE)
            places.setdefault(kind, []).append(place)
    height = max(len(gpus), 1) * (_LINE + _GAP) - _GAP
    shapes = [Boxes(boxes, TIME_KINDS[kind][0]) for kind, boxes in places.items()]
    drawing = Drawing("step", "what each GPU does during the step", shapes, height, in_pixels=True)
    times = [duration(seconds * part / 4) for part in range(5)]
    return StepTimeline(list(gpus.values()), drawing, times, legend(places))


def legend(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Look and text of these kinds, in the order of ``TIME_KINDS``."""
    present = set(kinds)
    return [shown for kind, shown in TIME_KINDS.items() if kind in present]


def _shown_gpus(timing: Timing, step: int) -> dict[int, str]:
    """Numbers and names of the GPUs that are drawn."""
    world_size = timing.schedule.num_devices
    if world_size <= _MOST_LINES:
        return {gpu: f"GPU {gpu}" for gpu in range(world_size)}
    shown = {gpu: f"GPU {gpu}" for gpu in range(_FIRST)}
    # Of those that are done at the same time, the one that computes most, or least.
    order = np.lexsort((timing.busy[step], timing.device_seconds[step]))
    for word, gpu in (("slowest", int(order[-1])), ("fastest", int(order[0]))):
        shown[gpu] = f"GPU {gpu:,}, {word}"
    return shown


def _pieces(timing: Timing, step: int, gpu: int) -> Iterator[tuple[str, float, float]]:
    """Kind, start and seconds of what a GPU does, in its order; they fill the step."""
    plan = timing.schedule
    done = float(timing.device_seconds[step].max())
    at = 0.0
    for row in np.flatnonzero(plan.row_keys == step * plan.num_devices + gpu).tolist():
        start = float(timing.cell_starts[plan.row_cells[row]])
        parts = (
            ("waiting", start - at),
            ("local", timing.local[row]),
            ("communication", timing.exposed[row]),
            ("sharded", timing.sharded[row]),
            ("launching", timing.launching[row]),
        )
        for kind, seconds in parts:
            if seconds > 1e-9:
                yield kind, at, float(seconds)
            at += float(seconds)
    if done - at > 1e-9:
        yield "waiting", at, done - at
    if timing.synchronisation:
        yield "synchronisation", done, timing.synchronisation


def duration(seconds: float) -> str:
    """``0``, ``36.3 ms``, ``1.16 s``, ``12.3 s``: three digits."""
    if seconds == 0:
        return "0"
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.{max(0, 2 - int(np.floor(np.log10(value))))}f} {unit}"


_COLUMNS = ("step time", "speed-up", "balance", "comm.", "memory", "out of memory", "micro-batches", "local tokens")
_MEANINGS = (
    "step time: mean of an optimizer step, of as many sequences in each strategy. micro-batches: one after the other.",
    "balance: computing time of the busiest GPU ÷ mean GPU. comm.: share of the step time spent waiting for links.",
    "local tokens: of sequences that one GPU computes alone; several share the others.",
)


def _machine(found: Simulation) -> str:
    machine = found.options.machine
    return f"{machine.world_size:,} x {machine.hardware.name}"


def simulation_lines(found: Simulation) -> list[str]:
    """What ``packtool simulate`` prints: a row for each strategy, notes, and assumptions."""
    title = f"{found.source}: {found.model} on {_machine(found)}"
    strategies = table(title, [("", *_COLUMNS), *_rows(found)])
    return [*strategies, "", *notes(found), "", *table("what the times rest on", assumption_lines(found), "l")]


def _rows(found: Simulation) -> list[tuple[str, ...]]:
    return [(outcome.title, *_cells(outcome, found.baseline)) for outcome in found.outcomes]


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
        f"{figures['local_share']:.0%}",
    )


def notes(found: Simulation) -> list[str]:
    """What a reader must know to read the table."""
    options = found.options
    most = max(outcome.num_steps for outcome in found.outcomes)
    lines = [
        f"speed-up: tokens per second, relative to {found.baseline.title!r}. {most} "
        f"{'step was' if most == 1 else 'steps were'} simulated, in {found.seconds:.1f} s.",
        *_MEANINGS,
    ]
    if any(outcome.out_of_memory.any() for outcome in found.outcomes):
        lines.append("*: timed as if memory sufficed. Column 'out of memory' counts the steps in which it does not.")
    if found.num_left_out:
        lines.append(
            f"{found.num_left_out:,} of {found.num_left_out + found.num_sequences:,} sequences were left out: longer "
            f"than {options.longest:,} tokens or than --max-length."
        )
    return lines


def assumption_lines(found: Simulation) -> list[Line]:
    """What the times rest on."""
    machine, options = found.options.machine, found.options
    hardware, constants, sizes = machine.hardware, machine.constants, machine.sizes
    matmul, attention = constants.matmul_half_tokens, constants.attention_half_tokens
    launches = f"{constants.kernels_per_layer} kernels per layer of {constants.launch_us:g} us"
    node = f"{hardware.intra_node_gb_per_s:g} GB/s among {hardware.gpus_per_node} GPUs"
    shared = options.shared_batch_size
    groups = f"{options.num_groups:,} of {options.sequence_parallel_size} GPUs" + f", by {options.way}" * bool(
        options.way
    )
    activations = f"{sizes.token_bytes(recompute=machine.recompute) / 1e6:.2f} MB per token"
    return [
        ("model", f"{sizes.num_parameters / 1e9:.2f} billion weights, {sizes.num_layers} layers"),
        ("peak", f"{hardware.peak_tflops:g} TFLOP/s, bfloat16"),
        ("  matrix products", f"{hardware.matmul_share:.0%} of it x n / (n + {matmul:g}) for n tokens on a GPU"),
        ("  attention", f"{hardware.attention_share:.0%} of it x q / (q + {attention:g}) for q queries of a sequence"),
        ("  launching a micro-batch", f"{duration(machine.launch_seconds)}: {launches}"),
        ("links", f"{node}, {hardware.inter_node_gb_per_s:g} GB/s from each to other nodes"),
        ("  collectives", f"reach {hardware.link_share:.0%} of it, and take {hardware.latency_us:g} us at least"),
        ("memory", f"{hardware.memory_gb:g} GB, of which {constants.usable_memory:.0%} can be filled"),
        ("  weights, gradients, optimizer", f"{machine.state_bytes / 1e9:.1f} GB per GPU (ZeRO-{machine.zero_stage})"),
        ("  activations", activations + ", computed again in backward" * machine.recompute),
        ("  tokens on a GPU", f"{options.bucket_size:,} at most, {options.packing_length:,} in a pack"),
        ("left out", "towers of pictures and sounds, the optimizer, loading"),
        ("groups that share a sequence", groups),
        ("global batch", f"{options.sequences_per_step:,} sequences, {options.sequences_per_rank} for each group"),
        ("  rows of a micro-batch", f"{options.padded_batch_size} in padded, {shared} in context parallel"),
    ]


def simulation_page(found: Simulation, command: str) -> str:
    """The page as text."""
    kinds = {kind for outcome in found.outcomes for kind, share in outcome.timing.shares.items() if share > 0}
    return render(
        "simulation.html",
        title=f"{found.name}: {storage.name(found.model)} on {_machine(found)}",
        command=command,
        baseline=found.baseline.title,
        is_faded=any(outcome.out_of_memory.any() for outcome in found.outcomes),
        cards=_headline(found),
        legend=legend(kinds),
        bars=_bars(found),
        header=("", *_COLUMNS),
        rows=_rows(found),
        meanings=" ".join(_MEANINGS),
        remarks=" ".join(notes(found)[1 + len(_MEANINGS) :]),
        strategies=[_drawn(found, outcome) for outcome in found.outcomes],
        assumptions=assumption_lines(found),
    )


def _best(found: Simulation) -> Outcome:
    """The fastest of those that fit; of all, if none does."""
    fitting = [outcome for outcome in found.outcomes if not outcome.out_of_memory.any()]
    return min(fitting or found.outcomes, key=lambda outcome: outcome.seconds_per_token)


def _headline(found: Simulation) -> list[tuple[str, str, str]]:
    best = _best(found)
    figures = best.figures(found.baseline)
    fits = "of those that fit, the fastest" if not best.out_of_memory.any() else "nothing fits into memory"
    return [
        (f"{figures['speedup']:.2f}x", best.title, f"speed-up over {found.baseline.title}; {fits}"),
        (duration(figures["step_seconds"]), "per optimizer step", f"{figures['sequences_per_step']:,.0f} sequences"),
        (
            f"{figures['mfu']:.0%}",
            "of the peak FLOPs are used",
            f"{figures['communication_share']:.1%} of the time is communication",
        ),
        (f"{figures['peak_memory_gb']:.0f} GB", "peak memory of a GPU", f"balance {figures['balance']:.2f}"),
    ]


def _bars(found: Simulation) -> list[Any]:
    """Time for the same tokens: name, (look, percent of the width, hint) of its parts, remark, figure, is it faded."""
    longest = max(outcome.seconds_per_token for outcome in found.outcomes)
    rows = []
    for outcome in found.outcomes:
        shares, full = outcome.timing.shares, int(outcome.out_of_memory.sum())
        wide = 100 * outcome.seconds_per_token / longest
        parts = [
            (look, wide * shares[kind], f"{text}: {shares[kind]:.1%}")
            for kind, (look, text) in TIME_KINDS.items()
            if shares.get(kind, 0) > 0
        ]
        remark = f"out of memory in {full} of {outcome.num_steps} steps" if full else ""
        rows.append((outcome.title, parts, remark, f"{outcome.speedup_over(found.baseline):.2f}x", bool(full)))
    return rows


def _drawn(found: Simulation, outcome: Outcome) -> dict[str, Any]:
    """A step of median time, the same one for all strategies that have the same sequences in it."""
    timing = outcome.timing
    # Sorted batches have other sequences in their steps than the others.
    times = (outcome if outcome.name == "sorted" else found.baseline).timing.step_seconds
    step = int(times.argsort(kind="stable")[len(times) // 2])
    drawn = timeline(timing, step)
    num_gpus = outcome.options.machine.world_size
    sequences = int((timing.schedule.cell_steps[timing.schedule.cells] == step).sum())
    note = f"Step {step + 1}: {sequences:,} sequences in {duration(float(timing.step_seconds[step]))}. "
    note += "Each line is a GPU."
    if len(drawn.gpus) < num_gpus:
        note += f" {len(drawn.gpus)} of {num_gpus:,} are drawn: the first ones, the slowest and the fastest."
    if outcome.out_of_memory[step]:
        note += " This step would run out of memory; it is drawn as if memory sufficed."
    return {"title": outcome.title, "note": note, **vars(drawn)}
