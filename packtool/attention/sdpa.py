"""Each document is a call of torch's scaled_dot_product_attention: right on every device, in every precision.

The price is one call for each document and layer; T^2 becomes the sum of the squared lengths. Grouped heads are never
copied: the public function takes fewer heads of K and V than of Q, and for the call that also tells the lse they are
repeated as views, with a stride of zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.attention.kernel import Kernel, Unavailable, Varlen, default_scale

_LSE_QUERIES = 256
"""Queries whose scores are held at once where the lse is computed here."""

_MASKED_QUERIES = 512
"""Queries with one mask, of a document that goes on from a prefix."""

QueryBlock = tuple[slice, slice, Tensor | None]


class SdpaKernel(Kernel):
    """Scaled dot-product attention of torch, called once for each document."""

    name = "sdpa"
    has_dropout = True

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
        """Always None: SDPA computes on every device and in every precision."""
        return None

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``Kernel.fwd`` says; but for the CPU, the lse costs the scores once more."""
        with_lse = _cpu_flash if _has_cpu_flash(q, v) else _sdpa_and_lse
        scale = default_scale(q, scale)
        outs, lses = [], []
        for heads in _documents(q, k, v, varlen):
            for queries, keys, mask in _blocks(heads[0].shape[2], heads[1].shape[2], window, q.device):
                given = heads[0][:, :, queries], heads[1][:, :, keys], heads[2][:, :, keys]
                out, lse = with_lse(*given, scale, mask, varlen.causal)
                outs.append(out.squeeze(0).transpose(0, 1))
                lses.append(lse)
        if not outs:
            return q.new_zeros((0, q.shape[1], v.shape[-1])), q.new_zeros((q.shape[1], 0), dtype=torch.float32)
        return torch.cat(outs), torch.cat(lses, dim=1)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        varlen: Varlen,
        *,
        scale: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend as ``Kernel.attend`` says; the result is contiguous."""
        outs = []
        for heads in _documents(q, k, v, varlen):
            for queries, keys, mask in _blocks(heads[0].shape[2], heads[1].shape[2], window, q.device):
                out = F.scaled_dot_product_attention(
                    heads[0][:, :, queries],
                    heads[1][:, :, keys],
                    heads[2][:, :, keys],
                    attn_mask=mask,
                    dropout_p=dropout,
                    is_causal=mask is None and varlen.causal,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
                outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs) if outs else q.new_zeros((0, q.shape[1], v.shape[-1]))


def _documents(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen) -> Iterator[list[Tensor]]:
    """Queries, keys and values of each document, (1, H, L, D), as views."""
    assert len(k) == len(v), "the documents do not add up to the packed sequence"
    for queries, keys in zip(varlen.documents(len(q)), varlen.of_keys.documents(len(k)), strict=True):
        yield [tensor[of].transpose(0, 1).unsqueeze(0) for tensor, of in ((q, queries), (k, keys), (v, keys))]


def _blocks(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Iterator[QueryBlock]:
    """Queries and keys of one document that are computed together, and what is masked beyond the causal mask.

    A document that is longer than its window is cut into blocks of ``window`` queries against at most
    ``2 * window - 1`` keys, one that goes on from a prefix into blocks of ``_MASKED_QUERIES``. The mask of a block is
    the largest thing that is built: memory grows with L * window, not with L^2.
    """
    if window is not None and num_keys <= window:
        window = None
    if window is None and num_queries == num_keys:
        yield slice(0, num_queries), slice(0, num_keys), None
        return
    before = num_keys - num_queries
    size = window or _MASKED_QUERIES
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        first_key = max(0, before + start - window + 1) if window is not None else 0
        query_at = torch.arange(before + start, before + stop, device=device).unsqueeze(1)
        key_at = torch.arange(first_key, before + stop, device=device).unsqueeze(0)
        mask = key_at <= query_at
        if window is not None:
            mask &= key_at > query_at - window
        yield slice(start, stop), slice(first_key, before + stop), mask


def _has_cpu_flash(q: Tensor, v: Tensor) -> bool:
    """Whether torch's own flash attention for the CPU, which tells the lse, takes these."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and hasattr(torch.ops.aten, _CPU_FLASH)


_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def _cpu_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """One call on (1, H, L, D): out likewise and lse float32 (Hq, L).

    Query heads of one group become the heads of a batch, whose K and V are one head with a stride of zero.
    """
    _, num_heads, length, head_dim = q.shape
    num_groups, num_keys = k.shape[1:3]
    per_group = num_heads // num_groups
    k, v = (tensor[0].unsqueeze(1).expand(num_groups, per_group, num_keys, head_dim) for tensor in (k, v))
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    attend = getattr(torch.ops.aten, _CPU_FLASH)
    q = q.reshape(num_groups, per_group, length, head_dim)
    out, lse = attend(q, k, v, 0.0, mask is None and causal, attn_mask=bias, scale=scale)
    return out.reshape(1, num_heads, length, head_dim), lse.reshape(num_heads, length).detach().float()


def _sdpa_and_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse by products of matrices, where no call of torch's tells the lse."""
    is_grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and causal, scale=scale, enable_gqa=is_grouped
    )
    return out, _lse(q[0], k[0], scale, mask, causal)


@torch.no_grad()
def _lse(q: Tensor, k: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """The log-sum-exp of (Hq, L, D) queries and (Hkv, L', D) keys: float32 (Hq, L), made for some queries at a time."""
    num_heads, length, head_dim = q.shape
    # Scores of 16 bits would be off by more than the tolerance of the merge; a row of them is small in 32.
    grouped = q.reshape(k.shape[0], -1, length, head_dim).float()
    keys = k.float().unsqueeze(1).transpose(-1, -2)
    index = torch.arange(length, device=q.device)
    parts = []
    for start in range(0, length, _LSE_QUERIES):
        queries = slice(start, start + _LSE_QUERIES)
        scores = grouped[:, :, queries] @ keys * scale
        if mask is not None or causal:  # without a mask there are as many keys as queries
            visible = index <= index[queries].unsqueeze(1) if mask is None else mask[queries]
            scores = scores.masked_fill(~visible, -torch.inf)
        parts.append(scores.logsumexp(-1))
    return torch.cat(parts, dim=-1).reshape(num_heads, length)
