"""Find the target tokens: the assistant's turns with their end-of-turn token.

A turn's targets are the tokens that the model generates: from the end of the *generation prompt* through the token that
ends the turn. Turns are found by the control tokens that the template wrote. This works for templates that rewrite
earlier turns (Qwen3 removes their ``<think>`` blocks), and needs no ``{% generation %}`` tags.

``TargetChoice`` selects other targets of encoded samples without encoding their rows again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import family_of, pad_ids_of, thinker_of
from packtool.encode.loss_scale import Base
from packtool.encode.media_spans import num_common
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.encode.tokenize import ControlEscaper, ControlVocabulary, Piece
from packtool.errors import ConfigError

_QUESTION = "packtoolquestion"
_ANSWERS = ("packtoolanswer", "packtoolreply")
_PROBE = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWERS[0]},
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWERS[1]},
]

_Header = tuple[tuple[str, str], ...]


class TurnPieces(NamedTuple):
    """One assistant turn in a rendered conversation.

    Args:
        first: index of the piece whose text begins with ``header``; targets start after the header.
        header: text that the generation prompt already contains.
        last: index of the piece whose control token ends the turn and is its last target; ``len(pieces)`` if the
            conversation ends without such a token.
    """

    first: int
    header: str
    last: int


@dataclass(frozen=True)
class TurnFinder:
    """Finds the assistant's turns in conversations rendered by one template.

    Args:
        header: (control token, text) of each piece that opens an assistant turn; the last text may continue.
        prompt_rest: text of the generation prompt after the header (``<think>\\n`` for thinking models).
        ends: control tokens that end a turn; the last turn of a conversation may have another than earlier ones.
        tail: control tokens that always directly follow an end, and belong to the turn.
    """

    header: _Header
    prompt_rest: str
    ends: frozenset[str]
    tail: tuple[str, ...]

    @classmethod
    def of(cls, template: ChatTemplate, vocabulary: ControlVocabulary) -> TurnFinder:
        """Infer from small conversations how the template opens and ends an assistant turn, or raise ConfigError."""
        escaper = ControlEscaper(vocabulary, ())
        try:
            question = escaper.split(template.render(_PROBE[:1]))
            prompted = escaper.split(template.render(_PROBE[:1], add_generation_prompt=True))
            short = escaper.split(template.render(_PROBE[:2]))
            long = escaper.split(template.render(_PROBE))
        except TemplateFailure as error:
            raise ConfigError(f"the chat template does not render a question and its answer: {error}") from error
        answers = [(short, _ANSWERS[0]), (long, _ANSWERS[0]), (long, _ANSWERS[1])]
        answer_pieces = [_piece_with(pieces, answer) for pieces, answer in answers]
        header, prompt_rest = _header(question, prompted, answers, answer_pieces)
        ends = frozenset(pieces[at + 1].control for (pieces, _), at in zip(answers, answer_pieces, strict=True))
        ends |= _ends_before_tools(template, escaper, ends, question)
        tails = [_controls_after(pieces, at + 1) for (pieces, _), at in zip(answers[:2], answer_pieces, strict=False)]
        finder = cls(header, prompt_rest, ends, tuple(tails[0][: num_common(*tails)]) if len(ends) == 1 else ())
        for pieces, expected in ((short, _ANSWERS[:1]), (long, _ANSWERS)):
            texts = ["".join(piece.text for piece in pieces[t.first : t.last]) for t in finder.find(pieces)]
            if len(texts) != len(expected) or any(
                answer not in text or _QUESTION in text for answer, text in zip(expected, texts, strict=True)
            ):
                raise _no_control_tokens()
        return finder

    def find(self, pieces: Sequence[Piece]) -> list[TurnPieces]:
        """Return the assistant's turns of a conversation, in order; turns that the next one interrupts are left out."""
        turns = []
        i, span, opening = 0, len(self.header), self.header[0][0]
        while i + span <= len(pieces):
            if pieces[i].control != opening or not self._opens(pieces[i : i + span]):
                i += 1
                continue
            first = i + span - 1
            header = self.header[-1][1]
            if self.prompt_rest and pieces[first].text.startswith(header + self.prompt_rest):
                header += self.prompt_rest
            last = self._end(pieces, first)
            if last is not None:
                turns.append(TurnPieces(first, header, last))
            i = first + 1 if last is None else last
        return turns

    def _end(self, pieces: Sequence[Piece], first: int) -> int | None:
        """Return ``last`` of the turn whose answer begins in piece ``first``; None if the next turn interrupts it."""
        for i in range(first + 1, len(pieces)):
            if pieces[i].control in self.ends:
                following = _controls_after(pieces, i)
                return i + len(self.tail) if tuple(following[: len(self.tail)]) == self.tail else i
            if pieces[i].control == self.header[0][0]:
                # The next turn begins: this one ended with another token (a tool call's <|eom_id|>), or with none.
                return i - 1 if i - 1 > first and not pieces[i - 1].text.strip() else None
        return len(pieces)

    def _opens(self, window: Sequence[Piece]) -> bool:
        """Return whether the pieces, as many as those of the header, open an assistant turn."""
        *exact, (control, prefix) = self.header
        return (
            all(piece.control == c and piece.text == t for piece, (c, t) in zip(window, exact, strict=False))
            and window[-1].control == control
            and window[-1].text.startswith(prefix)
        )


