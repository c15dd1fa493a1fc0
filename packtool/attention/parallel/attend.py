"""Attention of a rank's part of a shared sequence: local documents on their own, sharded ones with the other ranks.

    first exchange of the sharded documents started ──► local documents ──► sharded documents

Forward and backward run in this order: local documents are computed while K and V (or, with Ulysses, heads) are
exchanged (Skrull, arXiv 2505.19609, section 3.1). Only inside one autograd function can work overlap with an exchange.

- *ulysses* (Jacobs et al. 2023, "DeepSpeed Ulysses"): U ranks exchange so that each has all tokens of the U parts and
  1/U of the heads, attend (through the ring, if there is one), and exchange back. K and V with fewer than U heads are
  repeated to the least common multiple; the gradients of the copies are added up.
- *ring* (Liu et al. 2023, "Ring Attention with Blockwise Transformers"; zigzag: Dubey et al. 2024, "The Llama 3 Herd of
  Models", section 3.3.2): each rank has two chunks of every document (``batch.shard``). Queries see the first chunk of
  earlier ranks; the second chunk's queries also see both chunks of later ranks. Every hop is half of a full square. K
  and V (T, Hkv, D) make R - 1 hops; backward they go around again with float32 gradients, which take one more hop home.
- *allgather* (as Llama 3): K and V of all ranks at once, about 2 R T rows more for one layer at a time, and in backward
  twice as many in float32 for their gradients. One exchange instead of R - 1, and fewer, larger blocks.

The generator functions yield once, after starting their first exchange, and return their result when resumed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.attention.kernel import Varlen, default_scale
from packtool.attention.parallel.blocks import AttentionBlock, BlockKernel, Gradients, merge_outputs
from packtool.attention.parallel.mesh import (
    SequenceParallel,
    gather_heads,
    reduce_scatter_rows,
    scatter_heads,
    start_all_gather,
    start_ring_transfer,
)
from packtool.batch.shard import SequenceShard
from packtool.errors import UnsupportedModelError

T = TypeVar("T")


class AttentionTensors(NamedTuple):
    """Inputs and results of an attention call: q, out (T, Hq, D), k, v (T, Hkv, D) and lse float32 (Hq, T)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


Forward = Generator[None, None, tuple[Tensor, Tensor]]
"""Returns the output and its lse."""
Backward = Generator[None, None, Gradients]
ShardedForward = Generator[None, None, tuple[Tensor, AttentionTensors]]


