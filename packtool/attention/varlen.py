"""Causal attention inside each document of a packed row, and nowhere else.

Three documents of 3, 2 and 4 tokens, ``cu_seqlens = [0, 3, 5, 9]``; a query (row) sees the keys (columns) marked x::

        a a a b b c c c c
    a   x . . . . . . . .
    a   x x . . . . . . .
    a   x x x . . . . . .
    b   . . . x . . . . .
    b   . . . x x . . . .
    c   . . . . . x . . .
    c   . . . . . x x . .
    c   . . . . . x x x .
    c   . . . . . x x x x

The mask is never built: each document is a call of its own, so the price is one kernel launch per document and layer,
and T^2 becomes the sum of the squared lengths. Shapes use T packed tokens, S documents, Hq and Hkv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Varlen:
    """Where the documents of a packed row lie.

    Args:
        cu_seqlens: int32 (S + 1,), starts of the documents and T at the end.
        max_seqlen: tokens of the longest one.
        lengths: the S lengths on the host, if the caller has them; saves reading ``cu_seqlens`` back from a GPU.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] | None = None

    def host_lengths(self) -> tuple[int, ...]:
        """Length of every document, as Python integers."""
        if self.lengths is not None:
            return self.lengths
        return tuple(self.cu_seqlens.diff().tolist())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    varlen: Varlen,
    *,
    scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention of every document on its own, by torch's scaled_dot_product_attention.

    Args:
        q: (T, Hq, D).
        k: (T, Hkv, D); Hq is a multiple of Hkv.
        v: (T, Hkv, D).
        varlen: boundaries of the documents; their lengths add up to T.
        scale: factor on the scores, by default 1 / sqrt(D).
        window: a query sees itself and at most ``window - 1`` tokens before it.
        dropout: probability with which an attention weight is zeroed.

    Returns:
        (T, Hq, D), contiguous.
    """
    lengths = varlen.host_lengths()
    assert sum(lengths) == len(q) == len(k) == len(v), "the documents do not add up to the packed row"
    outputs = []
    start = 0
    for length in lengths:
        document = slice(start, start + length)
        start += length
        if length == 0:
            continue
        heads = [tensor[document].transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
        if window is None or length <= window:
            out = _sdpa(*heads, scale=scale, dropout=dropout, is_causal=True)
        else:
            out = _sliding(*heads, window=window, scale=scale, dropout=dropout)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs) if outputs else torch.zeros_like(q)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    dropout: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """One call on (1, H, L, D) tensors; grouped heads are left to the kernel."""
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _sliding(q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float | None, dropout: float) -> Tensor:
    """One document longer than its window, in blocks of ``window`` queries against at most ``2 * window - 1`` keys.

    The band mask of a block is the largest thing that is built: memory grows with L * window, not with L^2.
    """
    length = q.shape[2]
    blocks = []
    for start in range(0, length, window):
        stop = min(start + window, length)
        first_key = max(0, start - window + 1)
        query_at = torch.arange(start, stop, device=q.device).unsqueeze(1)
        key_at = torch.arange(first_key, stop, device=q.device).unsqueeze(0)
        mask = (key_at <= query_at) & (key_at > query_at - window)
        keys = slice(first_key, stop)
        blocks.append(_sdpa(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], scale=scale, dropout=dropout, mask=mask))
    return torch.cat(blocks, dim=2)
