"""Rows of a micro-batch: labels, positions, boundaries, pictures, fillers."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch.batch import PackedBatch, PaddedBatch
from packtool.batch.collate import collate_packs, collate_padded
from packtool.batch.positions import sample_positions
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.errors import ConfigError, DataError
from tests.batch.reduced import (
    IMAGE_PAD,
    VISION_MODELS,
    make_picture,
    make_sample,
    mixed_samples,
    reduced_config,
    reduced_spec,
    save_image_processor,
)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> InputSpec:
    directory = str(tmp_path_factory.mktemp("model"))
    save_image_processor("qwen3_vl", directory)
    return reduced_spec("qwen3_vl", directory)


@pytest.fixture
def text() -> InputSpec:
    return reduced_spec("qwen2")


@pytest.mark.smoke
@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_targets_stay_within_samples_and_none_is_lost(lengths: list[int]) -> None:
    samples = [make_sample(length, seed=index) for index, length in enumerate(lengths)]
    packed = collate_packs(samples, reduced_spec("qwen2"))
    padded = collate_padded(samples, reduced_spec("qwen2"))
    starts = [0, *np.cumsum(lengths)]
    assert packed.cu_seqlens.tolist() == starts
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.lengths == tuple(lengths)
    assert padded.input_ids.shape == (len(lengths), max(lengths))
    for row, (sample, start) in enumerate(zip(samples, starts[:-1], strict=True)):
        here = slice(start, start + sample.length)
        expected = [*sample.labels[1:], -100]
        assert packed.input_ids[0, here].tolist() == sample.input_ids.tolist()
        assert packed.labels[0, here].tolist() == expected
        assert packed.position_ids[0, here].tolist() == list(range(sample.length))
        assert padded.labels[row].tolist() == expected + [-100] * (max(lengths) - sample.length)
        assert padded.attention_mask[row].sum() == sample.length
    num_targets = sum(int((sample.labels[1:] != -100).sum()) for sample in samples)
    assert packed.num_target_tokens == padded.num_target_tokens == num_targets
    assert packed.num_samples == padded.num_samples == len(lengths)


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 20), max_size=9), pad_to_multiple_of=st.integers(1, 40))
def test_padding_is_a_separate_last_document(lengths: list[int], pad_to_multiple_of: int) -> None:
    samples = [make_sample(length, seed=index) for index, length in enumerate(lengths)]
    bare = collate_packs(samples, reduced_spec("qwen2"))
    padded = collate_packs(samples, reduced_spec("qwen2"), pad_to_multiple_of=pad_to_multiple_of)
    size, num = bare.input_ids.shape[1], padded.num_padding
    assert num < pad_to_multiple_of
    assert padded.input_ids.shape[1] == padded.cu_seqlens[-1] == size + num
    assert (size + num) % pad_to_multiple_of == 0
    assert padded.lengths == (*bare.lengths, *([num] if num else []))
    assert padded.channels == (*bare.channels, *([None] if num else []))
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(padded, name)[:, :size], getattr(bare, name))
    assert (padded.labels[0, size:] == -100).all()
    assert torch.equal(padded.target_positions, bare.target_positions)
    assert padded.num_samples == len(samples)
    assert bare.num_padding == 0


def test_positions_have_four_rows_and_restart_at_every_sample(vision: InputSpec) -> None:
    samples = mixed_samples("qwen3_vl")
    batch = collate_packs(samples, vision)
    assert batch.position_ids.shape == (4, 1, sum(batch.lengths))
    starts = batch.cu_seqlens.tolist()
    for index, sample in enumerate(samples):
        rows = batch.position_ids[:, 0, starts[index] : starts[index + 1]]
        assert rows[0].tolist() == list(range(sample.length))
        assert rows[:, 0].tolist() == [0] * 4
        if not sample.images:
            assert (rows == rows[0]).all()


def test_image_positions_match_the_docstring() -> None:
    spec = reduced_spec("qwen3_vl")
    sample = make_sample(2, ((32, 32),), seed=0, limits=spec.limits.image)
    ids = sample.input_ids[[0, 0, 1, 2, 3, 4, 5, 6, 7]]
    rows = sample_positions(dataclasses.replace(sample, input_ids=ids), spec)
    assert rows.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 3, 4, 4, 5, 6],
        [0, 1, 2, 3, 4, 3, 4, 5, 6],
    ]


@pytest.mark.smoke
def test_pixels_equal_those_of_the_processor_at_the_limits_of_the_cache(vision: InputSpec) -> None:
    samples = mixed_samples("qwen3_vl")
    batch = collate_packs(samples, vision)
    assert batch.image_grid_thw is not None
    assert batch.pixel_values is not None
    assert batch.image_grid_thw.tolist() == [list(image.grid) for sample in samples for image in sample.images]
    assert batch.pixel_values.shape == (int(batch.image_grid_thw.prod(dim=1).sum()), vision.patch_dim)
    assert (batch.input_ids == IMAGE_PAD).sum() * 4 == len(batch.pixel_values)


def test_images_of_caches_with_different_limits_are_batched(vision: InputSpec) -> None:
    """Caches of unlike limits are trained together: each picture has the size that its cache counted tokens for."""
    cache_limits = vision.limits.image
    assert cache_limits is not None
    there = dataclasses.replace(cache_limits, min_pixels=1, max_pixels=cache_limits.pixels_per_token * 2)
    samples = [
        make_sample(3, ((90, 70), (30, 30)), seed=seed, limits=each) for seed, each in enumerate((cache_limits, there))
    ]
    assert samples[0].images[0].grid != samples[1].images[0].grid
    both = collate_packs(samples, vision)
    limits = dataclasses.replace(vision.limits, image=there)
    own_batch = collate_packs(samples[1:], dataclasses.replace(vision, limits=limits))
    assert both.pixel_values is not None
    assert own_batch.pixel_values is not None
    assert torch.equal(both.pixel_values[-len(own_batch.pixel_values) :], own_batch.pixel_values)


@pytest.mark.parametrize("collate", [collate_packs, collate_padded])
def test_batch_without_images_gets_a_filler_without_labels(collate: object, vision: InputSpec) -> None:
    batch = collate([make_sample(5, seed=0)], vision)  # type: ignore[operator]
    assert batch.image_grid_thw.tolist() == [[1, 2, 2]]
    assert batch.pixel_values.shape == (4, vision.patch_dim)
    assert (batch.input_ids == IMAGE_PAD).sum() == 1
    assert batch.num_samples == 1
    assert batch.num_target_tokens == int((make_sample(5, seed=0).labels[1:] != -100).sum())


@pytest.mark.parametrize("collate", [collate_packs, collate_padded])
def test_an_empty_batch_is_a_filler(collate: object, vision: InputSpec, text: InputSpec) -> None:
    for spec, num_tokens in ((vision, 3), (text, 1)):
        batch = collate([], spec)  # type: ignore[operator]
        assert batch.input_ids.shape == (1, num_tokens)
        assert (batch.labels == -100).all()
        assert batch.num_samples == batch.num_target_tokens == 0


def test_changed_image_is_named(vision: InputSpec, tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(make_picture(200, 16, seed=0))
    sample = make_sample(4, ((40, 32),), seed=3, limits=vision.limits.image)
    moved = dataclasses.replace(sample.images[0], path=str(file), data=None)
    with pytest.raises(DataError, match=r"photo\.png \(row 3 of reduced\.jsonl\) has changed .* 40x32 .* 200x16"):
        collate_packs([dataclasses.replace(sample, images=(moved,))], vision)


def test_changed_image_with_the_same_grid_is_named(vision: InputSpec, tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(make_picture(39, 32, seed=0))
    sample = make_sample(4, ((40, 32),), seed=3, limits=vision.limits.image)
    moved = dataclasses.replace(sample.images[0], path=str(file), data=None)
    assert make_sample(4, ((39, 32),), seed=3, limits=vision.limits.image).images[0].grid == moved.grid
    with pytest.raises(DataError, match=r"photo\.png \(row 3 of reduced\.jsonl\) has changed .* 40x32 .* 39x32"):
        collate_packs([dataclasses.replace(sample, images=(moved,))], vision)


def test_missing_image_is_named(vision: InputSpec, tmp_path: Path) -> None:
    sample = make_sample(4, ((40, 32),), seed=3, limits=vision.limits.image)
    missing_image = dataclasses.replace(sample.images[0], path=str(tmp_path / "gone.png"), data=None)
    with pytest.raises(DataError, match=r"gone\.png"):
        collate_packs([dataclasses.replace(sample, images=(missing_image,))], vision)


@pytest.mark.parametrize("collate", [collate_packs, collate_padded])
def test_placeholders_that_do_not_match_their_images_are_refused(collate: object, vision: InputSpec) -> None:
    """Totals would fit: transformers would give each sample a piece of the other's picture."""
    first_sample = make_sample(4, ((32, 32),), seed=0, limits=vision.limits.image)
    second_sample = make_sample(4, ((16, 16),), seed=1, limits=vision.limits.image)
    swapped = [
        dataclasses.replace(first_sample, images=second_sample.images),
        dataclasses.replace(second_sample, images=first_sample.images),
    ]
    with pytest.raises(DataError, match=r"row 0 of reduced\.jsonl"):
        collate(swapped, vision)  # type: ignore[operator]


