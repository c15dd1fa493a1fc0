"""Which of how many processes this is, as torchrun says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from packtool.errors import ConfigError


@dataclass(frozen=True)
class World:
    """The data-parallel processes of a run.

    Args:
        rank: 0-based number of this one.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """From ``RANK`` and ``WORLD_SIZE``, which torchrun sets; one process without them.

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

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0
