"""How train, eval and verify begin: each finds its place among the processes of a run, or starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from packtool.launch.processes import Processes, is_launched, launch_if_asked, share_cores_politely
from packtool.launch.world import World


def begins_run() -> bool:
    """Whether this command starts a run: not one of torchrun's processes, and on the first machine.

    Raises:
        ConfigError: if the environment is wrong.
    """
    return not is_launched() and Processes.from_environment(os.environ).node_rank == 0


def find_place(
    arguments: Sequence[str],
    sequence_parallel_size: int,
    prepare: Callable[[World], object],
    *,
    even_one: bool = False,
    starts_none: bool = False,
    max_wait: int | None = None,
) -> World:
    """This process's place in the run; where the environment asks for several, they are started and nothing returns.

    Args:
        arguments: of packtool, from the subcommand on, to be called again in every process.
        sequence_parallel_size: processes that share each sequence.
        prepare: called before any process is started, with the place of the first, so that what does not fit is told
            once and at once.
        even_one: a single process needs torchrun's environment, too.
        starts_none: this process stands for all: the run is only looked at, or one process does all of its work.
        max_wait: seconds to wait for other machines; by default 1800.

    Raises:
        ConfigError: if the environment is wrong, or its processes cannot be divided into groups.
    """
    share_cores_politely()
    world = World.from_environment()
    if is_launched():
        return world
    world = World(0, Processes.from_environment(os.environ).total).shared_by(sequence_parallel_size)
    if (world.size > 1 or even_one) and not starts_none:
        prepare(world)
        launch_if_asked(arguments, even_one=even_one, max_wait=max_wait)
    return world
