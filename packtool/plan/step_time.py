"""How long a micro-batch of local and sharded sequences takes: the small model that Skrull's choices are compared by.

N ranks share a micro-batch. Each first computes the sequences that are local to it, while the keys and values of the
sharded ones travel; then all compute the sharded ones together (the model of the Skrull paper, see ``skrull``):

    time = max over ranks j of max(communication(sharded tokens), computation(local to j)) + computation(sharded)

and no less than launching its kernels takes. Computation is told in FLOPs of large matrix products. Attention is slower
than these, and slower still with few queries at once: a sequence of s tokens costs ``square_flops * s^2`` more, and
``query_flops * s`` on every rank that works on it, which is what short sequences lose by being sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.integer[Any]]
Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepTime:
    """What a device and the links between devices do in a second.

    The defaults are those of a dense model of 8 billion weights (``CostModel.of_8b``: 36 layers, 8 heads of 128 for K
    and V, 16 bits) on H100s: 40 % of 989 TFLOP/s, and an all-gather whose time was measured as 53, 489 and 6468 us for
    2, 64 and 1024 MB. They need not be right to a percent: only the better of two placements is looked for.

    Args:
        flops_per_second: that a device reaches.
        num_collectives: of a micro-batch: in each layer K and V are gathered in forward and again in backward, and
            their gradients are scattered.
        kv_bytes_per_token: that one collective moves for each sharded token.
        fixed_seconds: that a collective takes however little it moves.
        bytes_per_second: that a collective moves when it takes longer than that.
        square_flops, query_flops: see the module.
        launch_seconds: that a micro-batch takes at least.
        device: what the numbers are of.
    """

    flops_per_second: float = 0.4 * 989e12
    num_collectives: int = 3 * 36
    kv_bytes_per_token: float = 2 * 8 * 128 * 2
    fixed_seconds: float = 53e-6
    bytes_per_second: float = 160e9
    square_flops: float = 0.0
    query_flops: float = 0.0
    launch_seconds: float = 0.0
    device: str = "H100"

    def communication(self, num_tokens: int) -> float:
        """Seconds that the keys and values of so many sharded tokens travel: fixed below a size, then linear."""
        if num_tokens == 0:
            return 0.0
        return self.num_collectives * max(
            self.fixed_seconds, num_tokens * self.kv_bytes_per_token / self.bytes_per_second
        )

    def work(self, lengths: Lengths, flops: Costs, num_ranks: int = 1) -> Costs:
        """FLOPs of sequences (n,), with those that make up for what attention is slower.

        Args:
            lengths: (n,), tokens.
            flops: (n,), that they need.
            num_ranks: that share them: the sum over all of these ranks is what is returned.
        """
        sizes = np.asarray(lengths, dtype=np.float64)
        return flops + sizes * (self.square_flops * sizes + self.query_flops * num_ranks)

    def computation(self, flops: float) -> float:
        """Seconds of so many FLOPs on one device."""
        return flops / self.flops_per_second

    def micro_batch(self, local_flops: Sequence[float], sharded_flops: float, sharded_tokens: int) -> float:
        """Seconds of a micro-batch.

        Args:
            local_flops: (N,), of the sequences local to each rank, as ``work`` tells them.
            sharded_flops: of all sharded sequences, as ``work`` tells them for N; each rank computes an N-th.
            sharded_tokens: of all sharded sequences, with their padding. A lone rank has nobody to ask for them.
        """
        num_ranks = len(local_flops)
        waited = self.communication(sharded_tokens) if num_ranks > 1 else 0.0
        busy = max(waited, self.computation(max(local_flops))) + self.computation(sharded_flops / num_ranks)
        return max(self.launch_seconds, busy)
