"""Sources of rows: requested files (``SourceSpec``), scanned files (``Source``) and positions of their rows.

``path#1000`` draws a seeded sample of rows from all files of an argument, in the order of the rows.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import starmap
from typing import Any, Literal, NamedTuple, Self, overload

import numpy as np

from packtool import storage
from packtool.config.data import MAX_ROW_BYTES, MediaAccess
from packtool.constants import TRAIN_SPLIT
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import Dropped

FileFormat = Literal["json", "jsonl", "csv", "tsv", "txt", "parquet", "arrow", "megatron", "tar"]
Compression = Literal["gzip", "zstd"]
Pairs = tuple[tuple[str, str], ...]
NumberedRow = tuple[int, dict[str, Any] | Dropped]
"""0-based number of a row, and the parsed row."""

_KINDS: dict[str, FileFormat] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
    ".tar": "tar",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

KNOWN_FORMATS = (
    f"{', '.join(suffix for suffix in _KINDS if suffix not in ('.idx', '.tar'))}, each also with "
    f"{' or '.join(_COMPRESSIONS)}, .tar with packs, and Megatron's .idx with its .bin file"
)
"""All file formats, for messages."""


def format_of(path: str) -> tuple[FileFormat, Compression | None] | None:
    """Return format and compression of a file by its suffixes; None if the format is unknown."""
    stem, dot, suffix = storage.name(path).lower().rpartition(".")
    if suffix == "idx" and stem.endswith(".tar"):  # index of a tar file, not of Megatron
        return None
    compression = _COMPRESSIONS.get(dot + suffix)
    if compression is not None:
        _, dot, suffix = stem.rpartition(".")
    kind = _KINDS.get(dot + suffix)
    return None if kind is None else (kind, compression)


_NOT_IN_SETTINGS = ("path", "name", "max_media_failures")
BLOCK_ROWS = 64
"""Maximum rows of a block, before sampling."""


@dataclass(frozen=True)
class SourceSpec:
    """A requested file of rows and its options.

    Args:
        path: file or URL; folders, globs and names are already resolved.
        name: argument of ``--dataset`` or ``--val-dataset`` that names the file.
        split: ``train`` or ``val``.
        group: position of that argument among all arguments; its files are sampled together.
        num_sampled: rows to draw from the files of the group, None for all.
        times_sampled: rows to draw as a multiple of the existing rows, such as 0.2 or 2.5; None for all.
        takes_first: take the first rows instead of drawing, and at most all of them (``#first1000``).
        columns: (packtool's name, the file's name) of columns that the user named.
        tags: (name in ``dataset_info.json``, value) of roles and message keys that the user named.
        formatting: ``alpaca`` or ``sharegpt`` from ``dataset_info.json``; ``tokens`` for ``packtool import``.
        media_root: first folder for relative media paths.
        system: system prompt for conversations without one.
        loss_scale: the dataset's own loss scale, None for that of the export.
        prompt_format: formats of questions with an input and without one, instead of the chat template; () for none.
        media_access, max_media_bytes, max_media_failures: media access policy (``rows.media_policy``).
        max_row_bytes: maximum size of a row; a larger one is dropped before parsing.
    """

    path: str
    name: str = ""
    split: str = TRAIN_SPLIT
    group: int = 0
    num_sampled: int | None = None
    times_sampled: float | None = None
    takes_first: bool = False
    columns: Pairs = ()
    tags: Pairs = ()
    formatting: str | None = None
    media_root: str | None = None
    system: str | None = None
    loss_scale: str | None = None
    prompt_format: tuple[str, ...] = ()
    media_access: MediaAccess = "root"
    max_media_bytes: int | None = None
    max_media_failures: int = 100
    max_row_bytes: int = MAX_ROW_BYTES

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with changed fields; faster than ``dataclasses.replace``, for many thousand files."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy

    @property
    def is_sampled(self) -> bool:
        """True if a sample of the rows is drawn, perhaps with some rows more than once."""
        return self.num_sampled is not None or self.times_sampled is not None

    @property
    def settings(self) -> str:
        """Changed fields that affect the samples, except the path, as one line of JSON; "" if all are defaults."""
        changed = {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}
        if not self.is_sampled:
            changed.pop("group", None)
        return json.dumps(changed, sort_keys=True) if changed else ""


# Computed once, because there may be many thousand sources.
_DEFAULTS = {field.name: field.default for field in fields(SourceSpec) if field.name not in _NOT_IN_SETTINGS}


@dataclass(frozen=True)
class Source(SourceSpec):
    """A scanned file of rows; contains everything that a worker process needs to read it.

    Args:
        columns: (packtool's name, the file's name) of columns that the form uses or the user named; others have their
            usual names.
        kind: file format, without compression.
        size, modified: size in bytes and version of the file at the scan; -1 and "" if unknown.
        form: form of the rows, a key of ``rows.forms.FORMS``; None detects it for each row.
        holds_media: whether a column of the first rows could contain media; if not, media placeholders in questions
            are plain text.
        header: column names of a csv file.
    """

    kind: FileFormat = "jsonl"
    compression: Compression | None = None
    size: int = -1
    modified: str = ""
    form: str | None = None
    holds_media: bool = True
    header: tuple[str, ...] = ()

    @cached_property
    def media_policy(self) -> MediaPolicy:
        """Rules for the files and URLs that the rows of this source may name as media, because rows may be untrusted.

        By default, media must be in the folder of the file of rows or in ``media_root``, or on the remote stores
        (buckets, web servers) of these two. ``media_access`` may also allow all local files, or everything.
        """
        make_policy = partial(MediaPolicy, max_bytes=self.max_media_bytes, max_failures=self.max_media_failures)
        if self.media_access == "any":
            return make_policy(roots=None, stores=None)
        locations = {self.path, self.media_root or self.path}
        stores = frozenset(storage.store_name(location) for location in locations if storage.is_remote(location))
        if self.media_access == "local":
            return make_policy(roots=None, stores=stores)

        roots: list[str] = []
        if not storage.is_remote(self.path):
            file = storage.normalize(self.path)
            # The file may be a link, as in the hub's cache: allow the folders of the link and of its target.
            roots += [os.path.realpath(os.path.dirname(file)), os.path.dirname(os.path.realpath(file))]
        media_root = self.media_root
        if media_root is not None and media_root != self.path and not storage.is_remote(media_root):
            roots.append(os.path.realpath(storage.normalize(media_root)))
        return make_policy(roots=tuple(roots), stores=stores)

    @cached_property
    def label(self) -> str:
        """The path without the secrets of a URL, for messages and output files."""
        return storage.masked(self.path).encode(errors="backslashreplace").decode()


class RowBlock(NamedTuple):
    """Consecutive rows of one source.

    Args:
        start, stop: range [start, stop) in bytes of the (decompressed) text or of a tar file, or in rows of a parquet,
            Arrow or Megatron file.
        first_row: 0-based number of the first row: line of a .jsonl or .txt file, element of a .json array, record
            after the header of a .csv file.
        num_rows: number of rows, without blank lines.
        picks: positions in the block of the rows to use, ascending; a position that is repeated uses the row more than
            once. None uses every row once.
    """

    start: int
    stop: int
    first_row: int
    num_rows: int
    picks: tuple[int, ...] | None = None


def equal_blocks(num_rows: int) -> Iterator[RowBlock]:
    """Yield blocks of 64 rows, for a file that is read by row number."""
    return (
        RowBlock(start, min(start + BLOCK_ROWS, num_rows), start, min(BLOCK_ROWS, num_rows - start))
        for start in range(0, num_rows, BLOCK_ROWS)
    )


class RowBlocks(Sequence[RowBlock]):
    """The blocks of one source as arrays, in a few bytes per block.

    Args:
        columns: start, stop, first_row and num_rows of each block, int64 (number of blocks, 4).
        picks: concatenated picks of all blocks, int16 (num_rows,); None uses every row once.
        num_rows: total number of rows, if known; of picks, if there are any.
    """

    def __init__(self, columns: np.ndarray, picks: np.ndarray | None = None, num_rows: int | None = None) -> None:
        self._columns, self._picks = columns, picks
        self.num_rows = int(columns[:, 3].sum()) if num_rows is None else num_rows
        self._ends = None if picks is None else np.append(0, np.cumsum(columns[:, 3]))

    @classmethod
    def of(cls, blocks: Iterable[RowBlock]) -> RowBlocks:
        """Store blocks without picks."""
        flat, num_rows = array("q"), 0
        for block in blocks:
            flat.extend(block[:4])
            num_rows += block.num_rows
        columns = np.frombuffer(flat, np.int64).reshape(-1, 4) if flat else np.zeros((0, 4), np.int64)
        return cls(columns, num_rows=num_rows)

    @property
    def rows_of_each(self) -> np.ndarray:
        """Number of rows of each block, int64 (number of blocks,)."""
        return self._columns[:, 3]

    def picked(self, counts: np.ndarray, picks: np.ndarray) -> RowBlocks:
        """Return the blocks, without empty ones, with only some rows: ``counts`` of each block, int64 (blocks,).

        ``picks``: positions of the rows in their blocks, concatenated, (sum of counts,).
        """
        columns = self._columns.copy()
        columns[:, 3] = counts
        return RowBlocks(columns[counts > 0], picks.astype(np.int16))

    def __len__(self) -> int:
        return len(self._columns)

    @overload
    def __getitem__(self, at: int) -> RowBlock: ...
    @overload
    def __getitem__(self, at: slice) -> RowBlocks: ...
    def __getitem__(self, at: int | slice) -> RowBlock | RowBlocks:
        if isinstance(at, slice):
            low, high, step = at.indices(len(self))
            assert step == 1, "a slice consists of consecutive blocks"
            high = max(low, high)
            return RowBlocks(self._columns[low:high], self._picks_of(low, high))
        index = range(len(self))[at]  # not negative
        start, stop, first_row, num_rows = self._columns[index].tolist()
        picks = self._picks_of(index, index + 1)
        return RowBlock(start, stop, first_row, num_rows, None if picks is None else tuple(picks.tolist()))

    def __iter__(self) -> Iterator[RowBlock]:
        if self._picks is None:
            return starmap(RowBlock, self._columns.tolist())
        return map(self.__getitem__, range(len(self)))

    def _picks_of(self, low: int, high: int) -> np.ndarray | None:
        if self._picks is None or self._ends is None:
            return None
        return self._picks[self._ends[low] : self._ends[high]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowBlocks) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: pickling a small array costs more than the rest of a small source.
        return _restored_blocks, (self._columns.tobytes(), self._picks, self.num_rows)


def _restored_blocks(columns: bytes, picks: np.ndarray | None, num_rows: int) -> RowBlocks:
    return RowBlocks(np.frombuffer(columns, np.int64).reshape(-1, 4), picks, num_rows)


@dataclass(frozen=True)
class ScannedSource:
    """A scanned file with the positions of its rows.

    Args:
        spec, source: the file as requested, and as it is read.
        digest: digest of the content; for a remote parquet or Arrow file, of its schema, size and entity tag.
        blocks: positions of the rows to use.
    """

    spec: SourceSpec
    source: Source
    digest: str
    blocks: RowBlocks

    @property
    def num_rows(self) -> int:
        """Number of rows, after sampling."""
        return self.blocks.num_rows


_BLOCKS_PER_DRAW = 4096
# numpy's limit for hypergeometric draws.
_MAX_HYPERGEOMETRIC = 10**9


def draw_rows(sources: Sequence[RowBlocks], num_rows: int, seed: Sequence[int]) -> list[RowBlocks]:
    """Draw ``num_rows`` rows at random from several files together.

    Rows are drawn without replacement. If fewer rows exist, all are used equally often, and only the remainder is
    drawn: 25 of 10 rows are all rows twice, and 5 of them once more. The draw depends only on ``seed`` and on the sizes
    of the blocks.

    Args:
        sources: the rows of each file, in blocks of consecutive rows.

    Returns:
        The blocks of each file with only the drawn rows, in the order of the file.
    """
    rng = np.random.default_rng(seed)
    block_sizes = np.concatenate([blocks.rows_of_each for blocks in sources])  # of all files, int64 (num_blocks,)
    num_existing = int(block_sizes.sum())
    if not num_existing:
        return list(sources)
    num_repeats, num_drawn = divmod(num_rows, num_existing)
    drawn_by_block = _draw_counts(block_sizes, num_drawn, rng)

    positions = []  # of the used rows in their blocks
    for first in range(0, len(block_sizes), _BLOCKS_PER_DRAW):  # limits the memory of ``_draw_positions``
        blocks = slice(first, first + _BLOCKS_PER_DRAW)
        positions.append(_draw_positions(block_sizes[blocks], drawn_by_block[blocks], num_repeats, rng))
    used_by_block = drawn_by_block + num_repeats * block_sizes
    return _pick_by_source(sources, used_by_block, np.concatenate(positions))


def _draw_counts(block_sizes: np.ndarray, num_to_draw: int, rng: np.random.Generator) -> np.ndarray:
    """Draw how many of ``num_to_draw`` rows are in each of B blocks, int64 (B,)."""
    num_existing = int(block_sizes.sum())
    if num_existing < _MAX_HYPERGEOMETRIC:
        return rng.multivariate_hypergeometric(block_sizes, num_to_draw, method="marginals")
    drawn_rows = rng.choice(num_existing, num_to_draw, replace=False, shuffle=False)
    blocks_of_rows = np.searchsorted(np.cumsum(block_sizes), drawn_rows, side="right")
    return np.bincount(blocks_of_rows, minlength=len(block_sizes))


def _pick_by_source(sources: Sequence[RowBlocks], num_used: np.ndarray, positions: np.ndarray) -> list[RowBlocks]:
    """Return the blocks of each source with only their used rows.

    ``num_used``, int64 (B,), is the number of used rows of each block of all sources; ``positions`` are those of the
    used rows in their blocks, (sum of num_used,).
    """
    block_ends = np.cumsum([len(blocks) for blocks in sources])
    used_by_source = np.split(num_used, block_ends[:-1])
    position_ends = np.cumsum([used.sum() for used in used_by_source])
    positions_by_source = np.split(positions, position_ends[:-1])
    drawn = zip(sources, used_by_source, positions_by_source, strict=True)
    return [blocks.picked(counts, picks) for blocks, counts, picks in drawn]


def first_rows(sources: Sequence[RowBlocks], num_rows: int) -> list[RowBlocks]:
    """Return each source's blocks with only the first ``num_rows`` rows of all sources together, or all if fewer."""
    result = []
    num_missing = num_rows  # still to take from this source and the following ones
    for blocks in sources:
        sizes = blocks.rows_of_each
        num_rows_before = np.cumsum(sizes) - sizes  # in the source, before each block
        counts = np.clip(num_missing - num_rows_before, 0, sizes)
        # The first rows of each block, concatenated: counts [2, 3] give positions [0, 1, 0, 1, 2].
        num_taken_before = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) - np.repeat(num_taken_before, counts)
        result.append(blocks.picked(counts, positions))
        num_missing = max(0, num_missing - int(sizes.sum()))
    return result


def _draw_positions(
    block_sizes: np.ndarray, counts: np.ndarray, num_repeats: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw rows from each of B blocks, and return their positions in their block, without replacement.

    Args:
        block_sizes: number of rows of each block, int64 (B,).
        counts: number of rows to draw from each block, int64 (B,).
        num_repeats: how often every row is used in addition.

    Returns:
        Positions, int16, ascending in each block; those of all blocks are concatenated. A row that is used several
        times is repeated.
    """
    max_size = int(block_sizes.max())
    is_row = np.arange(max_size) < block_sizes[:, None]  # (B, max_size); false behind the end of a smaller block
    keys = rng.random((len(block_sizes), max_size))
    keys[~is_row] = 2.0  # above all keys of rows
    ranks = keys.argsort(axis=1).argsort(axis=1)  # of each key in its block
    is_drawn = ranks < counts[:, None]  # the rows with the smallest keys
    times_used = is_drawn + num_repeats * is_row
    positions = np.broadcast_to(np.arange(max_size, dtype=np.int16), times_used.shape)
    return np.repeat(positions.ravel(), times_used.ravel())
