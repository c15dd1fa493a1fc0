"""The ranks that share a sequence, as process groups: a mesh (data, ring, ulysses) over all ranks of a run.

Media of a shared sequence are looked at, or heard, once: each rank's towers get some, features go to the tokens.

What comes out for this rank's pictures, the features of all levels (DeepStack) side by side, is exchanged by one
all-to-all, and the model goes on as if it had looked at the pictures of exactly its own tokens. Videos and sounds have
one each. Backward the gradients take the same way home.

What ranks send each other: heads for tokens (Ulysses), keys and values (ring, all-gather).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from packtool.attention.parallel.axes import Axes
from packtool.batch.shard import Cut, FeatureRoute

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


AXES = ("data", "ring", "ulysses")


@dataclass(frozen=True, eq=False)
class SequenceParallel:
    """This rank among the P that share its sequences.

    Args:
        cut: how sequences are cut.
        way: of the ranks on the ring axis.
        ring, ulysses, whole: groups of the ring axis, the Ulysses axis and all P ranks.
        others: of other sequences of the same run, which fewer ranks share.
    """

    cut: Cut
    way: Literal["ring", "allgather"]
    ring: Any
    ulysses: Any
    whole: Any
    others: tuple[SequenceParallel, ...] = ()

    def of(self, cut: Cut) -> SequenceParallel:
        """The ranks that share a sequence which is cut so."""
        return next((other for other in self.others if other.cut == cut), self)

    @classmethod
    def on_mesh(cls, axes: Axes, device_type: str) -> SequenceParallel:
        """All ranks of a run, P at a time; the process group must be there, and every rank calls this."""
        size = axes.ring_size * axes.ulysses_size
        shape = (dist.get_world_size() // size, axes.ring_size, axes.ulysses_size)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
        whole = mesh["ring", "ulysses"]._flatten("sequence").get_group()
        cut = Cut(axes.ring_size, axes.ulysses_size, dist.get_rank() % size)
        return cls(cut, axes.way, mesh["ring"].get_group(), mesh["ulysses"].get_group(), whole)

    @torch.no_grad()
    def gathered(self, values: Tensor, index: Tensor, num_tokens: int) -> Tensor:
        """The whole sequence from all ranks' parts; every rank has it.

        Args:
            values: (T, ...) of this rank's tokens.
            index: int64 (T,), where in the whole sequence.
            num_tokens: of the whole sequence.

        Returns:
            (``num_tokens``, ...).
        """
        counts = torch.zeros(self.cut.size, dtype=torch.int64, device=values.device)
        counts[self.cut.rank] = len(values)
        counts = self.summed(counts)
        most = int(counts.max())
        sequence = values.new_zeros((num_tokens, *values.shape[1:]))
        parts = zip(self._from_all(values, most), self._from_all(index, most), counts.tolist(), strict=True)
        for part, place, count in parts:
            sequence[place[:count]] = part[:count]
        return sequence

    def _from_all(self, values: Tensor, most: int) -> list[Tensor]:
        """Every rank's, as if it had ``most`` tokens."""
        # Not every backend sends truth values.
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        mine = torch.cat([sent, sent.new_zeros((most - len(sent), *sent.shape[1:]))])
        received = from_all(mine, self.whole)().to(values.dtype)
        return list(received.view(self.cut.size, *mine.shape))

    @torch.no_grad()
    def summed(self, value: Tensor) -> Tensor:
        """Sum over the ranks that share a sequence; of any shape, the same on all of them, without a gradient."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self.whole)
        return total


def exchange_features(levels: list[Tensor], route: FeatureRoute, parallel: SequenceParallel) -> list[Tensor]:
    """The features of this rank's tokens in exchange for those of this rank's media of one kind.

    Args:
        levels: (n, D) of each level, of this rank's media.
        route: of this kind of media.
        parallel: ranks that share the sequence; all of them call this.

    Returns:
        (m, D) of each level, of this rank's tokens.
    """
    travelled = _Exchange.apply(torch.cat(levels, dim=-1), route, parallel)
    return list(torch.split(travelled, [level.shape[-1] for level in levels], dim=-1))


class _Exchange(torch.autograd.Function):
    """Features (n, D) of this rank's media become (m, D) of its tokens."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, route: FeatureRoute, parallel: SequenceParallel) -> Tensor:
        ctx.route, ctx.parallel, ctx.num_features = route, parallel, len(features)
        order, back = (index.to(features.device) for index in (route.send_order, route.receive_order))
        rows = exchange_rows(features[order], route.send_counts, route.receive_counts, parallel.whole)
        return rows[back]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        route, order = ctx.route, ctx.route.send_order.to(grad.device)
        came = torch.empty_like(grad)
        came[route.receive_order.to(grad.device)] = grad
        rows = exchange_rows(came, route.receive_counts, route.send_counts, ctx.parallel.whole)
        # A blank picture's features went nowhere: zeros come back.
        found = grad.new_zeros(ctx.num_features, grad.shape[-1])
        found[order] = rows
        return found, None, None
