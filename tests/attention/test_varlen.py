"""Packed attention against its float64 definition, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.attention.reference import reference_attention
from packtool.attention.varlen import Varlen, attend


def make_varlen(lengths: list[int], with_host_lengths: bool = True) -> Varlen:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Varlen(cu_seqlens, max(lengths, default=0), tuple(lengths) if with_host_lengths else None)


def random_heads(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim))
    return [torch.randn(num_tokens, *shape, generator=generator, requires_grad=True) for shape in shapes]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 33), min_size=1, max_size=8),
    groups=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 7, 16]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    scale=st.one_of(st.none(), st.floats(0.05, 1.0)),
    seed=st.integers(0, 2**16),
)
def test_equals_the_reference(
    lengths: list[int],
    groups: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    scale: float | None,
    seed: int,
) -> None:
    varlen = make_varlen(lengths)
    heads = random_heads(sum(lengths), groups * num_kv_heads, num_kv_heads, head_dim, seed)
    expected, _ = reference_attention(*heads, varlen.cu_seqlens, scale=scale, window=window)
    out = attend(*heads, varlen, scale=scale, window=window)
    assert out.shape == heads[0].shape
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1))
    gradients = torch.autograd.grad((out * weight).sum(), heads)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), heads)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=2e-5)


def test_many_tiny_documents() -> None:
    lengths = [1, 2, 1, 3] * 100
    varlen = make_varlen(lengths)
    heads = random_heads(sum(lengths), 4, 2, 8, seed=0)
    expected, _ = reference_attention(*heads, varlen.cu_seqlens)
    torch.testing.assert_close(attend(*heads, varlen).double(), expected, rtol=1e-5, atol=1e-5)


def test_empty_documents_add_nothing() -> None:
    heads = random_heads(5, 2, 2, 4, seed=0)
    with_empty = attend(*heads, make_varlen([0, 3, 0, 2, 0]))
    torch.testing.assert_close(with_empty, attend(*heads, make_varlen([3, 2])), rtol=0, atol=0)
    assert attend(*[tensor[:0] for tensor in heads], make_varlen([0])).shape == (0, 2, 4)


def test_lengths_are_read_from_the_boundaries_when_not_given() -> None:
    heads = random_heads(9, 2, 1, 4, seed=0)
    torch.testing.assert_close(
        attend(*heads, make_varlen([4, 5], with_host_lengths=False)), attend(*heads, make_varlen([4, 5]))
    )


def test_a_document_does_not_see_another_at_all() -> None:
    heads = random_heads(12, 2, 2, 8, seed=0)
    before = attend(*heads, make_varlen([5, 7]))
    changed = [tensor.clone() for tensor in heads]
    for tensor in changed:
        tensor[5:] += 100.0
    after = attend(*changed, make_varlen([5, 7]))
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


def test_the_sliding_window_builds_no_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    import packtool.attention.varlen as varlen_module

    sizes = []
    real = varlen_module._sdpa

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: object) -> torch.Tensor:
        sizes.append(q.shape[2] * k.shape[2])
        return real(q, k, v, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(varlen_module, "_sdpa", spy)
    attend(*random_heads(1000, 1, 1, 4, seed=0), make_varlen([1000]), window=50)
    assert max(sizes) <= 50 * 99


def test_boundaries_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="add up"):
        attend(*random_heads(5, 2, 2, 4, seed=0), make_varlen([3]))
