"""Worker processes and their pool: order, progress, errors and deaths."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable

import pytest

from packtool.errors import DataError
from packtool.launch.worker import WorkerDied, WorkerPool
from tests.waiting import check_process_ends, interrupt_repeatedly


def make(report: Callable[..., None], offset: int) -> Callable[[int], int]:
    if offset < 0:
        raise DataError("a negative offset")

    def run(job: int) -> int:
        if job == 99:
            os._exit(1)
        if job == 98:
            raise DataError(f"job {job}")
        report(job, 1)
        time.sleep(0.3 if job == 0 else 0)
        return job + offset

    return run


def test_results_and_progress_in_both_orders() -> None:
    jobs = range(20)
    progress: list[tuple[int, int]] = []
    with WorkerPool[int, int](2, make, 100) as pool:
        assert list(pool.map(jobs, report=lambda *counts: progress.append(counts))) == [100 + job for job in jobs]
        assert sorted(progress) == [(job, 1) for job in jobs]
        results = list(pool.map(jobs, in_order=False))
        assert results[0] != 100, "the first job takes longest"
        assert sorted(results) == [100 + job for job in jobs]
    assert not multiprocessing.active_children()


def test_the_number_of_submitted_jobs_is_limited() -> None:
    submitted: list[int] = []
    with WorkerPool[int, int](2, make, 0) as pool:
        results = pool.map((submitted.append(job) or job for job in range(20)), num_ahead=3)
        assert next(results) == 0
        assert submitted == [0, 1, 2]
        assert next(results) == 1
        assert submitted == [0, 1, 2, 3]


@pytest.mark.parametrize("in_order", [False, True])
def test_errors_and_killed_workers_end_the_map(in_order: bool) -> None:
    with WorkerPool[int, int](2, make, 0) as pool:
        with pytest.raises(DataError, match="job 98"):
            list(pool.map([1, 98, 2], in_order=in_order))
        with pytest.raises(WorkerDied):
            list(pool.map([1, 99, 2], in_order=in_order))
    assert not multiprocessing.active_children()


def test_errors_of_the_start_are_raised_by_check_and_by_map() -> None:
    with WorkerPool[int, int](1, make, -1) as pool:
        pool.check_ready()
        pool.start(1)
        with pytest.raises(DataError, match="a negative offset"):
            pool.check_ready(None)
    with WorkerPool[int, int](1, make, -1) as pool, pytest.raises(DataError, match="a negative offset"):
        list(pool.map([1]))


def test_jobs_that_cannot_be_pickled_are_errors() -> None:
    with WorkerPool[object, int](1, make, 0) as pool, pytest.raises(Exception, match="pickle"):
        list(pool.map([lambda: None]))


def _interrupt_a_pool() -> None:
    with WorkerPool[int, int](2, make, 0) as pool:
        list(pool.map([1, 2]))
        interrupt_repeatedly(lambda: deque(pool.map(itertools.repeat(1)), maxlen=0))
        assert list(pool.map([1, 2])) == [1, 2]


def test_interrupts_do_not_stop_the_pool_from_ending() -> None:
    """A thread of the pool would wait forever for a lock that the interrupted code holds."""
    check_process_ends(_interrupt_a_pool)
