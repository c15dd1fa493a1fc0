"""Data hygiene: exact duplicates, conflicting answers, and overlap with validation rows and held-out questions.

Tasks add hashes to their parts of the index, and at the end those of all rows are sorted (``compare``). Hashes have 64
bits: among a million rows, the probability of a false match is below 1e-7.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.local import sha256_of
from packtool.cache.manifest import Manifest
from packtool.cache.origins import number_names
from packtool.cache.reader import ShardFile
from packtool.cache.shard import INDEX
from packtool.config.data import ExportConfig
from packtool.config.settings import load_json
from packtool.constants import IMAGE_MARK, MEDIA_MARKS, TRAIN_SPLIT, VAL_SPLIT
from packtool.encode.encoded import EncodedSample, IntArray
from packtool.encode.encoder import Encoder, encode_samples
from packtool.encode.families.record import MediaEncoding
from packtool.encode.media_spans import MediaTokens, MediumSpan, media_spans
from packtool.encode.model_files import ModelFiles
from packtool.encode.prefix_hashes import by_content, medium_identity
from packtool.errors import DataError
from packtool.progress import Progress
from packtool.rows.read import samples_of, scan_sources
from packtool.rows.sample import Dropped, Sample, Turn
from packtool.rows.sources import sources_of

FILE_NAME = "hygiene.jsonl"
POLICIES = ("on_duplicates", "on_overlap")
_NGRAM = 13
_NO_MAX_LENGTH = 1 << 30
_MARKS = re.compile("|".join(MEDIA_MARKS.values()))

_ROW_FIELDS = [("content", pa.uint64()), ("prompt", pa.uint64()), ("is_val", pa.bool_()), ("source", pa.string())]
_ROW_FIELDS += [("row", pa.int64()), ("question", pa.int32())]
_ROW_FIELDS += [("signature", pa.binary())]
HASHED_INDEX = pa.schema([*INDEX, *_ROW_FIELDS, ("is_first", pa.bool_()), ("truncated", pa.int32())])
"""The columns of a task's part of the index. Those besides ``INDEX`` describe the row of a sample:

``content``: hash of its tokens and media; ``prompt``: of those before its last answer, or ``content`` without a prompt.
``question``: an overlapping element of ``HeldOut.questions``, or -1. ``signature``: see ``_signature``; null without
``--near-duplicates``. ``is_first``: first sample of the row.
"""

Hashes = npt.NDArray[np.uint64]


def identity_settings(config: ExportConfig) -> dict[str, Any]:
    """Return the settings of hygiene for the identity of a cache; none by default."""
    settings: dict[str, Any] = {name: "drop" for name in POLICIES if getattr(config, name) == "drop"}
    if config.near_duplicates is not None:
        settings["near_duplicates"] = config.near_duplicates
    if config.check_against:
        digests = [sha256_of(spec.path) + spec.settings for spec in sources_of(config, held_out=True)]
        settings["check_against"] = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
    return settings


class HeldOut:
    """Hashes of the prompts of held-out questions, and of 13 consecutive tokens of their texts.

    Args:
        keys: the hashes, (K,), ascending.
        numbers: element of ``questions`` that each hash belongs to, (K,).
        questions: file and row of each question, twice: for its prompt and for its text (``by``).
    """

    def __init__(self, keys: Hashes, numbers: IntArray, questions: Sequence[dict[str, Any]] = ()) -> None:
        self.keys, self.numbers, self.questions = keys, numbers, questions
        num_bits = min((32 * len(keys)).bit_length(), 26)  # small enough for a processor's cache
        self._shift = np.uint64(64 - num_bits)
        # By the first bits of a hash: excludes nearly all hashes before the search.
        self._may_match = np.zeros(1 << num_bits, bool)
        self._may_match[keys >> self._shift] = True

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return HeldOut, (self.keys, self.numbers)  # all that tasks need

    def match(self, rows: Sequence[list[EncodedSample]], prompts: Hashes) -> IntArray:
        """Find the rows that overlap with a held-out question: by 13 consecutive tokens (an n-gram), or by the prompt.

        Args:
            rows: the samples of each of R rows.
            prompts: hash of the prompt of each row, (R,).

        Returns:
            The number of a question for each row, an element of ``questions``, int32 (R,); -1 for none. The prompt
            takes precedence.
        """
        row_of_sample = [i for i, row in enumerate(rows) for _ in row]
        ids_of_samples = [sample.input_ids for row in rows for sample in row]
        sample_ends = np.cumsum([len(ids) for ids in ids_of_samples])  # in the joined tokens of all samples
        matches = np.full(len(rows), -1, np.int32)
        for start, question in self._find(ngram_hashes(np.concatenate(ids_of_samples))):
            sample = int(np.searchsorted(sample_ends, start, side="right"))
            is_in_one_sample = start + _NGRAM <= sample_ends[sample]
            if is_in_one_sample:
                matches[row_of_sample[sample]] = question
        for i, question in self._find(prompts):
            matches[i] = question
        return matches

    def _find(self, hashes: Hashes) -> Iterator[tuple[int, int]]:
        """Return the index of each hash that a question has, and the question's number."""
        candidates = np.flatnonzero(self._may_match[hashes >> self._shift])  # excludes nearly all hashes
        positions = np.minimum(np.searchsorted(self.keys, hashes[candidates]), len(self.keys) - 1)
        is_key = self.keys[positions] == hashes[candidates]
        return zip(candidates[is_key].tolist(), self.numbers[positions[is_key]].tolist(), strict=True)


