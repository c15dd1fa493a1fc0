"""Sources of rows: as they were asked for, as they were found, and where their rows lie.

``path#1000``: a seeded choice among the rows of one or several sources, in the rows' own order.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import starmap
from operator import attrgetter
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from packtool import storage
from packtool.config.data import MAX_ROW_BYTES, MediaAccess
from packtool.constants import TRAIN_SPLIT
from packtool.rows.media_policy import MediaPolicy, policy_for_rows
from packtool.rows.sample import Dropped

FileFormat = Literal["json", "jsonl", "csv", "tsv", "txt", "parquet", "arrow", "megatron", "tar"]
Compression = Literal["gzip", "zstd"]
Pairs = tuple[tuple[str, str], ...]
NumberedRow = tuple[int, dict[str, Any] | Dropped]
"""Number of a row and what was parsed of it."""

_SAY_NOTHING = ("path", "name", "max_media_failures")
BLOCK_ROWS = 64
"""Most rows of a block, before sampling."""


@dataclass(frozen=True)
class SourceSpec:
    """One file of rows that was asked for, and how it is to be read.

    Args:
        path: file or URL, with folders, globs and names already looked up.
        name: the argument of ``--dataset`` or ``--val-dataset`` that led to it.
        split: ``train`` or ``val``.
        group: position of that argument among all; its files are sampled together.
        num_sampled: rows to draw from the group's files, None for all of them.
        times_sampled: the same as a multiple of the rows that there are, 0.2 or 2.5.
        columns: (this project's name, the file's name) of columns that the user named.
        tags: (name in ``dataset_info.json``, value) of roles and keys of messages that the user named.
        formatting: ``alpaca`` or ``sharegpt`` where ``dataset_info.json`` says it; ``tokens`` for ``packtool import``.
        media_root: folder in which relative paths of media are looked for first.
        system: system prompt of conversations that have none.
        loss_scale: the dataset's own, None for the export's.
        media_access, max_media_bytes, max_media_failures: what media may be: ``rows.media_policy``.
        max_row_bytes: a larger row is left out before it is parsed.
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

    def at(self, path: str) -> SourceSpec:
        """The same of another file: as ``dataclasses.replace``, but sooner, for there may be many thousand files."""
        spec = object.__new__(SourceSpec)
        vars(spec).update(vars(self), path=path)
        return spec

    @property
    def is_sampled(self) -> bool:
        """Whether some rows are drawn, and perhaps some more than once."""
        return self.num_sampled is not None or self.times_sampled is not None

    @property
    def settings(self) -> str:
        """What of it, beside the file, decides the samples, as one line of JSON; empty where nothing was asked for."""
        if (values := _settings(self)) == _USUAL:
            return ""
        told = {name: value for name, value, usual in zip(_SETTINGS, values, _USUAL, strict=True) if value != usual}
        if not self.is_sampled:
            told.pop("group", None)
        return json.dumps(told, sort_keys=True) if told else ""


# Looked up once: there may be many thousand sources.
_SETTINGS = tuple(field.name for field in fields(SourceSpec) if field.name not in _SAY_NOTHING)
_USUAL = tuple(field.default for field in fields(SourceSpec) if field.name in _SETTINGS)
_settings = attrgetter(*_SETTINGS)


@dataclass(frozen=True)
class Source:
    """The little that reading a scanned file needs to know; it travels to worker processes.

    Args:
        path: file or URL.
        kind: of the file, without its compression.
        size, modified: of the file when it was scanned; -1 and "" if unknown.
        form: of its rows (``packtool.rows.forms``); None tells it from each row alone.
        columns: (this project's name, the file's name) of columns that are not found by their usual names.
        tags: as in ``SourceSpec``.
        holds_media: a column of its first rows could hold media; if none could, marks of media in questions are text.
        header: column names of a csv file.
        media_access, max_media_bytes, max_media_failures: what media may be: ``rows.media_policy``.
        max_row_bytes: as in ``SourceSpec``.
    """

    path: str
    kind: FileFormat = "jsonl"
    compression: Compression | None = None
    size: int = -1
    modified: str = ""
    split: str = TRAIN_SPLIT
    form: str | None = None
    columns: Pairs = ()
    holds_media: bool = True
    tags: Pairs = ()
    header: tuple[str, ...] = ()
    media_root: str | None = None
    system: str | None = None
    loss_scale: str | None = None
    media_access: MediaAccess = "root"
    max_media_bytes: int | None = None
    max_media_failures: int = 100
    max_row_bytes: int = MAX_ROW_BYTES

    def read_as(self, **found: Any) -> Source:
        """The same source with what was found out of how to read it: ``kind``, ``header``, ``form``, ``columns``.

        As ``dataclasses.replace`` does it, but sooner: there may be many thousand sources.
        """
        source = object.__new__(Source)
        vars(source).update(vars(self), **found)
        return source

    @cached_property
    def media_policy(self) -> MediaPolicy:
        """What its rows may reach."""
        return policy_for_rows(
            self.path, self.media_root, self.media_access, self.max_media_bytes, self.max_media_failures
        )

    @cached_property
    def label(self) -> str:
        """The path as it may be shown and kept: without the secrets that a URL can carry."""
        return storage.masked(self.path).encode(errors="backslashreplace").decode()


class RowBlock(NamedTuple):
    """Neighbouring rows of one source.

    Args:
        start, stop: [start, stop) in bytes of the (decompressed) text or of a tar file, or in rows of a parquet, Arrow
            or Megatron file.
        first_row: number of the first row, 0-based: the line of a .jsonl or .txt file, the element of a .json array,
            the record behind a .csv file's header.
        num_rows: rows that come out of it; blank lines are none.
        picks: positions in the block of the rows to take, ascending, as often as they are to be taken; None takes all.
    """

    start: int
    stop: int
    first_row: int
    num_rows: int
    picks: tuple[int, ...] | None = None


