"""Several ranks of a gloo process group as forks of this process: importing what they need takes longer than they do.

What torchrun does for ``packtool train`` is tested with torchrun; here only the ranks matter.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SECONDS = 300


def run_ranks(size: int, function: Callable[..., None], *args: Any, scratch: Path) -> None:
    """Call a function on so many ranks, until all have ended well.

    Args:
        scratch: directory for what a rank has to say when it fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_main, args=(rank, size, port, scratch, function, *args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + _SECONDS
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        # The others would wait for one that has failed.
        if any(process.exitcode for process in processes):
            break
        processes[0].join(0.05)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    said = "\n".join(path.read_text() for path in sorted(scratch.glob("failed-*.txt")))
    assert codes == [0] * size, said or f"exit codes {codes}"


def _main(rank: int, size: int, port: int, scratch: Path, function: Callable[..., None], *args: Any) -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(reset_partial_state=True)  # the parent's, which is alone
    torch.cuda.is_available = lambda: False
    # The parent's threads are not there after a fork.
    torch.set_num_threads(1)
    try:
        function(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (scratch / f"failed-{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