def read_held_out(config: ExportConfig, files: ModelFiles, media: MediaEncoding, progress: Progress) -> HeldOut:
    """Read the held-out questions of ``--check-against``, and hash their prompts and texts for a search of overlaps.

    Questions may have any length; DataError if none can be encoded. Each question has two numbers: an even one for its
    prompt, all tokens before the answer, and an odd one for its text, in groups of 13 consecutive tokens ("n-grams").
    """
    encoder = _question_encoder(config, files, media)
    questions: list[dict[str, Any]] = []  # by number
    number_by_prompt: dict[int, int] = {}  # first question with a prompt, by the hash of that
    ngrams_by_text: dict[str, tuple[int, Hashes]] = {}  # number of the first question with a text, and its n-grams
    for row, samples in _encode_questions(config, encoder, progress):
        position = {"source": row.source, "row": row.row}
        prompt_hash, _ = _hash_row(samples, encoder.media_tokens)
        number_by_prompt.setdefault(prompt_hash, len(questions))
        questions.append({**position, "by": "prompt"})
        text, ngrams = _text_of(row, encoder)
        ngrams_by_text.setdefault(text, (len(questions), ngrams))
        questions.append({**position, "by": "13-gram"})
    if not questions:
        raise DataError(f"--check-against {' '.join(config.check_against)}: there is no question", code="D004")
    return _join_hashes(number_by_prompt, list(ngrams_by_text.values()), questions)


def _question_encoder(config: ExportConfig, files: ModelFiles, media: MediaEncoding) -> Encoder:
    spec = replace(config.encode_spec, max_length=_NO_MAX_LENGTH, min_length=0, expand_turns="false")
    return Encoder(spec, files, media)


def _join_hashes(
    prompts: Mapping[int, int], texts: Sequence[tuple[int, Hashes]], questions: Sequence[dict[str, Any]]
) -> HeldOut:
    """Join the hashes of prompts and of the n-grams of texts; a hash that several questions have keeps the first one.

    ``prompts``: number of the question by hash; ``texts``: number of the question, and its n-grams in order.
    """
    ngrams, ngram_numbers = _rare_ngrams(texts)
    hashes = np.concatenate([np.array(list(prompts), np.uint64), ngrams])
    numbers = np.concatenate([list(prompts.values()), ngram_numbers]).astype(np.int32)
    keys, first_positions = np.unique(hashes, return_index=True)
    return HeldOut(keys, numbers[first_positions], questions)


