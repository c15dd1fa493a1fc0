"""What the ranks that share a sequence send each other in a micro-batch, and which attention runs meanwhile.

It follows ``attention/parallel``, layer by layer and pass by pass. P ranks share V tokens; *own* is the first P-th of a
rank's attention to them, that to its own keys.

| way | forward | backward |
|---|---|---|
| all-gather | K, V gathered behind local attention and own | the same; 32-bit gradients of K, V summed in the open |
| ring | a hop of K, V behind local attention and own, each further one behind a P-th | the same, gradients in 32 bits \
beside each from the second block on, and one more hop of theirs in the open |
| Ulysses | Q, K, V behind local attention; the output in the open | the output's gradient behind local attention; \
gradients of Q, K, V in the open |

With recomputation a micro-batch goes forward twice. Where Ulysses has more ranks than there are heads of K and V, these
are repeated.
"""

from __future__ import annotations

import math
from typing import Literal

from packtool.config.packing import SequenceParallelType
from packtool.plan.step_time import Exchange
from packtool.simulate.hardware import Hardware
from packtool.simulate.model_sizes import ModelSizes

_BACKWARD = 2.5  # of attention, in units of its forward pass


def can_share_heads(sizes: ModelSizes, num_ranks: int) -> bool:
    """Whether Ulysses can share a model's heads among so many ranks."""
    return sizes.num_heads % math.lcm(sizes.num_key_heads, num_ranks) == 0


def exchanges_of(
    way: SequenceParallelType, sizes: ModelSizes, hardware: Hardware, num_ranks: int, *, recompute: bool
) -> tuple[Exchange, ...]:
    """All exchanges of a micro-batch.

    Args:
        way: how K and V, or heads, travel. ``auto`` is Ulysses within a node and all-gather beyond; all-gather it is
            also where Ulysses cannot share the heads.
        sizes: of the model.
        hardware: whose links they travel on.
        num_ranks: P; none for one.
        recompute: forward runs twice.
    """
    if num_ranks == 1:
        return ()
    forward, backward = _passes(recompute)
    build = {"allgather": _all_gather, "ring": _ring, "ulysses": _ulysses}[way_of(way, sizes, hardware, num_ranks)]
    return build(sizes, hardware, num_ranks, 1 + recompute, forward, backward)


def way_of(
    way: SequenceParallelType, sizes: ModelSizes, hardware: Hardware, num_ranks: int
) -> Literal["allgather", "ring", "ulysses"]:
    """The way that is gone where so many ranks share a sequence, args as for ``exchanges_of``."""
    if way in ("ring", "allgather"):
        return way
    is_near = way == "ulysses" or num_ranks <= hardware.gpus_per_node
    return "ulysses" if is_near and can_share_heads(sizes, num_ranks) else "allgather"


def _passes(recompute: bool) -> tuple[float, float]:
    """Shares of a micro-batch's attention that run forward, in all passes, and backward."""
    forward = 1.0 + recompute
    return forward / (forward + _BACKWARD), _BACKWARD / (forward + _BACKWARD)


def _all_gather(
    sizes: ModelSizes, hardware: Hardware, num_ranks: int, num_forward: int, forward: float, backward: float
) -> tuple[Exchange, ...]:
    layers, fixed = sizes.num_layers, hardware.fixed_seconds(num_ranks)
    gathered = sizes.kv_bytes / hardware.bytes_per_second(num_ranks)
    # The sum is an all-to-all of what every rank has for the others (``attention.parallel.exchange.sum_to_owners``).
    summed = 2 * sizes.kv_bytes / hardware.all_to_all_bytes_per_second(num_ranks)
    return (
        Exchange(num_forward * layers, fixed, gathered, forward, forward / num_ranks),
        Exchange(layers, fixed, gathered, backward, backward / num_ranks),
        Exchange(layers, fixed, summed),
    )


def _ring(
    sizes: ModelSizes, hardware: Hardware, num_ranks: int, num_forward: int, forward: float, backward: float
) -> tuple[Exchange, ...]:
    layers, fixed, further = sizes.num_layers, hardware.fixed_seconds(num_ranks), num_ranks - 2
    hop = sizes.kv_bytes / num_ranks / hardware.hop_bytes_per_second(num_ranks)
    block = backward / num_ranks
    return (
        Exchange(num_forward * layers, fixed, hop, forward, forward / num_ranks),
        Exchange(num_forward * layers * further, fixed, hop, 0.0, forward / num_ranks * further),
        Exchange(layers, fixed, hop, backward, block),
        # K and V of the next block, and gradients of the last one, one after the other.
        Exchange(layers * further, 2 * fixed, 3 * hop, 0.0, block * further),
        Exchange(layers, fixed, 2 * hop, 0.0, block),
        Exchange(layers, fixed, 2 * hop),
    )


def _ulysses(
    sizes: ModelSizes, hardware: Hardware, num_ranks: int, num_forward: int, forward: float, backward: float
) -> tuple[Exchange, ...]:
    layers, fixed = sizes.num_layers, hardware.fixed_seconds(num_ranks)
    copies = math.lcm(sizes.num_key_heads, num_ranks) // sizes.num_key_heads
    per_byte = 1 / num_ranks / hardware.all_to_all_bytes_per_second(num_ranks)
    output, inputs = sizes.query_bytes * per_byte, (sizes.query_bytes + copies * sizes.kv_bytes) * per_byte
    return (
        Exchange(num_forward * layers, fixed, inputs, forward),
        Exchange(num_forward * layers, fixed, output),
        Exchange(layers, fixed, output, backward),
        Exchange(layers, fixed, inputs),
    )
