"""Split rows into several samples: turns with thinking, and several accepted responses.

Chat templates of reasoning models remove the thinking of earlier turns. With ``--expand-turns`` each turn is trained in
a sample of its own, as the last one. Capital: rendered with its thinking, and trained::

    row            u1 a1 u2 a2 u3 a3        samples        u1 A1
                                                           u1 a1 u2 A2
                                                           u1 a1 u2 a2 u3 A3

``auto`` does so only for turns that a later sample renders differently; one sample trains all turns of a loop of tool
calls. Each response becomes a sample with the same turns before it; these are trained once, with the first response.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from packtool.config.data import EncodeSpec, ExpandTurns
from packtool.constants import MEDIA_MARKS
from packtool.encode.encoded import EncodedRow, EncodedSample
from packtool.encode.loss_scale import EMPTY_THINKING, KEEP_EMPTY_THINK, LossScale, parse_loss_scale
from packtool.encode.model_files import ModelFiles
from packtool.encode.targets import TurnChunks, TurnFinder, is_trained
from packtool.encode.template import REASONING_NAMES, ChatTemplate, TemplateFailure
from packtool.encode.tokenize import Chunk
from packtool.rows.forms.columns import RowProblem
from packtool.rows.sample import Dropped, RowPart, Sample, Turn

_EMPTY_THINKING = re.compile(rf"\A{EMPTY_THINKING}")
_QUESTION = {"role": "user", "content": "packtoolquestion"}
_ANSWER = {"role": "assistant", "content": "packtoolanswer"}


def expansion_of(requested: ExpandTurns, files: ModelFiles) -> ExpandTurns:
    """Resolve ``--expand-turns``: ``auto`` becomes ``false`` if the template keeps the thinking of earlier turns."""
    return "false" if requested == "auto" and not files.drops_thinking else requested


class RowSplitter:
    """Splits rows into samples.

    Args:
        spec: its ``loss_scale`` is that of samples without one of their own.
        template_of: returns the template and the turn finder for a sample, or raises RowProblem.
        render: renders a conversation, or raises RowProblem.
    """

    def __init__(
        self,
        spec: EncodeSpec,
        files: ModelFiles,
        template_of: Callable[[Sample], tuple[ChatTemplate, TurnFinder]],
        render: Callable[[Sample], list[Chunk]],
    ) -> None:
        self._expand_turns, self._loss_scale = expansion_of(spec.expand_turns, files), spec.loss_scale
        self._template_of, self._render = template_of, render

    def split(self, sample: Sample) -> list[Sample]:
        """Return the samples of a row, in the order of its turns and responses; often the row itself."""
        if sample.is_text or (self._expand_turns == "false" and not sample.responses):
            return [sample]
        conversations = self._split_responses(sample) if sample.responses else [sample]
        if self._expand_turns == "false":
            return conversations
        return [split for conversation in conversations for split in self._split_turns(conversation)]

    def _split_responses(self, sample: Sample) -> list[Sample]:
        """Return one sample for each response; only the first trains the turns before it."""
        num_responses, samples = len(sample.responses), []
        for number, response in enumerate(sample.responses, 1):
            turns, loss_scale = sample.turns, sample.loss_scale
            if number > 1:
                turns = _train_only(turns, set())
                scale = parse_loss_scale(loss_scale or self._loss_scale)
                if scale.base == "all":  # it would train the turns before the response again
                    loss_scale = "+".join(("default", *scale.rules))
            answer = tuple(_multiply_loss_scale(turn, response.weight) for turn in response.turns)
            part = RowPart(response=number, num_responses=num_responses) if num_responses > 1 else None
            samples.append(replace(sample, turns=(*turns, *answer), responses=(), part=part, loss_scale=loss_scale))
        return samples

    def _split_turns(self, sample: Sample) -> list[Sample]:
        """Split a conversation into samples that together train its turns; a sample ends with a turn that it trains."""
        scale = parse_loss_scale(sample.loss_scale or self._loss_scale)
        trained = _trained_turns(sample, scale)
        last_turn = len(sample.turns) - 1
        if scale.base == "all" or not trained or trained == [last_turn]:
            return [sample]
        groups = [[index] for index in trained]  # the turns that each sample trains
        if self._expand_turns == "auto":
            groups = self._needed_groups(sample, trained, scale)
        if not groups or groups[0][-1] == last_turn:  # one sample with all turns is enough
            return [sample]
        if len(groups) == 1:
            last_trained = groups[0][-1]
            return [_conversation_until(sample, last_trained)]
        return _split_into_groups(sample, groups)

    def _needed_groups(self, sample: Sample, trained: Sequence[int], scale: LossScale) -> list[list[int]]:
        """Group trained turns into the samples that ``--expand-turns auto`` needs; [] if one sample is enough."""
        try:
            template, finder = self._template_of(sample)
        except RowProblem:  # raised again when the sample is rendered, which drops it
            return []
        if not any(_may_lose_text(template, turn) for turn in sample.turns if turn.role == "assistant"):
            return []
        if len(trained) == 1:
            return [list(trained)]
        return self._group_turns(sample, trained, finder, scale)

    def _group_turns(
        self, sample: Sample, trained: Sequence[int], finder: TurnFinder, scale: LossScale
    ) -> list[list[int]]:
        """Group trained turns, given by index, into the fewest samples that train each turn with its thinking.

        A turn joins the group of the next one if the conversation up to the turn is a prefix of that group's rendered
        sample. Return [] if the turns are not found in the rendered conversation.
        """
        groups: list[list[int]] = []
        sample_chunks: list[Chunk] = []  # the rendered sample of groups[0]
        for index in reversed(trained):
            chunks = self._render_until(sample, index, finder, scale)
            if chunks is None:
                return []
            is_prefix = chunks == sample_chunks[: len(chunks)]
            if groups and is_prefix:
                groups[0].insert(0, index)
            else:
                groups.insert(0, [index])
                sample_chunks = chunks
        return groups

    def _render_until(self, sample: Sample, end: int, finder: TurnFinder, scale: LossScale) -> list[Chunk] | None:
        """Render a conversation up to the answer with index ``end``; None if not all of its answers are found."""
        conversation = _conversation_until(sample, end)
        try:
            chunks = self._render(conversation)
        except RowProblem:
            return None
        turns = finder.find(chunks)
        num_answers = [turn.role for turn in conversation.turns].count("assistant")
        if len(turns) != num_answers:
            return None
        chunks = chunks[: turns[-1].last]  # without the token that ends the answer, which may differ in later turns
        trains_empty_thinking = KEEP_EMPTY_THINK in scale.rules
        if trains_empty_thinking:
            return chunks
        return _without_empty_thinking(chunks, turns, header_text=finder.header[-1].text)


def _answers(sample: Sample) -> list[int]:
    """Return the indexes of the assistant's turns."""
    return [index for index, turn in enumerate(sample.turns) if turn.role == "assistant"]


