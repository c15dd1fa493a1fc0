"""Samples are shared out under a hard cap, and find back to their order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.errors import ConfigError
from packtool.planning.dynamic import DEFAULT_MAX_TOKENS, plan_evaluation
from packtool.planning.prefix_trees import Prefixes, plan_trees


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    num_ranks=st.integers(1, 4),
    alignment=st.sampled_from([1, 4]),
    max_samples=st.sampled_from([None, 1, 3]),
)
def test_every_sample_is_evaluated_once_and_restored_in_order(
    lengths: list[int], num_ranks: int, alignment: int, max_samples: int | None
) -> None:
    array = np.array(lengths, np.int64)
    plan = plan_evaluation(array, num_ranks=num_ranks, max_tokens=52, max_samples=max_samples, alignment=alignment)
    shares = [plan.micro_batches(rank) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1
    for samples in (batch for share in shares for batch in share):
        assert sum(-(-lengths[sample] // alignment) * alignment for sample in samples) <= 52
        assert max_samples is None or len(samples) <= max_samples
    # Each rank returns its samples' lengths in its own order; put together, they are in the samples' order again.
    results = np.zeros(len(lengths), np.int64)
    for rank, share in enumerate(shares):
        result = np.concatenate([np.zeros(0, np.int64), *share])
        results[plan.order_positions(rank)] = array[result]
    assert results[plan.batches.inverse].tolist() == lengths


@settings(max_examples=60)
@given(
    sizes=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), max_size=12),
    num_ranks=st.integers(1, 3),
)
def test_a_tree_is_in_one_micro_batch(sizes: list[list[int]], num_ranks: int) -> None:
    """Each tree has a prefix of 20 tokens, and the cap holds for what is computed of it."""
    lengths = np.array([20 + num_own for tree in sizes for num_own in tree], np.int64)
    offsets = np.cumsum([0, *(1 for tree in sizes for _ in tree)]).astype(np.int64)
    hashes = np.repeat(np.arange(len(sizes)), [len(tree) for tree in sizes]).astype(np.uint64)
    prefixes = Prefixes(offsets, np.full(len(lengths), 20, np.int32), hashes)
    trees = plan_trees(lengths, prefixes, capacity=64, min_shared=8)
    without_trees = plan_evaluation(lengths, num_ranks=num_ranks, max_tokens=64)
    plan = dataclasses.replace(without_trees, trees=trees)
    shared = np.zeros(len(lengths), np.int64)
    shared[trees.samples] = trees.shared_tokens
    result = [batch for rank in range(num_ranks) for batch in plan.micro_batches(rank)]
    assert len({len(plan.micro_batches(rank)) for rank in range(num_ranks)}) == 1
    assert sorted(sample for batch in result for sample in batch) == list(range(len(lengths)))
    for batch in result:
        assert (lengths[batch] - shared[batch]).sum() <= 64
    of_batch = {int(sample): batch_index for batch_index, batch in enumerate(result) for sample in batch}
    for group in np.split(trees.samples, trees.offsets[1:-1]):
        assert len({of_batch[int(sample)] for sample in group}) <= 1
    assert plan.num_tokens == sum(int((lengths[batch] - shared[batch]).sum()) for batch in result)
    places = np.concatenate([plan.order_positions(rank) for rank in range(num_ranks)])
    results = np.zeros(len(lengths), np.int64)
    results[places] = np.concatenate([np.zeros(0, np.int64), *(lengths[batch] for batch in result)])
    assert results[plan.batches.inverse].tolist() == lengths.tolist()
    assert plan.one_sample_each().fingerprint == without_trees.one_sample_each().fingerprint


def test_windows_follow_one_another_and_fill_well() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 10_000)
    plan = plan_evaluation(lengths, num_ranks=2, max_tokens=4096)
    assert lengths.sum() / (len(plan.batches.micro_batch_sizes) * 4096) > 0.95
    assert 5 < len(plan.batches.micro_batches_per_step) < 12
    num_samples = int(plan.batches.micro_batch_sizes[: plan.batches.micro_batches_per_step[0]].sum())
    assert sorted(plan.batches.order[:num_samples].tolist()) == list(range(num_samples))


def test_token_limit_is_hard_and_has_a_default() -> None:
    lengths = np.array([3, 9000, 5])
    with pytest.raises(ConfigError):
        plan_evaluation(lengths, num_ranks=1, max_tokens=8999)
    assert plan_evaluation(lengths, num_ranks=1).max_tokens == 9000
    assert plan_evaluation(lengths, num_ranks=1, alignment=16).max_tokens == 9008
    assert plan_evaluation(lengths[:1], num_ranks=1).max_tokens == DEFAULT_MAX_TOKENS
    # A sample that fits by itself may not fit any more with its pads.
    with pytest.raises(ConfigError):
        plan_evaluation(lengths, num_ranks=1, max_tokens=9000, alignment=16)


def test_batches_of_one_sample_have_fingerprints() -> None:
    lengths = np.array([3, 7, 5, 5])
    plan = plan_evaluation(lengths, num_ranks=2, max_tokens=10)
    single_batches = plan.one_sample_each()
    assert sorted(len(batch) for rank in (0, 1) for batch in single_batches.micro_batches(rank)) == [1, 1, 1, 1]
    assert len({plan.fingerprint, single_batches.fingerprint, plan_evaluation(lengths, num_ranks=2).fingerprint}) == 3
    assert plan.fingerprint == plan_evaluation(lengths, num_ranks=2, max_tokens=10).fingerprint
