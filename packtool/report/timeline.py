"""Drawings of simulated steps: what every GPU does when, as bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from packtool.report.axes import SIZE
from packtool.report.drawing import Boxes, Drawing, Rectangle
from packtool.simulate.cost import Timing

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
class Timeline:
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


def timeline(timing: Timing, step: int) -> Timeline:
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
    return Timeline(list(gpus.values()), drawing, times, legend(places))


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
