"""One call of torch's scaled_dot_product_attention per document: works on every device, in every precision.

The cost is one call per document and layer; T^2 becomes the sum of the squared lengths. Grouped heads are never copied:
the function takes fewer heads of K and V than of Q.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.attention.kernel import Kernel, Varlen

_PREFIX_BLOCK_QUERIES = 512
"""Queries per mask in a document whose keys begin before its queries."""


class SdpaKernel(Kernel):
    """Scaled dot-product attention of torch, called once for each document."""

    name = "sdpa"
    has_dropout = True

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """The result is contiguous."""
        assert len(k) == len(v), "the documents do not add up to the packed sequence"
        outs = []
        for q_rows, kv_rows in zip(varlen.documents(len(q)), varlen.of_keys.documents(len(k)), strict=True):
            # (1, H, T, D) each.
            query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (q[q_rows], k[kv_rows], v[kv_rows]))
            for queries, keys, mask in _blocks(query.shape[2], key.shape[2], window, q.device):
                heads = query[:, :, queries], key[:, :, keys], value[:, :, keys]
                causal, has_groups = mask is None and varlen.causal, q.shape[1] != k.shape[1]
                out = F.scaled_dot_product_attention(*heads, mask, dropout, causal, scale=scale, enable_gqa=has_groups)
                outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs) if outs else q.new_zeros((0, q.shape[1], v.shape[-1]))


def _blocks(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield slices of queries and keys of one document that are computed in one call, and their mask.

    The last query is the last key's token. The mask is None if causality is the only one.
    A document longer than its window is split into blocks of ``window`` queries against at most ``2 * window - 1``
    keys, one with a shared prefix into blocks of ``_PREFIX_BLOCK_QUERIES``. The mask of a block is the largest tensor
    that is built: memory grows with L * window, not with L^2.
    """
    if window is not None and num_keys <= window:
        window = None
    if window is None and num_queries == num_keys:
        yield slice(0, num_queries), slice(0, num_keys), None
        return
    prefix_length = num_keys - num_queries  # tokens that have keys and no queries
    block_size = window or _PREFIX_BLOCK_QUERIES
    for start in range(0, num_queries, block_size):
        stop = min(start + block_size, num_queries)
        first_key = max(0, prefix_length + start - window + 1) if window is not None else 0
        # Positions in the document.
        query_at = torch.arange(prefix_length + start, prefix_length + stop, device=device).unsqueeze(1)
        key_at = torch.arange(first_key, prefix_length + stop, device=device).unsqueeze(0)
        mask = key_at <= query_at
        if window is not None:
            mask &= key_at > query_at - window
        yield slice(start, stop), slice(first_key, prefix_length + stop), mask
