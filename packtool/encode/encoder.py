"""Samples to tokens, labels and media spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from packtool.config import EncodeSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.control import ControlVocabulary, Piece, Shield
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.encode.families import ImageLimits, family_of
from packtool.encode.model_files import ModelFiles
from packtool.encode.pieces import PieceTokenizer
from packtool.encode.targets import TurnFinder, TurnPieces, num_common, role_tokens
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.encode.truncate import kept_positions, moved_turns
from packtool.errors import ConfigError, RowError
from packtool.media.measure import MediaProblem, measure_image
from packtool.rows.sample import Dropped, MediaRef, Sample, Turn

_REMEMBERED_IMAGES = 10_000


@dataclass(frozen=True)
class _Rendered:
    """A sample between rendering and tokenization."""

    sample: Sample
    pieces: list[Piece]
    turns: list[TurnPieces]
    images: tuple[EncodedImage, ...]


class Encoder:
    """Encodes samples for one model and one spec.

    Args:
        spec: what decides the tokens.
        files: the model's tokenizer, template and settings.

    Raises:
        ConfigError: if the model cannot be encoded for.
    """

    def __init__(self, spec: EncodeSpec, files: ModelFiles) -> None:
        self.spec = spec
        self._family = family_of(files.config)
        self.image_limits: ImageLimits | None = None
        media_tokens: tuple[str, ...] = ()
        if self._family is not None:
            self.image_limits = self._family.image_limits(files.processor, spec)
            media_tokens = tuple(self._family.image_tokens)
        tokenizer = _tokenizer(files)
        self._template = ChatTemplate(files.chat_template, files.template_variables)
        self._vocabulary, self._finder = _turn_finder(self._template, tokenizer, media_tokens)
        if missing := [token for token in media_tokens if token not in self._vocabulary.ids]:
            raise ConfigError(
                f"--model {spec.model}: its tokenizer does not know {', '.join(missing)}, which config.json calls for",
                "Tokenizer and config.json belong to different models: take both from one.",
            )
        self._image_ids = [self._vocabulary.ids[token] for token in media_tokens]
        self._pieces = PieceTokenizer(tokenizer, self._vocabulary)
        self._measured: dict[str, tuple[int, int]] = {}

    def encode(self, samples: Sequence[Sample]) -> list[EncodedSample | Dropped]:
        """Encode many samples; each becomes exactly one result, in order.

        Raises:
            RowError: for a sample over ``max_length`` when the strategy is ``raise``.
        """
        prepared = [self._render(sample) for sample in samples]
        flat = [piece for item in prepared if isinstance(item, _Rendered) for piece in item.pieces]
        ids = self._pieces.encode(flat)
        results: list[EncodedSample | Dropped] = []
        at = 0
        for item in prepared:
            if isinstance(item, Dropped):
                results.append(item)
                continue
            results.append(self._assemble(item, ids[at : at + len(item.pieces)]))
            at += len(item.pieces)
        return results

    def _render(self, sample: Sample) -> _Rendered | Dropped:
        try:
            images = tuple(self._image(image) for image in sample.images)
        except MediaProblem as problem:
            return Dropped(sample.source, sample.row, problem.reason, problem.detail)
        try:
            shield = Shield(self._vocabulary, _strings(sample))
        except ValueError as error:
            return Dropped(sample.source, sample.row, "private_characters", str(error))
        try:
            messages = [_message(turn, shield, with_images=bool(images)) for turn in sample.turns]
            rendered = self._template.render(messages, shield.value(sample.tools))
        except (TemplateFailure, RecursionError) as failure:
            return Dropped(sample.source, sample.row, "template_refused", str(failure))
        pieces = shield.cut(rendered)
        num_marks = sum(piece.image for piece in pieces)
        if num_marks != len(images):
            detail = f"the chat template left {num_marks} of {len(images)} pictures in the conversation"
            return Dropped(sample.source, sample.row, "image_marks", detail)
        turns = self._finder.find(pieces)
        num_answers = sum(turn.role == "assistant" for turn in sample.turns)
        if len(turns) < num_answers:
            detail = f"{len(turns)} of {num_answers} assistant turns can be told apart in the rendered conversation"
            return Dropped(sample.source, sample.row, "turns_not_found", detail)
        return _Rendered(sample, pieces, turns, images)

    def _image(self, image: MediaRef) -> EncodedImage:
        if self._family is None or self.image_limits is None:
            raise MediaProblem("media_unsupported", "the row has pictures, and the model reads text only")
        size = self._measured.get(image.path) if image.path is not None else None
        if size is None:
            size = measure_image(image)
            if image.path is not None and len(self._measured) < _REMEMBERED_IMAGES:
                self._measured[image.path] = size
        height, width = size
        try:
            grid = self._family.image_grid(height, width, self.image_limits)
        except ValueError as error:
            raise MediaProblem("media_size", f"{image.name}: {error}") from error
        num_tokens = grid[0] * grid[1] * grid[2] // self.image_limits.merge_size**2
        return EncodedImage(image.path, image.data, height, width, grid, num_tokens)

    def _assemble(self, item: _Rendered, piece_ids: list[list[int]]) -> EncodedSample | Dropped:
        ids: list[int] = []
        text_starts: list[int] = []
        spans: list[tuple[int, int]] = []
        images = iter(item.images)
        for piece, text_ids in zip(item.pieces, piece_ids, strict=True):
            if piece.image:
                opening, pad, closing = self._image_ids
                start = len(ids)
                ids += [opening, *[pad] * next(images).num_tokens, closing]
                spans.append((start, len(ids)))
            elif piece.control:
                ids.append(self._vocabulary.ids[piece.control])
            text_starts.append(len(ids))
            ids += text_ids
        turns = self._turns(item, piece_ids, text_starts, len(ids))
        return self._fit(item, np.array(ids, np.int32), np.array(turns, np.int32), spans)

    def _turns(self, item: _Rendered, piece_ids: list[list[int]], text_starts: list[int], length: int) -> list[int]:
        """[start, end) of the targets of each assistant turn, flat."""
        pieces = item.pieces
        turns: list[int] = []
        for turn in item.turns:
            # A blank that the answer begins with may merge with the header's last: the merged token is the answer's.
            (header,) = self._pieces.encode([Piece(pieces[turn.first].control, False, turn.header)])
            start = text_starts[turn.first] + num_common(header, piece_ids[turn.first])
            end = text_starts[turn.last] if turn.last < len(pieces) else length
            if end > start:
                turns += [start, end]
        return turns

    def _fit(
        self, item: _Rendered, ids: np.ndarray, turns: np.ndarray, spans: list[tuple[int, int]]
    ) -> EncodedSample | Dropped:
        """Hold the sample to ``max_length`` and give it labels."""
        sample, limit, length = item.sample, self.spec.max_length, len(ids)
        if length > limit:
            protected = np.zeros(length, bool)
            for start, end in spans:
                protected[start:end] = True
            if self.spec.truncation_strategy == "raise":
                raise RowError(
                    sample.source,
                    sample.row,
                    "over_max_length",
                    f"{length} tokens, at most {limit} are allowed",
                    "Raise --max-length, or use --truncation-strategy delete or left.",
                )
            kept = kept_positions(protected, limit)
            if kept is None:
                detail = f"{int(protected.sum())} tokens of media leave no room for text in {limit}"
                return Dropped(sample.source, sample.row, "media_over_limit", detail)
            if self.spec.truncation_strategy == "delete":
                return Dropped(sample.source, sample.row, "over_max_length", f"{length} tokens, limit {limit}")
            ids, turns = ids[kept], moved_turns(turns, kept)
        if not len(turns):
            detail = "truncation left no target" if length > limit else "no assistant turn has tokens to learn"
            return Dropped(sample.source, sample.row, "no_target_tokens", detail)
        labels = np.full(len(ids), IGNORE_INDEX, np.int32)
        for start, end in turns.reshape(-1, 2):
            labels[start:end] = ids[start:end]
        return EncodedSample(
            input_ids=ids,
            labels=labels,
            turns=turns,
            images=item.images,
            channel=sample.channel,
            source=sample.source,
            row=sample.row,
            num_truncated=length - len(ids),
        )


def _message(turn: Turn, shield: Shield, with_images: bool) -> dict[str, Any]:
    """A turn as the template gets it."""
    content = shield.text(turn.content)
    if with_images:
        content = shield.images(content)
    return {"role": turn.role, "content": content, **shield.value(turn.extra)}


def _tokenizer(files: ModelFiles) -> Tokenizer:
    try:
        return Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the tokenizers library raises nothing more special
        raise ConfigError(f"{files.directory}: tokenizer.json cannot be used: {error}") from error


def _turn_finder(
    template: ChatTemplate, tokenizer: Tokenizer, media_tokens: Sequence[str]
) -> tuple[ControlVocabulary, TurnFinder]:
    """The control tokens and the way to find turns by them."""
    vocabulary = ControlVocabulary(tokenizer, media_tokens)
    try:
        return vocabulary, TurnFinder.of(template, vocabulary)
    except ConfigError:
        roles = role_tokens(template, (token.content for token in tokenizer.get_added_tokens_decoder().values()))
        if set(roles) <= vocabulary.ids.keys():
            raise
    vocabulary = ControlVocabulary(tokenizer, [*media_tokens, *roles])
    return vocabulary, TurnFinder.of(template, vocabulary)


def _strings(sample: Sample) -> list[str]:
    """Every string of a sample that a template may print."""
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
    return found
