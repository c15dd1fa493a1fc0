"""Packing: one entry to all algorithms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.packing import PackingAlgorithm, budget_problems
from packtool.errors import ConfigError
from packtool.plan.batches import place_in_batches
from packtool.plan.budgets import check_media_tokens, pack_within_budgets
from packtool.plan.histogram import pack_histogram
from packtool.plan.pack_plan import (
    MAX_CAPACITY,
    Int32Array,
    Int64Array,
    Lengths,
    PackPlan,
    check_lengths,
    digest_arrays,
    exchange_equals,
    in_cache_order,
    plan_of,
    with_packs_in_order,
)
from packtool.plan.sequential import place_sequential
from packtool.plan.shuffle import seeded_order
from packtool.plan.windows import contiguous_windows, draw_windows, map_on_processes

__all__ = [
    "MAX_CAPACITY",
    "Int32Array",
    "Int64Array",
    "Lengths",
    "PackOptions",
    "PackPlan",
    "check_lengths",
    "digest_arrays",
    "pack",
    "pack_best_fit",
    "pack_singletons",
]

# Streams of random numbers: what they are drawn for. Others: 0, 1, 3, 5, 9 and 10 in histogram and budgets, 4 in epoch,
# 6 in windows; those of a window come after all these.
_PACK_ORDER = 1
_SINGLETON_ORDER = 2
_BATCHES = 7
_WITHIN_LENGTH = 8
_STREAMS_PER_WINDOW = 16

_PROCESSES_PAY = 200_000
"""Samples below which starting processes takes longer than packing."""


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What decides which samples share a pack.

    Args:
        capacity: tokens that a pack may hold.
        algorithm: see ``pack``.
        window: samples that are packed together; None for all at once.
        num_proc: processes that pack windows or batches; the plan is the same for any number.
        batch_size: samples that ``binpacking`` gives to the library at a time.
        look_ahead: samples behind the first that waits which ``sequential`` may choose from.
        max_samples, max_media_tokens: what a pack may hold besides ``capacity``; None for as many as fit.
        shuffle: False keeps to the order of the cache and makes every epoch alike.
    """

    capacity: int
    algorithm: PackingAlgorithm = "best_fit"
    window: int | None = None
    num_proc: int = 1
    batch_size: int = 1000
    look_ahead: int = 64
    max_samples: int | None = None
    max_media_tokens: int | None = None
    shuffle: bool = True

    def check(self) -> None:
        """Raise a ConfigError that lists what is out of range, and budgets that the algorithm does not keep."""
        at_least_one = {
            "--packing-window": self.window,
            "--packing-num-proc": self.num_proc,
            "--packing-batch-size": self.batch_size,
            "--max-samples-per-pack": self.max_samples,
            "--max-media-tokens-per-pack": self.max_media_tokens,
        }
        problems = [
            f"{name} is {value}; it must be 1 or more."
            for name, value in at_least_one.items()
            if value is not None and value < 1
        ]
        if self.look_ahead < 0:
            problems.append(f"--look-ahead is {self.look_ahead}; it must be 0 or more.")
        problems += budget_problems(self.algorithm, self.max_samples, self.max_media_tokens)
        if problems:
            raise ConfigError.from_problems(problems)


def pack(
    lengths: Lengths,
    options: PackOptions,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: npt.NDArray[np.integer[Any]] | None = None,
) -> PackPlan:
    """Decide which samples share a pack: a pure function, the same on every machine.

    ``best_fit``: see ``pack_best_fit``; with a budget of media tokens, ``budgets``. ``first_fit``: first-fit decreasing
    over the histogram, to compare with. ``binpacking``: the library, see ``batches``. ``sequential``: next fit with a
    look ahead, see ``sequential``; it keeps to the order of the cache whatever ``shuffle`` says.

    Companions and the order of packs are drawn from ``seed`` and ``epoch``; every epoch has as many packs as the
    others. Where nothing is shuffled, companions are what the algorithm makes of equally long samples taken in order,
    samples ascend within a pack, and the pack with the first sample comes first. Windows and the batches of
    ``binpacking`` are drawn from ``seed`` only, or lie side by side where the order is kept.

    Args:
        lengths: (N,), tokens of each sample.
        options: see ``PackOptions``.
        seed: of the run.
        epoch: 0-based.
        media_tokens: (N,), of each sample; needed with ``max_media_tokens``.

    Raises:
        ConfigError: an option, the seed or the epoch is out of range, or the algorithm does not keep a budget.
        DataError: samples that are over a budget of a pack, or without tokens.
    """
    options.check()
    checked = check_lengths(lengths, options.capacity)
    media = check_media_tokens(media_tokens, checked, options.max_media_tokens, options.capacity)
    if media is None:
        options = dataclasses.replace(options, max_media_tokens=None)
    if options.algorithm == "binpacking":
        return _pack_in_batches(checked, options, seed, epoch)
    if options.window is None or len(checked) <= options.window:
        return _pack_window((checked, media, options, seed, epoch, 0))
    return _pack_windows(checked, media, options, seed, epoch)


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
    return pack(lengths, PackOptions(capacity=capacity, shuffle=shuffle), seed=seed, epoch=epoch)


