"""What ranks send each other: heads for tokens (Ulysses), keys and values (ring, all-gather)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Waiting = Callable[[], Tensor]
"""Waits for an exchange that is under way, and returns what came."""


@dataclass(frozen=True)
class AbsentRanks:
    """Stands for a group of which no other rank is there: room is made for what would come, and nothing comes.

    For traces of memory (``train.model.trace``), which run on one process.

    Args:
        size: ranks of the group.
    """

    size: int


def _size(group: Any) -> int:
    return group.size if isinstance(group, AbsentRanks) else dist.get_world_size(group)


def _started(collective: Callable[..., Any], received: Tensor, sent: Tensor, *counts: list[int], group: Any) -> Any:
    """Start a collective; the function that waits for it."""
    if isinstance(group, AbsentRanks):
        return lambda: None
    work = collective(received, sent, *counts, group=group, async_op=True)
    assert work is not None, "asked not to wait"
    return work.wait


def to_next(tensor: Tensor, group: Any) -> Waiting:
    """Send to the next rank of a ring and receive as much from the one before, without waiting.

    Args:
        tensor: of any shape, the same on all ranks.
        group: the ring.
    """
    sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    works = []
    if not isinstance(group, AbsentRanks):
        ranks = dist.get_process_group_ranks(group)
        rank, size = dist.get_rank(group), len(ranks)
        # One batch: separate blocking calls would wait for each other around the ring.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, ranks[(rank + 1) % size], group),
                dist.P2POp(dist.irecv, received, ranks[(rank - 1) % size], group),
            ]
        )

    def wait(sent: Tensor = sent) -> Tensor:  # what is sent must live as long
        for work in works:
            work.wait()
        return received

    return wait


def from_all(tensor: Tensor, group: Any) -> Waiting:
    """What every rank has, (R * T, ...) for (T, ...), without waiting."""
    sent = tensor.contiguous()
    received = sent.new_empty((_size(group) * len(sent), *sent.shape[1:]))
    finish = _started(dist.all_gather_into_tensor, received, sent, group=group)

    def wait(sent: Tensor = sent) -> Tensor:
        finish()
        return received

    return wait


def sum_to_owners(tensor: Tensor, group: Any) -> Tensor:
    """The reverse of ``from_all`` for gradients: (T, ...), the sum of what all ranks have for this one.

    A reduce-scatter, as an all-to-all and a sum in the order of the ranks: gloo has no other.
    """
    received = torch.empty_like(tensor)
    _started(dist.all_to_all_single, received, tensor.contiguous(), group=group)()
    return torch.unflatten(received, 0, (_size(group), -1)).sum(0)


def heads_to_tokens(tensor: Tensor, group: Any) -> Waiting:
    """(T, H, D) of this rank's tokens become (U * T, H / U, D) of this rank's heads, without waiting."""
    size, (num_tokens, num_heads, head_dim) = _size(group), tensor.shape
    sent = tensor.reshape(num_tokens, size, num_heads // size, head_dim).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    finish = _started(dist.all_to_all_single, received, sent, group=group)

    def wait(sent: Tensor = sent) -> Tensor:
        finish()
        return received.flatten(0, 1)

    return wait


def tokens_to_heads(tensor: Tensor, group: Any) -> Tensor:
    """Undo ``heads_to_tokens``: (U * T, H / U, D) become (T, H, D)."""
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    _started(dist.all_to_all_single, received, sent, group=group)()
    return torch.unflatten(received, 0, (_size(group), -1)).transpose(0, 1).flatten(1, 2)


def exchange_rows(rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Any) -> Tensor:
    """Rows for each rank, one rank's after the other's, become rows from each rank.

    Args:
        rows: (R, ...), for rank 0 first.
        send: rows for each rank; they add up to R.
        receive: rows from each rank.
        group: the ranks.

    Returns:
        (sum of ``receive``, ...), from rank 0 first.
    """
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    _started(dist.all_to_all_single, received, rows.contiguous(), list(receive), list(send), group=group)()
    return received