class GatheredKeys(NamedTuple):
    """Keys of the other ring ranks that one chunk per document of this rank sees, for the all-gather.

    Args:
        queries: int64, rows of the chunks' tokens in this rank's sharded tokens.
        documents: the keys of each document.
        rows: int64, the keys' rows in the tokens gathered from all ranks.
    """

    queries: Tensor
    documents: Varlen
    rows: Tensor


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The documents of one rank's shard, and index tensors of their chunks.

    With R ring ranks, a sharded document is divided into 2R chunks; ring rank i has chunks i and 2R - 1 - i.

    Args:
        local: documents that are this rank's alone.
        sharded: this rank's tokens of each sharded document: two chunks, or the complete document without a ring.
        chunk: one chunk of each sharded document; a document's two chunks have the same length.
        first_chunks, second_chunks: int64, rows of the first or second chunks in this rank's sharded tokens.
        gathered: for the all-gather, by first and second chunks; without chunks that see no other rank's keys.
    """

    local: Varlen
    sharded: Varlen
    chunk: Varlen
    first_chunks: Tensor
    second_chunks: Tensor
    gathered: tuple[GatheredKeys, ...]


@lru_cache(maxsize=4)
def shard_layout(shard: SequenceShard, device: torch.device) -> ShardLayout:
    """Return the layout of a rank's shard; cached, because every layer needs it."""
    ring_size, rank = shard.split.ring_size, shard.split.ring_rank
    first_chunk, second_chunk = rank, 2 * ring_size - 1 - rank  # numbers of this rank's chunks of each document
    lengths = [length // ring_size for length in shard.sharded_lengths]  # each rank's tokens of each document
    chunk_lengths = [length // 2 for length in lengths]
    starts = np.cumsum([0, *lengths])[:-1].tolist()  # of each document in a rank's sharded tokens

    def chunk_rows(chunk: int) -> list[npt.NDArray[np.int64]]:
        """Return, for each document, the rows of a chunk in the sharded tokens of all ring ranks laid end to end."""
        is_second_of_owner = chunk >= ring_size
        owner = 2 * ring_size - 1 - chunk if is_second_of_owner else chunk
        rows = []
        for start, chunk_length in zip(starts, chunk_lengths, strict=True):
            first_row = owner * sum(lengths) + start + (chunk_length if is_second_of_owner else 0)
            rows.append(np.arange(first_row, first_row + chunk_length))
        return rows

    def joined(rows: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])).to(device)

    def own_rows(chunk: int) -> Tensor:
        return joined([rows - rank * sum(lengths) for rows in chunk_rows(chunk)])

    # For the all-gather: queries see the keys of all chunks before their own. Those on this rank are not gathered.
    first_rows, second_rows = own_rows(first_chunk), own_rows(second_chunk)
    seen_by_first = range(first_chunk)
    seen_by_second = [chunk for chunk in range(second_chunk) if chunk != first_chunk]
    gathered = []
    for queries, chunks in ((first_rows, seen_by_first), (second_rows, seen_by_second)):
        if ring_size > 1 and lengths and chunks:
            rows_by_chunk = [chunk_rows(chunk) for chunk in chunks]
            keys = [np.concatenate(rows_of_document) for rows_of_document in zip(*rows_by_chunk, strict=True)]
            key_documents = Varlen.of_lengths([len(rows) for rows in keys], device)
            gathered.append(GatheredKeys(queries, key_documents, rows=joined(keys)))
    return ShardLayout(
        local=Varlen.of_lengths(shard.local_lengths, device),
        sharded=Varlen.of_lengths(lengths, device),
        chunk=Varlen.of_lengths(chunk_lengths, device),
        first_chunks=first_rows,
        second_chunks=second_rows,
        gathered=tuple(gathered),
    )


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's attention to a shared sequence; ``window`` is that of a sliding layer, not with a ring."""

    parallel: SequenceParallel
    shard: SequenceShard
    kernel: BlockKernel
    scale: float
    window: int | None
    layout: ShardLayout

    @property
    def gathers_keys(self) -> bool:
        """True if K and V of all ring ranks are gathered at once, instead of passed around the ring."""
        return self.parallel.split.ring_size > 1 and self.parallel.kv_exchange == "allgather"

    def causal_block(self, documents: Varlen) -> AttentionBlock:
        """Each query sees itself and the tokens before it."""
        return AttentionBlock(documents, documents, True, self.scale, self.window)

    def full_block(self, queries: Varlen, keys: Varlen) -> AttentionBlock:
        """Each query sees all keys of its document."""
        return AttentionBlock(queries, keys, False, self.scale)

    def keys_come_from_lower_rank(self, hops: int) -> bool:
        """Check that the keys received after ``hops`` transfers around the ring belong to a rank below this one."""
        rank = self.parallel.split.ring_rank
        return (rank - hops) % self.parallel.split.ring_size < rank

    def num_copies(self, num_key_heads: int) -> int:
        """Copies of each head of K and V, so that the Ulysses ranks can share them evenly."""
        return math.lcm(num_key_heads, self.parallel.split.ulysses_size) // num_key_heads


