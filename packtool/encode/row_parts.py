"""Rows that become several samples: turns of a model that thinks, and several accepted responses.

Chat templates of models that think leave out the thinking of earlier turns, since the model will not see it again. In
one sample these turns would be trained without their thinking. With ``--expand-turns`` each is trained in a sample of
its own, in which it comes last::

    row            u1 a1 u2 a2 u3 a3        capital: with its thinking, and trained
    samples        u1 A1
                   u1 a1 u2 A2
                   u1 a1 u2 a2 u3 A3

``auto`` makes a sample only of turns that a later sample renders differently: within a loop of tool calls most
templates keep the thinking, and there one sample trains all of them.

Responses share the turns before them. Turns of the assistant among these are trained once, with the first response.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from packtool.config.data import EncodeSpec, ExpandTurns
from packtool.constants import MEDIA_MARKS
from packtool.encode.encoded import EncodedRow, EncodedSample
from packtool.encode.loss_scale import EMPTY_THINKING, KEEP_EMPTY_THINK, parse_loss_scale
from packtool.encode.model_files import ModelFiles
from packtool.encode.targets import TurnFinder
from packtool.encode.template import REASONING_NAMES, ChatTemplate, TemplateFailure
from packtool.encode.tokenize import Piece
from packtool.rows.forms.columns import RowProblem
from packtool.rows.sample import Dropped, RowPart, Sample, Turn

_EMPTY = re.compile(rf"\A{EMPTY_THINKING}")
_QUESTION = {"role": "user", "content": "packtoolquestion"}
_ANSWER = {"role": "assistant", "content": "packtoolanswer"}


def expansion_of(requested: ExpandTurns, files: ModelFiles) -> ExpandTurns:
    """Resolve ``--expand-turns``: ``auto`` is ``false`` for templates that keep the thinking of earlier turns."""
    return "false" if requested == "auto" and not files.drops_thinking else requested


class RowParts:
    """Splits rows into samples.

    Args:
        spec: of the encoder; its ``expand_turns`` comes from ``expansion_of``.
        render: returns the pieces of a rendered sample; raises RowProblem if it cannot be rendered.
    """

    def __init__(
        self,
        spec: EncodeSpec,
        template: ChatTemplate | None,
        finder: TurnFinder | None,
        render: Callable[[Sample], list[Piece]],
    ) -> None:
        self._spec, self._template, self._finder, self._render = spec, template, finder, render

    def of(self, sample: Sample) -> list[Sample]:
        """Return the samples of a row, in the order of its turns and responses; the row itself if it is one sample."""
        if sample.is_text or (self._spec.expand_turns == "false" and not sample.responses):
            return [sample]
        answered = self._answered(sample) if sample.responses else [sample]
        if self._spec.expand_turns == "false":
            return answered
        return [part for each in answered for part in self._turns(each)]

    def _answered(self, sample: Sample) -> list[Sample]:
        """Return a sample for each response."""
        count, samples = len(sample.responses), []
        for number, response in enumerate(sample.responses, 1):
            turns, loss_scale = sample.turns, sample.loss_scale
            if number > 1:
                turns = _trained_only(turns, set())
                scale = parse_loss_scale(loss_scale or self._spec.loss_scale)
                if scale.base == "all":
                    loss_scale = "+".join(("default", *scale.rules))
            answer = tuple(_weighted(turn, response.weight) for turn in response.turns)
            part = RowPart(response=number, num_responses=count) if count > 1 else None
            samples.append(replace(sample, turns=(*turns, *answer), responses=(), part=part, loss_scale=loss_scale))
        return samples

    def _turns(self, sample: Sample) -> list[Sample]:
        """Return a sample for each turn that needs one."""
        answers = [number for number, turn in enumerate(sample.turns) if turn.role == "assistant"]
        scale = parse_loss_scale(sample.loss_scale or self._spec.loss_scale)
        by_scale = answers[-1:] if scale.base == "last_round" else answers
        trained = [number for number in answers if _is_trained(sample.turns[number], number in by_scale)]
        if scale.base == "all" or not trained or answers == [len(sample.turns) - 1]:
            return [sample]
        parts = {number: {number} for number in trained}
        if self._spec.expand_turns == "auto":
            if not any(self._may_lose_text(sample.turns[number]) for number in answers):
                return [sample]
            if len(trained) > 1:
                parts = self._distinct(sample, answers, trained, ignores_empty=KEEP_EMPTY_THINK not in scale.rules)
        if not parts or [*parts] == [len(sample.turns) - 1]:
            return [sample]
        if len(parts) == 1:
            return [_up_to(sample, *parts)]
        responses = sample.part or RowPart()
        return [
            replace(
                part := _up_to(sample, last),
                turns=_trained_only(part.turns, trained_here),
                part=replace(responses, turn=answers.index(last) + 1, num_turns=len(answers)),
            )
            for last, trained_here in parts.items()
        ]

    def _may_lose_text(self, turn: Turn) -> bool:
        """Return whether the template may leave out some text of a turn once another question follows.

        It spares most rows the rendering of each of their turns, whose cost is the square of their length.
        """
        assert self._template is not None, "without a template nothing is left out"
        if any(turn.extra.get(name) for name in REASONING_NAMES):
            return True
        try:
            rendered = self._template.render(
                [_QUESTION, {"role": turn.role, "content": turn.content}, _QUESTION, _ANSWER]
            )
        except TemplateFailure:
            return True
        return turn.content.strip() not in rendered

    def _distinct(
        self, sample: Sample, answers: Sequence[int], trained: Sequence[int], *, ignores_empty: bool
    ) -> dict[int, set[int]]:
        """Return the fewest samples that have every trained turn as the template writes it where it comes last.

        Args:
            ignores_empty: samples that differ by empty thinking blocks are equal.

        Returns:
            by the number of the turn that ends a sample, ascending, the numbers of the turns that it trains; nothing if
            the turns cannot be found.
        """
        assert self._finder is not None, "without a template nothing is expanded"
        parts: dict[int, set[int]] = {}
        longer: list[Piece] | None = None  # the pieces of the previous sample
        for number in reversed(trained):
            try:
                pieces = self._render(_up_to(sample, number))
            except RowProblem:
                return {}
            turns = self._finder.find(pieces)
            if len(turns) != answers.index(number) + 1:
                return {}
            text_pieces = list(pieces[: turns[-1].last])
            for turn in turns if ignores_empty else ():
                header, text = self._finder.header[-1][1], text_pieces[turn.first].text
                without_empty = header + _EMPTY.sub("", text[len(header) :])
                text_pieces[turn.first] = text_pieces[turn.first]._replace(text=without_empty)
            if longer is None or text_pieces != longer[: len(text_pieces)]:
                last, longer = number, text_pieces
                parts[last] = set()
            parts[last].add(number)
        return dict(reversed(parts.items()))


def joined(parts: Sequence[Sample], results: Sequence[list[EncodedSample] | Dropped]) -> list[EncodedSample] | Dropped:
    """Join the results of a row's parts: the row is dropped if all of them are."""
    if len(parts) == 1:
        return results[0]
    dropped = [(part, item) for part, item in zip(parts, results, strict=True) if isinstance(item, Dropped)]
    row = EncodedRow(sample for item in results if not isinstance(item, Dropped) for sample in item)
    if not row:
        first = dropped[0][1]
        detail = f"{parts[0].part}: {first.detail}; nothing is left of the other parts of the row either"
        return replace(first, detail=detail)
    row.left_out = tuple(replace(item, part=part.part) for part, item in dropped)
    return row


def _is_trained(turn: Turn, by_scale: bool) -> bool:
    return (by_scale if turn.loss is None else turn.loss) and turn.loss_scale != 0


def _weighted(turn: Turn, weight: float) -> Turn:
    if weight == 1 or turn.role != "assistant":
        return turn
    return replace(turn, loss_scale=weight * (1.0 if turn.loss_scale is None else turn.loss_scale))


def _trained_only(turns: Sequence[Turn], trained: set[int]) -> tuple[Turn, ...]:
    """Return the turns, with no loss for the assistant's turns that are not ``trained``."""
    return tuple(
        turn if turn.role != "assistant" or number in trained else replace(turn, loss=False)
        for number, turn in enumerate(turns)
    )


def _up_to(sample: Sample, last: int) -> Sample:
    """Return the sample up to and including a turn, with the media up to there."""
    turns = sample.turns[: last + 1]
    media: dict[str, Any] = {}
    for kind, mark in MEDIA_MARKS.items():
        if refs := getattr(sample, f"{kind}s"):
            media[f"{kind}s"] = refs[: sum(turn.content.count(mark) for turn in turns)]
    return replace(sample, turns=turns, **media)
