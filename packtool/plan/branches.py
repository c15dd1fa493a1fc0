"""The trees of a pack taken apart: what is there once, for whom, and what goes on from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.prefix_trees import NOTHING


@dataclass(frozen=True)
class Branch:
    """Tokens that are there once in a pack: a prefix of several samples, or what one of them has of its own.

    Args:
        first, last: the samples that have them, in pack order, from the first to behind the last.
        start, stop: their positions, the same in each of these samples.
        parent: place of the branch that they go on from, before it in the list; or ``NOTHING``.
    """

    first: int
    last: int
    start: int
    stop: int
    parent: int

    @property
    def num_samples(self) -> int:
        """Samples that have the tokens."""
        return self.last - self.first

    @property
    def num_tokens(self) -> int:
        """Tokens that are there once."""
        return self.stop - self.start


def branches_of(new: npt.NDArray[np.integer[Any]], shared: npt.NDArray[np.integer[Any]] | None = None) -> list[Branch]:
    """The trees of one pack, each branch behind the one that it goes on from: the order in which they are laid out.

    Price: each sample is looked at once for each prefix that it shares.

    Args:
        new: (S,), tokens that each sample adds to the pack, 1 or more.
        shared: (S,), tokens that each has in common with the one before it, fewer than either has; None for none.
    """
    common = [0] * (len(new) + 1) if shared is None else [*shared.tolist(), 0]
    lengths = [tokens + known for tokens, known in zip(new.tolist(), common, strict=False)]
    found: list[Branch] = []
    path: list[int] = []  # the branches that the sample of the moment is in
    for sample, length in enumerate(lengths):
        while path and found[path[-1]].stop > common[sample]:
            path.pop()
        # How much of it each following sample has: prefixes that begin with it end there.
        least, lasts = length, dict[int, int]()
        for other in range(sample + 1, len(common)):
            if least > common[other]:
                lasts[least] = other
                least = common[other]
            if least <= common[sample]:
                break
        for stop in sorted(lasts):
            start, parent = (found[path[-1]].stop, path[-1]) if path else (0, NOTHING)
            path.append(len(found))
            found.append(Branch(sample, lasts[stop], start, stop, parent))
    return found