def pack_singletons(lengths: Lengths, capacity: int, *, seed: int, epoch: int = 0, shuffle: bool = True) -> PackPlan:
    """Every sample a pack of its own: what ``--packing false`` trains, in padded batches.

    Args, errors: as for ``pack_best_fit``.
    """
    checked = check_lengths(lengths, capacity)
    samples = np.arange(len(checked), dtype=np.int64)
    if shuffle:
        samples = seeded_order(len(checked), seed=seed, epoch=epoch, stream=_SINGLETON_ORDER)
    return plan_of(samples, np.ones(len(checked), dtype=np.int64), checked, capacity)


_Window = tuple[Int32Array, Int32Array | None, PackOptions, int, int, int]


def _pack_window(window: _Window) -> PackPlan:
    """Pack samples at once; a tuple, so that it can be sent to another process: the last is added to the streams."""
    lengths, media_tokens, options, seed, epoch, stream = window
    if options.algorithm == "sequential":
        placed = place_sequential(
            lengths,
            options.capacity,
            options.look_ahead,
            max_samples=options.max_samples,
            media_tokens=media_tokens,
            max_media_tokens=options.max_media_tokens,
        )
        return plan_of(*placed, lengths, options.capacity)
    if media_tokens is not None and options.max_media_tokens is not None:
        limits = options.capacity, options.max_media_tokens, options.max_samples or options.capacity
        return pack_within_budgets(
            lengths, media_tokens, limits, shuffle=options.shuffle, seed=seed, epoch=epoch, stream=stream
        )
    return pack_histogram(
        lengths,
        options.capacity,
        algorithm="first_fit" if options.algorithm == "first_fit" else "best_fit",
        max_samples=options.max_samples,
        shuffle=options.shuffle,
        seed=seed,
        epoch=epoch,
        stream=stream,
    )


def _pack_windows(
    lengths: Int32Array, media_tokens: Int32Array | None, options: PackOptions, seed: int, epoch: int
) -> PackPlan:
    assert options.window is not None
    keeps_order = options.algorithm == "sequential"
    if keeps_order:
        windows = contiguous_windows(len(lengths), options.window)
    else:
        windows = draw_windows(len(lengths), options.window, seed=seed)
    jobs: list[_Window] = [
        (
            lengths[samples],
            None if media_tokens is None else media_tokens[samples],
            options,
            seed,
            epoch,
            _STREAMS_PER_WINDOW * (1 + number),
        )
        for number, samples in enumerate(windows)
    ]
    plans = map_on_processes(_pack_window, jobs, options.num_proc if len(lengths) >= _PROCESSES_PAY else 1)
    order = np.concatenate([samples[plan.samples] for samples, plan in zip(windows, plans, strict=True)])
    sizes = np.concatenate([np.diff(plan.offsets) for plan in plans])
    plan = plan_of(order, sizes, lengths, options.capacity)
    return plan if keeps_order else _ordered(plan, options, seed, epoch)


def _pack_in_batches(lengths: Int32Array, options: PackOptions, seed: int, epoch: int) -> PackPlan:
    order = np.arange(len(lengths), dtype=np.int64)
    if options.shuffle:
        # Drawn for all epochs: they must have equally many packs. Equally long samples change places afterwards.
        order = seeded_order(len(lengths), seed=seed, epoch=0, stream=_BATCHES)
    placed = place_in_batches(lengths, options.capacity, options.batch_size, options.num_proc, order)
    plan = plan_of(*placed, lengths, options.capacity)
    if options.shuffle:
        plan = exchange_equals(plan, lengths, seed=seed, epoch=epoch, stream=_WITHIN_LENGTH)
    return _ordered(plan, options, seed, epoch)


def _ordered(plan: PackPlan, options: PackOptions, seed: int, epoch: int) -> PackPlan:
    if not options.shuffle:
        return in_cache_order(plan)
    order = seeded_order(plan.num_packs, seed=seed, epoch=epoch, stream=_PACK_ORDER)
    return with_packs_in_order(plan, order)
