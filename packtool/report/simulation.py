"""A simulation as lines of a terminal and as a page with a timeline of every strategy."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from packtool import storage
from packtool.report.drawing import SIZE, Boxes, Drawing, Rectangle, render
from packtool.report.tables import Line, table
from packtool.simulate.machine import Timing
from packtool.simulate.run import Outcome, Simulation

_LINE, _GAP = 11, 3  # CSS pixels of a GPU's line, and between lines
_MAX_LINES = 32
_NUM_FIRST = 16  # GPUs that are drawn if not all can be
_TIME_KINDS = {
    "local": ("c0", "local sequences"),
    "sharded": ("c2", "sharded sequences"),
    "communication": ("c1", "exposed communication"),
    "launching": ("c4", "waiting for launches or weights"),
    "synchronisation": ("c3", "gradients and weights"),
    "waiting": ("wait", "waiting for others"),
}
"""Look and name of each kind of a GPU's time."""
_COLUMNS = ("step time", "speed-up", "balance", "comm.", "memory", "out of memory", "micro-batches", "local tokens")
_MEANINGS = (
    "step time: mean of an optimizer step, of as many sequences in each strategy. micro-batches: one after the other.",
    "balance: computing time of the busiest GPU ÷ mean GPU. comm.: share of the step time spent waiting for links.",
    "local tokens: of sequences that one GPU computes alone; several share the others.",
)


def duration(seconds: float) -> str:
    """A duration with three digits: ``0``, ``36.3 ms``, ``1.16 s``, ``12.3 s``."""
    if seconds == 0:
        return "0"
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.{max(0, 2 - int(np.floor(np.log10(value))))}f} {unit}"


def simulation_lines(simulation: Simulation) -> list[str]:
    """The output of ``packtool simulate``: a row for each strategy, notes, and assumptions."""
    title = f"{simulation.source}: {simulation.model} on {_machine(simulation)}"
    strategies = table(title, [("", *_COLUMNS), *_rows(simulation)])
    assumptions = table("what the times rest on", _assumption_lines(simulation), "l")
    num_steps = max(outcome.num_steps for outcome in simulation.outcomes)
    speed_note = (
        f"speed-up: tokens per second, relative to {simulation.baseline.title!r}. {num_steps} "
        f"{'step was' if num_steps == 1 else 'steps were'} simulated, in {simulation.seconds:.1f} s."
    )
    return [*strategies, "", speed_note, *_MEANINGS, *_warnings(simulation), "", *assumptions]


def _machine(simulation: Simulation) -> str:
    machine = simulation.options.machine
    return f"{machine.world_size:,} x {machine.hardware.name}"


def _rows(simulation: Simulation) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for outcome in simulation.outcomes:
        figures = outcome.figures(simulation.baseline)
        num_full = figures["out_of_memory_steps"]
        mark = "*" if num_full else ""
        rows.append(
            (
                outcome.title,
                duration(figures["step_seconds"]) + mark,
                f"{figures['speedup']:.2f}x{mark}",
                f"{figures['balance']:.2f}",
                f"{figures['communication_share']:.1%}",
                f"{figures['peak_memory_gb']:.1f} GB",
                f"{num_full} of {figures['steps']}" if num_full else "-",
                f"{figures['micro_batches']:.1f}",
                f"{figures['local_share']:.0%}",
            )
        )
    return rows


def _warnings(simulation: Simulation) -> list[str]:
    warnings = []
    if any(outcome.out_of_memory.any() for outcome in simulation.outcomes):
        warnings.append("*: timed as if memory sufficed. Column 'out of memory' counts the steps in which it does not.")
    if num_left_out := simulation.num_left_out:
        warnings.append(
            f"{num_left_out:,} of {num_left_out + simulation.num_sequences:,} sequences were left out: longer than "
            f"{simulation.options.longest:,} tokens or than --max-length."
        )
    return warnings


def _assumption_lines(simulation: Simulation) -> list[Line]:
    """Hardware, model and batch sizes that the times are computed from."""
    machine, options = simulation.options.machine, simulation.options
    hardware, constants, sizes = machine.hardware, machine.constants, machine.sizes
    matmul, attention = constants.matmul_half_tokens, constants.attention_half_tokens
    launches = f"{constants.kernels_per_layer} kernels per layer of {constants.launch_us:g} us"
    node = f"{hardware.intra_node_gb_per_s:g} GB/s among {hardware.gpus_per_node} GPUs"
    groups = f"{options.num_groups:,} of {options.sequence_parallel_size} GPUs"
    groups += f", by {options.way}" if options.way else ""
    activations = f"{sizes.token_bytes(recompute=machine.recompute) / 1e6:.2f} MB per token"
    activations += ", computed again in backward" if machine.recompute else ""
    batch = f"{options.padded_batch_size} in padded, {options.shared_batch_size} in context parallel"
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
        ("  activations", activations),
        ("  tokens on a GPU", f"{options.bucket_size:,} at most, {options.packing_length:,} in a pack"),
        ("left out", "towers of pictures and sounds, the optimizer, loading"),
        ("groups that share a sequence", groups),
        ("global batch", f"{options.sequences_per_step:,} sequences, {options.sequences_per_rank} for each group"),
        ("  rows of a micro-batch", batch),
    ]


