"""Packs in which the short samples of a mixture are spread, instead of filling packs of their own.

    places, sources taking turns    a  a  s  a  a  a  s  a     s: short samples
    items that are packed           a  a [s  a] a  a [s  a]

Packers take the longest samples first, so that the shortest come last and share packs with their like. A source that
has only such would be in few packs, which no order brings evenly. So short samples are packed as one with what comes
behind them where sources take turns. Such an *item* has about a *grain* of a pack at least, so a pack has few of them,
and each has what is due of every source.

Items fill packs a little less tightly than samples do. Where most are about as long as a half or a third of a pack,
none of them may become longer: then only every few of the long samples take short ones along, and these are more. The
evenest way is taken that costs next to nothing; if there is none, samples are packed one by one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from packtool.plan.mixture import Places
from packtool.plan.options import PlanOptions
from packtool.plan.pack_plan import Int64Array, PackPlan, offsets_of, with_packs_in_order
from packtool.plan.packing import pack
from packtool.plan.shuffle import RandomStream, seeded_order

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
        return cls(places, PackPlan(order, offsets_of(sizes), places.lengths[order], capacity))

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
        members = with_packs_in_order(self.members, packs.samples)
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