def _encode_questions(config: ExportConfig, encoder: Encoder, progress: Progress) -> Iterator[tuple[Sample, Any]]:
    """Yield the questions of ``--check-against``, each with its encoded samples; unusable rows are only counted.

    A conversation without an answer gets one, "-", because the prompt of a row is what precedes its last answer.
    """
    drops: list[Dropped] = []
    for scanned in scan_sources(sources_of(config, held_out=True), config.seed):
        rows = samples_of(scanned.source, scanned.blocks, may_hold_secrets=True)
        while batch := [_with_answer(row) for row in islice(rows, 128)]:
            for row, result in zip(batch, encode_samples(batch, encoder), strict=True):
                if isinstance(result, Dropped):
                    drops.append(result)
                elif isinstance(row, Sample):  # as every row with a result
                    yield row, result
    if drops:
        progress.note(f"--check-against: {len(drops):,} unusable rows; the first: {drops[0].summary}")


def _with_answer(row: Sample | Dropped) -> Sample | Dropped:
    """Return a row with an answer if it is a conversation without one."""
    if isinstance(row, Dropped) or not row.turns or row.responses or row.turns[-1].role == "assistant":
        return row
    return replace(row, turns=(*row.turns, Turn("assistant", "-")))


def _text_of(row: Sample, encoder: Encoder) -> tuple[str, Hashes]:
    """Return the user's texts, or all texts of a row without a user, and the hashes of their n-grams without media."""
    texts = [turn.content for turn in row.turns if turn.role == "user"] or [turn.content for turn in row.turns]
    text = IMAGE_MARK.join(texts)
    return text, np.concatenate([ngram_hashes(encoder.encode_text(piece)) for piece in _MARKS.split(text)])


