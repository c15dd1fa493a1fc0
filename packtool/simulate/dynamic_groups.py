"""Dynamic context parallelism on paper: each sequence on a group of its own size, as large as it needs to be.

What Megatron-LM (pull request 2282), FlexSP (Wang et al. 2024, arXiv 2412.01523) and ByteScale (Ge et al. 2025, arXiv
2502.21231) do: of W devices, aligned groups of 1, 2, 4, ... share a sequence, long ones many, short ones one.

    four devices       [    160 by four    ]
                       [40 by two][18][21]
                       [ 9 ][ 11 ]

Larger groups come first, and those of the next size lie within them, so that devices begin each sequence together and
none waits but at the end. The sequences of a group are cut into micro-batches of what its devices can hold. A
sequence gets the smallest group that holds it and is done with it in a given time; several such times are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.simulate.cost import Int64Array, Machine

_LIMITS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, np.inf)
"""Times for one sequence that are tried, in units of what a step takes at the least."""


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """A micro-batch of a group.

    Args:
        first_device: a multiple of ``num_devices``.
        num_devices: of the group, a power of two.
        samples: int64 (n,), by rising number.
    """

    first_device: int
    num_devices: int
    samples: Int64Array


def place_in_groups(
    lengths: npt.NDArray[np.integer[Any]],
    targets: npt.NDArray[np.integer[Any]],
    machine: Machine,
    bucket_size: int,
) -> Iterator[list[GroupBatch]]:
    """The sequences of a step, placed in several ways, each with its micro-batches in the order in which they run.

    Args:
        lengths: (n,), tokens; what the largest group cannot hold is placed there all the same.
        targets: (n,), tokens with a label.
        bucket_size: tokens that a device may hold.

    Price: O(n W) for each way.
    """
    sizes = [1 << level for level in range((machine.world_size & -machine.world_size).bit_length())]
    tokens = np.stack([_aligned(lengths, size) for size in sizes])
    seconds = np.stack([_seconds(machine, row, targets, size) for row, size in zip(tokens, sizes, strict=True)])
    held = tokens <= bucket_size * np.array(sizes)[:, None]
    smallest = np.where(held.any(axis=0), held.argmax(axis=0), len(sizes) - 1)
    least = seconds[0].sum() / machine.world_size
    before = None
    for limit in _LIMITS:
        quick = seconds <= limit * least
        levels = np.maximum(smallest, np.where(quick.any(axis=0), quick.argmax(axis=0), seconds.argmin(axis=0)))
        if before is None or (levels != before).any():
            yield _placed(levels, seconds, tokens, sizes, bucket_size, machine.world_size)
        before = levels


def _aligned(lengths: npt.NDArray[np.integer[Any]], size: int) -> Int64Array:
    alignment = 2 * size if size > 1 else 1
    return -(-lengths.astype(np.int64) // alignment) * alignment


def _seconds(
    machine: Machine, tokens: Int64Array, targets: npt.NDArray[np.integer[Any]], size: int
) -> npt.NDArray[np.float64]:
    """Times (n,) of each sequence alone on a group of this size, without what every micro-batch costs besides."""
    times = machine.step_time(size)
    loads = times.loads(tokens, machine.sizes.cost(tokens, machine.sizes.cost.attention(tokens), targets), size)
    busy = np.array([load.flops for load in loads]) / size / times.flops_per_second
    attention = np.array([load.attention for load in loads]) / size / times.flops_per_second
    return busy + times.waited(tokens.astype(np.float64), np.zeros(len(tokens)), attention)


def _placed(
    levels: Int64Array,
    seconds: npt.NDArray[np.float64],
    tokens: Int64Array,
    sizes: list[int],
    bucket_size: int,
    world_size: int,
) -> list[GroupBatch]:
    """The largest groups first; in each size the longest-running sequence first, to the group with the least so far."""
    loads, found = np.zeros(world_size), list[GroupBatch]()
    for level in range(len(sizes) - 1, -1, -1):
        size = sizes[level]
        members: list[list[int]] = [[] for _ in range(world_size // size)]
        mine = np.flatnonzero(levels == level)
        for one in mine[np.argsort(-seconds[level, mine], kind="stable")].tolist():
            group = int(loads[::size].argmin())
            members[group].append(one)
            loads[group * size : (group + 1) * size] += seconds[level, one]
        for group, hand in enumerate(members):
            for batch in _micro_batches(hand, tokens[level], bucket_size * size):
                found.append(GroupBatch(group * size, size, batch))
    return found


def _micro_batches(hand: list[int], tokens: Int64Array, room: int) -> list[Int64Array]:
    """A group's sequences in the fewest micro-batches that the emptiest-first rule manages."""
    falling = sorted(hand, key=lambda i: (-int(tokens[i]), i))
    for num in range(min(-(-int(tokens[hand].sum()) // room), len(hand)), len(hand) + 1):
        loads, batches = [0] * num, [list[int]() for _ in range(num)]
        for one in falling:
            emptiest = loads.index(min(loads))
            loads[emptiest] += int(tokens[one])
            batches[emptiest].append(one)
        if max(loads, default=0) <= room or num == len(hand):
            return [np.array(sorted(batch), np.int64) for batch in batches]
    return []
