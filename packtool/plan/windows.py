"""Windows of samples that are packed apart from one another, in parallel where that pays."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import numpy as np

from packtool.errors import PacktoolError
from packtool.plan.pack_plan import Int64Array
from packtool.plan.shuffle import seeded_order

Job = TypeVar("Job")
Result = TypeVar("Result")

_WINDOWS = 6  # a stream of random numbers, see ``plan.packing``


def draw_windows(num: int, window: int, *, seed: int) -> list[Int64Array]:
    """Deal ``num`` samples to windows of at most ``window``, all of about one size, by chance.

    Chance, because neighbours are often alike: where a cache is sorted by length, windows of neighbours would lack the
    short samples that fill gaps. The windows do not depend on the epoch, so that every epoch has equally many packs.

    Returns:
        The samples of each window, ascending.
    """
    order = seeded_order(num, seed=seed, epoch=0, stream=_WINDOWS)
    return [np.sort(part) for part in np.array_split(order, -(-num // window))]


def contiguous_windows(num: int, window: int) -> list[Int64Array]:
    """Windows of neighbours, for packing that keeps the order."""
    return [np.arange(start, min(start + window, num)) for start in range(0, num, window)]


def map_on_processes(function: Callable[[Job], Result], jobs: Sequence[Job], num_proc: int) -> list[Result]:
    """``[function(job) for job in jobs]`` on so many processes; the result does not depend on how many.

    Args:
        function: of a module, so that it can be sent to the processes.

    Raises:
        PacktoolError: a process died.
    """
    num_proc = min(num_proc, len(jobs))
    # Workers of data loaders may not have children.
    if num_proc <= 1 or multiprocessing.current_process().daemon:
        return [function(job) for job in jobs]
    # Forked workers would inherit locks that other threads may hold.
    with ProcessPoolExecutor(num_proc, multiprocessing.get_context("spawn")) as pool:
        try:
            return list(pool.map(function, jobs))
        except BrokenProcessPool:
            raise PacktoolError(
                "a packing process died (killed, or out of memory?)",
                "--packing-num-proc 1 packs without further processes; the plan is the same.",
            ) from None