def simulation_page(simulation: Simulation, command: str) -> str:
    """The page as text; ``command``: shown as the command that made it."""
    kinds = {kind for outcome in simulation.outcomes for kind, share in outcome.timing.shares.items() if share > 0}
    return render(
        "simulation.html",
        title=f"{simulation.name}: {storage.name(simulation.model)} on {_machine(simulation)}",
        command=command,
        baseline=simulation.baseline.title,
        is_faded=any(outcome.out_of_memory.any() for outcome in simulation.outcomes),
        cards=_headline(simulation),
        legend=_legend(kinds),
        bars=_bars(simulation),
        header=("", *_COLUMNS),
        rows=_rows(simulation),
        meanings=" ".join(_MEANINGS),
        remarks=" ".join(_warnings(simulation)),
        strategies=[_step_content(simulation, outcome) for outcome in simulation.outcomes],
        assumptions=_assumption_lines(simulation),
    )


def _headline(simulation: Simulation) -> list[tuple[str, str, str]]:
    """Figures of the fastest strategy that fits into memory, or of the fastest if none does."""
    fitting = [outcome for outcome in simulation.outcomes if not outcome.out_of_memory.any()]
    best = min(fitting or simulation.outcomes, key=lambda outcome: outcome.seconds_per_token)
    figures = best.figures(simulation.baseline)
    fits = "of those that fit, the fastest" if fitting else "nothing fits into memory"
    communication = f"{figures['communication_share']:.1%} of the time is communication"
    return [
        (f"{figures['speedup']:.2f}x", best.title, f"speed-up over {simulation.baseline.title}; {fits}"),
        (duration(figures["step_seconds"]), "per optimizer step", f"{figures['sequences_per_step']:,.0f} sequences"),
        (f"{figures['mfu']:.0%}", "of the peak FLOPs are used", communication),
        (f"{figures['peak_memory_gb']:.0f} GB", "peak memory of a GPU", f"balance {figures['balance']:.2f}"),
    ]


def _bars(simulation: Simulation) -> list[Any]:
    """Time for the same tokens: name, parts (look, percent of the width, hint), remark, speed-up, whether faded."""
    longest = max(outcome.seconds_per_token for outcome in simulation.outcomes)
    bars = []
    for outcome in simulation.outcomes:
        shares, num_full = outcome.timing.shares, int(outcome.out_of_memory.sum())
        width = 100 * outcome.seconds_per_token / longest
        parts = [
            (look, width * shares[kind], f"{name}: {shares[kind]:.1%}")
            for kind, (look, name) in _TIME_KINDS.items()
            if shares.get(kind, 0) > 0
        ]
        remark = f"out of memory in {num_full} of {outcome.num_steps} steps" if num_full else ""
        speedup = f"{outcome.speedup_over(simulation.baseline):.2f}x"
        bars.append((outcome.title, parts, remark, speedup, bool(num_full)))
    return bars


def _step_content(simulation: Simulation, outcome: Outcome) -> dict[str, Any]:
    """A step of median time, the same one for all strategies whose steps have the same sequences."""
    timing = outcome.timing
    # The steps of sorted batches have other sequences.
    times = (outcome if outcome.name == "sorted" else simulation.baseline).timing.step_seconds
    step = int(times.argsort(kind="stable")[len(times) // 2])
    seconds, num_gpus = float(timing.step_seconds[step]), timing.schedule.num_devices
    gpus = {gpu: f"GPU {gpu}" for gpu in range(num_gpus if num_gpus <= _MAX_LINES else _NUM_FIRST)}
    if num_gpus > _MAX_LINES:
        # Of GPUs that finish at the same time, the one that computes most, or least.
        order = np.lexsort((timing.busy[step], timing.device_seconds[step]))
        for word, gpu in (("slowest", int(order[-1])), ("fastest", int(order[0]))):
            gpus[gpu] = f"GPU {gpu:,}, {word}"
    rectangles: dict[str, list[Rectangle]] = {}
    for number, gpu in enumerate(gpus):
        for kind, start, length in _pieces(timing, step, gpu):
            rectangle = (start / seconds * SIZE, number * (_LINE + _GAP), length / seconds * SIZE, _LINE)
            rectangles.setdefault(kind, []).append(rectangle)
    shapes = [Boxes(boxes, _TIME_KINDS[kind][0]) for kind, boxes in rectangles.items()]
    height = max(len(gpus), 1) * (_LINE + _GAP) - _GAP
    num_sequences = int((timing.schedule.cell_steps[timing.schedule.cells] == step).sum())
    note = f"Step {step + 1}: {num_sequences:,} sequences in {duration(seconds)}. Each line is a GPU."
    if len(gpus) < num_gpus:
        note += f" {len(gpus)} of {num_gpus:,} are drawn: the first ones, the slowest and the fastest."
    if outcome.out_of_memory[step]:
        note += " This step would run out of memory; it is drawn as if memory sufficed."
    return {
        "title": outcome.title,
        "note": note,
        "gpus": list(gpus.values()),
        "drawing": Drawing("step", "what each GPU does during the step", shapes, height, in_pixels=True),
        "times": [duration(seconds * part / 4) for part in range(5)],
        "legend": _legend(rectangles),
    }


def _legend(kinds: Container[str]) -> list[tuple[str, str]]:
    """Look and name of these kinds, in the order of ``_TIME_KINDS``."""
    return [look_and_name for kind, look_and_name in _TIME_KINDS.items() if kind in kinds]


def _pieces(timing: Timing, step: int, gpu: int) -> Iterator[tuple[str, float, float]]:
    """Kind, start and duration in seconds of what a GPU does, in order and without gaps."""
    schedule = timing.schedule
    end = float(timing.device_seconds[step].max())
    at = 0.0
    for row in np.flatnonzero(schedule.row_keys == step * schedule.num_devices + gpu).tolist():
        start = float(timing.cell_starts[schedule.row_cells[row]])
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
    if end - at > 1e-9:
        yield "waiting", at, end - at
    if timing.synchronisation:
        yield "synchronisation", end, timing.synchronisation
