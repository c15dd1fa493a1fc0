"""Attention of a rank's part of a shared sequence: local documents on their own, sharded ones with the other ranks.

Local documents are computed while K and V (or, with Ulysses, heads) of the sharded ones are exchanged (Skrull, arXiv
2505.19609, section 3.1). Only inside one autograd function can work overlap with an exchange.

- *ulysses* (Jacobs et al. 2023, "DeepSpeed Ulysses"): U ranks exchange so that each has all tokens of the U parts and
  1/U of the heads, attend (through the ring, if there is one), and exchange back. K and V with fewer than U heads are
  repeated to the least common multiple; the gradients of the copies are added up.
- *ring* (Liu et al. 2023, "Ring Attention with Blockwise Transformers"; zigzag: Dubey et al. 2024, "The Llama 3 Herd of
  Models", section 3.3.2): each rank has two chunks of every document (``batch.shard``). Queries see the first chunk of
  earlier ranks; the second chunk's queries also see both chunks of later ranks. Every hop is half of a full square. K
  and V (T, Hkv, D) make R - 1 hops; backward they go around again with float32 gradients, which take one more hop home.
- *prefixes* that documents share are documents of their own, which others continue. A rank's queries then also see the
  received (and its own) keys of the documents that theirs continue, as further blocks.
- *allgather* (as Llama 3): K and V of all ranks at once, about 2 R T rows more for one layer at a time, and in backward
  twice as many in float32 for their gradients. One exchange instead of R - 1, and fewer, larger blocks.

Functions with a parameter ``during_exchange`` are collective over the ranks that share the sequence. They call it once,
after starting their first exchange, to compute something that does not need the exchanged tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.attention.kernel import Varlen, add_up_rows, default_scale
from packtool.attention.parallel.blocks import (
    AttentionBlock,
    BlockKernel,
    Gradients,
    Rows,
    ShardLayout,
    VisibleKeys,
    merge_outputs,
    shard_layout,
)
from packtool.attention.parallel.mesh import (
    SequenceParallel,
    gather_heads,
    reduce_scatter_rows,
    scatter_heads,
    start_all_gather,
    start_ring_transfer,
)
from packtool.batch.prefix_tree import ROOT
from packtool.batch.shard import SequenceShard
from packtool.errors import UnsupportedModelError

_Task = Callable[[], None]


class AttentionTensors(NamedTuple):
    """Inputs and results of an attention call, for its backward pass.

    Args:
        q, out: (T, Hq, D).
        k, v: (T, Hkv, D).
        lse: float32 (Hq, T), the log-sum-exp of each query's scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class AttentionCall:
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

    @property
    def local_block(self) -> AttentionBlock:
        """This rank's local documents."""
        return self._causal_block(self.layout.local)

    @property
    def own_block(self) -> AttentionBlock:
        """This rank's own tokens of the sharded documents, without those of other ring ranks and of prefixes."""
        return self._causal_block(self.layout.sharded)

    def _causal_block(self, documents: Varlen) -> AttentionBlock:
        """Each query sees itself and the tokens before it."""
        return AttentionBlock(documents, documents, causal=True, scale=self.scale, window=self.window)

    def block_of(self, visible: VisibleKeys) -> AttentionBlock:
        """Each query sees all of these keys that belong to its document."""
        return AttentionBlock(visible.query_documents, visible.key_documents, causal=False, scale=self.scale)

    @property
    def needs_own_block_only(self) -> bool:
        """True without a ring and prefixes: all keys that queries see are in ``own_block``."""
        return self.parallel.split.ring_size == 1 and not self.visible_after(0)

    def visible_after(self, num_hops: int) -> list[VisibleKeys]:
        """Return the visible keys besides ``own_block`` that are on this rank after ``num_hops`` ring transfers."""
        rank = self.parallel.split.ring_rank
        owner = (rank - num_hops) % self.parallel.split.ring_size
        visible = []
        prefix_keys = self.layout.prefixes_by_rank[owner]
        if prefix_keys is not None:
            visible.append(prefix_keys)
        if owner < rank:
            visible.append(self.layout.from_lower_rank)
        elif owner > rank:
            visible.append(self.layout.from_higher_rank)
        return visible

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
    """Compute causal attention within each document of a sequence whose tokens are divided among ranks.

    All ranks of the sequence must call it. Local documents are this rank's alone; the tokens of sharded documents, and
    so the keys that queries see, are spread over all ranks.

    Args:
        q: (T, Hq, D) of this rank's tokens: first its local documents, then its tokens of the sharded documents.
        k, v: (T, Hkv, D).
        shard: lengths of the documents.
        scale: factor on the scores, by default 1 / sqrt(D).
        window: a query sees itself and at most ``window - 1`` tokens before it; None: all before it.

    Returns:
        (T, Hq, D), in the order of q.
    """
    if window is not None:
        _check_window_support(shard, parallel)
    # Padding gives all ranks equally many tokens of the sharded documents.
    num_sharded_here = sum(shard.sharded_lengths) // parallel.split.size
    assert len(q) == shard.num_local + num_sharded_here, "the tokens are not those of this shard"
    layout = shard_layout(shard, q.device)
    call = AttentionCall(parallel, shard, kernel, default_scale(q, scale), window, layout)
    return _Attend.apply(q, k, v, call)


