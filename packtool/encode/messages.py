"""A sample as chat templates get it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from packtool.encode.control import Shield
from packtool.rows.forms.problem import RowProblem
from packtool.rows.sample import Sample, Turn


class CannotRender(RowProblem):
    """A sample that no template can render."""


def message_of(turn: Turn, shield: Shield, kinds: Sequence[str], as_list: bool) -> dict[str, Any]:
    """A turn as the template gets it."""
    text = shield.text(shield.media(turn.content, kinds))
    content = shield.as_list(text) if as_list else text
    return {"role": turn.role, "content": content, **shield.value(turn.extra)}


def strings_of(sample: Sample) -> list[str]:
    """Every string of a sample that a template may print.

    Raises:
        CannotRender: if a template might print NaN or an infinite number, which no JSON has.
    """
    found = [turn.content for turn in sample.turns]
    stack: list[object] = [turn.extra for turn in sample.turns if turn.extra]
    stack += list(sample.tools or ())
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise CannotRender("invalid_content", f"the number {value} stands in tools or in a tool call")
    return found
