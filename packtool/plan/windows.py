"""Windows of samples that are packed apart from one another, in parallel where that pays."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import numpy as np

from packtool.errors import PacktoolError
from packtool.launch.worker import PipeWorker, begin_worker, end_with_parent, portable
from packtool.plan.pack_plan import Int64Array
from packtool.plan.shuffle import RandomStream, seeded_order

Job = TypeVar("Job")
Result = TypeVar("Result")

_GLANCE_S = 0.5


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
        told: how many are done, whenever one is.

    Raises:
        PacktoolError: a process died.
        Exception: what the function raised.
    """
    num_proc = min(num_proc, len(jobs))
    # Workers of data loaders may not have children.
    if num_proc <= 1 or multiprocessing.current_process().daemon:
        return [_told(function(job), number, told) for number, job in enumerate(jobs, start=1)]
    # Forked workers would inherit locks that other threads may hold.
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, PipeWorker] = {}
    results: dict[int, Result] = {}
    given = 0
    try:
        for _ in range(num_proc):
            worker = PipeWorker(context, _work, function)
            workers[worker.pipe] = worker
        waiting = list(workers)
        while len(results) < len(jobs):
            for pipe in waiting:
                if given < len(jobs):
                    pipe.send((given, jobs[given]))
                    given += 1
            # Looked up now and then: a signal that another thread receives does not wake this one.
            waiting = [pipe for pipe in wait(list(workers), timeout=_GLANCE_S) if isinstance(pipe, Connection)]
            for pipe in waiting:
                number, found = pipe.recv()
                if isinstance(found, BaseException):
                    raise found
                results[number] = found
                told(len(results))
    except (EOFError, OSError):
        raise PacktoolError(
            "a packing process died (killed, or out of memory?)",
            "--packing-num-proc 1 packs without further processes; the plan is the same.",
        ) from None
    finally:
        for worker in workers.values():
            worker.kill()
    return [results[number] for number in range(len(jobs))]


def _told(result: Result, number: int, told: Callable[[int], None]) -> Result:
    told(number)
    return result


def _work(function: Callable[[Job], Result], pipe: Connection) -> None:
    """A worker's life: one job after the other, until it is killed."""
    begin_worker()
    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):  # nobody asks or listens any more
        while True:
            number, job = pipe.recv()
            try:
                told: Result | Exception = function(job)
            except Exception as error:
                told = portable(error)
            pipe.send((number, told))
