"""Packing and order of a mixture's packs, so that every source is spread evenly over an epoch.

Short samples are joined with the slots that follow them where sources are interleaved. Such *items* have a minimum
size, the *grain*, so that a source of short samples does not end up in few packs::

    slots, sources interleaved      a  a  s  a  a  a  s  a     s: short samples
    items that are packed           a  a [s  a] a  a [s  a]

The packs are then ordered by vector balancing (Spencer 1977, "Balancing games"): the epoch is halved repeatedly, so
that both halves have as equal amounts of every source as possible. ``docs/how-it-works.md`` explains both.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from packtool.planning.mixture import Slots
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array, IntArray, PackPlan, build_plan, select_packs
from packtool.planning.packing import pack
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

_GRAINS = (8, 1), (8, 4), (8, 16), (16, 4), (16, 16), (32, 4), (32, 16)
"""Grains per pack, and long samples per one that takes short ones along; the evenest first, the tightest last."""
_LONG = 1 / 16
"""Share of a pack."""
_MAX_EXCESS, _MAX_EXCESS_PACKS = 0.005, 2
"""Share of packs that evenness may cost, and a further number of packs, which matters in small epochs only."""


def pack_mixture(slots: Slots, options: PlanOptions, *, seed: int, epoch: int) -> tuple[PackPlan, Int64Array]:
    """Pack the M slots of a mixture so that no source has its samples in few packs.

    All budgets are kept, and every epoch has as many packs as the first. Cost: two to three times that of ``pack``, at
    most nine times.

    Returns:
        Packs of slots, and int64 (M,), the slot from which each slot gets its sample: an item has the same slots in
        every epoch, so equally long samples of a source are exchanged.
    """
    capacity = options.packing_length

    def pack_slots() -> PackPlan:
        return pack(slots.lengths, capacity, options, seed=seed, epoch=epoch, media_tokens=slots.media_tokens)

    min_packs = pack_slots().num_packs  # the plan is not kept: it is large and rarely needed again
    max_packs = min_packs + int(min_packs * _MAX_EXCESS) + _MAX_EXCESS_PACKS
    for grains_per_pack, long_per_joined in _GRAINS:
        items = _join_slots(slots, options, max(capacity // grains_per_pack, 1), long_per_joined)
        media, item_options = items.sums_per_pack(slots.media_tokens[items.samples]), options
        max_media, max_samples = options.max_media_tokens_per_pack, options.max_samples_per_pack
        if max_samples is not None:
            # Packers count each item as one sample, so the budget of samples becomes one of media tokens.
            samples_per_item = np.diff(items.offsets)
            if max_media is None:
                media, max_media = samples_per_item, max_samples
            else:
                media = np.maximum(-(-samples_per_item * max_media // max_samples), media)
            item_options = dataclasses.replace(options, max_samples_per_pack=None, max_media_tokens_per_pack=max_media)
        packs = pack(items.tokens_per_pack(), capacity, item_options, seed=seed, epoch=epoch, media_tokens=media)
        if packs.num_packs <= max_packs:
            packed_items = select_packs(items, packs.samples)
            packs_of_slots = dataclasses.replace(packed_items, offsets=packed_items.offsets[packs.offsets])
            return packs_of_slots, _exchange_samples(items, slots, options, seed, epoch)
    return pack_slots(), np.arange(len(slots.lengths))


def _join_slots(slots: Slots, options: PlanOptions, grain: int, long_per_joined: int) -> PackPlan:
    """Join short slots with the slots that follow them, into items of at least half a ``grain``; return packs of slots.

    ``grain`` is in tokens. Of long slots only each ``long_per_joined``-th is joined; slots that would hardly fit beside
    others never are.
    """
    capacity = options.packing_length
    # Tokens, or the equivalent share of the scarcest budget.
    sizes = slots.lengths.astype(np.int64)
    if options.max_media_tokens_per_pack is not None:
        media = slots.media_tokens.astype(np.int64)
        sizes = np.maximum(sizes, -(-media * capacity // options.max_media_tokens_per_pack))
    if options.max_samples_per_pack is not None:
        sizes = np.maximum(sizes, -(-capacity // options.max_samples_per_pack))
    # Items have less than one and a half grains and one slot more.
    is_joined = sizes <= capacity - grain - grain // 2
    is_long = is_joined & (sizes >= capacity * _LONG)
    is_joined &= ~is_long | (np.cumsum(is_long) % long_per_joined == 0)
    joined, single = np.flatnonzero(is_joined), np.flatnonzero(~is_joined)
    # Slots lie on a line divided into grains, none longer than one; an item is the slots that begin in a grain.
    spans = np.minimum(sizes[joined], grain)
    grain_of = (np.cumsum(spans) - spans) // grain
    # A grain with less than half of that is joined with the next.
    ends_item = np.bincount(grain_of, weights=spans) >= grain / 2
    item_of_grain: Int64Array = np.cumsum(ends_item) - ends_item
    joined_sizes = np.bincount(item_of_grain[grain_of])
    item_sizes = np.concatenate((joined_sizes, np.ones(len(single), np.int64)))
    return build_plan(np.concatenate((joined, single)), item_sizes, slots.lengths, capacity)


def _exchange_samples(items: PackPlan, slots: Slots, options: PlanOptions, seed: int, epoch: int) -> Int64Array:
    """Return for each slot the slot whose sample it gets, int64 (M,): in items another of equal source and length."""
    sizes = np.diff(items.offsets)
    is_joined = np.repeat(sizes > 1, sizes)
    if options.max_media_tokens_per_pack is not None:
        is_joined &= slots.media_tokens[items.samples] == 0
    joined = items.samples[is_joined]
    keys = slots.sources[joined].astype(np.int64) * (options.packing_length + 1) + slots.lengths[joined]
    order = seeded_order(len(joined), seed=seed, epoch=epoch, stream=RandomStream.MIX_COMPANIONS, descending_by=keys)
    # The next one in this order; after the last of equal ones comes the first of them.
    following = np.arange(1, len(joined) + 1)
    last = np.flatnonzero(np.diff(keys[order], append=-1))
    following[last] = np.append(0, last[:-1] + 1)[: len(last)]
    exchanged = np.arange(items.num_samples)
    exchanged[joined[order]] = joined[order[following]]
    return exchanged


Vectors = npt.NDArray[np.float32]

_WINDOW_PACKS = 4096
"""Packs of the parts that an epoch is divided into at once; each of them is then halved."""
_PART_PACKS = 16
"""Packs of the smallest parts."""
_STEPS_PER_MEAN, _MAX_STEPS = 256, 4096
"""Vectors are rounded to steps of a source's mean, and limited to a maximum: sums and products are then exact, and the
order is the same on every machine."""
_SLICE = 1 << 18
_AMOUNT_LEVELS = 1 << 16


def order_mixture_packs(
    packs: PackPlan, source_of: IntArray, amounts: IntArray, *, seed: int, epoch: int
) -> Int64Array:
    """Order K packs, int64 (K,), so that every source comes evenly, and at random in all other respects.

    The order does not depend on the packs per step, so that an epoch can be resumed with other numbers of ranks. Cost:
    O(K S log K) for S sources, and 4 bytes for each of K S numbers.

    Of the samples in pack order, (N,), ``source_of`` are sources, 0 to S - 1, and ``amounts`` 1, tokens or targets.
    """
    num = packs.num_packs
    vectors = _vectors(packs, source_of, amounts)
    if num < 3 or vectors.shape[1] < 2:
        return seeded_order(num, seed=seed, epoch=epoch, stream=RandomStream.MIX_STEPS)
    # Similar packs come together: by their main source, and how much they have of it, from 0 to the most of all packs.
    main_source, maxima = vectors.argmax(axis=1), vectors.max(axis=0)
    amount = vectors[np.arange(num), main_source] / np.maximum(maxima, 1e-9)[main_source]
    levels = np.clip(amount * (_AMOUNT_LEVELS - 1), 0, _AMOUNT_LEVELS - 1).astype(np.int64)
    keys = main_source * _AMOUNT_LEVELS + levels
    order = seeded_order(num, seed=seed, epoch=epoch, stream=RandomStream.MIX_KINDS, descending_by=keys)
    # Integers of limited size.
    vectors *= _STEPS_PER_MEAN * np.minimum(1, _MAX_STEPS / np.maximum(maxima, 1))
    np.rint(vectors, out=vectors)
    num_windows = -(-num // _WINDOW_PACKS)
    num_halvings = max(0, int(np.log2(num / num_windows / _PART_PACKS)))
    num_parts = num_windows << num_halvings
    # Empty packs, numbered ``num``, fill up the parts; they are spread as evenly as others.
    packs_per_part = -(-num // num_parts)
    order = np.append(order, np.full(num_parts * packs_per_part - num, num))
    vectors = np.append(vectors, np.zeros((1, vectors.shape[1]), np.float32), axis=0)
    parts = _divide(order, num_windows, vectors, seed, epoch)
    for level in range(num_halvings):
        parts = _halve(parts, vectors, num_windows, RandomStream.MIX_COINS + 1 + level, seed, epoch)
    order = _order_one_by_one(parts.reshape(num_windows, -1, packs_per_part), vectors)
    return order[order < num]


def _vectors(packs: PackPlan, source_of: IntArray, amounts: IntArray) -> Vectors:
    """Compute the amount of each source in each pack relative to its mean, minus 1, (K, S): 0 is even."""
    num_sources = int(source_of.max(initial=0)) + 1
    vectors = np.empty((packs.num_packs, num_sources), np.float32)
    for start in range(0, packs.num_packs, _SLICE):
        offsets = packs.offsets[start : start + _SLICE + 1]
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        members = slice(int(offsets[0]), int(offsets[-1]))
        cells = rows * num_sources + source_of[members]
        sums = np.bincount(cells, weights=amounts[members], minlength=(len(offsets) - 1) * num_sources)
        vectors[start : start + _SLICE] = sums.reshape(-1, num_sources)
    mean = vectors.mean(axis=0, dtype=np.float64)
    vectors /= np.maximum(mean, 1e-9).astype(np.float32)
    vectors -= 1
    return vectors


def _halve(parts: Int64Array, vectors: Vectors, num_windows: int, stream: int, seed: int, epoch: int) -> Int64Array:
    """Halve each part's packs (parts, n), similar ones adjacent: (2 parts, n / 2), in the same order.

    Of each adjacent pair one goes to each half, so that the sources of a window are even up to the middle of a part.
    The parts of a window are consecutive; ``vectors``, (K + 1, S), are the excess of each source in each pack.
    """
    num_parts, num_packs = parts.shape
    excess = vectors[parts].sum(axis=1, dtype=np.float64).reshape(num_windows, -1, vectors.shape[1])
    excess -= np.rint(excess.mean(axis=1, keepdims=True))
    # Excess of each source in its window up to the end of each part; up to the middle, were the part halved evenly, it
    # is the mean of this and the part before. ``lead`` is twice that; a pair adds or subtracts its difference.
    up_to_end = excess.cumsum(axis=1)
    lead = up_to_end.copy()
    lead[:, 1:] += up_to_end[:, :-1]
    lead = lead.reshape(num_parts, -1)
    breaks_ties = seeded_uniform(num_packs // 2 * num_parts, seed=seed, epoch=epoch, stream=stream) < 0.5
    halves = np.empty((num_parts, 2, num_packs // 2), np.int64)
    for pair, swaps_tie in enumerate(breaks_ties.reshape(-1, num_parts)):
        first, second = parts[:, 2 * pair], parts[:, 2 * pair + 1]
        difference = vectors[first] - vectors[second]
        is_swapped = _is_swapped(lead, difference, swaps_tie)
        halves[:, 0, pair] = np.where(is_swapped, second, first)
        halves[:, 1, pair] = np.where(is_swapped, first, second)
        difference[is_swapped] *= -1
        lead += difference
    return halves.reshape(2 * num_parts, -1)


def _is_swapped(
    lead: npt.NDArray[np.float64], difference: Vectors, swaps_tie: npt.NDArray[np.bool_] | bool
) -> npt.NDArray[np.bool_]:
    """Choose the pairs of packs to swap, bool (n,), so that the lead (n, S) shrinks."""
    gain = np.einsum("ps,ps->p", lead, difference)
    return (gain > 0) | ((gain == 0) & swaps_tie)


def _order_one_by_one(parts: Int64Array, vectors: Vectors) -> Int64Array:
    """Order packs (n,) of parts (windows, parts, packs), part after part, in all windows at once.

    The next pack of a part is the one with which the sums of all sources are nearest to even: ``lead`` is the excess of
    each source in the packs so far, (windows, sources). ``vectors`` are as for ``_halve``.
    """
    num_windows, num_parts, num_packs = parts.shape
    windows = np.arange(num_windows)
    order = np.empty((num_windows, num_parts * num_packs), np.int64)
    lead = np.zeros((num_windows, vectors.shape[1]))
    mean = np.rint(vectors[parts].sum(axis=(1, 2), dtype=np.float64) / (num_parts * num_packs))
    for part in range(num_parts):
        excess = vectors[parts[:, part]] - mean[:, None]
        squares = np.einsum("wps,wps->wp", excess, excess)
        for position in range(part * num_packs, (part + 1) * num_packs):
            # The least |lead + excess|^2, without the constant |lead|^2.
            distances = squares + 2 * np.einsum("wps,ws->wp", excess, lead)
            best = distances.argmin(axis=1)
            order[:, position] = parts[windows, part, best]
            lead += excess[windows, best]
            squares[windows, best] = np.inf  # taken
    return order.reshape(-1)


def _divide(order: Int64Array, num_windows: int, vectors: Vectors, seed: int, epoch: int) -> Int64Array:
    """Divide packs (n,), similar ones adjacent, into windows (windows, n / windows), in the same order.

    In each round every window gets one pack: random pairs of windows get adjacent pairs of packs, assigned so that the
    windows become more even. ``vectors`` are as for ``_halve``.
    """
    rounds = order.reshape(-1, num_windows)
    if num_windows == 1:
        return rounds.T.copy()
    # The windows in a random order for each round.
    round_keys = np.repeat(np.arange(len(rounds))[::-1], num_windows)
    stream = RandomStream.MIX_TURNS
    shuffled = seeded_order(rounds.size, seed=seed, epoch=epoch, stream=stream, descending_by=round_keys)
    window_orders = shuffled.reshape(rounds.shape) % num_windows
    breaks_ties = seeded_uniform(len(rounds), seed=seed, epoch=epoch, stream=RandomStream.MIX_COINS) < 0.5
    num_paired = num_windows // 2 * 2
    sums = np.zeros((num_windows, vectors.shape[1]))
    windows = np.empty((num_windows, len(rounds)), np.int64)
    for number, (packs, window_order) in enumerate(zip(rounds, window_orders, strict=True)):
        left, right = window_order[: num_paired // 2], window_order[num_paired // 2 : num_paired]
        first, second = packs[:num_paired:2], packs[1:num_paired:2]
        difference = vectors[first] - vectors[second]
        is_swapped = _is_swapped(sums[left] - sums[right], difference, bool(breaks_ties[number]))
        windows[left, number] = np.where(is_swapped, second, first)
        windows[right, number] = np.where(is_swapped, first, second)
        windows[window_order[num_paired:], number] = packs[num_paired:]
        sums += vectors[windows[:, number]]
    return windows
