"""Work of the towers: which of the ranks that share a sequence computes which picture, video or sound.

A sample that is local to a rank has its media computed there. Those of sharded samples are shared out: the most work
first, each to the rank whose towers have the least so far, local media counted (LPT: Graham 1969, "Bounds on
multiprocessing timing anomalies"), as ``batch.collate_shard`` does it. Ranks wait for each other behind their towers,
where features are exchanged, so it is tower work alone that is evened out.

A picture is computed by one rank, so a rank's share is no even part of the pack's: of pictures of 5,000, 250 and 250
tokens four ranks get 5,000, 250, 250 and none. The index does not hold the size of each picture of a sample, but their
number, their tokens together, and the squares of their patches. Of sounds it has the number, but for the tracks of
videos, and their tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.planning.pack_plan import Costs, Int64Array, PackPlan
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import StepPlan


@dataclass(frozen=True, eq=False)
class TowerWork:
    """Work of the towers for each of N samples.

    Args:
        flops: int64 (N,), of all its media: whole numbers add up alike in any order.
        num_seen: (N,), its pictures, videos and sounds.
        logits: int64 (N,), tokens of which logits are made, where prefixes are shared; None is all targets.
    """

    flops: Int64Array
    num_seen: npt.NDArray[np.integer[Any]]
    logits: Int64Array | None = None

    def of(self, samples: Int64Array) -> TowerWork:
        """The work of some samples, in their order."""
        logits = None if self.logits is None else self.logits[samples]
        return TowerWork(self.flops[samples], self.num_seen[samples], logits)


def assign_heaviest_first(weights: Sequence[float], loads: Sequence[float]) -> Int64Array:
    """A rank for each of some things: the heaviest first, each to the rank with the least so far.

    Ties go to the earlier thing and the lower rank.

    Args:
        weights: (n,), of the things.
        loads: (N,), what each rank has already.
    """
    weighed = np.asarray(weights, np.float64)
    return assign_in_groups(weighed, np.zeros(len(weighed), np.int64), np.array([loads], np.float64))


def assign_in_groups(
    weights: npt.NDArray[np.float64], groups: Int64Array, loads: npt.NDArray[np.float64]
) -> Int64Array:
    """``assign_heaviest_first`` for many groups of things and ranks at once, (n,).

    Price: O(n N), in as many rounds as the largest group has things.

    Args:
        weights: (n,), of the things.
        groups: (n,), of each, 0 to G - 1.
        loads: (G, N), what each rank of a group has already.
    """
    sums, owners = loads.copy(), np.zeros(len(weights), np.int64)
    order = np.lexsort((-weights, groups))
    sizes = np.bincount(groups, minlength=len(loads))
    round_of = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    by_round = order[np.argsort(round_of, kind="stable")]
    for things in np.split(by_round, np.cumsum(np.bincount(round_of))[:-1]):
        here = groups[things]
        owners[things] = sums[here].argmin(axis=1)
        sums[here, owners[things]] += weights[things]
    return owners


def _owners(
    weights: npt.NDArray[np.float64], cells: Int64Array, places: Int64Array, shape: tuple[int, int]
) -> Int64Array:
    """The rank of each medium, (n,): that of a local sample, or for sharded ones the rank with the least work so far.

    Args:
        weights: (n,), work of the media.
        cells: (n,), the micro-batch of each.
        places: (n,), ``SHARDED``, or the rank that its sample is local to.
        shape: micro-batches, and the ranks that share one.
    """
    owners, shared, loads = places.copy(), places == SHARDED, np.zeros(shape)
    np.add.at(loads, (cells[~shared], places[~shared]), weights[~shared])
    owners[shared] = assign_in_groups(weights[shared], cells[shared], loads)
    return owners


def shared_tower_costs(steps: StepPlan, places: Int64Array, work: TowerWork, sequence_parallel_size: int) -> Costs:
    """FLOPs of the pictures of sharded samples on each device in each step, (S W, N).

    How large the pictures of one sample are is not known here: they are taken for equal.

    Args:
        steps: of single samples.
        places: (K,), by position in ``steps.order``: ``SHARDED``, or the rank of N that the sample is local to.
        work: of the samples, by their numbers in ``steps.order``.
        sequence_parallel_size: N.
    """
    flops, counts = work.flops[steps.order], np.maximum(work.num_seen[steps.order], 1)
    num_cells = len(steps.cell_offsets) - 1
    counts[(places != SHARDED) | (flops == 0)] = 1
    pieces, its_places = np.repeat(flops / counts, counts), np.repeat(places, counts)
    its_cells = np.repeat(np.repeat(np.arange(num_cells), steps.cell_sizes()), counts)
    shape = num_cells, sequence_parallel_size
    owners = _owners(pieces, its_cells, its_places, shape)
    pieces[its_places != SHARDED] = 0
    sums = np.bincount(its_cells * sequence_parallel_size + owners, pieces, num_cells * sequence_parallel_size)
    # The cells of a step are rank by rank, of each rank in order.
    first, per_step = steps.step_offsets[:-1], np.diff(steps.step_offsets)
    step = np.repeat(np.arange(steps.num_steps), per_step)
    groups = step * steps.world_size + (np.arange(num_cells) - first[step]) * steps.world_size // per_step[step]
    found = np.zeros((steps.num_steps * steps.world_size, sequence_parallel_size))
    np.add.at(found, groups, sums.reshape(shape))
    return found


Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Media:
    """The n pictures, videos and sounds of samples, each by itself.

    Args:
        samples: int64 (n,), position of the sample in the cache.
        tokens: float64 (n,), of a picture or video; 0 of a sound.
        squares: float64 (n,), sum over its frames of (patches of the frame)^2.
        sounds: float64 (n,), tokens of a sound; 0 of what has patches.
    """

    samples: Int64Array
    tokens: Float64Array
    squares: Float64Array
    sounds: Float64Array

    @classmethod
    def of_samples(
        cls,
        tokens: npt.NDArray[np.integer[Any]],
        squares: npt.NDArray[np.integer[Any]],
        num_images: npt.NDArray[np.integer[Any]],
        num_videos: npt.NDArray[np.integer[Any]],
        *,
        patches_per_token: int,
    ) -> Media:
        """What is known of them: of n pictures with M tokens and the squares of T tokens, the largest has at most

            M / n + sqrt((n - 1) / n * (T - M^2 / n))

        (Samuelson 1968, "How deviant can you be?"), and has that many if the others are equal, which they are taken
        for. Where some are videos, whose frames the squares are of, the largest is all but a token of each other.

        Args:
            tokens: (N,), of pictures and videos of each sample of a cache.
            squares: (N,), of their patches, frame by frame.
            num_images, num_videos: (N,).
            patches_per_token: of which one token is made.
        """
        counts = (num_images + num_videos).astype(np.int64)
        has = np.flatnonzero(counts > 0)
        n, sums = counts[has].astype(np.float64), tokens[has].astype(np.float64)
        mean, spread = sums / n, np.maximum(squares[has] / patches_per_token**2 - sums**2 / n, 0)
        largest = np.where(num_videos[has] > 0, sums - (n - 1), mean + np.sqrt((n - 1) / n * spread))
        largest = np.minimum(largest, np.maximum(sums - (n - 1), mean))
        other = (sums - largest) / np.maximum(n - 1, 1)
        other_squares = (other * patches_per_token) ** 2
        first = np.cumsum(counts[has]) - counts[has]
        others, their_squares = (np.repeat(each, counts[has]) for each in (other, other_squares))
        found = cls(np.repeat(has, counts[has]), others, their_squares, np.zeros(len(others)))
        found.tokens[first] = largest
        found.squares[first] = np.maximum(squares[has] - (n - 1) * other_squares, 0)
        return found

    def with_sounds(
        self,
        tokens: npt.NDArray[np.integer[Any]],
        num_audios: npt.NDArray[np.integer[Any]],
        num_videos: npt.NDArray[np.integer[Any]],
    ) -> Media:
        """These and the sounds of the same samples: of several the first is all but a token of each other.

        Args:
            tokens: (N,), of sounds, those of videos among them.
            num_audios: (N,), sounds by themselves; of a sample that has tokens and none of these, videos sound.
            num_videos: (N,).
        """
        has = np.flatnonzero(tokens > 0)
        counts = np.where(num_audios[has] > 0, num_audios[has], np.maximum(num_videos[has], 1)).astype(np.int64)
        counts = np.minimum(counts, tokens[has])
        sounds = np.ones(counts.sum())
        sounds[np.cumsum(counts) - counts] = tokens[has] - (counts - 1)
        none = np.zeros(len(sounds))
        return Media(
            np.concatenate([self.samples, np.repeat(has, counts)]),
            np.concatenate([self.tokens, none]),
            np.concatenate([self.squares, none]),
            np.concatenate([self.sounds, sounds]),
        )


@dataclass(frozen=True, eq=False)
class MediaShares:
    """Who looks at what in each of the C micro-batches of the data-parallel ranks.

    Args:
        media: of the cache.
        chosen: int64 (m,), those of them that the epoch trains.
        cells: int64 (m,), the micro-batch of each.
        owners: int64 (m,), the rank that looks at it.
        shape: C, and the ranks that share a micro-batch.
    """

    media: Media
    chosen: Int64Array
    cells: Int64Array
    owners: Int64Array
    shape: tuple[int, int]

    @classmethod
    def of_plan(
        cls, media: Media, work: Float64Array, packs: PackPlan, steps: StepPlan, size: int, places: Int64Array | None
    ) -> MediaShares:
        """The way of ``collate_shard``: the most work first, each to the rank that has the least so far.

        Args:
            work: (n,), of each medium.
            packs, steps, places: of the epoch, see ``EpochPlan``.
            size: ranks that share a micro-batch.
        """
        num_cells = len(steps.cell_offsets) - 1
        cell_of_pack = np.empty(packs.num_packs, np.int64)
        cell_of_pack[steps.order] = np.repeat(np.arange(num_cells), steps.cell_sizes())
        place_of_pack = np.full(packs.num_packs, SHARDED, np.int64)
        if places is not None:
            place_of_pack[steps.order] = places
        most = int(max(packs.samples.max(initial=-1), media.samples.max(initial=-1))) + 1
        pack_of = np.full(most, -1, np.int64)
        pack_of[packs.samples] = np.repeat(np.arange(packs.num_packs), np.diff(packs.offsets))
        chosen = np.flatnonzero(pack_of[media.samples] >= 0)
        its_packs = pack_of[media.samples[chosen]]
        cells, shape = cell_of_pack[its_packs], (num_cells, size)
        return cls(media, chosen, cells, _owners(work[chosen], cells, place_of_pack[its_packs], shape), shape)

    def most(self, values: Float64Array) -> Float64Array:
        """The sum of ``values`` (n,) of the media of the rank that has most, in each micro-batch; (C,)."""
        num_cells, size = self.shape
        sums = np.bincount(self.cells * size + self.owners, values[self.chosen], num_cells * size)
        return np.asarray(sums.reshape(self.shape).max(axis=1, initial=0.0))
