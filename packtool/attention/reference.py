"""What every attention kernel is compared with: dense, in float64, with the whole mask written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents, by definition; O(T^2) memory, for tests.

    Args:
        q: (T, Hq, D).
        k: (T, Hkv, D).
        v: (T, Hkv, D).
        cu_seqlens: (S + 1,) starts of the documents and T.
        scale: factor on the scores, by default 1 / sqrt(D).
        window: a query sees itself and at most ``window - 1`` tokens before it.

    Returns:
        out float64 (T, Hq, D) and lse float64 (T, Hq), the logarithm of the sum of the exponentials of the scores.
    """
    num_tokens, num_heads, head_dim = q.shape
    groups = num_heads // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(groups, dim=1), v.double().repeat_interleave(groups, dim=1)
    index = torch.arange(num_tokens, device=q.device)
    document = torch.bucketize(index, cu_seqlens.to(index)[1:], right=True)
    visible = (document[:, None] == document[None, :]) & (index[:, None] >= index[None, :])
    if window is not None:
        visible &= index[None, :] > index[:, None] - window
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale if scale is not None else 1 / math.sqrt(head_dim))
    scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T
