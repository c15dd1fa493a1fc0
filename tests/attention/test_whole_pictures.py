"""Pictures whose tokens see each other in both directions, against the masks of transformers."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

from packtool.attention.register import packed_attention
from packtool.batch.batch import WholePictures
from tests.attention.against_reference import random_heads


@dataclasses.dataclass
class Layer(torch.nn.Module):
    """What ``packed_attention`` reads of a layer."""

    is_causal: bool = True

    def __post_init__(self) -> None:
        super().__init__()


def mask_of(blocks: list[int], window: int | None) -> Tensor:
    """The mask of one document by transformers' functions, bool (L, L); ``blocks``: number of each token's picture."""
    visible = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([blocks])))
    if window is not None:
        visible = and_masks(sliding_window_overlay(window), visible)
    index = torch.arange(len(blocks))
    return visible(torch.tensor(0), None, index[:, None], index[None, :])


def expected(heads: list[Tensor], mask: Tensor) -> Tensor:
    """Attention of one document (L, H, D) with a mask, in float64."""
    q, k, v = (tensor.double().transpose(0, 1) for tensor in heads)
    k, v = (tensor.repeat_interleave(len(q) // len(k), dim=0) for tensor in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    window=st.one_of(st.none(), st.integers(1, 20)),
    only_windows=st.booleans(),
    impl=st.sampled_from(["sdpa", "reference", "auto"]),
)
def test_equals_the_masks_of_transformers(
    documents: list[list[tuple[bool, int]]], window: int | None, only_windows: bool, impl: str
) -> None:
    """Output and gradients; pictures of one document are apart, those of neighbours may touch."""
    blocks = [
        [number if is_picture else -1 for number, (is_picture, size) in enumerate(runs) for _ in range(size + 1)]
        for runs in documents
    ]
    lengths = tuple(map(len, blocks))
    starts = [0, *accumulate(lengths)]
    spans = []
    for start, runs in zip(starts, documents, strict=False):
        for is_picture, size in runs:
            spans += [(start, start + size + 1)] if is_picture else []
            start += size + 1
    heads = random_heads(sum(lengths), 4, 2, 8)
    kwargs = {
        "cu_seq_lens_q": torch.tensor(starts, dtype=torch.int32),
        "max_length_q": max(lengths),
        "document_lengths": lengths,
        "whole_pictures": WholePictures(spans, lengths, lengths, only_windows=only_windows) if spans else None,
    }
    inputs = [tensor.transpose(0, 1).unsqueeze(0) for tensor in heads]
    out, _ = packed_attention(Layer(), *inputs, None, sliding_window=window, impl=impl, **kwargs)
    causal_only = only_windows and window is None
    outs = []
    for start, stop, document in zip(starts, starts[1:], blocks, strict=False):
        mask = mask_of([-1] * len(document) if causal_only else document, window)
        outs.append(expected([tensor[start:stop] for tensor in heads], mask))
    torch.testing.assert_close(out[0].double(), torch.cat(outs), rtol=0, atol=2e-5)
    weight = torch.randn(out[0].shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out[0] * weight).sum(), heads)
    for actual, other in zip(gradients, torch.autograd.grad((torch.cat(outs) * weight).sum(), heads), strict=True):
        torch.testing.assert_close(actual, other, rtol=0, atol=2e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("window", [None, 3, 12])
def test_a_document_sees_the_picture_in_its_prefix(window: int | None) -> None:
    """A prefix with a picture, continued by a document with another one."""
    prefix, document = [-1, 0, 0, 0, 0], [-1, -1, 1, 1, 1, -1]
    lengths, key_lengths = (5, 6), (5, 11)
    heads = random_heads(11, 4, 2, 8)
    kwargs = {
        "cu_seq_lens_q": torch.tensor([0, 5, 11], dtype=torch.int32),
        "max_length_q": 6,
        "cu_seq_lens_k": torch.tensor([0, 5, 16], dtype=torch.int32),
        "max_length_k": 11,
        "key_index": torch.tensor([*range(5), *range(11)]),
        "whole_pictures": WholePictures([(1, 5), (7, 10)], lengths, key_lengths, only_windows=False),
    }
    inputs = [tensor.transpose(0, 1).unsqueeze(0) for tensor in heads]
    out, _ = packed_attention(Layer(), *inputs, None, sliding_window=window, **kwargs)
    # One row with both: the prefix sees nothing of what continues it.
    row = expected(heads, mask_of([*prefix, *document], window))
    torch.testing.assert_close(out[0].double(), row, rtol=0, atol=2e-5)
