"""What every attention kernel is compared with: dense, in float64, with the whole mask written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from packtool.attention.kernel import Kernel, Unavailable, default_scale
from packtool.attention.varlen import Varlen


class ReferenceKernel(Kernel):
    """Causal attention within documents, by definition; O(T^2) memory, for tests and ``packtool verify``."""

    name = "reference"

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
        """Everywhere where there is float64."""
        if device.type == "mps":
            return Unavailable("the reference needs float64, which this device lacks", "Use the CPU.")
        return None

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``Kernel.fwd`` says, but in float64 and with a graph for the lse too."""
        num_tokens, num_heads, _ = q.shape
        scale = default_scale(q, scale)
        groups = num_heads // k.shape[1]
        q, k, v = q.double(), k.double().repeat_interleave(groups, dim=1), v.double().repeat_interleave(groups, dim=1)
        query, query_ends = _places(num_tokens, varlen)
        key, key_ends = _places(len(k), varlen.of_keys)
        visible = query[:, None] == key[None, :]
        # Counted back from the end of the document, which both have in common.
        if varlen.causal:
            visible &= query_ends[:, None] >= key_ends[None, :]
        if window is not None:
            visible &= key_ends[None, :] > query_ends[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores.masked_fill(~visible, -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)

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
        """Attend as ``Kernel.attend`` says, in float64; of the type that q has, as the next layers expect."""
        return super().attend(q, k, v, varlen, scale=scale, window=window, dropout=dropout).to(q.dtype)


def _places(num_tokens: int, varlen: Varlen) -> tuple[Tensor, Tensor]:
    """The number of each token's document, and its distance to the end of it, below zero; int64 (T,) each."""
    index = torch.arange(num_tokens, device=varlen.cu_seqlens.device)
    ends = varlen.cu_seqlens.to(index)[1:]
    document = torch.bucketize(index, ends, right=True)
    return document, index - ends[document]
