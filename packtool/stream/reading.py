"""Which rows a data-parallel rank reads, in which order: decided by every rank alike, without a word between them.

Where a stream stands, and how a checkpoint keeps that.

CHECKPOINT/stream-00000.arrow      samples that rank 0 holds: those held back, then those of the shuffle buffer
CHECKPOINT/stream-00000.json       everything else, written last
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtool import storage
from packtool.cache.manifest import InputCounts
from packtool.cache.reader import ShardFile
from packtool.cache.shard import ShardWriter
from packtool.config.settings import load_json
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError
from packtool.planning.shuffle import RandomStream
from packtool.rows.read import follow
from packtool.rows.source import RowBlock, Source, SourceSpec

MOST_OPEN = 8
"""Files that are read side by side, so that a batch holds rows of several."""


@dataclass(frozen=True)
class Place:
    """A place between two blocks of all rows; plain values, for JSON.

    Args:
        epoch: times that all rows were read.
        num_blocks: blocks before it, of all ranks, in all epochs.
        opened: files of this epoch that were begun, in its order.
        taken: [number in the epoch's order, blocks taken] of each file that is open.
        random: state of the generator that draws the next file.
    """

    epoch: int
    num_blocks: int
    opened: int
    taken: list[list[int]]
    random: dict[str, Any] | None


@dataclass(frozen=True)
class PlacedBlock:
    """A block of this rank.

    Args:
        place: right before the block.
    """

    place: Place
    source: Source
    block: RowBlock


def blocks_of_rank(
    specs: Sequence[SourceSpec],
    *,
    rank: int,
    world_size: int,
    num_epochs: int,
    seed: int,
    shuffle: bool,
    start: Place | None = None,
) -> Iterator[PlacedBlock]:
    """Every ``world_size``-th block (up to 64 rows) of all files, ``num_epochs`` times.

    Shuffled, an epoch reads its files in an order of its own, eight side by side, each as often as it is large, so
    that they end at about the same time. Otherwise they are read one after the other.

    Price: every rank finds the ends of all rows (some 400 MB/s), and reads and parses only its own blocks.

    Args:
        start: a place that an earlier block carried; finding it again passes over what lies before it in open files.

    Raises:
        ConfigError, DataError, StorageError: as ``rows.read.follow``.
    """
    place = start or Place(0, 0, 0, [], None)
    for epoch in range(place.epoch, num_epochs):
        for found in _epoch(specs, epoch, place, seed, shuffle):
            if found.place.num_blocks % world_size == rank:
                yield found
            place = found.place
        place = Place(epoch + 1, place.num_blocks + 1, 0, [], None)


def _epoch(specs: Sequence[SourceSpec], epoch: int, start: Place, seed: int, shuffle: bool) -> Iterator[PlacedBlock]:
    random = np.random.default_rng((seed, epoch, RandomStream.FILE_ORDER))
    order = random.permutation(len(specs)).tolist() if shuffle else list(range(len(specs)))
    if start.random is not None:
        random.bit_generator.state = start.random
    files = _OpenFiles([specs[number] for number in order], MOST_OPEN if shuffle else 1)
    files.go_to(start.opened, start.taken)
    num_blocks = start.num_blocks
    while files.any_left():
        state = dict(random.bit_generator.state) if shuffle else None
        place = Place(epoch, num_blocks, files.opened, files.taken(), state)
        found = files.take(random)
        if found is not None:
            yield PlacedBlock(place, *found)
            num_blocks += 1


class _OpenFiles:
    """Files of an epoch, some of them open."""

    def __init__(self, specs: Sequence[SourceSpec], most_open: int) -> None:
        self._specs, self._most_open = specs, most_open
        self._files: dict[int, tuple[Source, Iterator[RowBlock]]] = {}
        self._taken: dict[int, int] = {}
        self._weights: dict[int, int] = {}
        self.opened = 0

    def go_to(self, opened: int, taken: list[list[int]]) -> None:
        """Open the files of a place and pass over the blocks before it."""
        self.opened = opened
        for number, count in taken:
            self._open(number)
            for _ in range(count):
                next(self._files[number][1])
            self._taken[number] = count

    def any_left(self) -> bool:
        """Whether a file is open or can be opened."""
        while len(self._files) < self._most_open and self.opened < len(self._specs):
            self._open(self.opened)
            self.opened += 1
        return bool(self._files)

    def taken(self) -> list[list[int]]:
        """The blocks taken so far, in the form of ``Place``."""
        return [[number, self._taken[number]] for number in sorted(self._files)]

    def take(self, random: np.random.Generator) -> tuple[Source, RowBlock] | None:
        """The next block of one of the open files; None if the one that was drawn has ended."""
        numbers = sorted(self._files)
        number = numbers[0]
        if len(numbers) > 1:
            ends = np.cumsum([self._weights[number] for number in numbers])
            number = numbers[int(np.searchsorted(ends, random.random() * ends[-1], side="right"))]
        source, blocks = self._files[number]
        block = next(blocks, None)
        if block is None:
            del self._files[number]
            return None
        self._taken[number] += 1
        return source, block

    def _open(self, number: int) -> None:
        spec = self._specs[number]
        self._files[number] = follow(spec)
        self._taken[number] = 0
        self._weights[number] = max(storage.stat(spec.path).size, 1)


_HELD = ("carried", "shuffled")
_COUNTS = ("dropped", "parts_left_out")


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamState:
    """The beginning of an interval, and how many of its packs are done.

    Args:
        place: right before the block that the next sample comes from; None for the first of all.
        num_taken: samples of that block that were taken already.
        ended: no sample comes any more.
        interval: packed before this one.
        packs_done: of this interval.
        random: state of the generator that draws from the shuffle buffer; None before the first draw.
        carried: samples that were held back from the interval before.
        shuffled: the shuffle buffer.
        counts: what was left out so far; rows that were read are not counted.
    """

    place: Place | None = None
    num_taken: int = 0
    ended: bool = False
    interval: int = 0
    packs_done: int = 0
    random: dict[str, Any] | None = None
    carried: Sequence[EncodedSample] = ()
    shuffled: Sequence[EncodedSample] = ()
    counts: InputCounts = field(default_factory=lambda: InputCounts.total(()))


def write_stream_state(directory: str, rank: int, state: StreamState) -> None:
    """Keep a rank's state in a directory.

    Raises:
        StorageError: if it cannot be written.
    """
    samples, plain = _paths(directory, rank)
    held = [*state.carried, *state.shuffled]
    writer = ShardWriter(samples, has_parts=any(sample.part is not None for sample in held))
    try:
        writer.write(held)
        writer.close()
    except BaseException:
        writer.discard()
        raise
    values = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in _HELD}
    del values["counts"]
    values |= {name: getattr(state.counts, name) for name in _COUNTS}
    values |= {f"num_{name}": len(getattr(state, name)) for name in _HELD}
    values["place"] = dataclasses.asdict(state.place) if state.place is not None else None
    storage.publish(plain, json.dumps(values).encode())


def read_stream_state(directory: str, rank: int) -> StreamState:
    """A rank's state as it was kept.

    Raises:
        MismatchError: if the directory has none, or it is damaged.
    """
    samples, plain = _paths(directory, rank)
    try:
        with open(plain, encoding="utf-8") as file:
            values = load_json(file.read())
        counts = [values.pop(f"num_{name}") for name in _HELD]
        rows = InputCounts(rows=0, marks_added=0, **{name: values.pop(name) for name in _COUNTS})
        place = Place(**values.pop("place")) if values["place"] is not None else values.pop("place")
        kept = ShardFile(samples)
        if len(kept) != sum(counts):
            raise ValueError(f"{len(kept)} samples, not {sum(counts)}")
        held = [kept.sample(i) for i in range(len(kept))]
        return StreamState(**values, place=place, carried=held[: counts[0]], shuffled=held[counts[0] :], counts=rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(
            f"{directory} does not tell where the stream of rank {rank} stood: {error}",
            "Give another checkpoint to --resume-from-checkpoint.",
        ) from error


def _paths(directory: str, rank: int) -> tuple[str, str]:
    stem = os.path.join(directory, f"stream-{rank:05d}")
    return stem + ".arrow", stem + ".json"
