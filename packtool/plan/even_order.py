"""Packs in an order that has every source of a mixture evenly, from the first step to the last.

    by chance    a a b a a a c b a a a b c a a a a a b a     a window of 5 has 0 to 2 b
    evenly       a b a a c a a b a a a b a a c a a b a a     each has 1 or 2

Packs mix sources, so an order is sought in which sums of vectors grow evenly: what each pack has of each source. The
epoch is halved, and halved again, each time so that both halves have as much of every source as they can: packs that
are alike come in pairs, one for each half, and which goes where is decided by what the halves have had so far (vector
balancing; Spencer 1977, "Balancing games", calls it the pusher and the chooser). What a half has too much is then about
what a few packs hold, however long it is; by chance it would grow with the root of its length.

Nothing of how samples are packed is touched, so even order costs no fill.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.pack_plan import Int64Array, PackPlan
from packtool.plan.shuffle import RandomStream, seeded_order, seeded_uniform

Vectors = npt.NDArray[np.float32]

_WINDOW_PACKS = 4096
"""Packs of the parts that an epoch is cut into at once; each of them is then halved."""
_SLICE = 1 << 18
_AMOUNTS = 1 << 16


def even_order(
    packs: PackPlan,
    source_of: npt.NDArray[np.integer[Any]],
    amounts: npt.NDArray[np.integer[Any]],
    *,
    packs_per_step: int,
    seed: int,
    epoch: int,
) -> Int64Array:
    """An order of K packs in which every source comes evenly, and all else is drawn from seed and epoch.

    Price: O(K S log K) for S sources, and 4 bytes for each of K S numbers.

    Args:
        packs: in any order.
        source_of: (N,), in pack order: which source each sample is of, 0 to S - 1.
        amounts: (N,), in pack order: what each sample adds to its source: 1, its tokens, or its target tokens.
        packs_per_step: shorter stretches are not looked at.
        seed: of the run.
        epoch: 0-based.

    Returns:
        int64 (K,).
    """
    num = packs.num_packs
    vectors = _vectors(packs, source_of, amounts)
    if num < 3 or vectors.shape[1] < 2:
        return seeded_order(num, seed=seed, epoch=epoch, stream=RandomStream.MIX_STEPS)
    order = seeded_order(num, seed=seed, epoch=epoch, stream=RandomStream.MIX_KINDS, falling=_kinds(vectors))
    num_windows = -(-num // _WINDOW_PACKS)
    num_halvings = max(0, int(np.log2(max(num / num_windows / max(packs_per_step, 2), 1))))
    num_leaves = num_windows << num_halvings
    num_places = num_leaves * -(-num // num_leaves)
    # Places that stay empty are packs of nothing, the last ones; they are spread as evenly as others.
    places = np.append(order, np.full(num_places - num, num))
    vectors = np.append(vectors, np.zeros((1, vectors.shape[1]), np.float32), axis=0)
    parts = _divided(places[None], num_windows, vectors, None, seed, epoch, 0)
    for level in range(num_halvings):
        # Not each part for itself: where its first half ends, all of the window before that shall be even.
        sums = vectors[parts].sum(axis=1).reshape(num_windows, 1 << level, -1)
        until = (sums - sums.mean(axis=1, keepdims=True)).cumsum(axis=1)
        until[:, 1:] += until[:, :-1].copy()
        parts = _divided(parts, 2, vectors, until.reshape(len(parts), -1), seed, epoch, 1 + level)
    leaves = np.repeat(np.arange(len(parts))[::-1], parts.shape[1])
    shuffled = seeded_order(num_places, seed=seed, epoch=epoch, stream=RandomStream.MIX_STEPS, falling=leaves)
    found = parts.reshape(-1)[shuffled]
    return found[found < num]


def _vectors(
    packs: PackPlan, source_of: npt.NDArray[np.integer[Any]], amounts: npt.NDArray[np.integer[Any]]
) -> Vectors:
    """What each pack has of each source, (K, S), less what a pack has in the mean, over that: 0 is even."""
    num_sources = int(source_of.max(initial=0)) + 1
    found = np.empty((packs.num_packs, num_sources), np.float32)
    for start in range(0, packs.num_packs, _SLICE):
        offsets = packs.offsets[start : start + _SLICE + 1]
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        inside = slice(int(offsets[0]), int(offsets[-1]))
        cells = rows * num_sources + source_of[inside]
        sums = np.bincount(cells, weights=amounts[inside], minlength=(len(offsets) - 1) * num_sources)
        found[start : start + _SLICE] = sums.reshape(-1, num_sources)
    mean = found.mean(axis=0, dtype=np.float64)
    found /= np.maximum(mean, 1e-9).astype(np.float32)
    found -= 1
    return found


def _kinds(vectors: Vectors) -> npt.NDArray[np.int64]:
    """Numbers by which packs that are alike come together, (K,): their main source, and how much they have of it."""
    main = vectors.argmax(axis=1)
    most = vectors[np.arange(len(vectors)), main]
    share = most / np.maximum(vectors.max(axis=0), 1e-9)[main]
    return main * _AMOUNTS + np.clip(share * (_AMOUNTS - 1), 0, _AMOUNTS - 1).astype(np.int64)


def _divided(
    parts: Int64Array, num_children: int, vectors: Vectors, before: Vectors | None, seed: int, epoch: int, level: int
) -> Int64Array:
    """Each part's packs (parts, n), of which neighbours are alike, given to so many parts each, in the same order.

    In each round every child gets one pack. Children come in pairs, at random, and so do packs, by their order; a pair
    of children gets a pair of packs so that they become more even.

    Args:
        before: (parts, S), what the first child is to make up for.

    Returns:
        (parts * num_children, n / num_children).
    """
    num_parts, num_rounds = len(parts), parts.shape[1] // num_children
    if num_children == 1:
        return parts
    rounds = parts.reshape(num_parts, num_rounds, num_children)
    found = np.empty((num_parts, num_children, num_rounds), np.int64)
    ahead = np.zeros((num_parts, num_children, vectors.shape[1]), np.float32)
    if before is not None:
        ahead[:, 0] = before
    num_pairs = num_children // 2
    numbers = np.repeat(np.arange(num_rounds)[::-1], num_children)
    stream = RandomStream.MIX_TURNS + level
    turns = seeded_order(num_rounds * num_children, seed=seed, epoch=epoch, stream=stream, falling=numbers)
    turns = turns.reshape(num_rounds, num_children) % num_children
    coins = seeded_uniform(num_rounds * num_parts, seed=seed, epoch=epoch, stream=RandomStream.MIX_COINS + level) < 0.5
    for number, (turn, coin) in enumerate(zip(turns, coins.reshape(num_rounds, num_parts), strict=True)):
        one, other = turn[:num_pairs], turn[num_pairs : 2 * num_pairs]
        packs = rounds[:, number, :]
        first, second = packs[:, : 2 * num_pairs : 2], packs[:, 1 : 2 * num_pairs : 2]
        between = vectors[first] - vectors[second]
        lead = np.einsum("pcs,pcs->pc", ahead[:, one] - ahead[:, other], between)
        turned = (lead > 0) | ((lead == 0) & coin[:, None])
        mine, others = np.where(turned, second, first), np.where(turned, first, second)
        found[:, one, number], found[:, other, number] = mine, others
        if num_children % 2:
            found[:, turn[-1], number] = packs[:, -1]
            ahead[:, turn[-1]] += vectors[packs[:, -1]]
        ahead[:, one] += vectors[mine]
        ahead[:, other] += vectors[others]
    return found.reshape(num_parts * num_children, num_rounds)
