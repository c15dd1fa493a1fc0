"""What the samples of an interval begin with in common: found by hashes, as in a cache that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtool.constants import LEAST_SHARED
from packtool.encode.encoded import EncodedSample
from packtool.encode.placed_media import MediaTokens
from packtool.encode.prefix_hashes import PrefixHashes, prefix_hashes
from packtool.plan.pack_plan import Int64Array, offsets_of
from packtool.plan.prefix_trees import Budget, Prefixes, PrefixTrees, plan_trees


@dataclass(frozen=True)
class IntervalSharing:
    """How the samples of an interval share prefixes.

    Args:
        media: tokens by which media are found.
        worth: part of an interval's tokens above which they share, 0 to 1; each interval decides for itself.
        max_rows: most samples of a tree; None for as many as there are.
        max_media_tokens: most media tokens of a tree, or None.
    """

    media: MediaTokens
    worth: float
    max_rows: int | None = None
    max_media_tokens: int | None = None

    def found(self, samples: Sequence[EncodedSample], capacity: int) -> FoundTrees | None:
        """The trees of some samples; None if each is to be computed whole.

        Args:
            capacity: tokens of a pack; samples are no longer.
        """
        lengths = np.array([sample.length for sample in samples], np.int32)
        assert lengths.max(initial=0) <= capacity, "longer samples were dropped"
        hashes = [prefix_hashes(sample, self.media, longer_than=LEAST_SHARED) for sample in samples]
        joined = PrefixHashes(*(np.concatenate(column) for column in zip(*hashes, strict=True)))
        offsets = offsets_of(np.array([len(each.lengths) for each in hashes]))
        budget = None
        if self.max_media_tokens is not None:
            budget = Budget(MediaFigures.of(samples).tokens, joined.media_tokens, self.max_media_tokens)
        trees = plan_trees(
            lengths,
            Prefixes(offsets, joined.lengths, joined.hashes),
            capacity=capacity,
            least_shared=LEAST_SHARED,
            max_samples=self.max_rows,
            budget=budget,
        )
        return FoundTrees(trees, joined) if trees.saved(lengths) > self.worth else None


@dataclass(frozen=True, eq=False)
class FoundTrees:
    """Samples that share prefixes.

    Args:
        trees: which share which.
        prefixes: of all samples, end to end.
    """

    trees: PrefixTrees
    prefixes: PrefixHashes


@dataclass(frozen=True, eq=False)
class MediaFigures:
    """What the media of N samples are, or what each sample adds to the prefix that it shares; int64 (N,) each.

    Args:
        tokens: placeholder tokens of all media.
        audio_tokens: those of sounds among them.
        patch_squares: see ``PrefixHashes``.
    """

    tokens: Int64Array
    audio_tokens: Int64Array
    patch_squares: Int64Array

    @classmethod
    def of(cls, samples: Sequence[EncodedSample], found: FoundTrees | None = None) -> MediaFigures:
        """Those of some samples."""
        each = [(sample.num_media_tokens, sample.num_audio_tokens, sample.patch_squares) for sample in samples]
        tokens, audio_tokens, patch_squares = np.array(each, np.int64).reshape(-1, 3).T
        if found is None:
            return cls(tokens, audio_tokens, patch_squares)
        added, prefixes = found.trees.added, found.prefixes
        return cls(
            added(tokens, prefixes.media_tokens),
            added(audio_tokens, prefixes.audio_tokens),
            added(patch_squares, prefixes.patch_squares),
        )
