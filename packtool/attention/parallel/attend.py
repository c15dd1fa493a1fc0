"""Attention of a rank's part of a shared sequence: local documents on their own, sharded ones with the other ranks.

    first exchange of the sharded documents started ──► local documents ──► sharded documents

in the forward pass and in the same order in the backward pass: local documents are computed while K and V (or, with
Ulysses, heads) are exchanged (Skrull, arXiv 2505.19609, section 3.1). It is one autograd function, as only inside one
can work be done while an exchange is pending.

*Ulysses* (Jacobs et al. 2023, "DeepSpeed Ulysses"): U ranks exchange so that each has all tokens of the U parts and 1/U
of the heads, attend (through the ring, if there is one), and exchange back. Where K and V have fewer heads than U they
are repeated to the least common multiple, and the gradients of the copies added up.

On the ring axis a rank's part has two chunks of every document (``batch.shard``). Between its own keys attention is
causal, for the chunks are in order. Of the keys of rank j before it (j < i) all queries see the first chunks, and none
the second; of rank j after it (j > i) only the second chunks of the queries see anything, and they see all: every step
is half of a full square, on every rank.

- *ring* (Liu et al. 2023, "Ring Attention with Blockwise Transformers"; zigzag as in Dubey et al. 2024, "The Llama 3
  Herd of Models", section 3.3.2): K and V of (T, Hkv, D) go around in R - 1 hops, each while the previous ones are
  attended to. Backward they go around again, with their gradients in float32, which take one more hop home.
- *allgather* (as Llama 3): K and V of all ranks at once, and copies of those that are seen: about 2 R T rows more, of
  one layer at a time, and in backward twice as many in float32 for their gradients, which are summed on their owners.
  One exchange instead of R - 1, and fewer, larger blocks.

The generators here yield once, after they have started their first exchange, so that the caller can compute what needs
no exchange; their value is the result.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.attention.kernel import Varlen, default_scale
from packtool.attention.parallel.blocks import AttentionBlock, BlockKernel, Gradients, merge_outputs
from packtool.attention.parallel.mesh import (
    SequenceParallel,
    from_all,
    heads_to_tokens,
    sum_to_owners,
    to_next,
    tokens_to_heads,
)
from packtool.batch.shard import SequenceShard
from packtool.errors import UnsupportedModelError

T = TypeVar("T")
Forward = Generator[None, None, tuple[Tensor, Tensor]]
Backward = Generator[None, None, Gradients]


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The documents of one rank's shard, and index tensors of their chunks.

    Args:
        local: documents that are this rank's alone.
        sharded: this rank's part of each sharded document: two chunks, or the complete document without a ring.
        half: one chunk of each.
        first, second: int64, tokens of the first chunks and of the second ones.
        gathered: for the all-gather, of each half: int64 its tokens, the documents of the other ranks' keys that they
            see, and int64 the rows of these keys in the result of ``from_all``.
    """

    local: Varlen
    sharded: Varlen
    half: Varlen
    first: Tensor
    second: Tensor
    gathered: tuple[tuple[Tensor, Varlen, Tensor], ...]


