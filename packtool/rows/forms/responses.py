"""Several accepted answers to one prompt (``responses``) and their weights.

They are read if the row has no answer of its own. All of them are trained, so a rejected response must be left out or
have the weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packtool.rows.forms.columns import Fields, RowProblem, finite, is_list, shown
from packtool.rows.forms.media import InlineMedia
from packtool.rows.forms.messages import MAX_LOSS_SCALE, content_of, turns_of
from packtool.rows.sample import Response, Turn
from packtool.rows.source import Source


def responses_of(fields: Fields, turns: Sequence[Turn], source: Source) -> tuple[Response, ...]:
    """Read the responses of a row whose turns end without an answer; none if it has none."""
    if (turns and turns[-1].role == "assistant") or fields.get("responses") is None:
        return ()
    values = fields.parsed("responses")
    if not is_list(values) or not values:
        raise RowProblem("invalid_row", f"'responses' is {shown(values)}, not a list of one or more answers")
    weights = _weights(fields, len(values))
    answers = [_turns(f"response {number}", value, source) for number, value in enumerate(values)]
    kept = tuple(Response(tuple(turns), weight) for turns, weight in zip(answers, weights, strict=True) if weight)
    if not kept:
        raise RowProblem("invalid_row", "all of its responses weigh 0")
    return kept


def _turns(who: str, value: Any, source: Source) -> list[Turn]:
    """Read a text, a message, or a list of messages that begins and ends with one of the assistant."""
    if isinstance(value, Mapping):
        value = [value]
    inline = InlineMedia(source)
    if is_list(value) and value and isinstance(value[0], Mapping) and "type" not in value[0]:
        turns = turns_of(value, inline)
    else:
        turns = [Turn("assistant", content_of(who, value, inline).text)]
    if turns[0].role != "assistant" or turns[-1].role != "assistant":
        raise RowProblem("role_order", f"{who} does not begin and end with a turn of the assistant")
    if inline.refs or inline.num_open:
        raise RowProblem("invalid_media", f"{who} holds a medium; only what comes before responses may")
    return turns


def _weights(fields: Fields, count: int) -> list[float]:
    values = fields.parsed("response_weights")
    if values is None:
        return [1.0] * count
    if not is_list(values) or len(values) != count:
        raise RowProblem("invalid_row", f"{count} responses and {shown(values)} as their weights: give one for each")
    weights = []
    for value in values:
        number = finite(value)
        if number is None or not 0 <= number <= MAX_LOSS_SCALE:
            detail = f"a response weighs {shown(value)}; it must be a number from 0 to {MAX_LOSS_SCALE:,}"
            raise RowProblem("invalid_row", detail)
        weights.append(number)
    return weights
