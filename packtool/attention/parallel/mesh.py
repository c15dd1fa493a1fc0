"""The ranks that share a sequence, as process groups: a mesh (data, ring, ulysses) over all ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.exchange import from_all
from packtool.batch.shard import Cut

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
