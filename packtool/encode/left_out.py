"""Turns that a chat template leaves out, though a row has them: a second system prompt, a tool's answer.

Many templates know of one system prompt, before everything else, and pass over all others without a word. What a row
says must not vanish so; whether it does is found out by rendering the same roles once more, with a mark for each text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packtool.encode.template import TemplateFailure
from packtool.rows.sample import Turn

_REMEMBERED = 10_000
_Roles = tuple[Any, ...]


class LeftOut:
    """Says which turn a template leaves out, for every order of roles that rows have.

    Args:
        render: messages and tools to text, as the template does it.
    """

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]], Any], str]) -> None:
        self._render = render
        self._known: dict[_Roles, int | None] = {}

    def first(self, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]], tools: Any) -> int | None:
        """Number of the first turn, not an assistant's, that has a text of which nothing is rendered; None if none is.

        Args:
            turns: of a row.
            messages: the same as the template gets them.
            tools: as the template gets them.
        """
        roles = (bool(tools), *((turn.role, bool(turn.content.strip()), *sorted(turn.extra)) for turn in turns))
        if roles in self._known:
            return self._known[roles]
        found = self._look(turns, messages, tools)
        if len(self._known) < _REMEMBERED:
            self._known[roles] = found
        return found

    def _look(self, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]], tools: Any) -> int | None:
        marks = {
            number: f"packtoolturn{number}end"
            for number, turn in enumerate(turns)
            if turn.role != "assistant" and turn.content.strip()
        }
        marked = [_with_text(message, marks.get(number)) for number, message in enumerate(messages)]
        try:
            rendered = self._render(marked, tools)
        except TemplateFailure:
            return None  # it looks into the texts; the row's own were rendered
        return next((number for number, mark in marks.items() if mark not in rendered), None)


def _with_text(message: Mapping[str, Any], text: str | None) -> Mapping[str, Any]:
    if text is None:
        return message
    return {**message, "content": text if isinstance(message["content"], str) else [{"type": "text", "text": text}]}
