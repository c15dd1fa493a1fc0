"""Packing: entry point of all algorithms, windows packed separately, chains of ``binpacking``, and ``sequential``."""

from __future__ import annotations

import multiprocessing
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from packtool.config.packing import PackOptions
from packtool.config.settings import bound_problems
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.worker import Job, Result, WorkerDied, WorkerPool
from packtool.planning.best_fit import pack_histogram
from packtool.planning.budgets import PackLimits, check_media_tokens, pack_within_budgets
from packtool.planning.pack_plan import (
    Int32Array,
    Int64Array,
    IntArray,
    Lengths,
    PackPlan,
    build_plan,
    check_lengths,
    select_packs,
    sort_by_sample,
    to_offsets,
)
from packtool.planning.prefix_trees import DrawnPrefixes, PrefixTrees
from packtool.planning.shuffle import RandomStream, of_window, seeded_order
from packtool.planning.tree_parts import separate_groups

_DEFAULT_OPTIONS = PackOptions()
_MIN_SAMPLES_FOR_PROCESSES = 200_000
_MIN_SAMPLES_FOR_CHAIN_PROCESSES = 20_000
BATCHES_PER_CHAIN = 64


def pack(
    lengths: Lengths,
    capacity: int,
    options: PackOptions = _DEFAULT_OPTIONS,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: IntArray | None = None,
) -> PackPlan:
    """Decide which samples share a pack: the same on every machine, and equally many packs in every epoch.

    Without shuffling, and with the algorithm ``sequential``, the order of the cache is kept as far as possible.

    ``lengths`` are tokens, (N,); ``media_tokens``, (N,), are needed with ``max_media_tokens_per_pack``.
    """
    problems = [*bound_problems(options), *options.problems(PackOptions)]
    if problems:
        raise ConfigError.from_problems(problems)
    lengths = check_lengths(lengths, capacity)
    limiting_media = check_media_tokens(media_tokens, lengths, options.max_media_tokens_per_pack, capacity)
    job = _Job(lengths, limiting_media, capacity, options, seed, epoch)
    if options.packing_algorithm == "binpacking":
        return _pack_with_binpacking(job)
    if options.packing_window is None or len(lengths) <= options.packing_window:
        return _pack_job(job)
    return _pack_windows(job, options.packing_window)


def pack_trees(
    trees: PrefixTrees,
    lengths: IntArray,
    capacity: int,
    options: PackOptions = _DEFAULT_OPTIONS,
    *,
    seed: int,
    epoch: int = 0,
    media_tokens: IntArray | None = None,
) -> PackPlan:
    """Pack the groups of prefix trees, each like one sample; return packs of samples.

    Both by sample number, (n,): ``lengths`` are tokens of complete samples, but ``media_tokens`` only those that a
    sample adds to its group. Other arguments are as for ``pack``.
    """
    assert options.max_samples_per_pack is None, "packing counts a group as one sample"
    group_tokens = trees.sums_per_group(trees.new_tokens(lengths))
    group_media = None
    if media_tokens is not None:
        new_media = media_tokens[trees.samples]  # in the order of ``trees``, as ``new_tokens``
        group_media = trees.sums_per_group(new_media)
    packs_of_groups = pack(group_tokens, capacity, options, seed=seed, epoch=epoch, media_tokens=group_media)
    if trees.part_placement == "apart":  # several groups of one tree come into different packs
        tree_of_group = trees.tree_ids[trees.offsets[:-1]]  # that of each group's first sample
        max_media = options.max_media_tokens_per_pack
        packs_of_groups = separate_groups(packs_of_groups, tree_of_group, group_media, max_media)
    return trees.expand(packs_of_groups, lengths)


