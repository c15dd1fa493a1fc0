"""Samples that come by are packed, so many at a time, and what those of one time begin with in common is packed once.

An interval takes up to ``interval`` samples, packs them, and trains the packs in an order drawn from the seed. The one
or two packs that are far from full are held back, and their samples packed once more with the next interval's. Memory
is bounded by the interval and the shuffle buffer, whatever the rows; the price is a packer that knows a thousand
samples and not all of them, and a few samples, short ones mostly, that are trained later than their neighbours.

What the samples of an interval begin with in common: found by hashes, as in a cache that keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from packtool.cache.manifest import InputCounts
from packtool.cache.shard import num_targets
from packtool.config.data import EncodeSpec
from packtool.config.packing import IntervalOptions, PackOptions
from packtool.constants import MIN_SHARED
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import MediaTokens
from packtool.encode.prefix_hashes import PrefixHashes, prefix_hashes
from packtool.planning.pack_plan import Int64Array, PackPlan, select_packs, to_offsets
from packtool.planning.packing import pack, pack_trees
from packtool.planning.prefix_trees import PartsIn, Prefixes, PrefixTrees, plan_trees
from packtool.planning.shuffle import RandomStream
from packtool.planning.tree_parts import TreeParts
from packtool.rows.sample import Dropped
from packtool.rows.source import BLOCK_ROWS, SourceSpec
from packtool.stream.reading import StreamState, blocks_of_rank
from packtool.stream.workers import EncodedBlock, encoded_blocks


@dataclass(frozen=True)
class IntervalSharing:
    """How the samples of an interval share prefixes.

    Args:
        media: tokens by which media are found.
        worth: part of an interval's tokens above which they share, 0 to 1; each interval decides for itself.
        max_rows: most samples of a tree; None for as many as there are.
        max_media_tokens: most media tokens of a tree, or None.
        parts: where the parts of a tree that is cut are to be.
    """

    media: MediaTokens
    worth: float
    max_rows: int | None = None
    max_media_tokens: int | None = None
    parts: PartsIn = "any"

    def found(self, samples: Sequence[EncodedSample], capacity: int) -> FoundTrees | None:
        """The trees of some samples; None if each is to be computed whole.

        Args:
            capacity: tokens of a pack; samples are no longer.
        """
        lengths = np.array([sample.length for sample in samples], np.int32)
        assert lengths.max(initial=0) <= capacity, "longer samples were dropped"
        counts, joined = prefix_hashes(samples, self.media, longer_than=MIN_SHARED)
        offsets = to_offsets(counts)
        trees = plan_trees(
            lengths,
            Prefixes(offsets, joined.lengths, joined.hashes),
            capacity=capacity,
            min_shared=MIN_SHARED,
            max_samples=self.max_rows,
            media_tokens=(Added.of(samples).media_tokens, joined.media_tokens),
            max_media_tokens=self.max_media_tokens,
        )
        return FoundTrees(replace(trees, parts=self.parts), joined) if trees.saved(lengths) > self.worth else None


@dataclass(frozen=True, eq=False)
class FoundTrees:
    """Samples that share prefixes.

    Args:
        trees: which share which.
        prefixes: of all samples, end to end.
    """

    trees: PrefixTrees
    prefixes: PrefixHashes


class Added(NamedTuple):
    """What each of N samples adds to a pack; int64 (N,) each.

    Args:
        shared: tokens that are computed already: those that it has in common with the sample before it.
        targets: labels of which logits are made.
        media_tokens: placeholder tokens of all media.
        audio_tokens: those of sounds among them.
        patch_squares: see ``PrefixHashes``.
    """

    shared: Int64Array
    targets: Int64Array
    media_tokens: Int64Array
    audio_tokens: Int64Array
    patch_squares: Int64Array

    @classmethod
    def of(cls, samples: Sequence[EncodedSample], found: FoundTrees | None = None) -> Added:
        """The figures of samples that are computed whole, or that share prefixes."""
        each = [
            (0, num_targets(sample), sample.num_media_tokens, sample.num_audio_tokens, sample.patch_squares)
            for sample in samples
        ]
        whole = cls(*np.array(each, np.int64).reshape(-1, 5).T)
        if found is None:
            return whole
        trees, of = found.trees, found.prefixes
        shared = np.zeros(len(samples), np.int64)
        shared[trees.samples] = trees.shared
        return cls(
            shared,
            # The sample that a prefix was counted in may have other targets.
            np.maximum(trees.added(whole.targets, of.target_tokens), 0),
            trees.added(whole.media_tokens, of.media_tokens),
            trees.added(whole.audio_tokens, of.audio_tokens),
            trees.added(whole.patch_squares, of.patch_squares),
        )

    @classmethod
    def joined(cls, parts: Sequence[Added]) -> Added:
        """Those of several packs, one after the other."""
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True))) if parts else cls.of([])

    def taken(self, samples: Int64Array) -> Added:
        """Those of some samples."""
        return Added(*(column[samples] for column in self))


_FULL = 0.98
_MOST_HELD_BACK = 2  # packs
_SHARE_HELD_BACK = 0.25  # of the samples


@dataclass(frozen=True, kw_only=True)
class StreamOptions(PackOptions, IntervalOptions):
    """What decides the packs of a stream: the options as they were declared, and what they come to.

    Args:
        packing_length: tokens that a pack may hold.
        num_epochs: times that all rows are read.
        seed: of packing and order.
        dataset_num_proc: worker processes; they change nothing.
        strict: the first row that cannot be used is an error.
    """

    packing_length: int
    num_epochs: int
    seed: int
    dataset_num_proc: int
    strict: bool


@dataclass(frozen=True, eq=False)
class StreamedPack:
    """A pack, and the place right behind it.

    Args:
        state: from which a stream goes on with the next pack.
        added: what each sample adds to it.
    """

    samples: list[EncodedSample]
    state: StreamState
    added: Added

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed of the samples."""
        return self.num_whole_tokens - int(self.added.shared.sum())

    @property
    def num_whole_tokens(self) -> int:
        """Tokens of all samples, each whole."""
        return sum(sample.length for sample in self.samples)

    @property
    def num_targets(self) -> int:
        """Labels that carry loss."""
        return sum(num_targets(sample) for sample in self.samples)


