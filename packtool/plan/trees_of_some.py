"""Prefix trees of some of their samples: the others were trained already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.prefix_trees import NOTHING, PrefixTrees


def trees_of_some(trees: PrefixTrees, wanted: npt.NDArray[np.bool_]) -> PrefixTrees:
    """The trees without some samples: two that become neighbours share what all between them shared.

    Args:
        trees: of N samples.
        wanted: (N,) or longer, which samples stay, by number; at least one of them.
    """
    places: npt.NDArray[np.integer[Any]] = np.flatnonzero(wanted[trees.samples])
    # The least of what is shared since the neighbour before, and where that is: both in one number.
    keys = trees.shared.astype(np.int64) * len(wanted) + np.arange(len(trees.samples))
    least = np.minimum.reduceat(keys[: places[-1] + 1], np.append(0, places[:-1] + 1)) % len(wanted)
    offsets = np.unique(np.searchsorted(places, trees.offsets))
    shared, prefixes = trees.shared[least], trees.prefixes[least]
    shared[offsets[:-1]], prefixes[offsets[:-1]] = 0, NOTHING
    return replace(
        trees,
        samples=trees.samples[places],
        offsets=offsets,
        shared=shared,
        prefixes=prefixes,
        numbers=trees.numbers[places],
    )