class RowBlocks(Sequence[RowBlock]):
    """RowBlocks of one source in a few bytes each.

    Args:
        columns: int64 (number of blocks, 4): start, stop, first_row, num_rows.
        picks: int16, those of all blocks in a row, or None if all rows are taken; ``num_rows`` says how many are whose.

    Attributes:
        num_rows: that come out of all of them.
    """

    def __init__(self, columns: np.ndarray, picks: np.ndarray | None = None, num_rows: int | None = None) -> None:
        self._columns, self._picks = columns, picks
        self.num_rows = int(columns[:, 3].sum()) if num_rows is None else num_rows
        self._ends = np.cumsum(columns[:, 3]) if picks is not None else None

    @classmethod
    def of(cls, blocks: Iterator[RowBlock]) -> RowBlocks:
        """Take blocks as they are found; they have no picks yet."""
        flat, num_rows = array("q"), 0
        for block in blocks:
            flat.extend(block[:4])
            num_rows += block.num_rows
        columns = np.frombuffer(flat, np.int64).reshape(-1, 4) if flat else np.zeros((0, 4), np.int64)
        return cls(columns, num_rows=num_rows)

    @property
    def rows_of_each(self) -> np.ndarray:
        """Rows that come out of each block, int64."""
        return self._columns[:, 3]

    def picked(self, counts: np.ndarray, picks: np.ndarray) -> RowBlocks:
        """The same blocks with a choice of their rows; blocks of which nothing is taken are left out.

        Args:
            counts: int64, rows to take of each block.
            picks: int16, their positions, those of all blocks in a row.
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
        bounds = [int(self._ends[i - 1]) if i else 0 for i in (low, high)]
        return self._picks[bounds[0] : bounds[1]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowBlocks) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: pickling a small array costs more than all the rest of a small source.
        return _blocks_of, (self._columns.tobytes(), self._picks, self.num_rows)


def _blocks_of(columns: bytes, picks: np.ndarray | None, num_rows: int) -> RowBlocks:
    return RowBlocks(np.frombuffer(columns, np.int64).reshape(-1, 4), picks, num_rows)


@dataclass(frozen=True)
class ScannedSource:
    """A source and where its rows lie.

    Args:
        spec: what was asked for.
        source: what reading needs.
        size: bytes of the file, -1 if nobody knows.
        modified: what the file system says of the last change, to notice an unchanged file at once.
        digest: of the content; of a remote parquet or Arrow file: of its footer or schema, its size and entity tag.
    """

    spec: SourceSpec
    source: Source
    size: int
    modified: str
    digest: str
    blocks: RowBlocks

    @property
    def path(self) -> str:
        """The file or URL that the rows are read from."""
        return self.spec.path

    @property
    def num_rows(self) -> int:
        """Rows that come out of the source."""
        return self.blocks.num_rows


_CHUNK_BLOCKS = 4096
# numpy's hypergeometric draws know no more.
_MOST_ROWS = 10**9


def draw_rows(sources: Sequence[RowBlocks], num_rows: int, seed: Sequence[int]) -> list[RowBlocks]:
    """Take ``num_rows`` rows of all sources together, each alike likely and without replacement.

    More rows than there are: each is taken ``num_rows // rows`` times, and the rest is drawn. The choice is first how
    many rows of each block, then which: a few bytes a block and two a picked row, however many rows there are.

    Args:
        seed: the choice is a function of it and of the blocks.
    """
    rng = np.random.default_rng(seed)
    rows = np.concatenate([blocks.rows_of_each for blocks in sources])
    total = int(rows.sum())
    if not total:
        return list(sources)
    times, rest = divmod(num_rows, total)
    counts = _counts(rows, rest, rng)
    parts = [
        _positions(rows[low : low + _CHUNK_BLOCKS], counts[low : low + _CHUNK_BLOCKS], times, rng)
        for low in range(0, len(rows), _CHUNK_BLOCKS)
    ]
    picks, counts = np.concatenate(parts), counts + times * rows
    drawn, first_block, first_pick = [], 0, 0
    for blocks in sources:
        own = counts[first_block : first_block + len(blocks)]
        num_picks = int(own.sum())
        drawn.append(blocks.picked(own, picks[first_pick : first_pick + num_picks]))
        first_block, first_pick = first_block + len(blocks), first_pick + num_picks
    return drawn


def _counts(rows: np.ndarray, num_rows: int, rng: np.random.Generator) -> np.ndarray:
    """How many of ``num_rows`` rows, drawn without replacement, lie in each block; int64."""
    if rows.sum() >= _MOST_ROWS:
        chosen = rng.choice(int(rows.sum()), num_rows, replace=False, shuffle=False)
        return np.bincount(np.searchsorted(np.cumsum(rows), chosen, side="right"), minlength=len(rows))
    return rng.multivariate_hypergeometric(rows, num_rows, method="marginals")


def _positions(rows: np.ndarray, counts: np.ndarray, times: int, rng: np.random.Generator) -> np.ndarray:
    """Positions in each block, ascending: all of them ``times`` times, and ``counts`` drawn ones once more; int16."""
    width = int(rows.max())
    keys = rng.random((len(rows), width))
    keys[np.arange(width) >= rows[:, None]] = 2.0  # no row
    ranks = keys.argsort(axis=1).argsort(axis=1)
    repeats = (ranks < counts[:, None]) + times * (np.arange(width) < rows[:, None])
    positions = np.broadcast_to(np.arange(width, dtype=np.int16), repeats.shape)
    return np.repeat(positions.ravel(), repeats.ravel())
