"""BlockKernel of attention: each equals the formulas, and merged they equal attention to all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from packtool.attention.choose import KERNELS
from packtool.attention.kernel import ReferenceKernel, Varlen
from packtool.attention.parallel.blocks import (
    AttentionBlock,
    BlockKernel,
    CpuFlashBlockKernel,
    MathBlockKernel,
    choose_blocks,
    merge_outputs,
)
from packtool.errors import ConfigError
from tests.attention.parallel.against_formulas import SHAPES, largest_error

BLOCKS = [CpuFlashBlockKernel(), MathBlockKernel()]
CPU = torch.device("cpu")


def random_tensors(num_queries: int, num_keys: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(num_queries)
    shapes = ((num_queries, heads[0]), (num_keys, heads[1]), (num_keys, heads[1]), (num_queries, heads[0]))
    return [torch.randn(*shape, 8, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.smoke
@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda blocks: blocks.name)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 300])
def test_causal_blocks_equal_the_reference(blocks: BlockKernel, heads: tuple[int, int], window: int | None) -> None:
    documents = Varlen.of_lengths([270, 1, 0, 33])
    q, k, v, above = random_tensors(304, 304, heads, torch.float32)
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = KERNELS["reference"].attend(*wide, documents, scale=0.3, window=window)
    expected_lse = ReferenceKernel.scores(wide[0], wide[1], documents, 0.3, window).logsumexp(-1)
    expected_gradients = torch.autograd.grad(expected, wide, above.double())
    block = AttentionBlock(documents, documents, True, 0.3, window)
    out, lse = blocks.fwd(q, k, v, block)
    gradients = blocks.bwd(above, q, k, v, out, lse, block)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-6)
    for got, want in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda blocks: blocks.name)
def test_blocks_of_some_keys_merge_to_all_keys(blocks: BlockKernel) -> None:
    q, k, v, above = random_tensors(30, 50, (4, 2), torch.float32)
    queries = Varlen.of_lengths([10, 0, 20])
    parts = {(0, 21): [8, 3, 10], (21, 21): [0, 0, 0], (21, 50): [12, 1, 16]}
    out, lse = torch.zeros(30, 4, 8), torch.full((4, 30), -torch.inf)
    for (start, stop), lengths in parts.items():
        block = AttentionBlock(queries, Varlen.of_lengths(lengths), False, 0.3)
        out, lse = merge_outputs(out, lse, *blocks.fwd(q, k[start:stop], v[start:stop], block))
    order = [*range(8), *range(21, 33), *range(8, 11), *range(33, 34), *range(11, 21), *range(34, 50)]
    wide = [tensor.double().requires_grad_() for tensor in (q, k[order], v[order])]
    expected = []
    for query_slice, key_slice in ((slice(0, 10), slice(0, 20)), (slice(10, 30), slice(24, 50))):
        heads = [wide[0][query_slice], *(tensor[key_slice].repeat_interleave(2, dim=1) for tensor in wide[1:])]
        scores = torch.einsum("qhd,khd->hqk", heads[0], heads[1]) * 0.3
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), heads[2]))
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=2e-6)
    dq, dk, dv = torch.autograd.grad(torch.cat(expected), wide, above.double())
    total, of_keys = torch.zeros_like(q), []
    for (start, stop), lengths in parts.items():
        block = AttentionBlock(queries, Varlen.of_lengths(lengths), False, 0.3)
        more, *gradients = blocks.bwd(above, q, k[start:stop], v[start:stop], out, lse, block)
        total += more
        of_keys.append(gradients)
    torch.testing.assert_close(total.double(), dq, rtol=0, atol=2e-6)
    for tensor_index, want in enumerate((dk, dv)):
        got = torch.cat([part[tensor_index] for part in of_keys])[order]
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 5e-6), (torch.bfloat16, 4e-2)])
def test_blocks_of_the_cpu_equal_the_formulas(
    shape: tuple[list[int], list[int] | None, int | None], dtype: torch.dtype, allowed: float
) -> None:
    assert largest_error(CpuFlashBlockKernel(), shape, (8, 2), dtype, CPU) < allowed


def test_queries_without_keys_stay_empty() -> None:
    empty_part = torch.zeros(3, 2, 4), torch.full((2, 3), -torch.inf)
    out, lse = merge_outputs(*empty_part, *empty_part)
    assert not out.any()
    assert torch.isneginf(lse).all()
    partial = torch.randn(3, 2, 4), torch.randn(2, 3)
    for pair in ((empty_part, partial), (partial, empty_part)):
        out, lse = merge_outputs(*pair[0], *pair[1])
        torch.testing.assert_close(out, partial[0])
        torch.testing.assert_close(lse, partial[1])


def test_document_lengths_must_match_the_tokens() -> None:
    q, k, v, _ = random_tensors(5, 5, (2, 2), torch.float32)
    with pytest.raises(AssertionError, match="add up"):
        MathBlockKernel().fwd(q, k, v, AttentionBlock(Varlen.of_lengths([4]), Varlen.of_lengths([5]), False, 1.0))


def test_blocks_are_selected_for_each_kernel() -> None:
    assert choose_blocks("auto", CPU, torch.float32, head_dims=(64, 64)).name == "cpu_flash"
    assert choose_blocks("sdpa", CPU, torch.bfloat16, head_dims=(64, 64)).name == "cpu_flash"
    assert choose_blocks("auto", CPU, torch.float32, head_dims=(96, 64)).name == "math"
    assert choose_blocks("reference", CPU, torch.float64, head_dims=(64, 64)).name == "math"
    with pytest.raises(ConfigError, match="flash_attention_2: sequences that several processes share"):
        choose_blocks("flash_attention_2", CPU, torch.bfloat16, head_dims=(64, 64))
    with pytest.raises(ConfigError, match="CUDA"):
        choose_blocks("varlen", CPU, torch.bfloat16, head_dims=(64, 64))
