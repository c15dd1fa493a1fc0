"""Work of the towers: assignment of images, videos and sounds to the ranks that share a sequence.

Media of a sample that is local to a rank are computed there. Those of sharded samples are assigned most work first,
each to the rank with the least tower work so far, local media included (LPT: Graham 1969, "Bounds on multiprocessing
timing anomalies"), as in ``batch.collate_shard``. Ranks wait for each other after their towers, where features are
exchanged, so tower work is balanced by itself.

An image is computed by one rank, so ranks have unequal shares of a pack. The index of a cache has the number of images
of a sample, their total tokens, and the squares of their patches, but not the size of each; of sounds it has the
number, except for tracks of videos, and their total tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtool.planning.pack_plan import Costs, Int64Array, IntArray, PackPlan
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


def assign_heaviest_first(
    weights: Sequence[float] | Costs, loads: Sequence[float] | Costs, groups: Int64Array | None = None
) -> Int64Array:
    """Assign items to ranks, (n,): the heaviest first, each to the rank with the least so far.

    Ties go to the earlier item and the lower rank. ``loads``, (N,), are those of each rank before. Given the group of
    each item, ``groups`` (n,), many groups of ranks are assigned at once, with ``loads`` (G, N). Cost: O(n N), in as
    many rounds as the largest group has items.
    """
    weights, rank_loads = np.asarray(weights, np.float64), np.array(loads, np.float64, ndmin=2)
    groups, owners = np.zeros(len(weights), np.int64) if groups is None else groups, np.zeros(len(weights), np.int64)
    by_group = np.lexsort((-weights, groups))
    sizes = np.bincount(groups, minlength=len(rank_loads))
    round_of = np.arange(len(by_group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    by_round = by_group[np.argsort(round_of, kind="stable")]
    for items in np.split(by_round, np.cumsum(np.bincount(round_of))[:-1]):
        item_groups = groups[items]
        owners[items] = rank_loads[item_groups].argmin(axis=1)
        rank_loads[item_groups, owners[items]] += weights[items]
    return owners


def _assign_media(weights: Costs, cells: Int64Array, placement: Int64Array, shape: tuple[int, int]) -> Int64Array:
    """Assign media to ranks, (n,): to that of a local sample, else to the rank with the least work so far.

    ``shape`` is the number of micro-batches, ``cells``, and of the ranks that share one, ``placement``; (n,) each.
    """
    owners, is_sharded, loads = placement.copy(), placement == SHARDED, np.zeros(shape)
    np.add.at(loads, (cells[~is_sharded], placement[~is_sharded]), weights[~is_sharded])
    owners[is_sharded] = assign_heaviest_first(weights[is_sharded], loads, cells[is_sharded])
    return owners


def shared_tower_costs(steps: StepPlan, placement: Int64Array, work: TowerWork, sequence_parallel_size: int) -> Costs:
    """Sum the FLOPs of the images of sharded samples on each device in each step, (S W, N).

    The images of a sample are assumed to be equal, as their sizes are unknown here. Steps and placement, (K,), are of
    single samples, and ``work`` is by their numbers in ``steps.order``; N ranks share a micro-batch.
    """
    flops, counts = work.flops[steps.order], np.maximum(work.num_media[steps.order], 1)
    num_cells = len(steps.micro_batch_offsets) - 1
    counts[(placement != SHARDED) | (flops == 0)] = 1
    media_flops, media_placement = np.repeat(flops / counts, counts), np.repeat(placement, counts)
    media_cells = np.repeat(np.repeat(np.arange(num_cells), steps.micro_batch_sizes()), counts)
    shape = num_cells, sequence_parallel_size
    owners = _assign_media(media_flops, media_cells, media_placement, shape)
    media_flops[media_placement != SHARDED] = 0
    sums = np.bincount(media_cells * sequence_parallel_size + owners, media_flops, num_cells * sequence_parallel_size)
    # The cells of a step are ordered by rank.
    first, per_step = steps.step_offsets[:-1], np.diff(steps.step_offsets)
    step = np.repeat(np.arange(steps.num_steps), per_step)
    groups = step * steps.world_size + (np.arange(num_cells) - first[step]) * steps.world_size // per_step[step]
    costs = np.zeros((steps.num_steps * steps.world_size, sequence_parallel_size))
    np.add.at(costs, groups, sums.reshape(shape))
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

        (Samuelson 1968, "How deviant can you be?"), and exactly that if the others are equal, as assumed here. Among
        videos, whose squares are of frames, the largest has all but a token of each other.

        All arrays, (N,), are of the samples of a cache; ``squares`` are of their patches, frame by frame.
        """
        counts = (num_images + num_videos).astype(np.int64)
        samples = np.flatnonzero(counts > 0)
        counts, squares = counts[samples], squares[samples]
        n, sums = counts.astype(np.float64), tokens[samples].astype(np.float64)
        mean, spread = sums / n, np.maximum(squares / patches_per_token**2 - sums**2 / n, 0)
        largest = np.where(num_videos[samples] > 0, sums - (n - 1), mean + np.sqrt((n - 1) / n * spread))
        largest = np.minimum(largest, np.maximum(sums - (n - 1), mean))
        other = (sums - largest) / np.maximum(n - 1, 1)
        other_squares = (other * patches_per_token) ** 2
        media_tokens, media_squares = np.repeat(other, counts), np.repeat(other_squares, counts)
        first = np.cumsum(counts) - counts
        media_tokens[first] = largest
        media_squares[first] = np.maximum(squares - (n - 1) * other_squares, 0)
        return cls(np.repeat(samples, counts), media_tokens, media_squares, np.zeros(len(media_tokens)))

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
        return Media(
            np.concatenate([self.samples, np.repeat(samples, counts)]),
            np.concatenate([self.tokens, zeros]),
            np.concatenate([self.squares, zeros]),
            np.concatenate([self.sounds, sounds]),
        )


