"""Numbers of tokens and of bytes as people write them."""

from __future__ import annotations

import re


def num_tokens(text: str) -> int:
    """A number of tokens as people write it: ``8192``, ``8k``, ``26K``; K is 1024.

    Raises:
        ValueError: if it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+)(k?)", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is no number of tokens; write it as in 8192 or 8K")
    return int(match[1]) * (1024 if match[2] else 1)


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
