"""Which of how many processes this is, as torchrun says.

The GPUs of this machine by the names that their driver tells, without loading torch or the driver's libraries.

What processes tell each other that is no tensor.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError

_INSIDE = ("LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was started by torchrun; ``environ`` stands for its environment."""
    values = os.environ if environ is None else environ
    return any(values.get(name) for name in _INSIDE)


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Args:
        rank: 0-based number of this one.
        size: how many there are.
        sequence_parallel_size: those that share each sequence; they are next to each other.
    """

    rank: int = 0
    size: int = 1
    sequence_parallel_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """The world that ``RANK`` and ``WORLD_SIZE`` tell, which torchrun sets; one process without them.

        Raises:
            ConfigError: if they are not numbers that fit each other.
        """
        values = os.environ if environ is None else environ
        rank, size = values.get("RANK", "0"), values.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise ConfigError(
                f"RANK={rank} and WORLD_SIZE={size} in the environment do not name one of several processes",
                "torchrun sets them; unset both, and give NPROC_PER_NODE to train in several processes.",
            )
        return cls(int(rank), int(size))

    def shared_by(self, sequence_parallel_size: int) -> World:
        """The same processes, so many of which share each sequence.

        Raises:
            ConfigError: if they cannot be divided so.
        """
        if self.size % sequence_parallel_size:
            raise ConfigError(
                f"--sequence-parallel-size {sequence_parallel_size}: {self._counted} cannot be divided into groups of "
                f"{sequence_parallel_size}",
                f"NPROC_PER_NODE={sequence_parallel_size} in front, or a multiple of it, starts enough.",
            )
        return dataclasses.replace(self, sequence_parallel_size=sequence_parallel_size)

    def check_shards(self, config: TrainConfig) -> None:
        """Raise for a run whose weights cannot be spread over the processes that there are.

        Raises:
            ConfigError: with what starts more.
        """
        if config.fsdp and self.size == 1:
            raise ConfigError(
                f"--fsdp {' '.join(config.fsdp)} spreads weights over processes, and there is one",
                "NPROC_PER_NODE=8 in front starts eight; leave --fsdp out to train in one.",
            )
        if self.size % config.expert_parallel_size:
            raise ConfigError(
                f"--expert-parallel-size {config.expert_parallel_size}: {self._counted} cannot be divided into groups "
                f"of {config.expert_parallel_size}",
                f"NPROC_PER_NODE={config.expert_parallel_size} in front, or a multiple of it, starts enough.",
            )

    @property
    def _counted(self) -> str:
        return f"{self.size} process{'es' if self.size > 1 else ''}"

    @property
    def data(self) -> World:
        """The data-parallel ranks: one for each group of processes that share sequences."""
        return World(self.rank // self.sequence_parallel_size, self.size // self.sequence_parallel_size)

    @property
    def share_rank(self) -> int:
        """0-based number of this process among those that it shares sequences with."""
        return self.rank % self.sequence_parallel_size

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0


def processes_of_machine(otherwise: int = 1) -> int:
    """Processes of the run on this machine: what torchrun says, or will be told; else ``otherwise``."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("NPROC_PER_NODE") or otherwise)


_PLACES = "/proc/driver/nvidia/gpus/*/information"


def gpu_names(places: str = _PLACES) -> tuple[str, ...]:
    """The names of the GPUs, as in ``("NVIDIA H100 80GB HBM3",)``; nothing where the driver's files cannot be read.

    Args:
        places: of the files that describe a GPU each.
    """
    found = []
    for place in sorted(glob.glob(places)):
        try:
            with open(place, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        if match := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE):
            found.append(match.group(1))
    return tuple(found)


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
