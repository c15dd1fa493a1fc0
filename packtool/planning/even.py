"""Packs of a mixture in which every source comes evenly: with whom samples share a pack, and the order of the packs.

*Packs.* Packers take the longest samples first, so that the shortest come last and share packs with their like. A
source that has only such would be in few packs, which no order brings evenly. So short samples are packed as one with
what comes behind them where sources take turns::

    places, sources taking turns    a  a  s  a  a  a  s  a     s: short samples
    items that are packed           a  a [s  a] a  a [s  a]

Such an *item* has about a *grain* of a pack at least, so a pack has few of them, and each has what is due of every
source. Items fill packs a little less tightly than samples do. Where most are about as long as a half or a third of a
pack, none of them may become longer: then only every few of the long samples take short ones along, and these are more.
The evenest way is taken that costs next to nothing; if there is none, samples are packed one by one.

*Order.*

    by chance    a a b a a a c b a a a b c a a a a a b a     a window of 5 has 0 to 2 b
    evenly       a b a a c a a b a a a b a a c a a b a a     each has 1 or 2

Packs mix sources, so an order is sought in which sums of vectors grow evenly: what each pack has of each source. The
epoch is halved, and halved again, each time so that both halves have as much of every source as they can: packs that
are alike come in pairs, one for each half, and which goes where is decided by what the halves have had so far (vector
balancing; Spencer 1977, "Balancing games", calls it the pusher and the chooser). What a half has too much is then about
what a few packs hold, however long it is; by chance it would grow with the root of its length. In the smallest parts
packs are taken one after the other, each time the one that leaves least of what sources are ahead or behind by.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.planning.mixture import Places
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array, PackPlan, select_packs, to_offsets
from packtool.planning.packing import pack
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

_WAYS = (8, 1), (8, 4), (8, 16), (16, 4), (16, 16), (32, 4), (32, 16)
"""Grains of a pack, and of how many long samples one takes short ones along; the evenest first, the tightest last."""
_LONG = 1 / 16
"""Share of a pack."""
_MOST_LOST, _FEW_PACKS = 0.005, 2
"""Share of packs that evenness may cost, and how many more, which is much of a small epoch only."""


def pack_evenly(places: Places, options: PlanOptions, *, seed: int, epoch: int) -> tuple[PackPlan, Int64Array]:
    """Pack the places of a mixture so that no source has its samples in few packs.

    All budgets are kept, and every epoch has as many packs as the first. Price: mostly two or three times that of
    ``pack``, nine times at most.

    Args:
        places: M of them.
        options, seed, epoch: as for ``pack``.

    Returns:
        Packs of places, and int64 (M,), from which place each place gets its sample: an item has the same places in
        every epoch, so samples of a source that are alike change theirs.

    Raises:
        ConfigError, DataError: as ``pack``.
    """
    capacity = options.packing_length

    def one_by_one() -> PackPlan:
        return pack(places.lengths, capacity, options, seed=seed, epoch=epoch, media_tokens=places.media_tokens)

    # Not kept, for it is large and seldom asked for again.
    fewest = one_by_one().num_packs
    for num_grains, turns in _WAYS:
        items = _Items.of(places, options, max(capacity // num_grains, 1), turns)
        lengths, budgets, media = items.as_samples(options)
        packs = pack(lengths, capacity, budgets, seed=seed, epoch=epoch, media_tokens=media)
        if packs.num_packs <= fewest + int(fewest * _MOST_LOST) + _FEW_PACKS:
            return items.unfolded(packs), items.exchanged(options, seed, epoch)
    return one_by_one(), np.arange(len(places.lengths))


@dataclass(frozen=True, eq=False)
class _Items:
    """Places that are packed as one.

    Args:
        places: all M of them.
        members: of items, each as if it were a pack.
    """

    places: Places
    members: PackPlan

    @classmethod
    def of(cls, places: Places, options: PlanOptions, grain: int, turns: int) -> _Items:
        """Items of a grain or so; one of so many long places is joined with short ones, and what fills a pack never."""
        capacity = options.packing_length
        shares = _shares(places, options)
        # Items have less than one and a half grains and one place more.
        is_joined = shares <= capacity - grain - grain // 2
        is_long = is_joined & (shares >= capacity * _LONG)
        is_joined &= ~is_long | (np.cumsum(is_long) % turns == 0)
        joined, alone = np.flatnonzero(is_joined), np.flatnonzero(~is_joined)
        # Places lie on a line that is cut into grains, none longer than one; an item is what begins in a grain.
        taken = np.minimum(shares[joined], grain)
        item = (np.cumsum(taken) - taken) // grain
        # What begins in a grain may be little, where the next begins behind it: that is joined with what comes then.
        is_enough = np.bincount(item, weights=taken) >= grain / 2
        item = (np.cumsum(is_enough) - is_enough)[item]
        order = np.concatenate((joined, alone))
        sizes = np.concatenate((np.bincount(item), np.ones(len(alone), np.int64)))
        return cls(places, PackPlan(order, to_offsets(sizes), places.lengths[order], capacity))

    def as_samples(self, options: PlanOptions) -> tuple[Int64Array, PlanOptions, Int64Array]:
        """What packs items as if they were samples: lengths (I,), options, and media tokens (I,).

        Packers count each item as one sample, so a budget of samples is kept as one of media tokens.
        """
        members, most, limit = self.members, options.max_samples_per_pack, options.max_media_tokens_per_pack
        media = members.sums_per_pack(self.places.media_tokens[members.samples])
        if most is None:
            return members.tokens_per_pack(), options, media
        counts = np.diff(members.offsets)
        if limit is not None:
            counts = np.maximum(-(-counts * limit // most), media)
        budgets = dataclasses.replace(options, max_samples_per_pack=None, max_media_tokens_per_pack=limit or most)
        return members.tokens_per_pack(), budgets, counts

    def unfolded(self, packs: PackPlan) -> PackPlan:
        """Packs of places from packs of items."""
        members = select_packs(self.members, packs.samples)
        return dataclasses.replace(members, offsets=members.offsets[packs.offsets])

    def exchanged(self, options: PlanOptions, seed: int, epoch: int) -> Int64Array:
        """Say from which place each place gets its sample, int64 (M,): of those alike, from another."""
        members, places = self.members, self.places
        found, sizes = np.arange(members.num_samples), np.diff(members.offsets)
        is_with_others = np.repeat(sizes > 1, sizes)
        if options.max_media_tokens_per_pack is not None:
            is_with_others &= places.media_tokens[members.samples] == 0
        own = members.samples[is_with_others]
        alike = places.sources[own].astype(np.int64) * (options.packing_length + 1) + places.lengths[own]
        order = seeded_order(len(own), seed=seed, epoch=epoch, stream=RandomStream.MIX_COMPANIONS, falling=alike)
        # The next one in this order; behind the last of those alike comes the first of them.
        following = np.arange(1, len(own) + 1)
        last = np.flatnonzero(np.diff(alike[order], append=-1))
        following[last] = np.append(0, last[:-1] + 1)[: len(last)]
        found[own[order]] = own[order[following]]
        return found


def _shares(places: Places, options: PlanOptions) -> Int64Array:
    """What each place takes up of a pack, in tokens, by the budget that it takes most of; int64 (M,)."""
    shares, capacity = places.lengths.astype(np.int64), options.packing_length
    if options.max_media_tokens_per_pack is not None:
        of_media = -(-places.media_tokens.astype(np.int64) * capacity // options.max_media_tokens_per_pack)
        shares = np.maximum(shares, of_media)
    if options.max_samples_per_pack is not None:
        shares = np.maximum(shares, -(-capacity // options.max_samples_per_pack))
    return shares


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
