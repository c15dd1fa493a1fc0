"""Every kernel that a GPU has, against the reference there; skipped where there is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from packtool.attention.choose import KERNELS, choose
from packtool.attention.kernel import Varlen
from packtool.attention.parallel.blocks import CudaFlashBlockKernel, choose_blocks
from packtool.attention.register import GatherTokens
from tests.attention.against_reference import HEADS, LENGTHS, TREES, check_kernel, random_heads, tree_varlen
from tests.attention.parallel.against_formulas import SHAPES, largest_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GPU = torch.device("cuda")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_reference(name: str, lengths: list[int]) -> None:
    kernel, dtype = KERNELS[name], torch.bfloat16
    missing = kernel.availability_error(GPU, dtype)
    if missing is not None:
        pytest.skip(missing.message)
    varlen = Varlen.of_lengths([length for length in lengths if length], GPU)
    for num_heads, num_kv_heads in HEADS:
        for window in (None, 5):
            inputs = random_heads(sum(lengths), num_heads, num_kv_heads, 64, dtype=dtype)
            heads = [tensor.detach().to(GPU).requires_grad_() for tensor in inputs]
            check_kernel(kernel, heads, varlen, window=window)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_tree_equals_the_reference(name: str, tree: tuple[list[int], list[int]]) -> None:
    kernel, dtype = KERNELS[name], torch.bfloat16
    missing = kernel.availability_error(GPU, dtype)
    if missing is not None:
        pytest.skip(missing.message)
    on_host, index = tree_varlen(*tree)
    assert on_host.keys is not None
    keys = Varlen.of_lengths(on_host.keys.host_lengths(), GPU)
    varlen = dataclasses.replace(Varlen.of_lengths(on_host.host_lengths(), GPU), keys=keys)
    for window in (None, 5):
        q, k, v = random_heads(sum(tree[1]), 8, 2, 64, dtype=dtype)
        heads = [tensor.detach().to(GPU).requires_grad_() for tensor in (q, k[index], v[index])]
        check_kernel(kernel, heads, varlen, window=window)


def test_auto_does_not_select_sdpa() -> None:
    assert choose("auto", GPU, torch.bfloat16).name != "sdpa"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
def test_blocks_of_shared_rows_equal_the_formulas(
    shape: tuple[list[int], list[int] | None, int | None], heads: tuple[int, int]
) -> None:
    assert largest_error(CudaFlashBlockKernel(), shape, heads, torch.bfloat16, GPU) < 4e-2


def test_auto_selects_flash_blocks() -> None:
    assert choose_blocks("auto", GPU, torch.bfloat16, head_dims=(128, 128)).name == "cuda_flash"


def test_gradients_of_shared_prefixes_are_the_same_in_every_run() -> None:
    index = torch.arange(512, device=GPU).repeat(16)
    tokens = torch.randn(512, 8, 128, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(len(index), 8, 128, device=GPU, dtype=torch.bfloat16)
    runs = [torch.autograd.grad(GatherTokens.apply(index, tokens), tokens, (weights,))[0] for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    exact = weights.double().view(16, 512, 8, 128).sum(0)
    torch.testing.assert_close(runs[0].double(), exact, rtol=2**-8, atol=1e-5)
