"""Work of the towers: assignment of images, videos and sounds to the ranks that share a sequence.

Ranks wait for each other after their towers, where features are exchanged, so tower work is balanced by itself. An
image is computed by one rank, so ranks have unequal shares of a pack. The index of a cache has the number of images
of a sample, their total tokens, and the squares of their patches, but not the size of each; of sounds it has the
number, except for tracks of videos, and their total tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packtool.planning.pack_plan import Costs, Int64Array, IntArray, PackPlan, invert_order
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import StepPlan


@dataclass(frozen=True, eq=False)
class TowerWork:
    """Work of the towers for each of N samples.

    Args:
        flops: int64 (N,), of all its media: integers have the same sum in any order.
        num_media: (N,), its images, videos and sounds.
        logits: int64 (N,), tokens of which logits are computed, with shared prefixes; None for all targets.
    """

    flops: Int64Array
    num_media: IntArray
    logits: Int64Array | None = None

    def select(self, samples: Int64Array) -> TowerWork:
        """Return the work for some samples, given by their positions, (n,); without logits."""
        return TowerWork(self.flops[samples], self.num_media[samples])


def assign_heaviest_first(
    weights: Sequence[float] | Costs, loads: Sequence[float] | Costs, groups: Int64Array | None = None
) -> Int64Array:
    """Return the rank of each item, (n,): the heaviest item first, each to the rank with the least load so far (LPT).

    ``loads``, (N,), are the initial loads of the ranks. With ``groups``, (n,), each item goes to one of the ranks of
    its group; ``loads`` are then (groups, N).
    """
    weights = np.asarray(weights, np.float64)
    rank_loads = np.array(loads, np.float64, ndmin=2)  # (G, N), a copy
    owners = np.zeros(len(weights), np.int64)
    if groups is None:
        groups = np.zeros(len(weights), np.int64)
    for items in _rounds(weights, groups, len(rank_loads)):
        owners[items] = rank_loads[groups[items]].argmin(axis=1)
        rank_loads[groups[items], owners[items]] += weights[items]
    return owners


def _rounds(weights: Costs, groups: Int64Array, num_groups: int) -> list[Int64Array]:
    """Divide items (n,) into rounds with at most one item of each group: in round r its item r by weight."""
    by_group = np.lexsort((-weights, groups))  # and in a group the heaviest first
    group_sizes = np.bincount(groups, minlength=num_groups)
    group_starts = np.cumsum(group_sizes) - group_sizes
    round_of = np.arange(len(by_group)) - np.repeat(group_starts, group_sizes)
    by_round = by_group[np.argsort(round_of, kind="stable")]
    round_stops = np.cumsum(np.bincount(round_of))
    return np.split(by_round, round_stops[:-1])


def _assign_media(
    weights: Costs, micro_batch_of: Int64Array, placement: Int64Array, shape: tuple[int, int]
) -> Int64Array:
    """Assign media to ranks, (n,): to that of a local sample, else to the rank with the least work so far.

    ``placement``, (n,), is that of the sample: its rank, or ``SHARDED``. ``shape`` is the number of micro-batches, and
    of the ranks that share one.
    """
    is_sharded = placement == SHARDED
    is_local = ~is_sharded
    loads = np.zeros(shape)  # work of each rank in each micro-batch
    np.add.at(loads, (micro_batch_of[is_local], placement[is_local]), weights[is_local])
    owners = placement.copy()
    owners[is_sharded] = assign_heaviest_first(weights[is_sharded], loads, micro_batch_of[is_sharded])
    return owners


def shared_tower_costs(steps: StepPlan, placement: Int64Array, work: TowerWork, sequence_parallel_size: int) -> Costs:
    """Sum the FLOPs of the images of sharded samples on each device, (steps * data-parallel ranks, devices).

    A data-parallel rank has ``sequence_parallel_size`` devices, which share its sharded samples. Each image of such a
    sample is computed by one device: that with the least tower work in its micro-batch.

    Args:
        steps: its packs are single samples.
        placement: for each sample in ``steps.order``, the device that computes it, or ``SHARDED``, (N,).
    """
    flops = work.flops[steps.order]
    # The images of a sharded sample are assigned one by one, those of a local one together.
    is_divided = (placement == SHARDED) & (flops != 0)
    num_images = np.where(is_divided, np.maximum(work.num_media[steps.order], 1), 1)
    # Of each image, (I,); those of a sample count as equal, because their sizes are unknown here.
    image_flops = np.repeat(flops / num_images, num_images)
    image_placement = np.repeat(placement, num_images)
    micro_batch = np.repeat(steps.micro_batch_of, num_images)
    shape = steps.num_micro_batches_of_all_ranks, sequence_parallel_size
    device = _assign_media(image_flops, micro_batch, image_placement, shape)

    is_sharded = image_placement == SHARDED
    costs_in_micro_batches = np.zeros(shape)
    np.add.at(costs_in_micro_batches, (micro_batch[is_sharded], device[is_sharded]), image_flops[is_sharded])
    costs = np.zeros((steps.num_steps * steps.world_size, sequence_parallel_size))
    np.add.at(costs, steps.rank_step_of_micro_batch, costs_in_micro_batches)
    return costs


@dataclass(frozen=True, eq=False)
class Media:
    """The n images, videos and sounds of samples, one by one.

    Args:
        samples: int64 (n,), position of the sample in the cache.
        tokens: float64 (n,), of an image or video; 0 of a sound.
        squares: float64 (n,), sum over its frames of (patches of the frame)^2.
        sounds: float64 (n,), tokens of a sound; 0 of images and videos.
    """

    samples: Int64Array
    tokens: Costs
    squares: Costs
    sounds: Costs

    @classmethod
    def of_samples(
        cls, tokens: IntArray, squares: IntArray, num_images: IntArray, num_videos: IntArray, *, patches_per_token: int
    ) -> Media:
        """Estimate the size of each image and video from sums over the media of a sample.

        Of each sample, one medium is taken to be the largest that the sums allow, and the others to be equal.

        Args:
            tokens: of all images and videos of each sample, (N,).
            squares: sum over their frames of (patches of the frame)^2, (N,).
        """
        num_media = (num_images + num_videos).astype(np.int64)
        samples = np.flatnonzero(num_media > 0)
        # All further arrays up to ``other_squares`` are of these samples, (S,).
        counts, sample_squares = num_media[samples], squares[samples]
        sample_tokens = tokens[samples].astype(np.float64)
        squared_tokens = sample_squares / patches_per_token**2
        has_videos = num_videos[samples] > 0
        largest_tokens = _largest_tokens(counts, sample_tokens, squared_tokens, has_videos)
        num_others = counts - 1
        other_tokens = (sample_tokens - largest_tokens) / np.maximum(num_others, 1)  # of each other medium
        other_squares = (other_tokens * patches_per_token) ** 2
        largest_squares = np.maximum(sample_squares - num_others * other_squares, 0)
        media_tokens = _first_and_others(largest_tokens, other_tokens, counts)
        media_squares = _first_and_others(largest_squares, other_squares, counts)
        return cls(np.repeat(samples, counts), media_tokens, media_squares, sounds=np.zeros(len(media_tokens)))

    def with_sounds(self, tokens: IntArray, num_audios: IntArray, num_videos: IntArray) -> Media:
        """Add the sounds of the same samples: of several the first has all but a token of each other.

        Arrays are (N,). ``tokens`` include those of videos; a sample without ``num_audios`` has only those.
        """
        samples = np.flatnonzero(tokens > 0)
        counts = np.where(num_audios[samples] > 0, num_audios[samples], np.maximum(num_videos[samples], 1))
        counts = np.minimum(counts.astype(np.int64), tokens[samples])
        sounds = np.ones(counts.sum())
        sounds[np.cumsum(counts) - counts] = tokens[samples] - (counts - 1)
        zeros = np.zeros(len(sounds))
        added = np.repeat(samples, counts), zeros, zeros, sounds
        columns = zip((self.samples, self.tokens, self.squares, self.sounds), added, strict=True)
        return Media(*map(np.concatenate, columns))


def _first_and_others(first: Costs, others: Costs, counts: Int64Array) -> Costs:
    """List values of single media, (n,): of each of S samples the value of its first medium, then of the others."""
    values = np.repeat(others, counts)
    values[np.cumsum(counts) - counts] = first
    return values


def _largest_tokens(
    num_media: IntArray, tokens: Costs, squared_tokens: Costs, has_videos: npt.NDArray[np.bool_]
) -> Costs:
    """Estimate the tokens of the largest medium of each sample, (S,), from sums over its media, one or more.

    Images: the largest that these sums allow (Samuelson 1968, "How deviant can you be?"). Videos have no squared tokens
    of their own, only of their frames: one is assumed to have all tokens but one for each other medium.
    """
    mean = tokens / num_media
    squared_deviations = np.maximum(squared_tokens - tokens**2 / num_media, 0)
    all_but_one_each = tokens - (num_media - 1)
    samuelson_bound = mean + np.sqrt((num_media - 1) / num_media * squared_deviations)
    largest = np.where(has_videos, all_but_one_each, samuelson_bound)
    return np.minimum(largest, np.maximum(all_but_one_each, mean))


@dataclass(frozen=True, eq=False)
class MediaShares:
    """Assignment of media to ranks in each of the C micro-batches of the data-parallel ranks.

    Args:
        selected: int64 (m,), indices of the ``media`` that the epoch trains.
        micro_batch_of, owners: int64 (m,), the micro-batch of each, and the rank that computes it.
        shape: C, and the ranks that share a micro-batch.
    """

    media: Media
    selected: Int64Array
    micro_batch_of: Int64Array
    owners: Int64Array
    shape: tuple[int, int]

    @classmethod
    def of_plan(
        cls, media: Media, work: Costs, packs: PackPlan, steps: StepPlan, num_ranks: int, placement: Int64Array | None
    ) -> MediaShares:
        """Assign the images, videos and sounds of an epoch to ranks: most work first, to the rank with the least.

        Work is balanced within each micro-batch. Media of samples that the plan lacks are not assigned.

        Args:
            work: of each of ``media``, (n,).
            num_ranks: ranks that share a micro-batch.
            placement: for each pack in ``steps.order``, the rank that computes all its media, or ``SHARDED``, (K,);
                None if all are sharded.
        """
        if placement is None:
            placement = np.full(len(steps.order), SHARDED, np.int64)
        # Index in ``steps.order`` of the pack of each sample, by cache position; -1 without a pack.
        num_samples = 1 + int(max(packs.samples.max(initial=-1), media.samples.max(initial=-1)))
        index_of_pack = invert_order(steps.order)
        index_of_sample = np.full(num_samples, -1, np.int64)
        index_of_sample[packs.samples] = np.repeat(index_of_pack, np.diff(packs.offsets))
        index_of_medium = index_of_sample[media.samples]

        selected = np.flatnonzero(index_of_medium >= 0)
        selected_indices = index_of_medium[selected]
        micro_batch_of = steps.micro_batch_of[selected_indices]
        shape = steps.num_micro_batches_of_all_ranks, num_ranks
        owners = _assign_media(work[selected], micro_batch_of, placement[selected_indices], shape)
        return cls(media, selected, micro_batch_of, owners, shape)

    def max_per_rank(self, values: Costs) -> Costs:
        """Find the largest sum of ``values`` (n,) of the media of a rank, in each micro-batch; (C,)."""
        num_micro_batches, size = self.shape
        keys = self.micro_batch_of * size + self.owners
        sums = np.bincount(keys, values[self.selected], num_micro_batches * size)
        return np.asarray(sums.reshape(self.shape).max(axis=1, initial=0.0))
