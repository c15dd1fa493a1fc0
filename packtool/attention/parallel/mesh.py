"""Groups of ranks that share a sequence, and what they exchange: heads for tokens, keys and values, media features.

Media of a shared sequence are encoded once: each rank's towers get some, and the features are sent to the ranks of
their tokens. The features of all levels (DeepStack), side by side, take one all-to-all for each kind of medium;
backward the gradients take the same way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from packtool.attention.parallel.axes import Axes, KvExchange
from packtool.batch.shard import FeatureRoute, SequenceSplit

Pending = Callable[[], Tensor]
"""Waits for a started exchange, and returns the tensor received."""


@dataclass(frozen=True)
class AbsentRanks:
    """Stand-in for a process group in memory traces: memory for other ranks' data is allocated but not filled."""

    size: int


def _size(group: Any) -> int:
    return group.size if isinstance(group, AbsentRanks) else dist.get_world_size(group)


def _start(collective: Callable[..., Any], received: Tensor, sent: Tensor, *counts: list[int], group: Any) -> Pending:
    """Start a collective and return a function that waits for its result."""
    if isinstance(group, AbsentRanks):
        return lambda: received
    work = collective(received, sent, *counts, group=group, async_op=True)
    assert work is not None, "asked not to wait"
    return partial(_wait, [work], sent, received)


def _wait(works: Sequence[dist.Work], sent: Tensor, received: Tensor) -> Tensor:
    """Wait for started transfers; return the tensor received. ``sent`` is a parameter so that it stays alive."""
    for work in works:
        work.wait()
    return received


def start_ring_transfer(tensor: Tensor, group: Any) -> Pending:
    """Start sending (T, ...) to the next rank of a ring and receiving the same shape from the previous one."""
    sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    works: list[dist.Work] = []
    if not isinstance(group, AbsentRanks):
        ranks = dist.get_process_group_ranks(group)
        rank, size = dist.get_rank(group), len(ranks)
        # One batch: separate blocking calls would wait for each other around the ring.
        send = dist.P2POp(dist.isend, sent, ranks[(rank + 1) % size], group)
        receive = dist.P2POp(dist.irecv, received, ranks[(rank - 1) % size], group)
        works = dist.batch_isend_irecv([send, receive])
    return partial(_wait, works, sent, received)


def start_all_gather(tensor: Tensor, group: Any) -> Pending:
    """Start gathering (T, ...) of every rank as (R * T, ...)."""
    sent = tensor.contiguous()
    received = sent.new_empty((_size(group) * len(sent), *sent.shape[1:]))
    return _start(dist.all_gather_into_tensor, received, sent, group=group)


def _all_to_all(tensor: Tensor, group: Any) -> Pending:
    return _start(dist.all_to_all_single, torch.empty_like(tensor), tensor, group=group)


def reduce_scatter_rows(tensor: Tensor, group: Any) -> Tensor:
    """Return the gradient of ``start_all_gather``: (R * T, ...) become (T, ...), summed over the ranks.

    Done as an all-to-all and a sum in rank order, because gloo has no reduce-scatter.
    """
    received = _all_to_all(tensor.contiguous(), group)()
    return torch.unflatten(received, 0, (_size(group), -1)).sum(0)


