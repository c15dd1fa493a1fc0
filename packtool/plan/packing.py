"""Packing: one entry to all algorithms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.packing import PackOptions, budget_problems
from packtool.config.settings import bound_problems
from packtool.errors import ConfigError
from packtool.plan.batches import place_in_batches
from packtool.plan.budgets import check_media_tokens, pack_within_budgets
from packtool.plan.histogram import pack_histogram
from packtool.plan.pack_plan import (
    Int32Array,
    Lengths,
    PackPlan,
    check_lengths,
    exchange_equals,
    in_cache_order,
    plan_of,
    with_packs_in_order,
)
from packtool.plan.prefix_trees import PrefixTrees
from packtool.plan.sequential import place_sequential
from packtool.plan.shuffle import RandomStream, of_window, seeded_order
from packtool.plan.tree_parts import apart_in_packs
from packtool.plan.windows import contiguous_windows, draw_windows, map_on_processes

_AS_DECLARED = PackOptions()

_PROCESSES_PAY = 200_000
"""Samples below which starting processes takes longer than packing."""


def pack(
    lengths: Lengths,
    capacity: int,
    options: PackOptions = _AS_DECLARED,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> PackPlan:
    """Decide which samples share a pack: a pure function, the same on every machine.

    ``best_fit``: see ``pack_best_fit``; with a budget of media tokens, ``budgets``. ``binpacking``: the
    library, see ``batches``. ``sequential``: next fit with a look ahead, see ``sequential``; it keeps to the order of
    the cache whatever ``shuffle`` says.

    Companions and the order of packs are drawn from ``seed`` and ``epoch``; every epoch has as many packs as the
    others. Where nothing is shuffled, companions are what the algorithm makes of equally long samples taken in order,
    samples ascend within a pack, and the pack with the first sample comes first. Windows and the batches of
    ``binpacking`` are drawn from ``seed`` only, or lie side by side where the order is kept.

    Args:
        lengths: (N,), tokens of each sample.
        capacity: tokens that a pack may hold.
        options: which algorithm packs what at a time, and what a pack may hold besides; see ``PackOptions``.
        seed: of the run.
        epoch: 0-based.
        media_tokens: (N,), of each sample; needed with ``max_media_tokens_per_pack``.

    Raises:
        ConfigError: an option, the seed or the epoch is out of range, or the algorithm does not keep a budget.
        DataError: samples that are over a budget of a pack, or without tokens.
    """
    if problems := [*bound_problems(options), *budget_problems(options)]:
        raise ConfigError.from_problems(problems)
    checked = check_lengths(lengths, capacity)
    media = check_media_tokens(media_tokens, checked, options.max_media_tokens_per_pack, capacity)
    if media is None:
        options = dataclasses.replace(options, max_media_tokens_per_pack=None)
    if options.packing_algorithm == "binpacking":
        return _pack_in_batches(checked, capacity, options, seed, epoch)
    if options.packing_window is None or len(checked) <= options.packing_window:
        return _pack_window(_Window(checked, media, capacity, options, seed, epoch))
    return _pack_windows(_Window(checked, media, capacity, options, seed, epoch), options.packing_window)


def pack_trees(
    trees: PrefixTrees,
    lengths: npt.NDArray[np.integer[Any]],
    capacity: int,
    options: PackOptions = _AS_DECLARED,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> PackPlan:
    """``pack`` for samples that share prefixes: each group is packed as one, by the tokens that are computed of it.

    Args:
        trees: groups of samples, each of at most ``capacity`` tokens.
        lengths: (N,), tokens of each sample, whole.
        media_tokens: (N,), that each sample adds to its group.

    Raises:
        ConfigError, DataError: as ``pack``.
    """
    assert options.max_samples_per_pack is None, "a group is packed as one, however many samples it has"
    media = None if media_tokens is None else trees.sums_per_group(media_tokens[trees.samples])
    tokens = trees.sums_per_group(trees.new_tokens(lengths))
    groups = pack(tokens, capacity, options, seed=seed, epoch=epoch, media_tokens=media)
    if trees.parts == "apart":
        groups = apart_in_packs(groups, trees.numbers[trees.offsets[:-1]], media, options.max_media_tokens_per_pack)
    return trees.unfolded(groups, lengths)


def pack_best_fit(lengths: Lengths, capacity: int, *, seed: int, epoch: int = 0, shuffle: bool = True) -> PackPlan:
    """Best-fit decreasing over the histogram of lengths, with new companions in every epoch.

    Best-fit decreasing (Johnson, Demers, Ullman, Garey, Graham 1974, "Worst-case performance bounds for simple
    one-dimensional packing algorithms") puts every sample, the longest first, in the pack with the least room that
    still takes it, and never needs more than 11/9 of the fewest possible packs + 4. Samples of one length are alike,
    and so are packs with the same free tokens; so groups are packed, not samples (``best_fit``), and the samples'
    numbers are handed out afterwards. There are never more packs than if samples had been placed one by one; where
    these would be over 0.01 % more than are needed, a second packer (``exact_fit``) tries to do with fewer.

    Ties: of the packs with the same free tokens, those that came to it last are filled first. Which sample of a length
    goes where, and the order of the packs, are drawn from ``seed`` and ``epoch``. Where most lengths occur only once or
    a few times, that alone would bring the same companions together in every epoch: there the packers themselves leave
    something to chance, as far as that costs next to no pack. The number of packs depends on the lengths only, so every
    epoch has equally many.

    Price: O(N log N) to sort N integers, and a number of group steps that depends on the distinct lengths only (some
    30,000 for 10,000 of them, whatever N). While it is made a plan takes 30 bytes a sample at four samples a pack and
    55 at one, of which 14 and 20 are kept. All lengths must be known beforehand, and samples that lie side by side in
    the files are scattered over the packs.

    Args:
        lengths: (N,), tokens of each sample.
        capacity: tokens that a pack may hold.
        seed: of the run.
        epoch: 0-based.
        shuffle: as in ``PackOptions``.

    Raises:
        ConfigError: the capacity is not positive, or the seed or epoch is negative.
        DataError: samples that are longer than ``capacity``, or without tokens.
    """
    return pack(lengths, capacity, PackOptions(shuffle=shuffle), seed=seed, epoch=epoch)


def pack_singletons(lengths: Lengths, capacity: int, *, seed: int, epoch: int = 0, shuffle: bool = True) -> PackPlan:
    """Every sample a pack of its own: what ``--packing false`` trains, in padded batches.

    Args, errors: as for ``pack_best_fit``.
    """
    checked = check_lengths(lengths, capacity)
    samples = np.arange(len(checked), dtype=np.int64)
    if shuffle:
        samples = seeded_order(len(checked), seed=seed, epoch=epoch, stream=RandomStream.SINGLE_ORDER)
    return plan_of(samples, np.ones(len(checked), dtype=np.int64), checked, capacity)


@dataclass(frozen=True)
class _Window:
    """Samples that are packed at once, by one process.

    Args:
        stream: what is added to the numbers of the streams, so that no window draws what another has drawn.
    """

    lengths: Int32Array
    media_tokens: Int32Array | None
    capacity: int
    options: PackOptions
    seed: int
    epoch: int
    stream: int = 0


def _pack_window(window: _Window) -> PackPlan:
    lengths, media_tokens, capacity, options = window.lengths, window.media_tokens, window.capacity, window.options
    if options.packing_algorithm == "sequential":
        placed = place_sequential(
            lengths,
            capacity,
            options.look_ahead,
            max_samples=options.max_samples_per_pack,
            media_tokens=media_tokens,
            max_media_tokens=options.max_media_tokens_per_pack,
        )
        return plan_of(*placed, lengths, capacity)
    if media_tokens is not None and options.max_media_tokens_per_pack is not None:
        limits = capacity, options.max_media_tokens_per_pack, options.max_samples_per_pack or capacity
        return pack_within_budgets(
            lengths,
            media_tokens,
            limits,
            shuffle=options.shuffle,
            seed=window.seed,
            epoch=window.epoch,
            stream=window.stream,
        )
    return pack_histogram(
        lengths,
        capacity,
        max_samples=options.max_samples_per_pack,
        shuffle=options.shuffle,
        seed=window.seed,
        epoch=window.epoch,
        stream=window.stream,
    )


def _pack_windows(whole: _Window, size: int) -> PackPlan:
    """Pack windows of so many samples apart from one another."""
    lengths, media_tokens, options = whole.lengths, whole.media_tokens, whole.options
    keeps_order = options.packing_algorithm == "sequential"
    if keeps_order:
        windows = contiguous_windows(len(lengths), size)
    else:
        windows = draw_windows(len(lengths), size, seed=whole.seed)
    jobs = [
        dataclasses.replace(
            whole,
            lengths=lengths[samples],
            media_tokens=None if media_tokens is None else media_tokens[samples],
            stream=of_window(number),
        )
        for number, samples in enumerate(windows)
    ]
    plans = map_on_processes(_pack_window, jobs, options.packing_num_proc if len(lengths) >= _PROCESSES_PAY else 1)
    order = np.concatenate([samples[plan.samples] for samples, plan in zip(windows, plans, strict=True)])
    sizes = np.concatenate([np.diff(plan.offsets) for plan in plans])
    plan = plan_of(order, sizes, lengths, whole.capacity)
    return plan if keeps_order else _ordered(plan, options, whole.seed, whole.epoch)


def _pack_in_batches(lengths: Int32Array, capacity: int, options: PackOptions, seed: int, epoch: int) -> PackPlan:
    order = np.arange(len(lengths), dtype=np.int64)
    if options.shuffle:
        # Drawn for all epochs: they must have equally many packs. Equally long samples change places afterwards.
        order = seeded_order(len(lengths), seed=seed, epoch=0, stream=RandomStream.BATCHES)
    placed = place_in_batches(lengths, capacity, options.packing_batch_size, options.packing_num_proc, order)
    plan = plan_of(*placed, lengths, capacity)
    if options.shuffle:
        plan = exchange_equals(plan, lengths, seed=seed, epoch=epoch, stream=RandomStream.WITHIN_LENGTH_OF_BATCHES)
    return _ordered(plan, options, seed, epoch)


def _ordered(plan: PackPlan, options: PackOptions, seed: int, epoch: int) -> PackPlan:
    if not options.shuffle:
        return in_cache_order(plan)
    order = seeded_order(plan.num_packs, seed=seed, epoch=epoch, stream=RandomStream.PACK_ORDER)
    return with_packs_in_order(plan, order)
