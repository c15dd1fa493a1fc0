"""Output of ``packtool simulate``: tables, and a page with a timeline of every strategy."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np

from packtool import storage
from packtool.report.drawing import AXIS_LENGTH, Boxes, Drawing, Rectangle, render
from packtool.report.tables import Line, fill_in, filled_lines, table
from packtool.simulate.machine import Timing
from packtool.simulate.run import Outcome, Simulation

_LINE_HEIGHT, _LINE_GAP = 11, 3  # of GPUs, in CSS pixels
_MAX_GPUS, _NUM_FIRST_GPUS = 32, 16  # of more GPUs than _MAX_GPUS, the first, the slowest and the fastest are drawn
_ACTIVITIES = {
    "local": ("c0", "local sequences"),
    "sharded": ("c2", "sharded sequences"),
    "communication": ("c1", "exposed communication"),
    "launching": ("c4", "kernel launches or waiting for weights"),
    "synchronisation": ("c3", "synchronization of gradients and weights"),
    "waiting": ("wait", "waiting for other GPUs"),
}
"""(style, name) of each activity of a GPU."""
_COLUMNS = ("step time", "speed-up", "imbalance", "comm.", "memory", "out of memory", "micro-batches", "local tokens")
_MEANINGS = (
    "step time: mean over optimizer steps; every strategy has the same number of sequences per step.",
    "imbalance: computing time of the busiest GPU ÷ mean. comm.: fraction of the step time waiting for communication.",
    "memory: peak of a GPU. micro-batches: per step, one after the other. local tokens: of sequences on a single GPU.",
)


def duration(seconds: float) -> str:
    """Return a duration with three digits: ``0``, ``36.3 ms``, ``1.16 s``, ``12.3 s``."""
    if seconds == 0:
        return "0"
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.{max(0, 2 - int(np.floor(np.log10(value))))}f} {unit}"


def simulation_lines(simulation: Simulation) -> list[str]:
    """Return the output of ``packtool simulate``: a row for each strategy, notes, and assumptions."""
    title = f"{simulation.source}: {simulation.model} on {_machine(simulation)}"
    strategies = table(title, [("", *_COLUMNS), *_rows(simulation)])
    assumptions = table("assumptions", _assumption_lines(simulation), "l")
    num_steps = max(outcome.num_steps for outcome in simulation.outcomes)
    steps = "1 step was" if num_steps == 1 else f"{num_steps} steps were"
    speed_note = f"speed-up: throughput relative to {simulation.baseline.title!r}. "
    speed_note += f"{steps} simulated in {simulation.seconds:.1f} s."
    return [*strategies, "", speed_note, *_MEANINGS, *_warnings(simulation), "", *assumptions]


def _machine(simulation: Simulation) -> str:
    machine = simulation.options.machine
    return f"{machine.world_size:,} x {machine.hardware.name}"


_ROUNDING_ERROR = 1e-9  # seconds
_CELLS = (
    *("{title}", "{time}{mark}", "{speedup:.2f}x{mark}", "{balance:.2f}", "{communication_share:.1%}"),
    *("{peak_memory_gb:.1f} GB", "{full_steps}", "{micro_batches:.1f}", "{local_share:.0%}"),
)


def _rows(simulation: Simulation) -> list[tuple[str, ...]]:
    """Return a table row for each strategy: its title, and the texts of ``_COLUMNS``."""
    rows = []
    for outcome in simulation.outcomes:
        figures = outcome.figures(simulation.baseline)
        num_oom_steps = figures["out_of_memory_steps"]
        full_steps = f"{num_oom_steps} of {figures['steps']}" if num_oom_steps else "-"
        texts = {"time": duration(figures["step_seconds"]), "mark": "*" * bool(num_oom_steps), "full_steps": full_steps}
        rows.append(fill_in(_CELLS, figures | texts))
    return rows


def _warnings(simulation: Simulation) -> list[str]:
    warnings = []
    if any(outcome.out_of_memory.any() for outcome in simulation.outcomes):
        warnings.append("*: times ignore that some steps run out of memory; column 'out of memory' counts these steps.")
    if simulation.options.machine.recompute == "auto":
        shares = ", ".join(f"{outcome.title} {outcome.recomputed_layers:.0%}" for outcome in simulation.outcomes)
        warnings.append(f"layers that recompute their activations: {shares}.")
    if num_left_out := simulation.num_left_out:
        counts = f"{num_left_out:,} of {num_left_out + simulation.num_sequences:,} sequences"
        limit = f"{simulation.options.longest_trainable:,} tokens or --max-length"
        warnings.append(f"{counts} were left out: they are longer than {limit}.")
    larger_size = 2 * simulation.options.sequence_parallel_size
    if (num := simulation.num_dominated_steps) and simulation.options.machine.world_size % larger_size == 0:
        steps = f"In {num} of {simulation.baseline.num_steps} steps"
        cause = "one sequence has more work than a group should do, so other groups wait"
        warnings.append(f"{steps}, {cause}. Compare with --sequence-parallel-size {larger_size}.")
    return warnings


def _assumption_lines(simulation: Simulation) -> list[Line]:
    """Return the hardware, model and batch sizes that the times are computed from, as (name, value).

    ``filled_lines`` puts the values into the lines of a template.
    """
    options = simulation.options
    machine, model_sizes = options.machine, options.machine.sizes
    recomputation_texts = {True: ", recomputed in backward", "auto": " or more, as fits into memory"}
    values = {
        "options": options,
        "machine": machine,
        "hardware": machine.hardware,
        "constants": machine.constants,
        "sizes": model_sizes,
        "billions": model_sizes.num_parameters / 1e9,
        "launching": duration(machine.launch_seconds),
        "state_gb": machine.state_bytes / 1e9,
        "activation_mb": model_sizes.token_bytes(recompute=bool(machine.recompute)) / 1e6,
        "recomputed": recomputation_texts.get(machine.recompute, ""),
        "exchange": f", by {options.exchange_type}" if options.exchange_type else "",
    }
    return filled_lines("simulate", values)


def simulation_page(simulation: Simulation, command: str) -> str:
    """Return the page of a simulation as HTML; it shows ``command`` as the command that made it."""
    activities: set[str] = set()  # those that take time in some strategy
    for outcome in simulation.outcomes:
        activities |= {activity for activity, time_share in outcome.timing.shares.items() if time_share > 0}
    any_out_of_memory = any(outcome.out_of_memory.any() for outcome in simulation.outcomes)
    return render(
        "simulation.html",
        title=f"{simulation.name}: {storage.name(simulation.model)} on {_machine(simulation)}",
        command=command,
        baseline=simulation.baseline.title,
        is_faded=any_out_of_memory,
        cards=_headline(simulation),
        legend=_legend(activities),
        bars=_bars(simulation),
        header=("", *_COLUMNS),
        rows=_rows(simulation),
        meanings=" ".join(_MEANINGS),
        remarks=" ".join(_warnings(simulation)),
        strategies=[_step_content(simulation, outcome) for outcome in simulation.outcomes],
        assumptions=_assumption_lines(simulation),
    )


def _headline(simulation: Simulation) -> list[tuple[str, str, str]]:
    """Return the cards at the top of the page: of the fastest strategy that fits into memory, or of the fastest."""
    fitting = [outcome for outcome in simulation.outcomes if not outcome.out_of_memory.any()]
    best = min(fitting or simulation.outcomes, key=lambda outcome: outcome.seconds_per_token)
    figures = best.figures(simulation.baseline)
    remark = "the fastest that fits into memory" if fitting else "no strategy fits into memory"
    communication = f"{figures['communication_share']:.1%} of the time is communication"
    return [
        (f"{figures['speedup']:.2f}x", best.title, f"speed-up over {simulation.baseline.title}; {remark}"),
        (duration(figures["step_seconds"]), "per optimizer step", f"{figures['sequences_per_step']:,.0f} sequences"),
        (f"{figures['mfu']:.0%}", "model FLOPs utilization", communication),
        (f"{figures['peak_memory_gb']:.0f} GB", "peak memory of a GPU", f"load imbalance {figures['balance']:.2f}"),
    ]


def _bars(simulation: Simulation) -> list[Any]:
    """Return a bar for each strategy, as long as its time for the same number of tokens; the slowest is full.

    A bar is a tuple for the template: its name, segments (style, percent of the full width, hint), remark, text at its
    end (here the speed-up), and whether it is drawn pale.
    """
    max_seconds = max(outcome.seconds_per_token for outcome in simulation.outcomes)
    bars = []
    for outcome in simulation.outcomes:
        bar_percent = 100 * outcome.seconds_per_token / max_seconds
        segments = []
        for activity, (style, activity_name) in _ACTIVITIES.items():
            time_share = outcome.timing.shares.get(activity, 0)
            if time_share > 0:
                segments.append((style, bar_percent * time_share, f"{activity_name}: {time_share:.1%}"))

        num_oom_steps = int(outcome.out_of_memory.sum())
        is_pale = num_oom_steps > 0
        remark = f"out of memory in {num_oom_steps} of {outcome.num_steps} steps" if is_pale else ""
        speedup = f"{outcome.speedup_over(simulation.baseline):.2f}x"
        bars.append((outcome.title, segments, remark, speedup, is_pale))
    return bars


def _step_content(simulation: Simulation, outcome: Outcome) -> dict[str, Any]:
    """Return the drawing of what each GPU does in one step of a strategy, with texts for the page.

    For comparison, all strategies show the same step, that of median time of the baseline.
    """
    # Steps of ``sorted`` have other sequences, so it is shown by its own median step.
    step = _median_step(outcome if outcome.name == "sorted" else simulation.baseline)
    timing = outcome.timing
    name_by_gpu = _drawn_gpus(timing, step)
    rectangles_by_activity = _step_rectangles(timing, step, list(name_by_gpu))
    shapes = []
    for activity, rectangles in rectangles_by_activity.items():
        style, _ = _ACTIVITIES[activity]
        shapes.append(Boxes(rectangles, style=style))
    height = len(name_by_gpu) * (_LINE_HEIGHT + _LINE_GAP) - _LINE_GAP
    step_seconds = float(timing.step_seconds[step])
    return {
        "title": outcome.title,
        "note": _step_note(outcome, step, num_drawn=len(name_by_gpu)),
        "gpus": list(name_by_gpu.values()),
        "drawing": Drawing("step", "activities of each GPU during the step", shapes, height, in_pixels=True),
        "times": [duration(step_seconds * fraction) for fraction in (0, 0.25, 0.5, 0.75, 1)],
        "legend": _legend(rectangles_by_activity),
    }


def _median_step(outcome: Outcome) -> int:
    steps_by_time = outcome.timing.step_seconds.argsort(kind="stable")
    return int(steps_by_time[len(steps_by_time) // 2])


def _step_rectangles(timing: Timing, step: int, gpus: Sequence[int]) -> dict[str, list[Rectangle]]:
    """Return the rectangles of each activity in a step, with a line for each GPU."""
    step_seconds = float(timing.step_seconds[step])
    rectangles: dict[str, list[Rectangle]] = {}
    for line, gpu in enumerate(gpus):
        y = line * (_LINE_HEIGHT + _LINE_GAP)
        for activity, start, seconds in _activities(timing, step, gpu):
            x = AXIS_LENGTH * (start / step_seconds)
            width = AXIS_LENGTH * (seconds / step_seconds)
            rectangles.setdefault(activity, []).append((x, y, width, _LINE_HEIGHT))
    return rectangles


def _drawn_gpus(timing: Timing, step: int) -> dict[int, str]:
    """Return the names by number of the GPUs to draw: all, or the first ones, the slowest and the fastest of a step."""
    num_gpus = timing.schedule.num_devices
    if num_gpus <= _MAX_GPUS:
        return {gpu: f"GPU {gpu}" for gpu in range(num_gpus)}
    names = {gpu: f"GPU {gpu}" for gpu in range(_NUM_FIRST_GPUS)}
    # GPUs by finish time; if these are equal, by computing time (the last key of lexsort has precedence).
    gpus_by_time = np.lexsort((timing.busy_seconds[step], timing.device_seconds[step]))
    slowest, fastest = int(gpus_by_time[-1]), int(gpus_by_time[0])
    names[slowest] = f"GPU {slowest:,}, slowest"
    names[fastest] = f"GPU {fastest:,}, fastest"
    return names


def _step_note(outcome: Outcome, step: int, num_drawn: int) -> str:
    """Describe a step of a strategy, and which GPUs are drawn if not all are."""
    schedule = outcome.timing.schedule
    step_of_sequence = schedule.micro_batch_steps[schedule.micro_batch_of]  # for each sequence
    num_sequences = int((step_of_sequence == step).sum())
    seconds = float(outcome.timing.step_seconds[step])
    note = f"Step {step + 1}: {num_sequences:,} sequences in {duration(seconds)}. Each line is a GPU."
    num_gpus = schedule.num_devices
    if num_drawn < num_gpus:
        note += f" {num_drawn} of {num_gpus:,} are drawn: the first ones, the slowest and the fastest."
    if outcome.out_of_memory[step]:
        note += " This step would run out of memory; its times ignore that."
    return note


def _legend(activities: Container[str]) -> list[tuple[str, str]]:
    """Return (style, name) of some activities, in the order of ``_ACTIVITIES``."""
    return [style_and_name for activity, style_and_name in _ACTIVITIES.items() if activity in activities]


def _activities(timing: Timing, step: int, gpu: int) -> Iterator[tuple[str, float, float]]:
    """Yield (activity, start, duration) of what a GPU does in a step, in order and without gaps; times in seconds."""
    schedule = timing.schedule
    now = 0.0
    own_rows = schedule.row_keys == step * schedule.num_devices + gpu  # the GPU's parts of its micro-batches
    for row in np.flatnonzero(own_rows).tolist():
        for activity, seconds in _row_durations(timing, row, now).items():
            if seconds > _ROUNDING_ERROR:
                yield activity, now, seconds
            now += seconds
    slowest_gpu_end = float(timing.device_seconds[step].max())
    if slowest_gpu_end - now > _ROUNDING_ERROR:
        yield "waiting", now, slowest_gpu_end - now
    if timing.synchronisation:
        yield "synchronisation", slowest_gpu_end, timing.synchronisation


def _row_durations(timing: Timing, row: int, now: float) -> dict[str, float]:
    """Return the seconds of each activity in a GPU's part of a micro-batch, in order; the GPU is idle since ``now``."""
    micro_batch_start = float(timing.micro_batch_starts[timing.schedule.row_micro_batches[row]])
    return {
        "waiting": micro_batch_start - now,  # until all GPUs that share the micro-batch are ready
        "local": float(timing.local[row]),
        "communication": float(timing.exposed[row]),
        "sharded": float(timing.sharded[row]),
        "launching": float(timing.launching[row]),
    }
