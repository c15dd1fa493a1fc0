"""Numbers of tokens and of bytes as people write them, and the types of settings that are such numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

_BASES = ((1000, ""), (1024, "i"))
_POWERS = {"": 0, "k": 1, "m": 2}


@dataclass(frozen=True)
class Unit:
    """What a whole number counts, where people write it with a suffix.

    Args:
        letter: what ``--help`` shows for a value.
        parse: makes a number of text such as ``8K``; raises ValueError with what was expected.
    """

    letter: str
    parse: Callable[[str], int]


def num_tokens(text: str) -> int:
    """A number of tokens as people write it: ``8192``, ``8k``, ``26K``, ``1M``; K is 1024, M is 1024 K.

    Raises:
        ValueError: if it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+)([km]?)", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is no number of tokens; write it as in 8192 or 8K")
    return int(match[1]) * 1024 ** _POWERS[match[2].lower()]


def num_bytes(text: str) -> int:
    """A size as people write it: ``200GB``, ``1.5 TiB``, ``1000000``.

    Raises:
        ValueError: if it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write it as in 200GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


def written_bytes(num: int) -> str:
    """A size in the largest unit that it is a whole number of: ``1KB`` for 1000, ``4KiB`` for 4096, ``80`` for 80."""
    sizes = [(base**power, f"{letter}{i}B") for power, letter in enumerate("KMGT", 1) for base, i in _BASES]
    size, unit = max(((size, unit) for size, unit in sizes if num % size == 0), default=(1, ""))
    return f"{num // size}{unit}"


Tokens = Annotated[int, Unit("TOKENS", num_tokens)]
"""Type of settings that count tokens: ``8192`` or ``8K``."""

Bytes = Annotated[int, Unit("BYTES", num_bytes)]
"""Type of settings that count bytes: ``1000000`` or ``200GB``."""
