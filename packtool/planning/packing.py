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
    """Group samples into packs of at most ``capacity`` tokens; for example lengths 5 3 2 4 and 8: [5 3] [2 4].

    The plan is the same on every machine, and every epoch has equally many packs. Without shuffling, and with the
    algorithm ``sequential``, samples keep their order as far as possible.

    Args:
        lengths: tokens of each sample, (N,), from 1 to ``capacity``.
        options: the packing algorithm and its limits; wrong values are a ConfigError.
        media_tokens: how many of these tokens are images, videos and sounds, (N,); needed only to limit them.
    """
    problems = [*bound_problems(options), *options.problems(PackOptions)]
    if problems:
        raise ConfigError.from_problems(problems)
    lengths = check_lengths(lengths, capacity)
    # None if no pack can exceed the limit of media tokens.
    limiting_media = check_media_tokens(media_tokens, lengths, options.max_media_tokens_per_pack, capacity)
    job = _PackingJob(lengths, limiting_media, capacity, options, seed, epoch)
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
    """Pack samples that share prefixes: each group of ``trees`` comes into one pack, as if it were one sample.

    In a group, the tokens of a shared prefix count once.

    Args:
        lengths: tokens of complete samples, by sample number, (n,).
        media_tokens: media tokens that each sample adds to its group, without those of the shared prefix, by sample
            number, (n,).
    """
    assert options.max_samples_per_pack is None, "packing counts a group as one sample"
    group_tokens = trees.sums_per_group(trees.new_tokens(lengths))  # (number of groups,)
    group_media = None
    if media_tokens is not None:
        new_media = media_tokens[trees.samples]  # in the order of ``trees``, as ``new_tokens``
        group_media = trees.sums_per_group(new_media)

    packs_of_groups = pack(group_tokens, capacity, options, seed=seed, epoch=epoch, media_tokens=group_media)
    if trees.part_placement == "apart":
        # Groups of one tree must come into different packs.
        first_samples = trees.offsets[:-1]  # of each group
        tree_of_group = trees.tree_ids[first_samples]
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


class _PackingJob(NamedTuple):
    """Samples to be packed by one process: all samples, or one of several parts."""

    lengths: Int32Array
    media_tokens: Int32Array | None
    capacity: int
    options: PackOptions
    seed: int
    epoch: int
    stream: int = 0


def _pack_job(job: _PackingJob) -> PackPlan:
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


def _pack_windows(job: _PackingJob, window_size: int) -> PackPlan:
    """Pack each window of at most ``window_size`` samples separately."""
    num_samples = len(job.lengths)
    if job.options.packing_algorithm == "sequential":
        windows = _split_every(np.arange(num_samples), window_size)
        return _pack_separately(job, windows, _pack_job, _MIN_SAMPLES_FOR_PROCESSES)
    windows = draw_windows(num_samples, window_size, seed=job.seed)
    return _shuffle_or_sort_packs(_pack_separately(job, windows, _pack_job, _MIN_SAMPLES_FOR_PROCESSES), job)


def _split_every(samples: Int64Array, part_size: int) -> list[Int64Array]:
    """Split into consecutive parts of ``part_size`` samples; the last one may be smaller."""
    return np.split(samples, range(part_size, len(samples), part_size))


