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
from packtool.planning.pack_plan import Costs, Int64Array, IntArray, PackPlan, build_plan, select_packs
from packtool.planning.packing import pack
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform

_JOINS_TO_TRY = (8, 1), (8, 4), (8, 16), (16, 4), (16, 16), (32, 4), (32, 16)
"""Grains in a pack, and n to join every n-th long slot. The first spread sources best, the last need the fewest packs.
"""
_MIN_LONG = 1 / 16
"""Share of a pack from which on a slot is long."""
_EXTRA_SHARE, _EXTRA_PACKS = 0.005, 2
"""Share of packs that evenness may cost, and a further number of packs, which matters in small epochs only."""


def pack_mixture(slots: Slots, options: PlanOptions, *, seed: int, epoch: int) -> tuple[PackPlan, Int64Array]:
    """Pack the M slots of a mixture so that no source has its samples in few packs; as many packs in every epoch.

    A slot is space for one sample of a source. Short slots are joined into items, and the items packed. Several ways
    of joining are tried, until one needs hardly more packs than the slots alone; otherwise no slots are joined.

    Returns:
        Packs of slots, and ``exchange``, int64 (M,): slot i gets the sample that was drawn for slot ``exchange[i]``,
        of the same source and length, so that other samples share a pack in every epoch.
    """

    def pack_slots() -> PackPlan:
        lengths, media_tokens = slots.lengths, slots.media_tokens
        return pack(lengths, options.packing_length, options, seed=seed, epoch=epoch, media_tokens=media_tokens)

    min_packs = pack_slots().num_packs  # the plan is not kept: it is large and rarely needed again
    max_packs = min_packs + int(min_packs * _EXTRA_SHARE) + _EXTRA_PACKS
    for grains_per_pack, long_per_joined in _JOINS_TO_TRY:
        grain = max(options.packing_length // grains_per_pack, 1)  # twice the minimum of a joined item, in tokens
        items = _join_slots(slots, options, grain, long_per_joined)
        packs = _pack_items(items, slots, options, seed, epoch)
        if packs.num_packs <= max_packs:
            exchange = _draw_exchange(items, slots, options, seed, epoch)
            return relieve_crowds(packs, slots, options), exchange
    no_exchange = np.arange(len(slots.lengths))
    return relieve_crowds(pack_slots(), slots, options), no_exchange


def _pack_items(items: PackPlan, slots: Slots, options: PlanOptions, seed: int, epoch: int) -> PackPlan:
    """Pack items, which are packs of slots, like samples; return packs of slots."""
    tokens, capacity = items.tokens_per_pack(), options.packing_length
    media_tokens, item_options = _item_budgets(items, slots, options)
    packs_of_items = pack(tokens, capacity, item_options, seed=seed, epoch=epoch, media_tokens=media_tokens)
    ordered_items = select_packs(items, packs_of_items.samples)
    first_slots = ordered_items.offsets[packs_of_items.offsets]  # a pack begins with the first slot of its first item
    return dataclasses.replace(ordered_items, offsets=first_slots)


def _item_budgets(items: PackPlan, slots: Slots, options: PlanOptions) -> tuple[Int64Array, PlanOptions]:
    """Return the media tokens of each item, and options that limit samples by media tokens: an item counts as one."""
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
    """Join short slots to items of at least half a ``grain``, in tokens; return the items as packs of slots.

    Of long slots only every ``long_per_joined``-th is joined; all other slots are items of their own.
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


def _draw_exchange(items: PackPlan, slots: Slots, options: PlanOptions, seed: int, epoch: int) -> Int64Array:
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
    exchange = np.arange(items.num_samples)
    exchange[joined[order]] = joined[order[following]]
    return exchange


Excess = npt.NDArray[np.float32]
"""Excess of each source in each pack over its mean, (packs, sources): its amount divided by the mean's, minus 1."""

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
    """Order K packs, int64 (K,), so that every source is spread evenly, and at random in all other respects.

    The order does not depend on the packs per step, so that an epoch can be resumed with other numbers of ranks.

    Args:
        source_of: source of each sample in pack order, from 0 on, (N,).
        amounts: what is spread: 1, tokens or target tokens of each of these samples, (N,).
    """
    excess = _excess_of_sources(packs, source_of, amounts)
    num_packs, num_sources = excess.shape
    if num_packs < 3 or num_sources < 2:
        return seeded_order(num_packs, seed=seed, epoch=epoch, stream=RandomStream.MIX_STEPS)
    keys = _similarity_keys(excess)
    by_similarity = seeded_order(num_packs, seed=seed, epoch=epoch, stream=RandomStream.MIX_KINDS, descending_by=keys)
    _round_in_place(excess)
    return _order_by_halving(by_similarity, excess, seed, epoch)


def _order_by_halving(by_similarity: Int64Array, excess: Excess, seed: int, epoch: int) -> Int64Array:
    """Divide packs (K,) into windows, halve each window repeatedly, and order the packs of each of the final parts."""
    num_packs = len(by_similarity)
    num_windows = math.ceil(num_packs / _WINDOW_PACKS)
    num_halvings = max(0, int(np.log2(num_packs / num_windows / _PART_PACKS)))
    num_parts = num_windows * 2**num_halvings  # all of the same size
    padded, excess = _pad_packs(by_similarity, excess, divisor=num_parts)
    windows = _divide_into_windows(padded, num_windows, excess, seed, epoch)
    parts = windows.reshape(num_windows, 1, -1)  # (windows, parts of a window, packs of a part)
    for level in range(1, num_halvings + 1):
        parts = _halve_parts(parts, excess, level, seed, epoch)
    order = _order_parts(parts, excess)
    return order[order < num_packs]  # without padding, which has the number num_packs


def _pad_packs(order: Int64Array, excess: Excess, divisor: int) -> tuple[Int64Array, Excess]:
    """Append empty packs to all K packs, up to a multiple of ``divisor``; they have the number K, and no excess."""
    num_packs, num_sources = excess.shape
    num_empty = -num_packs % divisor
    padded_order = np.append(order, np.full(num_empty, num_packs))
    return padded_order, np.append(excess, np.zeros((1, num_sources), np.float32), axis=0)


def _flip_coins(shape: tuple[int, ...], level: int, seed: int, epoch: int) -> npt.NDArray[np.bool_]:
    """Draw random booleans; the windows have level 0, and each halving its own."""
    stream = RandomStream.MIX_COINS + level
    return seeded_uniform(math.prod(shape), seed=seed, epoch=epoch, stream=stream).reshape(shape) < 0.5


def _round_in_place(excess: Excess) -> None:
    """Round ``excess`` to integers of limited size, so that sums are exact in any order."""
    maxima = excess.max(axis=0)
    excess *= _STEPS_PER_MEAN * np.minimum(1, _MAX_STEPS / np.maximum(maxima, 1))
    np.rint(excess, out=excess)


def _similarity_keys(excess: Excess) -> Int64Array:
    """Return keys that sort similar packs next to each other, int64 (packs,): by main source, then by its excess."""
    main_source = excess.argmax(axis=1)
    maxima = np.maximum(excess.max(axis=0), 1e-9)
    relative_excess = excess[np.arange(len(excess)), main_source] / maxima[main_source]
    levels = np.clip(relative_excess * (_AMOUNT_LEVELS - 1), 0, _AMOUNT_LEVELS - 1).astype(np.int64)
    return main_source * _AMOUNT_LEVELS + levels


def _excess_of_sources(packs: PackPlan, source_of: IntArray, amounts: IntArray) -> Excess:
    """Compute the excess of each source in each pack, (packs, sources)."""
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


def _halve_parts(parts: Int64Array, excess: Excess, level: int, seed: int, epoch: int) -> Int64Array:
    """Halve the parts of each window: int64 (windows, parts, packs) becomes (windows, 2 * parts, packs / 2).

    Of each two adjacent packs, one goes to the first half and the other to the second, so that the first halves, with
    all parts before them, have as much of each source as the mean: an ``excess`` near 0.
    """
    num_windows, num_parts, num_packs = parts.shape
    num_pairs = num_packs // 2
    pairs = parts.reshape(num_windows, num_parts, num_pairs, 2)
    coins = _flip_coins((num_pairs, num_windows, num_parts), level, seed, epoch)
    doubled_sums = _doubled_sums_to_middles(parts, excess)
    halves = np.empty((num_windows, num_parts, 2, num_pairs), np.int64)
    for pair_index in range(num_pairs):
        # Process one pair of every part at once; (windows, parts, 2).
        pair = _order_pairs(pairs[:, :, pair_index], excess, doubled_sums, coins[pair_index])
        halves[:, :, :, pair_index] = pair
        # Half of the pair was expected in the first half: the excess changes by half of the difference.
        to_first_half, to_second_half = pair[:, :, 0], pair[:, :, 1]
        doubled_sums += excess[to_first_half] - excess[to_second_half]
    return halves.reshape(num_windows, 2 * num_parts, num_pairs)


def _doubled_sums_to_middles(parts: Int64Array, excess: Excess) -> npt.NDArray[np.float64]:
    """Sum the excess from a window's beginning to the middle of each part, (windows, parts, sources).

    Half of a part's excess is expected before its middle. Sums are doubled, so that they are integers, which are exact.
    """
    part_sums = excess[parts].sum(axis=2, dtype=np.float64)
    part_sums -= np.rint(part_sums.mean(axis=1, keepdims=True))
    return 2 * part_sums.cumsum(axis=1) - part_sums


def _order_pairs(pairs: Int64Array, excess: Excess, sums: Costs, coins: npt.NDArray[np.bool_] | np.bool_) -> Int64Array:
    """Order the two packs of each pair, int64 (..., 2), so that ``sums``, (..., sources), stay near 0.

    The pack that comes first adds its excess to the sums, the other subtracts its own. ``coins`` decide ties.
    """
    difference = excess[pairs[..., 0]] - excess[pairs[..., 1]]
    product = np.einsum("...s,...s->...", sums, difference)
    is_swapped = (product > 0) | ((product == 0) & coins)
    return np.where(is_swapped[..., None], pairs[..., ::-1], pairs)


def _order_parts(parts: Int64Array, excess: Excess) -> Int64Array:
    """Order the packs of each part, int64 (windows, parts, packs); return all packs in order, int64 (n,).

    The next pack of a part is the one that brings the sums of ``excess`` so far in its window nearest to the mean's.
    """
    _, num_parts, num_packs = parts.shape
    window_sum = excess[parts].sum(axis=(1, 2), dtype=np.float64)
    window_mean = np.rint(window_sum / (num_parts * num_packs))  # an integer, so that sums stay exact
    sums = np.zeros_like(window_mean)  # of the packs ordered so far, less the mean of as many
    ordered = np.empty_like(parts)
    for part in range(num_parts):
        packs = parts[:, part]
        order = _keep_sums_near_zero(excess[packs] - window_mean[:, None], sums)
        ordered[:, part] = np.take_along_axis(packs, order, axis=1)
    return ordered.reshape(-1)


def _keep_sums_near_zero(candidates: Costs, sums: Costs) -> Int64Array:
    """Order the packs of one part of each window, int64 (windows, packs), so that ``sums`` stay near 0.

    Args:
        candidates: excess that each pack adds to the sums, (windows, packs, sources).
        sums: of the packs before, (windows, sources). All candidates are added, in place.
    """
    windows = np.arange(len(candidates))
    order = np.empty(candidates.shape[:2], np.int64)
    squares = np.einsum("wps,wps->wp", candidates, candidates)
    for position in range(candidates.shape[1]):
        # The best pack has the least |sums + candidate|^2; |sums|^2, which all have in common, is left out.
        distances = squares + 2 * np.einsum("wps,ws->wp", candidates, sums)
        best = distances.argmin(axis=1)
        order[:, position] = best
        sums += candidates[windows, best]
        squares[windows, best] = np.inf  # never take the pack again
    return order


def _divide_into_windows(order: Int64Array, num_windows: int, excess: Excess, seed: int, epoch: int) -> Int64Array:
    """Divide packs evenly into windows, so that all windows have about as much of each source.

    In each round every window gets one pack. Windows are paired at random, and each pair gets two adjacent packs, in
    the order that makes the sums of ``excess`` of the two windows more equal.

    Args:
        order: pack numbers, similar packs next to each other, (n,).

    Returns:
        The packs of each window, int64 (windows, n / windows).
    """
    rounds = order.reshape(-1, num_windows)
    if num_windows == 1:
        return rounds.T.copy()
    window_orders = _draw_window_orders(len(rounds), num_windows, seed, epoch)
    coins = _flip_coins((len(rounds),), 0, seed, epoch)
    num_paired = num_windows // 2 * 2  # of an odd number of windows, one gets the last pack of the round
    sums = np.zeros((num_windows, excess.shape[1]))  # excess of each source in each window so far
    pack_of_window = np.empty_like(rounds)  # (rounds, windows)
    for packs, window_order, coin, assigned in zip(rounds, window_orders, coins, pack_of_window, strict=True):
        # ``assigned`` is a row of ``pack_of_window``, which is filled in place.
        left_windows, right_windows = window_order[:num_paired].reshape(2, -1)
        pairs = packs[:num_paired].reshape(-1, 2)
        ordered_pairs = _order_pairs(pairs, excess, sums[left_windows] - sums[right_windows], coin)
        assigned[left_windows] = ordered_pairs[:, 0]
        assigned[right_windows] = ordered_pairs[:, 1]
        assigned[window_order[num_paired:]] = packs[num_paired:]
        sums += excess[assigned]
    return pack_of_window.T.copy()


def _draw_window_orders(num_rounds: int, num_windows: int, seed: int, epoch: int) -> Int64Array:
    """Draw a random order of the windows for each round, int64 (rounds, windows)."""
    round_keys = np.repeat(np.arange(num_rounds)[::-1], num_windows)
    stream = RandomStream.MIX_TURNS
    order = seeded_order(len(round_keys), seed=seed, epoch=epoch, stream=stream, descending_by=round_keys)
    return order.reshape(num_rounds, num_windows) % num_windows
