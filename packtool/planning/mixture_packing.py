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
import math

import numpy as np
import numpy.typing as npt

from packtool.planning.crowds import relieve_crowds
from packtool.planning.mixture import Slots
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Int64Array, IntArray, PackPlan, build_plan, select_packs
from packtool.planning.packing import pack
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

_JOINS_TO_TRY = (8, 1), (8, 4), (8, 16), (16, 4), (16, 16), (32, 4), (32, 16)
"""Grains per pack, and long slots of which one is joined; the joins that spread sources best come first, and those that
need the fewest packs last."""
_MIN_LONG = 1 / 16
"""Share of a pack from which on a slot is long."""
_MAX_EXCESS, _MAX_EXCESS_PACKS = 0.005, 2
"""Share of packs that evenness may cost, and a further number of packs, which matters in small epochs only."""


def pack_mixture(slots: Slots, options: PlanOptions, *, seed: int, epoch: int) -> tuple[PackPlan, Int64Array]:
    """Pack the M slots of a mixture so that no source has its samples in few packs.

    Short slots are joined with their neighbours, and these items are packed like samples. Of several ways to join, the
    first that costs few packs is used. All budgets are kept, and every epoch has as many packs as the first. Cost: two
    to three times that of ``pack``, at most nine times.

    Returns packs of slots, and ``donor_of_slot``, int64 (M,): each slot gets the sample that was drawn for its donor, a
    slot of the same source and length. So samples meet others, though items have the same slots in every epoch.
    """
    capacity = options.packing_length

    def pack_slots() -> PackPlan:
        return pack(slots.lengths, capacity, options, seed=seed, epoch=epoch, media_tokens=slots.media_tokens)

    min_packs = pack_slots().num_packs  # the plan is not kept: it is large and rarely needed again
    max_packs = min_packs + int(min_packs * _MAX_EXCESS) + _MAX_EXCESS_PACKS
    for grains_per_pack, long_per_joined in _JOINS_TO_TRY:
        items = _join_slots(slots, options, max(capacity // grains_per_pack, 1), long_per_joined)
        item_media, item_options = _item_budgets(items, slots, options)
        item_tokens = items.tokens_per_pack()
        packs_of_items = pack(item_tokens, capacity, item_options, seed=seed, epoch=epoch, media_tokens=item_media)
        if packs_of_items.num_packs <= max_packs:
            donor_of_slot = _draw_donors(items, slots, options, seed, epoch)
            return relieve_crowds(_replace_items(packs_of_items, items), slots, options), donor_of_slot
    return relieve_crowds(pack_slots(), slots, options), np.arange(len(slots.lengths))


def _replace_items(packs_of_items: PackPlan, items: PackPlan) -> PackPlan:
    """Replace the items in packs by their slots."""
    ordered_items = select_packs(items, packs_of_items.samples)
    first_slots = ordered_items.offsets[packs_of_items.offsets]  # a pack begins with the first slot of its first item
    return dataclasses.replace(ordered_items, offsets=first_slots)


def _item_budgets(items: PackPlan, slots: Slots, options: PlanOptions) -> tuple[Int64Array, PlanOptions]:
    """Return the media tokens of each item, and the options to pack items with.

    Packers would count an item as one sample, so a limit of samples becomes one of media tokens, or part of it.
    """
    media_tokens = items.sums_per_pack(slots.media_tokens[items.samples])
    max_media, max_samples = options.max_media_tokens_per_pack, options.max_samples_per_pack
    if max_samples is None:
        return media_tokens, options
    samples_per_item = np.diff(items.offsets)
    if max_media is None:
        media_tokens, max_media = samples_per_item, max_samples
    else:
        equivalent_media_tokens = -(-samples_per_item * max_media // max_samples)  # rounded up
        media_tokens = np.maximum(equivalent_media_tokens, media_tokens)
    options = dataclasses.replace(options, max_samples_per_pack=None, max_media_tokens_per_pack=max_media)
    return media_tokens, options


def _join_slots(slots: Slots, options: PlanOptions, grain: int, long_per_joined: int) -> PackPlan:
    """Join short slots with the slots that follow them; return the items as packs of slots.

    Joined slots form items of at least half a ``grain``, which is in tokens; every other slot is an item of its own.
    Of long slots only every ``long_per_joined``-th is joined, and slots that nearly fill a pack never are.
    """
    capacity = options.packing_length
    sizes = _slot_sizes(slots, options)
    # An item is shorter than one and a half grains plus its last slot, and must fit into a pack.
    is_joined = sizes <= capacity - grain - grain // 2
    is_long = is_joined & (sizes >= capacity * _MIN_LONG)
    is_joined &= ~is_long | (np.cumsum(is_long) % long_per_joined == 0)
    joined, single = np.flatnonzero(is_joined), np.flatnonzero(~is_joined)
    joined_sizes = _slots_per_item(sizes[joined], grain)
    item_sizes = np.concatenate((joined_sizes, np.ones(len(single), np.int64)))
    return build_plan(np.concatenate((joined, single)), item_sizes, slots.lengths, capacity)


def _slot_sizes(slots: Slots, options: PlanOptions) -> Int64Array:
    """Return the size of each slot, int64 (M,): its tokens, or the equivalent of a larger share of another budget."""
    capacity = options.packing_length
    sizes = slots.lengths.astype(np.int64)
    if options.max_media_tokens_per_pack is not None:
        media = slots.media_tokens.astype(np.int64)
        sizes = np.maximum(sizes, -(-media * capacity // options.max_media_tokens_per_pack))
    if options.max_samples_per_pack is not None:
        sizes = np.maximum(sizes, -(-capacity // options.max_samples_per_pack))
    return sizes


def _slots_per_item(sizes: Int64Array, grain: int) -> Int64Array:
    """Divide consecutive slots, of ``sizes`` (n,), into items of at least half a grain; return the slots of each item.

    The slots lie on a line divided into grains, each slot at most one grain long. A slot belongs to the grain that it
    begins in. A grain whose slots span less than half a grain is in one item with the next grain.
    """
    spans = np.minimum(sizes, grain)
    grain_of_slot = (np.cumsum(spans) - spans) // grain
    ends_item = np.bincount(grain_of_slot, weights=spans) >= grain / 2
    item_of_grain: Int64Array = np.cumsum(ends_item) - ends_item
    return np.bincount(item_of_grain[grain_of_slot])


def _draw_donors(items: PackPlan, slots: Slots, options: PlanOptions, seed: int, epoch: int) -> Int64Array:
    """Draw the slot whose sample each slot gets, int64 (M,): in items of several, one of equal source and length."""
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
    donors = np.arange(items.num_samples)
    donors[joined[order]] = joined[order[following]]
    return donors


Excess = npt.NDArray[np.float32]
"""Amount of each of S sources in each of K packs, (K, S): divided by the source's mean over all packs, minus 1."""

_WINDOW_PACKS = 4096
"""Maximum packs of a window: an epoch is divided into windows, and every window is then halved repeatedly."""
_PART_PACKS = 16
"""Minimum packs of the smallest parts, which are not halved."""
_STEPS_PER_MEAN, _MAX_STEPS = 256, 4096
"""Steps per mean of a source, and maximum steps, to which excesses are rounded: sums and products are then exact, and
the order is the same on every machine."""
_SLICE = 1 << 18
_AMOUNT_LEVELS = 1 << 16


def order_mixture_packs(
    packs: PackPlan, source_of: IntArray, amounts: IntArray, *, seed: int, epoch: int
) -> Int64Array:
    """Order K packs, int64 (K,), so that every source is spread evenly; the order is random in all other respects.

    The order does not depend on the packs per step, so that an epoch can be resumed with other numbers of ranks. Cost:
    O(K S log K) for S sources, and 4 bytes for each of K S numbers.

    ``source_of``, (N,), are the sources, 0 to S - 1, of the samples in pack order. ``amounts``, (N,), are what is
    spread: 1 for each sample, its tokens, or its target tokens.
    """
    excess = _excess_of_sources(packs, source_of, amounts)
    num_packs, num_sources = excess.shape
    if num_packs < 3 or num_sources < 2:
        return seeded_order(num_packs, seed=seed, epoch=epoch, stream=RandomStream.MIX_STEPS)
    keys = _similarity_keys(excess)
    similar_adjacent = seeded_order(
        num_packs, seed=seed, epoch=epoch, stream=RandomStream.MIX_KINDS, descending_by=keys
    )
    _round_in_place(excess)
    num_windows = math.ceil(num_packs / _WINDOW_PACKS)
    num_halvings = max(0, int(np.log2(num_packs / num_windows / _PART_PACKS)))
    num_parts = num_windows * 2**num_halvings
    # Empty packs, all numbered ``num_packs`` and without excess, make all parts equally long.
    packs_per_part = math.ceil(num_packs / num_parts)
    num_empty = num_parts * packs_per_part - num_packs
    padded = np.append(similar_adjacent, np.full(num_empty, num_packs))
    excess = np.append(excess, np.zeros((1, num_sources), np.float32), axis=0)
    parts = _divide_into_windows(padded, num_windows, excess, seed, epoch)
    for level in range(1, num_halvings + 1):
        parts = _halve_parts(parts, excess, num_windows, RandomStream.MIX_COINS + level, seed, epoch)
    order = _order_parts(parts.reshape(num_windows, -1, packs_per_part), excess)
    return order[order < num_packs]


def _round_in_place(excess: Excess) -> None:
    """Round ``excess``, (K, S), in place, to integers of limited size, whose sums are exact in any order."""
    maxima = excess.max(axis=0)
    excess *= _STEPS_PER_MEAN * np.minimum(1, _MAX_STEPS / np.maximum(maxima, 1))
    np.rint(excess, out=excess)


def _similarity_keys(excess: Excess) -> Int64Array:
    """Return keys that sort similar packs next to each other, int64 (K,).

    The first digit is the main source of a pack, the second its excess relative to the largest of all packs.
    """
    main_source = excess.argmax(axis=1)
    maxima = np.maximum(excess.max(axis=0), 1e-9)
    relative_excess = excess[np.arange(len(excess)), main_source] / maxima[main_source]
    levels = np.clip(relative_excess * (_AMOUNT_LEVELS - 1), 0, _AMOUNT_LEVELS - 1).astype(np.int64)
    return main_source * _AMOUNT_LEVELS + levels


def _excess_of_sources(packs: PackPlan, source_of: IntArray, amounts: IntArray) -> Excess:
    """Compute the excess of each source in each pack, (K, S)."""
    num_sources = int(source_of.max(initial=0)) + 1
    excess = np.empty((packs.num_packs, num_sources), np.float32)
    for start in range(0, packs.num_packs, _SLICE):
        offsets = packs.offsets[start : start + _SLICE + 1]
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        members = slice(int(offsets[0]), int(offsets[-1]))
        cells = rows * num_sources + source_of[members]
        sums = np.bincount(cells, weights=amounts[members], minlength=(len(offsets) - 1) * num_sources)
        excess[start : start + _SLICE] = sums.reshape(-1, num_sources)
    mean = excess.mean(axis=0, dtype=np.float64)
    excess /= np.maximum(mean, 1e-9).astype(np.float32)
    excess -= 1
    return excess


def _halve_parts(parts: Int64Array, excess: Excess, num_windows: int, stream: int, seed: int, epoch: int) -> Int64Array:
    """Halve each of P parts, (P, n) with an even n, of which all windows have equally many; return int64 (2 P, n / 2).

    A part lists its packs, similar ones next to each other: of two adjacent packs, one goes to each half. It is chosen
    so that the packs from the window's beginning to the middle of the part have little ``excess``, (K, S), of any
    source. ``stream`` is that of the random numbers that decide ties.
    """
    num_parts, num_packs = parts.shape
    sums = _sums_up_to_middles(parts, excess, num_windows)
    swaps_ties = seeded_uniform(num_packs // 2 * num_parts, seed=seed, epoch=epoch, stream=stream) < 0.5
    halves = np.empty((num_parts, 2, num_packs // 2), np.int64)
    for pair, swaps_tie in enumerate(swaps_ties.reshape(-1, num_parts)):
        # One pair of every part at once: packs (P,), and their difference (P, S).
        first, second = parts[:, 2 * pair], parts[:, 2 * pair + 1]
        difference = excess[first] - excess[second]
        is_swapped = _is_swapped(sums, difference, swaps_tie)
        halves[:, 0, pair] = np.where(is_swapped, second, first)
        halves[:, 1, pair] = np.where(is_swapped, first, second)
        sums += np.where(is_swapped[:, None], -difference, difference)
    return halves.reshape(2 * num_parts, -1)


def _sums_up_to_middles(parts: Int64Array, excess: Excess, num_windows: int) -> npt.NDArray[np.float64]:
    """Return twice the excess of each source from a window's beginning to the middle of each part, (P, S).

    The part counts half, as if it were halved evenly; each pair of its packs then adds or subtracts its difference.
    """
    sums = excess[parts].sum(axis=1, dtype=np.float64).reshape(num_windows, -1, excess.shape[1])
    sums -= np.rint(sums.mean(axis=1, keepdims=True))
    # The excess up to the middle of a part is the mean of those up to its two ends.
    up_to_end = sums.cumsum(axis=1)  # (windows, parts of a window, S)
    up_to_middle = up_to_end.copy()
    up_to_middle[:, 1:] += up_to_end[:, :-1]
    return up_to_middle.reshape(len(parts), -1)


def _is_swapped(
    sums: npt.NDArray[np.float64], difference: Excess, swaps_tie: npt.NDArray[np.bool_] | bool
) -> npt.NDArray[np.bool_]:
    """Choose the pairs of packs to swap, bool (n,): those whose ``difference``, (n, S), would make ``sums`` larger.

    Swapped pairs subtract their difference from the sums, others add it; ``swaps_tie`` decides where both are equal.
    """
    gain = np.einsum("ps,ps->p", sums, difference)
    return (gain > 0) | ((gain == 0) & swaps_tie)


def _order_parts(parts: Int64Array, excess: Excess) -> Int64Array:
    """Order the packs of each part, int64 (windows, parts, packs of a part); return all packs in order, int64 (n,).

    The next pack of a part is the one that makes the sums of ``excess``, (K, S), in its window most even. All windows
    are ordered at once.
    """
    num_windows, num_parts, num_packs = parts.shape
    windows = np.arange(num_windows)
    order = np.empty((num_windows, num_parts * num_packs), np.int64)
    sums = np.zeros((num_windows, excess.shape[1]))  # of the packs of a window that are in order
    window_mean = np.rint(excess[parts].sum(axis=(1, 2), dtype=np.float64) / (num_parts * num_packs))
    for part in range(num_parts):
        candidates = excess[parts[:, part]] - window_mean[:, None]  # (windows, packs, S)
        squares = np.einsum("wps,wps->wp", candidates, candidates)
        for position in range(part * num_packs, (part + 1) * num_packs):
            # The best pack has the least |sums + candidate|^2; |sums|^2, which all have in common, is left out.
            distances = squares + 2 * np.einsum("wps,ws->wp", candidates, sums)
            best = distances.argmin(axis=1)
            order[:, position] = parts[windows, part, best]
            sums += candidates[windows, best]
            squares[windows, best] = np.inf  # never take the pack again
    return order.reshape(-1)


def _divide_into_windows(order: Int64Array, num_windows: int, excess: Excess, seed: int, epoch: int) -> Int64Array:
    """Divide packs (n,), in which similar ones are adjacent, into windows; return int64 (windows, n / windows).

    In each round every window gets one pack. Two adjacent packs go to two random windows; which of them goes to which
    is chosen so that the windows have about equal sums of ``excess``, (K, S).
    """
    rounds = order.reshape(-1, num_windows)
    if num_windows == 1:
        return rounds.T.copy()
    window_orders = _draw_window_orders(len(rounds), num_windows, seed, epoch)
    swaps_ties = seeded_uniform(len(rounds), seed=seed, epoch=epoch, stream=RandomStream.MIX_COINS) < 0.5
    num_pairs = num_windows // 2
    num_paired = 2 * num_pairs  # of an odd number of windows, one gets the last pack of the round
    sums = np.zeros((num_windows, excess.shape[1]))
    windows = np.empty((num_windows, len(rounds)), np.int64)
    for number, (packs, window_order) in enumerate(zip(rounds, window_orders, strict=True)):
        # Pairs of windows, and the two packs that each pair gets, (pairs,) each.
        left = window_order[:num_pairs]
        right = window_order[num_pairs:num_paired]
        first = packs[:num_paired:2]
        second = packs[1:num_paired:2]
        difference = excess[first] - excess[second]
        is_swapped = _is_swapped(sums[left] - sums[right], difference, bool(swaps_ties[number]))
        windows[left, number] = np.where(is_swapped, second, first)
        windows[right, number] = np.where(is_swapped, first, second)
        windows[window_order[num_paired:], number] = packs[num_paired:]
        sums += excess[windows[:, number]]
    return windows


def _draw_window_orders(num_rounds: int, num_windows: int, seed: int, epoch: int) -> Int64Array:
    """Draw a random order of the windows for each round, int64 (rounds, windows)."""
    round_keys = np.repeat(np.arange(num_rounds)[::-1], num_windows)
    stream = RandomStream.MIX_TURNS
    order = seeded_order(len(round_keys), seed=seed, epoch=epoch, stream=stream, descending_by=round_keys)
    return order.reshape(num_rounds, num_windows) % num_windows
