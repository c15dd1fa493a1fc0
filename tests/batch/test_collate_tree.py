"""Micro-batches in which common prefixes are there once."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch.batch import PackedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_tree
from packtool.encode.encoded import EncodedSample
from tests.batch.reduced import (
    VISION_MODELS,
    mixed_samples,
    reduced_spec,
    samples_with_prefixes,
    save_image_processor,
)
from tests.batch.test_prefix_tree import sample

TEXT = reduced_spec("qwen3")


def tree_of(samples: list[EncodedSample], **options: int) -> TreeBatch:
    batch = collate_tree(samples, TEXT, min_shared=1, **options)
    assert isinstance(batch, TreeBatch)
    return batch


@pytest.mark.smoke
def test_tokens_positions_keys_and_weights_match_the_diagram() -> None:
    target, no = [False, True, True, True], [False] * 2
    batch = tree_of([sample([1, 2, 3, 4, 5, 6], [*target, True, True]), sample([1, 2, 3, 7, 8], [*target[:3], *no])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4]]
    assert batch.labels.tolist() == [[2, 3, 4, 5, 6, -100, -100, -100]]
    assert batch.loss_weights is not None
    assert batch.loss_weights.tolist() == [[2, 2, 1, 1, 1, 0, 0, 0]]
    assert batch.lengths == (3, 3, 2)
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert batch.key_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7]
    assert batch.key_lengths == (3, 6, 5)
    assert batch.cu_seqlens_k.tolist() == [0, 3, 9, 14]
    assert batch.target_positions.tolist() == [0, 1, 2, 3, 4]
    assert batch.target_counts.tolist() == [[2, 2, 1, 1, 1]]
    assert batch.num_target_tokens == 7
    assert batch.num_samples == 2
    inputs = batch.model_inputs()
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (3, 6)
    assert inputs["document_lengths"] == (3, 3, 2)


def test_target_counts_for_every_channel_of_its_samples() -> None:
    target = [False, True, True]
    rows = [([1, 2, 3, 4], "b"), ([1, 2, 3], "a"), ([1, 2, 5], None), ([1, 2, 3], "b")]
    batch = tree_of([sample(ids, [*target, True][: len(ids)], channel) for ids, channel in rows])
    assert batch.channels == ("b", "a", None)
    # The second token stands twice: it is to predict 3 in three samples, and 5 in the other.
    assert batch.labels[0, batch.target_positions].tolist() == [2, 3, 4, 5]
    assert batch.target_counts.tolist() == [[2, 2, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]]
    assert batch.num_target_tokens == 9


def test_loss_by_sample_averages_each_sample() -> None:
    target = [False, True, True]
    spec = dataclasses.replace(TEXT, loss_reduction="sample")
    batch = collate_tree(
        [sample([1, 2, 3], target), sample([1, 2, 4, 5], [False, True, False, True])], spec, min_shared=1
    )
    assert isinstance(batch, TreeBatch)
    assert batch.loss_weights is not None
    assert batch.labels.tolist() == [[2, 3, -100, 5, -100]]
    assert batch.loss_weights.tolist() == [[1.0, 0.5, 0.0, 0.5, 0.0]]


def test_batch_without_common_prefixes_is_unchanged() -> None:
    samples = mixed_samples("qwen3")
    shared, plain = collate_tree(samples, TEXT, min_shared=1), collate_packs(samples, TEXT)
    assert type(shared) is type(plain) is PackedBatch
    for field in dataclasses.fields(PackedBatch):
        one, other = getattr(shared, field.name), getattr(plain, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    short = [sample([1, 2, 3]), sample([1, 2, 4])]
    assert type(collate_tree(short, TEXT)) is PackedBatch
    assert type(collate_tree([], TEXT)) is PackedBatch


def test_moving_a_tree_batch_moves_all_tensors() -> None:
    batch = tree_of(samples_with_prefixes("qwen3"))
    moved = batch.to("meta")
    assert moved.key_index.is_meta
    assert moved.cu_seqlens_k.is_meta
    assert moved.target_counts.is_meta
    assert moved.key_lengths == batch.key_lengths
    assert moved.num_target_tokens == batch.num_target_tokens


@pytest.mark.parametrize("name", VISION_MODELS)
def test_image_in_a_prefix_is_encoded_once(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = str(tmp_path_factory.mktemp(name))
    save_image_processor(name, directory)
    spec, samples = reduced_spec(name, directory), samples_with_prefixes(name)
    flat, tree = collate_packs(samples, spec), collate_tree(samples, spec, min_shared=1)
    assert flat.image_grid_thw is not None
    assert tree.image_grid_thw is not None
    distinct = {image.data for one in samples for image in one.images}
    assert len(flat.image_grid_thw) == sum(len(one.images) for one in samples)
    assert len(tree.image_grid_thw) == len(distinct)
    assert tree.pixel_values is not None
    assert len(tree.pixel_values) == int(tree.image_grid_thw.prod(1).sum())
    assert len(tree.towers["vision"].positions["image"]) == int(tree.input_ids.eq(spec.pad_ids["image"]).sum())


def test_unused_tower_gets_a_filler(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = str(tmp_path_factory.mktemp("qwen3_vl"))
    save_image_processor("qwen3_vl", directory)
    spec = reduced_spec("qwen3_vl", directory)
    batch = collate_tree([sample([1, 2, 3]), sample([1, 2, 4])], spec, min_shared=1)
    assert isinstance(batch, TreeBatch)
    assert batch.lengths == (2, 1, 1, 3)
    assert batch.key_lengths == (2, 3, 3, 3)
    assert batch.channels == (None,)
    assert batch.position_ids[0, 0].tolist() == [0, 1, 2, 2, 0, 1, 2]
    assert batch.labels.eq(-100).all()


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8),
        min_size=2,
        max_size=8,
    )
)
def test_label_weights_sum_over_samples(rows: list[list[tuple[int, float]]]) -> None:
    """By the tokens before a label, and the label: the sum of its weights over the samples."""
    samples = []
    for row in rows:
        labeled = sample([token for token, _ in row], [scale > 0 for _, scale in row])
        samples.append(dataclasses.replace(labeled, loss_scale=np.array([scale for _, scale in row], np.float32)))
    expected_weights: Counter[tuple[int, ...]] = Counter()
    for one in samples:
        for place in range(1, one.length):
            if one.labels[place] != -100:
                expected_weights[tuple(one.input_ids[: place + 1].tolist())] += float(one.loss_scale[place])  # type: ignore[index]
    batch = collate_tree(samples, TEXT, min_shared=1)
    assert batch.num_target_tokens == sum(int((one.labels[1:] != -100).sum()) for one in samples)
    weights: Counter[tuple[int, ...]] = Counter()
    keys = batch.key_index if isinstance(batch, TreeBatch) else torch.arange(batch.input_ids.shape[1])
    bounds = batch.cu_seqlens_k if isinstance(batch, TreeBatch) else batch.cu_seqlens
    assert batch.loss_weights is not None
    for document, length in enumerate(batch.lengths):
        path = keys[bounds[document] : bounds[document + 1]]
        for place in range(len(path) - length, len(path)):
            at = int(path[place])
            if (label := int(batch.labels[0, at])) != -100:
                tokens = batch.input_ids[0, path[: place + 1]].tolist()
                weights[(*tokens, label)] += float(batch.loss_weights[0, at])
    assert weights == pytest.approx(expected_weights)


def test_padding_after_a_tree_belongs_to_no_sample() -> None:
    batch = collate_tree([sample([1, 2, 3]), sample([1, 2, 4])], TEXT, min_shared=1, pad_to_multiple_of=8)
    assert isinstance(batch, TreeBatch)
    assert batch.lengths == (2, 1, 1, 4)
    assert batch.key_lengths == (2, 3, 3, 4)
    assert batch.num_padding == 4
    assert batch.channels == (None,)
    assert collate_tree([sample([1, 2, 3])], TEXT, pad_to_multiple_of=8).lengths == (3, 5)
