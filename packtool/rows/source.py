"""Sources of rows: files as requested, files as scanned, and where their rows are.

``path#1000`` draws a seeded sample of the rows of one or several sources, in the order of the rows.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
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
"""Number of a row, and the parsed row."""

_WITHOUT_EFFECT = ("path", "name", "max_media_failures")
BLOCK_ROWS = 64
"""Maximum rows of a block, before sampling."""


@dataclass(frozen=True)
class SourceSpec:
    """One requested file of rows, and how to read it.

    Args:
        path: file or URL; folders, globs and names are already resolved.
        name: the argument of ``--dataset`` or ``--val-dataset`` that led to it.
        split: ``train`` or ``val``.
        group: position of that argument among all; its files are sampled together.
        num_sampled: rows to draw from the group's files, None for all of them.
        times_sampled: the same as a multiple of the existing rows, 0.2 or 2.5.
        columns: (this project's name, the file's name) of columns that the user named.
        tags: (name in ``dataset_info.json``, value) of roles and keys of messages that the user named.
        formatting: ``alpaca`` or ``sharegpt`` from ``dataset_info.json``; ``tokens`` for ``packtool import``.
        media_root: folder in which relative paths of media are looked up first.
        system: system prompt of conversations that have none.
        loss_scale: the dataset's own, None for the export's.
        media_access, max_media_bytes, max_media_failures: the media access policy (``rows.media_policy``).
        max_row_bytes: a larger row is dropped before it is parsed.
    """

    path: str
    name: str = ""
    split: str = TRAIN_SPLIT
    group: int = 0
    num_sampled: int | None = None
    times_sampled: float | None = None
    columns: Pairs = ()
    tags: Pairs = ()
    formatting: str | None = None
    media_root: str | None = None
    system: str | None = None
    loss_scale: str | None = None
    media_access: MediaAccess = "root"
    max_media_bytes: int | None = None
    max_media_failures: int = 100
    max_row_bytes: int = MAX_ROW_BYTES

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values, faster than ``dataclasses.replace``: there may be many thousand files."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy

    @property
    def is_sampled(self) -> bool:
        """True if rows are drawn, possibly more than once each."""
        return self.num_sampled is not None or self.times_sampled is not None

    @property
    def settings(self) -> str:
        """All values that affect the samples, except the file, as one line of JSON; "" if all are the defaults."""
        changed = {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}
        if not self.is_sampled:
            changed.pop("group", None)
        return json.dumps(changed, sort_keys=True) if changed else ""


# Computed once, because there may be many thousand sources.
_DEFAULTS = {field.name: field.default for field in fields(SourceSpec) if field.name not in _WITHOUT_EFFECT}


@dataclass(frozen=True)
class Source(SourceSpec):
    """A scanned file of rows, with all that worker processes need to read it.

    Args:
        columns: (this project's name, the file's name) of columns that do not have their usual names.
        kind: format of the file, without its compression.
        size, modified: of the file when it was scanned; -1 and "" if unknown.
        form: form of its rows (``packtool.rows.forms``); None detects it from each row.
        holds_media: a column of its first rows could hold media; if none could, marks of media in questions are text.
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
        """Media that its rows may name."""
        limits = (self.max_media_bytes, self.max_media_failures)
        if self.media_access == "any":
            return MediaPolicy(None, None, *limits)
        named = {self.path, self.media_root or self.path}
        stores = frozenset(storage.store_name(name) for name in named if storage.is_remote(name))
        if self.media_access == "local":
            return MediaPolicy(None, stores, *limits)
        roots: list[str] = []
        if not storage.is_remote(self.path):
            file = storage.normalize(self.path)
            # A file may be a link, as in the hub's cache: both folders count.
            roots += [os.path.realpath(os.path.dirname(file)), os.path.dirname(os.path.realpath(file))]
        if self.media_root is not None and self.media_root != self.path and not storage.is_remote(self.media_root):
            roots.append(os.path.realpath(storage.normalize(self.media_root)))
        return MediaPolicy(tuple(roots), stores, *limits)

    @cached_property
    def label(self) -> str:
        """The path without the secrets that a URL can carry, for messages and files."""
        return storage.masked(self.path).encode(errors="backslashreplace").decode()


class RowBlock(NamedTuple):
    """Neighbouring rows of one source.

    Args:
        start, stop: [start, stop) in bytes of the (decompressed) text or of a tar file, or in rows of a parquet, Arrow
            or Megatron file.
        first_row: 0-based number of the first row: the line of a .jsonl or .txt file, the element of a .json array, the
            record after a .csv file's header.
        num_rows: rows of the block without blank lines.
        picks: ascending positions in the block of the rows to take, repeated to take a row more than once; None takes
            all.
    """

    start: int
    stop: int
    first_row: int
    num_rows: int
    picks: tuple[int, ...] | None = None


