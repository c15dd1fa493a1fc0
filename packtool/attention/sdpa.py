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
        """Implement ``attend``; the result is contiguous."""
        assert len(k) == len(v), "the documents do not add up to the packed sequence"
        outs = []
        has_groups = q.shape[1] != k.shape[1]
        for query, key, value, mask in _blocks_of_documents(q, k, v, varlen, window):
            is_causal = varlen.causal and mask is None
            out = F.scaled_dot_product_attention(
                query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=has_groups
            )
            outs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outs) if outs else q.new_zeros((0, q.shape[1], v.shape[-1]))


def _blocks_of_documents(
    q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, window: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield queries, keys and values, (1, H, T, D) each, and the mask of each block of each document."""
    for q_rows, kv_rows in zip(varlen.documents(len(q)), varlen.key_boundaries.documents(len(k)), strict=True):
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (q[q_rows], k[kv_rows], v[kv_rows]))
        for queries, keys, mask in _blocks(query.shape[2], key.shape[2], window, varlen.causal, q.device):
            yield query[:, :, queries], key[:, :, keys], value[:, :, keys], mask


def _blocks(
    num_queries: int, num_keys: int, window: int | None, causal: bool, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Divide the attention of one document into blocks, each of which torch computes in one call.

    The queries are the last tokens of the keys; keys before them are those of a shared prefix.

    Args:
        window: a query sees itself and at most ``window - 1`` tokens before it; None: all before it.
        causal: queries see no later tokens.

    Yields:
        The block's slice of the queries, its slice of the keys, and its mask, bool (queries, keys); None instead of a
        mask that torch makes itself.
    """
    if window is not None and num_keys <= window:
        window = None  # it contains the complete document
    prefix_length = num_keys - num_queries
    needs_no_mask = window is None and (not causal or prefix_length == 0)
    if needs_no_mask:
        yield slice(0, num_queries), slice(0, num_keys), None
        return
    # A mask of the complete document would need memory that grows with the square of its length.
    block_size = _PREFIX_BLOCK_QUERIES if window is None else window
    for start in range(0, num_queries, block_size):
        stop = min(start + block_size, num_queries)
        query_positions = range(prefix_length + start, prefix_length + stop)  # among the keys
        first_key = 0 if window is None else max(0, query_positions.start - window + 1)
        key_stop = query_positions.stop if causal else num_keys
        mask = _mask(query_positions, range(first_key, key_stop), window, causal, device)
        yield slice(start, stop), slice(first_key, key_stop), mask


def _mask(
    query_positions: range, key_positions: range, window: int | None, causal: bool, device: torch.device
) -> Tensor:
    """Return bool (queries, keys): True where a key is in the query's window and, if causal, not after the query."""
    queries = torch.arange(query_positions.start, query_positions.stop, device=device).unsqueeze(1)
    keys = torch.arange(key_positions.start, key_positions.stop, device=device).unsqueeze(0)
    mask = keys <= queries if causal else torch.ones_like(keys <= queries)
    if window is not None:
        mask &= keys > queries - window
    return mask
