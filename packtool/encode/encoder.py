"""Encode rows and samples to tokens, labels and media spans, for export and for streaming."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from packtool.config.data import EncodeSpec
from packtool.constants import TRAIN_NEWLINE
from packtool.encode.boxes import BoxWriter
from packtool.encode.encoded import EncodedSample, IntArray
from packtool.encode.families import media_encoding
from packtool.encode.families.record import MediaEncoding, Medium
from packtool.encode.loss_scale import (
    EMPTY_THINKING,
    KEEP_EMPTY_THINK,
    LossScale,
    Weights,
    loss_scale_of,
    parse_loss_scale,
)
from packtool.encode.media_spans import (
    ExpandedChunks,
    JoinedTokens,
    MediaTokens,
    common_prefix_length,
    expand_media,
    join_tokens,
)
from packtool.encode.model_files import ModelFiles
from packtool.encode.prepared import PreparedRows
from packtool.encode.row_parts import RowSplitter, join_results
from packtool.encode.targets import (
    LocatedTurn,
    TurnChunks,
    TurnFinder,
    chunks_of_turn,
    infer_turn_finder,
    is_trained,
    locate_texts,
    messages_of_turns,
    turn_borders,
)
from packtool.encode.template import ChatTemplate, TemplateFailure, strings_of
from packtool.encode.tokenize import Chunk, ChunkTokenizer, ControlEscaper, ControlVocabulary, TextEnds
from packtool.encode.truncation import Tokenized, drop_too_long, truncate, truncate_all
from packtool.errors import ConfigError, StorageError
from packtool.launch.worker import tokenize_in_one_thread
from packtool.media.files import MediaProblem, check_allowed
from packtool.rows.forms.columns import RowProblem
from packtool.rows.forms.media import lone_mark_detail
from packtool.rows.media_policy import NOT_ALLOWED, MediaPolicy
from packtool.rows.parsing import Problem
from packtool.rows.read import first_samples, media_refs
from packtool.rows.sample import Dropped, MediaKind, MediaRef, Sample, Turn, guard_row
from packtool.rows.source import RowBlock, Source

_MAX_REMEMBERED_MEDIA = 10_000
_MAX_REMEMBERED_TEMPLATES = 64
_EMPTY_BLOCK = re.compile(rf"(?=<){EMPTY_THINKING}\Z")
_CHARS_PER_TOKEN = 8
"""Texts with more characters per token of ``max_length`` are checked for their length before they are tokenized."""


class _Rendered(NamedTuple):
    """A rendered sample before tokenization: ``chunks`` has one placeholder per medium, ``expanded`` all its tokens."""

    sample: Sample
    chunks: list[Chunk]
    turns: list[TurnChunks]
    expanded: ExpandedChunks


class Encoder:
    """Encodes samples for one model with one set of options; ConfigError if that is not possible.

    ``media`` is by default the encoding that the options and the model's files determine.
    """

    def __init__(self, spec: EncodeSpec, files: ModelFiles, media: MediaEncoding | None = None) -> None:
        self.spec = spec
        self._media = media or media_encoding(files, spec)
        self.limits = self._media.limits
        self.media_tokens = MediaTokens.of(files.config)
        self._load_tokenizer_and_template(files)
        self._is_hybrid_thinking = files.is_hybrid_thinking
        self._has_template_kwargs = bool(files.chat_template_kwargs)
        self.warnings = (*self._media.warnings, *files.option_warnings(spec))
        self._templates_by_row_kwargs: dict[str, tuple[ChatTemplate, TurnFinder]] = {}  # by the row's kwargs in JSON
        self._ids_by_header: dict[tuple[str, str], array[int]] = {}
        self._cached_measure = lru_cache(_MAX_REMEMBERED_MEDIA)(self._measure_with_policy)
        self._boxes = BoxWriter(files, spec, self.limits.image, frozenset(self._vocabulary.ids), self._measure)
        self._row_splitter = RowSplitter(spec, files, self._template_of, self._render_chunks)

    def _load_tokenizer_and_template(self, files: ModelFiles) -> None:
        """Load the tokenizer and the chat template; ConfigError if they do not belong to the model."""
        self._tokenizer = _load_tokenizer(files)
        self._vocabulary, self._template, self._turn_finder = _load_template(files, self._tokenizer, self._media)
        _check_control_tokens(self.spec.model, self._media, self._vocabulary)
        self._chunk_tokenizer = ChunkTokenizer(self._tokenizer, self._vocabulary)
        self._start_of_text = _start_of_text(self._tokenizer, files)
        self._end_of_text = files.template_variables.get("eos_token", "")

    def encode(self, samples: Sequence[Sample]) -> list[list[EncodedSample] | Dropped]:
        """Encode samples: return for each, in order, its encoded samples, or the reason why it is dropped.

        There are several encoded samples with ``--truncation-strategy split``, and an ``EncodedRow`` if turns or
        responses become samples. Raises RowError for a sample that is too long, if the strategy is ``raise``.
        """
        if any(sample.tokens is not None for sample in samples):
            return [self._encode_prepared(s) if s.tokens is not None else self.encode([s])[0] for s in samples]
        with_boxes = [self._boxes.write(sample) for sample in samples]
        # The samples of each row; most rows are one sample.
        rows = [row if isinstance(row, Dropped) else self._row_splitter.split(row) for row in with_boxes]
        results = iter(self._encode_split([sample for row in rows if isinstance(row, list) for sample in row]))
        return [join_results(row, [next(results) for _ in row]) if isinstance(row, list) else row for row in rows]

    def _encode_split(self, samples: Sequence[Sample]) -> list[list[EncodedSample] | Dropped]:
        """Encode samples as they are; the texts of all are tokenized in one call."""
        items = [self._render_or_drop(sample) for sample in samples]
        rendered = [(item, self._tokenize_ends(item)) for item in items if isinstance(item, _Rendered)]
        chunks = [
            chunk._replace(text="") if i in ends else chunk
            for item, ends in rendered
            for i, chunk in enumerate(item.expanded.chunks)
        ]
        ids = iter(self._chunk_tokenizer.encode(chunks))
        tokenized = (
            self._tokenize(item, list(islice(ids, len(item.expanded.chunks))), ends) for item, ends in rendered
        )
        return [
            item if isinstance(item, Dropped) else truncate(next(tokenized), self.spec, self.media_tokens)
            for item in items
        ]

    def _tokenize_ends(self, item: _Rendered) -> dict[int, TextEnds]:
        """Tokenize very long texts, by index of their chunk, at both ends only, if truncation removes the middle."""
        if self.spec.truncation_strategy not in ("left", "right"):
            return {}
        needs_all_tokens = item.expanded.media_ranges or self._loss_scale(item.sample).rules
        if needs_all_tokens:
            return {}
        chunks, max_length = item.expanded.chunks, self.spec.max_length
        min_chars = 2 * max_length * _CHARS_PER_TOKEN  # of both ends
        long_chunks = [i for i, chunk in enumerate(chunks) if len(chunk.text) > min_chars]
        ends_by_chunk = {i: self._chunk_tokenizer.ends(chunks, i, max_length) for i in long_chunks}
        return {i: ends for i, ends in ends_by_chunk.items() if ends is not None}

    @cached_property
    def _prepared_rows(self) -> PreparedRows:
        num_ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return PreparedRows(self.spec, self._media, self.media_tokens, self._vocabulary.ids, num_ids)

    def _encode_prepared(self, sample: Sample) -> list[EncodedSample] | Dropped:
        try:
            samples = self._prepared_rows.split(sample, self._measure_all(sample))
        except Problem as problem:
            return Dropped(sample.source, sample.row, problem.reason, problem.detail)
        return truncate_all(samples, self.spec)

    def _measure_all(self, sample: Sample) -> dict[str, list[Medium]]:
        """Return the measured media of a row by kind; raise MediaProblem if one cannot be used."""
        tokens = self.media_tokens
        if sample.tokens is not None and tokens.has_mixed_pads(sample) and not tokens.video_marks:
            detail = "the row was tokenized elsewhere, and its tokens do not show the order of its pictures and videos"
            raise MediaProblem("media_unsupported", f"{detail}: give untokenized rows, or rows with one of the two")
        media: dict[str, list[Medium]] = {
            kind: [self._measure(kind, ref) for ref in refs] for kind, refs in sample.media.items()
        }
        if len(sample.images) > 1:
            images, media["image"] = media["image"], self._media.together(media["image"])
            if sample.tokens is not None:
                media["image"] = self._prepared_rows.match_images(sample.tokens, images, media["image"])
        return media

    def _render_or_drop(self, sample: Sample) -> _Rendered | Dropped:
        try:
            rendered = self._render(sample)
        except Problem as problem:
            return Dropped(sample.source, sample.row, problem.reason, problem.detail)
        return self._drop_too_long(rendered) or rendered

    def _render(self, sample: Sample) -> _Rendered:
        """Render a sample and insert the tokens of its media; raise a Problem if that is not possible."""
        media = self._measure_all(sample)
        self._check_media(sample)
        chunks = self._render_chunks(sample)
        rendered_kinds = [chunk.media_kind for chunk in chunks]
        for kind, media_of_kind in media.items():
            num_rendered = rendered_kinds.count(kind)
            if num_rendered != len(media_of_kind):
                detail = f"the chat template wrote {num_rendered} of the row's {len(media_of_kind)} {kind}s"
                raise RowProblem(f"{kind}_marks", detail)
        turns = [] if sample.is_text else self._find_turns(sample, chunks)
        expanded = expand_media(chunks, media, self._media.segments, self.spec.max_length)
        return _Rendered(sample, chunks, turns, expanded)

    def _check_media(self, sample: Sample) -> None:
        """Raise RowProblem if a question lacks its medium, or the model cannot take this many pictures."""
        if self._media.control_tokens and sample.lone_mark:
            raise RowProblem(f"{sample.lone_mark}_marks", lone_mark_detail(sample.lone_mark))
        if self._media.one_picture_only and len(sample.images) > 1:
            detail = f"the row has {len(sample.images)} pictures; for this model packtool encodes one picture per row"
            raise RowProblem("media_unsupported", detail)

    def _find_turns(self, sample: Sample, chunks: Sequence[Chunk]) -> list[TurnChunks]:
        """Find the assistant's turns in a rendered conversation; raise RowProblem if some are missing."""
        _, finder = self._template_of(sample)
        turns = finder.find(chunks)
        rules = parse_loss_scale(sample.loss_scale or self.spec.loss_scale).rules
        if KEEP_EMPTY_THINK in rules and (self._has_template_kwargs or sample.chat_template_kwargs):
            # Arguments that switch thinking off move the empty block from the answer into the header. Taken out of the
            # header, it is trained as part of the answer.
            turns = [turn._replace(header=_EMPTY_BLOCK.sub("", turn.header)) for turn in turns]
        num_answers = [turn.role for turn in sample.turns].count("assistant")
        # A loss setting of a turn can only be applied if each rendered turn is one of the row's.
        has_own_loss = any(turn.loss is not None or turn.loss_scale is not None for turn in sample.turns)
        if len(turns) < num_answers or (has_own_loss and len(turns) != num_answers):
            detail = f"only {len(turns)} of {num_answers} assistant turns were found in the rendered conversation"
            raise RowProblem("turns_not_found", detail)
        return turns

    def _drop_too_long(self, item: _Rendered) -> Dropped | None:
        """Drop a row whose text is certainly too long, before tokenizing it; None if ``truncate`` must decide."""
        max_length, chunks = self.spec.max_length, item.expanded.chunks
        if self.spec.truncation_strategy not in ("delete", "raise"):
            return None
        if sum([len(chunk.text) for chunk in chunks]) <= _CHARS_PER_TOKEN * max_length:
            return None
        min_tokens = self._chunk_tokenizer.min_tokens(chunks, max_length + 1)
        if min_tokens <= max_length or sum(chunk.num_controls for chunk in chunks) >= max_length:
            return None
        return drop_too_long(item.sample, self.spec, f"at least {min_tokens}")

    def _render_chunks(self, sample: Sample) -> list[Chunk]:
        """Render a conversation by the chat template, or join texts; split the result at control tokens."""
        media_kinds = [kind for kind, refs in sample.media.items() if refs]
        strings = strings_of(sample)
        try:
            escaper = ControlEscaper(self._vocabulary, strings, sample.control)
        except ValueError as error:
            raise RowProblem("private_characters", str(error)) from error
        texts = [escaper.escape_text(escaper.escape_media(turn.content, media_kinds)) for turn in sample.turns]
        if not sample.is_text:
            return self._render_conversation(sample, escaper, texts)
        chunks = [chunk for text in texts for chunk in escaper.split(text)]
        if self._start_of_text and sample.ends_text and not texts[0].startswith(self._start_of_text):
            chunks.insert(0, Chunk(control=self._start_of_text, media_kind="", text=""))
        if self._end_of_text and sample.ends_text:
            chunks.append(Chunk(control=self._end_of_text, media_kind="", text=""))
        return chunks

    def _render_conversation(
        self, sample: Sample, escaper: ControlEscaper, escaped_texts: Sequence[str]
    ) -> list[Chunk]:
        """Render a conversation to one string by the model's chat template, and split it at control tokens.

        Control tokens are special tokens of the model, such as the end of a turn. Texts of the row that look like one
        are escaped, so that only those of the template take effect. Splitting undoes the escaping.

        ``escaped_texts`` are the contents of the turns, already escaped. Returns chunks: each is a control token, empty
        in the first one, and the text after it. RowProblem if the template fails, or leaves out the text of a turn.
        """
        template, _turn_finder = self._template_of(sample)
        try:
            messages = self._make_messages(sample.turns, escaped_texts, escaper)
            tools = escaper.escape_value(sample.tools)
            rendered = template.render(messages, tools)
        except TemplateFailure as failure:
            raise RowProblem("template_refused", str(failure)) from failure
        except RecursionError as error:
            raise RowProblem("template_refused", "tools or tool calls of the row are nested too deeply") from error

        missing_turn = template.missing_turn(sample.turns, messages, tools)
        if missing_turn is not None:
            role = sample.turns[missing_turn].role
            raise RowProblem("turn_left_out", f"the chat template leaves out turn {missing_turn} (role {role})")
        return escaper.split(rendered, self._media_placeholders(sample))

    def _make_messages(
        self, turns: Sequence[Turn], escaped_texts: Sequence[str], escaper: ControlEscaper
    ) -> list[dict[str, Any]]:
        """Return the messages for the chat template: role, content and further keys of each turn."""
        messages = []
        for turn, text in zip(turns, escaped_texts, strict=True):
            content = escaper.split_media(text) if self._media.content_as_list else text
            messages.append({"role": turn.role, "content": content, **escaper.escape_value(turn.extra)})
        return messages

    def _media_placeholders(self, sample: Sample) -> dict[str, MediaKind]:
        """Return the kind of medium by placeholder token; without tokens that are plain text in this sample."""
        pairs = self._media.placeholders.items()
        return {token: kind for token, kind in pairs if sample.media[kind] or token in self._vocabulary.ids}

    def _template_of(self, sample: Sample) -> tuple[ChatTemplate, TurnFinder]:
        """Return the chat template with the row's own arguments, and its turn finder; RowProblem if there is none."""
        if self._template is None or self._turn_finder is None:
            detail = "the row is a conversation, and the model has no chat template: give one with --chat-template FILE"
            raise RowProblem("no_chat_template", detail)
        if sample.videos and self._media.video_template and self.spec.chat_template is None:
            return self._video_template
        if not sample.chat_template_kwargs:
            return self._template, self._turn_finder
        kwargs_json = json.dumps(sample.chat_template_kwargs, sort_keys=True, ensure_ascii=False)
        if kwargs_json not in self._templates_by_row_kwargs:
            row_template = self._make_row_template(self._template, sample.chat_template_kwargs, kwargs_json)
            if len(self._templates_by_row_kwargs) >= _MAX_REMEMBERED_TEMPLATES:
                self._templates_by_row_kwargs.clear()
            self._templates_by_row_kwargs[kwargs_json] = row_template
        return self._templates_by_row_kwargs[kwargs_json]

    @cached_property
    def _video_template(self) -> tuple[ChatTemplate, TurnFinder]:
        """The processor's chat template for rows with videos, and its turn finder."""
        template = ChatTemplate(self._media.video_template, {}, self._media.content_as_list)
        try:
            return template, TurnFinder.infer(template, self._vocabulary)
        except ConfigError as error:
            detail = f"with the processor's chat template for videos: {error.message}"
            raise RowProblem("template_refused", detail) from error

    def _make_row_template(
        self, template: ChatTemplate, kwargs: Mapping[str, Any], kwargs_json: str
    ) -> tuple[ChatTemplate, TurnFinder]:
        """Return the template with a row's own arguments, and its turn finder; RowProblem if these are unusable."""
        control_token = self._vocabulary.pattern.search(kwargs_json)
        if control_token is not None:
            detail = f"'chat_template_kwargs' has the control token {control_token.group()}"
            raise RowProblem("invalid_template_kwargs", detail)
        row_template = template.with_arguments(kwargs)
        try:
            return row_template, TurnFinder.infer(row_template, self._vocabulary)
        except ConfigError as error:
            detail = f"with 'chat_template_kwargs' {kwargs_json}: {error.message}"
            raise RowProblem("template_refused", detail) from error

    def _measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        """Measure a medium; one in a file only once."""
        return self._media.measure(kind, ref) if ref.path is None else self._cached_measure(kind, ref, ref.policy)

    def _measure_with_policy(self, kind: MediaKind, ref: MediaRef, policy: MediaPolicy) -> Medium:
        del policy  # only part of the cache's key, since references with different policies are equal
        return self._media.measure(kind, ref)

    def _tokenize(
        self, rendered: _Rendered, ids_by_chunk: list[array[int]], ends_by_chunk: Mapping[int, TextEnds]
    ) -> Tokenized:
        """Join the token ids of a rendered sample, and locate its assistant turns and media among them.

        Args:
            ids_by_chunk: the ids of each chunk's text. Those of very long texts are filled in by this function.
            ends_by_chunk: of each very long text the ids of its beginning and end, and the number of those omitted.
        """
        sample = rendered.sample
        for chunk_index, ends in ends_by_chunk.items():
            ids_by_chunk[chunk_index] = ends.ids
        num_omitted_in_texts = sum(ends.num_omitted for ends in ends_by_chunk.values())
        tokens = join_tokens(rendered.expanded, ids_by_chunk, self._vocabulary.ids, self._encode_one)
        turns = self._locate_turns(rendered, tokens, ids_by_chunk)
        # A row may set ``loss`` of a turn to False; None means that the row does not set it.
        trainable_spans = [turn.span for turn in turns if turn.message.loss is not False]
        is_split_row = sample.part is not None
        return Tokenized(
            sample=sample,
            ids=np.frombuffer(tokens.ids, np.int32),
            turns=np.array(trainable_spans, np.int32).reshape(-1),  # flat: start, end, start, end, ...
            spans=tokens.spans,
            weights=self._weights(sample, tokens, turns),
            num_removed=rendered.expanded.num_omitted_controls + num_omitted_in_texts,
            borders=turn_borders(turns) if is_split_row else None,
        )

    def _weights(self, sample: Sample, tokens: JoinedTokens, turns: Sequence[LocatedTurn]) -> Weights | None:
        """Return the weight of each token, float32 (L,), 0 for no target; None if all tokens of the turns weigh 1."""
        scale = self._loss_scale(sample)
        has_own_loss = any(turn.message.loss is not None or turn.message.loss_scale is not None for turn in turns)
        if scale.base == "default" and not scale.rules and not has_own_loss:
            return None
        weights = np.full(len(tokens.ids), 1 if scale.base == "all" else 0, np.float32)
        for turn in turns:
            start, end = turn.span
            if not is_trained(turn.message, scale, is_last=turn is turns[-1]):
                weights[start:end] = 0
                continue
            weights[start:end] = 1 if turn.message.loss_scale is None else turn.message.loss_scale
            if not sample.is_text:  # rules are about the answers of conversations
                self._apply_rules(weights, tokens, turn, scale)
        return weights

    def _loss_scale(self, sample: Sample) -> LossScale:
        """Return the loss scale of a sample, with the rule that models with hybrid thinking add."""
        return parse_loss_scale(loss_scale_of(sample.loss_scale or self.spec.loss_scale, self._is_hybrid_thinking))

    def _apply_rules(self, weights: Weights, tokens: JoinedTokens, turn: LocatedTurn, scale: LossScale) -> None:
        """Apply the rules of a loss scale to the tokens of a trained turn, which have equal ``weights`` before."""
        start, end = turn.span
        weight = weights[start]
        if turn.message.loss is not None:  # a turn with a loss setting of its own follows only these rules
            scale = scale.of_marked_turns
        if scale.rules:
            weights[start:end] *= self._rule_weights(tokens, turn, scale)
        if TRAIN_NEWLINE in scale.rules:
            weights[end : end + self._num_blank_tokens(tokens, turn)] = weight

    def _num_blank_tokens(self, tokens: JoinedTokens, turn: LocatedTurn) -> int:
        """Count the tokens of the white space that follows the control token at the end of a turn; 0 for other text."""
        _, end = turn.span
        text = tokens.chunks[turn.last_chunk].text
        ends_with_control_token = end == tokens.text_starts[turn.last_chunk]
        if not ends_with_control_token or not text.isspace():
            return 0
        return len(self._chunk_tokenizer.offsets(text))

    def _rule_weights(self, tokens: JoinedTokens, turn: LocatedTurn, scale: LossScale) -> Weights:
        """Return the weight of each token of a turn's span, float32: the rules' weight of its first character."""
        text, first_chars = self._turn_text(tokens, turn)
        chars = [first_chars[index] for index in range(*turn.span)]
        answer_start = chars[0]  # the text before it is the header
        return scale.text_weights(text[answer_start:])[[char - answer_start for char in chars]]

    def _turn_text(self, tokens: JoinedTokens, turn: LocatedTurn) -> tuple[str, dict[int, int]]:
        """Return the text of a turn from its header to the token that ends it, with control tokens written out.

        The dict maps each token, by its index in ``tokens.ids``, to the index of its first character in the text.
        """
        turn_text = ""
        first_chars: dict[int, int] = {}
        for chunk, text_start in chunks_of_turn(tokens, turn):
            if chunk.control:
                control_tokens = range(text_start - chunk.num_controls, text_start)
                first_chars |= dict.fromkeys(control_tokens, len(turn_text))
                turn_text += chunk.control  # once, even if a medium repeats it

            offsets = self._chunk_tokenizer.offsets(chunk.text) if chunk.text else []
            for token, (first_char, _) in enumerate(offsets, start=text_start):
                first_chars[token] = len(turn_text) + first_char
            turn_text += chunk.text
        return turn_text, first_chars

    def encode_text(self, text: str) -> IntArray:
        """Return the token ids of a text without a chat template, (L,); control tokens in it are plain text."""
        return np.array(self._encode_one(Chunk(control="", media_kind="", text=text)), np.int32)

    def _encode_one(self, chunk: Chunk) -> array[int]:
        return self._chunk_tokenizer.encode([chunk])[0]

    def _locate_turns(
        self, rendered: _Rendered, tokens: JoinedTokens, ids_by_chunk: list[array[int]]
    ) -> list[LocatedTurn]:
        """Locate the assistant's turns among the tokens of a sample, in order; turns without tokens are left out.

        A turn begins in the text of a chunk, after its header ("assistant" and a new line), which is not trained.

        Args:
            rendered: the chunks of the sample as rendered, and the turns by indexes of these.
            ids_by_chunk: the ids of the text of each expanded chunk (those in which media are replaced by tokens).
        """
        sample, expanded = rendered.sample, rendered.expanded
        if sample.is_text:
            return locate_texts(sample, rendered.chunks, expanded, tokens)
        located_turns = []
        messages = messages_of_turns(sample, num_turns=len(rendered.turns))
        for message, turn in zip(messages, rendered.turns, strict=True):
            first_chunk = expanded.index_of_rendered[turn.first]
            text_start = tokens.text_starts[first_chunk]
            text_ids = ids_by_chunk[first_chunk]  # of the header, and of the answer at least up to a medium
            opening_token = rendered.chunks[turn.first].control
            answer_start = text_start + self._num_header_ids(opening_token, turn.header, text_ids)
            last_chunk, end = _locate_end(rendered, tokens, turn)
            if answer_start < end:
                header_span = self._template_header_span(sample, text_start, text_ids)
                located_turns.append(LocatedTurn(message, (answer_start, end), first_chunk, last_chunk, header_span))
        return located_turns

    def _template_header_span(self, sample: Sample, text_start: int, ids: Sequence[int]) -> tuple[int, ...]:
        """Return ``LocatedTurn.header`` of the turn whose header and answer have these ids, at token ``text_start``."""
        if sample.part is None:
            return ()
        _, finder = self._template_of(sample)
        last_chunk = finder.header[-1]
        return text_start, text_start + self._num_header_ids(last_chunk.control, last_chunk.text, ids)

    def _num_header_ids(self, control: str, header: str, ids: Sequence[int]) -> int:
        """Return how many ``ids`` of the text after a control token are those of the turn's header.

        A token that merges the header's last characters with the answer's first ones belongs to the answer.
        """
        header_ids = self._ids_by_header.get((control, header))
        if header_ids is None:  # a template has one or two
            header_ids = self._ids_by_header[control, header] = self._encode_one(Chunk(control, "", header))
        if ids[: len(header_ids)] == header_ids:  # fast path for nearly all turns
            return len(header_ids)
        return common_prefix_length(header_ids, ids)