@lru_cache(maxsize=4)
def shard_layout(shard: SequenceShard, device: torch.device) -> ShardLayout:
    """The layout of a rank's shard; cached, as every layer needs it."""
    ring, rank = shard.split.ring_size, shard.split.ring_rank
    last = 2 * ring - 1
    lengths = [length // ring for length in shard.sharded_lengths]
    halves = [length // 2 for length in lengths]
    starts = np.cumsum([0, *lengths])[:-1].tolist()

    def chunk_rows(chunk: int) -> list[npt.NDArray[np.int64]]:
        """Rows of one chunk of each document, in the parts of all ring ranks laid end to end."""
        owner, is_second = min(chunk, last - chunk), chunk >= ring
        shift = owner * sum(lengths)
        return [np.arange(half) + shift + start + half * is_second for start, half in zip(starts, halves, strict=True)]

    def index_of(rows: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])).to(device)

    first, second = (
        index_of([rows - rank * sum(lengths) for rows in chunk_rows(chunk)]) for chunk in (rank, last - rank)
    )
    gathered = []
    for queries, chunks in ((first, range(rank)), (second, [c for c in range(last - rank) if c != rank])):
        if ring > 1 and lengths and chunks:
            keys = [np.concatenate(rows) for rows in zip(*map(chunk_rows, chunks), strict=True)]
            gathered.append((queries, Varlen.of_lengths([len(rows) for rows in keys], device), index_of(keys)))
    return ShardLayout(
        local=Varlen.of_lengths(shard.local_lengths, device),
        sharded=Varlen.of_lengths(lengths, device),
        half=Varlen.of_lengths(halves, device),
        first=first,
        second=second,
        gathered=tuple(gathered),
    )


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's attention to a shared sequence.

    Args:
        parallel: the ranks that share it.
        shard: this rank's part.
        blocks: kernels.
        scale: factor on the scores.
        window: of a sliding layer; not with a ring.
        layout: of this rank's part.
    """

    parallel: SequenceParallel
    shard: SequenceShard
    blocks: BlockKernel
    scale: float
    window: int | None
    layout: ShardLayout

    def causal(self, documents: Varlen) -> AttentionBlock:
        """Each query sees itself and the tokens before it."""
        return AttentionBlock(documents, documents, True, self.scale, self.window)

    def full(self, queries: Varlen, keys: Varlen) -> AttentionBlock:
        """Each query sees all keys of its document."""
        return AttentionBlock(queries, keys, False, self.scale)

    def owner_comes_before(self, hops: int) -> bool:
        """Check that the keys that arrive after ``hops`` exchanges come from a rank with a lower number."""
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
    blocks: BlockKernel,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each document of a sequence that several ranks share; all of them call this.

    Args:
        q: (T, Hq, D) of this rank's tokens.
        k: (T, Hkv, D).
        v: (T, Hkv, D).
        shard: this rank's tokens.

    Returns:
        (T, Hq, D), differentiable.

    Raises:
        UnsupportedModelError: for a window on a ring.
    """
    if window is not None and parallel.split.ring_size > 1:
        raise UnsupportedModelError(
            "a layer has a sliding window, which chunks on a ring would cut", "Use --sequence-parallel-type ulysses."
        )
    assert len(q) == shard.num_local + sum(shard.sharded_lengths) // parallel.split.size, "a part of another sequence"
    layout = shard_layout(shard, q.device)
    out: Tensor = _Attend.apply(q, k, v, Call(parallel, shard, blocks, default_scale(q, scale), window, layout))
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        num_local, has_ulysses = call.shard.num_local, call.parallel.split.ulysses_size > 1
        local, saved = (q[:num_local], k[:num_local], v[:num_local]), list[Tensor]()
        if has_ulysses and call.shard.sharded_lengths:
            # Views would also keep the sharded tokens, which are saved as they are exchanged.
            local = (local[0].clone(), local[1].clone(), local[2].clone())
        sharded = None
        if call.shard.sharded_lengths:
            sharded = _sharded_forward(call, q[num_local:], k[num_local:], v[num_local:])
            next(sharded)
        outs = []
        if num_local:
            out, lse = call.blocks.fwd(*local, call.causal(call.layout.local))
            outs.append(out)
            saved += [*local, lse]
        if sharded is not None:
            out, kept = _finish(sharded)
            outs.append(out)
            # With Ulysses the output that was computed here has other heads and tokens than the one that is returned.
            saved += kept if has_ulysses else [*kept[:3], kept[4]]
        result = torch.cat(outs) if len(outs) > 1 else outs[0]
        ctx.call, ctx.num_key_heads = call, k.shape[1]
        ctx.save_for_backward(result, *saved)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        num_local, has_ulysses = call.shard.num_local, call.parallel.split.ulysses_size > 1
        result, *saved = ctx.saved_tensors
        sharded = None
        if call.shard.sharded_lengths:
            *rest, lse = saved[4 * (num_local > 0) :]
            out = rest[3] if has_ulysses else result[num_local:]
            sharded = _sharded_backward(call, grad[num_local:], [*rest[:3], out, lse], ctx.num_key_heads)
            next(sharded)
        parts: list[Gradients] = []
        if num_local:
            q, k, v, lse = saved[:4]
            block = call.causal(call.layout.local)
            parts.append(call.blocks.bwd(grad[:num_local].contiguous(), q, k, v, result[:num_local], lse, block))
        if sharded is not None:
            parts.append(_finish(sharded))
        return *(torch.cat(pair) if len(pair) > 1 else pair[0] for pair in zip(*parts, strict=True)), None


