"""Packs in an order that has every source of a mixture evenly, from the first step to the last.

    by chance    a a b a a a c b a a a b c a a a a a b a     a window of 5 has 0 to 2 b
    evenly       a b a a c a a b a a a b a a c a a b a a     each has 1 or 2

Packs mix sources, so an order is sought in which sums of vectors grow evenly: what each pack has of each source. The
epoch is halved, and halved again, each time so that both halves have as much of every source as they can: packs that
are alike come in pairs, one for each half, and which goes where is decided by what the halves have had so far (vector
balancing; Spencer 1977, "Balancing games", calls it the pusher and the chooser). What a half has too much is then about
what a few packs hold, however long it is; by chance it would grow with the root of its length. In the smallest parts
packs are taken one after the other, each time the one that leaves least of what sources are ahead or behind by.

That a source is in many packs, so that an order can have it evenly, is for packing to see to: ``even_packs``.
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
_PART_PACKS = 16
"""Packs of the parts that are halved no more."""
_STEPS_OF_ONE, _MOST = 256, 4096
"""Vectors are in whole steps, and no pack counts as having more than the most times the mean of a source: sums and
products are then exact, and the order is the same on every machine."""
_SLICE = 1 << 18
_AMOUNTS = 1 << 16


def even_order(
    packs: PackPlan,
    source_of: npt.NDArray[np.integer[Any]],
    amounts: npt.NDArray[np.integer[Any]],
    *,
    seed: int,
    epoch: int,
) -> Int64Array:
    """An order of K packs in which every source comes evenly, and all else is drawn from seed and epoch.

    It is the same for any number of packs a step, so that other numbers of ranks go on with the same epoch.

    Price: O(K S log K) for S sources, and 4 bytes for each of K S numbers.

    Args:
        packs: in any order.
        source_of: (N,), in pack order: which source each sample is of, 0 to S - 1.
        amounts: (N,), in pack order: what each sample adds to its source: 1, its tokens, or its target tokens.
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
    vectors *= _STEPS_OF_ONE * np.minimum(1, _MOST / np.maximum(vectors.max(axis=0), 1))
    np.rint(vectors, out=vectors)
    num_windows = -(-num // _WINDOW_PACKS)
    num_halvings = max(0, int(np.log2(num / num_windows / _PART_PACKS)))
    num_parts = num_windows << num_halvings
    num_places = num_parts * -(-num // num_parts)
    # Places that stay empty are packs of nothing, the last ones; they are spread as evenly as others.
    places = np.append(order, np.full(num_places - num, num))
    vectors = np.append(vectors, np.zeros((1, vectors.shape[1]), np.float32), axis=0)
    parts = _windows(places, num_windows, vectors, seed, epoch)
    for level in range(num_halvings):
        parts = _halved(parts, vectors, num_windows, RandomStream.MIX_COINS + 1 + level, seed, epoch)
    found = _one_by_one(parts.reshape(num_windows, -1, parts.shape[1]), vectors)
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


def _halved(parts: Int64Array, vectors: Vectors, num_windows: int, stream: int, seed: int, epoch: int) -> Int64Array:
    """Each part's packs (parts, n), of which neighbours are alike, halved: (2 parts, n / 2), in the same order.

    Of each pair of neighbours one goes to the first half and one to the second, so that all of a window that comes
    before the middle of a part becomes even: not each part for itself.

    Args:
        num_windows: the parts are of so many windows, each of as many.
    """
    num_parts, num_packs = parts.shape
    sums = vectors[parts].sum(axis=1, dtype=np.float64).reshape(num_windows, -1, vectors.shape[1])
    lead = (sums - np.rint(sums.mean(axis=1, keepdims=True))).cumsum(axis=1)
    lead[:, 1:] += lead[:, :-1].copy()
    lead = lead.reshape(num_parts, -1)
    coins = seeded_uniform(num_packs // 2 * num_parts, seed=seed, epoch=epoch, stream=stream) < 0.5
    halves = np.empty((num_parts, 2, num_packs // 2), np.int64)
    for pair, coin in enumerate(coins.reshape(-1, num_parts)):
        first, second = parts[:, 2 * pair], parts[:, 2 * pair + 1]
        between = vectors[first] - vectors[second]
        gain = np.einsum("ps,ps->p", lead, between)
        turned = (gain > 0) | ((gain == 0) & coin)
        halves[:, 0, pair], halves[:, 1, pair] = np.where(turned, second, first), np.where(turned, first, second)
        between[turned] *= -1
        lead += between
    return halves.reshape(2 * num_parts, -1)


def _one_by_one(parts: Int64Array, vectors: Vectors) -> Int64Array:
    """An order of packs (n,) from parts (windows, parts, packs), that come one after the other: all windows at once.

    The next pack of a part is the one of those left with which all sources together are nearest to even.
    """
    num_windows, num_parts, num_packs = parts.shape
    windows = np.arange(num_windows)
    found = np.empty((num_windows, num_parts * num_packs), np.int64)
    lead = np.zeros((num_windows, vectors.shape[1]))
    mean = np.rint(vectors[parts].sum(axis=(1, 2), dtype=np.float64) / (num_parts * num_packs))
    for part in range(num_parts):
        own = vectors[parts[:, part]] - mean[:, None]
        squares = np.einsum("wps,wps->wp", own, own)
        for place in range(part * num_packs, (part + 1) * num_packs):
            best = (squares + 2 * np.einsum("wps,ws->wp", own, lead)).argmin(axis=1)
            found[:, place] = parts[windows, part, best]
            lead += own[windows, best]
            squares[windows, best] = np.inf
    return found.reshape(-1)


def _windows(order: Int64Array, num_windows: int, vectors: Vectors, seed: int, epoch: int) -> Int64Array:
    """Packs (n,), of which neighbours are alike, divided into windows (windows, n / windows), in the same order.

    In each round every window gets one pack. Windows come in pairs, at random, and so do packs, by their order; a pair
    of windows gets a pair of packs so that they become more even.
    """
    rounds = order.reshape(-1, num_windows)
    if num_windows == 1:
        return rounds.T.copy()
    num_pairs, numbers = num_windows // 2, np.repeat(np.arange(len(rounds))[::-1], num_windows)
    stream = RandomStream.MIX_TURNS
    turns = seeded_order(rounds.size, seed=seed, epoch=epoch, stream=stream, falling=numbers).reshape(rounds.shape)
    coins = seeded_uniform(len(rounds), seed=seed, epoch=epoch, stream=RandomStream.MIX_COINS) < 0.5
    held = np.zeros((num_windows, vectors.shape[1]))
    found = np.empty((num_windows, len(rounds)), np.int64)
    for number, (packs, turn, coin) in enumerate(zip(rounds, turns % num_windows, coins.tolist(), strict=True)):
        one, other = turn[:num_pairs], turn[num_pairs : 2 * num_pairs]
        first, second = packs[: 2 * num_pairs : 2], packs[1 : 2 * num_pairs : 2]
        gain = np.einsum("ws,ws->w", held[one] - held[other], vectors[first] - vectors[second])
        turned = (gain > 0) | ((gain == 0) & coin)
        found[one, number], found[other, number] = np.where(turned, second, first), np.where(turned, first, second)
        found[turn[2 * num_pairs :], number] = packs[2 * num_pairs :]
        held += vectors[found[:, number]]
    return found
