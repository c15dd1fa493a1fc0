"""Rows that become several samples: turns of a model that thinks, and several accepted responses.

Chat templates of models that think leave out what earlier turns thought, since the model will not see it again. In one
sample these turns would be trained without their thinking. With ``--expand-turns`` each is trained in a sample of its
own, in which it comes last::

    row            u1 a1 u2 a2 u3 a3        capital: with its thinking, and trained
    samples        u1 A1
                   u1 a1 u2 A2
                   u1 a1 u2 a2 u3 A3

``auto`` makes a sample only of turns that a later sample does not have as they are said: within a loop of tool calls
most templates keep the thinking, and there one sample trains all of them.

Responses share what they answer. Turns of the assistant before them are trained once, with the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from packtool.config.data import EncodeSpec, ExpandTurns
from packtool.constants import MEDIA_MARKS
from packtool.encode.control import Piece
from packtool.encode.encoded import EncodedRow, EncodedSample
from packtool.encode.loss_scale import EMPTY_THINKING, KEEP_EMPTY_THINK, parse_loss_scale
from packtool.encode.model_files import ModelFiles
from packtool.encode.targets import TurnFinder
from packtool.encode.template import REASONING_NAMES, ChatTemplate, TemplateFailure
from packtool.errors import ConfigError
from packtool.rows.sample import Dropped, RowPart, Sample, Turn

_EMPTY = re.compile(rf"\A{EMPTY_THINKING}")
_QUESTION = {"role": "user", "content": "packtoolquestion"}
_ANSWER = {"role": "assistant", "content": "packtoolanswer"}
_THOUGHT = "packtoolthought"
_THINKING = (
    {**_ANSWER, "reasoning_content": _THOUGHT},
    {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\npacktoolanswer"},
)


def expansion_of(asked: ExpandTurns, files: ModelFiles) -> ExpandTurns:
    """What ``--expand-turns`` comes to: ``auto`` is ``false`` for templates that keep what earlier turns thought."""
    if asked != "auto":
        return asked
    variables = tuple(files.template_variables.items())
    return "auto" if files.chat_template and _drops(files.chat_template, variables) else "false"


@lru_cache(maxsize=8)
def _drops(text: str, variables: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes a thought in the last turn and leaves it out once another question follows."""
    for as_list in (False, True):
        for thinking in _THINKING:
            try:
                template = ChatTemplate(text, dict(variables), content_as_list=as_list)
                short, long = (template.render([_QUESTION, thinking, *rest]) for rest in ([], [_QUESTION, thinking]))
            except (TemplateFailure, ConfigError):
                continue  # what is wrong with the template is told where it is used
            if long.count(_THOUGHT) < 2 * short.count(_THOUGHT):
                return True
    return False


@dataclass
class _Leaf:
    """A sample to be.

    Args:
        last: number of the turn that it ends with.
        told: its pieces up to the end of that turn, without empty thinking blocks.
        trained: numbers of the turns that it trains.
    """

    last: int
    told: list[Piece] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)