@dataclass
class _Held:
    """What a stream holds between two intervals."""

    interval: int = 0
    carried: list[EncodedSample] = field(default_factory=list)
    shuffled: list[EncodedSample] = field(default_factory=list)
    counts: InputCounts = field(default_factory=lambda: InputCounts.total(()))


class PackStream:
    """The packs of one data-parallel rank.

    Args:
        specs: files of all rows.
        spec: how they are encoded.
        rank, world_size: which of the rows are this rank's.
        start: a state of an earlier stream with the same arguments, to go on from.
        sharing: how samples of an interval share prefixes; None has each computed whole.
        log: told of every row that is dropped, once.

    Raises (while packs are taken):
        PacktoolError: what reading or encoding met, or that a worker died.
        RowError: in strict mode.
    """

    def __init__(
        self,
        specs: Sequence[SourceSpec],
        spec: EncodeSpec,
        options: StreamOptions,
        *,
        rank: int,
        world_size: int,
        start: StreamState | None = None,
        sharing: IntervalSharing | None = None,
        log: Callable[[Dropped], None],
    ) -> None:
        self._specs, self._spec, self._options = specs, spec, options
        self._rank, self._world_size = rank, world_size
        self._sharing, self._log = sharing, log
        self._start = start or StreamState()
        self._held = _Held(
            self._start.interval,
            list(self._start.carried),
            list(self._start.shuffled),
            self._start.counts,
        )
        self._random = np.random.default_rng((options.seed, rank, RandomStream.SHUFFLE_BUFFER))
        if self._start.random is not None:
            self._random.bit_generator.state = self._start.random
        # Where the next sample comes from: a place, and samples of the block behind it that were taken already.
        self._place, self._num_taken, self._ended = self._start.place, self._start.num_taken, self._start.ended

    @property
    def counts(self) -> InputCounts:
        """What was left out so far."""
        return self._held.counts

    def __iter__(self) -> Iterator[StreamedPack]:
        samples = self._shuffled(self._samples())
        packs_done = self._start.packs_done
        while True:
            before = self._state()
            new = list(islice(samples, self._options.packing_interval - len(self._held.carried)))
            waiting = [*self._held.carried, *new]
            ended = len(waiting) < self._options.packing_interval
            if not waiting:
                return
            plan, added = self._packed(waiting)
            held_back = [] if ended else _held_back(plan, self._options)
            self._held.carried = [waiting[i] for number in held_back for i in plan.pack(number)]
            self._held.interval += 1
            given = [number for number in range(plan.num_packs) if number not in held_back]
            for done, number in enumerate(given[packs_done:], packs_done + 1):
                state = replace(before, packs_done=done) if done < len(given) else self._state()
                chosen = plan.pack(number)
                yield StreamedPack([waiting[i] for i in chosen], state, added.taken(chosen))
            packs_done = 0

    def _packed(self, samples: Sequence[EncodedSample]) -> tuple[PackPlan, Added]:
        """The packs of an interval, and what each of its samples adds to its pack."""
        options, capacity = self._options, self._options.packing_length
        lengths = np.array([sample.length for sample in samples], np.int32)
        found = None if self._sharing is None else self._sharing.found(samples, capacity)
        added = Added.of(samples, found)
        way: Any = {"seed": options.seed, "epoch": self._held.interval, "media_tokens": added.media_tokens}
        if found is None:
            return pack(lengths, capacity, options, **way), added
        plan = pack_trees(found.trees, lengths, capacity, options, **way)
        parts = TreeParts.of(plan, found.trees)
        if parts is not None and parts.placement == "together":
            plan = select_packs(plan, parts.move_together(plan.num_packs))
        return plan, added

    def _state(self) -> StreamState:
        held = self._held
        return StreamState(
            place=self._place,
            num_taken=self._num_taken,
            ended=self._ended,
            interval=held.interval,
            random=dict(self._random.bit_generator.state),
            carried=tuple(held.carried),
            shuffled=tuple(held.shuffled),
            counts=held.counts,
        )

    def _shuffled(self, samples: Iterator[EncodedSample]) -> Iterator[EncodedSample]:
        """Each drawn from a buffer, whose place the next one takes."""
        buffer = self._held.shuffled
        for sample in samples:
            buffer.append(sample)
            if len(buffer) >= self._options.shuffle_buffer_size:
                yield self._drawn(buffer)
        while buffer:
            yield self._drawn(buffer)

    def _drawn(self, buffer: list[EncodedSample]) -> EncodedSample:
        """A sample drawn at random from the buffer, which loses it."""
        if len(buffer) == 1:
            return buffer.pop()
        if self._options.shuffle_buffer_size == 1:
            return buffer.pop(0)
        at = int(self._random.integers(len(buffer)))
        buffer[at], buffer[-1] = buffer[-1], buffer[at]
        return buffer.pop()

    def _samples(self) -> Iterator[EncodedSample]:
        """All samples of this rank from the start on, in the order of their rows."""
        if self._ended:
            return
        skipped, most = self._num_taken, self._options.max_media_tokens_per_pack
        for block in self._blocks():
            self._place = block.place
            if not skipped:
                self._note(block.dropped)
            for number, sample in enumerate(block.samples[skipped:], skipped + 1):
                self._num_taken = number
                if most is not None and sample.num_media_tokens > most:
                    detail = f"{sample.num_media_tokens} media tokens, --max-media-tokens-per-pack allows {most}"
                    self._note([Dropped(sample.source, sample.row, "media_budget", detail, sample.part)])
                else:
                    yield sample
            skipped = 0
        self._ended = True

    def _blocks(self) -> Iterator[EncodedBlock]:
        options = self._options
        blocks = blocks_of_rank(
            self._specs,
            rank=self._rank,
            world_size=self._world_size,
            num_epochs=options.num_epochs,
            seed=options.seed,
            shuffle=options.shuffle,
            start=self._place,
        )
        # While the packs of an interval are trained, the samples of the next one are made.
        ahead = 2 * options.dataset_num_proc + -(-options.packing_interval // BLOCK_ROWS)
        return encoded_blocks(blocks, self._spec, num_proc=options.dataset_num_proc, num_ahead=ahead)

    def _note(self, dropped: Sequence[Dropped]) -> None:
        for item in dropped:
            if self._options.strict:
                raise item.as_error()
            self._held.counts += InputCounts.of_dropped(item)
            self._log(item)


def _held_back(plan: PackPlan, options: StreamOptions) -> list[int]:
    """Packs that wait for the next interval: the emptiest, if they are not full; where order is kept, the last."""
    tokens = plan.tokens_per_pack()
    keeps_order = options.packing_algorithm == "sequential" or not options.shuffle
    emptiest = np.argsort(tokens, kind="stable")[:_MOST_HELD_BACK].tolist()
    room = int(_SHARE_HELD_BACK * options.packing_interval)
    found = []
    for number in [plan.num_packs - 1] if keeps_order else emptiest:
        room -= len(plan.pack(number))
        if tokens[number] < _FULL * plan.capacity and room >= 0:
            found.append(number)
    return found