def _rare_ngrams(texts: Sequence[tuple[int, Hashes]]) -> tuple[Hashes, IntArray]:
    """Select the n-grams (hashes of 13 consecutive tokens) by which a text can be recognized.

    N-grams that several texts have, such as those of an instruction, are left out, with all that overlap them.

    Args:
        texts: number of each text, and its n-grams in order.

    Returns:
        The remaining N n-grams of all texts, (N,), and the number of the text of each, (N,).
    """
    all_ngrams = np.concatenate([np.unique(ngrams) for _, ngrams in texts])  # each once per text
    distinct_ngrams, num_texts_with = np.unique(all_ngrams, return_counts=True)
    max_texts = max(1, min(10, len(texts) // 2))
    shared = distinct_ngrams[num_texts_with > max_texts]
    rare: list[Hashes] = []
    for _, ngrams in texts:
        is_shared = np.append(np.isin(ngrams, shared), False)
        # N-grams that begin up to 12 tokens before or after a shared one have tokens of it.
        num_near = np.convolve(is_shared, np.ones(2 * _NGRAM - 1))  # begins 12 elements early
        is_near = num_near[_NGRAM - 1 : _NGRAM - 1 + len(ngrams)] > 0
        rare.append(ngrams[~is_near])
    return np.concatenate(rare), np.repeat([number for number, _ in texts], [len(ngrams) for ngrams in rare])


_MIX_1, _MIX_2, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(32)
_BASE_1, _BASE_2, _BASE_4, _BASE_5 = (np.uint64(pow(0xA0761D6478BD642F, n, 1 << 64)) for n in (1, 2, 4, 5))


def ngram_hashes(ids: IntArray) -> Hashes:
    """Return the hash of each 13 consecutive ones of T tokens, (max(T - 12, 0),): a polynomial of mixed tokens."""
    if len(ids) < _NGRAM:
        return np.empty(0, np.uint64)
    ones = ids.astype(np.uint64) * _MIX_1
    ones ^= ones >> _HALF
    ones *= _MIX_2
    twos = ones[:-1] * _BASE_1 + ones[1:]
    fours = twos[:-2] * _BASE_2 + twos[2:]
    eights = fours[:-4] * _BASE_4 + fours[4:]
    hashes: Hashes = eights[:-5] * _BASE_5 + fours[8:-1] * _BASE_1 + ones[12:]
    return hashes


def hash_columns(
    rows: Sequence[list[EncodedSample]],
    split: str,
    tokens: MediaTokens,
    held_out: HeldOut | None,
    finds_near_duplicates: bool = False,
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns that ``HASHED_INDEX`` adds to ``INDEX`` for the S samples of some rows, (S,) each."""
    columns_of_rows = _row_columns(rows, tokens, held_out)
    columns_of_rows["is_val"] = np.full(len(rows), split == VAL_SPLIT)
    signatures = [_signature(row) if finds_near_duplicates else None for row in rows]
    columns_of_rows["signature"] = np.array(signatures, object)
    num_samples = [len(row) for row in rows]
    columns = {name: np.repeat(column, num_samples) for name, column in columns_of_rows.items()}
    columns["is_first"] = np.array([i == 0 for row in rows for i in range(len(row))], bool)
    columns["truncated"] = np.array([sample.num_truncated for row in rows for sample in row], np.int32)
    return columns


def _row_columns(
    rows: Sequence[list[EncodedSample]], tokens: MediaTokens, held_out: HeldOut | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns ``_ROW_FIELDS`` of R rows, (R,) each, without ``is_val``."""
    hashes = [_hash_row(row, tokens) for row in rows]
    prompts = np.array([prompt for prompt, _ in hashes], np.uint64)
    questions = np.full(len(rows), -1, np.int32)
    if held_out is not None and rows:
        questions = held_out.match(rows, prompts)
    return {
        "content": np.array([content for _, content in hashes], np.uint64),
        "prompt": prompts,
        "source": np.array([row[0].source for row in rows], object),
        "row": np.array([row[0].row for row in rows], np.int64),
        "question": questions,
    }


def _hash_row(samples: Sequence[EncodedSample], tokens: MediaTokens) -> tuple[int, int]:
    """Return 64-bit hashes of a row's prompt and of its content, including the media in them.

    The prompt is the last sample up to its last answer; the content are all samples of the row. Rows without a prompt
    have the hash of the content for both.
    """
    state = hashlib.blake2b(digest_size=8)
    *other_samples, last = samples
    answer_start = int(last.turns[-2]) if len(last.turns) else 0  # turns: [start, end, start, end, ...] of answers
    _update(state, last, 0, answer_start, tokens)
    prompt = int.from_bytes(state.digest(), "little")
    _update(state, last, answer_start, last.length, tokens)
    for sample in other_samples:
        _update(state, sample, 0, sample.length, tokens)
    content = int.from_bytes(state.digest(), "little")
    has_prompt = answer_start > 1  # a start token alone is no prompt
    return (prompt if has_prompt else content), content


def _update(state: Any, sample: EncodedSample, start: int, stop: int, tokens: MediaTokens) -> None:
    """Add tokens [start, stop) of a sample, and the media among them, to the state of a hash."""
    if sample.images or sample.videos or sample.audios:
        spans = media_spans(sample, tokens)
        if len(spans) < len(sample.media):  # they cannot be located
            spans = [MediumSpan(medium, 0, 0) for medium in sample.media]
        for span in spans:
            if start <= span.start < stop:
                state.update(medium_identity(span, by_content))
    state.update(np.ascontiguousarray(sample.input_ids[start:stop], "<i4").data)


_NUM_PERMUTATIONS = 128
_SHINGLE = 5  # tokens
_SHINGLE_WEIGHTS = _MIX_2 ** np.arange(1, _SHINGLE + 1, dtype=np.uint64)


def _signature(samples: Sequence[EncodedSample]) -> bytes:
    """Return the MinHash signature of a row, 128 numbers of 4 bytes: similar rows have many equal numbers.

    It is computed from the row's shingles, all groups of 5 consecutive tokens, combined with a hash of all media of the
    row, so that rows with different media are never similar.
    """
    media_of_row = [medium for sample in samples for medium in sample.media]
    # Without positions: a word before a picture may differ.
    media = b"".join(medium_identity(MediumSpan(medium, 0, 0), by_content) for medium in media_of_row)
    media_hash = np.frombuffer(hashlib.blake2b(media, digest_size=8).digest(), np.uint64)  # (1,)
    shingles = []
    for sample in samples:
        width = min(_SHINGLE, sample.length)
        windows = np.lib.stride_tricks.sliding_window_view(sample.input_ids.astype(np.uint64), width)
        shingles.append(windows @ _SHINGLE_WEIGHTS[:width])  # one number for each group
    hashes = (np.concatenate(shingles) ^ media_hash) * _MIX_1 >> _HALF
    minhash = _empty_minhash().copy()
    minhash.update_batch(hashes.tolist())
    return bytes(minhash.hashvalues.tobytes())


@cache
def _empty_minhash() -> Any:
    from datasketch import MinHash

    return MinHash(num_perm=_NUM_PERMUTATIONS, hashfunc=int)


def _near_duplicates(rows: _Rows, duplicates: _Positions, threshold: float) -> _Positions:
    """Find for each of R rows the first similar row of its split (train or val); -1 for none, (R,).

    Similar rows share ``threshold`` or more of their shingles (estimated Jaccard similarity). Rows that repeat an
    earlier row are compared with no later row: neither those with an exact duplicate, a position in ``duplicates``,
    (R,), nor those with a similar row.
    """
    from datasketch import MinHashLSH

    near_duplicates = np.full(len(duplicates), -1, np.int64)
    signatures = [np.frombuffer(signature, np.uint32) for signature in rows["signature"]]
    for is_val in (False, True):
        table = MinHashLSH(threshold=threshold, num_perm=_NUM_PERMUTATIONS)
        first_draws: dict[tuple[int, int], int] = {}  # of each row, which may be drawn repeatedly
        for i in np.flatnonzero((rows["is_val"] == is_val) & (duplicates < 0)).tolist():
            first_draw = first_draws.setdefault((rows["source"][i], rows["row"][i]), i)
            if first_draw == i:
                near_duplicates[i] = _find_similar_or_insert(table, i, signatures, threshold)
            else:
                near_duplicates[i] = near_duplicates[first_draw]
    return near_duplicates


def _find_similar_or_insert(table: Any, i: int, signatures: Sequence[npt.NDArray[Any]], threshold: float) -> int:
    """Return the first row in ``table`` that is similar to row ``i``; without one, insert row ``i`` and return -1."""
    minhash = _empty_minhash().copy()
    minhash.hashvalues = signatures[i]
    for j in sorted(table.query(minhash)):
        if np.mean(signatures[i] == signatures[j]) >= threshold:
            return int(j)
    table.insert(i, minhash)
    return -1


_VAL, _HELD_OUT = "val_overlap", "held_out_overlap"
_Rows = Mapping[str, npt.NDArray[Any]]  # columns of ``HASHED_INDEX``, (R,) each
_Positions = npt.NDArray[np.int64]


def _related_rows(rows: _Rows, similarity: float | None) -> dict[str, npt.NDArray[np.integer[Any]]]:
    """Return the number of a related row or held-out question for each kind of finding and row, (R,); -1: none."""
    related = {_VAL: _val_overlaps(rows), "duplicate": _duplicates(rows), "conflict": _conflicts(rows)}
    if similarity is not None:
        related["near_duplicate"] = _near_duplicates(rows, related["duplicate"], similarity)
    return {**related, _HELD_OUT: rows["question"]}


def _first_equal(values: npt.NDArray[Any]) -> _Positions:
    """Return the position of the first equal value, for each of N values, (N,)."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])


def _val_overlaps(rows: _Rows) -> _Positions:
    """Return for each training row the first validation row with its prompt, (R,), or -1."""
    prompt, is_val = rows["prompt"], rows["is_val"]
    val_rows = np.flatnonzero(is_val)
    val_prompts, first = np.unique(prompt[val_rows], return_index=True)  # ascending
    first_val_rows = val_rows[first]  # with each of ``val_prompts``
    overlapping = np.flatnonzero(~is_val & np.isin(prompt, val_prompts))
    val_overlaps = np.full(len(is_val), -1, np.int64)
    val_overlaps[overlapping] = first_val_rows[np.searchsorted(val_prompts, prompt[overlapping])]
    return val_overlaps


def _duplicates(rows: _Rows) -> _Positions:
    """Return for each row the first row of its split with equal content, (R,); -1 for that first row itself."""
    content, source, row, is_val = rows["content"], rows["source"], rows["row"], rows["is_val"]
    duplicates = np.full(len(is_val), -1, np.int64)
    for in_split in (np.flatnonzero(~is_val), np.flatnonzero(is_val)):
        first = in_split[_first_equal(content[in_split])]
        # A row that is drawn repeatedly, as in ``rows.jsonl#2x``, is no duplicate of itself.
        is_same_row = (source[first] == source[in_split]) & (row[first] == row[in_split])
        duplicates[in_split] = np.where(is_same_row, -1, first)
    return duplicates


def _conflicts(rows: _Rows) -> _Positions:
    """Return for each row the first row with the same prompt and other content, (R,), or -1.

    Rows with contents a, a, b and one prompt have the conflicts 2, 2 and 0.
    """
    first = _first_equal(rows["prompt"])  # the first row with the prompt of each row, (R,)
    differs = rows["content"] != rows["content"][first]
    differing = np.flatnonzero(differs)
    # The first row that differs from the first row with its prompt, at the position of the latter; -1 elsewhere.
    firsts, index = np.unique(first[differing], return_index=True)
    first_differing = np.full(len(first), -1, np.int64)
    first_differing[firsts] = differing[index]
    return np.where(differs, first, first_differing[first])


def compare(
    index: pa.Table, held_out: HeldOut | None, config: ExportConfig
) -> tuple[dict[str, int], list[str], list[tuple[int, Dropped]]]:
    """Compare all rows of an export: find duplicates, conflicts, and overlaps with validation or held-out rows.

    Args:
        index: table with a row for each sample, with the columns ``HASHED_INDEX``.
        held_out: questions of ``--check-against``.

    Returns:
        The number of findings by kind, the lines of ``hygiene.jsonl``, and the rows to drop, ascending, each with the
        position of its first sample in the index.
    """
    rows, sources = _rows_of(index)  # columns, one element for each row
    related = _related_rows(rows, config.near_duplicates)  # by kind of finding, the related row of each row or -1
    questions = held_out.questions if held_out else []
    counts = _count_findings(related)
    lines = [json.dumps({"counts": counts}) + "\n"]
    drops: list[tuple[int, Dropped]] = []
    dropped_kinds = _dropped_kinds(config)
    has_finding = np.any([numbers >= 0 for numbers in related.values()], axis=0)  # (R,)
    for i in np.flatnonzero(has_finding).tolist():
        place = _place(rows, sources, i)
        findings = _findings(i, related, rows, sources, questions)
        drop_reason = next((kind for kind in findings if kind in dropped_kinds), None)
        if drop_reason is not None:
            drops.append((int(rows["first_sample"][i]), _dropped(place, drop_reason, findings[drop_reason])))
        lines += _lines_of_row(place, findings, is_dropped=drop_reason is not None)
    return counts, lines, drops


def _count_findings(related: _Rows) -> dict[str, int]:
    """Return the number of rows with each kind of finding, without kinds that no row has."""
    counts = {f"{kind}s": int(np.count_nonzero(numbers >= 0)) for kind, numbers in related.items()}
    return {kinds: count for kinds, count in counts.items() if count}


def _dropped_kinds(config: ExportConfig) -> list[str]:
    kinds = [_VAL, _HELD_OUT] if config.on_overlap == "drop" else []
    return [*kinds, "duplicate", "near_duplicate"] if config.on_duplicates == "drop" else kinds


def _findings(
    i: int, related: _Rows, rows: _Rows, sources: Sequence[str], questions: Sequence[dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the places of the rows or the question that row ``i`` is related to, by kind of finding."""
    findings = {}
    for kind, numbers in related.items():
        number = int(numbers[i])
        if number >= 0:
            findings[kind] = questions[number] if kind == _HELD_OUT else _place(rows, sources, number)
    return findings


def _lines_of_row(place: dict[str, Any], findings: dict[str, Any], *, is_dropped: bool) -> Iterator[str]:
    """Yield a line of ``hygiene.jsonl`` for each finding about the row at ``place``."""
    for kind, related_place in findings.items():
        yield json.dumps({"kind": kind, **place, "of": related_place, "dropped": is_dropped}) + "\n"


def _rows_of(index: pa.Table) -> tuple[_Rows, list[str]]:
    """Return columns of the R rows in ``HASHED_INDEX``, (R,) each, and the names of the numbered sources."""
    source_numbers: dict[str, int] = {}
    columns = {name: index.column(name).to_numpy() for name, _ in _ROW_FIELDS if name != "source"}
    columns["source"] = number_names(index.column("source"), source_numbers)
    columns["first_sample"] = np.arange(len(index))  # position in the index
    is_first = index.column("is_first").to_numpy()
    return {name: column[is_first] for name, column in columns.items()}, list(source_numbers)


def _place(rows: _Rows, sources: Sequence[str], i: int) -> dict[str, Any]:
    """Return split, source and number of a row for ``hygiene.jsonl``."""
    split = VAL_SPLIT if rows["is_val"][i] else TRAIN_SPLIT
    return {"split": split, "source": sources[rows["source"][i]], "row": int(rows["row"][i])}


def _dropped(place: Mapping[str, Any], reason: str, related_place: Mapping[str, Any]) -> Dropped:
    """Return the drop of the row at ``place``, because of another row or a question."""
    relations = {"duplicate": "equals", "near_duplicate": "nearly equals"}
    relations["13-gram"] = "shares 13 consecutive tokens with"
    relation = relations.get(related_place.get("by", reason), "has the prompt of")
    detail = f"{relation} row {related_place['row']} of {related_place['source']}"
    return Dropped(place["source"], place["row"], reason, detail)


def refuse_overlaps(config: ExportConfig, counts: Mapping[str, int], where: str) -> None:
    """Raise a DataError for overlaps if ``--on-overlap fail`` is set; ``where``: the file that lists them."""
    overlaps = [f"{counts[kind]:,} {kind}" for kind in ("val_overlaps", "held_out_overlaps") if kind in counts]
    if config.on_overlap == "fail" and overlaps:
        raise DataError(f"--on-overlap fail: {' and '.join(overlaps)}, in {where}", "Repeat it with --on-overlap drop.")


def read_lines(directory: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of ``hygiene.jsonl``, the counts first; none if the cache has no such file."""
    path = storage.join(directory, FILE_NAME)
    if storage.exists(path):
        with storage.open_read(path) as file:
            yield from map(load_json, file)


def shard_samples(directory: str, manifest: Manifest, split: str) -> Iterator[tuple[list[EncodedSample], list[int]]]:
    """Yield the samples of each shard of a cache, and the positions of those that its index leaves out."""
    lines = (line for line in read_lines(directory) if line.get("dropped") and line["split"] == split)
    dropped = {(line["source"], line["row"]) for line in lines}
    for shard in manifest.splits[split].shards:
        file = ShardFile(storage.join(directory, split, shard.file))
        samples = [file.sample(row) for row in range(len(file))]
        yield samples, [i for i, sample in enumerate(samples) if (sample.source, sample.row) in dropped]
