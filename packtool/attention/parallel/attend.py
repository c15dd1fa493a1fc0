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
    lengths = _rank_lengths(shard)
    first_rows = _own_rows(shard, first_chunk, device)
    second_rows = _own_rows(shard, second_chunk, device)
    # For the all-gather: queries see the keys of all chunks before their own. Those on this rank are not gathered.
    seen_by_first = range(first_chunk)
    seen_by_second = [chunk for chunk in range(second_chunk) if chunk != first_chunk]
    gathered = []
    for queries, chunks in ((first_rows, seen_by_first), (second_rows, seen_by_second)):
        if ring_size > 1 and lengths and chunks:
            gathered.append(_gathered_keys(shard, queries, chunks))
    return ShardLayout(
        local=Varlen.of_lengths(shard.local_lengths, device),
        sharded=Varlen.of_lengths(lengths, device),
        chunk=Varlen.of_lengths([length // 2 for length in lengths], device),
        first_chunks=first_rows,
        second_chunks=second_rows,
        gathered=tuple(gathered),
    )


def _rank_lengths(shard: SequenceShard) -> list[int]:
    """Return the number of tokens that each ring rank has of each sharded document: two chunks."""
    return [length // shard.split.ring_size for length in shard.sharded_lengths]


def _chunk_rows(shard: SequenceShard, chunk: int) -> list[npt.NDArray[np.int64]]:
    """Return, for each document, the rows of a chunk in the sharded tokens of all ring ranks laid end to end."""
    ring_size = shard.split.ring_size
    lengths = _rank_lengths(shard)
    is_second_of_owner = chunk >= ring_size
    owner = 2 * ring_size - 1 - chunk if is_second_of_owner else chunk
    document_start = owner * sum(lengths)
    rows = []
    for length in lengths:
        chunk_length = length // 2
        first_row = document_start + chunk_length if is_second_of_owner else document_start
        rows.append(np.arange(first_row, first_row + chunk_length))
        document_start += length
    return rows


def _own_rows(shard: SequenceShard, chunk: int, device: torch.device) -> Tensor:
    """Return, int64, the rows of one of this rank's chunks of all documents in the rank's sharded tokens."""
    rank_start = shard.split.ring_rank * sum(_rank_lengths(shard))
    return _join_rows(_chunk_rows(shard, chunk), device) - rank_start


def _gathered_keys(shard: SequenceShard, queries: Tensor, chunks: Sequence[int]) -> GatheredKeys:
    """Return the keys in ``chunks`` of the other ranks, which the ``queries`` of one chunk per document see."""
    rows_by_chunk = [_chunk_rows(shard, chunk) for chunk in chunks]
    rows_by_document = [np.concatenate(rows) for rows in zip(*rows_by_chunk, strict=True)]
    documents = Varlen.of_lengths([len(rows) for rows in rows_by_document], queries.device)
    return GatheredKeys(queries, documents, rows=_join_rows(rows_by_document, queries.device))


def _join_rows(rows: Sequence[npt.NDArray[np.int64]], device: torch.device) -> Tensor:
    no_rows = np.zeros(0, np.int64)  # for a shard without sharded documents
    return torch.from_numpy(np.concatenate([no_rows, *rows])).to(device)


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
    def has_ulysses(self) -> bool:
        return self.parallel.split.ulysses_size > 1

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
        """Return the output (T, Hq, D): first of the local documents, then of the sharded ones, as in q, k and v."""
        num_local = call.shard.num_local
        local_inputs = _local_inputs(call, q, k, v)
        sharded_forward = None
        if call.shard.sharded_lengths:
            sharded_forward = _sharded_forward(call, q[num_local:], k[num_local:], v[num_local:])
            next(sharded_forward)  # start the exchange
        outs: list[Tensor] = []
        saved_local: list[Tensor | None] = [None] * _NUM_SAVED_LOCAL
        saved_sharded: list[Tensor | None] = [None] * len(AttentionTensors._fields)
        if num_local:
            out, lse = call.kernel.fwd(*local_inputs, call.causal_block(call.layout.local))
            outs.append(out)
            saved_local = [*local_inputs, lse]
        if sharded_forward is not None:
            out, tensors = _resume_for_result(sharded_forward)
            outs.append(out)
            # Without Ulysses, the output is a part of ``result``; with it, it has other heads and tokens.
            saved_sharded = [tensors.q, tensors.k, tensors.v, tensors.out if call.has_ulysses else None, tensors.lse]
        result = _concatenate(outs)
        ctx.call = call
        ctx.num_key_heads = k.shape[1]
        ctx.save_for_backward(result, *saved_local, *saved_sharded)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v, and None for the call."""
        call: Call = ctx.call
        num_local = call.shard.num_local
        result, *saved = ctx.saved_tensors
        sharded_backward = None
        if call.shard.sharded_lengths:
            tensors = AttentionTensors(*saved[_NUM_SAVED_LOCAL:])
            if not call.has_ulysses:
                tensors = tensors._replace(out=result[num_local:])
            sharded_backward = _sharded_backward(call, grad[num_local:], tensors, ctx.num_key_heads)
            next(sharded_backward)  # start the exchange
        gradients: list[Gradients] = []
        if num_local:
            q, k, v, lse = saved[:_NUM_SAVED_LOCAL]
            local_grad = grad[:num_local].contiguous()
            block = call.causal_block(call.layout.local)
            gradients.append(call.kernel.bwd(local_grad, q, k, v, result[:num_local], lse, block))
        if sharded_backward is not None:
            gradients.append(_resume_for_result(sharded_backward))
        dq, dk, dv = map(_concatenate, zip(*gradients, strict=True))  # of local documents, then of sharded ones
        return dq, dk, dv, None


_NUM_SAVED_LOCAL = 4
"""Tensors of the local documents that are saved for the backward pass: q, k, v and lse."""


def _local_inputs(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Return q, k and v of the local documents, which are saved for the backward pass."""
    num_local = call.shard.num_local
    local_q, local_k, local_v = q[:num_local], k[:num_local], v[:num_local]
    if call.shard.sharded_lengths and call.has_ulysses:
        # Saved views would keep the sharded tokens in memory, which are saved again after their exchange.
        return local_q.clone(), local_k.clone(), local_v.clone()
    return local_q, local_k, local_v


def _concatenate(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _sharded_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> ShardedForward:
    """Return the output of this rank's sharded tokens, and the tensors for the backward pass.

    With Ulysses, the tensors for the backward pass have all tokens of the U ranks, and this rank's share of the heads.
    A generator: it yields once, after starting its first exchange, and returns when it is resumed.
    """
    if not call.has_ulysses:
        out, lse = yield from _ring_forward(call, q, k, v)
        return out, AttentionTensors(q, k, v, out, lse)
    num_ranks = call.parallel.split.ulysses_size
    num_copies = call.num_copies(k.shape[1])
    k = k.repeat_interleave(num_copies, dim=1)
    v = v.repeat_interleave(num_copies, dim=1)
    heads_per_rank = [tensor.shape[1] // num_ranks for tensor in (q, k, v)]
    head_dims = [tensor.shape[-1] for tensor in (q, k, v)]
    wait_for_heads = scatter_heads(_heads_by_rank(q, k, v, num_ranks), call.parallel.ulysses)
    yield
    q, k, v = _split_heads(wait_for_heads(), heads_per_rank, head_dims)
    # Free the exchanged tensor, of which q, k and v are copies: attention needs the memory.
    del wait_for_heads
    out, lse = _run_without_overlap(_ring_forward(call, q, k, v))
    return gather_heads(out, call.parallel.ulysses), AttentionTensors(q, k, v, out, lse)


def _heads_by_rank(q: Tensor, k: Tensor, v: Tensor, num_ranks: int) -> Tensor:
    """Join q, k and v (T, H, D) along their heads: for each rank its heads of q, then those of k, then those of v."""
    head_dim = max(q.shape[-1], v.shape[-1])
    parts = []
    for tensor in (q, k, v):
        padded = _pad_head_dim(tensor, head_dim)
        parts.append(torch.unflatten(padded, 1, (num_ranks, -1)))  # (T, ranks, heads of a rank, D)
    return torch.cat(parts, dim=2).flatten(1, 2)


def _split_heads(joined: Tensor, num_heads: list[int], head_dims: list[int]) -> Gradients:
    """Return the contiguous tensors (T, H, D) that are joined along their heads, padded to the same D."""
    parts = torch.split(joined, num_heads, dim=1)
    q, k, v = (part[..., :head_dim].contiguous() for part, head_dim in zip(parts, head_dims, strict=True))
    return q, k, v


def _sharded_backward(call: Call, grad: Tensor, saved: AttentionTensors, num_key_heads: int) -> Backward:
    """Return the gradients of q, k and v of this rank's sharded tokens, from the gradient of their output (T, Hq, D).

    ``num_key_heads``: heads of k and v before they were repeated for Ulysses.
    A generator: it yields once, after starting its first exchange, and returns when it is resumed.
    """
    if not call.has_ulysses:
        return (yield from _ring_backward(call, grad.contiguous(), saved))
    wait_for_heads = scatter_heads(grad, call.parallel.ulysses)
    yield
    gradients = _run_without_overlap(_ring_backward(call, wait_for_heads(), saved))
    dq, dk, dv = _gather_gradients(call, gradients)
    num_copies = call.num_copies(num_key_heads)
    if num_copies > 1:
        dk = torch.unflatten(dk, 1, (num_key_heads, num_copies)).sum(2)
        dv = torch.unflatten(dv, 1, (num_key_heads, num_copies)).sum(2)
    return dq, dk, dv


def _gather_gradients(call: Call, gradients: Gradients) -> Gradients:
    """Exchange dq, dk and dv of this rank's heads and all U ranks' tokens for those of all heads, in one exchange."""
    heads_per_rank = [tensor.shape[1] for tensor in gradients]
    head_dims = [tensor.shape[-1] for tensor in gradients]
    joined = torch.cat([_pad_head_dim(tensor, max(head_dims)) for tensor in gradients], dim=1)
    gathered = gather_heads(joined, call.parallel.ulysses)
    # Received are, for each rank, its heads of dq, then those of dk, then those of dv.
    heads_by_rank = torch.unflatten(gathered, 1, (call.parallel.split.ulysses_size, -1))
    parts = torch.split(heads_by_rank, heads_per_rank, dim=2)  # (T, ranks, heads of a rank, D) each
    dq, dk, dv = (part.flatten(1, 2)[..., :head_dim] for part, head_dim in zip(parts, head_dims, strict=True))
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
    key_dim = k.shape[-1]
    kv = torch.cat([k, v], dim=-1)
    wait_for_kv = start_ring_transfer(kv, ring) if ring_size > 1 else None
    yield
    own_out, lse = call.kernel.fwd(q, k, v, call.causal_block(call.layout.sharded))
    if wait_for_kv is None:
        return own_out, lse
    out = own_out.to(lse.dtype)
    for hops in range(1, ring_size):
        kv = wait_for_kv()
        if hops + 1 < ring_size:
            wait_for_kv = start_ring_transfer(kv, ring)
        k, v = kv[..., :key_dim], kv[..., key_dim:]
        out, lse = _merge_received_keys(call, hops, q, k, v, (out, lse))
    return out.to(own_out.dtype), lse


def _merge_received_keys(
    call: Call, hops: int, q: Tensor, k: Tensor, v: Tensor, result: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Attend to K and V that were received after ``hops`` transfers, and merge into ``result``, the out and lse."""
    layout = call.layout
    if call.keys_come_from_lower_rank(hops):
        # All queries see the keys in first chunks, and none sees those in second chunks.
        rows = layout.first_chunks
        block = call.full_block(layout.sharded, layout.chunk)
        return merge_outputs(*result, *call.kernel.fwd(q, k[rows], v[rows], block))
    # Queries in second chunks see all of these keys, and queries in first chunks see none.
    rows = layout.second_chunks
    block = call.full_block(layout.chunk, layout.sharded)
    return _merge_into_rows(*result, rows, call.kernel.fwd(q[rows], k, v, block))


def _merge_into_rows(
    out: Tensor, lse: Tensor, queries: Tensor, block_result: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the output and lse of a block, whose queries are the tokens ``queries``, into those of all tokens."""
    merged, merged_lse = merge_outputs(out[queries], lse[:, queries], *block_result)
    return out.index_copy(0, queries, merged), lse.index_copy(1, queries, merged_lse)


def _ring_backward(call: Call, grad: Tensor, saved: AttentionTensors) -> Backward:
    """Return the gradients of q, k and v of this rank's tokens, from their final out and lse.

    K and V pass around the ring again. Their gradients follow one hop behind and return to the owner at the end.
    A generator: it yields once, after starting its first exchange, and returns when it is resumed.
    """
    if call.gathers_keys:
        return (yield from _gather_backward(call, grad, saved))
    ring, ring_size = call.parallel.ring, call.parallel.split.ring_size
    kv = torch.cat([saved.k, saved.v], dim=-1)
    wait_for_kv = start_ring_transfer(kv, ring) if ring_size > 1 else None
    yield
    own_gradients = call.kernel.bwd(grad, *saved, call.causal_block(call.layout.sharded))
    if wait_for_kv is None:
        return own_gradients
    own_dq, *own_dkv = own_gradients
    dq = own_dq.to(saved.lse.dtype)
    dkv = torch.cat(own_dkv, dim=-1).to(saved.lse.dtype)
    for hops in range(1, ring_size):
        kv = wait_for_kv()
        # The gradients of these keys so far arrive while this rank computes its own part of them.
        wait_for_dkv = start_ring_transfer(dkv, ring)
        if hops + 1 < ring_size:
            wait_for_kv = start_ring_transfer(kv, ring)
        query_rows, key_rows, (block_dq, *block_dkv) = _received_gradients(call, hops, grad, saved, kv)
        dq = _add_to_rows(dq, query_rows, block_dq)
        dkv = _add_to_rows(wait_for_dkv(), key_rows, torch.cat(block_dkv, dim=-1))
    dkv = start_ring_transfer(dkv, ring)()  # home to the rank of the keys
    dk, dv = _split_kv(dkv, saved.k.shape[-1])
    return dq.to(saved.q.dtype), dk.to(saved.q.dtype), dv.to(saved.q.dtype)


def _split_kv(kv: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Return K and V, or their gradients, (T, H, D) each, which are exchanged side by side."""
    return kv[..., :key_dim], kv[..., key_dim:]


def _received_gradients(
    call: Call, hops: int, grad: Tensor, saved: AttentionTensors, kv: Tensor
) -> tuple[Tensor | None, Tensor | None, Gradients]:
    """Return the gradients of this rank's queries, and of K and V that were received after ``hops`` transfers.

    They come after the rows of the queries and of the keys that have gradients; None means all rows. Which queries see
    which keys: as in ``_merge_received_keys``.
    """
    layout = call.layout
    q, _, _, out, lse = saved
    k, v = _split_kv(kv, saved.k.shape[-1])
    if call.keys_come_from_lower_rank(hops):
        rows = layout.first_chunks
        block = call.full_block(layout.sharded, layout.chunk)
        return None, rows, call.kernel.bwd(grad, q, k[rows], v[rows], out, lse, block)
    rows = layout.second_chunks
    block = call.full_block(layout.chunk, layout.sharded)
    return rows, None, call.kernel.bwd(grad[rows], q[rows], k, v, out[rows], lse[:, rows], block)


def _add_to_rows(total: Tensor, rows: Tensor | None, part: Tensor) -> Tensor:
    """Add ``part`` to these rows of a sum, or to all with None; the sum's memory may be reused."""
    if rows is None:
        return total.add_(part)
    return total.index_add(0, rows, part.to(total.dtype))


def _gather_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """``_ring_forward`` with K and V of all ring ranks gathered at once."""
    key_dim = k.shape[-1]
    wait_for_kv = start_all_gather(torch.cat([k, v], dim=-1), call.parallel.ring)
    yield
    own_out, lse = call.kernel.fwd(q, k, v, call.causal_block(call.layout.sharded))
    out = own_out.to(lse.dtype)
    gathered_kv = wait_for_kv()
    for queries, documents, rows in call.layout.gathered:
        kv = gathered_kv[rows]
        block = call.full_block(call.layout.chunk, documents)
        block_result = call.kernel.fwd(q[queries], kv[..., :key_dim], kv[..., key_dim:], block)
        out, lse = _merge_into_rows(out, lse, queries, block_result)
    return out.to(own_out.dtype), lse


def _gather_backward(call: Call, grad: Tensor, saved: AttentionTensors) -> Backward:
    """``_ring_backward`` with K and V of all ring ranks gathered at once."""
    # Gathered again, not saved: sequence parallelism is to avoid keeping K and V of all ranks and all layers.
    wait_for_kv = start_all_gather(torch.cat([saved.k, saved.v], dim=-1), call.parallel.ring)
    yield
    own_dq, own_dk, own_dv = call.kernel.bwd(grad, *saved, call.causal_block(call.layout.sharded))
    dq, gathered_dkv = _gathered_gradients(call, grad, saved, wait_for_kv(), own_dq)
    dk, dv = _split_kv(reduce_scatter_rows(gathered_dkv, call.parallel.ring), saved.k.shape[-1])
    dtype = saved.q.dtype
    return dq.to(dtype), (own_dk + dk).to(dtype), (own_dv + dv).to(dtype)


def _gathered_gradients(
    call: Call, grad: Tensor, saved: AttentionTensors, gathered_kv: Tensor, own_dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``own_dq`` plus the queries' gradients from the gathered keys, and the gradients of gathered K and V."""
    sum_dtype = saved.lse.dtype
    dq = own_dq.to(sum_dtype)
    gathered_dkv = torch.zeros_like(gathered_kv, dtype=sum_dtype)
    for queries, documents, rows in call.layout.gathered:
        k, v = _split_kv(gathered_kv[rows], saved.k.shape[-1])
        seen = AttentionTensors(saved.q[queries], k, v, saved.out[queries], saved.lse[:, queries])
        block = call.full_block(call.layout.chunk, documents)
        block_dq, *block_dkv = call.kernel.bwd(grad[queries], *seen, block)
        dq = _add_to_rows(dq, queries, block_dq)
        gathered_dkv.index_add_(0, rows, torch.cat(block_dkv, dim=-1).to(sum_dtype))
    return dq, gathered_dkv