def _locate_end(rendered: _Rendered, tokens: JoinedTokens, turn: TurnChunks) -> tuple[int, int]:
    """Return the last expanded chunk of a turn, and the end of the turn among the tokens."""
    if turn.last == len(rendered.chunks):  # the turn ends with the conversation
        return len(rendered.expanded.chunks) - 1, len(tokens.ids)
    last_chunk = rendered.expanded.index_of_rendered[turn.last]  # its control token ends the turn
    return last_chunk, tokens.text_starts[last_chunk]


def worker_encoder(spec: EncodeSpec) -> Encoder:
    """Load the encoder of a worker process, which tokenizes in one thread."""
    tokenize_in_one_thread()
    return Encoder(spec, ModelFiles.load(spec.model, spec.chat_template, spec.chat_template_kwargs))


def _load_tokenizer(files: ModelFiles) -> Tokenizer:
    try:
        return Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the tokenizers library raises nothing more special
        raise ConfigError(f"{files.directory}: tokenizer.json cannot be used: {error}") from error


def _load_template(
    files: ModelFiles, tokenizer: Tokenizer, media: MediaEncoding
) -> tuple[ControlVocabulary, ChatTemplate | None, TurnFinder | None]:
    """Return the model's control tokens, its chat template and the turn finder; None for both without a template."""
    if not files.chat_template:
        return ControlVocabulary(tokenizer, media.control_tokens), None, None
    template = ChatTemplate(files.chat_template, files.template_variables, media.content_as_list)
    try:
        vocabulary, turn_finder = infer_turn_finder(template, tokenizer, media.control_tokens)
    except ConfigError as error:
        if not files.chat_template_kwargs:
            raise
        message = f"--chat-template-kwargs {json.dumps(files.chat_template_kwargs)}: {error.message}"
        raise ConfigError(message, "Check names and values in the chat template, or leave them out.") from error
    return vocabulary, template, turn_finder


