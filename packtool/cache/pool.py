"""Tasks on worker processes of this machine.

Workers speak with this process through one pipe each: see ``launch.worker``.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from types import SimpleNamespace
from typing import Self

import pyarrow as pa

from packtool.cache.task import Report, Task, TaskResult, Work, run_task
from packtool.config.export import EncodeSpec
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import PacktoolError
from packtool.launch.worker import PipeWorker, begin_worker, end_with_parent, portable, tokenize_in_one_thread

_TOLD_EVERY_S = 0.25
_GLANCE_S = 0.5


def run_tasks(
    tasks: Sequence[Task], work: Work, encoder: Callable[[], Encoder], workers: Workers, report: Report
) -> Iterator[TaskResult]:
    """Run tasks and give their results as they finish, in any order.

    Args:
        encoder: makes one for this process, if the tasks run here.
        workers: of which as many are taken as there is work for; they have ended afterwards.
        report: told of rows, drops and tokens while tasks run.

    Raises:
        PacktoolError: whatever a task raised; the others are stopped. Or a worker died.
    """
    if workers.num_proc == 1 or len(tasks) <= 1:
        if tasks:
            here = encoder()
            for task in tasks:
                yield run_task(task, here, work, report)
        return
    waiting = list(reversed(tasks))
    busy: dict[Connection, _Worker] = {}
    try:
        for worker in workers.take(len(tasks)):
            busy[worker.pipe] = worker
            worker.give(work)
            worker.give(waiting.pop())
        num_done = 0
        while busy:
            # Looked up now and then: a signal that another thread receives does not wake this one.
            for pipe in multiprocessing.connection.wait(list(busy), timeout=_GLANCE_S):
                assert isinstance(pipe, Connection)
                told = busy[pipe].hear(f"{num_done} of {len(tasks)}")
                if isinstance(told, TaskResult):
                    num_done += 1
                    # The next task first: whoever takes the result may take his time.
                    if waiting:
                        busy[pipe].give(waiting.pop())
                    else:
                        busy.pop(pipe).kill()  # at once: it holds nothing, and clearing up would take it a while
                    yield told
                elif told is not None:
                    report(*told)
    finally:
        for worker in busy.values():
            worker.kill()


class Workers:
    """The processes of an export. Loading a tokenizer takes them a second, so they may begin before there are tasks.

    Args:
        spec: of all tasks.
        num_proc: how many processes; one works in this process.
        enough: expected rows with which they begin.
    """

    def __init__(self, spec: EncodeSpec, num_proc: int, enough: int) -> None:
        self._spec, self.num_proc, self._missing = spec, num_proc, enough
        self._idle: list[_Worker] = []
        self._can_encode = False
        self._next_glance = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().kill()

    def begin(self) -> None:
        """Start all of them, because there will be work for all."""
        if self.num_proc > 1:
            self._start(self.num_proc)

    @property
    def have_begun(self) -> bool:
        """Whether they make their encoders, or have them."""
        return bool(self._idle)

    def expect(self, num_rows: int) -> None:
        """Begin if there are rows enough for several workers with so many more.

        Raises:
            ConfigError: if workers that have begun found out that the model cannot be encoded for.
            PacktoolError: if one died.
        """
        self._missing -= num_rows
        if self.have_begun:
            # Asked for each of many thousand files.
            if (now := time.monotonic()) >= self._next_glance:
                self._next_glance = now + _GLANCE_S
                self._hear_first(0.0)
        elif self._missing <= 0:
            self.begin()

    def wait(self) -> None:
        """Wait until workers that have begun can encode.

        Raises:
            ConfigError, PacktoolError: as ``expect``.
        """
        while self.have_begun and not self._can_encode:
            self._hear_first(_GLANCE_S)

    def _hear_first(self, wait_s: float) -> None:
        if not self._can_encode and self._idle[0].pipe.poll(wait_s):
            self._idle[0].hear("0")
            self._can_encode = True

    def take(self, most: int) -> Iterator[_Worker]:
        """Take up to ``most`` workers, started if they are not; they are the caller's to end."""
        most = min(most, self.num_proc)
        self._start(most)
        for _ in range(most):
            yield self._idle.pop()

    def _start(self, num: int) -> None:
        # Forked workers would inherit locks that the tokenizer's or Arrow's threads may hold.
        context = multiprocessing.get_context("spawn")
        while len(self._idle) < num:
            self._idle.append(_Worker(context, self._spec))


class _Worker(PipeWorker):
    """A process that runs one task after the other; what it was writing when it ended has no marker."""

    def __init__(self, context: SpawnContext, spec: EncodeSpec) -> None:
        super().__init__(context, _work, spec)

    def give(self, item: Work | Task) -> None:
        """First what all its tasks share, then a task at a time."""
        with suppress(OSError):  # it died, which is heard next
            self.pipe.send(item)

    def hear(self, done: str) -> TaskResult | tuple[int, int, int] | None:
        """What it says: a task is done, rows, drops and tokens of one under way, or None at first: it can encode.

        Args:
            done: shards, for the message.

        Raises:
            PacktoolError: that it met, or that it died.
        """
        try:
            told: TaskResult | tuple[int, int, int] | BaseException | None = self.pipe.recv()
        except (EOFError, OSError):
            raise PacktoolError(
                f"a worker process died after {done} shards (killed, or out of memory?)",
                "Run the same command again to go on after the finished shards; fewer --dataset-num-proc need less "
                "memory.",
            ) from None
        if isinstance(told, BaseException):
            raise told
        return told


def _work(spec: EncodeSpec, pipe: Connection) -> None:
    """Encode tasks as they come, until it is killed: the main function of a worker process."""
    begin_worker()
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenize_in_one_thread()
    _leave_pandas_out()
    teller = _Teller(pipe)
    try:
        encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template))
        gc.freeze()  # what was loaded stays: it need not be looked through for garbage again and again
        pipe.send(None)
        work = pipe.recv()
        while True:
            result = run_task(pipe.recv(), encoder, work, teller)
            teller.tell()
            pipe.send(result)
    except Exception as error:
        with suppress(OSError):  # nobody listens any more
            pipe.send(portable(error))


def _leave_pandas_out() -> None:
    """Let pyarrow find no pandas in this process, as where none is installed.

    With the first array that it makes it imports pandas, only to ask whether it was given one of its kinds: a quarter
    of the time that a worker needs to begin.
    """
    finder = SimpleNamespace(find_spec=_no_pandas)
    sys.meta_path.insert(0, finder)
    pa.array([])  # looks for it, this once
    sys.meta_path.remove(finder)


def _no_pandas(name: str, *_: object) -> None:
    if name == "pandas":
        raise ImportError(f"{name} is not looked for")


class _Teller:
    """Hands counts on, a few times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._counts = [0, 0, 0]
        self._told = time.monotonic()

    def __call__(self, rows: int, dropped: int, tokens: int) -> None:
        self._counts = [count + more for count, more in zip(self._counts, (rows, dropped, tokens), strict=True)]
        if time.monotonic() - self._told >= _TOLD_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Send the counts that were not sent yet."""
        self._pipe.send(tuple(self._counts))
        self._counts, self._told = [0, 0, 0], time.monotonic()
