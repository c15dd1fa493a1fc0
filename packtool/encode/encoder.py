"""Encode samples to tokens, labels and media spans, and blocks of rows for export's tasks and for streaming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from packtool import storage
from packtool.config.data import EncodeSpec
from packtool.encode.boxes import BoxWriter
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import media_encoding
from packtool.encode.families.record import MediaEncoding, Medium
from packtool.encode.fit import Tokenized, drop_too_long, fit, fit_all
from packtool.encode.loss_scale import LossScale, Weights, loss_scale_of, parse_loss_scale
from packtool.encode.media_spans import (
    MediaLayout,
    MediaTokens,
    TokenizedLayout,
    join_pieces,
    lay_out,
    num_common,
)
from packtool.encode.model_files import ModelFiles
from packtool.encode.prepared import PreparedRows
from packtool.encode.row_parts import RowParts, expansion_of, joined
from packtool.encode.targets import TurnFinder, TurnPieces, turn_finder
from packtool.encode.template import ChatTemplate, TemplateFailure, strings_of
from packtool.encode.tokenize import ControlVocabulary, Piece, PieceTokenizer, Shield
from packtool.errors import ConfigError, StorageError
from packtool.media.files import MediaProblem, check_allowed
from packtool.rows.forms import to_sample
from packtool.rows.forms.columns import RowProblem
from packtool.rows.forms.media import lone_mark_detail
from packtool.rows.media_policy import NOT_ALLOWED
from packtool.rows.parsing import Problem
from packtool.rows.read import read_block
from packtool.rows.sample import Dropped, MediaKind, MediaRef, Sample, Turn, guard_row, unexpected_drop
from packtool.rows.source import RowBlock, Source


def remarks_on(spec: EncodeSpec, files: ModelFiles, media: MediaEncoding) -> tuple[str, ...]:
    """Return notes for the user on how rows are encoded for a model, a line each."""
    remarks = [*media.remarks]
    requested, loss_scale = spec.loss_scale, loss_scale_of(spec.loss_scale, files.is_hybrid_thinking)
    if loss_scale != requested:
        remarks.append(
            f"--loss-scale {requested} means {loss_scale} here: the chat template is one for hybrid thinking, whose "
            f"prompt writes the empty thinking block itself, so it carries no loss; {requested}+keep_empty_think "
            "trains it"
        )
    if files.end_mark:
        remarks.append(
            f"the chat template ends no answer, and generation stops at {files.end_mark.strip()}, which opens the next "
            "turn: it stands behind the last answer, too, and is trained as the end of each"
        )
    if spec.expand_turns == "auto":
        remarks.append(
            "--expand-turns auto: the chat template leaves out what earlier turns thought, so a row in which it does "
            "becomes several samples"
            if expansion_of("auto", files) == "auto"
            else "--expand-turns auto changes nothing: the chat template keeps what earlier turns thought"
        )
    return tuple(remarks)


_MAX_REMEMBERED_MEDIA = 10_000
_CHARS_PER_TOKEN = 8
"""Texts with more characters per allowed token are checked before they are tokenized; most texts have fewer."""


class _Rendered(NamedTuple):
    """A sample between rendering and tokenization."""

    sample: Sample
    pieces: list[Piece]
    turns: list[TurnPieces]
    media: dict[str, list[Medium]]
    layout: MediaLayout


class Encoder:
    """Encodes samples for one model and one spec.

    Args:
        spec: the options that decide the tokens.
        files: the model's tokenizer, template and settings.
        media: encoding of its media; by default that of the spec and the files.

    Raises:
        ConfigError: if the model cannot be encoded for.
    """

    def __init__(self, spec: EncodeSpec, files: ModelFiles, media: MediaEncoding | None = None) -> None:
        self.spec = spec
        self._media = media or media_encoding(files, spec)
        self.limits = self._media.limits
        self.media_tokens = MediaTokens.of(files.config)
        media_tokens, as_list = self._media.control_tokens, self._media.content_as_list
        self._tokenizer = tokenizer = _tokenizer(files)
        self._template: ChatTemplate | None = None
        self._finder: TurnFinder | None = None
        if files.chat_template:
            self._template = ChatTemplate(files.chat_template, files.template_variables, content_as_list=as_list)
            self._vocabulary, self._finder = turn_finder(self._template, tokenizer, media_tokens)
        else:
            self._vocabulary = ControlVocabulary(tokenizer, media_tokens)
        if missing := [token for token in media_tokens if token not in self._vocabulary.ids]:
            raise ConfigError(
                f"--model {spec.model}: its tokenizer does not know {', '.join(missing)}, which config.json calls for",
                "Tokenizer and config.json belong to different models: take both from one.",
            )
        self._boxes = BoxWriter(files, spec, self.limits.image, frozenset(self._vocabulary.ids), self._measure)
        self._pieces = PieceTokenizer(tokenizer, self._vocabulary)
        self._is_hybrid_thinking = files.is_hybrid_thinking
        expansion = replace(spec, expand_turns=expansion_of(spec.expand_turns, files))
        self._parts = RowParts(expansion, self._template, self._finder, self._pieces_of)
        self.remarks = remarks_on(spec, files, self._media)
        self._end_of_text = files.template_variables.get("eos_token", "")
        self._measured: dict[tuple[object, ...], Medium] = {}
        self._header_ids: dict[tuple[str, str], list[int]] = {}

    def encode(self, samples: Sequence[Sample]) -> list[list[EncodedSample] | Dropped]:
        """Encode many samples; each becomes exactly one result, in order.

        Returns:
            for each sample why it was dropped, or its encoded samples: one, several with ``split``, or an
            ``EncodedRow`` where its turns or responses are samples.

        Raises:
            RowError: for a sample that does not fit when the strategy is ``raise``.
        """
        if any(sample.tokens is not None for sample in samples):
            return [self._encode_prepared(s) if s.tokens is not None else self.encode([s])[0] for s in samples]
        ready = [self._boxes.write(sample) for sample in samples]
        rows = [each if isinstance(each, Dropped) else self._parts.of(each) for each in ready]
        results = iter(self._encode([part for row in rows if isinstance(row, list) for part in row]))
        return [joined(row, [next(results) for _ in row]) if isinstance(row, list) else row for row in rows]

    def _encode(self, samples: Sequence[Sample]) -> list[list[EncodedSample] | Dropped]:
        items = [self._render(sample) for sample in samples]
        units = [unit for item in items if isinstance(item, _Rendered) for unit in item.layout.units]
        ends = self._ends(items)
        ids = self._pieces.encode([unit._replace(text="") if i in ends else unit for i, unit in enumerate(units)])
        for i, (kept, _) in ends.items():
            ids[i] = kept
        results: list[list[EncodedSample] | Dropped] = []
        start = 0
        for item in items:
            if isinstance(item, Dropped):
                results.append(item)
                continue
            stop = start + len(item.layout.units)
            tokenized = self._tokenized(item, ids[start:stop])
            if num_removed := sum(ends[i][1] for i in range(start, stop) if i in ends):
                tokenized = replace(tokenized, num_removed=num_removed)
            results.append(fit(tokenized, self.spec))
            start = stop
        return results

    def _ends(self, items: Sequence[_Rendered | Dropped]) -> dict[int, tuple[list[int], int]]:
        """Tokenize only both ends of texts whose middle is certainly cut.

        Truncation keeps the first or the last ``max_length`` tokens of a row, so no more of any text. Not where a
        medium's place or a rule for weights is searched among the tokens of the entire text.

        Returns:
            by the number of the text among all units, its first and last ids, and the number of ids between them.
        """
        ends: dict[int, tuple[list[int], int]] = {}
        limit, start = self.spec.max_length, 0
        if self.spec.truncation_strategy not in ("left", "right"):
            return ends
        for item in items:
            if isinstance(item, Dropped):
                continue
            units = item.layout.units
            long = [i for i, unit in enumerate(units) if len(unit.text) > 2 * _CHARS_PER_TOKEN * limit]
            rules = parse_loss_scale(item.sample.loss_scale or self.spec.loss_scale).rules
            if long and not rules and not item.layout.borders:
                both_ends = {start + i: self._pieces.ends(units, i, limit) for i in long}
                ends |= {i: both for i, both in both_ends.items() if both is not None}
            start += len(units)
        return ends

    @cached_property
    def _prepared(self) -> PreparedRows:
        num_ids = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        return PreparedRows(self.spec, self._media, self.media_tokens, self._vocabulary.ids, num_ids)

    def _encode_prepared(self, sample: Sample) -> list[EncodedSample] | Dropped:
        """Encode a row that another tool has tokenized."""
        try:
            parts = self._prepared.tokenized(sample, self._media_of(sample))
        except Problem as problem:
            return Dropped(sample.source, sample.row, problem.reason, problem.detail)
        return fit_all(parts, self.spec)

    def _media_of(self, sample: Sample) -> dict[str, list[Medium]]:
        """Measure the media of a row, by kind; raise MediaProblem if one cannot be used."""
        pads = self.media_tokens.pads
        # Their order would be lost, since one placeholder token stands for both.
        if sample.images and sample.videos and pads.get("image") == pads.get("video", -1):
            detail = "a row may have pictures or videos, and this one has both"
            raise MediaProblem("media_unsupported", f"this model takes a video's frames as pictures: {detail}")
        return {kind: [self._measure(kind, ref) for ref in refs] for kind, refs in sample.media.items()}

    def _render(self, sample: Sample) -> _Rendered | Dropped:
        try:
            rendered = self._rendered(sample)
        except Problem as problem:
            return Dropped(sample.source, sample.row, problem.reason, problem.detail)
        return self._drop_too_long(rendered) or rendered

    def _rendered(self, sample: Sample) -> _Rendered:
        """Render a conversation and write out its media; raise a Problem if that is not possible."""
        media = self._media_of(sample)
        if self._media.control_tokens and sample.lone_mark:
            raise RowProblem(f"{sample.lone_mark}_marks", lone_mark_detail(sample.lone_mark))
        if self._media.one_picture_only and len(sample.images) > 1:
            detail = "this model's processor spells several pictures of a row in a way that packtool does not follow"
            raise RowProblem("media_unsupported", detail)
        pieces = self._pieces_of(sample)
        marks = [piece.media for piece in pieces]
        for kind, of_kind in media.items():
            num_marks = marks.count(kind)
            if num_marks != len(of_kind):
                detail = f"the chat template left {num_marks} of {len(of_kind)} {kind}s in the conversation"
                raise RowProblem(f"{kind}_marks", detail)
        turns = [] if sample.is_text or self._finder is None else self._finder.find(pieces)
        num_answers = 0 if sample.is_text else [turn.role for turn in sample.turns].count("assistant")
        has_own_loss = any(turn.loss is not None or turn.loss_scale is not None for turn in sample.turns)
        if len(turns) < num_answers or (has_own_loss and len(turns) != num_answers):
            detail = f"{len(turns)} of {num_answers} assistant turns can be told apart in the rendered conversation"
            raise RowProblem("turns_not_found", detail)
        layout = lay_out(pieces, media, self._media.parts, self.spec.max_length)
        return _Rendered(sample, pieces, turns, media, layout)

    def _drop_too_long(self, item: _Rendered) -> Dropped | None:
        """Drop a row whose text alone is certainly too long, before it is tokenized.

        Not where a part of it would be kept (``_ends``), or where its media may be too long as well (``fit``).
        """
        limit, units = self.spec.max_length, item.layout.units
        if self.spec.truncation_strategy not in ("delete", "raise"):
            return None
        if sum([len(unit.text) for unit in units]) <= _CHARS_PER_TOKEN * limit:
            return None
        min_tokens = self._pieces.min_tokens(units, limit + 1)
        if min_tokens <= limit or sum(unit.times for unit in units) >= limit:
            return None
        return drop_too_long(item.sample, self.spec, f"at least {min_tokens}")

    def _pieces_of(self, sample: Sample) -> list[Piece]:
        """Return the rendered conversation (a text for pretraining: the text itself) in pieces.

        Raises:
            RowProblem: if the template refuses it.
        """
        kinds = [kind for kind, refs in sample.media.items() if refs]
        strings = strings_of(sample)
        try:
            shield = Shield(self._vocabulary, strings, sample.control)
        except ValueError as error:
            raise RowProblem("private_characters", str(error)) from error
        if sample.is_text:
            text = "".join(shield.text(shield.media(turn.content, kinds)) for turn in sample.turns)
            return [*shield.split(text), *([Piece(self._end_of_text, "", "")] if self._end_of_text else [])]
        if self._template is None:
            detail = "the row is a conversation, and the model has no chat template: --chat-template FILE gives one"
            raise RowProblem("no_chat_template", detail)
        as_list = self._media.content_as_list
        try:
            messages = []
            for turn in sample.turns:
                text = shield.text(shield.media(turn.content, kinds))
                content = shield.as_list(text) if as_list else text
                messages.append({"role": turn.role, "content": content, **shield.value(turn.extra)})
            tools = shield.value(sample.tools)
            rendered = self._template.render(messages, tools)
        except TemplateFailure as failure:
            raise RowProblem("template_refused", str(failure)) from failure
        except RecursionError as error:
            raise RowProblem("template_refused", "the row's values nest too deep") from error
        if (number := self._template.missing_turn(sample.turns, messages, tools)) is not None:
            detail = f"the chat template leaves out turn {number}, of the {sample.turns[number].role}"
            raise RowProblem("turn_left_out", detail)
        return shield.split(rendered, self._media.placeholders)

    def _measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        if ref.path is None:
            return self._media.measure(kind, ref)
        key = kind, ref.path, ref.clip, ref.limits, ref.policy
        medium = self._measured.get(key)
        if medium is None:
            medium = self._media.measure(kind, ref)
            if len(self._measured) < _MAX_REMEMBERED_MEDIA:
                self._measured[key] = medium
        return medium

    def _tokenized(self, item: _Rendered, unit_ids: list[list[int]]) -> Tokenized:
        tokens = join_pieces(item.layout, unit_ids, self._vocabulary.ids, self._encode_one)
        turns = self._turns(item, tokens, unit_ids)
        borders = None
        if item.sample.part is not None:  # other samples of the row may continue from there
            places = {place for turn in turns for place in (*turn.header, *turn.span)}
            borders = np.array(sorted(places), np.int32)
        return Tokenized(
            sample=item.sample,
            ids=np.array(tokens.ids, np.int32),
            turns=np.array([end for turn in turns if turn.turn.loss is not False for end in turn.span], np.int32),
            spans=tokens.spans,
            media=item.media,
            weights=self._weights(item, tokens, turns),
            num_removed=item.layout.num_omitted,
            borders=borders,
        )

    def _weights(self, item: _Rendered, tokens: TokenizedLayout, turns: Sequence[_TrainedTurn]) -> Weights | None:
        """Return the weight of each token as a target, None where the turns' tokens weigh 1."""
        loss_scale = item.sample.loss_scale or self.spec.loss_scale
        scale = parse_loss_scale(loss_scale_of(loss_scale, self._is_hybrid_thinking))
        has_own_loss = any(turn.turn.loss is not None or turn.turn.loss_scale is not None for turn in turns)
        if scale.base == "default" and not scale.rules and not has_own_loss:
            return None
        weights = np.full(len(tokens.ids), float(scale.base == "all"), np.float32)
        for number, turn in enumerate(turns):
            turn_weights: Any = float(scale.base != "last_round" or number == len(turns) - 1)
            rules = scale
            if turn.turn.loss is not None:
                turn_weights, rules = float(turn.turn.loss), scale.of_marked_turns
            if turn_weights and rules.rules and not item.sample.is_text:
                turn_weights = self._rule_weights(item.layout, tokens, turn, rules)
            factor = 1.0 if turn.turn.loss_scale is None else turn.turn.loss_scale
            weights[slice(*turn.span)] = turn_weights * factor
        return weights

    def _rule_weights(
        self, layout: MediaLayout, tokens: TokenizedLayout, turn: _TrainedTurn, scale: LossScale
    ) -> Weights:
        """Return the weights of a turn's tokens by the rules for its text; a token has its first character's weight."""
        text, firsts, places = "", list[int](), list[int]()
        for number in range(turn.first_unit, turn.last_unit + 1):
            unit = layout.units[number]
            is_last = number == turn.last_unit and number != turn.first_unit
            if unit.control:
                places += range(tokens.text_starts[number] - unit.times, tokens.text_starts[number])
                firsts += [len(text)] * unit.times
                text += unit.control
            if not is_last:
                offsets = self._pieces.offsets(unit.text)
                places += range(tokens.text_starts[number], tokens.text_starts[number] + len(offsets))
                firsts += [len(text) + start for start, _ in offsets]
                text += unit.text
        start, end = turn.span
        inside = [(place, first) for place, first in zip(places, firsts, strict=True) if start <= place < end]
        assert [place for place, _ in inside] == list(range(start, end)), "every token has its place in the text"
        # Rules apply to the answer, not to the header before it.
        answer_start = min((first for _, first in inside), default=0)
        return scale.text_weights(text[answer_start:])[[first - answer_start for _, first in inside]]

    def _encode_one(self, piece: Piece) -> list[int]:
        return self._pieces.encode([piece])[0]

    def _turns(self, item: _Rendered, tokens: TokenizedLayout, unit_ids: list[list[int]]) -> list[_TrainedTurn]:
        """Return the assistant's turns that have tokens."""
        pieces, firsts, sample = item.pieces, item.layout.firsts, item.sample
        if sample.is_text:
            return [_TrainedTurn(sample.turns[-1], (0, len(tokens.ids)), 0, len(item.layout.units) - 1)]
        answers = [turn for turn in sample.turns if turn.role == "assistant"]
        turns = []
        for number, turn in enumerate(item.turns):
            # A blank at the start of the answer may merge with the header's last: the merged token is the answer's.
            first = firsts[turn.first]
            text_start, ids = tokens.text_starts[first], unit_ids[first]
            start = text_start + self._header_length(pieces[turn.first].control, turn.header, ids)
            header: tuple[int, ...] = ()
            if sample.part is not None and self._finder is not None:
                # A line break at the start of the answer may merge with the header's.
                header = text_start, text_start + self._header_length(*self._finder.header[-1], ids)
            is_ended = turn.last < len(pieces)
            last = firsts[turn.last] if is_ended else len(item.layout.units) - 1
            end = tokens.text_starts[last] if is_ended else len(tokens.ids)
            if end > start:
                message = answers[number] if len(answers) == len(item.turns) else Turn("assistant", "")
                turns.append(_TrainedTurn(message, (start, end), first, last, header))
        return turns

    def _header_length(self, control: str, header: str, ids: Sequence[int]) -> int:
        """Return the number of ``ids``, a text's after a control token, that are those of a header."""
        header_ids = self._header_ids.get((control, header))
        if header_ids is None:  # a template has one or two
            header_ids = self._header_ids[control, header] = self._encode_one(Piece(control, "", header))
        return num_common(header_ids, ids)