def _check_control_tokens(model: str, media: MediaEncoding, vocabulary: ControlVocabulary) -> None:
    missing = [token for token in media.control_tokens if token not in vocabulary.ids]
    if missing:
        raise ConfigError(
            f"--model {model}: the tokenizer lacks {', '.join(missing)}, which config.json requires for media",
            "tokenizer.json and config.json come from different models: take both from the same one.",
        )


def _start_of_text(tokenizer: Tokenizer, files: ModelFiles) -> str:
    """Return the token that the tokenizer puts before texts, such as ``<s>``; "" for none."""
    token: str = files.template_variables.get("bos_token", "")
    return token if token and tokenizer.encode("a").tokens[:1] == [token] else ""


def check_template(model: str, files: ModelFiles, sources: Iterable[tuple[Source, Iterable[RowBlock]]]) -> None:
    """Raise ConfigError if the model has no chat template and a source's first usable row is a conversation."""
    if files.chat_template:
        return
    for source, blocks in sources:
        first = next(iter(first_samples(source, blocks)), None)
        if first is not None and not first.is_text and first.tokens is None:
            raise ConfigError(
                f"--model {model} has no chat template (base models have none), and {source.label} holds conversations",
                "Give a template with --chat-template FILE.jinja, or take the instruct model. Base models can be "
                'trained on plain text: rows with only "text", or .txt files.',
            )


