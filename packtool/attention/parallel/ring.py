"""Attention to keys that are spread over the ranks of the ring axis: passed around, or gathered.

A rank's part has two chunks of every document (``batch.shard``). Between its own keys attention is causal, for the
chunks are in order. Of the keys of rank j before it (j < i) all queries see the first chunks, and none the second; of
rank j behind it (j > i) only the second chunks of the queries see anything, and they see all: every step is half of a
full square, on every rank.

*ring* (Liu et al. 2023, "Ring Attention with Blockwise Transformers"; zigzag as in Dubey et al. 2024, "The Llama 3 Herd
of Models", section 3.3.2): K and V of (T, Hkv, D) go around in R - 1 hops, each while the one before is attended to.
Backward they go around again, with their gradients in float32 on the same way, which take one more hop home.

*allgather* (the way of Llama 3): K and V of all ranks at once, and copies of those that are seen: some 2 R T rows
more, of one layer at a time, and in backward twice as many in float32 for their gradients, which are summed where they
belong. One exchange instead of R - 1, and fewer, larger blocks.

Both are generators: they yield once, when their first exchange is under way, so that the caller can compute what needs
no exchange; their value is the result.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from packtool.attention.parallel.blocks import AttentionBlock, BlockKernel, Gradients, merge_outputs
from packtool.attention.parallel.exchange import from_all, sum_to_owners, to_next
from packtool.attention.parallel.layout import Gathered, ShardLayout
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.varlen import Varlen

Forward = Generator[None, None, tuple[Tensor, Tensor]]
Backward = Generator[None, None, Gradients]


@dataclass(frozen=True, eq=False)
class RingCall:
    """What does not change from block to block.

    Args:
        parallel: the ranks.
        layout: of this rank's part.
        blocks: kernels.
        scale: factor on the scores.
        window: only without a ring.
    """

    parallel: SequenceParallel
    layout: ShardLayout
    blocks: BlockKernel
    scale: float
    window: int | None = None

    @property
    def size(self) -> int:
        """The number R of ranks in the ring."""
        return self.parallel.cut.ring_size

    @property
    def own(self) -> AttentionBlock:
        """This rank's queries and its own keys."""
        return AttentionBlock(self.layout.whole, self.layout.whole, True, self.scale, self.window)

    def owner_at(self, step: int) -> int:
        """The rank whose keys are here after so many hops."""
        return (self.parallel.cut.ring_rank - step) % self.size

    def full(self, queries: Varlen, keys: Varlen) -> AttentionBlock:
        """All of the one see all of the other."""
        return AttentionBlock(queries, keys, False, self.scale)


def ring_forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Attend to the keys of all ring ranks.

    Args:
        q: (T, Hq, D).
        k: (T, Hkv, D).
        v: (T, Hkv, D).

    Returns:
        out (T, Hq, D) and lse float32 (Hq, T).
    """
    if call.size > 1 and call.parallel.way == "allgather":
        return (yield from _gather_forward(call, q, k, v))
    keys, width = torch.cat([k, v], dim=-1), k.shape[-1]
    coming = to_next(keys, call.parallel.ring) if call.size > 1 else None
    yield
    out, lse = call.blocks.fwd(q, k, v, call.own)
    if coming is None:
        return out, lse
    total = out.to(lse.dtype)
    for step in range(1, call.size):
        keys = coming()
        if step + 1 < call.size:
            coming = to_next(keys, call.parallel.ring)
        total, lse = _see(call, call.owner_at(step), q, (keys[..., :width], keys[..., width:]), total, lse)
    return total.to(out.dtype), lse


def _see(
    call: RingCall, owner: int, q: Tensor, keys: tuple[Tensor, Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge what this rank's queries see of another one's keys."""
    layout = call.layout
    if owner < call.parallel.cut.ring_rank:
        k, v = (tensor[layout.first] for tensor in keys)
        return merge_outputs(out, lse, *call.blocks.fwd(q, k, v, call.full(layout.whole, layout.half)))
    return _merge_some(
        out, lse, layout.second, call.blocks.fwd(q[layout.second], *keys, call.full(layout.half, layout.whole))
    )


