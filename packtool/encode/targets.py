"""Find the target tokens: the assistant's turns with their end-of-turn token.

A turn's targets are the tokens that the model generates: from the end of the *generation prompt* through the token that
ends the turn. Turns are found by the control tokens that the template wrote. This works for templates that rewrite
earlier turns (Qwen3 removes their ``<think>`` blocks), and needs no ``{% generation %}`` tags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample, IntArray
from packtool.encode.families import family_of, pad_ids_of, thinker_of
from packtool.encode.loss_scale import Base, LossScale
from packtool.encode.media_spans import ExpandedChunks, JoinedTokens, common_prefix_length
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.encode.tokenize import Chunk, ControlEscaper, ControlVocabulary
from packtool.errors import ConfigError
from packtool.rows.sample import Sample, Turn

_QUESTION = "packtoolquestion"
_ANSWERS = ("packtoolanswer", "packtoolreply")
_PROBE = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWERS[0]},
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWERS[1]},
]


class _ProbeAnswer(NamedTuple):
    """An answer in a rendered probe conversation: the index of its chunk, and the control token after the chunk."""

    chunks: list[Chunk]
    answer: str
    chunk_index: int
    next_control: str

    @property
    def chunk(self) -> Chunk:
        return self.chunks[self.chunk_index]


class TurnChunks(NamedTuple):
    """One assistant turn in a rendered conversation.

    Args:
        first: index of the chunk whose text begins with ``header``; targets start after the header.
        header: text that the generation prompt already contains.
        last: index of the chunk whose control token ends the turn and is its last target; ``len(chunks)`` if the
            conversation ends without such a token.
    """

    first: int
    header: str
    last: int


@dataclass(frozen=True)
class TurnFinder:
    """Finds the assistant's turns in conversations rendered by one template.

    Args:
        header: the chunks that open an assistant turn; the text of the last one may continue.
        prompt_rest: text of the generation prompt after the header (``<think>\\n`` for thinking models).
        ends: control tokens that end a turn; the last turn of a conversation may have another than earlier ones.
        tail: control tokens that always directly follow an end, and belong to the turn.
    """

    header: tuple[Chunk, ...]
    prompt_rest: str
    ends: frozenset[str]
    tail: tuple[str, ...]

    @classmethod
    def infer(cls, template: ChatTemplate, vocabulary: ControlVocabulary) -> TurnFinder:
        """Infer how a chat template marks the assistant's turns, from short conversations that it renders.

        The conversations have one or two answers with known texts. The finder must find exactly these. ConfigError if
        it does not, as with a template that writes no control tokens.
        """
        escaper = ControlEscaper(vocabulary, strings=())  # used only to split: probes have nothing to escape
        question, question_and_prompt, one_turn, two_turns = _render_probes(template, escaper)
        only_answer = _find_answer(one_turn, _ANSWERS[0])
        first_answer = _find_answer(two_turns, _ANSWERS[0])
        second_answer = _find_answer(two_turns, _ANSWERS[1])
        answers = (only_answer, first_answer, second_answer)

        prompt = _prompt_chunks(question, question_and_prompt)  # the generation prompt after a question
        header = _infer_header(prompt, answers)
        ends = frozenset(answer.next_control for answer in answers)
        ends |= _end_before_tool_message(template, escaper, ends, question)
        tail: tuple[str, ...] = ()
        if len(ends) == 1:  # otherwise the control tokens after an end depend on the end
            tail = _common_tail(only_answer, first_answer)
        finder = cls(header, _prompt_rest(prompt, header), ends, tail)

        finds_one = finder._finds(one_turn, _ANSWERS[:1])
        if not (finds_one and finder._finds(two_turns, _ANSWERS)):
            raise _no_control_tokens()
        return finder

    def _finds(self, chunks: Sequence[Chunk], answers: Sequence[str]) -> bool:
        """Return whether the turns found in a probe conversation are its answers, without a question."""
        texts = ["".join(chunk.text for chunk in chunks[turn.first : turn.last]) for turn in self.find(chunks)]
        if len(texts) != len(answers) or any(_QUESTION in text for text in texts):
            return False
        return all(answer in text for answer, text in zip(answers, texts, strict=True))

    def find(self, chunks: Sequence[Chunk]) -> list[TurnChunks]:
        """Return the assistant's turns of a conversation, in order; turns that the next one interrupts are left out."""
        turns = []
        i, header_length = 0, len(self.header)
        opening_token, header_text = self.header[0].control, self.header[-1].text
        while i + header_length <= len(chunks):
            if chunks[i].control != opening_token or not self._is_header(chunks[i : i + header_length]):
                i += 1
                continue
            first = i + header_length - 1  # the header's last chunk contains the beginning of the answer
            prompt_text = header_text + self.prompt_rest
            header = prompt_text if chunks[first].text.startswith(prompt_text) else header_text
            last = self._find_end(chunks, first)
            if last is not None:
                turns.append(TurnChunks(first, header, last))
            i = first + 1 if last is None else last
        return turns

    def _find_end(self, chunks: Sequence[Chunk], first: int) -> int | None:
        """Return ``last`` of the turn whose answer begins in chunk ``first``; None if the next turn interrupts it."""
        opening_token = self.header[0].control
        for i in range(first + 1, len(chunks)):
            if chunks[i].control in self.ends:
                next_controls = _controls_after(chunks, i)[: len(self.tail)]
                return i + len(self.tail) if tuple(next_controls) == self.tail else i
            if chunks[i].control == opening_token:
                # The next turn begins: this one ended with another token (a tool call's <|eom_id|>), or with none.
                return i - 1 if i - 1 > first and not chunks[i - 1].text.strip() else None
        return len(chunks)

    def _is_header(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether the chunks are the header's; the text of the last one may continue."""
        *exact_chunks, last_of_header = self.header
        *first_chunks, last_chunk = chunks
        is_last = last_chunk.control == last_of_header.control and last_chunk.text.startswith(last_of_header.text)
        return is_last and first_chunks == exact_chunks


def infer_turn_finder(
    template: ChatTemplate, tokenizer: Tokenizer, media_tokens: Sequence[str]
) -> tuple[ControlVocabulary, TurnFinder]:
    """Return a model's control tokens, and the turn finder that uses them."""
    vocabulary = ControlVocabulary(tokenizer, media_tokens)
    try:
        return vocabulary, TurnFinder.infer(template, vocabulary)
    except ConfigError:  # DeepSeek's role tokens are not marked as special
        role_tokens = _added_role_tokens(template, tokenizer)
        if set(role_tokens) <= vocabulary.ids.keys():  # all were tried already
            raise
    vocabulary = ControlVocabulary(tokenizer, [*media_tokens, *role_tokens])
    return vocabulary, TurnFinder.infer(template, vocabulary)


def _added_role_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens that open the user's turn or the generation prompt; empty if the template fails."""
    try:
        question = template.render(_PROBE[:1])
        prompt = template.render(_PROBE[:1], add_generation_prompt=True).removeprefix(question).lstrip()
    except TemplateFailure:
        return []
    question_header = question.partition(_QUESTION)[0].rstrip()
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return [token for token in added if question_header.endswith(token) or prompt.startswith(token)]


def _render_probes(template: ChatTemplate, escaper: ControlEscaper) -> list[list[Chunk]]:
    """Return the chunks of a question, the question with a generation prompt, one answered question, and two."""
    try:
        texts = [
            template.render(_PROBE[:1]),
            template.render(_PROBE[:1], add_generation_prompt=True),
            template.render(_PROBE[:2]),
            template.render(_PROBE),
        ]
    except TemplateFailure as error:
        raise ConfigError(f"the chat template does not render a question and its answer: {error}") from error
    return [escaper.split(text) for text in texts]


def _infer_header(prompt: list[Chunk], answers: Sequence[_ProbeAnswer]) -> tuple[Chunk, ...]:
    """Return the chunks with which the generation prompt and all answered turns begin; ConfigError without any."""
    # Without a generation prompt, the answer's chunk begins with a header, or the token that ends the question.
    opening = prompt or [answers[0].chunk]
    if not all(chunk.control for chunk in opening):
        raise _no_control_tokens()
    header = opening
    for answer in answers:
        header = _common_chunks(header, _chunks_before_answer(answer, opening_token=opening[0].control))
    includes_question = any(_QUESTION in chunk.text for chunk in header)
    if not header or includes_question:
        raise _no_control_tokens()
    return tuple(header)


def _prompt_rest(prompt: Sequence[Chunk], header: Sequence[Chunk]) -> str:
    """Return the generation prompt's text after the header; "" without a prompt, or if control tokens follow."""
    return prompt[-1].text.removeprefix(header[-1].text) if len(prompt) == len(header) else ""


def _chunks_before_answer(answer: _ProbeAnswer, opening_token: str) -> list[Chunk]:
    """Return the chunks of an answer's turn up to the answer, whose own chunk ends before it."""
    start = answer.chunk_index  # unless an opening token comes before
    for index, chunk in enumerate(answer.chunks[: answer.chunk_index + 1]):
        if chunk.control == opening_token:
            start = index
    text_before_answer = answer.chunk.text.partition(answer.answer)[0]
    return [*answer.chunks[start : answer.chunk_index], answer.chunk._replace(text=text_before_answer)]


def _common_tail(last_answer: _ProbeAnswer, earlier_answer: _ProbeAnswer) -> tuple[str, ...]:
    """Return the control tokens that follow an answer's end whether or not another turn comes next."""
    controls_at_stop = _controls_after(last_answer.chunks, last_answer.chunk_index + 1)
    controls_before_turn = _controls_after(earlier_answer.chunks, earlier_answer.chunk_index + 1)
    return tuple(controls_at_stop[: common_prefix_length(controls_at_stop, controls_before_turn)])


def _prompt_chunks(question: list[Chunk], question_and_prompt: list[Chunk]) -> list[Chunk]:
    """Return the chunks of the generation prompt, which follows the question; [] if the template writes none."""
    if question == question_and_prompt:
        return []
    start = common_prefix_length(question, question_and_prompt)
    # A chunk with the question's control token has only new text; it is the prompt only if no chunk follows.
    has_next = start + 1 < len(question_and_prompt)
    if has_next and start < len(question) and question[start].control == question_and_prompt[start].control:
        start += 1
    prompt = question_and_prompt[start:]
    if not prompt:
        raise _no_control_tokens()
    return prompt


def _find_answer(chunks: list[Chunk], answer: str) -> _ProbeAnswer:
    """Find the chunk with an answer; raise ConfigError unless control tokens are around the answer."""
    index = next((i for i, chunk in enumerate(chunks) if answer in chunk.text), None)
    if index is None or index + 1 >= len(chunks) or not chunks[index].control:
        raise _no_control_tokens()
    return _ProbeAnswer(chunks, answer, index, chunks[index + 1].control)


def _end_before_tool_message(
    template: ChatTemplate, escaper: ControlEscaper, ends: frozenset[str], question: Sequence[Chunk]
) -> frozenset[str]:
    """Return the token that opens a tool's message, if it also ends the turn before: ``<|observation|>`` of GLM."""
    question_ends_turns = any(chunk.control in ends and _QUESTION in chunk.text for chunk in question)
    if not question_ends_turns:
        return frozenset()
    try:
        chunks = escaper.split(template.render([*_PROBE[:2], {"role": "tool", "content": _QUESTION}]))
        return frozenset({_find_answer(chunks, _ANSWERS[0]).next_control})
    except (TemplateFailure, ConfigError):
        return frozenset()


def _controls_after(chunks: Sequence[Chunk], index: int) -> list[str]:
    """Return the control tokens that follow the chunk at ``index`` without text between them."""
    controls = []
    while index + 1 < len(chunks) and not chunks[index].text:
        index += 1
        controls.append(chunks[index].control)
    return controls


def _common_chunks(a: Sequence[Chunk], b: Sequence[Chunk]) -> list[Chunk]:
    """Return the common prefix of two lists of chunks, and of the texts of its last chunk."""
    common = []
    for chunk, other in zip(a, b, strict=False):
        if chunk.control != other.control:
            break
        common.append(chunk._replace(text=chunk.text[: common_prefix_length(chunk.text, other.text)]))
        if chunk.text != other.text:
            break
    return common


def _no_control_tokens() -> ConfigError:
    return ConfigError(
        "the chat template does not open and end the assistant's turns with control tokens, "
        "so packtool cannot tell which tokens are targets",
        "Put a template that does (ChatML, Llama 3, Gemma, Phi, Mistral, DeepSeek) into chat_template.jinja.",
    )


class LocatedTurn(NamedTuple):
    """An assistant's turn, located among the tokens.

    Args:
        message: the row's turn; an empty one if it cannot be told which of the row's turns this is.
        span: its tokens [start, end), from the answer to the token that ends the turn.
        first_chunk, last_chunk: indexes of the first and the last expanded chunk that has these tokens.
        header: start and end of its header, without thinking that the generation prompt writes; empty unless the row
            becomes several samples.
    """

    message: Turn
    span: tuple[int, int]
    first_chunk: int
    last_chunk: int
    header: tuple[int, ...] = ()


def is_trained(message: Turn, scale: LossScale, *, is_last: bool) -> bool:
    """Return whether a turn is trained: by the row's own setting, or else by the loss scale."""
    if message.loss is not None:
        return message.loss
    return is_last or scale.base != "last_round"


def locate_texts(
    sample: Sample, chunks: Sequence[Chunk], expanded: ExpandedChunks, tokens: JoinedTokens
) -> list[LocatedTurn]:
    """Locate the assistant's texts of a row of plain texts among the tokens; texts without tokens are left out."""
    # Each text begins with a chunk without a control token, and no other chunk lacks one.
    first_chunks = [expanded.index_of_rendered[i] for i, chunk in enumerate(chunks) if not chunk.control]
    stop_chunks = [*first_chunks[1:], len(expanded.chunks)]
    borders = [*(tokens.text_starts[first] for first in first_chunks), len(tokens.ids)]
    texts = zip(sample.turns, pairwise(borders), first_chunks, stop_chunks, strict=True)
    return [
        LocatedTurn(turn, span, first, stop - 1)
        for turn, span, first, stop in texts
        if turn.role == "assistant" and span[0] < span[1]
    ]


@dataclass(frozen=True)
class TargetChoice:
    """Selects other target tokens of encoded samples, without their rows.

    Args:
        base: ``default`` trains the assistant's turns, ``last_round`` the last one that is left, ``all`` every token
            outside media. Turns with ``loss: false`` in their row are no targets of the first two.
        opening, closing, pads: ids of the tokens before and after media, and of their placeholder tokens.
        among_targets: only tokens that are already targets can be targets. For samples encoded with a rule of the loss
            scale, since the tokens that it excludes cannot be found without the row.
    """

    base: Base
    opening: frozenset[int]
    closing: frozenset[int]
    pads: frozenset[int]
    among_targets: bool = False

    @classmethod
    def of_config(cls, base: Base, config: Mapping[str, Any], among_targets: bool = False) -> TargetChoice:
        """Take the ids of media tokens from a ``config.json``."""
        settings, family = thinker_of(config), family_of(config)
        opening, closing = (
            frozenset(int(settings[name]) for name in names if settings.get(name) is not None)
            for names in zip(family.image_marks, family.sound_marks, strict=True)
        )
        return cls(base, opening, closing, frozenset(pad_ids_of(config).values()), among_targets)

    def targets(self, sample: EncodedSample) -> npt.NDArray[np.bool_]:
        """Return bool (L,), true for targets; nothing predicts a truncated sample's first token, so it is no target."""
        is_target = np.full(sample.length, self.base == "all")
        turns = sample.turns.reshape(-1, 2)
        if self.base == "last_round":
            turns = turns[-1:]
        for start, end in turns:
            is_target[start:end] = True
        if self.pads:
            is_target &= ~self._is_medium(sample.input_ids)
        if self.among_targets:
            is_target &= sample.labels != IGNORE_INDEX
        if sample.num_truncated:
            is_target[:1] = False
        return is_target

    def _is_medium(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return bool (L,), true for placeholder tokens, and everything between a medium's marks, such as timestamps.

        Between marks are the tokens up to which more media are opened than were closed before.
        """
        is_closing = _is_in(ids, self.closing)
        num_opened = np.cumsum(_is_in(ids, self.opening))
        num_closed_before: npt.NDArray[Any] = np.cumsum(is_closing) - is_closing
        return (num_opened > num_closed_before) | _is_in(ids, self.pads)

    def __call__(self, sample: EncodedSample) -> EncodedSample:
        """Return the sample with labels for these targets; former targets keep their weights, new ones weigh 1."""
        trained = self.targets(sample)
        scale = sample.loss_scale
        if scale is not None:
            scale = np.where(trained, np.where(sample.labels != IGNORE_INDEX, scale, np.float32(1)), np.float32(0))
        labels = np.where(trained, sample.input_ids, np.int32(IGNORE_INDEX))
        return dataclasses.replace(sample, labels=labels, loss_scale=scale)


def _is_in(ids: npt.NDArray[np.int32], token_ids: frozenset[int]) -> npt.NDArray[np.bool_]:
    """Return bool (L,), true for ids in a small set; ten times as fast as ``np.isin``, which sorts."""
    mask = np.zeros(len(ids), bool)
    for token_id in token_ids:
        mask |= ids == token_id
    return mask


def chunks_of_turn(tokens: JoinedTokens, turn: LocatedTurn) -> list[tuple[Chunk, int]]:
    """Return each chunk of a turn with the token at which its text begins; the text after the turn is left out."""
    chunks = tokens.chunks[turn.first_chunk : turn.last_chunk + 1]
    text_starts = tokens.text_starts[turn.first_chunk : turn.last_chunk + 1]
    _, turn_end = turn.span
    if text_starts[-1] == turn_end:  # the control token of the last chunk ends the turn
        chunks[-1] = chunks[-1]._replace(text="")
    return list(zip(chunks, text_starts, strict=True))


def turn_borders(turns: Sequence[LocatedTurn]) -> IntArray:
    """Return ``Tokenized.borders``, int32 (B,): where turns and their headers begin and end, ascending."""
    positions = {position for turn in turns for position in (*turn.header, *turn.span)}
    return np.array(sorted(positions), np.int32)


def messages_of_turns(sample: Sample, num_turns: int) -> list[Turn]:
    """Return the row's message of each rendered turn of the assistant; empty ones if the template has added turns."""
    answers = [turn for turn in sample.turns if turn.role == "assistant"]
    return answers if len(answers) == num_turns else [Turn("assistant", content="")] * num_turns