class RowParts:
    """Says what samples a row becomes.

    Args:
        spec: of the encoder; its ``expand_turns`` is what ``expansion_of`` says.
        template: None if there is none.
        finder: of the template's turns.
        cut: a sample rendered, in pieces; None if it cannot be.
    """

    def __init__(
        self,
        spec: EncodeSpec,
        template: ChatTemplate | None,
        finder: TurnFinder | None,
        cut: Callable[[Sample], list[Piece] | None],
    ) -> None:
        self._spec, self._template, self._finder, self._cut = spec, template, finder, cut

    def of(self, sample: Sample) -> list[Sample]:
        """The samples of a row, in the order of its turns and responses; the row itself where it is one sample."""
        if sample.is_text or (self._spec.expand_turns == "false" and not sample.responses):
            return [sample]
        answered = self._answered(sample) if sample.responses else [sample]
        if self._spec.expand_turns == "false":
            return answered
        return [part for each in answered for part in self._turns(each)]

    def _answered(self, sample: Sample) -> list[Sample]:
        """A sample for each response."""
        count, found = len(sample.responses), []
        for number, response in enumerate(sample.responses, 1):
            turns, asked = sample.turns, sample.loss_scale
            if number > 1:
                turns = _as_context(turns, set())
                scale = parse_loss_scale(asked or self._spec.loss_scale)
                if scale.base == "all":
                    asked = "+".join(("default", *scale.rules))
            said = tuple(_weighted(turn, response.weight) for turn in response.turns)
            part = RowPart(response=number, num_responses=count) if count > 1 else None
            found.append(replace(sample, turns=(*turns, *said), responses=(), part=part, loss_scale=asked))
        return found

    def _turns(self, sample: Sample) -> list[Sample]:
        """A sample for each turn that needs one."""
        said = [number for number, turn in enumerate(sample.turns) if turn.role == "assistant"]
        scale = parse_loss_scale(sample.loss_scale or self._spec.loss_scale)
        last = said[-1:] if scale.base == "last_round" else said
        trained = [number for number in said if _is_trained(sample.turns[number], number in last)]
        if scale.base == "all" or not trained or said == [len(sample.turns) - 1]:
            return [sample]
        leaves = [_Leaf(number, trained={number}) for number in trained]
        if self._spec.expand_turns == "auto":
            if not any(self._may_lose(sample.turns[number]) for number in said):
                return [sample]
            if len(trained) > 1:
                leaves = self._told_apart(sample, said, trained, ignores_empty=KEEP_EMPTY_THINK not in scale.rules)
        if not leaves or (len(leaves) == 1 and leaves[0].last == len(sample.turns) - 1):
            return [sample]
        if len(leaves) == 1:
            return [_up_to(sample, leaves[0].last)]
        responses = sample.part or RowPart()
        return [
            replace(
                part := _up_to(sample, leaf.last),
                turns=_as_context(part.turns, leaf.trained),
                part=replace(responses, turn=said.index(leaf.last) + 1, num_turns=len(said)),
            )
            for leaf in leaves
        ]

    def _may_lose(self, turn: Turn) -> bool:
        """Whether the template may leave out some of what a turn says once another question follows.

        It spares most rows the rendering of each of their turns, whose price is the square of their length.
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

    def _told_apart(
        self, sample: Sample, said: Sequence[int], trained: Sequence[int], *, ignores_empty: bool
    ) -> list[_Leaf]:
        """The fewest samples that have every trained turn as the template writes it where it comes last.

        Args:
            ignores_empty: an empty thinking block more or less makes no difference.

        Returns:
            none if nobody can tell: the row is one sample.
        """
        assert self._finder is not None, "without a template nothing is expanded"
        leaves: list[_Leaf] = []
        for number in reversed(trained):
            pieces = self._cut(_up_to(sample, number))
            turns = self._finder.find(pieces) if pieces is not None else []
            if pieces is None or len(turns) != said.index(number) + 1:
                return []
            told = list(pieces[: turns[-1].last])
            for turn in turns if ignores_empty else ():
                header, text = self._finder.header[-1][1], told[turn.first].text
                told[turn.first] = told[turn.first]._replace(text=header + _EMPTY.sub("", text[len(header) :]))
            if not leaves or told != leaves[-1].told[: len(told)]:
                leaves.append(_Leaf(number, told))
            leaves[-1].trained.add(number)
        return leaves[::-1]


def joined(parts: Sequence[Sample], results: Sequence[list[EncodedSample] | Dropped]) -> list[EncodedSample] | Dropped:
    """What became of a row, of what became of its parts: it is dropped if all of them are."""
    if len(parts) == 1:
        return results[0]
    lost = [(part, item) for part, item in zip(parts, results, strict=True) if isinstance(item, Dropped)]
    row = EncodedRow(sample for item in results if not isinstance(item, Dropped) for sample in item)
    if not row:
        first = lost[0][1]
        detail = f"{parts[0].part}: {first.detail}; nothing is left of the other parts of the row either"
        return replace(first, detail=detail)
    row.left_out = tuple(replace(item, part=part.part) for part, item in lost)
    return row


def _is_trained(turn: Turn, by_scale: bool) -> bool:
    return (by_scale if turn.loss is None else turn.loss) and turn.loss_scale != 0


def _weighted(turn: Turn, weight: float) -> Turn:
    if weight == 1 or turn.role != "assistant":
        return turn
    return replace(turn, loss_scale=weight * (1.0 if turn.loss_scale is None else turn.loss_scale))


def _as_context(turns: Sequence[Turn], trained: set[int]) -> tuple[Turn, ...]:
    """The turns, of which only some are trained."""
    return tuple(
        turn if turn.role != "assistant" or number in trained else replace(turn, loss=False)
        for number, turn in enumerate(turns)
    )


def _up_to(sample: Sample, last: int) -> Sample:
    """The sample up to and including a turn, with the media that it has till there."""
    turns = sample.turns[: last + 1]
    media: dict[str, Any] = {}
    for kind, mark in MEDIA_MARKS.items():
        if refs := getattr(sample, f"{kind}s"):
            media[f"{kind}s"] = refs[: sum(turn.content.count(mark) for turn in turns)]
    return replace(sample, turns=turns, **media)
