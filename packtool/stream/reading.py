"""Reading of a stream: blocks of rows by rank, without communication; worker processes that encode them; its state.

CHECKPOINT/stream-00000.arrow      samples that rank 0 holds: those held back, then those of the shuffle buffer
CHECKPOINT/stream-00000.json       everything else, written last
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtool import storage
from packtool.cache.manifest import InputCounts
from packtool.cache.reader import ShardFile
from packtool.cache.shard import ShardWriter
from packtool.config.data import EncodeSpec
from packtool.config.settings import load_json
from packtool.encode.encoded import EncodedSample, left_out_of
from packtool.encode.encoder import Encoder, encode_samples, samples_of
from packtool.encode.model_files import ModelFiles
from packtool.errors import MismatchError, PacktoolError, StoreDownError
from packtool.launch.worker import WorkerDied, WorkerPool, tokenize_in_one_thread
from packtool.planning.shuffle import RandomStream
from packtool.rows.read import follow
from packtool.rows.sample import Dropped
from packtool.rows.source import RowBlock, Source, SourceSpec

MAX_OPEN_SOURCES = 8
"""Files that are read at the same time, so that a batch has rows of several."""


@dataclass(frozen=True)
class Place:
    """A position between two blocks of all rows; plain values, for JSON.

    Args:
        epoch: 0-based.
        num_blocks: blocks before it, of all ranks, in all epochs.
        opened: files of this epoch that were opened, in its order.
        taken: [number in the epoch's order, blocks taken] of each open file.
        random: state of the generator that draws the next file.
    """

    epoch: int
    num_blocks: int
    opened: int
    taken: list[list[int]]
    random: dict[str, Any] | None


@dataclass(frozen=True)
class PlacedBlock:
    """A block of this rank, and the position right before it."""

    place: Place
    source: Source
    block: RowBlock


EncodedBlock = tuple[Place, list[EncodedSample], list[Dropped]]
"""The position before a block, its samples, and dropped rows and parts of rows."""


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

    With shuffling, every epoch reads its files in another order, eight at the same time, each in proportion to its
    size, so that they end at about the same time. Otherwise they are read one after the other.

    Cost: every rank finds the ends of all rows (about 400 MB/s), and reads and parses only its own blocks.

    Args:
        start: the position of an earlier block, to resume from; blocks before it in open files are skipped.

    Raises:
        ConfigError, DataError, StorageError: as ``rows.read.follow``.
    """
    place = start or Place(0, 0, 0, [], None)
    for epoch in range(place.epoch, num_epochs):
        random = np.random.default_rng((seed, epoch, RandomStream.FILE_ORDER))
        order = random.permutation(len(specs)).tolist() if shuffle else list(range(len(specs)))
        if place.random is not None:
            random.bit_generator.state = place.random
        files = _OpenFiles([specs[number] for number in order], MAX_OPEN_SOURCES if shuffle else 1, place)
        num_blocks = place.num_blocks
        while files.open_next():
            state = dict(random.bit_generator.state) if shuffle else None
            place = Place(epoch, num_blocks, files.opened, files.taken(), state)
            if (block := files.take(random)) is None:
                continue
            if num_blocks % world_size == rank:
                yield PlacedBlock(place, *block)
            num_blocks += 1
        place = Place(epoch + 1, num_blocks, 0, [], None)


class _OpenFiles:
    """Files of an epoch, at most ``max_open`` of them open, from the position ``start`` on."""

    def __init__(self, specs: Sequence[SourceSpec], max_open: int, start: Place) -> None:
        self._specs, self._max_open, self.opened = specs, max_open, start.opened
        self._files: dict[int, tuple[Source, Iterator[RowBlock]]] = {}
        self._taken: dict[int, int] = {}
        self._weights: dict[int, int] = {}
        for number, num_taken in start.taken:
            self._open(number)
            for _ in range(num_taken):
                next(self._files[number][1])
            self._taken[number] = num_taken

    def open_next(self) -> bool:
        """Open files up to the maximum; return whether any is open."""
        while len(self._files) < self._max_open and self.opened < len(self._specs):
            self._open(self.opened)
            self.opened += 1
        return bool(self._files)

    def taken(self) -> list[list[int]]:
        """Return the blocks taken so far, in the form of ``Place``."""
        return [[number, self._taken[number]] for number in sorted(self._files)]

    def take(self, random: np.random.Generator) -> tuple[Source, RowBlock] | None:
        """Take the next block of a random open file; return None if that file has ended."""
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


def encoded_blocks(
    blocks: Iterator[PlacedBlock], spec: EncodeSpec, *, num_proc: int, num_ahead: int
) -> Iterator[EncodedBlock]:
    """Encode blocks in worker processes, in their order and up to ``num_ahead`` of them ahead of the caller.

    Args:
        num_proc: worker processes; the result is the same for any number.

    Raises:
        PacktoolError: a worker died, or as raised for the block's rows.
    """
    resumes = "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one"
    with WorkerPool[PlacedBlock, EncodedBlock](num_proc, _encoder, spec) as pool:
        try:
            yield from pool.map(blocks, num_ahead=num_ahead)
        except WorkerDied:
            raise PacktoolError(
                "a worker process that encodes rows died (killed, or out of memory?)",
                f"{resumes}; fewer --dataset-num-proc need less memory.",
            ) from None
        except StoreDownError as error:
            raise error.with_resume_advice(f"{resumes}.") from error


def _encoder(report: object, spec: EncodeSpec) -> Callable[[PlacedBlock], EncodedBlock]:
    """Load the tokenizer in a worker process, and return the function that encodes a block."""
    tokenize_in_one_thread()
    encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template))

    def encode(block: PlacedBlock) -> EncodedBlock:
        samples: list[EncodedSample] = []
        dropped: list[Dropped] = []
        for item in encode_samples(list(samples_of(block.source, [block.block], may_hold_secrets=False)), encoder):
            if isinstance(item, Dropped):
                dropped.append(item)
            else:
                samples.extend(item)
                dropped.extend(left_out_of(item))
        return block.place, samples, dropped

    return encode


_HELD = ("carried", "shuffled")
_COUNTS = ("dropped", "parts_left_out")


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamState:
    """State at the beginning of an interval, and the number of its packs that are done.

    Args:
        place: position before the block of the next sample; None for the first of all.
        num_taken: samples of that block that were taken already.
        ended: there are no more samples.
        interval: number of intervals packed before.
        packs_done: of this interval.
        random: state of the generator that draws from the shuffle buffer; None before the first draw.
        carried: samples held back from the interval before.
        shuffled: the shuffle buffer.
        counts: counts of dropped rows; rows that were read are not counted.
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
    """Write a rank's state to a directory.

    Raises:
        StorageError: it cannot be written.
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
    """Read a rank's state.

    Raises:
        MismatchError: the directory has none, or it is damaged.
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
