"""Every kernel that runs here against the float64 reference, and the reference against the definition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Kernel, Varlen
from tests.attention.against_reference import (
    HEADS,
    LENGTHS,
    TREES,
    WINDOWS,
    check_kernel,
    check_tree,
    random_heads,
    tree_varlen,
)

torch.set_num_threads(1)


HERE: dict[str, Kernel] = {
    name: kernel
    for name, kernel in KERNELS.items()
    if kernel.availability_error(torch.device("cpu"), torch.float32) is None
}


@pytest.mark.smoke
def test_the_reference_is_a_dense_causal_softmax() -> None:
    """One document, against torch's own attention in float64."""
    heads = random_heads(11, 4, 2, 8, dtype=torch.float64)
    out = KERNELS["reference"].attend(*heads, Varlen.of_lengths([11]))
    q, k, v = (tensor.transpose(0, 1).repeat_interleave(4 // tensor.shape[1], 0) for tensor in heads)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))


@pytest.mark.smoke
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", sorted(HERE.keys() - {"reference"}))
def test_equals_the_reference(name: str, lengths: list[int]) -> None:
    varlen = Varlen.of_lengths(lengths)
    for num_heads, num_kv_heads in HEADS if len(lengths) < 10 else HEADS[1:2]:
        for window in WINDOWS:
            check_kernel(HERE[name], random_heads(sum(lengths), num_heads, num_kv_heads, 8), varlen, window=window)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 33), min_size=1, max_size=8),
    groups=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 7, 16]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    scale=st.one_of(st.none(), st.floats(0.05, 1.0)),
    seed=st.integers(0, 2**16),
)
def test_equals_the_reference_on_anything(
    lengths: list[int],
    groups: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    scale: float | None,
    seed: int,
) -> None:
    heads = random_heads(sum(lengths), groups * num_kv_heads, num_kv_heads, head_dim, seed=seed)
    for kernel in HERE.values():
        check_kernel(kernel, heads, Varlen.of_lengths(lengths), scale=scale, window=window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_equal_the_reference(dtype: torch.dtype) -> None:
    heads = random_heads(60, 4, 2, 16, dtype=dtype)
    for window in (None, 7):
        check_kernel(HERE["sdpa"], heads, Varlen.of_lengths([41, 1, 18]), window=window)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("num_kv_heads", "window"), [(4, 1000), (2, 5), (1, None)])
def test_flex_forward_equals_the_reference(num_kv_heads: int, window: int | None) -> None:
    heads = [tensor.detach() for tensor in random_heads(44, 4, num_kv_heads, 16)]
    check_kernel(KERNELS["flex"], heads, Varlen.of_lengths([30, 1, 13]), window=window, scale=0.3)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_documents_do_not_attend_to_each_other(name: str) -> None:
    heads = [tensor.detach() for tensor in random_heads(12, 2, 2, 16)]
    varlen = Varlen.of_lengths([5, 7])
    before = KERNELS[name].attend(*heads, varlen)
    changed = [torch.cat([tensor[:5], tensor[5:] + 100.0]) for tensor in heads]
    after = KERNELS[name].attend(*changed, varlen)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 1, 5, 8, 1000])
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_pictures_see_all_keys_up_to_their_end(name: str, window: int | None) -> None:
    """Queries at the end of longer keys, in both directions; a window bounds what lies before a query only."""
    varlen, index = tree_varlen([-1, 0, 0, -1], [13, 6, 1, 9])
    heads = [tensor.detach() for tensor in random_heads(29, 4, 2, 16)]
    heads = [heads[0], *(tensor[index] for tensor in heads[1:])]
    check_kernel(KERNELS[name], heads, dataclasses.replace(varlen, causal=False), window=window)
    if name == "sdpa":
        heads = [tensor.requires_grad_() for tensor in heads]
        check_kernel(KERNELS[name], heads, dataclasses.replace(varlen, causal=False), window=window)


def test_values_may_have_smaller_heads_than_keys() -> None:
    q, k, v = random_heads(9, 4, 2, 16)
    narrow = v[..., :6].detach().requires_grad_()
    varlen = Varlen.of_lengths([4, 5])
    expected = KERNELS["reference"].attend(q, k, narrow, varlen)
    torch.testing.assert_close(KERNELS["sdpa"].attend(q, k, narrow, varlen), expected, rtol=0, atol=1e-5)


def test_empty_input_gives_empty_output() -> None:
    heads = random_heads(0, 4, 2, 8)
    for kernel in HERE.values():
        assert kernel.attend(*heads, Varlen.of_lengths([0])).shape == (0, 4, 8)


