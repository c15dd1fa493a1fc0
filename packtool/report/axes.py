"""Axes of charts: the round numbers along them, how these are written, and where values stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SIZE = 1000
"""Units that an axis is long, whatever it measures."""
_LETTER = 36  # units that a letter of a label takes on a narrow phone


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale.

    Args:
        name: what it measures, and in which unit.
        low, high: values at its ends.
        ticks: (value, label) of numbers along it.
        is_log: whether it is logarithmic; all values are above 0 then.
    """

    name: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    @classmethod
    def over(
        cls,
        name: str,
        low: float,
        high: float,
        most: int,
        *,
        whole: bool = False,
        cover: bool = False,
        suffix: str = "",
    ) -> Axis:
        """An axis with round numbers.

        Args:
            most: about as many of them.
            whole: no fractions.
            cover: the axis ends with a round number, at or above ``high``.
            suffix: unit behind every number.
        """
        values = round_numbers(low, high, most, whole=whole, cover=cover)
        return cls(name, low, values[-1] if cover else high, list(zip(values, labels(values, suffix), strict=True)))

    @classmethod
    def logarithmic(cls, name: str, low: float, high: float) -> Axis:
        """A logarithmic axis with round numbers that do not touch on a phone; it spans at least one power of ten."""
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        for factors, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
            values = [factor * power for power in powers for factor in factors if low <= factor * power <= high][
                ::every
            ]
            axis = cls(name, low, high, [(value, _label(value, 1, 0)) for value in values], is_log=True)
            if all(
                there - here > _LETTER * (len(left + right) / 2 + 1)
                for (here, left), (there, right) in pairwise(axis.places)
            ):
                break
        return axis

    def at(self, value: float) -> float:
        """Units from the axis's beginning to a value."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low) * SIZE
        return (value - self.low) / ((self.high - self.low) or 1) * SIZE

    @property
    def places(self) -> list[tuple[float, str]]:
        """(units from the beginning, label) of every tick."""
        return [(self.at(value), label) for value, label in self.ticks]


def round_numbers(low: float, high: float, most: int, *, whole: bool = False, cover: bool = False) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten between two different numbers.

    Args:
        most: about as many.
        whole: no fractions.
        cover: from ``low`` itself, which is round, to the first at or above ``high``.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = next((step for step in steps if not whole or step == int(step)), 1.0)
    if cover:
        return [low + i * step for i in range(max(math.ceil((high - low) / step - 1e-9), 1) + 1)]
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def labels(values: Sequence[float], suffix: str = "") -> list[str]:
    """Evenly spaced numbers, each with as many decimals as tell them apart."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    digits = next((digits for digits in range(4) if abs(round(step, digits) - step) < 1e-9), 4)
    return [_label(value, step, digits) + suffix for value in values]


def _label(value: float, step: float, digits: int) -> str:
    if abs(value) < step * 1e-9:
        return "0"
    if step < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    # A phone has no room for six zeros.
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value:,.{digits}f}"