def encode_samples(group: Sequence[Sample | Dropped], encoder: Encoder) -> Iterator[list[EncodedSample] | Dropped]:
    """Encode the samples of a group together, and yield each result in order; rows already dropped pass through."""
    samples = [item for item in group if isinstance(item, Sample)]
    together = guard_row("", 0, encoder.encode, samples)
    if isinstance(together, Dropped):  # an unexpected error: only the row at fault must be dropped
        alone = (guard_row(sample.source, sample.row, encoder.encode, [sample]) for sample in samples)
        encoded = (result if isinstance(result, Dropped) else result[0] for result in alone)
    else:
        encoded = (result for result in together)
    for item in group:
        yield next(encoded) if isinstance(item, Sample) else item


def first_row_error(source: Source, blocks: Iterable[RowBlock]) -> str | None:
    """Check the first block of rows before a long run: return a warning if no row may read its media, else None."""
    media_of_rows = filter(None, map(media_refs, first_samples(source, blocks)))
    refusals = [next(filter(None, map(_refusal, refs)), None) for refs in media_of_rows]
    if not refusals or not all(refusals):
        return None
    return f"{source.label}: the first {len(refusals)} rows with media will be dropped ({NOT_ALLOWED}): {refusals[0]}"


def _refusal(ref: MediaRef) -> str | None:
    try:
        check_allowed(ref)
    except MediaProblem as problem:
        return problem.detail
    except (StorageError, ValueError):  # an invalid path, which encoding reports
        return None
    return None
