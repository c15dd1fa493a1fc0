"""One comparison for all blocks: output, lse and gradients against the formulas in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from packtool.attention.kernel import Varlen
from packtool.attention.parallel.blocks import AttentionBlock, BlockKernel, MathBlockKernel

# (lengths of queries, lengths of keys or None for the same, window)
SHAPES: list[tuple[list[int], list[int] | None, int | None]] = [
    ([270, 1, 33], None, None),
    ([270, 1, 33], None, 5),
    ([10, 3, 20], [8, 65, 3], None),
    ([64, 130], [200, 1], None),
]


def largest_error(
    blocks: BlockKernel,
    shape: tuple[list[int], list[int] | None, int | None],
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """In units of the largest number of each result, at least 1."""
    lengths, key_lengths, window = shape
    queries = Varlen.of_lengths(lengths, device)
    keys = Varlen.of_lengths(key_lengths or lengths, device)
    block = AttentionBlock(queries, keys, key_lengths is None, 0.2, window)
    q, k, v, above = _tensors(sum(lengths), sum(key_lengths or lengths), heads, dtype, device)
    exact = MathBlockKernel()
    wide = [tensor.double() for tensor in (q, k, v)]
    expected, expected_lse = exact.fwd(*wide, block)
    expected_gradients = exact.bwd(above.double(), *wide, expected, expected_lse, block)
    out, lse = blocks.fwd(q, k, v, block)
    gradients = blocks.bwd(above, q, k, v, out, lse, block)
    pairs = zip((out, lse, *gradients), (expected, expected_lse, *expected_gradients), strict=True)
    return max(float((a.double() - b).abs().max()) / max(float(b.abs().max()), 1.0) for a, b in pairs)


def _tensors(
    num_queries: int, num_keys: int, heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_queries)
    shapes = ((num_queries, heads[0]), (num_keys, heads[1]), (num_keys, heads[1]), (num_queries, heads[0]))
    return [torch.randn(*shape, 64, generator=generator).to(dtype).to(device) for shape in shapes]
