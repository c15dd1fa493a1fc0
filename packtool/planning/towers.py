"""Work of the towers: assignment of images, videos and sounds to the ranks that share a sequence.

Ranks wait for each other after their towers, where features are exchanged, so tower work is balanced by itself.

An image is computed by one rank, so ranks have unequal shares of a pack. The index of a cache has the number of images
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

    Ties go to the earlier item and the lower rank. ``loads``, (N,), are the initial loads of the ranks. With
    ``groups``, (n,), the group of each item, G groups of N ranks each are assigned at once, and ``loads`` is (G, N).
    Cost: O(n N), in as many rounds as the largest group has items.
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
    """Sum the FLOPs of the images of sharded samples on each device, (steps x data-parallel ranks, N).

    The images of a sample are assumed to be equal, as their sizes are unknown here. ``steps`` and ``placement``, (K,),
    are of single samples, and ``work`` is by the numbers in ``steps.order``; N ranks share a micro-batch. The work of
    local samples is not in the result, but images of sharded samples go to ranks with little of it.
    """
    # Arrays of images, (I,): all images of sharded samples, and for each local sample one image with all its work.
    flops = work.flops[steps.order]
    num_images = np.maximum(work.num_media[steps.order], 1)
    num_images[(placement != SHARDED) | (flops == 0)] = 1
    image_flops = np.repeat(flops / num_images, num_images)
    image_placement = np.repeat(placement, num_images)
    image_batches = np.repeat(steps.micro_batch_of, num_images)
    shape = steps.num_micro_batches_of_all_ranks, sequence_parallel_size
    owners = _assign_media(image_flops, image_batches, image_placement, shape)
    is_sharded = image_placement == SHARDED
    batch_costs = np.zeros(shape)  # of each device in each micro-batch
    np.add.at(batch_costs, (image_batches[is_sharded], owners[is_sharded]), image_flops[is_sharded])
    costs = np.zeros((steps.num_steps * steps.world_size, sequence_parallel_size))
    np.add.at(costs, steps.rank_of_micro_batch, batch_costs)
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
        cls,
        tokens: IntArray,
        squares: IntArray,
        num_images: IntArray,
        num_videos: IntArray,
        *,
        patches_per_token: int,
    ) -> Media:
        """Estimate single images and videos: of n images with M tokens and T squared tokens, the largest has at most

            M / n + sqrt((n - 1) / n * (T - M^2 / n))

        tokens (Samuelson 1968, "How deviant can you be?"), and exactly as many if the others are equal, as assumed
        here. In a sample with videos, whose squares are of frames, the largest is assumed to have all tokens but one
        for each other medium.

        All arrays, (N,), are of the samples of a cache; ``squares`` are sums over frames of (patches of the frame)^2.
        """
        num_media = (num_images + num_videos).astype(np.int64)
        samples = np.flatnonzero(num_media > 0)
        counts = num_media[samples]
        n, sums = counts.astype(np.float64), tokens[samples].astype(np.float64)
        square_sums = squares[samples] / patches_per_token**2
        largest = _largest_tokens(n, sums, square_sums, num_videos[samples] > 0)
        other = (sums - largest) / np.maximum(n - 1, 1)  # tokens of each medium but the largest
        other_squares = (other * patches_per_token) ** 2
        # The media of each sample, the largest first.
        media_tokens = np.repeat(other, counts)
        media_squares = np.repeat(other_squares, counts)
        first_media = np.cumsum(counts) - counts
        media_tokens[first_media] = largest
        media_squares[first_media] = np.maximum(squares[samples] - (n - 1) * other_squares, 0)
        no_sounds = np.zeros(len(media_tokens))
        return cls(np.repeat(samples, counts), media_tokens, media_squares, no_sounds)

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


def _largest_tokens(n: Costs, sums: Costs, square_sums: Costs, has_videos: npt.NDArray[np.bool_]) -> Costs:
    """Estimate the tokens of the largest medium of each sample, as ``Media.of_samples`` explains; (S,).

    ``n`` are the media of each sample, ``sums`` and ``square_sums`` the sums of their tokens and squared tokens.
    """
    mean = sums / n
    deviation = np.maximum(square_sums - sums**2 / n, 0)
    all_but_one_each = sums - (n - 1)
    samuelson_bound = mean + np.sqrt((n - 1) / n * deviation)
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
        cls, media: Media, work: Costs, packs: PackPlan, steps: StepPlan, size: int, placement: Int64Array | None
    ) -> MediaShares:
        """Assign media by their work (n,), as ``collate_shard`` does: most work first, to the rank with the least.

        ``packs``, ``steps`` and ``placement`` are of an ``EpochPlan``; ``size`` ranks share a micro-batch. Media of a
        sample that is local to a rank belong to this rank.
        """
        # The position in ``steps.order`` of the pack of each sample, by sample number; -1 without a pack.
        num_samples = int(max(packs.samples.max(initial=-1), media.samples.max(initial=-1))) + 1
        position_of = np.full(num_samples, -1, np.int64)
        position_of[packs.samples] = np.repeat(invert_order(steps.order), np.diff(packs.offsets))
        selected = np.flatnonzero(position_of[media.samples] >= 0)
        positions = position_of[media.samples[selected]]
        micro_batch_of = steps.micro_batch_of[positions]
        shape = steps.num_micro_batches_of_all_ranks, size
        if placement is None:  # without Skrull, all ranks share each sample
            placement = np.full(len(steps.order), SHARDED, np.int64)
        owners = _assign_media(work[selected], micro_batch_of, placement[positions], shape)
        return cls(media, selected, micro_batch_of, owners, shape)

    def max_per_rank(self, values: Costs) -> Costs:
        """Find the largest sum of ``values`` (n,) of the media of a rank, in each micro-batch; (C,)."""
        num_micro_batches, size = self.shape
        keys = self.micro_batch_of * size + self.owners
        sums = np.bincount(keys, values[self.selected], num_micro_batches * size)
        return np.asarray(sums.reshape(self.shape).max(axis=1, initial=0.0))