def _check_window_support(shard: SequenceShard, parallel: SequenceParallel) -> None:
    """Raise if a query's keys may be in several blocks, which sliding windows do not support."""
    if parallel.split.ring_size > 1:
        problem = "a layer has a sliding window, which chunks on a ring would cut"
        raise UnsupportedModelError(problem, "Use --sequence-parallel-type ulysses.")
    if any(parent != ROOT for parent in shard.parents):
        problem = "a layer has a sliding window, which would cut prefixes that are attended to as blocks"
        raise UnsupportedModelError(problem, "Use --share-prefix false.")


class _Attend(torch.autograd.Function):
    """Attention of local and sharded documents; local ones are computed during the first exchange of the others."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """Return the output (T, Hq, D) for this rank's tokens q (T, Hq, D), k and v (T, Hkv, D).

        All have the tokens of local documents (this rank's alone) first, then those of documents that ranks share.
        """
        num_local = call.shard.num_local
        local_q, local_k, local_v = _local_inputs(call, q, k, v)
        local_out, local_lse = None, None

        def attend_locally() -> None:
            nonlocal local_out, local_lse
            if num_local:
                local_out, local_lse = call.kernel.fwd(local_q, local_k, local_v, call.local_block)

        sharded_out = None
        saved_sharded: tuple[Tensor | None, ...] = ()  # for ``backward``
        if call.shard.sharded_lengths:
            sharded_out, saved = _sharded_forward(
                call,
                q[num_local:],
                k[num_local:],
                v[num_local:],
                during_exchange=attend_locally,  # called while the first exchange between ranks is under way
            )
            # Without Ulysses, ``out`` has the same output.
            separate_out = saved.out if call.has_ulysses else None
            saved_sharded = saved.q, saved.k, saved.v, separate_out, saved.lse
        else:
            attend_locally()
        out = _concatenate(local_out, sharded_out)
        ctx.call = call
        ctx.num_key_heads = k.shape[1]
        ctx.save_for_backward(out, local_q, local_k, local_v, local_lse, *saved_sharded)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v, and None for the call; ``grad`` (T, Hq, D) is that of the output."""
        call: AttentionCall = ctx.call
        num_local = call.shard.num_local
        local, sharded = _saved_tensors(ctx)
        local_gradients: Gradients | tuple[None, None, None] = (None, None, None)

        def differentiate_locally() -> None:
            nonlocal local_gradients
            if num_local:
                local_gradients = call.kernel.bwd(grad[:num_local].contiguous(), *local, call.local_block)

        sharded_gradients: Gradients | tuple[None, None, None] = (None, None, None)
        if sharded is not None:
            sharded_gradients = _sharded_backward(
                call,
                grad[num_local:],
                sharded,
                ctx.num_key_heads,
                during_exchange=differentiate_locally,  # called while the first exchange between ranks is under way
            )
        else:
            differentiate_locally()
        dq, dk, dv = map(_concatenate, local_gradients, sharded_gradients)
        return dq, dk, dv, None


def _saved_tensors(ctx: Any) -> tuple[AttentionTensors, AttentionTensors | None]:
    """Return what ``forward`` has saved of local documents, and of sharded documents or None if there are none."""
    num_local = ctx.call.shard.num_local
    result, q, k, v, lse, *sharded = ctx.saved_tensors
    local = AttentionTensors(q, k, v, result[:num_local], lse)
    if not sharded:
        return local, None
    q, k, v, separate_out, lse = sharded
    out = result[num_local:] if separate_out is None else separate_out
    return local, AttentionTensors(q, k, v, out, lse)


def _local_inputs(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """Return q, k and v of the local documents, which are saved for the backward pass."""
    num_local = call.shard.num_local
    local_q, local_k, local_v = q[:num_local], k[:num_local], v[:num_local]
    if call.shard.sharded_lengths and call.has_ulysses:
        # Saved views would keep the sharded tokens in memory, which are saved again after their exchange.
        return local_q.clone(), local_k.clone(), local_v.clone()
    return local_q, local_k, local_v


def _concatenate(local: Tensor | None, sharded: Tensor | None) -> Tensor:
    """Join rows of local and of sharded tokens; None for tokens that this rank does not have."""
    if sharded is None:
        assert local is not None, "every rank has tokens"
        return local
    return sharded if local is None else torch.cat([local, sharded])


def _sharded_forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, during_exchange: _Task
) -> tuple[Tensor, AttentionTensors]:
    """Return the output of this rank's sharded tokens, and the tensors that ``_sharded_backward`` needs."""
    if not call.has_ulysses:
        out, lse = _forward_over_ring(call, q, k, v, during_exchange)
        return out, AttentionTensors(q, k, v, out, lse)
    q, k, v = _scatter_inputs(call, q, k, v, during_exchange)
    out, lse = _forward_over_ring(call, q, k, v, during_exchange=lambda: None)
    return gather_heads(out, call.parallel.ulysses), AttentionTensors(q, k, v, out, lse)


def _scatter_inputs(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, during_exchange: _Task) -> Gradients:
    """Exchange q, k and v (T, H, D) of this rank's tokens for those of the U ranks' tokens, (U * T, H / U, D)."""
    num_ranks = call.parallel.split.ulysses_size
    num_copies = call.num_copies(num_key_heads=k.shape[1])
    k = k.repeat_interleave(num_copies, dim=1)
    v = v.repeat_interleave(num_copies, dim=1)
    heads_per_rank = [tensor.shape[1] // num_ranks for tensor in (q, k, v)]
    head_dims = [tensor.shape[-1] for tensor in (q, k, v)]
    wait_for_heads = scatter_heads(_heads_by_rank(q, k, v, num_ranks), call.parallel.ulysses)
    during_exchange()
    return _split_heads(wait_for_heads(), heads_per_rank, head_dims)


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


def _sharded_backward(
    call: AttentionCall, grad: Tensor, saved: AttentionTensors, num_key_heads: int, during_exchange: _Task
) -> Gradients:
    """Return the gradients of q, k and v of this rank's tokens of the documents that ranks share.

    Args:
        grad: gradient of these tokens' output, (T, Hq, D).
        saved: the tensors that ``_sharded_forward`` has returned for this purpose.
        num_key_heads: heads of k and v in the arguments of ``_sharded_forward``, which may have repeated them.
        during_exchange: called while the first exchange between ranks is under way.
    """
    if not call.has_ulysses:
        return _backward_over_ring(call, grad.contiguous(), saved, during_exchange)
    # With Ulysses, ranks exchange tokens for heads: each computes some heads of all tokens.
    wait_for_grad = scatter_heads(grad, call.parallel.ulysses)
    during_exchange()
    gradients = _backward_over_ring(call, wait_for_grad(), saved, during_exchange=lambda: None)
    dq, dk, dv = _gather_gradients(call, gradients)
    num_copies = call.num_copies(num_key_heads)
    if num_copies > 1:  # all copies of a head are neighbours
        dk = torch.unflatten(dk, 1, (num_key_heads, num_copies)).sum(2)
        dv = torch.unflatten(dv, 1, (num_key_heads, num_copies)).sum(2)
    return dq, dk, dv


def _gather_gradients(call: AttentionCall, gradients: Gradients) -> Gradients:
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


def _split_kv(kv: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Return K and V, or their gradients, (T, H, D) each, which are exchanged side by side."""
    return kv[..., :key_dim], kv[..., key_dim:]


def _forward_over_ring(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, during_exchange: _Task
) -> tuple[Tensor, Tensor]:
    """Return out (T, Hq, D) and lse (Hq, T) of this rank's queries, over the keys of all ring ranks."""
    if call.needs_own_block_only:
        during_exchange()
        return call.kernel.fwd(q, k, v, call.own_block)
    forward = _gather_forward if call.gathers_keys else _ring_forward
    return forward(call, q, k, v, during_exchange)


def _ring_forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, during_exchange: _Task
) -> tuple[Tensor, Tensor]:
    """Attend to K and V of every ring rank, which travel around the ring, from each rank to the next."""
    for num_hops, kv in enumerate(_kv_around_ring(call, k, v)):
        if num_hops == 0:  # the first transfer is under way
            during_exchange()
            out, lse = _own_forward(call, q, k, v)
        for visible in call.visible_after(num_hops):
            out, lse = _merge_keys(call, visible, q, kv, (out, lse))
    return out.to(q.dtype), lse


def _own_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of this rank's queries over its own keys, both in the precision of merging."""
    out, lse = call.kernel.fwd(q, k, v, call.own_block)
    return out.to(lse.dtype), lse


def _kv_around_ring(call: AttentionCall, k: Tensor, v: Tensor) -> Iterator[Tensor]:
    """Yield K and V, side by side, of this rank and of those before it; pass each on while the caller computes."""
    ring, ring_size = call.parallel.ring, call.parallel.split.ring_size
    kv = torch.cat([k, v], dim=-1)
    for num_hops in range(ring_size):
        wait_for_kv = start_ring_transfer(kv, ring) if num_hops + 1 < ring_size else None
        yield kv
        if wait_for_kv is not None:
            kv = wait_for_kv()


def _merge_keys(
    call: AttentionCall, visible: VisibleKeys, q: Tensor, kv: Tensor, result: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge attention to received keys into ``result``, (out, lse) over other keys; return both, for all queries.

    ``kv`` is (received tokens, Hkv, D of k and v side by side).
    """
    out, lse = result
    rows, key_rows = visible.query_rows, visible.key_rows
    k, v = _split_kv(kv, key_dim=q.shape[-1])
    block_out, block_lse = call.kernel.fwd(q[rows], k[key_rows], v[key_rows], call.block_of(visible))
    merged, merged_lse = merge_outputs(out[rows], lse[:, rows], block_out, block_lse)
    if isinstance(rows, slice):  # all queries
        return merged, merged_lse
    return out.index_copy(0, rows, merged), lse.index_copy(1, rows, merged_lse)


def _backward_over_ring(
    call: AttentionCall, grad: Tensor, saved: AttentionTensors, during_exchange: _Task
) -> Gradients:
    """Return the gradients of q, k and v of this rank's tokens, from the gradient of their output (T, Hq, D)."""
    if call.needs_own_block_only:
        during_exchange()
        return call.kernel.bwd(grad, *saved, call.own_block)
    backward = _gather_backward if call.gathers_keys else _ring_backward
    return backward(call, grad, saved, during_exchange)


def _ring_backward(call: AttentionCall, grad: Tensor, saved: AttentionTensors, during_exchange: _Task) -> Gradients:
    """Return the gradients of q, k and v of this rank's tokens, from that of their output (T, Hq, D).

    Keys and values travel around the ring of ranks again, and after them their gradients, to which each rank adds its
    part. ``during_exchange`` is called while the first transfer is under way.
    """
    ring, ring_size = call.parallel.ring, call.parallel.split.ring_size
    for num_hops, kv in enumerate(_kv_around_ring(call, saved.k, saved.v)):
        if num_hops == 0:  # this rank's own keys and values; the first transfer is under way
            during_exchange()
            dq, dkv = _own_gradients(call, grad, saved)
        else:
            wait_for_dkv = start_ring_transfer(dkv, ring)
        # Computed while the gradients of the keys that have just arrived follow these keys.
        blocks = call.visible_after(num_hops)
        gradients = [_block_gradients(call, visible, grad, saved, kv) for visible in blocks]
        if num_hops > 0:
            dkv = wait_for_dkv()
        _accumulate_gradients(dq, dkv, blocks, gradients)
    if ring_size > 1:  # one more transfer, to the rank of the keys
        wait_for_dkv = start_ring_transfer(dkv, ring)
        dkv = wait_for_dkv()
    dk, dv = _split_kv(dkv, saved.k.shape[-1])
    dtype = saved.q.dtype  # sums have a higher precision
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _own_gradients(call: AttentionCall, grad: Tensor, saved: AttentionTensors) -> tuple[Tensor, Tensor]:
    """Return dq, and dk and dv side by side, from this rank's own keys, in the precision of sums (that of lse)."""
    dq, dk, dv = call.kernel.bwd(grad, *saved, call.own_block)
    return dq.to(saved.lse.dtype), torch.cat([dk, dv], dim=-1).to(saved.lse.dtype)


def _block_gradients(
    call: AttentionCall, visible: VisibleKeys, grad: Tensor, saved: AttentionTensors, kv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return dq of the queries in ``visible``, and dk and dv side by side of the keys in ``visible``, from these alone.

    ``grad`` and ``saved`` are of all queries of this rank; ``kv`` is (received tokens, Hkv, D of k and v side by side).
    """
    rows, key_rows = visible.query_rows, visible.key_rows
    k, v = _split_kv(kv, key_dim=saved.k.shape[-1])
    inputs = saved.q[rows], k[key_rows], v[key_rows]
    final_out, final_lse = saved.out[rows], saved.lse[:, rows]  # over all keys, not only those in ``visible``
    dq, dk, dv = call.kernel.bwd(grad[rows], *inputs, final_out, final_lse, call.block_of(visible))
    return dq, torch.cat([dk, dv], dim=-1)


def _accumulate_gradients(
    dq: Tensor, dkv: Tensor, blocks: list[VisibleKeys], gradients: list[tuple[Tensor, Tensor]]
) -> None:
    """Add the results of ``_block_gradients`` of some blocks to all queries' dq and received keys' dkv, in place."""
    for visible, (block_dq, block_dkv) in zip(blocks, gradients, strict=True):
        _add_to_rows(dq, visible.query_rows, block_dq)
        _add_to_rows(dkv, visible.key_rows, block_dkv, repeats=visible.repeats_keys)


def _add_to_rows(total: Tensor, rows: Rows, part: Tensor, *, repeats: bool = False) -> None:
    """Add ``part`` to some rows of ``total``, in place; with ``repeats``, a row may occur several times."""
    if isinstance(rows, slice):
        total[rows].add_(part)
    elif repeats:
        (sums,) = add_up_rows(rows, len(total), part.to(total.dtype))
        total.add_(sums)
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _gather_forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, during_exchange: _Task
) -> tuple[Tensor, Tensor]:
    """Do the same as ``_ring_forward``, but gather K and V of all ring ranks at once."""
    wait_for_kv = start_all_gather(torch.cat([k, v], dim=-1), call.parallel.ring)
    during_exchange()
    out, lse = _own_forward(call, q, k, v)
    gathered_kv = wait_for_kv()
    for visible in call.layout.from_all_ranks:
        out, lse = _merge_keys(call, visible, q, gathered_kv, (out, lse))
    return out.to(q.dtype), lse


def _gather_backward(call: AttentionCall, grad: Tensor, saved: AttentionTensors, during_exchange: _Task) -> Gradients:
    """Do the same as ``_ring_backward``, but gather K and V of all ring ranks at once."""
    # Gathered again, not saved: sequence parallelism is to avoid keeping K and V of all ranks and all layers.
    wait_for_kv = start_all_gather(torch.cat([saved.k, saved.v], dim=-1), call.parallel.ring)
    during_exchange()
    own_dq, own_dk, own_dv = call.kernel.bwd(grad, *saved, call.own_block)
    gathered_kv = wait_for_kv()
    sum_dtype = saved.lse.dtype
    dq = own_dq.to(sum_dtype)
    gathered_dkv = torch.zeros_like(gathered_kv, dtype=sum_dtype)
    for visible in call.layout.from_all_ranks:
        gradients = _block_gradients(call, visible, grad, saved, gathered_kv)
        _accumulate_gradients(dq, gathered_dkv, [visible], [gradients])
    dk, dv = _split_kv(reduce_scatter_rows(gathered_dkv, call.parallel.ring), saved.k.shape[-1])
    dtype = saved.q.dtype
    return dq.to(dtype), (own_dk + dk).to(dtype), (own_dv + dv).to(dtype)
