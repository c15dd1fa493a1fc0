"""What the samples of an interval begin with in common: found by hashes, as in a cache that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from packtool.cache.shard import num_targets
from packtool.constants import LEAST_SHARED
from packtool.encode.encoded import EncodedSample
from packtool.encode.placed_media import MediaTokens
from packtool.encode.prefix_hashes import PrefixHashes, prefix_hashes
from packtool.plan.pack_plan import Int64Array, offsets_of
from packtool.plan.prefix_trees import Budget, PartsIn, Prefixes, PrefixTrees, plan_trees


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
        counts, joined = prefix_hashes(samples, self.media, longer_than=LEAST_SHARED)
        offsets = offsets_of(counts)
        budget = None
        if self.max_media_tokens is not None:
            budget = Budget(Added.of(samples).media_tokens, joined.media_tokens, self.max_media_tokens)
        trees = plan_trees(
            lengths,
            Prefixes(offsets, joined.lengths, joined.hashes),
            capacity=capacity,
            least_shared=LEAST_SHARED,
            max_samples=self.max_rows,
            budget=budget,
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
