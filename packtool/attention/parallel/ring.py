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

Where the chunks of a shard lie in tensors: index tensors, made once for a micro-batch and kept with its shard.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.attention.kernel import Varlen
from packtool.attention.parallel.blocks import AttentionBlock, BlockKernel, Gradients, merge_outputs
from packtool.attention.parallel.mesh import SequenceParallel, from_all, sum_to_owners, to_next
from packtool.batch.shard import SequenceShard, assign_tokens
from packtool.planning.skrull import SHARDED


@dataclass(frozen=True, eq=False)
class Gathered:
    """Keys that one half of a rank's queries see, among the keys of all ranks of the ring axis.

    Args:
        documents: of these keys.
        index: int64, their rows in what ``from_all`` returns.
    """

    documents: Varlen
    index: Tensor


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """A ring rank's part of the sharded documents, each of two chunks, as kernels see it.

    Args:
        local: the documents that are this rank's alone.
        whole: both chunks of each sharded document, or all of it where there is no ring.
        half: one chunk of each.
        first, second: int64, tokens of the first chunks and of the second ones.
        before_first, before_second: keys of other ranks that come before them, for the all-gather; None for none.
    """

    local: Varlen
    whole: Varlen
    half: Varlen
    first: Tensor
    second: Tensor
    before_first: Gathered | None
    before_second: Gathered | None


@lru_cache(maxsize=4)
def shard_layout(shard: SequenceShard, device: torch.device) -> ShardLayout:
    """The layout of a rank's shard. The last few are kept: every layer and the backward pass ask again."""
    ring, rank = shard.cut.ring_size, shard.cut.ring_rank
    parts = [length // ring for length in shard.sharded_lengths]
    halves = [part // 2 for part in parts]
    starts = np.cumsum([0, *parts])[:-1]
    first = _runs(starts, halves)
    second = _runs(starts + np.array(halves, np.int64), halves)

    def seen(chunks: Sequence[int]) -> Gathered | None:
        if not chunks or not parts:
            return None
        rows = [_chunk_rows(chunk, ring, starts, halves, sum(parts)) for chunk in chunks]
        by_document = [np.concatenate([row[number] for row in rows]) for number in range(len(parts))]
        lengths = [len(keys) for keys in by_document]
        return Gathered(Varlen.of_lengths(lengths, device), torch.from_numpy(np.concatenate(by_document)).to(device))

    last = 2 * ring - 1 - rank
    return ShardLayout(
        local=Varlen.of_lengths(shard.local_lengths, device),
        whole=Varlen.of_lengths(parts, device),
        half=Varlen.of_lengths(halves, device),
        first=torch.from_numpy(first).to(device),
        second=torch.from_numpy(second).to(device),
        before_first=seen(range(rank)) if ring > 1 else None,
        before_second=seen([chunk for chunk in range(last) if chunk != rank]) if ring > 1 else None,
    )


@lru_cache(maxsize=4)
def sharded_order(shard: SequenceShard, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the tokens of the sharded documents lie in the parts of all P ranks laid end to end, and the way back.

    Returns:
        int64 (T,) each: of every token its row in the parts; of every row of the parts its token.
    """
    places = [SHARDED] * len(shard.sharded_lengths)
    index = np.concatenate(assign_tokens(shard.sharded_lengths, places, shard.cut).index)
    return torch.from_numpy(np.argsort(index)).to(device), torch.from_numpy(index).to(device)


def _runs(starts: npt.NDArray[np.int64], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    runs = [np.arange(start, start + length) for start, length in zip(starts.tolist(), lengths, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _chunk_rows(
    chunk: int, ring: int, starts: npt.NDArray[np.int64], halves: Sequence[int], num_tokens: int
) -> list[npt.NDArray[np.int64]]:
    """Rows of one chunk of each document, in the parts of all ring ranks laid end to end."""
    owner, is_second = (chunk, False) if chunk < ring else (2 * ring - 1 - chunk, True)
    return [
        np.arange(half) + owner * num_tokens + start + (half if is_second else 0)
        for start, half in zip(starts.tolist(), halves, strict=True)
    ]


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
    """Gradients of q, k and v, shapes as for ``Kernel.fwd``, from the final out and lse of this rank's tokens."""
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
