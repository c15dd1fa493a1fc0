"""Which rows a data-parallel rank reads, in which order: decided by every rank alike, without a word between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool import storage
from packtool.plan.shuffle import RandomStream
from packtool.rows.scan import follow
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
        ConfigError, DataError, StorageError: as ``rows.scan.follow``.
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
