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
from collections.abc import Callable, Mapping, Sequence
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

    ``expand_turns`` of ``spec`` must be resolved by ``expansion_of``; ``template_of`` returns the template and the turn
    finder for a sample, or raises RowProblem if it cannot be rendered.
    """

    def __init__(
        self,
        spec: EncodeSpec,
        template_of: Callable[[Sample], tuple[ChatTemplate, TurnFinder]],
        render: Callable[[Sample], list[Chunk]],
    ) -> None:
        self._spec, self._template_of, self._render = spec, template_of, render

    def split(self, sample: Sample) -> list[Sample]:
        """Return the samples of a row, in the order of its turns and responses; often the row itself."""
        if sample.is_text or (self._spec.expand_turns == "false" and not sample.responses):
            return [sample]
        conversations = self._split_responses(sample) if sample.responses else [sample]
        if self._spec.expand_turns == "false":
            return conversations
        return [split for conversation in conversations for split in self._split_turns(conversation)]

    def _split_responses(self, sample: Sample) -> list[Sample]:
        """Return one sample for each response; only the first trains the turns before it."""
        num_responses, samples = len(sample.responses), []
        for number, response in enumerate(sample.responses, 1):
            turns, loss_scale = sample.turns, sample.loss_scale
            if number > 1:
                turns = _train_only(turns, set())
                scale = parse_loss_scale(loss_scale or self._spec.loss_scale)
                if scale.base == "all":  # it would train the turns before the response again
                    loss_scale = "+".join(("default", *scale.rules))
            answer = tuple(_multiply_loss_scale(turn, response.weight) for turn in response.turns)
            part = RowPart(response=number, num_responses=num_responses) if num_responses > 1 else None
            samples.append(replace(sample, turns=(*turns, *answer), responses=(), part=part, loss_scale=loss_scale))
        return samples

    def _split_turns(self, sample: Sample) -> list[Sample]:
        """Return beginnings of a conversation as samples that together train its turns, or the conversation itself."""
        last_turn = len(sample.turns) - 1
        answers = [index for index, turn in enumerate(sample.turns) if turn.role == "assistant"]
        scale = parse_loss_scale(sample.loss_scale or self._spec.loss_scale)
        trained = [
            index
            for index in answers
            if is_trained(sample.turns[index], scale, is_last=index == answers[-1])
            and sample.turns[index].loss_scale != 0
        ]
        if scale.base == "all" or not trained or answers == [last_turn]:
            return [sample]
        trained_by_end = {index: {index} for index in trained}
        if self._spec.expand_turns == "auto":
            trained_by_end = self._needed_samples(sample, answers, trained, scale)
        ends = list(trained_by_end)  # indexes of the turns that end a sample
        if not ends or ends == [last_turn]:
            return [sample]
        if len(ends) == 1:  # one sample trains all turns, but the conversation has more turns after them
            return [_conversation_until(sample, ends[0])]
        return _samples_by_end(sample, trained_by_end, answers)

    def _needed_samples(
        self, sample: Sample, answers: Sequence[int], trained: Sequence[int], scale: LossScale
    ) -> dict[int, set[int]]:
        """Return the samples that ``--expand-turns auto`` needs, as ``_group_turns``; none if one sample is enough."""
        try:
            template, finder = self._template_of(sample)
        except RowProblem:  # raised again when the sample is rendered, which drops it
            return {}
        if not any(_may_lose_text(template, sample.turns[index]) for index in answers):
            return {}
        if len(trained) == 1:
            return {index: {index} for index in trained}
        return self._group_turns(sample, finder, answers, trained, scale)

    def _group_turns(
        self, sample: Sample, finder: TurnFinder, answers: Sequence[int], trained: Sequence[int], scale: LossScale
    ) -> dict[int, set[int]]:
        """Group trained turns into the fewest samples in which each is rendered as at the end of a conversation.

        From the last turn backwards: a turn joins the sample after it if the conversation up to the turn is rendered as
        a prefix of that sample. Empty thinking blocks make no difference, unless ``scale`` trains them.

        Args:
            answers, trained: indexes of the assistant's turns, and of those that are trained; ascending.

        Returns:
            by the index of the turn that ends a sample, ascending: the indexes of the turns that the sample trains.
            Empty if the turns cannot be found in the rendered text.
        """
        trained_by_end: dict[int, set[int]] = {}
        end = -1  # index of the turn that ends the newest sample
        sample_chunks: list[Chunk] = []  # the newest sample, rendered
        for index in reversed(trained):
            try:
                chunks = self._render(_conversation_until(sample, index))
            except RowProblem:
                return {}
            turns = finder.find(chunks)
            num_answers = answers.index(index) + 1  # up to this turn
            if len(turns) != num_answers:
                return {}
            chunks = chunks[: turns[-1].last]  # without the token that ends the turn, which may differ after the last
            if KEEP_EMPTY_THINK not in scale.rules:
                chunks = _without_empty_thinking(chunks, turns, header_text=finder.header[-1].text)
            is_prefix = chunks == sample_chunks[: len(chunks)]
            if not trained_by_end or not is_prefix:
                end, sample_chunks = index, chunks
                trained_by_end[end] = set()
            trained_by_end[end].add(index)
        return dict(reversed(trained_by_end.items()))


def _samples_by_end(sample: Sample, trained_by_end: Mapping[int, set[int]], answers: Sequence[int]) -> list[Sample]:
    """Return one sample for each index of a turn that ends one, which trains the turns with these indexes."""
    samples = []
    response_part = sample.part or RowPart()
    for end, trained_turns in trained_by_end.items():
        conversation = _conversation_until(sample, end)
        turns = _train_only(conversation.turns, trained_turns)
        part = replace(response_part, turn=answers.index(end) + 1, num_turns=len(answers))
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
    """Join the results of encoding the samples of a row; the row is dropped if all of its samples are."""
    if len(samples) == 1:
        return results[0]
    row = EncodedRow()
    dropped: list[Dropped] = []
    for sample, result in zip(samples, results, strict=True):
        if isinstance(result, Dropped):
            dropped.append(replace(result, part=sample.part))
        else:
            row += result
    first_result = results[0]
    if isinstance(first_result, Dropped) and len(dropped) == len(samples):
        detail = f"{samples[0].part}: {first_result.detail}; all other samples of the row are dropped, too"
        return replace(first_result, detail=detail)
    row.left_out = tuple(dropped)
    return row


def _may_lose_text(template: ChatTemplate, turn: Turn) -> bool:
    """Return whether the template may remove text of a turn once another question follows.

    A cheap check on one turn: rendering each turn of a row costs time quadratic in the row's length.
    """
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
