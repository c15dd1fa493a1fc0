"""Log lines whose loss or gradient norm is far above those before it: a step that is worth looking at."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

WINDOW = 200
"""Log lines that one is compared with."""
_FEWEST = 20
_SIGMAS = 6.0
_OF_MAD = 1.4826  # a normal distribution's standard deviation, of its median absolute deviation
_AS_LARGE, _NEARLY = 2, 0.7


def is_far_above(value: float, before: Sequence[float], least_sigma: float) -> bool:
    """Whether a number is far above others, and hardly any of these are.

    Far is six robust standard deviations above the median (Leys et al. 2013, "Detecting outliers: Do not use standard
    deviation around the mean, use absolute deviation around the median", take three). Where three of the others are
    nearly as far, the number is one of many: of a source that is harder than the others, or of a level that the run has
    come to. Fewer than twenty others tell nothing.

    Args:
        value: of a log line.
        before: those of the lines before.
        least_sigma: a standard deviation is taken to be that at least.
    """
    if len(before) < _FEWEST:
        return False
    middle = median(before)
    sigma = max(_OF_MAD * median(abs(other - middle) for other in before), least_sigma)
    nearly = middle + _NEARLY * (value - middle)
    return value - middle > _SIGMAS * sigma and sum(other >= nearly for other in before) <= _AS_LARGE


class Outliers:
    """Remembers the last log lines, and says what of the next one is far above them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def of(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """The figures of a line that are far above those of the last lines, each with the median of these.

        Gradient norms vary by factors: their logarithms are compared. A loss must be 12 % above the median at least,
        and a norm nearly twice of it.
        """
        found = {}
        loss, norm = logs.get("loss"), logs.get("grad_norm")
        if loss is not None and math.isfinite(loss):
            if is_far_above(loss, self._losses, 0.02 * abs(median(self._losses or [0.0]))):
                found["loss"] = median(self._losses)
            self._losses.append(loss)
        if norm is not None and math.isfinite(norm) and norm > 0:
            if is_far_above(math.log(norm), self._norms, 0.1):
                found["grad_norm"] = math.exp(median(self._norms))
            self._norms.append(math.log(norm))
        return found


def sentence(step: int, found: Mapping[str, float], logs: Mapping[str, Any], output_dir: str | None) -> str:
    """What is to be said of a line with such figures.

    Args:
        step: of the line.
        found: what ``Outliers`` has found.
        logs: the line.
        output_dir: of a run whose steps can be looked at.
    """
    told = " and ".join(
        f"{name.replace('_', ' ')} {float(logs[name]):.4g} (the last lines: {middle:.4g})"
        for name, middle in found.items()
    )
    look = "" if output_dir is None else f": packtool inspect {output_dir} --step {step} shows what it held"
    return f"step {step:,} is far above those before: {told}{look}"