def share_drawn_prefixes(
    packs: PackPlan, drawn: DrawnPrefixes, options: PackOptions, *, seed: int, epoch: int
) -> PackPlan:
    """Pack the samples of ``packs`` anew, so that prefixes of several are computed once; the same packs if none are."""
    order = np.argsort(packs.samples, kind="stable")  # equal trees whenever the samples are equal
    samples, lengths, capacity = packs.samples[order], packs.lengths[order], packs.capacity
    trees = drawn.build_trees(samples, lengths, capacity)
    if not trees.num_shared_tokens:
        return packs
    media_tokens = drawn.added_media(trees, samples)
    shared = pack_trees(trees, lengths, capacity, options, seed=seed, epoch=epoch, media_tokens=media_tokens)
    return replace(shared, samples=samples[shared.samples], mixture=packs.mixture)


def share_prefixes_in_steps(samples: PackPlan, drawn: DrawnPrefixes, samples_per_step: int) -> PackPlan:
    """Reorder the samples within each step, so that those with a common prefix are neighbors.

    ``samples`` are packs of one sample each, of which a step takes the next ``samples_per_step``. Their tokens become
    those that each adds to its prefix.
    """
    steps = np.arange(samples.num_samples) // samples_per_step
    trees = drawn.build_trees(samples.samples, samples.lengths, samples.capacity, sets=steps)
    if not trees.num_shared_tokens:
        return samples
    order, new_tokens = trees.samples, trees.new_tokens(samples.lengths)
    # Trees come in the order of their first samples, so those of a step stay together.
    assert (steps[order] == steps).all(), "samples stay in their steps"
    return replace(samples, samples=samples.samples[order], lengths=new_tokens, shared_tokens=trees.shared_tokens)


def pack_singletons(lengths: Lengths, capacity: int, *, seed: int, epoch: int = 0, shuffle: bool = True) -> PackPlan:
    """Make every sample (N,) a pack of its own, for ``--packing false``; arguments as for ``pack``."""
    checked = check_lengths(lengths, capacity)
    samples = np.arange(len(checked), dtype=np.int64)
    if shuffle:
        samples = seeded_order(len(checked), seed=seed, epoch=epoch, stream=RandomStream.SINGLE_ORDER)
    return build_plan(samples, np.ones(len(checked), dtype=np.int64), checked, capacity)


class _Job(NamedTuple):
    """Samples that one process packs by themselves: all, or those of one of several parts."""

    lengths: Int32Array
    media_tokens: Int32Array | None
    capacity: int
    options: PackOptions
    seed: int
    epoch: int
    stream: int = 0


def _pack_job(job: _Job) -> PackPlan:
    lengths, media_tokens, capacity, options, seed, epoch, stream = job
    max_samples, shuffle = options.max_samples_per_pack, options.shuffle
    # Without media tokens, their limit is not used.
    limits = PackLimits(capacity, options.max_media_tokens_per_pack or 0, max_samples or capacity)
    if options.packing_algorithm == "sequential":
        samples, pack_sizes = place_sequential(lengths, media_tokens, limits, options.look_ahead)
        return build_plan(samples, pack_sizes, lengths, capacity)
    if media_tokens is not None:
        return pack_within_budgets(
            lengths, media_tokens, limits, shuffle=shuffle, seed=seed, epoch=epoch, stream=stream
        )
    return pack_histogram(
        lengths, capacity, max_samples=max_samples, shuffle=shuffle, seed=seed, epoch=epoch, stream=stream
    )


def _pack_windows(job: _Job, window_size: int) -> PackPlan:
    num_samples = len(job.lengths)
    if job.options.packing_algorithm == "sequential":
        windows = np.split(np.arange(num_samples), range(window_size, num_samples, window_size))
        return _pack_separately(job, windows, _pack_job, _MIN_SAMPLES_FOR_PROCESSES)
    windows = draw_windows(num_samples, window_size, seed=job.seed)
    return _order_packs(_pack_separately(job, windows, _pack_job, _MIN_SAMPLES_FOR_PROCESSES), job)