def _trained_turns(sample: Sample, scale: LossScale) -> list[int]:
    """Return the indexes of the assistant's turns that are trained with a weight above 0."""
    answers = _answers(sample)
    trained = [index for index in answers if is_trained(sample.turns[index], scale, is_last=index == answers[-1])]
    return [index for index in trained if sample.turns[index].loss_scale != 0]


def _split_into_groups(sample: Sample, groups: Sequence[Sequence[int]]) -> list[Sample]:
    """Return one sample for each group of turns (indexes), which trains them and ends with the last of them."""
    samples = []
    answers = _answers(sample)
    response_part = sample.part or RowPart()
    for group in groups:
        conversation = _conversation_until(sample, group[-1])
        turns = _train_only(conversation.turns, set(group))
        part = replace(response_part, turn=answers.index(group[-1]) + 1, num_turns=len(answers))
        samples.append(replace(conversation, turns=turns, part=part))
    return samples


def _without_empty_thinking(chunks: Sequence[Chunk], turns: Sequence[TurnChunks], header_text: str) -> list[Chunk]:
    """Return chunks without empty thinking blocks at the beginning of answers, which follow ``header_text``."""
    shortened = list(chunks)
    for turn in turns:
        first_chunk = chunks[turn.first]
        answer = _EMPTY_THINKING.sub("", first_chunk.text[len(header_text) :])
        shortened[turn.first] = first_chunk._replace(text=header_text + answer)
    return shortened


def join_results(
    samples: Sequence[Sample], results: Sequence[list[EncodedSample] | Dropped]
) -> list[EncodedSample] | Dropped:
    """Join the results of encoding the samples of one row: its turns or responses that are trained separately.

    Some may be dropped: the ``EncodedRow`` lists them in ``left_out``. If all are, the row is dropped.
    """
    if len(samples) == 1:
        return results[0]
    row = EncodedRow()
    dropped: list[Dropped] = []
    for sample, result in zip(samples, results, strict=True):
        if isinstance(result, Dropped):
            dropped.append(replace(result, part=sample.part))
        else:
            row.extend(result)
    if len(dropped) == len(samples):
        first = dropped[0]
        detail = f"{first.part}: {first.detail}; all other samples of the row are dropped, too"
        return replace(first, detail=detail, part=None)
    row.left_out = tuple(dropped)
    return row


def _may_lose_text(template: ChatTemplate, turn: Turn) -> bool:
    """Return whether the template may remove text of a turn once another question follows; renders this turn alone."""
    if any(turn.extra.get(name) for name in REASONING_NAMES):
        return True
    try:
        rendered = template.render([_QUESTION, {"role": turn.role, "content": turn.content}, _QUESTION, _ANSWER])
    except TemplateFailure:
        return True
    return turn.content.strip() not in rendered


def _multiply_loss_scale(turn: Turn, weight: float) -> Turn:
    if weight == 1 or turn.role != "assistant":
        return turn
    return replace(turn, loss_scale=weight * (1.0 if turn.loss_scale is None else turn.loss_scale))


def _train_only(turns: Sequence[Turn], trained: set[int]) -> tuple[Turn, ...]:
    """Return the turns, without loss for the assistant's turns whose index is not in ``trained``."""
    return tuple(
        turn if turn.role != "assistant" or index in trained else replace(turn, loss=False)
        for index, turn in enumerate(turns)
    )


def _conversation_until(sample: Sample, end: int) -> Sample:
    """Return the sample up to and including the turn with index ``end``, with the media of these turns."""
    turns = sample.turns[: end + 1]
    media: dict[str, Any] = {}
    for kind, mark in MEDIA_MARKS.items():
        if refs := getattr(sample, f"{kind}s"):
            num_marks = sum(turn.content.count(mark) for turn in turns)
            media[f"{kind}s"] = refs[:num_marks]
    return replace(sample, turns=turns, **media)
