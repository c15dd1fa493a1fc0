"""Reading of a stream: the blocks of rows of each rank, worker processes that encode them, and the saved state.

Ranks choose their blocks without communication. Files of the state::

    CHECKPOINT/stream-00000.arrow      samples in memory on rank 0: those held back, then the shuffle buffer
    CHECKPOINT/stream-00000.json       all other fields, written last
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packtool import storage
from packtool.cache.manifest import InputCounts
from packtool.cache.reader import ShardFile
from packtool.cache.shard import ShardWriter
from packtool.config.data import EncodeSpec
from packtool.config.settings import load_json
from packtool.encode.encoded import EncodedSample, left_out_of
from packtool.encode.encoder import encode_samples, worker_encoder
from packtool.errors import MismatchError, PacktoolError, StoreDownError
from packtool.launch.worker import WorkerDied, WorkerPool
from packtool.planning.shuffle import RandomStream
from packtool.rows.read import follow, samples_of
from packtool.rows.sample import Dropped
from packtool.rows.source import RowBlock, Source, SourceSpec

MAX_OPEN_SOURCES = 8
"""Maximum files that are read at the same time, so that a batch has rows of several files."""


@dataclass(frozen=True)
class StreamPosition:
    """A position between two blocks of the stream of all ranks; all values can be written as JSON.

    Args:
        epoch: 0-based number of the epoch.
        num_blocks: number of blocks before the position, of all ranks and epochs.
        opened: number of files of this epoch that were opened, in the epoch's order.
        taken: [number of the file in the epoch's order, number of blocks read] of each open file.
        random: state of the generator that draws the next file; None without shuffling.
    """

    epoch: int = 0
    num_blocks: int = 0
    opened: int = 0
    taken: list[list[int]] = field(default_factory=list)
    random: dict[str, Any] | None = None


@dataclass(frozen=True)
class StreamBlock:
    """A block of a rank, and the position right before it."""

    position: StreamPosition
    source: Source
    block: RowBlock


EncodedBlock = tuple[StreamPosition, list[EncodedSample], list[Dropped]]
"""Position before a block, the block's samples, and its dropped rows and samples."""


def blocks_of_rank(
    specs: Sequence[SourceSpec],
    *,
    rank: int,
    world_size: int,
    num_epochs: int,
    seed: int,
    shuffle: bool,
    start: StreamPosition | None = None,
) -> Iterator[StreamBlock]:
    """Yield one rank's blocks of up to 64 rows: every ``world_size``-th block of all files, ``num_epochs`` times.

    With shuffling, each epoch reads the files in a different order, up to eight at the same time. Blocks are drawn from
    these in proportion to the file sizes, so that the files end at about the same time.

    Every rank scans all files for row ends (about 400 MB/s), but parses only its own blocks. ``start``: position of the
    block to begin with, from an earlier run with the same arguments.
    """
    position = start or StreamPosition()
    for epoch in range(position.epoch, num_epochs):
        generator = np.random.default_rng((seed, epoch, RandomStream.FILE_ORDER))
        num_blocks_before = position.num_blocks  # of all ranks and epochs
        for stream_block in _blocks_of_epoch(specs, generator, position, shuffle=shuffle):
            if num_blocks_before % world_size == rank:
                yield stream_block
            num_blocks_before += 1
        position = StreamPosition(epoch + 1, num_blocks_before)


def _blocks_of_epoch(
    specs: Sequence[SourceSpec], generator: np.random.Generator, start: StreamPosition, *, shuffle: bool
) -> Iterator[StreamBlock]:
    """Yield the blocks of rows of all files, for all ranks, from ``start`` to the end of its epoch.

    With ``shuffle``, a few files are open at a time, and each block is the next one of a random file. ``generator``
    draws the order of the files and the blocks; it is new, with the seed of the epoch.
    """
    if shuffle:
        order = generator.permutation(len(specs))
        files = _OpenFiles([specs[number] for number in order], MAX_OPEN_SOURCES, start)
    else:
        files = _OpenFiles(specs, max_open=1, start=start)
    if start.random is not None:  # earlier blocks of the epoch were drawn before the stream was resumed
        generator.bit_generator.state = start.random
    num_blocks_before = start.num_blocks
    files.open_more()
    while files.num_open > 0:
        # The position before the next block, so before it is drawn.
        position = StreamPosition(
            epoch=start.epoch,
            num_blocks=num_blocks_before,
            opened=files.num_opened,
            taken=files.blocks_read(),
            random=dict(generator.bit_generator.state) if shuffle else None,
        )
        source_and_block = files.read_block(generator)
        if source_and_block is None:  # a file has ended
            files.open_more()
            continue
        source, block = source_and_block
        yield StreamBlock(position, source, block)
        num_blocks_before += 1


class _OpenFiles:
    """The open files of an epoch, from position ``start`` on; ``specs``: all files in the order of the epoch."""

    def __init__(self, specs: Sequence[SourceSpec], max_open: int, start: StreamPosition) -> None:
        self._specs, self._max_open, self.num_opened = specs, max_open, start.opened
        # By the file's number in the order of the epoch.
        self._files: dict[int, tuple[Source, Iterator[RowBlock]]] = {}
        self._num_blocks_read: dict[int, int] = {}
        self._file_bytes: dict[int, int] = {}
        for number, num_blocks in start.taken:
            self._open(number)
            for _ in range(num_blocks):
                next(self._files[number][1])
            self._num_blocks_read[number] = num_blocks

    @property
    def num_open(self) -> int:
        return len(self._files)

    def open_more(self) -> None:
        """Open the next files up to the maximum."""
        while self.num_open < self._max_open and self.num_opened < len(self._specs):
            self._open(self.num_opened)
            self.num_opened += 1

    def blocks_read(self) -> list[list[int]]:
        """Return the number of blocks read from each open file, as in ``StreamPosition.taken``."""
        return [[number, self._num_blocks_read[number]] for number in sorted(self._files)]

    def read_block(self, generator: np.random.Generator) -> tuple[Source, RowBlock] | None:
        """Return the next block of a random open file, drawn by file size; None if this file has ended."""
        number = self._draw_file(generator)
        source, blocks = self._files[number]
        block = next(blocks, None)
        if block is None:
            del self._files[number]
            return None
        self._num_blocks_read[number] += 1
        return source, block

    def _draw_file(self, generator: np.random.Generator) -> int:
        """Draw the number of an open file, with probabilities in proportion to file sizes."""
        numbers = sorted(self._files)
        if len(numbers) == 1:
            return numbers[0]
        ends = np.cumsum([self._file_bytes[number] for number in numbers])
        drawn_byte = generator.random() * ends[-1]
        return numbers[int(np.searchsorted(ends, drawn_byte, side="right"))]

    def _open(self, number: int) -> None:
        spec = self._specs[number]
        self._files[number] = follow(spec)
        self._num_blocks_read[number] = 0
        self._file_bytes[number] = max(storage.stat(spec.path).size, 1)


def encoded_blocks(
    blocks: Iterator[StreamBlock], spec: EncodeSpec, *, num_proc: int, num_ahead: int
) -> Iterator[EncodedBlock]:
    """Encode blocks in worker processes, up to ``num_ahead`` ahead of the caller; yield the results in order."""
    advice = "To resume from the latest checkpoint, if there is one, pass --resume-from-checkpoint true"
    with WorkerPool[StreamBlock, EncodedBlock](num_proc, _make_encode, spec) as pool:
        try:
            yield from pool.map(blocks, num_ahead=num_ahead)
        except WorkerDied:
            message = "a worker process that encodes rows died; it was killed or ran out of memory"
            raise PacktoolError(message, f"To use less memory, decrease --dataset-num-proc. {advice}.") from None
        except StoreDownError as error:
            raise error.with_resume_advice(f"{advice}.") from error


def _make_encode(report: object, spec: EncodeSpec) -> Callable[[StreamBlock], EncodedBlock]:
    """Load tokenizer and template in a worker process, and return the function that encodes a block of rows.

    ``report`` sends progress to the parent process; unused here.
    """
    encoder = worker_encoder(spec)

    def encode(stream_block: StreamBlock) -> EncodedBlock:
        epoch = stream_block.position.epoch
        samples: list[EncodedSample] = []
        dropped: list[Dropped] = []
        # URLs must not hold secrets, because checkpoints save samples with the URLs of their media.
        rows = samples_of(stream_block.source, [stream_block.block], may_hold_secrets=False)
        for samples_or_drop in encode_samples(list(rows), encoder):  # of one row
            if isinstance(samples_or_drop, Dropped):
                dropped.append(samples_or_drop)
                continue
            for number, sample in enumerate(samples_or_drop):
                samples.append(replace(sample, epoch=epoch, number_in_row=number))
            dropped.extend(left_out_of(samples_or_drop))  # other parts of the same row
        return stream_block.position, samples, dropped

    return encode


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamState:
    """State of a stream at the beginning of an interval, and the number of packs of this interval trained since.

    Args:
        position: position before the block of the next sample; None for the first block.
        num_taken: number of samples of this block that were read.
        ended: whether all samples were read.
        interval: number of earlier intervals.
        packs_done: number of packs of this interval that were trained.
        random: state of the generator that draws from the shuffle buffer; None before the first draw.
        carried: samples held back from the previous interval.
        shuffled: samples in the shuffle buffer.
        counts: counts of dropped rows; its ``rows`` is not counted.
    """

    position: StreamPosition | None = None
    num_taken: int = 0
    ended: bool = False
    interval: int = 0
    packs_done: int = 0
    random: dict[str, Any] | None = None
    carried: Sequence[EncodedSample] = ()
    shuffled: Sequence[EncodedSample] = ()
    counts: InputCounts = field(default_factory=lambda: InputCounts.total(()))


def write_stream_state(directory: str, rank: int, state: StreamState) -> None:
    """Write the state of a rank's stream into a checkpoint, so that a resumed run continues with the next pack.

    Samples in memory go into an Arrow file, and all other fields into a JSON file, which is written last.
    """
    samples_path, json_path = _paths(directory, rank)
    samples = [*state.carried, *state.shuffled]
    _write_samples(samples_path, samples)
    values = {  # some names differ from those of the fields, so that older checkpoints can be read
        "place": None if state.position is None else dataclasses.asdict(state.position),
        "num_taken": state.num_taken,
        "ended": state.ended,
        "interval": state.interval,
        "packs_done": state.packs_done,
        "random": state.random,
        "dropped": state.counts.dropped,
        "parts_left_out": state.counts.parts_left_out,
        "num_carried": len(state.carried),
        "num_shuffled": len(state.shuffled),
        "numbers": [[sample.epoch, sample.number_in_row] for sample in samples],  # the Arrow file lacks them
    }
    storage.publish(json_path, json.dumps(values).encode())


def _write_samples(path: str, samples: Sequence[EncodedSample]) -> None:
    writer = ShardWriter(path, has_parts=any(sample.part is not None for sample in samples))
    try:
        writer.write(samples)
        writer.close()
    except BaseException:
        writer.discard()
        raise


def read_stream_state(directory: str, rank: int) -> StreamState:
    """Read the state that ``write_stream_state`` wrote; raise a MismatchError if it is missing or damaged."""
    samples_path, json_path = _paths(directory, rank)
    try:
        with open(json_path, encoding="utf-8") as file:
            values = load_json(file.read())
        num_carried = values.pop("num_carried")
        num_samples = num_carried + values.pop("num_shuffled")
        dropped = values.pop("dropped")
        parts_left_out = values.pop("parts_left_out")
        position = values.pop("place")
        numbers = values.pop("numbers", None)  # of each sample, its epoch and its number in its row
        if numbers is None:  # an older checkpoint
            epoch = (position or {}).get("epoch", 0)
            numbers = [[epoch, 0]] * num_samples
        samples = _read_samples(samples_path, numbers)
        return StreamState(
            **values,  # the fields of the same names
            position=None if position is None else StreamPosition(**position),
            carried=samples[:num_carried],
            shuffled=samples[num_carried:],
            # Streams do not count rows and marks.
            counts=InputCounts(rows=0, marks_added=0, dropped=dropped, parts_left_out=parts_left_out),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{directory}: the stream state of rank {rank} is missing or damaged: {error}"
        raise MismatchError(message, "Pass another checkpoint to --resume-from-checkpoint.") from error


def _read_samples(path: str, numbers: Sequence[tuple[int, int]]) -> list[EncodedSample]:
    """Read samples, of these epochs and numbers in rows; raise a ValueError if the file has another number of them."""
    shard = ShardFile(path)
    if len(shard) != len(numbers):
        raise ValueError(f"it has {len(shard)} samples, not {len(numbers)}")
    return [replace(shard.sample(i), epoch=epoch, number_in_row=n) for i, (epoch, n) in enumerate(numbers)]


def _paths(directory: str, rank: int) -> tuple[str, str]:
    stem = os.path.join(directory, f"stream-{rank:05d}")
    return stem + ".arrow", stem + ".json"
