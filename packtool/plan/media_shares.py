"""Which of the ranks that share a sequence gets which picture or sound, for all micro-batches of an epoch at once.

A picture is looked at whole, by one rank (``batch.collate_shard``), so what a rank's tower takes is no even part of the
pack's: of pictures of 5,000, 250 and 250 tokens four ranks get 5,000, 250, 250 and none. How large the pictures of a
sample are the index does not tell, but how many there are, their tokens together, and the squares of their patches. Of
sounds it tells how many there are, but for the tracks of videos, and their tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.pack_plan import Int64Array, PackPlan
from packtool.plan.skrull import SHARDED
from packtool.plan.steps import StepPlan
from packtool.plan.towers import assign_in_groups

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
        cells, owners, weights = cell_of_pack[its_packs], place_of_pack[its_packs], work[chosen]
        shared = owners == SHARDED
        loads = np.zeros((num_cells, size))
        np.add.at(loads, (cells[~shared], owners[~shared]), weights[~shared])
        owners[shared] = assign_in_groups(weights[shared], cells[shared], loads)
        return cls(media, chosen, cells, owners, (num_cells, size))

    def most(self, values: Float64Array) -> Float64Array:
        """The sum of ``values`` (n,) of the media of the rank that has most, in each micro-batch; (C,)."""
        num_cells, size = self.shape
        sums = np.bincount(self.cells * size + self.owners, values[self.chosen], num_cells * size)
        return np.asarray(sums.reshape(self.shape).max(axis=1, initial=0.0))