def _merge_some(out: Tensor, lse: Tensor, some: Tensor, found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge a block of some of the queries."""
    part, its_lse = merge_outputs(out[some], lse[:, some], *found)
    return out.index_copy(0, some, part), lse.index_copy(1, some, its_lse)


def ring_backward(call: RingCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Backward:
    """Gradients of q, k and v, from the final out and lse."""
    if call.size > 1 and call.parallel.way == "allgather":
        return (yield from _gather_backward(call, grad, q, k, v, out, lse))
    keys, width = torch.cat([k, v], dim=-1), k.shape[-1]
    coming = to_next(keys, call.parallel.ring) if call.size > 1 else None
    yield
    dq, dk, dv = call.blocks.bwd(grad, q, k, v, out, lse, call.own)
    if coming is None:
        return dq, dk, dv
    layout, dtype = call.layout, lse.dtype
    total, travelling = dq.to(dtype), torch.cat([dk, dv], dim=-1).to(dtype)
    for step in range(1, call.size):
        keys, home = coming(), to_next(travelling, call.parallel.ring)
        if step + 1 < call.size:
            coming = to_next(keys, call.parallel.ring)
        k, v = keys[..., :width], keys[..., width:]
        if call.owner_at(step) < call.parallel.cut.ring_rank:
            k, v, first = k[layout.first], v[layout.first], layout.first
            dq, dk, dv = call.blocks.bwd(grad, q, k, v, out, lse, call.full(layout.whole, layout.half))
            total += dq
            travelling = home().index_add(0, first, torch.cat([dk, dv], dim=-1).to(dtype))
        else:
            some = layout.second
            given = grad[some], q[some], k, v, out[some], lse[:, some]
            dq, dk, dv = call.blocks.bwd(*given, call.full(layout.half, layout.whole))
            total = total.index_add(0, some, dq.to(dtype))
            travelling = home() + torch.cat([dk, dv], dim=-1)
    travelling = to_next(travelling, call.parallel.ring)()
    return total.to(q.dtype), travelling[..., :width].to(q.dtype), travelling[..., width:].to(q.dtype)


def _gather_forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    width = k.shape[-1]
    coming = from_all(torch.cat([k, v], dim=-1), call.parallel.ring)
    yield
    out, lse = call.blocks.fwd(q, k, v, call.own)
    total, keys = out.to(lse.dtype), coming()
    for some, seen in _halves(call.layout):
        found = keys[seen.index]
        block = call.full(call.layout.half, seen.documents)
        part = call.blocks.fwd(q[some], found[..., :width], found[..., width:], block)
        total, lse = _merge_some(total, lse, some, part)
    return total.to(out.dtype), lse


def _gather_backward(
    call: RingCall, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Backward:
    width, dtype = k.shape[-1], lse.dtype
    # Gathered again, not kept: K and V of all ranks and all layers would be what sequence parallelism is to avoid.
    coming = from_all(torch.cat([k, v], dim=-1), call.parallel.ring)
    yield
    dq, dk, dv = call.blocks.bwd(grad, q, k, v, out, lse, call.own)
    total, keys = dq.to(dtype), coming()
    theirs = torch.zeros_like(keys, dtype=dtype)
    for some, seen in _halves(call.layout):
        found = keys[seen.index]
        given = grad[some], q[some], found[..., :width], found[..., width:], out[some], lse[:, some]
        more, *of_keys = call.blocks.bwd(*given, call.full(call.layout.half, seen.documents))
        total = total.index_add(0, some, more.to(dtype))
        theirs.index_add_(0, seen.index, torch.cat(of_keys, dim=-1).to(dtype))
    mine = sum_to_owners(theirs, call.parallel.ring)
    return total.to(q.dtype), (dk + mine[..., :width]).to(q.dtype), (dv + mine[..., width:]).to(q.dtype)


def _halves(layout: ShardLayout) -> list[tuple[Tensor, Gathered]]:
    """Queries of each half, and the keys of other ranks that they see."""
    pairs = (layout.first, layout.before_first), (layout.second, layout.before_second)
    return [(some, seen) for some, seen in pairs if seen is not None]