def test_model_inputs_name_the_boundaries_for_transformers(text: InputSpec) -> None:
    packed = collate_packs([make_sample(3, seed=0), make_sample(5, seed=1)], text)
    inputs = packed.model_inputs()
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 8]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 5
    assert inputs["use_cache"] is False
    assert "attention_mask" not in inputs
    assert "attention_mask" in collate_padded([make_sample(3, seed=0)], text).model_inputs()


@pytest.mark.parametrize("kind", [PackedBatch, PaddedBatch])
def test_moving_a_batch_keeps_all_fields(kind: type, vision: InputSpec) -> None:
    collate = collate_packs if kind is PackedBatch else collate_padded
    batch = collate(mixed_samples("qwen3_vl"), vision)
    moved = batch.to("meta")
    assert isinstance(moved, kind)
    for field in dataclasses.fields(kind):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if field.name == "media":
            assert before.keys() == after.keys() == {"pixel_values", "image_grid_thw"}
            assert all(tensor.device.type == "meta" for tensor in after.values())
        elif field.name == "towers":
            assert before.keys() == after.keys() == {"vision"}
            tensors = [value for value in after["vision"].arguments.values() if isinstance(value, torch.Tensor)]
            assert all(value.device.type == "meta" for value in (*tensors, *after["vision"].positions.values()))
        elif isinstance(before, torch.Tensor):
            assert after.device.type == "meta"
            assert after.shape == before.shape
        else:
            assert after == before


def test_unknown_multimodal_families_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "paligemma", "vision_config": {}, "text_config": {}}')
    with pytest.raises(ConfigError, match="paligemma"):
        InputSpec.load(str(tmp_path), MediaLimits())
    for name in VISION_MODELS:
        reduced_config(name).save_pretrained(tmp_path)
        assert InputSpec.load(str(tmp_path), MediaLimits()).has_vision


def test_million_tokens_fit_into_one_pack(text: InputSpec) -> None:
    ids = np.arange(1_000_000, dtype=np.int32)
    ids.setflags(write=False)
    bounds = np.linspace(0, len(ids), 251).astype(int)
    samples = [
        EncodedSample(ids[a:b], ids[a:b], np.zeros(0, np.int32), (), None, "big.jsonl", 0) for a, b in pairwise(bounds)
    ]
    assert collate_packs(samples, text).input_ids.shape == (1, 1_000_000)