def _pack_separately(
    job: _PackingJob,
    parts: list[Int64Array],
    pack_part: Callable[[_PackingJob], PackPlan],
    min_samples_for_processes: int,
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


def _pack_with_binpacking(job: _PackingJob) -> PackPlan:
    """Pack the samples of a job with the third-party library ``binpacking``.

    Samples are packed in batches of ``packing_batch_size``. A chain is a series of batches, of which each may leave
    samples to the next one. Chains do not depend on each other, so processes can pack them at the same time.

    Returns:
        A plan with every sample in exactly one pack. All epochs have equally many packs; with ``shuffle``, the
        contents and the order of the packs differ between epochs.
    """
    num_samples = len(job.lengths)
    sample_order = np.arange(num_samples, dtype=np.int64)
    if job.options.shuffle:
        # Use the order of epoch 0 in every epoch: equal batches give equally many packs.
        sample_order = seeded_order(num_samples, seed=job.seed, epoch=0, stream=RandomStream.BATCHES)

    samples_per_chain = BATCHES_PER_CHAIN * job.options.packing_batch_size
    chains = _split_every(sample_order, samples_per_chain)
    plan = _pack_separately(job, chains, _pack_chain, _MIN_SAMPLES_FOR_CHAIN_PROCESSES)
    assert plan.num_samples == num_samples, "binpacking lost samples"

    if job.options.shuffle:
        _shuffle_samples_of_equal_length(plan, job)
    return _shuffle_or_sort_packs(plan, job)


def _shuffle_samples_of_equal_length(plan: PackPlan, job: _PackingJob) -> None:
    """Exchange samples of equal length at random, in place: packs differ between epochs, but keep their lengths."""
    random_longest_first = seeded_order(
        plan.num_samples,
        seed=job.seed,
        epoch=job.epoch,
        stream=RandomStream.WITHIN_LENGTH_OF_BATCHES,
        descending_by=job.lengths,
    )
    positions_longest_first = np.argsort(-plan.lengths, kind="stable")  # in ``plan.samples``
    plan.samples[positions_longest_first] = random_longest_first


def _packs_of_batches(job: _PackingJob) -> Iterator[list[tuple[int, int]]]:
    """Pack the samples of one chain, batch by batch; yield the packs, as lists of (sample, length).

    The last pack of a batch, if it is not full, is packed again with the next batch.
    """
    # Slow to import, and rarely needed.
    from binpacking.to_constant_volume import to_constant_volume

    batch_size = job.options.packing_batch_size
    samples = list(enumerate(job.lengths.tolist()))
    leftover: list[tuple[int, int]] = []  # samples of the previous batch's last pack
    for start in range(0, len(samples), batch_size):
        stop = start + batch_size
        packs = to_constant_volume([*leftover, *samples[start:stop]], job.capacity, weight_pos=1)
        last_pack_tokens = sum(length for _, length in packs[-1])
        is_last_batch = stop >= len(samples)
        leftover = []
        if last_pack_tokens < job.capacity and not is_last_batch:
            leftover = packs.pop()
        yield from packs


def _pack_chain(job: _PackingJob) -> PackPlan:
    sample_order: list[int] = []
    pack_sizes: list[int] = []
    for pack_items in _packs_of_batches(job):
        sample_order += [sample for sample, _ in pack_items]
        pack_sizes.append(len(pack_items))
    return build_plan(np.array(sample_order, np.int64), np.array(pack_sizes, np.int64), job.lengths, job.capacity)


def _shuffle_or_sort_packs(plan: PackPlan, job: _PackingJob) -> PackPlan:
    """Order the packs at random with ``shuffle``; otherwise sort them by their first sample."""
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
    """Call ``function`` for each job, on up to ``num_proc`` processes; return the results in the order of the jobs.

    Args:
        function: must be picklable, as must jobs and results.
        num_proc: with 1, and in a daemonic process, everything is computed in this process.
        on_progress: called in this process after each job, with the number of jobs finished so far.
    """
    num_proc = min(num_proc, len(jobs))
    # Daemonic processes, such as workers of data loaders, may not have children.
    is_daemon = multiprocessing.current_process().daemon
    if num_proc <= 1 or is_daemon:
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
_NO_INDEX = -1


def place_next_fit(lengths: Int32Array, media_tokens: Int32Array | None, limits: PackLimits) -> Int64Array:
    """Fill packs with consecutive samples, each until the next sample does not fit.

    For example lengths 5 3 2 4 with at most 8 tokens: packs of 2 and 2 samples.

    Args:
        lengths: tokens of each sample, (N,), and ``media_tokens`` among them, (N,), or None if they are not limited.

    Returns:
        The number of samples in each pack, int64 (K,).
    """
    ends = to_offsets(lengths)[1:].tolist()  # tokens up to the end of each sample, (N,)
    media_ends = None if media_tokens is None else to_offsets(media_tokens)[1:].tolist()
    pack_sizes = []
    start = 0  # first sample of the pack
    tokens_before = media_before = 0  # of all earlier packs
    while start < len(ends):
        token_stop = bisect_right(ends, tokens_before + limits.tokens, start)
        stop = min(token_stop, start + limits.samples)
        if media_ends is not None:
            stop = min(stop, bisect_right(media_ends, media_before + limits.media_tokens, start))
            media_before = media_ends[stop - 1]
        pack_sizes.append(stop - start)
        tokens_before = ends[stop - 1]
        start = stop
    return np.array(pack_sizes, dtype=np.int64)


def place_sequential(
    lengths: Int32Array, media_tokens: Int32Array | None, limits: PackLimits, look_ahead: int
) -> tuple[Int64Array, Int64Array]:
    """Group N samples into packs, one pack after the other, and nearly in the order in which they are given.

    Each pack starts with the earliest unpacked sample. Then it takes samples that fill it well from a queue, which
    holds only the next few samples.

    Args:
        lengths: tokens of each sample, (N,).
        media_tokens: how many of these belong to images, videos and sounds, (N,); None if they are not limited.
        limits: maximum tokens, media tokens and samples of a pack. Each sample alone must be within them.
        look_ahead: number of samples in the queue besides the earliest one; 0 keeps the order.

    Returns:
        The sample numbers, pack by pack, int64 (N,), and the number of samples in each pack, int64 (K,).
    """
    if look_ahead == 0:
        return np.arange(len(lengths)), place_next_fit(lengths, media_tokens, limits)
    if media_tokens is None:
        media_tokens = np.zeros_like(lengths)
    queue = _SampleQueue(lengths.tolist(), media_tokens.tolist(), look_ahead)
    sample_order: list[int] = []
    pack_sizes: list[int] = []
    while queue.has_samples():
        pack_samples = _take_pack(queue, limits)
        sample_order += pack_samples
        pack_sizes.append(len(pack_samples))
    return np.array(sample_order, dtype=np.int64), np.array(pack_sizes, dtype=np.int64)


def _take_pack(queue: _SampleQueue, limits: PackLimits) -> list[int]:
    """Remove the samples of one pack from the queue, the earliest one first, and return them."""
    samples: list[int] = []
    free_tokens, free_media = limits.tokens, limits.media_tokens
    index = queue.index_of_earliest()
    while index != _NO_INDEX:
        sample = queue.take(index)
        samples.append(sample)
        free_tokens -= queue.lengths[sample]
        free_media -= queue.media[sample]
        if len(samples) == limits.samples:
            break
        if len(samples) > 1:  # the first one is not replaced, as only ``look_ahead`` samples after it may join it
            queue.refill()
        index = queue.index_of_best(free_tokens, free_media)
    return samples


class _SampleQueue:
    """Waiting samples: the first, and those after it that may be chosen, sorted by length.

    ``_waiting`` holds ``length * N + (N - 1 - sample)``: of equally long samples the earlier ones come last, where the
    search for the longest finds them first.
    """

    def __init__(self, lengths: list[int], media: list[int], look_ahead: int) -> None:
        self.lengths, self.media = lengths, media
        self._has_media = any(media)
        self._num = len(lengths)
        self._max_waiting = look_ahead + 1
        self._next_to_enter = 0  # the first sample that is not waiting yet
        self._earliest = 0  # no sample before it waits
        self._is_packed = bytearray(self._num + 1)
        self._waiting: list[int] = []

    def has_samples(self) -> bool:
        """Refill the queue, and return whether any sample is left."""
        self.refill()
        return bool(self._waiting)

    def refill(self) -> None:
        """Let the next samples enter while there is space."""
        while self._next_to_enter < self._num and len(self._waiting) < self._max_waiting:
            insort(self._waiting, self._key(self._next_to_enter))
            self._next_to_enter += 1

    def index_of_earliest(self) -> int:
        """Find the index in ``_waiting`` of the earliest sample."""
        while self._is_packed[self._earliest]:
            self._earliest += 1
        return bisect_left(self._waiting, self._key(self._earliest))

    def take(self, index: int) -> int:
        """Remove and return the sample at an index of ``_waiting``."""
        sample = self._sample_at(index)
        del self._waiting[index]
        self._is_packed[sample] = 1
        return sample

    def index_of_best(self, free_tokens: int, free_media: int) -> int:
        """Find the waiting sample that fills a pack best; return its index in ``_waiting``, or ``_NO_INDEX``.

        It is the longest one that fits, or the longer one of a pair that leaves fewer tokens free. For example, 10
        free tokens and waiting lengths 8, 6, 4: 8 alone leaves 2, but 6 and 4 leave none, so the choice is 6.

        Args:
            free_tokens, free_media: tokens, and media tokens, that the pack can still take.
        """
        longest = self._longest_fitting(free_tokens, free_media)
        if longest == _NO_INDEX:
            return _NO_INDEX
        best = longest
        min_gap = free_tokens - self._length_at(longest)  # tokens left free by the best choice so far
        longer = longest  # the longer sample of a pair
        for _ in range(_MAX_ATTEMPTS):
            if longer == _NO_INDEX or min_gap == 0:
                break
            longer_length = self._length_at(longer)
            if 2 * longer_length < free_tokens:
                break  # too short: no pair can fill the space any more
            free_beside = free_tokens - longer_length
            media_beside = free_media - self._media_at(longer)
            shorter = self._longest_fitting(free_beside, media_beside, excluded=longer)
            if shorter != _NO_INDEX:
                gap = free_beside - self._length_at(shorter)
                if gap < min_gap:
                    best, min_gap = longer, gap
            longer = self._skip_too_much_media(longer - 1, free_media)  # the next shorter one that fits
        return best

    def _longest_fitting(self, free_tokens: int, free_media: int, excluded: int | None = None) -> int:
        """Find the index of the longest sample that fits, the earliest of equally long ones, or ``_NO_INDEX``."""
        index = bisect_right(self._waiting, (free_tokens + 1) * self._num - 1) - 1
        if index == excluded:
            index -= 1
        return self._skip_too_much_media(index, free_media)

    def _skip_too_much_media(self, index: int, free_media: int) -> int:
        """Find the next index, from ``index`` down, of a sample whose media tokens fit, or ``_NO_INDEX``."""
        if self._has_media:
            while index >= 0 and self._media_at(index) > free_media:
                index -= 1
        return index

    def _key(self, sample: int) -> int:
        return self.lengths[sample] * self._num + self._num - 1 - sample

    def _sample_at(self, index: int) -> int:
        return self._num - 1 - self._waiting[index] % self._num

    def _length_at(self, index: int) -> int:
        return self._waiting[index] // self._num

    def _media_at(self, index: int) -> int:
        return self.media[self._sample_at(index)]
