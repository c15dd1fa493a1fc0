"""Packing of a stream: samples are packed in intervals, and share prefixes within an interval.

An interval is up to ``packing_interval`` samples. They are packed, and the packs are trained in an order drawn from the
seed. Up to two packs that are not full are held back: their samples are packed again with those of the next interval.
Memory is bounded by the interval and the shuffle buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from packtool.planning.prefix_trees import PartPlacement, Prefixes, PrefixTrees, plan_trees
from packtool.planning.shuffle import RandomStream
from packtool.planning.tree_parts import TreeParts
from packtool.rows.sample import Dropped
from packtool.rows.source import BLOCK_ROWS, SourceSpec
from packtool.stream.reading import EncodedBlock, StreamState, blocks_of_rank, encoded_blocks


@dataclass(frozen=True)
class IntervalSharing:
    """Options for shared prefixes within an interval.

    Args:
        media: placeholder tokens of media.
        min_saving: fraction of an interval's tokens (0 to 1) that must be saved, or the interval shares no prefixes.
        max_rows: maximum samples of a prefix tree, None for no limit.
        max_media_tokens: maximum media tokens of a prefix tree, None for no limit.
        parts: placement of the parts of a tree that is larger than a pack.
    """

    media: MediaTokens
    min_saving: float
    max_rows: int | None = None
    max_media_tokens: int | None = None
    parts: PartPlacement = "any"

    def find_trees(self, samples: Sequence[EncodedSample], capacity: int) -> PrefixSharing | None:
        """Find the prefix trees of an interval's samples; None if at most ``min_saving`` would be saved."""
        lengths = np.array([sample.length for sample in samples], np.int32)
        assert lengths.max(initial=0) <= capacity, "longer samples were dropped"
        num_prefixes, prefixes = prefix_hashes(samples, self.media, longer_than=MIN_SHARED)
        trees = plan_trees(
            lengths,
            Prefixes(to_offsets(num_prefixes), prefixes.lengths, prefixes.hashes),
            capacity=capacity,
            min_shared=MIN_SHARED,
            max_samples=self.max_rows,
            media_tokens=(SampleAmounts.of(samples).media_tokens, prefixes.media_tokens),
            max_media_tokens=self.max_media_tokens,
        )
        if trees.saved(lengths) <= self.min_saving:
            return None
        return PrefixSharing(replace(trees, part_placement=self.parts), prefixes)


class PrefixSharing(NamedTuple):
    """Prefix trees of an interval's samples, and the prefixes of all its samples, to which the trees refer."""

    trees: PrefixTrees
    prefixes: PrefixHashes


