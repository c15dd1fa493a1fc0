"""Several accepted answers to one prompt: ``responses``, and what each of them weighs.

They are read where the row has no answer of its own. All of them are trained, so a response that is to be avoided has
no place among them, or the weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packtool.rows.forms.columns import Fields, RowProblem, finite, shown
from packtool.rows.forms.media import Found
from packtool.rows.forms.messages import MOST_LOSS_SCALE, content_of, turns_of
from packtool.rows.sample import Response, Turn
from packtool.rows.source import Source


def responses_of(fields: Fields, turns: Sequence[Turn], source: Source) -> tuple[Response, ...]:
    """The responses of a row whose turns have no answer at their end; none if it has none.

    Raises:
        RowProblem: if one cannot be read, or weights are not one for each.
    """
    if (turns and turns[-1].role == "assistant") or fields.get("responses") is None:
        return ()
    given = fields.parsed("responses")
    if not _is_list(given) or not given:
        raise RowProblem("invalid_row", f"'responses' is {shown(given)}, not a list of one or more answers")
    weights = _weights(fields, len(given))
    said = [_said(f"response {number}", value, source) for number, value in enumerate(given)]
    kept = tuple(Response(tuple(turns), weight) for turns, weight in zip(said, weights, strict=True) if weight)
    if not kept:
        raise RowProblem("invalid_row", "all of its responses weigh 0")
    return kept


def _said(who: str, value: Any, source: Source) -> list[Turn]:
    """A text, a message, or a list of messages, which begins and ends with one of the assistant."""
    if isinstance(value, Mapping):
        value = [value]
    found = Found(source)
    if _is_list(value) and value and isinstance(value[0], Mapping) and "type" not in value[0]:
        turns = turns_of(value, found)
    else:
        turns = [Turn("assistant", content_of(who, value, found).text)]
    if turns[0].role != "assistant" or turns[-1].role != "assistant":
        raise RowProblem("role_order", f"{who} does not begin and end with a turn of the assistant")
    if found.refs or found.num_open:
        raise RowProblem("invalid_media", f"{who} holds a medium; only what comes before responses may")
    return turns


def _weights(fields: Fields, count: int) -> list[float]:
    given = fields.parsed("response_weights")
    if given is None:
        return [1.0] * count
    if not _is_list(given) or len(given) != count:
        raise RowProblem("invalid_row", f"{count} responses and {shown(given)} as their weights: give one for each")
    weights = []
    for value in given:
        number = finite(value)
        if number is None or not 0 <= number <= MOST_LOSS_SCALE:
            detail = f"a response weighs {shown(value)}; it must be a number from 0 to {MOST_LOSS_SCALE:,}"
            raise RowProblem("invalid_row", detail)
        weights.append(number)
    return weights


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
