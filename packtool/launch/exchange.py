"""What processes tell each other that is no tensor."""

from __future__ import annotations

from typing import Any, TypeVar

from packtool.launch.processes import is_launched

T = TypeVar("T")

LOST_PEER = "another process has ended, and this one with it; what that one says is what went wrong"
# What gloo, NCCL and torch's store say when a process that they talk to is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error means that another process of the run has ended."""
    return is_launched() and any(lost in str(error) for lost in _LOST)


def all_gather_objects(mine: T, num_processes: int, group: Any = None) -> list[T]:
    """What every process has, in the order of their ranks; each of them must call this.

    Args:
        mine: of this process; anything that can be pickled.
        num_processes: of the group; a single one needs no process group.
        group: of processes; by default all of them.
    """
    if num_processes == 1:
        return [mine]
    import torch.distributed as dist  # here, because a single process may do without torch

    found: list[Any] = [None] * num_processes
    dist.all_gather_object(found, mine, group=group)
    return found