class _TrainedTurn(NamedTuple):
    """An assistant's turn: its message, tokens [start, end), and the first and last unit that has them.

    Args:
        header: where its header begins and ends, without the thinking that the generation prompt writes.
    """

    turn: Turn
    span: tuple[int, int]
    first_unit: int
    last_unit: int
    header: tuple[int, ...] = ()


def _tokenizer(files: ModelFiles) -> Tokenizer:
    try:
        return Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the tokenizers library raises nothing more special
        raise ConfigError(f"{files.directory}: tokenizer.json cannot be used: {error}") from error


def samples_of(source: Source, blocks: Iterable[RowBlock], *, may_hold_secrets: bool) -> Iterator[Sample | Dropped]:
    """Yield a sample for every row, in order, or why it is dropped.

    Args:
        may_hold_secrets: False drops rows with a medium whose URL has a user, password or query.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be read.
    """
    for block in blocks:
        for number, row in read_block(source, block):
            if isinstance(row, Dropped):
                yield row
                continue
            try:  # as ``guard_row``, without the cost of a call
                sample = _sample(row, source, number, may_hold_secrets)
            except BaseException as error:
                sample = unexpected_drop(source.label, number, error)
            yield sample


def check_template(model: str, files: ModelFiles, sources: Iterable[tuple[Source, Iterable[RowBlock]]]) -> None:
    """Raise ConfigError if a source's first good row is a conversation, and the model has no chat template."""
    if files.chat_template:
        return
    for source, blocks in sources:
        rows = samples_of(source, islice(blocks, 1), may_hold_secrets=True)
        first = next((row for row in rows if isinstance(row, Sample)), None)
        if first is not None and not first.is_text and first.tokens is None:
            raise ConfigError(
                f"--model {model} has no chat template (base models have none), and {source.label} holds conversations",
                "Give a template with --chat-template FILE.jinja, or take the instruct model; base models are trained "
                'on plain text: rows with "text" alone, or .txt files.',
            )


