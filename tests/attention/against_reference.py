"""One comparison for all kernels: output and every gradient against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Kernel, Varlen
from packtool.batch.prefix_tree import key_index

HEADS = [(4, 4), (4, 2), (4, 1), (6, 3), (5, 1)]
"""Query heads and heads of K and V: as many, grouped, one for all, and numbers that no power of two divides."""
LENGTHS = {
    "one": [37],
    "single tokens": [1] * 20,
    "many tiny": [1, 2, 1, 3] * 25,
    "uneven": [70, 1, 19, 2, 44],
    "with empty ones": [0, 3, 0, 9, 0],
}
WINDOWS = (None, 1, 5, 1000)


TREES = {
    "a prefix and its continuations": ([-1, 0, 0, 0], [40, 11, 1, 25]),
    "two trees and one alone": ([-1, 0, 0, -1, -1, 4, 4], [9, 2, 3, 17, 5, 1, 6]),
    "several levels": ([-1, 0, 1, 1, 0, 4, 5, 5], [7, 3, 1, 12, 20, 2, 5, 4]),
    "a chain": ([-1, 0, 1, 2, 3], [1, 1, 8, 1, 2]),
}
"""Parents and lengths of the nodes."""


def tree_varlen(parents: Sequence[int], lengths: Sequence[int]) -> tuple[Varlen, Tensor]:
    """Boundaries of nodes that lie end to end and of their keys, and the index of the keys."""
    index, key_lengths = key_index(parents, lengths)
    varlen = dataclasses.replace(Varlen.of_lengths(lengths), keys=Varlen.of_lengths(key_lengths))
    return varlen, torch.from_numpy(index)


def check_tree(
    kernel: Kernel,
    heads: list[Tensor],
    tree: tuple[Varlen, Tensor],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> None:
    """Compare a kernel on the gathered keys of a tree with the reference; heads are those of the T tokens."""
    varlen, index = tree
    k, v = (tensor.detach()[index].requires_grad_(tensor.requires_grad) for tensor in heads[1:])
    check_kernel(kernel, [heads[0], k, v], varlen, scale=scale, window=window)


def random_heads(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Q, K and V that want gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim))
    tensors = [torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype or torch.float32).requires_grad_() for tensor in tensors]


def check_kernel(
    kernel: Kernel, heads: list[Tensor], varlen: Varlen, *, scale: float | None = None, window: int | None = None
) -> None:
    """Compare a kernel's output and gradients with the reference in float64; tolerance: some roundings of the type."""
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[heads[0].dtype]
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in heads]
    expected = KERNELS["reference"].attend(*wide, varlen, scale=scale, window=window)
    out = kernel.attend(*heads, varlen, scale=scale, window=window)
    assert out.shape == heads[0].shape
    pairs = [(out.double(), expected)]
    if heads[0].requires_grad:
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weight = weight.to(heads[0].device)
        gradients = torch.autograd.grad((out.double() * weight).sum(), heads)
        expected_gradients = torch.autograd.grad((expected * weight).sum(), wide)
        pairs += [(actual.double(), other) for actual, other in zip(gradients, expected_gradients, strict=True)]
    for actual, other in pairs:
        assert actual.shape == other.shape
        # Gradients are sums over many tokens: their size sets what a rounding is.
        unit = max([1.0, *other.detach().abs().flatten().tolist()])
        torch.testing.assert_close(actual, other, rtol=0, atol=tolerance * unit)
