"""Forks of this process in place of new ones: importing torch and transformers takes longer than most tests do.

What torchrun does for ``packtool train`` is tested with torchrun; here only what its ranks do matters.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

_FORK = multiprocessing.get_context("fork")


@contextmanager
def forked_process(function: Callable[..., Any], *args: Any, output_path: Path | None = None) -> Iterator[BaseProcess]:
    """A function that runs in a fork of this process, with a process group of its own, and is killed in the end.

    Args:
        function: a number that it returns is the exit code.
        output_path: file for its stdout and stderr.
    """
    process = _FORK.Process(target=_call, args=(output_path, function, *args))
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _call(output_path: Path | None, function: Callable[..., Any], *args: Any) -> None:
    import torch

    gc.freeze()  # what a fork has of its parent is nothing to collect, and lies in pages that are shared until touched
    os.setsid()
    torch.set_num_threads(1)  # the parent's threads are not there after a fork
    if output_path is not None:
        # Pytest has put files of its own in the place of Python's streams.
        sys.stdout = sys.stderr = output_path.open("w", buffering=1)
        for fd in (1, 2):
            os.dup2(sys.stderr.fileno(), fd)
    sys.exit(function(*args))


def run_ranks(size: int, function: Callable[..., None], *args: Any, scratch: Path) -> None:
    """Call a function on so many ranks, until all have ended well.

    Args:
        scratch: directory for what a rank has to say when it fails.
    """
    with started_ranks(size, function, *args, scratch=scratch) as processes:
        running = {process.sentinel: process for process in processes}
        # The others would wait for one that has failed.
        while running and not any(_codes(processes)):
            ended = wait([*running], PATIENCE_S)
            assert ended, f"nothing came in {PATIENCE_S:g} seconds"
            for sentinel in ended:
                running.pop(sentinel).join()
        codes = _codes(processes)
    failures = "\n".join(path.read_text() for path in sorted(scratch.glob("failed-*.txt")))
    assert codes == [0] * size, failures or f"exit codes {codes}"


def _codes(processes: Sequence[BaseProcess]) -> list[int | None]:
    return [process.exitcode for process in processes]


@contextmanager
def started_ranks(
    size: int, function: Callable[..., Any], *args: Any, scratch: Path
) -> Iterator[Sequence[BaseProcess]]:
    """Ranks that call a function each, and are killed in the end.

    Args:
        function: a number that it returns is the rank's exit code.
        scratch: directory for what a rank has to say when it fails.
    """
    with socket.socket() as server_socket:
        # Bound until the end: else whoever connects to something would be given the port before the first rank has it.
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind(("127.0.0.1", 0))
        rank_args = size, server_socket.getsockname()[1], scratch, function, *args
        processes = [_FORK.Process(target=_main, args=(rank, *rank_args)) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.join()


def _main(rank: int, size: int, port: int, scratch: Path, function: Callable[..., None], *args: Any) -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    gc.freeze()  # as in _call
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(reset_partial_state=True)  # the parent's, which is alone
    torch.cuda.is_available = lambda: False
    # The parent's threads are not there after a fork.
    torch.set_num_threads(1)
    try:
        code = function(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (scratch / f"failed-{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    sys.exit(code)
