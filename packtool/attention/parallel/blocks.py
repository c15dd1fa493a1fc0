"""Attention of some queries to some keys, with an lse to merge by and a backward pass that takes the final one.

A sequence that several ranks share is attended to in blocks: the queries of one rank, the keys of another. Each block
tells the output and the lse of its own keys; merged in float32 they are those of all keys,

    lse' = logaddexp(lse, lse_b)      out' = exp(lse - lse') out + exp(lse_b - lse') out_b

and the gradients of each block follow from the *final* out and lse (Dao 2023, "FlashAttention-2", section 3.1.2; Liu
et al. 2023, "Ring Attention with Blockwise Transformers"): with D = rowsum(dout * out) and P = exp(S - lse),

    dv_b = P^T dout      dS = P * (dout v_b^T - D)      dq += scale dS k_b      dk_b = scale dS^T q

| blocks | where |
|---|---|
| ``MathBlockKernel`` | anywhere, some queries at a time: the formulas above, and what the others are tested against |
| ``CpuFlashBlockKernel`` | torch's flash attention for the CPU |
| ``CudaFlashBlockKernel`` | torch's flash attention for CUDA, bfloat16 and float16 |

Shapes: T queries and T' keys of S documents each, Hq and Hkv heads of D numbers.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from packtool.attention.kernel import Varlen, needs_fast_gpu, pad_heads
from packtool.config.packing import WITH_BLOCKS
from packtool.errors import ConfigError

_QUERIES_AT_ONCE = 256
_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Which queries see which keys.

    Args:
        queries: the S documents of the queries.
        keys: those of the keys; document i of the one sees document i of the other, and nothing else.
        causal: queries and keys are the same tokens, and none looks ahead; otherwise each query sees all keys.
        scale: factor on the scores.
        window: with ``causal``, a query sees itself and at most ``window - 1`` tokens before it.
    """

    queries: Varlen
    keys: Varlen
    causal: bool
    scale: float
    window: int | None = None

    def documents(self, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
        """Queries and keys of each document that has both."""
        lengths = self.queries.host_lengths(), self.keys.host_lengths()
        assert (sum(lengths[0]), sum(lengths[1])) == (num_queries, num_keys), "the documents do not add up"
        query, key = 0, 0
        for queries, keys in zip(*lengths, strict=True):
            if queries and keys:
                yield slice(query, query + queries), slice(key, key + keys)
            query, key = query + queries, key + keys

    def parts(self, queries: slice, keys: slice, most: int) -> Iterator[tuple[slice, slice, bool]]:
        """A document's queries, ``most`` at a time, the keys that they see some of, and whether a mask is needed."""
        if not self.causal:
            for start in range(queries.start, queries.stop, most):
                yield slice(start, min(start + most, queries.stop)), keys, False
            return
        for start in range(0, queries.stop - queries.start, most):
            stop = min(start + most, queries.stop - queries.start)
            first = 0 if self.window is None else max(0, start - self.window + 1)
            some = slice(queries.start + start, queries.start + stop)
            yield some, slice(keys.start + first, keys.start + stop), True

    def mask(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """bool (queries, keys) of two slices of one causal document that end together."""
        # Both end with the same token: positions are counted back from it.
        query_at = torch.arange(queries.start - queries.stop, 0, device=device).unsqueeze(1)
        key_at = torch.arange(keys.start - keys.stop, 0, device=device)
        visible = key_at <= query_at
        return visible if self.window is None else visible & (key_at > query_at - self.window)


class BlockKernel(abc.ABC):
    """A way to compute blocks; without a graph, for the callers are autograd functions themselves."""

    name: str

    @abc.abstractmethod
    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: (T, Hq, D).
            k: (T', Hkv, D).
            v: (T', Hkv, D).

        Returns:
            out (T, Hq, D) and lse float32 (Hq, T), float64 for float64; 0 and -inf for queries without keys.
        """

    @abc.abstractmethod
    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        """What this block adds to the gradients of q, k and v.

        Args:
            grad: (T, Hq, D), of the final output.
            out, lse: the final ones, over all keys that these queries see anywhere.
        """


class MathBlockKernel(BlockKernel):
    """The formulas as they stand, in float32 (float64 for float64); holds the scores of 256 queries at a time."""

    name = "math"

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """See ``BlockKernel``."""
        dtype = _wide(q.dtype)
        out = q.new_zeros((*q.shape[:2], v.shape[-1]))
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=dtype)
        for queries, keys in block.documents(len(q), len(k)):
            for some, seen, is_masked in block.parts(queries, keys, _QUERIES_AT_ONCE):
                scores = _scores(q[some], k[seen], block, some, seen, is_masked)
                found = scores.logsumexp(-1)
                weights = (scores - found.unsqueeze(-1)).exp()
                out[some] = _from_groups(weights @ v[seen].to(dtype).transpose(0, 1).unsqueeze(1)).to(out.dtype)
                lse[:, some] = found.flatten(0, 1)
        return out, lse

    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        """See ``BlockKernel``."""
        dtype, num_groups = _wide(q.dtype), k.shape[1]
        dq, dk, dv = (torch.zeros_like(tensor, dtype=dtype) for tensor in (q, k, v))
        for queries, keys in block.documents(len(q), len(k)):
            for some, seen, is_masked in block.parts(queries, keys, _QUERIES_AT_ONCE):
                scores = _scores(q[some], k[seen], block, some, seen, is_masked)
                final = torch.unflatten(lse[:, some].to(dtype), 0, (num_groups, -1)).unsqueeze(-1)
                weights = (scores - final).exp()
                above, result = (_in_groups(tensor[some], num_groups) for tensor in (grad, out))
                from_values = above @ v[seen].to(dtype).transpose(0, 1).unsqueeze(1).transpose(-1, -2)
                slope = weights * (from_values - (above * result).sum(-1, keepdim=True)) * block.scale
                dq[some] += _from_groups(slope @ k[seen].to(dtype).transpose(0, 1).unsqueeze(1))
                # The query heads of a group share one head of K and V: their gradients add up.
                dk[seen] += (slope.transpose(-1, -2) @ _in_groups(q[some], num_groups)).sum(1).transpose(0, 1)
                dv[seen] += (weights.transpose(-1, -2) @ above).sum(1).transpose(0, 1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class CpuFlashBlockKernel(BlockKernel):
    """torch's flash attention for the CPU, a call for each document."""

    name = "cpu_flash"

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """See ``BlockKernel``."""
        out = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=_wide(q.dtype))
        attend = getattr(torch.ops.aten, _CPU_FLASH)
        for some, seen, bias in self._calls(q, k, block):
            heads = _one_head_each(q[some], k[seen], v[seen])
            found, its_lse = attend(*heads, 0.0, block.causal and bias is None, attn_mask=bias, scale=block.scale)
            out[some] = found.flatten(0, 1).transpose(0, 1)
            lse[:, some] = its_lse.flatten(0, 1).to(lse.dtype)
        return out, lse

    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        """See ``BlockKernel``."""
        dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
        attend = getattr(torch.ops.aten, _CPU_FLASH + "_backward")
        num_groups = k.shape[1]
        for some, seen, bias in self._calls(q, k, block):
            heads = _one_head_each(q[some], k[seen], v[seen])
            above, result = (_in_groups(tensor[some], num_groups, tensor.dtype) for tensor in (grad, out))
            final = torch.unflatten(lse[:, some], 0, (num_groups, -1)).contiguous()
            found = attend(
                above, *heads, result, final, 0.0, block.causal and bias is None, attn_mask=bias, scale=block.scale
            )
            dq[some] += found[0].flatten(0, 1).transpose(0, 1)
            dk[seen] += found[1].sum(1).transpose(0, 1)
            dv[seen] += found[2].sum(1).transpose(0, 1)
        return dq, dk, dv

    @staticmethod
    def _calls(q: Tensor, k: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Queries, keys and, for a window that is shorter than its document, an additive mask."""
        for queries, keys in block.documents(len(q), len(k)):
            if block.window is None or queries.stop - queries.start <= block.window:
                yield queries, keys, None
                continue
            for some, seen, _ in block.parts(queries, keys, block.window):
                visible = block.mask(some, seen, q.device)
                yield some, seen, torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)


class CudaFlashBlockKernel(BlockKernel):
    """torch's own flash attention 2 for CUDA: one call for all documents."""

    name = "cuda_flash"

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """See ``BlockKernel``."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *pad_heads(q, k, v), *self._bounds(block), 0.0, block.causal, False, **self._settings(block)
        )
        # Where a document has no keys, the kernel says +inf: it adds nothing.
        return out[..., : v.shape[-1]], torch.where(torch.isposinf(lse), -torch.inf, lse)

    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        """See ``BlockKernel``."""
        heads = pad_heads(q, k, v)
        size = heads[0].shape[-1]
        above, result = (torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1])) for tensor in (grad, out))
        # Nothing is dropped: the state of the random numbers is not looked at.
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            above.contiguous(),
            *heads,
            result.contiguous(),
            lse.contiguous(),
            *self._bounds(block),
            0.0,
            block.causal,
            *unused,
            **self._settings(block),
        )
        dq, dk, dv = (part[..., : tensor.shape[-1]] for part, tensor in zip(found, (q, k, v), strict=True))
        return dq, dk, dv

    @staticmethod
    def _bounds(block: AttentionBlock) -> tuple[Tensor, Tensor, int, int]:
        return (
            block.queries.cu_seqlens,
            block.keys.cu_seqlens,
            block.queries.max_seqlen,
            block.keys.max_seqlen,
        )

    @staticmethod
    def _settings(block: AttentionBlock) -> dict[str, float | int]:
        settings: dict[str, float | int] = {"scale": block.scale}
        if block.window is not None:
            settings |= {"window_size_left": block.window - 1, "window_size_right": 0}
        return settings


def merge_outputs(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks of the same queries as one.

    Args:
        out, more: (T, Hq, D), ``out`` in float32 or float64.
        lse, its_lse: (Hq, T), of the same precision.

    Returns:
        out and lse over the keys of both; queries that see none of either keep 0 and -inf.
    """
    total = torch.logaddexp(lse, its_lse)
    # -inf minus -inf is a query that has seen nothing so far: its output is 0, whatever it is weighed with.
    shares = (torch.where(torch.isneginf(part), part, part - total).exp() for part in (lse, its_lse))
    mine, theirs = (share.transpose(0, 1).unsqueeze(-1) for share in shares)
    return out * mine + more * theirs, total


def choose_blocks(impl: str, device: torch.device, dtype: torch.dtype, *, head_dims: tuple[int, int]) -> BlockKernel:
    """The blocks that a run's ``--attn-impl`` means.

    Args:
        head_dims: D of q and k, and of v.

    Raises:
        ConfigError: for a kernel that does not tell how it came to its result.
    """
    if impl not in WITH_BLOCKS:
        raise ConfigError(
            f"--attn-impl {impl}: sequences that several processes share are attended to in blocks, by torch's kernels "
            "only",
            "Use --attn-impl auto: on CUDA that is torch's flash attention 2.",
        )
    if impl == "varlen" and (error := needs_fast_gpu("torch's varlen", device, dtype)):
        raise ConfigError(f"--attn-impl varlen: {error.message}", error.remedy)
    if impl in ("auto", "varlen") and needs_fast_gpu("flash", device, dtype) is None and max(head_dims) <= 256:
        return CudaFlashBlockKernel()
    has_flash = device.type == "cpu" and head_dims[0] == head_dims[1] and hasattr(torch.ops.aten, _CPU_FLASH)
    return CpuFlashBlockKernel() if has_flash and impl != "reference" else MathBlockKernel()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _in_groups(heads: Tensor, num_groups: int, dtype: torch.dtype | None = None) -> Tensor:
    """(T, Hq, D) as (Hkv, Hq / Hkv, T, D)."""
    grouped = torch.unflatten(heads.transpose(0, 1), 0, (num_groups, -1))
    return grouped.to(dtype or _wide(heads.dtype))


def _from_groups(heads: Tensor) -> Tensor:
    """Undo ``_in_groups``: heads (T, H, D) from groups (groups, heads of a group, T, D)."""
    return heads.flatten(0, 1).transpose(0, 1)


def _one_head_each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as a batch of groups, (Hkv, Hq / Hkv, T, D); K and V with a stride of zero over the heads of a group."""
    num_groups = k.shape[1]
    per_group = q.shape[1] // num_groups
    keys, values = (tensor.transpose(0, 1).unsqueeze(1).expand(-1, per_group, -1, -1) for tensor in (k, v))
    return _in_groups(q, num_groups, q.dtype), keys, values


def _scores(q: Tensor, k: Tensor, block: AttentionBlock, queries: slice, keys: slice, is_masked: bool) -> Tensor:
    """(Hkv, Hq / Hkv, queries, keys)."""
    dtype = _wide(q.dtype)
    scores = _in_groups(q, k.shape[1]) @ k.to(dtype).permute(1, 2, 0).unsqueeze(1) * block.scale
    return scores.masked_fill(~block.mask(queries, keys, q.device), -torch.inf) if is_masked else scores