def turn_finder(
    template: ChatTemplate, tokenizer: Tokenizer, media_tokens: Sequence[str]
) -> tuple[ControlVocabulary, TurnFinder]:
    """Return a model's control tokens, and the turn finder that uses them.

    If special tokens do not open turns, other added tokens are tried: DeepSeek's are not marked as special.
    """
    vocabulary = ControlVocabulary(tokenizer, media_tokens)
    try:
        return vocabulary, TurnFinder.of(template, vocabulary)
    except ConfigError as error:
        try:
            question = template.render(_PROBE[:1])
            prompt = template.render(_PROBE[:1], add_generation_prompt=True).removeprefix(question).lstrip()
        except TemplateFailure:
            raise error from error.__cause__
        before = question.partition(_QUESTION)[0].rstrip()
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        roles = [token for token in added if before.endswith(token) or prompt.startswith(token)]
        if set(roles) <= vocabulary.ids.keys():
            raise
    vocabulary = ControlVocabulary(tokenizer, [*media_tokens, *roles])
    return vocabulary, TurnFinder.of(template, vocabulary)


def _header(
    question: list[Piece],
    prompted: list[Piece],
    answers: Sequence[tuple[list[Piece], str]],
    answer_pieces: Sequence[int],
) -> tuple[_Header, str]:
    """Return the header that opens every assistant turn, and the text of the generation prompt after it.

    Args:
        question, prompted: pieces of a conversation without an answer, without and with the generation prompt.
        answers, answer_pieces: (pieces, answer) of conversations with an answer, and the index of the answer's piece.
    """
    has_prompt = question != prompted
    if has_prompt:
        same = num_common(question, prompted)
        # A piece whose control token is shared has only new text; it is the prompt only if no piece follows.
        if same + 1 < len(prompted) and same < len(question) and question[same].control == prompted[same].control:
            same += 1
        prompt = prompted[same:]
    else:
        # The piece of the answer opens it, by a header as in other templates, or by the question's closing "[/INST]".
        prompt = [answers[0][0][answer_pieces[0]]]
    if not prompt or not all(piece.control for piece in prompt):
        raise _no_control_tokens()
    header = [(piece.control, piece.text) for piece in prompt]
    for (pieces, answer), at in zip(answers, answer_pieces, strict=True):
        begin = max((i for i in range(at + 1) if pieces[i].control == prompt[0].control), default=at)
        opening = [(piece.control, piece.text) for piece in pieces[begin:at]]
        header = _common_pairs(header, [*opening, (pieces[at].control, pieces[at].text.partition(answer)[0])])
    if not header or any(_QUESTION in text for _, text in header):
        raise _no_control_tokens()
    rest = prompt[-1].text[len(header[-1][1]) :] if has_prompt and len(header) == len(prompt) else ""
    return tuple(header), rest