def test_the_sliding_window_builds_no_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    import packtool.attention.sdpa as module

    sizes = []
    real = module._blocks

    def spy(*args):  # type: ignore[no-untyped-def]
        for queries, keys, mask in real(*args):
            sizes.append((queries.stop - queries.start) * (keys.stop - keys.start))
            yield queries, keys, mask

    monkeypatch.setattr(module, "_blocks", spy)
    heads = random_heads(1000, 1, 1, 4)
    HERE["sdpa"].attend(*heads, Varlen.of_lengths([1000]), window=50)
    assert len(sizes) == 20
    assert max(sizes) <= 50 * 99


def test_grouped_heads_are_not_copied() -> None:
    """K and V of 16 MB for 16 groups: a copy would allocate 16 times that."""
    q, k, v = (torch.zeros(4096, heads, 64) for heads in (16, 1, 1))
    allocated = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            known = {tensor.untyped_storage().data_ptr() for tensor in (q, k, v)}
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                    allocated.append(tensor.untyped_storage().nbytes())
            return result

    varlen = Varlen.of_lengths([1024] * 4)
    with Spy():
        KERNELS["sdpa"].attend(q, k, v, varlen)
    assert allocated
    # The whole output is the largest thing that is made, and no K or V of all heads for a document is among the others.
    assert max(allocated) <= q.nbytes


Tree = tuple[list[int], list[int]]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Parents and lengths of up to nine nodes, each going on from an earlier one or from nothing."""
    lengths = draw(st.lists(st.integers(1, 21), min_size=1, max_size=9))
    return [draw(st.integers(-1, node - 1)) for node in range(len(lengths))], lengths


def _paths(parents: list[int]) -> list[list[int]]:
    """Of each node the nodes from the root down to it."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


@settings(max_examples=40)
@given(tree=trees(), window=st.one_of(st.none(), st.integers(1, 30)), seed=st.integers(0, 2**16))
def test_tree_equals_its_rows_computed_alone(tree: Tree, window: int | None, seed: int) -> None:
    """Every token once against every row whole: outputs and gradients in float64."""
    parents, lengths = tree
    heads = random_heads(sum(lengths), 4, 2, 8, seed=seed, dtype=torch.float64)
    varlen, index = tree_varlen(parents, lengths)
    parts = list(varlen.documents(sum(lengths)))
    row_outputs = []
    for path in _paths(parents):
        row = torch.cat([torch.arange(parts[node].start, parts[node].stop) for node in path])
        row_output = KERNELS["reference"].attend(
            *(tensor[row] for tensor in heads), Varlen.of_lengths([len(row)]), window=window
        )
        row_outputs.append(row_output[-lengths[path[-1]] :])
    expected = torch.cat(row_outputs)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), heads)
    for kernel in (KERNELS["reference"], HERE["sdpa"]):
        out = kernel.attend(heads[0], heads[1][index], heads[2][index], varlen, window=window)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        gradients = torch.autograd.grad((out * weight).sum(), heads)
        for gradient, other in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-11)


@pytest.mark.smoke
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", sorted(HERE.keys() - {"reference"}))
def test_a_tree_equals_the_reference(name: str, tree: Tree) -> None:
    for num_heads, num_kv_heads in HEADS:
        for window in WINDOWS:
            check_tree(
                HERE[name], random_heads(sum(tree[1]), num_heads, num_kv_heads, 8), tree_varlen(*tree), window=window
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_tree_in_other_precisions(dtype: torch.dtype) -> None:
    parents, lengths = TREES["several levels"]
    heads = random_heads(sum(lengths), 4, 2, 16, dtype=dtype)
    check_tree(HERE["sdpa"], heads, tree_varlen(parents, lengths), window=7)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("num_kv_heads", "window"), [(4, 1000), (2, 5), (1, None)])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_flex_forward_of_a_tree_equals_the_reference(tree: Tree, num_kv_heads: int, window: int | None) -> None:
    heads = [tensor.detach() for tensor in random_heads(sum(tree[1]), 4, num_kv_heads, 16)]
    check_tree(KERNELS["flex"], heads, tree_varlen(*tree), window=window, scale=0.3)


def test_a_long_continuation_builds_no_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    import packtool.attention.sdpa as module

    sizes = []
    real = module._blocks

    def spy(*args):  # type: ignore[no-untyped-def]
        for queries, keys, mask in real(*args):
            if mask is not None:
                sizes.append(mask.numel())
            yield queries, keys, mask

    monkeypatch.setattr(module, "_blocks", spy)
    varlen, index = tree_varlen([-1, 0], [10, 1500])
    check_heads = random_heads(1510, 1, 1, 4)
    HERE["sdpa"].attend(check_heads[0], *(tensor[index] for tensor in check_heads[1:]), varlen)
    assert len(sizes) == 3
    assert max(sizes) <= 512 * 1510
