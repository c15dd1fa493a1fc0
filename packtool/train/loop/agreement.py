"""Every rank has planned for itself: one exchange proves that all came to the same."""

from __future__ import annotations

import dataclasses
from typing import Any

from packtool.errors import MismatchError
from packtool.launch.exchange import all_gather_objects
from packtool.launch.world import World
from packtool.train.prepare.checkpoint import RunState


def check_ranks_agree(state: RunState, world: World, sequence_parallel: str = "") -> None:
    """Compare what all ranks have planned, by one exchange of hashes.

    The process group must be there.

    Args:
        sequence_parallel: how ranks share sequences, in words; each has worked it out, too.

    Raises:
        MismatchError: on every rank, naming what differs.
    """
    planned: dict[str, Any] = dataclasses.asdict(state) | {"sequence parallel": sequence_parallel}
    first, *_ = found = all_gather_objects(planned, world.size)
    for rank, other in enumerate(found):
        if other != first:
            differing = [name for name in first if other[name] != first[name]]
            lines = [f"  - {name}: {first[name]} on rank 0, {other[name]} there" for name in differing]
            raise MismatchError(
                f"rank {rank} would train something else than rank 0:\n" + "\n".join(lines),
                "All machines must see the same caches, the same options and the same version of packtool.",
            )
