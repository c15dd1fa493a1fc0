"""Attention of a rank's part of a shared sequence: local documents on their own, sharded ones with the other ranks.

    first exchange of the sharded documents under way ──► local documents ──► sharded documents

in the forward pass and, the same way round, in the backward pass: what needs no other rank is computed while K and V
(or, with Ulysses, heads) are on their way (Skrull, arXiv 2505.19609, section 3.1). One autograd function holds it all,
because only it can decide what happens while something else is waited for.

Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses"): U ranks exchange so that each has all tokens of the U parts and 1/U
of the heads, attend (through the ring, if there is one), and exchange back. Where K and V have fewer heads than U they
are repeated to the least common multiple, and the gradients of the copies added up.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from packtool.attention.kernel import default_scale
from packtool.attention.parallel.blocks import AttentionBlock, BlockKernel, Gradients
from packtool.attention.parallel.mesh import SequenceParallel, heads_to_tokens, tokens_to_heads
from packtool.attention.parallel.ring import RingCall, ShardLayout, ring_backward, ring_forward, shard_layout
from packtool.batch.shard import SequenceShard
from packtool.errors import UnsupportedModelError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's attention to a shared sequence.

    Args:
        parallel: the ranks that share it.
        shard: this rank's part.
        blocks: kernels.
        scale: factor on the scores.
        window: of a sliding layer; not with a ring.
    """

    parallel: SequenceParallel
    shard: SequenceShard
    blocks: BlockKernel
    scale: float
    window: int | None = None

    def layout(self, device: torch.device) -> ShardLayout:
        """The layout of this rank's shard on a device."""
        return shard_layout(self.shard, device)

    def ring(self, device: torch.device) -> RingCall:
        """The sharded part of it."""
        return RingCall(self.parallel, self.layout(device), self.blocks, self.scale, self.window)

    def local(self, device: torch.device) -> AttentionBlock:
        """The local part of it."""
        documents = self.layout(device).local
        return AttentionBlock(documents, documents, True, self.scale, self.window)

    def copies(self, num_key_heads: int) -> int:
        """How often each head of K and V is repeated, so that the Ulysses ranks can share them."""
        return math.lcm(num_key_heads, self.parallel.cut.ulysses_size) // num_key_heads


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
        shard: which tokens those are.

    Returns:
        (T, Hq, D), differentiable.

    Raises:
        UnsupportedModelError: for a window on a ring.
    """
    if window is not None and parallel.cut.ring_size > 1:
        raise UnsupportedModelError(
            "a layer has a sliding window, which chunks on a ring would cut", "Use --sequence-parallel-type ulysses."
        )
    assert len(q) == shard.num_local + sum(shard.sharded_lengths) // parallel.cut.size, "a part of another sequence"
    call = Call(parallel, shard, blocks, default_scale(q, scale), window)
    out: Tensor = _Attend.apply(q, k, v, call)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        cut, has_ulysses = call.shard.num_local, call.parallel.cut.ulysses_size > 1
        local, saved = (q[:cut], k[:cut], v[:cut]), list[Tensor]()
        if has_ulysses and call.shard.sharded_lengths:
            # Views would keep the sharded tokens, too, which are kept as they are exchanged.
            local = (local[0].clone(), local[1].clone(), local[2].clone())
        sharded = _sharded_forward(call, q[cut:], k[cut:], v[cut:]) if call.shard.sharded_lengths else None
        if sharded is not None:
            next(sharded)
        outs = []
        if cut:
            out, lse = call.blocks.fwd(*local, call.local(q.device))
            outs.append(out)
            saved += [*local, lse]
        if sharded is not None:
            out, kept = _value_of(sharded)
            outs.append(out)
            # With Ulysses the output that was computed here has other heads and tokens than the one that is returned.
            saved += kept if has_ulysses else [*kept[:3], kept[4]]
        whole = torch.cat(outs) if len(outs) > 1 else outs[0]
        ctx.call, ctx.num_key_heads = call, k.shape[1]
        ctx.save_for_backward(whole, *saved)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        cut, has_ulysses = call.shard.num_local, call.parallel.cut.ulysses_size > 1
        whole, *saved = ctx.saved_tensors
        sharded = None
        if call.shard.sharded_lengths:
            *rest, lse = saved[4 * (cut > 0) :]
            out = rest[3] if has_ulysses else whole[cut:]
            sharded = _sharded_backward(call, grad[cut:], [*rest[:3], out, lse], ctx.num_key_heads)
            next(sharded)
        parts: list[Gradients] = []
        if cut:
            q, k, v, lse = saved[:4]
            parts.append(call.blocks.bwd(grad[:cut].contiguous(), q, k, v, whole[:cut], lse, call.local(grad.device)))
        if sharded is not None:
            parts.append(_value_of(sharded))
        found = [torch.cat(some) if len(some) > 1 else some[0] for some in zip(*parts, strict=True)]
        return *found, None


def _sharded_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Generator[None, None, tuple[Tensor, list[Tensor]]]:
    """Yields once, when the first exchange is under way; the output, and what the backward pass needs."""
    ring, size = call.ring(q.device), call.parallel.cut.ulysses_size
    if size == 1:
        out, lse = yield from ring_forward(ring, q, k, v)
        return out, [q, k, v, out, lse]
    # One exchange for all three: rank by rank its heads of Q, then those of K, then those of V.
    copies, num_heads = call.copies(k.shape[1]), q.shape[1]
    k, v = (tensor.repeat_interleave(copies, dim=1) for tensor in (k, v))
    each = [num_heads // size, k.shape[1] // size, v.shape[1] // size]
    width = max(q.shape[-1], v.shape[-1])
    packed = torch.cat([torch.unflatten(_widened(tensor, width), 1, (size, -1)) for tensor in (q, k, v)], dim=2)
    coming, dims = heads_to_tokens(packed.flatten(1, 2), call.parallel.ulysses), [t.shape[-1] for t in (q, k, v)]
    del packed
    yield
    parts = zip(torch.split(coming(), each, dim=1), dims, strict=True)
    q, k, v = (part[..., :dim].contiguous() for part, dim in parts)
    # What was sent and received has been copied; attention needs the room.
    del coming, parts
    out, lse = _through(ring_forward(ring, q, k, v))
    return tokens_to_heads(out, call.parallel.ulysses), [q, k, v, out, lse]


def _sharded_backward(
    call: Call, grad: Tensor, saved: Sequence[Tensor], num_key_heads: int
) -> Generator[None, None, Gradients]:
    """Gradients of this rank's Q, K and V for the gradient of its output: the backward pass of ``_sharded_forward``."""
    ring, size = call.ring(grad.device), call.parallel.cut.ulysses_size
    if size == 1:
        return (yield from ring_backward(ring, grad.contiguous(), *saved))
    coming = heads_to_tokens(grad, call.parallel.ulysses)
    yield
    found = _through(ring_backward(ring, coming(), *saved))
    dims = [tensor.shape[-1] for tensor in found]
    packed = torch.cat([_widened(tensor, max(dims)) for tensor in found], dim=1)
    # Back as they came: the heads of Q, K and V of the rank that computed them are next to each other.
    each = [tensor.shape[1] for tensor in found]
    rows = torch.unflatten(tokens_to_heads(packed, call.parallel.ulysses), 1, (size, -1))
    parts = torch.split(rows, each, dim=2)
    dq, dk, dv = (part.flatten(1, 2)[..., :dim] for part, dim in zip(parts, dims, strict=True))
    copies = call.copies(num_key_heads)
    if copies > 1:
        dk, dv = (torch.unflatten(tensor, 1, (num_key_heads, copies)).sum(2) for tensor in (dk, dv))
    return dq, dk, dv


def _widened(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor


def _value_of(generator: Generator[None, None, T]) -> T:
    """What a generator that has yielded once returns."""
    try:
        next(generator)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("it yields once")


def _through(generator: Generator[None, None, T]) -> T:
    """What a generator returns that has not been started."""
    next(generator)
    return _value_of(generator)
