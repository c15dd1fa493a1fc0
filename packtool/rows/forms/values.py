"""Single values of rows: numbers that a float can hold, and how a value is shown in a message."""

from __future__ import annotations

import math
import reprlib
from typing import Any

_LONGEST_SHOWN = 80
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _LONGEST_SHOWN
_short.maxlevel = 3


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, for NaN and infinity, and for what is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """A value for a message, cut short; one of any size and depth costs nothing."""
    return _short.repr(value)[:_LONGEST_SHOWN]


def listed(names: Any, most: int = 20) -> str:
    """Names for a message, sorted, each and all of them cut short."""
    texts = sorted(str(name)[:_LONGEST_SHOWN] for name in names)
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "") or "none"