def equal_blocks(num_rows: int) -> Iterator[RowBlock]:
    """Return blocks of 64 rows of a file with random access by row number."""
    return (
        RowBlock(start, min(start + BLOCK_ROWS, num_rows), start, min(BLOCK_ROWS, num_rows - start))
        for start in range(0, num_rows, BLOCK_ROWS)
    )


class RowBlocks(Sequence[RowBlock]):
    """RowBlocks of one source in a few bytes each.

    Args:
        columns: int64 (number of blocks, 4): start, stop, first_row, num_rows.
        picks: int16, the picks of all blocks one after the other, ``num_rows`` of each; None if all rows are taken.

    Attributes:
        num_rows: rows of all blocks.
    """

    def __init__(self, columns: np.ndarray, picks: np.ndarray | None = None, num_rows: int | None = None) -> None:
        self._columns, self._picks = columns, picks
        self.num_rows = int(columns[:, 3].sum()) if num_rows is None else num_rows
        self._ends = None if picks is None else np.append(0, np.cumsum(columns[:, 3]))

    @classmethod
    def of(cls, blocks: Iterable[RowBlock]) -> RowBlocks:
        """Collect blocks without picks."""
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
        """Return the blocks with a selection of their rows; blocks without selected rows are left out.

        Args:
            counts: int64, selected rows of each block.
            picks: int16, their positions, of all blocks one after the other.
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
            assert step == 1, "blocks stay neighbours"
            high = max(low, high)
            return RowBlocks(self._columns[low:high], self._picks_of(low, high))
        at = range(len(self))[at]
        start, stop, first_row, num_rows = self._columns[at].tolist()
        picks = self._picks_of(at, at + 1)
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
    """A source and where its rows are.

    Args:
        spec: the request.
        source: what reading needs.
        digest: of the content; of a remote parquet or Arrow file: of its footer or schema, its size and entity tag.
    """

    spec: SourceSpec
    source: Source
    digest: str
    blocks: RowBlocks

    @property
    def num_rows(self) -> int:
        """Rows of the source, after sampling."""
        return self.blocks.num_rows


_CHUNK_BLOCKS = 4096
# numpy's limit for hypergeometric draws.
_MAX_HYPERGEOMETRIC = 10**9


def draw_rows(sources: Sequence[RowBlocks], num_rows: int, seed: Sequence[int]) -> list[RowBlocks]:
    """Draw ``num_rows`` rows of all sources together, uniformly and without replacement.

    If ``num_rows`` exceeds the existing rows, each is taken ``num_rows // rows`` times and the remainder is drawn. The
    draw first decides the number of rows of each block, then their positions: it needs a few bytes a block and two a
    drawn row, for any number of rows. It depends only on the seed and the blocks.
    """
    rng = np.random.default_rng(seed)
    rows = np.concatenate([blocks.rows_of_each for blocks in sources])
    total = int(rows.sum())
    if not total:
        return list(sources)
    times, remainder = divmod(num_rows, total)
    if total >= _MAX_HYPERGEOMETRIC:
        drawn_rows = rng.choice(total, remainder, replace=False, shuffle=False)
        counts = np.bincount(np.searchsorted(np.cumsum(rows), drawn_rows, side="right"), minlength=len(rows))
    else:
        counts = rng.multivariate_hypergeometric(rows, remainder, method="marginals")
    parts = [
        _positions(rows[low : low + _CHUNK_BLOCKS], counts[low : low + _CHUNK_BLOCKS], times, rng)
        for low in range(0, len(rows), _CHUNK_BLOCKS)
    ]
    picks, counts = np.concatenate(parts), counts + times * rows
    counts_of_each = np.split(counts, np.cumsum([len(blocks) for blocks in sources])[:-1])
    picks_of_each = np.split(picks, np.cumsum([own.sum() for own in counts_of_each])[:-1])
    drawn = zip(sources, counts_of_each, picks_of_each, strict=True)
    return [blocks.picked(own_counts, own_picks) for blocks, own_counts, own_picks in drawn]


def _positions(rows: np.ndarray, counts: np.ndarray, times: int, rng: np.random.Generator) -> np.ndarray:
    """Return ascending positions in each block, int16: all of them ``times`` times and ``counts`` drawn ones more."""
    width = int(rows.max())
    keys = rng.random((len(rows), width))
    keys[np.arange(width) >= rows[:, None]] = 2.0  # not a row
    ranks = keys.argsort(axis=1).argsort(axis=1)
    repeats = (ranks < counts[:, None]) + times * (np.arange(width) < rows[:, None])
    positions = np.broadcast_to(np.arange(width, dtype=np.int16), repeats.shape)
    return np.repeat(positions.ravel(), repeats.ravel())