def scatter_heads(tensor: Tensor, group: Any) -> Pending:
    """Start exchanging (T, H, D), all heads of this rank's tokens, for (U * T, H / U, D), its heads of all tokens."""
    size, (num_tokens, num_heads, head_dim) = _size(group), tensor.shape
    sent = tensor.reshape(num_tokens, size, num_heads // size, head_dim).transpose(0, 1).contiguous()
    wait = _all_to_all(sent, group)
    return lambda: wait().flatten(0, 1)


def gather_heads(tensor: Tensor, group: Any) -> Tensor:
    """Undo ``scatter_heads``: (U * T, H / U, D) become (T, H, D)."""
    sent = tensor.contiguous()
    received = _all_to_all(sent, group)()
    return torch.unflatten(received, 0, (_size(group), -1)).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class SequenceParallel:
    """Process groups of the P ranks that share this rank's sequences.

    Args:
        kv_exchange: how the ranks of the ring axis obtain keys and values.
        ring, ulysses, group: groups of the ring axis, the Ulysses axis and all P ranks.
        others: the same for the run's other sequence parallel sizes.
    """

    split: SequenceSplit
    kv_exchange: KvExchange
    ring: Any
    ulysses: Any
    group: Any
    others: tuple[SequenceParallel, ...] = ()

    def of(self, split: SequenceSplit) -> SequenceParallel:
        """Return the groups for sequences with this split."""
        return next((other for other in self.others if other.split == split), self)

    @classmethod
    def on_mesh(cls, axes: Axes, device_type: str) -> SequenceParallel:
        """Create the groups of a run; every rank must call this, after the process group was initialized."""
        size = axes.ring_size * axes.ulysses_size
        shape = (dist.get_world_size() // size, axes.ring_size, axes.ulysses_size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "ring", "ulysses"))
        group = mesh["ring", "ulysses"]._flatten("sequence").get_group()
        split = SequenceSplit(axes.ring_size, axes.ulysses_size, dist.get_rank() % size)
        return cls(split, axes.kv_exchange, mesh["ring"].get_group(), mesh["ulysses"].get_group(), group)

    @torch.no_grad()
    def gather(self, values: Tensor, index: Tensor, num_tokens: int) -> Tensor:
        """Gather the complete sequence, (``num_tokens``, ...), on every rank.

        ``values``, (T, ...), are those of this rank's tokens, at the positions ``index``, int64 (T,), of the sequence.
        """
        own_count = torch.zeros(self.split.size, dtype=torch.int64, device=values.device)
        own_count[self.split.rank] = len(values)
        counts = self.sum(own_count).tolist()  # tokens of each rank
        values_by_rank = self._gather_padded(values, max(counts))
        positions_by_rank = self._gather_padded(index, max(counts))
        sequence = values.new_zeros((num_tokens, *values.shape[1:]))
        for rank, count in enumerate(counts):
            sequence[positions_by_rank[rank][:count]] = values_by_rank[rank][:count]
        return sequence

    def _gather_padded(self, values: Tensor, num_tokens: int) -> list[Tensor]:
        """Gather every rank's values, each padded to ``num_tokens``."""
        # Not every backend sends booleans.
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        padded = torch.cat([sent, sent.new_zeros((num_tokens - len(sent), *sent.shape[1:]))])
        received = start_all_gather(padded, self.group)().to(values.dtype)
        return list(received.view(self.split.size, *padded.shape))

    @torch.no_grad()
    def sum(self, value: Tensor) -> Tensor:
        """Return ``value``, of any shape, summed over the ranks that share a sequence, without a gradient."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


def exchange_features(levels: list[Tensor], route: FeatureRoute, parallel: SequenceParallel) -> list[Tensor]:
    """Exchange each level's features (n, D) of this rank's media for those of its tokens, (m, D); all ranks call it."""
    received: Tensor = _Exchange.apply(torch.cat(levels, dim=-1), route, parallel)
    return list(torch.split(received, [level.shape[-1] for level in levels], dim=-1))


class _Exchange(torch.autograd.Function):
    """Features (n, D) of this rank's media become (m, D) of its tokens."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, route: FeatureRoute, parallel: SequenceParallel) -> Tensor:
        ctx.route, ctx.group, ctx.num_features = route, parallel.group, len(features)
        send_order, receive_order = (index.to(features.device) for index in (route.send_order, route.receive_order))
        return _exchange_rows(features[send_order], route.send_counts, route.receive_counts, ctx.group)[receive_order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        route = ctx.route
        by_rank = torch.empty_like(grad)
        by_rank[route.receive_order.to(grad.device)] = grad
        rows = _exchange_rows(by_rank, route.receive_counts, route.send_counts, ctx.group)
        # A blank picture's features were sent to no rank: their gradients are zeros.
        gradients = grad.new_zeros(ctx.num_features, grad.shape[-1])
        gradients[route.send_order.to(grad.device)] = rows
        return gradients, None, None


def _exchange_rows(rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Any) -> Tensor:
    """Send rows (n, ...), ``send[i]`` of them to rank i, in order; return rows (m, ...), ``receive[i]`` from rank i."""
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    return _start(dist.all_to_all_single, received, rows.contiguous(), list(receive), list(send), group=group)()