def _pack_separately(
    job: _Job, parts: list[Int64Array], pack_part: Callable[[_Job], PackPlan], min_samples_for_processes: int
) -> PackPlan:
    """Pack each part of a job's samples, int64 (n,), by itself; return the packs of all parts, one after the other."""
    jobs = []
    for number, samples in enumerate(parts):
        media_tokens = None if job.media_tokens is None else job.media_tokens[samples]
        jobs.append(job._replace(lengths=job.lengths[samples], media_tokens=media_tokens, stream=of_window(number)))
    num_proc = job.options.packing_num_proc if len(job.lengths) >= min_samples_for_processes else 1
    plans = map_on_processes(pack_part, jobs, num_proc)
    order = np.concatenate([samples[plan.samples] for samples, plan in zip(parts, plans, strict=True)])
    pack_sizes = np.concatenate([np.diff(plan.offsets) for plan in plans])
    return build_plan(order, pack_sizes, job.lengths, job.capacity)


def draw_windows(num: int, window: int, *, seed: int) -> list[Int64Array]:
    """Divide ``num`` samples into random windows of about equal size, at most ``window``; int64 (n,) each, ascending.

    Adjacent samples are often alike, so windows are random; the same in all epochs, which so have equally many packs.
    """
    order = seeded_order(num, seed=seed, epoch=0, stream=RandomStream.WINDOWS)
    return [np.sort(part) for part in np.array_split(order, -(-num // window))]


def _pack_with_binpacking(job: _Job) -> PackPlan:
    """Pack chains of ``BATCHES_PER_CHAIN`` batches of samples with the library binpacking; a process packs a chain."""
    num_samples, options = len(job.lengths), job.options
    order = np.arange(num_samples, dtype=np.int64)
    if options.shuffle:
        # The same batches in all epochs, so that these have equally many packs.
        order = seeded_order(num_samples, seed=job.seed, epoch=0, stream=RandomStream.BATCHES)
    chain_size = options.packing_batch_size * BATCHES_PER_CHAIN
    chains = np.split(order, range(chain_size, num_samples, chain_size))
    plan = _pack_separately(job, chains, _pack_batches, _MIN_SAMPLES_FOR_CHAIN_PROCESSES)
    assert plan.num_samples == num_samples, "binpacking lost samples"
    if options.shuffle:
        # Each epoch draws which of the samples of equal length takes which of their places.
        stream = RandomStream.WITHIN_LENGTH_OF_BATCHES
        longest_first = seeded_order(
            num_samples, seed=job.seed, epoch=job.epoch, stream=stream, descending_by=job.lengths
        )
        places_longest_first = np.argsort(-plan.lengths, kind="stable")  # of the same lengths as ``longest_first``
        plan.samples[places_longest_first] = longest_first
    return _order_packs(plan, job)


def _packs_of_batches(job: _Job) -> Iterator[list[tuple[int, int]]]:
    """Yield packs of samples with their lengths; the last of a batch, if not full, is packed again with the next."""
    # Slow to import, and rarely needed.
    from binpacking.to_constant_volume import to_constant_volume

    batch_size = job.options.packing_batch_size
    items = list(enumerate(job.lengths.tolist()))
    carried: list[tuple[int, int]] = []  # from the last pack of the batch before
    for start in range(0, len(items), batch_size):
        stop = start + batch_size
        packs = to_constant_volume([*carried, *items[start:stop]], job.capacity, weight_pos=1)
        is_full = sum(length for _, length in packs[-1]) >= job.capacity
        carried = [] if is_full or stop >= len(items) else packs.pop()
        yield from packs


def _pack_batches(job: _Job) -> PackPlan:
    packed: list[int] = []
    pack_sizes: list[int] = []
    for pack_items in _packs_of_batches(job):
        packed += [sample for sample, _ in pack_items]
        pack_sizes.append(len(pack_items))
    return build_plan(np.array(packed, np.int64), np.array(pack_sizes, np.int64), job.lengths, job.capacity)


def _order_packs(plan: PackPlan, job: _Job) -> PackPlan:
    """Shuffle packs, or sort them by their first sample if the order is kept."""
    if not job.options.shuffle:
        return sort_by_sample(plan)
    order = seeded_order(plan.num_packs, seed=job.seed, epoch=job.epoch, stream=RandomStream.PACK_ORDER)
    return select_packs(plan, order)


def map_on_processes(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    num_proc: int,
    on_progress: Callable[[int], None] = lambda num_done: None,
) -> list[Result]:
    """Compute ``[function(job) for job in jobs]`` on processes; the result does not depend on their number.

    ``function`` must be picklable. ``on_progress`` is called with the number of finished jobs after each, in order.
    """
    num_proc = min(num_proc, len(jobs))
    # Daemonic processes, such as workers of data loaders, may not have children.
    if num_proc <= 1 or multiprocessing.current_process().daemon:
        return _collect(map(function, jobs), on_progress)
    try:
        with WorkerPool[Job, Result](num_proc, _job_function, function) as pool:
            return _collect(pool.map(jobs), on_progress)
    except WorkerDied:
        raise PacktoolError(
            "a packing process died (killed, or out of memory?)",
            "--packing-num-proc 1 packs without further processes; the plan is the same.",
        ) from None


def _collect(results: Iterable[Result], on_progress: Callable[[int], None]) -> list[Result]:
    collected = []
    for result in results:
        collected.append(result)
        on_progress(len(collected))
    return collected


def _job_function(report: object, function: Callable[[Job], Result]) -> Callable[[Job], Result]:
    """Return the function that a worker calls for each job: it reports no progress, so it is called as it is."""
    return function


_MAX_ATTEMPTS = 16


def place_next_fit(lengths: Int32Array, media_tokens: Int32Array | None, limits: PackLimits) -> Int64Array:
    """Fill packs in order, from lengths and media tokens (N,); return the samples of each pack, int64 (K,)."""
    ends = to_offsets(lengths)[1:].tolist()
    media_ends = None if media_tokens is None else to_offsets(media_tokens)[1:].tolist()
    sizes, start, tokens_before, media_before = [], 0, 0, 0
    while start < len(ends):
        stop = min(bisect_right(ends, tokens_before + limits.tokens, start), start + limits.samples)
        if media_ends is not None:
            stop = min(stop, bisect_right(media_ends, media_before + limits.media_tokens, start))
            media_before = media_ends[stop - 1]
        sizes.append(stop - start)
        start, tokens_before = stop, ends[stop - 1]
    return np.array(sizes, dtype=np.int64)


def place_sequential(
    lengths: Int32Array, media_tokens: Int32Array | None, limits: PackLimits, look_ahead: int
) -> tuple[Int64Array, Int64Array]:
    """Start each pack with the first waiting sample, and fill it from the ``look_ahead`` samples waiting after it.

    ``lengths`` and ``media_tokens`` (None for no limit), (N,), are in order; no sample exceeds ``limits``. Returns
    samples in pack order, int64 (N,), and the number of samples in each pack, (K,).
    """
    if look_ahead == 0:
        return np.arange(len(lengths)), place_next_fit(lengths, media_tokens, limits)
    media = [0] * len(lengths) if media_tokens is None else media_tokens.tolist()
    queue = _Queue(lengths.tolist(), media, look_ahead)
    order: list[int] = []
    pack_sizes: list[int] = []
    queue.refill()
    while queue.waiting:
        pack_samples = _take_pack(queue, limits)
        order += pack_samples
        pack_sizes.append(len(pack_samples))
        queue.refill()
    return np.array(order, dtype=np.int64), np.array(pack_sizes, dtype=np.int64)


def _take_pack(queue: _Queue, limits: PackLimits) -> list[int]:
    """Take the samples of one pack from the queue, the first waiting one first."""
    samples: list[int] = []
    free_tokens, free_media = limits.tokens, limits.media_tokens
    index = queue.first()
    while index >= 0:
        sample = queue.take(index)
        samples.append(sample)
        free_tokens -= queue.lengths[sample]
        free_media -= queue.media[sample]
        if len(samples) == limits.samples:
            break
        if len(samples) > 1:  # the first one is not replaced, as only ``look_ahead`` samples after it may join it
            queue.refill()
        index = queue.best(free_tokens, free_media)
    return samples


class _Queue:
    """Waiting samples: the first, and those after it that may be chosen, sorted by length.

    ``waiting`` holds ``length * N + (N - 1 - sample)``: of equally long samples the earlier ones come last, where the
    search for the longest finds them first.
    """

    def __init__(self, lengths: list[int], media: list[int], look_ahead: int) -> None:
        self.lengths, self.media = lengths, media
        self._has_media = any(media)
        self._num = len(lengths)
        self._max_waiting = look_ahead + 1
        self._next = 0  # the first sample that is not waiting yet
        self._first = 0  # no sample before it waits
        self._packed = bytearray(self._num + 1)
        self.waiting: list[int] = []

    def refill(self) -> None:
        """Let samples enter while there is space."""
        while self._next < self._num and len(self.waiting) < self._max_waiting:
            insort(self.waiting, self._key(self._next))
            self._next += 1

    def first(self) -> int:
        """Find the index in ``waiting`` of the earliest sample."""
        while self._packed[self._first]:
            self._first += 1
        return bisect_left(self.waiting, self._key(self._first))

    def take(self, index: int) -> int:
        """Remove and return the sample at an index of ``waiting``."""
        sample = self._sample_at(index)
        del self.waiting[index]
        self._packed[sample] = 1
        return sample

    def best(self, free: int, free_media: int) -> int:
        """Find the index in ``waiting`` of the sample that fills a pack best; -1 if none fits.

        It is the longest that fits, or the longer one of a pair that leaves fewer of the ``free`` tokens than that.
        """
        longest = self._longest_fitting(free, free_media)
        if longest < 0:
            return -1
        best, min_left = longest, free - self._length_at(longest)
        first = longest  # the longer sample of a pair: the longest that fits, then shorter ones
        for _ in range(_MAX_ATTEMPTS):
            if first < 0 or min_left == 0:
                break
            first_length = self._length_at(first)
            if 2 * first_length < free:
                break  # too short to be the longer sample of a pair that fills the space
            free_after_first = free - first_length
            media_after_first = free_media - self._media_at(first)
            second = self._longest_fitting(free_after_first, media_after_first, excluded=first)
            if second >= 0 and free_after_first - self._length_at(second) < min_left:
                best, min_left = first, free_after_first - self._length_at(second)
            first = self._skip_too_much_media(first - 1, free_media)  # the next shorter one that fits
        return best

    def _longest_fitting(self, free: int, free_media: int, excluded: int = -1) -> int:
        """Find the index of the longest sample that fits, the earliest of equally long ones; or -1."""
        index = bisect_right(self.waiting, (free + 1) * self._num - 1) - 1
        if index == excluded:
            index -= 1
        return self._skip_too_much_media(index, free_media)

    def _skip_too_much_media(self, index: int, free_media: int) -> int:
        """Find the next index, from ``index`` down, of a sample whose media tokens fit; or -1."""
        if self._has_media:
            while index >= 0 and self._media_at(index) > free_media:
                index -= 1
        return index

    def _key(self, sample: int) -> int:
        return self.lengths[sample] * self._num + self._num - 1 - sample

    def _sample_at(self, index: int) -> int:
        return self._num - 1 - self.waiting[index] % self._num

    def _length_at(self, index: int) -> int:
        return self.waiting[index] // self._num

    def _media_at(self, index: int) -> int:
        return self.media[self._sample_at(index)]
