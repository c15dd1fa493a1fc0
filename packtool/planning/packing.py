"""Packing: the entry to all algorithms, windows of samples that are packed apart, and batches of ``binpacking``."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.packing import PackOptions
from packtool.config.settings import bound_problems
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.worker import Job, Result, WorkerDied, WorkerPool
from packtool.planning.budgets import check_media_tokens, pack_within_budgets
from packtool.planning.histogram import pack_histogram
from packtool.planning.pack_plan import (
    Int32Array,
    Int64Array,
    Lengths,
    PackPlan,
    check_lengths,
    exchange_equals,
    in_cache_order,
    plan_of,
    with_packs_in_order,
)
from packtool.planning.prefix_trees import PrefixTrees
from packtool.planning.sequential import place_sequential
from packtool.planning.shuffle import RandomStream, of_window, seeded_order
from packtool.planning.tree_parts import apart_in_packs


def draw_windows(num: int, window: int, *, seed: int) -> list[Int64Array]:
    """Assign ``num`` samples to windows of at most ``window``, all of about one size, by chance.

    Chance, because neighbours are often alike: where a cache is sorted by length, windows of neighbours would lack the
    short samples that fill gaps. The windows do not depend on the epoch, so that every epoch has equally many packs.

    Returns:
        The samples of each window, int64 (n,), ascending.
    """
    order = seeded_order(num, seed=seed, epoch=0, stream=RandomStream.WINDOWS)
    return [np.sort(part) for part in np.array_split(order, -(-num // window))]


def contiguous_windows(num: int, window: int) -> list[Int64Array]:
    """Windows of neighbours, int64 (n,) each, for packing that keeps the order."""
    return [np.arange(start, min(start + window, num)) for start in range(0, num, window)]


def map_on_processes(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    num_proc: int,
    told: Callable[[int], None] = lambda num_done: None,
) -> list[Result]:
    """``[function(job) for job in jobs]`` on so many processes; the result does not depend on how many.

    Args:
        function: of a module, so that it can be sent to the processes.
        told: called with the number of jobs done after each, in the order of the jobs.

    Raises:
        PacktoolError: a process died.
        Exception: what the function raised.
    """
    num_proc = min(num_proc, len(jobs))
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        # Workers of data loaders may not have children.
        if num_proc <= 1 or multiprocessing.current_process().daemon:
            iterator: Iterator[Result] = map(function, jobs)
        else:
            iterator = stack.enter_context(WorkerPool[Job, Result](num_proc, _runner, function)).map(jobs)
        try:
            for result in iterator:
                results.append(result)
                told(len(results))
        except WorkerDied:
            raise PacktoolError(
                "a packing process died (killed, or out of memory?)",
                "--packing-num-proc 1 packs without further processes; the plan is the same.",
            ) from None
    return results


def _runner(report: object, function: Callable[[Job], Result]) -> Callable[[Job], Result]:
    return function


BATCHES_PER_CHAIN = 64
_MANY = 20_000

_Chain = tuple[Int64Array, Int32Array, int, int]


def place_in_batches(
    lengths: Int32Array, capacity: int, batch_size: int, num_proc: int, order: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Give samples to ``binpacking.to_constant_volume`` so many at a time; the last pack, if not full, goes on.

    What the library does differs: 1.5.2 puts a sample into the fullest pack that takes it, 2.0.1 into the emptiest.
    With both, samples go in falling order, and the time grows with the square of the batch.

    ms-swift has one chain of batches a process, so that its packs depend on how many there are. Here a chain has 64
    batches, whatever the processes.

    Args:
        lengths: (N,), from 1 to ``capacity``.
        capacity: tokens that a pack may hold.
        batch_size: samples of a batch, besides those that go on from the batch before.
        num_proc: processes.
        order: (N,), in which samples come into batches.

    Returns:
        int64 (N,) the samples in pack order, and (K,) how many are in each pack.
    """
    step = batch_size * BATCHES_PER_CHAIN
    parts = [order[start : start + step] for start in range(0, len(order), step)]
    chains: list[_Chain] = [(part, lengths[part], capacity, batch_size) for part in parts]
    results = map_on_processes(_pack_chain, chains, num_proc if len(order) >= _MANY else 1)
    nothing = np.zeros(0, dtype=np.int64)
    packed = np.concatenate([nothing, *(packed for packed, _ in results)])
    sizes = np.concatenate([nothing, *(sizes for _, sizes in results)])
    assert len(packed) == len(lengths) == sizes.sum(), "binpacking neither loses samples nor makes empty packs"
    return packed, sizes


def _pack_chain(chain: _Chain) -> tuple[Int64Array, Int64Array]:
    # Takes a moment, and most plans do without.
    from binpacking.to_constant_volume import to_constant_volume

    samples, lengths, capacity, batch_size = chain
    items = list(zip(samples.tolist(), lengths.tolist(), strict=True))
    packs: list[list[tuple[int, int]]] = []
    waiting: list[tuple[int, int]] = []
    for start in range(0, len(items), batch_size):
        made = to_constant_volume([*waiting, *items[start : start + batch_size]], capacity, weight_pos=1)
        waiting = []
        if start + batch_size < len(items) and sum(length for _, length in made[-1]) < capacity:
            waiting = made.pop()
        packs += made
    # It answers an empty list with one empty pack.
    packs = [pack for pack in packs if pack]
    packed = np.array([sample for pack in packs for sample, _ in pack], dtype=np.int64)
    return packed, np.array([len(pack) for pack in packs], dtype=np.int64)


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
    if problems := [*bound_problems(options), *options.problems(PackOptions)]:
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
