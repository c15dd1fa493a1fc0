"""Trees of many branches, such as all rows of a set that begin with one system prompt, cut where they fit best.

A tree that is cut along its walk wastes half a branch a pack, which is nothing where trees are of a few samples, for
these fill the packs with others. A wide tree has nobody to fill its packs but its own branches::

    branches      5 4 2 3 1 3 beside a trunk of 2, packs of 8 tokens
    by the walk   2 5 | 2 4 2 | 2 3 1 | 2 3       four packs
    best fit      2 5 1 | 2 4 2 | 2 3 3           three
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.histogram import pack_histogram
from packtool.plan.pack_plan import Int32Array, Int64Array, offsets_of

WIDE = 64
"""Branches of a tree from which it is packed by itself."""


def best_fitted(
    lengths: npt.NDArray[np.integer[Any]], shared: Int32Array, found: Int64Array, capacity: int, nothing: int
) -> tuple[Int64Array, Int32Array, Int64Array]:
    """Branches of wide trees in packs of their own, each with the trunk, by best fit decreasing.

    A branch that is longer than a pack stays whole, as a tree of its own. Price: sorts the branches, and a number of
    steps that depends on their distinct lengths, see ``packing.pack_best_fit``.

    Args:
        lengths: (N,), tokens of samples in the order of a walk.
        shared: (N,), tokens that each shares with the one before it; 0 where a tree begins.
        found: (N,), which prefix that is.
        capacity: tokens of a pack.
        nothing: stands in ``found`` for no prefix.

    Returns:
        places of the samples in another order (N,), and ``shared`` and ``found`` in that: each pack is a tree.
    """
    places, shared, found = np.arange(len(shared)), shared.copy(), found.copy()
    trees = np.flatnonzero(shared == 0)
    sizes = np.diff(np.append(trees, len(shared)))
    for start, size in zip(trees[sizes >= WIDE].tolist(), sizes[sizes >= WIDE].tolist(), strict=True):
        here = slice(start, start + size)
        at = 1 + int(shared[here][1:].argmin())
        trunk, trunk_found = int(shared[here][at]), found[here][at]
        branches = np.flatnonzero(shared[here] <= trunk)
        tokens = np.add.reduceat(lengths[here] - np.maximum(shared[here], trunk), branches)
        fits = np.flatnonzero(tokens <= capacity - trunk)
        if len(fits) < WIDE or tokens.sum() <= capacity - trunk:
            continue
        packs = pack_histogram(tokens[fits].astype(np.int32), capacity - trunk, shuffle=False, seed=0, epoch=0)
        long = np.setdiff1d(np.arange(len(branches)), fits)
        order = np.concatenate([fits[packs.samples], long])
        counts = np.diff(np.append(branches, size))[order]
        heads = offsets_of(counts)[:-1]
        taken = start + np.arange(size) - np.repeat(heads - branches[order], counts)
        places[here], shared[here], found[here] = taken, shared[taken], found[taken]
        heads += start
        shared[heads], found[heads] = trunk, trunk_found
        first = heads[np.append(packs.offsets[:-1], np.arange(len(fits), len(order)))]
        shared[first], found[first] = 0, nothing
    return places, shared, found
