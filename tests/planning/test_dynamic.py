from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.errors import ConfigError
from packtool.planning.dynamic import assign_by_tokens


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=0, max_size=60),
    samples_per_step=st.integers(1, 20),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(50, 120),
    max_samples=st.none() | st.integers(1, 5),
)
def test_every_sample_once_within_both_limits(
    lengths: list[int], samples_per_step: int, num_ranks: int, max_tokens: int, max_samples: int | None
) -> None:
    array = np.array(lengths, np.int32)
    result = assign_by_tokens(
        array, samples_per_step=samples_per_step, num_ranks=num_ranks, max_tokens=max_tokens, max_samples=max_samples
    )
    assert sorted(result.order.tolist()) == list(range(len(lengths)))
    np.testing.assert_array_equal(result.order[result.inverse], np.arange(len(lengths)))
    assert result.micro_batch_sizes.sum() == len(lengths)
    assert len(result.micro_batch_sizes) == result.micro_batches_per_step.sum()
    assert (result.micro_batches_per_step % num_ranks == 0).all()
    starts = np.concatenate(([0], np.cumsum(result.micro_batch_sizes)))
    for start, stop in pairwise(starts):
        cell = result.order[start:stop]
        assert array[cell].sum() <= max_tokens
        assert max_samples is None or len(cell) <= max_samples
    # The samples of a step stay in it.
    ends = np.concatenate(([0], np.cumsum(result.micro_batches_per_step)))
    for step, (first_start, last) in enumerate(pairwise(ends)):
        inside = result.order[starts[first_start] : starts[last]]
        assert set(inside.tolist()) == set(
            range(step * samples_per_step, min((step + 1) * samples_per_step, len(lengths)))
        )


def test_the_example_in_the_docstring() -> None:
    lengths = np.array([7, 1, 1, 5, 2, 3, 4, 4])
    result = assign_by_tokens(lengths, samples_per_step=8, num_ranks=2, max_tokens=8)
    assert result.micro_batches_per_step.tolist() == [4]
    starts = np.concatenate(([0], np.cumsum(result.micro_batch_sizes)))
    cells = [lengths[result.order[a:b]].tolist() for a, b in pairwise(starts)]
    assert cells == [[7], [3, 4], [1, 1, 5], [2, 4]]


def test_fewer_micro_batches_than_by_count() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 4096).clip(16, 8192).astype(np.int32)
    result = assign_by_tokens(lengths, samples_per_step=128, num_ranks=8, max_tokens=8192)
    fewest = [-(-int(step.sum()) // 8192) for step in lengths.reshape(-1, 128)]
    assert result.micro_batches_per_step.sum() <= sum(-(-bins // 8) * 8 for bins in fewest) * 1.1


def test_a_sample_longer_than_a_micro_batch_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--dynamic-batch-tokens 10: 1 samples .* the longest has 11"):
        assign_by_tokens(np.array([3, 11]), samples_per_step=2, num_ranks=1, max_tokens=10)