def _sharded_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
    """Output of this rank's sharded tokens, and the tensors that the backward pass needs."""
    size = call.parallel.split.ulysses_size
    if size == 1:
        out, lse = yield from _ring_forward(call, q, k, v)
        return out, [q, k, v, out, lse]
    # One exchange for all three: for each rank its heads of Q, then those of K, then those of V.
    num_copies, num_heads = call.num_copies(k.shape[1]), q.shape[1]
    k, v = (tensor.repeat_interleave(num_copies, dim=1) for tensor in (k, v))
    each = [num_heads // size, k.shape[1] // size, v.shape[1] // size]
    width = max(q.shape[-1], v.shape[-1])
    packed = torch.cat([torch.unflatten(_widened(tensor, width), 1, (size, -1)) for tensor in (q, k, v)], dim=2)
    pending, dims = heads_to_tokens(packed.flatten(1, 2), call.parallel.ulysses), [t.shape[-1] for t in (q, k, v)]
    del packed
    yield
    parts = zip(torch.split(pending(), each, dim=1), dims, strict=True)
    q, k, v = (part[..., :dim].contiguous() for part, dim in parts)
    # The tensors sent and received have been copied; attention needs the memory.
    del pending, parts
    out, lse = _run(_ring_forward(call, q, k, v))
    return tokens_to_heads(out, call.parallel.ulysses), [q, k, v, out, lse]


def _sharded_backward(call: Call, grad: Tensor, saved: Sequence[Tensor], num_key_heads: int) -> Backward:
    """Gradients of this rank's Q, K and V for the gradient of its output: the backward pass of ``_sharded_forward``."""
    size = call.parallel.split.ulysses_size
    if size == 1:
        return (yield from _ring_backward(call, grad.contiguous(), *saved))
    pending = heads_to_tokens(grad, call.parallel.ulysses)
    yield
    gradients = _run(_ring_backward(call, pending(), *saved))
    dims = [tensor.shape[-1] for tensor in gradients]
    packed = torch.cat([_widened(tensor, max(dims)) for tensor in gradients], dim=1)
    # The heads of Q, K and V of the rank that computed them are next to each other.
    each = [tensor.shape[1] for tensor in gradients]
    rows = torch.unflatten(tokens_to_heads(packed, call.parallel.ulysses), 1, (size, -1))
    parts = torch.split(rows, each, dim=2)
    dq, dk, dv = (part.flatten(1, 2)[..., :dim] for part, dim in zip(parts, dims, strict=True))
    num_copies = call.num_copies(num_key_heads)
    if num_copies > 1:
        dk, dv = (torch.unflatten(tensor, 1, (num_key_heads, num_copies)).sum(2) for tensor in (dk, dv))
    return dq, dk, dv


def _widened(tensor: Tensor, width: int) -> Tensor:
    return F.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor


def _finish(generator: Generator[None, None, T]) -> T:
    """The value of a generator that has yielded."""
    try:
        next(generator)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("it yields once")


def _run(generator: Generator[None, None, T]) -> T:
    """The value of a generator that was not started."""
    next(generator)
    return _finish(generator)


def _ring_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Output (T, Hq, D) and lse float32 (Hq, T) over the keys of all ring ranks, for q (T, Hq, D), k, v (T, Hkv, D)."""
    ring, size, layout = call.parallel.ring, call.parallel.split.ring_size, call.layout
    if size > 1 and call.parallel.way == "allgather":
        return (yield from _gather_forward(call, q, k, v))
    keys, width = torch.cat([k, v], dim=-1), k.shape[-1]
    pending = to_next(keys, ring) if size > 1 else None
    yield
    out, lse = call.blocks.fwd(q, k, v, call.causal(layout.sharded))
    if pending is None:
        return out, lse
    total = out.to(lse.dtype)
    for hops in range(1, size):
        keys = pending()
        if hops + 1 < size:
            pending = to_next(keys, ring)
        total, lse = _merge_rank(call, hops, q, (keys[..., :width], keys[..., width:]), total, lse)
    return total.to(out.dtype), lse


def _merge_rank(
    call: Call, hops: int, q: Tensor, keys: tuple[Tensor, Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the attention to the K and V of the rank that is so many hops away."""
    layout = call.layout
    if call.owner_comes_before(hops):
        k, v = (tensor[layout.first] for tensor in keys)
        return merge_outputs(out, lse, *call.blocks.fwd(q, k, v, call.full(layout.sharded, layout.half)))
    block = call.full(layout.half, layout.sharded)
    return _merge_rows(out, lse, layout.second, call.blocks.fwd(q[layout.second], *keys, block))


def _merge_rows(
    out: Tensor, lse: Tensor, queries: Tensor, block_result: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the output and lse of a block whose queries are the tokens ``queries``."""
    merged, merged_lse = merge_outputs(out[queries], lse[:, queries], *block_result)
    return out.index_copy(0, queries, merged), lse.index_copy(1, queries, merged_lse)


def _ring_backward(call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Backward:
    """Gradients of q, k and v of this rank's tokens, from their final out and lse."""
    ring, size, layout = call.parallel.ring, call.parallel.split.ring_size, call.layout
    if size > 1 and call.parallel.way == "allgather":
        return (yield from _gather_backward(call, grad, q, k, v, out, lse))
    keys, width = torch.cat([k, v], dim=-1), k.shape[-1]
    pending = to_next(keys, ring) if size > 1 else None
    yield
    dq, dk, dv = call.blocks.bwd(grad, q, k, v, out, lse, call.causal(layout.sharded))
    if pending is None:
        return dq, dk, dv
    dtype = lse.dtype
    total, travelling = dq.to(dtype), torch.cat([dk, dv], dim=-1).to(dtype)
    for hops in range(1, size):
        keys, pending_gradients = pending(), to_next(travelling, ring)
        if hops + 1 < size:
            pending = to_next(keys, ring)
        k, v = keys[..., :width], keys[..., width:]
        if call.owner_comes_before(hops):
            k, v, first = k[layout.first], v[layout.first], layout.first
            dq, dk, dv = call.blocks.bwd(grad, q, k, v, out, lse, call.full(layout.sharded, layout.half))
            total += dq
            travelling = pending_gradients().index_add(0, first, torch.cat([dk, dv], dim=-1).to(dtype))
        else:
            rows = layout.second
            inputs = grad[rows], q[rows], k, v, out[rows], lse[:, rows]
            dq, dk, dv = call.blocks.bwd(*inputs, call.full(layout.half, layout.sharded))
            total = total.index_add(0, rows, dq.to(dtype))
            travelling = pending_gradients() + torch.cat([dk, dv], dim=-1)
    travelling = to_next(travelling, ring)()
    return total.to(q.dtype), travelling[..., :width].to(q.dtype), travelling[..., width:].to(q.dtype)


def _gather_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    width = k.shape[-1]
    pending = from_all(torch.cat([k, v], dim=-1), call.parallel.ring)
    yield
    out, lse = call.blocks.fwd(q, k, v, call.causal(call.layout.sharded))
    total, gathered = out.to(lse.dtype), pending()
    for queries, documents, rows in call.layout.gathered:
        keys, block = gathered[rows], call.full(call.layout.half, documents)
        part = call.blocks.fwd(q[queries], keys[..., :width], keys[..., width:], block)
        total, lse = _merge_rows(total, lse, queries, part)
    return total.to(out.dtype), lse


def _gather_backward(call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Backward:
    width, dtype = k.shape[-1], lse.dtype
    # Gathered again, not saved: sequence parallelism is to avoid keeping K and V of all ranks and all layers.
    pending = from_all(torch.cat([k, v], dim=-1), call.parallel.ring)
    yield
    dq, dk, dv = call.blocks.bwd(grad, q, k, v, out, lse, call.causal(call.layout.sharded))
    total, gathered = dq.to(dtype), pending()
    key_gradients = torch.zeros_like(gathered, dtype=dtype)
    for queries, documents, rows in call.layout.gathered:
        keys, block = gathered[rows], call.full(call.layout.half, documents)
        inputs = grad[queries], q[queries], keys[..., :width], keys[..., width:], out[queries], lse[:, queries]
        more, *of_keys = call.blocks.bwd(*inputs, block)
        total = total.index_add(0, queries, more.to(dtype))
        key_gradients.index_add_(0, rows, torch.cat(of_keys, dim=-1).to(dtype))
    own = sum_to_owners(key_gradients, call.parallel.ring)
    return total.to(q.dtype), (dk + own[..., :width]).to(q.dtype), (dv + own[..., width:]).to(q.dtype)