@dataclass(frozen=True, eq=False)
class MediaShares:
    """Assignment of media to ranks in each of the C micro-batches of the data-parallel ranks.

    Args:
        selected: int64 (m,), indices of the ``media`` that the epoch trains.
        cells, owners: int64 (m,), the micro-batch of each, and the rank that computes it.
        shape: C, and the ranks that share a micro-batch.
    """

    media: Media
    selected: Int64Array
    cells: Int64Array
    owners: Int64Array
    shape: tuple[int, int]

    @classmethod
    def of_plan(
        cls, media: Media, work: Costs, packs: PackPlan, steps: StepPlan, size: int, placement: Int64Array | None
    ) -> MediaShares:
        """Assign media by their work (n,), as ``collate_shard`` does: most work first, to the rank with the least.

        ``packs``, ``steps`` and ``placement`` are of an ``EpochPlan``; ``size`` ranks share a micro-batch.
        """
        num_cells = len(steps.micro_batch_offsets) - 1
        cell_of_pack = np.empty(packs.num_packs, np.int64)
        cell_of_pack[steps.order] = np.repeat(np.arange(num_cells), steps.micro_batch_sizes())
        placement_of_pack = np.full(packs.num_packs, SHARDED, np.int64)
        if placement is not None:
            placement_of_pack[steps.order] = placement
        num_samples = int(max(packs.samples.max(initial=-1), media.samples.max(initial=-1))) + 1
        pack_of = np.full(num_samples, -1, np.int64)
        pack_of[packs.samples] = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
        selected = np.flatnonzero(pack_of[media.samples] >= 0)
        media_packs = pack_of[media.samples[selected]]
        cells, shape = cell_of_pack[media_packs], (num_cells, size)
        return cls(
            media, selected, cells, _assign_media(work[selected], cells, placement_of_pack[media_packs], shape), shape
        )

    def max_per_rank(self, values: Costs) -> Costs:
        """Find the largest sum of ``values`` (n,) of the media of a rank, in each micro-batch; (C,)."""
        num_cells, size = self.shape
        sums = np.bincount(self.cells * size + self.owners, values[self.selected], num_cells * size)
        return np.asarray(sums.reshape(self.shape).max(axis=1, initial=0.0))
