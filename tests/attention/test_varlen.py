"""Where documents lie."""

from __future__ import annotations

import pytest
import torch

from packtool.attention.kernel import Varlen


@pytest.mark.smoke
def test_documents_are_contiguous() -> None:
    varlen = Varlen.of_lengths([3, 0, 2])
    assert varlen.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert varlen.cu_seqlens.dtype == torch.int32
    assert varlen.max_seqlen == 3
    assert list(varlen.documents(5)) == [slice(0, 3), slice(3, 5)]
    assert list(Varlen.of_lengths([]).documents(0)) == []


def test_lengths_are_read_from_the_boundaries_when_not_given() -> None:
    assert Varlen(torch.tensor([0, 4, 9], dtype=torch.int32), 5).host_lengths() == (4, 5)


def test_boundaries_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="add up"):
        list(Varlen.of_lengths([3]).documents(5))