def _piece_with(pieces: Sequence[Piece], answer: str) -> int:
    """Return the index of the piece with an answer; raise ConfigError unless control tokens are around the answer."""
    at = next((i for i, piece in enumerate(pieces) if answer in piece.text), None)
    if at is None or at + 1 >= len(pieces) or not pieces[at].control:
        raise _no_control_tokens()
    return at


def _ends_before_tools(
    template: ChatTemplate, escaper: ControlEscaper, ends: frozenset[str], question: Sequence[Piece]
) -> frozenset[str]:
    """Return the token that opens a tool's message, if it ends the turn before: ``<|observation|>`` of GLM."""
    if not any(piece.control in ends and _QUESTION in piece.text for piece in question):
        return frozenset()
    try:
        pieces = escaper.split(template.render([*_PROBE[:2], {"role": "tool", "content": _QUESTION}]))
        return frozenset({pieces[_piece_with(pieces, _ANSWERS[0]) + 1].control})
    except (TemplateFailure, ConfigError):
        return frozenset()


def _controls_after(pieces: Sequence[Piece], at: int) -> list[str]:
    """Return the control tokens that directly follow piece ``at``."""
    controls = []
    while at + 1 < len(pieces) and not pieces[at].text:
        at += 1
        controls.append(pieces[at].control)
    return controls


def _common_pairs(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the common prefix of two lists of pairs, and of the texts in its last pair."""
    common = []
    for (control, text), (other, other_text) in zip(a, b, strict=False):
        if control != other:
            break
        common.append((control, text[: num_common(text, other_text)]))
        if text != other_text:
            break
    return common


def _no_control_tokens() -> ConfigError:
    return ConfigError(
        "the chat template does not open and end the assistant's turns with control tokens, "
        "so packtool cannot tell which tokens are targets",
        "Put a template that does (ChatML, Llama 3, Gemma, Phi, Mistral, DeepSeek) into chat_template.jinja.",
    )


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
        inner, family = thinker_of(config), family_of(config)
        opening, closing = (
            frozenset(int(inner[name]) for name in names if inner.get(name) is not None)
            for names in zip(family.image_marks, family.sound_marks, strict=True)
        )
        return cls(base, opening, closing, frozenset(pad_ids_of(config).values()), among_targets)

    def targets(self, sample: EncodedSample) -> npt.NDArray[np.bool_]:
        """Return bool (L,), true for targets; after truncation the first token is none, for nothing predicts it."""
        trained = np.full(sample.length, self.base == "all")
        turns = sample.turns.reshape(-1, 2)
        for start, end in turns[-1:] if self.base == "last_round" else turns:
            trained[start:end] = True
        if self.pads:
            # Excluded are placeholder tokens, and everything between a medium's marks, such as timestamps.
            ids = sample.input_ids
            opens, closes = _is_any(ids, self.opening), _is_any(ids, self.closing)
            depth = np.cumsum(opens.astype(np.int32) - np.concatenate(([0], closes[:-1].astype(np.int32))))
            trained &= ~((depth > 0) | _is_any(ids, self.pads))
        if self.among_targets:
            trained &= sample.labels != IGNORE_INDEX
        if sample.num_truncated:
            trained[:1] = False
        return trained

    def __call__(self, sample: EncodedSample) -> EncodedSample:
        """Return the sample with labels for these targets; former targets keep their weights, new ones weigh 1."""
        trained = self.targets(sample)
        scale = sample.loss_scale
        if scale is not None:
            scale = np.where(trained, np.where(sample.labels != IGNORE_INDEX, scale, np.float32(1)), np.float32(0))
        labels = np.where(trained, sample.input_ids, np.int32(IGNORE_INDEX))
        return dataclasses.replace(sample, labels=labels, loss_scale=scale)


def _is_any(ids: npt.NDArray[np.int32], wanted: frozenset[int]) -> npt.NDArray[np.bool_]:
    """Return bool (L,), true for ids in a small set; ten times as fast as ``np.isin``, which sorts."""
    mask = np.zeros(len(ids), bool)
    for each in wanted:
        mask |= ids == each
    return mask