def attend_shard(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: SequenceShard,
    parallel: SequenceParallel,
    kernel: BlockKernel,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within each document of a sequence that several ranks share; all of them call this.

    Args:
        q: (T, Hq, D) of this rank's tokens: first its local documents, then its tokens of the sharded documents.
        k, v: (T, Hkv, D).
        scale: factor on the scores, by default 1 / sqrt(D).
        window: a query sees itself and at most ``window - 1`` tokens before it.

    Returns:
        (T, Hq, D), differentiable.

    Raises:
        UnsupportedModelError: for a window if a ring divides the tokens.
    """
    if window is not None and parallel.split.ring_size > 1:
        problem = "a layer has a sliding window, which chunks on a ring would cut"
        raise UnsupportedModelError(problem, "Use --sequence-parallel-type ulysses.")
    assert len(q) == shard.num_local + sum(shard.sharded_lengths) // parallel.split.size, "a part of another sequence"
    layout = shard_layout(shard, q.device)
    call = Call(parallel, shard, kernel, scale=default_scale(q, scale), window=window, layout=layout)
    return _Attend.apply(q, k, v, call)


class _Attend(torch.autograd.Function):
    """Attention of local and sharded documents; local ones are computed during the first exchange of the others."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        num_local = call.shard.num_local
        has_ulysses = call.parallel.split.ulysses_size > 1
        local_q, local_k, local_v = q[:num_local], k[:num_local], v[:num_local]
        sharded_forward = None
        if call.shard.sharded_lengths:
            if has_ulysses:
                # Saved views would keep the sharded tokens in memory, which are saved again after their exchange.
                local_q, local_k, local_v = local_q.clone(), local_k.clone(), local_v.clone()
            sharded_forward = _sharded_forward(call, q[num_local:], k[num_local:], v[num_local:])
            next(sharded_forward)  # start the exchange
        outs: list[Tensor] = []
        saved_local: list[Tensor | None] = [None] * 4  # q, k, v, lse
        saved_sharded: list[Tensor | None] = [None] * 5  # q, k, v, out, lse
        if num_local:
            out, lse = call.kernel.fwd(local_q, local_k, local_v, call.causal_block(call.layout.local))
            outs.append(out)
            saved_local = [local_q, local_k, local_v, lse]
        if sharded_forward is not None:
            out, tensors = _resume_for_result(sharded_forward)
            outs.append(out)
            # Without Ulysses, the output is a part of ``result``; with it, it has other heads and tokens.
            saved_sharded = [tensors.q, tensors.k, tensors.v, tensors.out if has_ulysses else None, tensors.lse]
        result = _concatenate(outs)
        ctx.call, ctx.num_key_heads = call, k.shape[1]
        ctx.save_for_backward(result, *saved_local, *saved_sharded)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        num_local = call.shard.num_local
        result, local_q, local_k, local_v, local_lse, q, k, v, out, lse = ctx.saved_tensors
        sharded_backward = None
        if call.shard.sharded_lengths:
            tensors = AttentionTensors(q, k, v, result[num_local:] if out is None else out, lse)
            sharded_backward = _sharded_backward(call, grad[num_local:], tensors, ctx.num_key_heads)
            next(sharded_backward)  # start the exchange
        gradients: list[Gradients] = []
        if num_local:
            local_grad, local_out = grad[:num_local].contiguous(), result[:num_local]
            block = call.causal_block(call.layout.local)
            gradients.append(call.kernel.bwd(local_grad, local_q, local_k, local_v, local_out, local_lse, block))
        if sharded_backward is not None:
            gradients.append(_resume_for_result(sharded_backward))
        dq, dk, dv = map(_concatenate, zip(*gradients, strict=True))  # of local documents, then of sharded ones
        return dq, dk, dv, None


def _concatenate(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _sharded_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> ShardedForward:
    """Return the output of this rank's sharded tokens, and the tensors for the backward pass.

    With Ulysses, the tensors for the backward pass have all tokens of the U ranks, and this rank's share of the heads.
    A generator: it yields once, after starting its first exchange, and returns when it is resumed.
    """
    num_ranks = call.parallel.split.ulysses_size
    if num_ranks == 1:
        out, lse = yield from _ring_forward(call, q, k, v)
        return out, AttentionTensors(q, k, v, out, lse)
    num_copies = call.num_copies(k.shape[1])
    k, v = (tensor.repeat_interleave(num_copies, dim=1) for tensor in (k, v))
    # One exchange for q, k and v: for each rank its heads of q, then those of k, then those of v.
    heads_per_rank = [tensor.shape[1] // num_ranks for tensor in (q, k, v)]
    head_dims = [tensor.shape[-1] for tensor in (q, k, v)]
    padded = (_pad_head_dim(tensor, max(head_dims)) for tensor in (q, k, v))
    heads_by_rank = torch.cat([torch.unflatten(tensor, 1, (num_ranks, -1)) for tensor in padded], dim=2)
    wait_for_heads = scatter_heads(heads_by_rank.flatten(1, 2), call.parallel.ulysses)
    del heads_by_rank
    yield
    received = torch.split(wait_for_heads(), heads_per_rank, dim=1)
    q, k, v = (tensor[..., :dim].contiguous() for tensor, dim in zip(received, head_dims, strict=True))
    # Free the exchanged tensors, of which q, k and v are copies: attention needs the memory.
    del wait_for_heads, received
    out, lse = _run_without_overlap(_ring_forward(call, q, k, v))
    return gather_heads(out, call.parallel.ulysses), AttentionTensors(q, k, v, out, lse)


def _sharded_backward(call: Call, grad: Tensor, saved: AttentionTensors, num_key_heads: int) -> Backward:
    """Return the gradients of q, k and v of this rank's sharded tokens, from the gradient of their output (T, Hq, D).

    ``num_key_heads``: heads of k and v before they were repeated for Ulysses.
    A generator: it yields once, after starting its first exchange, and returns when it is resumed.
    """
    num_ranks = call.parallel.split.ulysses_size
    if num_ranks == 1:
        return (yield from _ring_backward(call, grad.contiguous(), *saved))
    wait_for_heads = scatter_heads(grad, call.parallel.ulysses)
    yield
    gradients = _run_without_overlap(_ring_backward(call, wait_for_heads(), *saved))
    # One exchange for dq, dk and dv: received are for each rank its heads of dq, then those of dk, then those of dv.
    heads_per_rank = [tensor.shape[1] for tensor in gradients]
    head_dims = [tensor.shape[-1] for tensor in gradients]
    packed = torch.cat([_pad_head_dim(tensor, max(head_dims)) for tensor in gradients], dim=1)
    heads_by_rank = torch.unflatten(gather_heads(packed, call.parallel.ulysses), 1, (num_ranks, -1))
    received = torch.split(heads_by_rank, heads_per_rank, dim=2)
    dq, dk, dv = (tensor.flatten(1, 2)[..., :dim] for tensor, dim in zip(received, head_dims, strict=True))
    num_copies = call.num_copies(num_key_heads)
    if num_copies > 1:
        dk, dv = (torch.unflatten(tensor, 1, (num_key_heads, num_copies)).sum(2) for tensor in (dk, dv))
    return dq, dk, dv


def _pad_head_dim(tensor: Tensor, head_dim: int) -> Tensor:
    return F.pad(tensor, (0, head_dim - tensor.shape[-1])) if tensor.shape[-1] < head_dim else tensor


def _resume_for_result(generator: Generator[None, None, T]) -> T:
    """Return the value of a generator that has yielded."""
    try:
        next(generator)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it yields once")


def _run_without_overlap(generator: Generator[None, None, T]) -> T:
    """Return the value of a generator that was not started."""
    next(generator)
    return _resume_for_result(generator)


def _ring_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Attend to the keys of all ring ranks, which pass K and V around; return out (T, Hq, D) and lse (Hq, T).

    A generator: it yields once, after starting its first exchange, and returns when it is resumed.
    """
    if call.gathers_keys:
        return (yield from _gather_forward(call, q, k, v))
    ring, ring_size = call.parallel.ring, call.parallel.split.ring_size
    layout = call.layout
    kv = torch.cat([k, v], dim=-1)
    key_dim = k.shape[-1]
    wait_for_kv = start_ring_transfer(kv, ring) if ring_size > 1 else None
    yield
    own_out, lse = call.kernel.fwd(q, k, v, call.causal_block(layout.sharded))
    if wait_for_kv is None:
        return own_out, lse
    out = own_out.to(lse.dtype)
    for hops in range(1, ring_size):
        kv = wait_for_kv()
        if hops + 1 < ring_size:
            wait_for_kv = start_ring_transfer(kv, ring)
        k, v = kv[..., :key_dim], kv[..., key_dim:]
        if call.keys_come_from_lower_rank(hops):
            # All queries see the keys in first chunks, and none sees those in second chunks.
            k, v = k[layout.first_chunks], v[layout.first_chunks]
            block = call.full_block(layout.sharded, layout.chunk)
            out, lse = merge_outputs(out, lse, *call.kernel.fwd(q, k, v, block))
        else:
            # Queries in second chunks see all of these keys, and queries in first chunks see none.
            rows = layout.second_chunks
            block = call.full_block(layout.chunk, layout.sharded)
            out, lse = _merge_into_rows(out, lse, rows, call.kernel.fwd(q[rows], k, v, block))
    return out.to(own_out.dtype), lse


def _merge_into_rows(
    out: Tensor, lse: Tensor, queries: Tensor, block_result: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the output and lse of a block, whose queries are the tokens ``queries``, into those of all tokens."""
    merged, merged_lse = merge_outputs(out[queries], lse[:, queries], *block_result)
    return out.index_copy(0, queries, merged), lse.index_copy(1, queries, merged_lse)


def _ring_backward(call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Backward:
    """Return the gradients of q, k and v of this rank's tokens, from their final out and lse.

    K and V pass around the ring again. Their gradients follow one hop behind and return to the owner at the end.
    A generator: it yields once, after starting its first exchange, and returns when it is resumed.
    """
    if call.gathers_keys:
        return (yield from _gather_backward(call, grad, q, k, v, out, lse))
    ring, ring_size = call.parallel.ring, call.parallel.split.ring_size
    layout = call.layout
    kv = torch.cat([k, v], dim=-1)
    key_dim = k.shape[-1]
    wait_for_kv = start_ring_transfer(kv, ring) if ring_size > 1 else None
    yield
    dq, dk, dv = call.kernel.bwd(grad, q, k, v, out, lse, call.causal_block(layout.sharded))
    if wait_for_kv is None:
        return dq, dk, dv
    sum_dtype = lse.dtype
    total_dq, dkv = dq.to(sum_dtype), torch.cat([dk, dv], dim=-1).to(sum_dtype)
    for hops in range(1, ring_size):
        kv = wait_for_kv()
        # The gradients of these keys so far arrive while this rank computes its own part of them.
        wait_for_dkv = start_ring_transfer(dkv, ring)
        if hops + 1 < ring_size:
            wait_for_kv = start_ring_transfer(kv, ring)
        k, v = kv[..., :key_dim], kv[..., key_dim:]
        # Which queries see which keys: as in _ring_forward.
        if call.keys_come_from_lower_rank(hops):
            rows = layout.first_chunks
            k, v = k[rows], v[rows]
            block = call.full_block(layout.sharded, layout.chunk)
            dq, dk, dv = call.kernel.bwd(grad, q, k, v, out, lse, block)
            total_dq += dq
            dkv = wait_for_dkv().index_add(0, rows, torch.cat([dk, dv], dim=-1).to(sum_dtype))
        else:
            rows = layout.second_chunks
            block = call.full_block(layout.chunk, layout.sharded)
            dq, dk, dv = call.kernel.bwd(grad[rows], q[rows], k, v, out[rows], lse[:, rows], block)
            total_dq = total_dq.index_add(0, rows, dq.to(sum_dtype))
            dkv = wait_for_dkv() + torch.cat([dk, dv], dim=-1)
    own_dkv = start_ring_transfer(dkv, ring)()
    return total_dq.to(q.dtype), own_dkv[..., :key_dim].to(q.dtype), own_dkv[..., key_dim:].to(q.dtype)


def _gather_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """``_ring_forward`` with K and V of all ring ranks gathered at once."""
    key_dim = k.shape[-1]
    wait_for_kv = start_all_gather(torch.cat([k, v], dim=-1), call.parallel.ring)
    yield
    own_out, lse = call.kernel.fwd(q, k, v, call.causal_block(call.layout.sharded))
    out, gathered_kv = own_out.to(lse.dtype), wait_for_kv()
    for queries, documents, rows in call.layout.gathered:
        kv, block = gathered_kv[rows], call.full_block(call.layout.chunk, documents)
        block_result = call.kernel.fwd(q[queries], kv[..., :key_dim], kv[..., key_dim:], block)
        out, lse = _merge_into_rows(out, lse, queries, block_result)
    return out.to(own_out.dtype), lse


def _gather_backward(call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Backward:
    """``_ring_backward`` with K and V of all ring ranks gathered at once."""
    key_dim, sum_dtype = k.shape[-1], lse.dtype
    # Gathered again, not saved: sequence parallelism is to avoid keeping K and V of all ranks and all layers.
    wait_for_kv = start_all_gather(torch.cat([k, v], dim=-1), call.parallel.ring)
    yield
    dq, dk, dv = call.kernel.bwd(grad, q, k, v, out, lse, call.causal_block(call.layout.sharded))
    total_dq, gathered_kv = dq.to(sum_dtype), wait_for_kv()
    gathered_dkv = torch.zeros_like(gathered_kv, dtype=sum_dtype)
    for queries, documents, rows in call.layout.gathered:
        kv, block = gathered_kv[rows], call.full_block(call.layout.chunk, documents)
        inputs = grad[queries], q[queries], kv[..., :key_dim], kv[..., key_dim:], out[queries], lse[:, queries]
        block_dq, *block_dkv = call.kernel.bwd(*inputs, block)
        total_dq = total_dq.index_add(0, queries, block_dq.to(sum_dtype))
        gathered_dkv.index_add_(0, rows, torch.cat(block_dkv, dim=-1).to(sum_dtype))
    own_dkv = reduce_scatter_rows(gathered_dkv, call.parallel.ring)
    return total_dq.to(q.dtype), (dk + own_dkv[..., :key_dim]).to(q.dtype), (dv + own_dkv[..., key_dim:]).to(q.dtype)
