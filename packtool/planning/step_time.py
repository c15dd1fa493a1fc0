"""Estimated time of a micro-batch of local and sharded sequences: the model by which Skrull compares placements.

N ranks share a micro-batch. Each computes its local sequences and its part of the sharded ones, and in every layer keys
and values (or heads) of the sharded ones travel. Only attention overlaps with that: the layer's other work needs its
result. With the ``Exchange`` records of a micro-batch, one for each kind,

    time(j) = computation(local to j) + computation(sharded) / N + sum over exchanges of max(0, travel - attention
              of rank j that runs meanwhile)
    time    = max over ranks j of time(j), and no less than launching the kernels takes

Computation is given in FLOPs of large matrix products. Attention is slower than these, and slower still with few
queries at once: a sequence of s tokens costs ``square_flops * s^2`` more, and ``query_flops * s`` on every rank that
works on it, which is the cost of sharding short sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from packtool.planning.pack_plan import Costs, IntArray


class Load(NamedTuple):
    """FLOPs, and the part of them that is attention's."""

    flops: float
    attention: float

    def plus(self, other: Load) -> Load:
        """Add two loads."""
        return Load(self.flops + other.flops, self.attention + other.attention)

    @staticmethod
    def sum(loads: Iterable[Load]) -> Load:
        """Add up loads, in their order."""
        total = NOTHING
        for load in loads:
            total = total.plus(load)
        return total


NOTHING = Load(0.0, 0.0)
"""No work."""


@dataclass(frozen=True)
class Exchange:
    """Repeated communication of one kind in a micro-batch.

    Args:
        times: repetitions: layers, passes and hops.
        fixed_seconds: minimum of one exchange.
        token_seconds: of one exchange for each sharded token (of all ranks), where that is longer.
        behind_local: share of a rank's attention to its local sequences, forward and backward, that overlaps with it.
        behind_sharded: the same of its attention to sharded ones.
    """

    times: int
    fixed_seconds: float
    token_seconds: float
    behind_local: float = 0.0
    behind_sharded: float = 0.0

    def travel(self, num_tokens: int) -> float:
        """Seconds of all repetitions for ``num_tokens`` sharded tokens."""
        return self.times * max(self.fixed_seconds, num_tokens * self.token_seconds) if num_tokens else 0.0


@dataclass(frozen=True)
class StepTime:
    """Speed of a device and of the links between devices.

    The defaults are those of a dense model of 8 billion weights (``CostModel.of_8b``: 36 layers, 32 heads of 128 for Q
    and 8 for K and V, 16 bits) on H100s: 40 % of 989 TFLOP/s, and an all-gather measured at 53, 489 and 6468 us for 2,
    64 and 1024 MB. They need not be accurate to a percent: only placements are compared.

    Args:
        flops_per_second: that a device reaches.
        exchanges: of a micro-batch with sharded sequences.
        attention_flops: of each unit of s^2, included in the FLOPs of sequences.
        square_flops, query_flops: see the module.
        batch_flops: additional cost of every micro-batch, since kernels on few tokens are slow.
        launch_seconds: minimum of a micro-batch.
        device: name of the device.
    """

    flops_per_second: float = 0.4 * 989e12
    exchanges: tuple[Exchange, ...] = (
        Exchange(36, 53e-6, 2 * 8 * 128 * 2 / 160e9, behind_local=1 / 3.5),
        Exchange(36, 53e-6, 2 * 8 * 128 * 2 / 160e9, behind_local=2.5 / 3.5),
        Exchange(36, 53e-6, 2 * 8 * 128 * 4 / 160e9),
    )
    attention_flops: float = 36 * 2 * 32 * 128 * 3.5
    square_flops: float = 0.0
    query_flops: float = 0.0
    batch_flops: float = 0.0
    launch_seconds: float = 0.0
    device: str = "H100"

    def work(self, lengths: IntArray, flops: Costs, num_ranks: int = 1) -> tuple[Costs, Costs]:
        """Work of sequences (n,), and attention's part of it, both increased by the slowness of attention.

        Args:
            lengths: (n,), tokens.
            flops: (n,), of each.
            num_ranks: that share each; the result is the sum over these ranks.
        """
        sizes = np.asarray(lengths, dtype=np.float64)
        slower = sizes * (self.square_flops * sizes + self.query_flops * num_ranks)
        return flops + slower, self.attention_flops * sizes**2 + slower

    def loads(self, lengths: IntArray, flops: Costs, num_ranks: int = 1) -> list[Load]:
        """``work`` as a list, from lengths and FLOPs (n,)."""
        work, attention = self.work(lengths, flops, num_ranks)
        return [Load(*one) for one in zip(work.tolist(), attention.tolist(), strict=True)]

    def computation(self, flops: float) -> float:
        """Seconds of computation on one device."""
        return flops / self.flops_per_second

    def micro_batch(self, local: Sequence[Load], sharded: Load, sharded_tokens: int, num_ranks: int) -> float:
        """Seconds of a micro-batch.

        Args:
            local: work of the sequences local to each rank; of ranks with equal loads, one is enough.
            sharded: work of all sharded sequences, the sum over the N ranks.
            sharded_tokens: of all sharded sequences, with their padding.
            num_ranks: N.
        """
        busiest = max(local)[0]
        if num_ranks > 1 and sharded_tokens:
            speed, attention, exposed = self.flops_per_second, sharded.attention / num_ranks, 0.0
            hidden = []
            for exchange in self.exchanges:
                flops = speed * exchange.travel(sharded_tokens) - exchange.behind_sharded * attention
                if flops > 0 and exchange.behind_local:
                    hidden.append((flops, exchange.behind_local))
                elif flops > 0:
                    exposed += flops
            busiest = exposed + max(
                load[0] + sum([max(0.0, flops - share * load[1]) for flops, share in hidden]) for load in local
            )
        return max(self.launch_seconds, self.computation(busiest + sharded.flops / num_ranks + self.batch_flops))

    def waited(self, sharded_tokens: Costs, local_attention: Costs, sharded_attention: Costs) -> Costs:
        """Seconds of exchanges that attention does not hide, for many ranks at once.

        Args:
            sharded_tokens: (n,), of the micro-batch of each rank.
            local_attention, sharded_attention: (n,), seconds of each rank, forward and backward.
        """
        seconds = np.zeros(len(sharded_tokens))
        for exchange in self.exchanges:
            travel = exchange.times * np.maximum(exchange.fixed_seconds, sharded_tokens * exchange.token_seconds)
            hidden = exchange.behind_local * local_attention + exchange.behind_sharded * sharded_attention
            seconds += np.where(sharded_tokens > 0, np.maximum(travel - hidden, 0.0), 0.0)
        return seconds