def encode_samples(group: Sequence[Sample | Dropped], encoder: Encoder) -> Iterator[list[EncodedSample] | Dropped]:
    """Yield the result of each sample, in order.

    Samples are encoded together. After an unexpected error each is encoded by itself, so that only the row at fault is
    dropped.
    """
    samples = [item for item in group if isinstance(item, Sample)]
    together = guard_row("", 0, encoder.encode, samples)
    if isinstance(together, Dropped):
        alone = (guard_row(sample.source, sample.row, encoder.encode, [sample]) for sample in samples)
        encoded = (result if isinstance(result, Dropped) else result[0] for result in alone)
    else:
        encoded = (result for result in together)
    for item in group:
        yield next(encoded) if isinstance(item, Sample) else item


def first_row_error(source: Source, blocks: Iterable[RowBlock]) -> str | None:
    """Return a message if all media in the first block of rows may not be read, for before a long run."""
    items = samples_of(source, islice(blocks, 1), may_hold_secrets=True)
    with_media = [refs for item in items if isinstance(item, Sample) and (refs := _refs(item))]
    refusals = [next(filter(None, map(_refusal, refs)), None) for refs in with_media]
    if not refusals or not all(refusals):
        return None
    return f"{source.label}: the first {len(refusals)} rows with media will be dropped ({NOT_ALLOWED}): {refusals[0]}"


def _refusal(ref: MediaRef) -> str | None:
    try:
        check_allowed(ref)
    except MediaProblem as problem:
        return problem.detail
    except (StorageError, ValueError):  # no path at all: another problem
        return None
    return None


def _sample(row: dict[str, object], source: Source, number: int, may_hold_secrets: bool) -> Sample | Dropped:
    try:
        sample = to_sample(row, source, number)
    except RowProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)
    for ref in () if may_hold_secrets else _refs(sample):
        if ref.path is not None and "://" in ref.path and (masked := storage.masked(ref.path)) != ref.path:
            detail = f"{masked}: the URL has a user, password or query, which would be kept; export with --media embed"
            return Dropped(source.label, number, "media_secret", detail)
    return sample


def _refs(sample: Sample) -> list[MediaRef]:
    refs = [ref for group in sample.media.values() for ref in group]
    return refs + [frame for ref in refs for frame in ref.frames]