class SampleAmounts(NamedTuple):
    """Amounts that each of N samples adds to the computation of its pack; int64 (N,) each.

    Args:
        shared_tokens: tokens shared with the sample before it, which are computed only once.
        targets: labels for which logits are computed.
        media_tokens: placeholder tokens of all media.
        audio_tokens: placeholder tokens of audio.
        patch_squares: sum over frames of the squared number of patches, the cost of the vision tower's attention.
        picture_squares: (patches of a picture or frame)^2 of the complete sample, as in ``SplitIndex``.
    """

    shared_tokens: Int64Array
    targets: Int64Array
    media_tokens: Int64Array
    audio_tokens: Int64Array
    patch_squares: Int64Array
    picture_squares: Int64Array

    @classmethod
    def of(cls, samples: Sequence[EncodedSample], sharing: PrefixSharing | None = None) -> SampleAmounts:
        """Compute the amounts of samples; with ``sharing``, a shared prefix counts for only one sample of its tree."""
        unshared = cls(
            shared_tokens=np.zeros(len(samples), np.int64),
            targets=np.array([num_targets(sample) for sample in samples], np.int64),
            media_tokens=np.array([sample.num_media_tokens for sample in samples], np.int64),
            audio_tokens=np.array([sample.num_audio_tokens for sample in samples], np.int64),
            patch_squares=np.array([sample.patch_squares for sample in samples], np.int64),
            picture_squares=np.array([(s.patch_squares / max(s.num_patches, 1)) ** 2 for s in samples], np.int64),
        )
        return unshared if sharing is None else unshared._without_shared(sharing)

    def _without_shared(self, sharing: PrefixSharing) -> SampleAmounts:
        """Subtract from each sample's amounts those of the prefix which it shares with the sample before."""
        trees, prefixes = sharing
        shared_tokens = np.zeros(len(self.targets), np.int64)
        shared_tokens[trees.samples] = trees.shared_tokens
        targets = trees.added(self.targets, prefixes.target_tokens)
        return SampleAmounts(
            shared_tokens=shared_tokens,
            targets=np.maximum(targets, 0),  # negative if samples that share a prefix have other targets in it
            media_tokens=trees.added(self.media_tokens, prefixes.media_tokens),
            audio_tokens=trees.added(self.audio_tokens, prefixes.audio_tokens),
            patch_squares=trees.added(self.patch_squares, prefixes.patch_squares),
            picture_squares=self.picture_squares,
        )

    def select(self, samples: Int64Array) -> SampleAmounts:
        """Return the amounts of some samples, given by their positions, (n,)."""
        return SampleAmounts(*(column[samples] for column in self))

    @classmethod
    def joined(cls, packs: Sequence[SampleAmounts]) -> SampleAmounts:
        """Concatenate the amounts of several packs."""
        if not packs:
            return cls.of([])
        columns = zip(*packs, strict=True)  # for each field, the arrays of all packs
        return cls(*(np.concatenate(column) for column in columns))


_MIN_FILL = 0.98  # of a pack that is not held back
_MAX_HELD_BACK_PACKS = 2
_MAX_HELD_BACK_FRACTION = 0.25  # of the samples of an interval


@dataclass(frozen=True, kw_only=True)
class StreamOptions(PackOptions, IntervalOptions):
    """Options that determine the packs of a stream.

    ``packing_length``: maximum tokens of a pack. ``dataset_num_proc``: number of worker processes, which does not
    affect the packs. ``strict``: raise an error at the first unusable row.
    """

    packing_length: int
    num_epochs: int
    seed: int
    dataset_num_proc: int
    strict: bool


