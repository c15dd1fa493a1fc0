"""How long a micro-batch of local and sharded sequences takes: the small model that Skrull's choices are compared by.

N ranks share a micro-batch. Each computes the sequences that are local to it and its part of the sharded ones, and in
every layer keys and values (or heads) of the sharded ones travel. Attention alone hides that: the layer's other work
needs its result. What is exchanged in a micro-batch is told as ``Exchange`` records, one for each kind,

    time(j) = computation(local to j) + computation(sharded) / N + sum over exchanges of max(0, travel - attention
              of rank j that runs meanwhile)
    time    = max over ranks j of time(j), and no less than launching the kernels takes

Computation is told in FLOPs of large matrix products. Attention is slower than these, and slower still with few queries
at once: a sequence of s tokens costs ``square_flops * s^2`` more, and ``query_flops * s`` on every rank that works on
it, which is what short sequences lose by being sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.integer[Any]]
Costs = npt.NDArray[np.float64]
Seconds = npt.NDArray[np.float64]


class Load(NamedTuple):
    """FLOPs, and how many of them are attention's."""

    flops: float
    attention: float

    def plus(self, other: Load) -> Load:
        """The sum of both."""
        return Load(self.flops + other.flops, self.attention + other.attention)

    @staticmethod
    def sum(loads: Iterable[Load]) -> Load:
        """The sum of all, in their order."""
        total = NOTHING
        for load in loads:
            total = total.plus(load)
        return total


NOTHING = Load(0.0, 0.0)
"""No work."""


@dataclass(frozen=True)
class Exchange:
    """What ranks send each other in a micro-batch, again and again, in one way.

    Args:
        times: how often: layers, passes and hops.
        fixed_seconds: that one takes however little it moves.
        token_seconds: that one takes for each sharded token (of all ranks) when it takes longer than that.
        behind_local: share of a rank's attention to its local sequences, forward and backward, that runs meanwhile.
        behind_sharded: the same of its attention to sharded ones.
    """

    times: int
    fixed_seconds: float
    token_seconds: float
    behind_local: float = 0.0
    behind_sharded: float = 0.0

    def travel(self, num_tokens: int) -> float:
        """Seconds that all of them take, for so many sharded tokens: fixed below a size, then linear."""
        return self.times * max(self.fixed_seconds, num_tokens * self.token_seconds) if num_tokens else 0.0


@dataclass(frozen=True)
class StepTime:
    """What a device and the links between devices do in a second.

    The defaults are those of a dense model of 8 billion weights (``CostModel.of_8b``: 36 layers, 32 heads of 128 for Q
    and 8 for K and V, 16 bits) on H100s: 40 % of 989 TFLOP/s, and an all-gather whose time was measured as 53, 489 and
    6468 us for 2, 64 and 1024 MB. They need not be right to a percent: only the better of two placements is looked for.

    Args:
        flops_per_second: that a device reaches.
        exchanges: of a micro-batch with sharded sequences.
        attention_flops: of each unit of s^2 that the FLOPs of sequences hold.
        square_flops, query_flops: see the module.
        batch_flops: that every micro-batch costs besides, since kernels on few tokens are slow.
        launch_seconds: that a micro-batch takes at least.
        device: what the numbers are of.
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

    def work(self, lengths: Lengths, flops: Costs, num_ranks: int = 1) -> tuple[Costs, Costs]:
        """Work of sequences (n,), and attention's part of it, with what makes up for attention's being slower.

        Args:
            lengths: (n,), tokens.
            flops: (n,), that they need.
            num_ranks: that share each; the result is the sum over all of these ranks.
        """
        sizes = np.asarray(lengths, dtype=np.float64)
        slower = sizes * (self.square_flops * sizes + self.query_flops * num_ranks)
        return flops + slower, self.attention_flops * sizes**2 + slower

    def loads(self, lengths: Lengths, flops: Costs, num_ranks: int = 1) -> list[Load]:
        """``work`` of each sequence, from lengths and FLOPs (n,)."""
        work, attention = self.work(lengths, flops, num_ranks)
        return [Load(*one) for one in zip(work.tolist(), attention.tolist(), strict=True)]

    def computation(self, flops: float) -> float:
        """Seconds of so many FLOPs on one device."""
        return flops / self.flops_per_second

    def micro_batch(self, local: Sequence[Load], sharded: Load, sharded_tokens: int, num_ranks: int) -> float:
        """Seconds of a micro-batch.

        Args:
            local: the sequences local to each rank; of ranks that have alike, one is enough.
            sharded: all sharded sequences, as ``loads`` tells them for N; each rank computes an N-th.
            sharded_tokens: of all sharded sequences, with their padding. A lone rank has nobody to ask for them.
            num_ranks: N.
        """
        busiest = max(local)[0]
        if num_ranks > 1 and sharded_tokens:
            speed, attention, in_the_open = self.flops_per_second, sharded.attention / num_ranks, 0.0
            hidden = []
            for exchange in self.exchanges:
                flops = speed * exchange.travel(sharded_tokens) - exchange.behind_sharded * attention
                if flops > 0 and exchange.behind_local:
                    hidden.append((flops, exchange.behind_local))
                elif flops > 0:
                    in_the_open += flops
            busiest = in_the_open + max(
                load[0] + sum([max(0.0, flops - share * load[1]) for flops, share in hidden]) for load in local
            )
        return max(self.launch_seconds, self.computation(busiest + sharded.flops / num_ranks + self.batch_flops))

    def waited(self, sharded_tokens: Seconds, local_attention: Seconds, sharded_attention: Seconds) -> Seconds:
        """Seconds of exchanges in the open, for many ranks at once.

        Args:
            sharded_tokens: (n,), of the micro-batch of each rank.
            local_attention, sharded_attention: (n,), seconds of each rank, forward and backward.
        """
        found = np.zeros(len(sharded_tokens))
        for exchange in self.exchanges:
            travel = exchange.times * np.maximum(exchange.fixed_seconds, sharded_tokens * exchange.token_seconds)
            hidden = exchange.behind_local * local_attention + exchange.behind_sharded * sharded_attention
            found += np.where(sharded_tokens > 0, np.maximum(travel - hidden, 0.0), 0.0)
        return found
