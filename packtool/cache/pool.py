"""Tasks on worker processes of this machine."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from packtool.cache.task import Report, Task, TaskResult, run_task
from packtool.config.export import EncodeSpec
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import PacktoolError

_POLL_SECONDS = 0.5
_NUM_COUNTS = 3  # rows, drops, tokens


@dataclass(frozen=True)
class Work:
    """What all tasks of an export share.

    Args:
        directory: of the cache; None counts and writes nothing.
    """

    spec: EncodeSpec
    directory: str | None
    strict: bool


def run_tasks(
    tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], num_proc: int, report: Report
) -> Iterator[TaskResult]:
    """Run tasks and give their results as they finish, in any order.

    Args:
        encoder: makes one for this process, if the tasks run here.
        report: told of rows, drops and tokens while tasks run.

    Raises:
        PacktoolError: whatever a task raised; the others are stopped. Or a worker died.
    """
    if num_proc == 1 or len(tasks) <= 1:
        if tasks:
            here = encoder()
            for task in tasks:
                yield run_task(task, here, work.directory, work.strict, report)
        return
    # Forked workers would inherit locks that the tokenizer's or Arrow's threads may hold.
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", _NUM_COUNTS)
    num_proc = min(num_proc, len(tasks))
    pool = ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=(work, counts))
    told = [0] * _NUM_COUNTS
    try:
        futures = [pool.submit(_run_in_worker, task) for task in tasks]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            now = counts[:]
            if now != told:
                report(*(new - old for new, old in zip(now, told, strict=True)))
                told = now
            for future in done:
                yield _result(future, futures)
    except BaseException:
        kill(pool)
        raise
    pool.shutdown()


def _result(future: Future[TaskResult], futures: Sequence[Future[TaskResult]]) -> TaskResult:
    try:
        return future.result()
    except BrokenProcessPool:
        # A worker whose start failed breaks the pool; the reason lies in the pool's log, on stderr.
        done = sum(other.done() and other.exception() is None for other in futures)
        raise PacktoolError(
            f"a worker process died after {done} of {len(futures)} shards (killed, or out of memory?)",
            "Run the same command again to go on after the finished shards; fewer --dataset-num-proc need less memory.",
        ) from None


def kill(pool: ProcessPoolExecutor) -> None:
    """End workers at once: what they were writing has no marker and will be written again."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    for process in processes:
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Work, Encoder, Any] | None = None


def _start_worker(work: Work, counts: Any) -> None:
    global _worker
    # Ctrl-C reaches the whole group; the parent is the one that answers it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # The workers are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = work, Encoder(work.spec, ModelFiles.load(work.spec.model, work.spec.chat_template)), counts


def end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _run_in_worker(task: Task) -> TaskResult:
    assert _worker is not None, "the pool's initializer ran first"
    work, encoder, counts = _worker

    def report(*more: int) -> None:
        with counts.get_lock():
            for i, count in enumerate(more):
                counts[i] += count

    return run_task(task, encoder, work.directory, work.strict, report)