@dataclass(frozen=True, eq=False)
class StreamedPack:
    """A pack of a stream, and the ``state`` from which a stream continues with the next pack."""

    samples: list[EncodedSample]
    state: StreamState
    amounts: SampleAmounts

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, with each shared prefix once."""
        return self.num_whole_tokens - int(self.amounts.shared_tokens.sum())

    @property
    def num_whole_tokens(self) -> int:
        """Tokens of all samples, with a shared prefix once for each sample."""
        return sum(sample.length for sample in self.samples)

    @property
    def num_targets(self) -> int:
        """Labels that are trained."""
        return sum(num_targets(sample) for sample in self.samples)


class PackStream:
    """The packs of one data-parallel rank.

    Args:
        rank, world_size: data-parallel rank and number of ranks.
        start: state of an earlier stream with the same arguments to resume from; None for the beginning.
        sharing: options for shared prefixes; None if prefixes are not shared.
        log: called once with every dropped row.
    """

    def __init__(
        self,
        sources: Sequence[SourceSpec],
        encode_spec: EncodeSpec,
        options: StreamOptions,
        *,
        rank: int,
        world_size: int,
        start: StreamState | None = None,
        sharing: IntervalSharing | None = None,
        log: Callable[[Dropped], None],
    ) -> None:
        """Prepare to read the rows of this rank, of ``world_size`` ranks, from the state ``start`` on."""
        self._sources, self._encode_spec, self._options = sources, encode_spec, options
        self._rank, self._world_size = rank, world_size
        self._sharing, self._log_dropped = sharing, log
        start = start or StreamState()
        self._num_packs_to_skip = start.packs_done  # packs of the first interval
        # The attributes from here on change while samples are read; ``_state`` returns them.
        self.counts = start.counts  # of dropped rows
        self._interval = start.interval  # 0-based number of the next one
        self._held_back = list(start.carried)  # samples to be packed again in the next interval
        self._shuffle_buffer = list(start.shuffled)
        self._random = np.random.default_rng((options.seed, rank, RandomStream.SHUFFLE_BUFFER))
        if start.random is not None:
            self._random.bit_generator.state = start.random
        self._position = start.position  # before the block that is being read; None before the first one
        self._num_read = start.num_taken  # samples of this block
        self._ended = start.ended

    def __iter__(self) -> Iterator[StreamedPack]:
        """Yield the packs of one interval after the other, until the samples end.

        An interval is a number of consecutive samples that are packed together. A stream that resumes within an
        interval packs it again, and leaves out the packs that were done before.
        """
        samples = self._shuffled(self._samples())  # reading them changes ``self._state()``
        num_to_skip = self._num_packs_to_skip
        while True:
            state_before = self._state()
            num_new_samples = self._options.packing_interval - len(self._held_back)
            interval = [*self._held_back, *islice(samples, num_new_samples)]
            if not interval:
                return
            packs = self._pack_interval(interval)  # replaces ``self._held_back``
            state_after = self._state()
            for num_done, (pack_samples, amounts) in enumerate(packs, start=1):
                if num_done > num_to_skip:
                    is_last = num_done == len(packs)
                    state = state_after if is_last else replace(state_before, packs_done=num_done)
                    yield StreamedPack(pack_samples, state, amounts)
            num_to_skip = 0

    def _pack_interval(self, interval: Sequence[EncodedSample]) -> list[tuple[list[EncodedSample], SampleAmounts]]:
        """Return the samples and amounts of each pack of an interval, and hold back some packs for the next one."""
        plan, amounts = self._pack(interval)
        is_last_interval = len(interval) < self._options.packing_interval
        held_back_packs = [] if is_last_interval else _held_back_packs(plan, self._options)
        self._held_back = [interval[i] for number in held_back_packs for i in plan.pack(number)]
        self._interval += 1
        packs = [plan.pack(number) for number in range(plan.num_packs) if number not in held_back_packs]
        return [([interval[i] for i in positions], amounts.select(positions)) for positions in packs]

    def _pack(self, samples: Sequence[EncodedSample]) -> tuple[PackPlan, SampleAmounts]:
        """Pack the samples of an interval; return the packs and the amounts that each sample adds."""
        options, capacity = self._options, self._options.packing_length
        lengths = np.array([sample.length for sample in samples], np.int32)
        sharing = None if self._sharing is None else self._sharing.find_trees(samples, capacity)
        amounts = SampleAmounts.of(samples, sharing)
        kwargs: Any = {"seed": options.seed, "epoch": self._interval, "media_tokens": amounts.media_tokens}
        if sharing is None:
            return pack(lengths, capacity, options, **kwargs), amounts
        plan = pack_trees(sharing.trees, lengths, capacity, options, **kwargs)
        parts = TreeParts.of(plan, sharing.trees)
        if parts is not None and parts.placement == "together":
            plan = select_packs(plan, parts.move_together(plan.num_packs))
        return plan, amounts

    def _state(self) -> StreamState:
        """Return the state at the beginning of an interval."""
        return StreamState(
            position=self._position,
            num_taken=self._num_read,
            ended=self._ended,
            interval=self._interval,
            random=dict(self._random.bit_generator.state),
            carried=tuple(self._held_back),
            shuffled=tuple(self._shuffle_buffer),
            counts=self.counts,
        )

    def _shuffled(self, samples: Iterator[EncodedSample]) -> Iterator[EncodedSample]:
        """Yield samples in random order: each is drawn from a buffer, where the next sample replaces it."""
        for sample in samples:
            self._shuffle_buffer.append(sample)
            if len(self._shuffle_buffer) >= self._options.shuffle_buffer_size:
                yield self._draw()
        while self._shuffle_buffer:
            yield self._draw()

    def _draw(self) -> EncodedSample:
        """Remove a random sample from the shuffle buffer; with a buffer size of 1, the oldest."""
        buffer = self._shuffle_buffer
        if len(buffer) == 1:
            return buffer.pop()
        if self._options.shuffle_buffer_size == 1:
            return buffer.pop(0)
        drawn = int(self._random.integers(len(buffer)))
        buffer[drawn], buffer[-1] = buffer[-1], buffer[drawn]
        return buffer.pop()

    def _samples(self) -> Iterator[EncodedSample]:
        """Read the samples of this rank from the current position on, in the order of their rows.

        Updates ``self._position``, ``self._num_read`` and ``self._ended``, so that ``_state`` names the next sample.
        Rows that cannot be used are counted and logged.
        """
        if self._ended:
            return
        num_to_skip = self._num_read  # samples of the first block that were read before the stream was resumed
        for position, samples, dropped_rows in self._encoded_blocks():
            self._position = position
            self._num_read = num_to_skip
            if num_to_skip == 0:  # otherwise the drops of this block were counted before
                self._drop(dropped_rows)
            for sample in samples[num_to_skip:]:
                self._num_read += 1
                dropped_sample = self._exceeded_media_tokens(sample)
                if dropped_sample is None:
                    yield sample
                else:
                    self._drop([dropped_sample])
            num_to_skip = 0
        self._ended = True

    def _encoded_blocks(self) -> Iterator[EncodedBlock]:
        """Read and encode this rank's blocks from the current position on."""
        options = self._options
        blocks = blocks_of_rank(
            self._sources,
            rank=self._rank,
            world_size=self._world_size,
            num_epochs=options.num_epochs,
            seed=options.seed,
            shuffle=options.shuffle,
            start=self._position,
        )
        # While the packs of an interval are trained, the samples of the next interval are encoded.
        blocks_per_interval = math.ceil(options.packing_interval / BLOCK_ROWS)
        num_ahead = 2 * options.dataset_num_proc + blocks_per_interval
        return encoded_blocks(blocks, self._encode_spec, num_proc=options.dataset_num_proc, num_ahead=num_ahead)

    def _exceeded_media_tokens(self, sample: EncodedSample) -> Dropped | None:
        """Return the reason to drop a sample with more media tokens than a pack may hold; None to keep it."""
        max_media_tokens = self._options.max_media_tokens_per_pack
        if max_media_tokens is None or sample.num_media_tokens <= max_media_tokens:
            return None
        detail = (
            f"the sample has {sample.num_media_tokens} media tokens; --max-media-tokens-per-pack is {max_media_tokens}"
        )
        return Dropped(sample.source, sample.row, "media_budget", detail, sample.part)

    def _drop(self, dropped: Sequence[Dropped]) -> None:
        """Count and log dropped rows; raise RowError for the first one in strict mode."""
        for item in dropped:
            if self._options.strict:
                raise item.as_error()
            self.counts += InputCounts.of_dropped(item)
            self._log_dropped(item)


def _held_back_packs(plan: PackPlan, options: StreamOptions) -> list[int]:
    """Choose packs whose samples are packed again with the next interval, because they leave much space.

    Returns the numbers of the emptiest packs, at most ``_MAX_HELD_BACK_PACKS``, until one is nearly full or the packs
    have too many samples. If packing keeps the order of samples, only the last pack can be held back.
    """
    tokens_per_pack = plan.tokens_per_pack()
    keeps_order = options.packing_algorithm == "sequential" or not options.shuffle
    if keeps_order:
        candidates = [plan.num_packs - 1]
    else:
        candidates = np.argsort(tokens_per_pack, kind="stable")[:_MAX_HELD_BACK_PACKS].tolist()

    max_samples = int(_MAX_HELD_BACK_FRACTION * options.packing_interval)
    num_samples = 0
    held_back_packs = []
    for pack_number in candidates:
        num_samples += len(plan.pack(pack_number))
        is_nearly_full = tokens_per_pack[pack_number] >= _MIN_FILL * plan.capacity
        if is_nearly_full or num_samples > max_samples:
            break
        held_back_packs.append(pack_number)
    return held_back_packs
