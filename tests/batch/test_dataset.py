"""Micro-batches come in the plan's order, from any number of workers, and errors come whole."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch.batch import Batch, PackedBatch, PaddedBatch, TreeBatch
from packtool.batch.collate import collate_packs
from packtool.batch.dataset import MicroBatches, load_micro_batches
from packtool.batch.micro_batch import MicroBatch, PlannedEpoch
from packtool.encode.encoded import EncodedSample
from packtool.errors import DataError, MediaError
from packtool.planning.epoch import EpochPlan, plan_epoch
from packtool.planning.options import PlanOptions
from tests.batch.reduced import make_sample, reduced_spec, samples_with_prefixes, save_image_processor


@dataclasses.dataclass
class Samples:
    """A reader of a list; sample i holds the number i in its first token's place."""

    samples: list[EncodedSample]

    @classmethod
    def of_lengths(cls, lengths: list[int]) -> Samples:
        return cls([make_sample(length, seed=index) for index, length in enumerate(lengths)])

    def sample(self, position: int) -> EncodedSample:
        return self.samples[position]

    def plan(self, **options: Any) -> EpochPlan:
        lengths = np.array([sample.length for sample in self.samples], np.int32)
        targets = np.array([(sample.labels[1:] != -100).sum() for sample in self.samples], np.int32)
        return plan_epoch(
            lengths, targets, PlanOptions(max_length=64, packing_length=64, balance="none", **options), seed=0
        )


def planned(plan: EpochPlan, rank: int = 0) -> list[MicroBatch]:
    """The micro-batches of one rank, one step after the other."""
    return [micro_batch for step in PlannedEpoch(plan).steps(rank) for micro_batch in step]


def documents(batch: Batch) -> list[list[int]]:
    """Token ids of each sample of a micro-batch."""
    if isinstance(batch, PackedBatch):
        return [part.tolist() for part in batch.input_ids[0].split(batch.lengths)][: batch.num_samples]
    assert isinstance(batch, PaddedBatch)
    return [row[mask.bool()].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)][
        : batch.num_samples
    ]


@pytest.mark.smoke
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    world_size=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    per_batch=st.integers(1, 3),
    packing=st.booleans(),
)
def test_every_sample_is_in_its_planned_micro_batch_once(
    lengths: list[int], world_size: int, accumulation: int, per_batch: int, packing: bool
) -> None:
    reader, spec = Samples.of_lengths(lengths), reduced_spec("qwen3")
    plan = reader.plan(
        packing=packing,
        world_size=world_size,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=per_batch,
    )
    loaded_ids: list[list[int]] = []
    targets = np.zeros(plan.steps.num_steps, np.int64)
    for rank in range(world_size):
        dataset, micro_batches = MicroBatches(reader.sample, spec, packing=packing), planned(plan, rank)
        places = [(s, m) for s in range(plan.steps.num_steps) for m in range(plan.steps.num_micro_batches(s))]
        assert len(micro_batches) == len(places)
        for index, (step, micro_batch) in enumerate(places):
            batch = dataset[micro_batches[index]]
            assert isinstance(batch, PackedBatch if packing else PaddedBatch)
            positions = [int(p) for pack in plan.samples(step, rank, micro_batch) for p in pack]
            assert documents(batch) == [reader.samples[position].input_ids.tolist() for position in positions]
            loaded_ids += documents(batch)
            targets[step] += batch.num_target_tokens
    assert sorted(loaded_ids) == sorted(sample.input_ids.tolist() for sample in reader.samples)
    assert targets.tolist() == [plan.steps.target_tokens(step) for step in range(plan.steps.num_steps)]


def test_later_steps_do_not_depend_on_earlier_ones() -> None:
    reader = Samples.of_lengths([60, 40, 30, 20, 50, 61])
    plan = reader.plan(world_size=2, gradient_accumulation_steps=2)
    sees = np.array([True, False, False, False, False, True])
    all_steps = list(PlannedEpoch(plan, {"vision": sees}).steps(1))
    assert {batch.towers for step in all_steps for batch in step} == {frozenset(), frozenset({"vision"})}
    for first_step in range(plan.steps.num_steps + 1):
        remaining = list(PlannedEpoch(plan, {"vision": sees}).steps(1, first_step))
        assert [[vars(batch) for batch in step] for step in remaining] == [
            [vars(batch) for batch in step] for step in all_steps[first_step:]
        ]


def contents(batch: Any) -> dict[str, Any]:
    """All of a batch, its media each by itself."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    for tower, inputs in fields.pop("towers").items():
        fields |= {f"{tower} {name}": value for name, value in (*inputs.arguments.items(), *inputs.positions.items())}
    return {**fields.pop("media"), **fields}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("start", [0, 2])
def test_workers_change_nothing(num_workers: int, start: int, tmp_path: Path) -> None:
    save_image_processor("qwen3_vl", str(tmp_path))
    spec = reduced_spec("qwen3_vl", str(tmp_path))
    reader = Samples([make_sample(30, ((40, 32),) * (n % 3), seed=n, limits=spec.limits.image) for n in range(8)])
    dataset, micro_batches = MicroBatches(reader.sample, spec), planned(reader.plan())[start:]
    expected = [dataset[micro_batch] for micro_batch in micro_batches]
    batches = list(load_micro_batches(dataset, micro_batches, num_workers=num_workers))
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        for name, micro_batches in contents(other).items():
            value = contents(batch)[name]
            assert torch.equal(value, micro_batches) if isinstance(value, torch.Tensor) else value == micro_batches


def test_dataset_can_be_pickled() -> None:
    reader = Samples.of_lengths([3, 4, 40, 50])
    dataset, micro_batches = MicroBatches(reader.sample, reduced_spec("qwen3")), planned(reader.plan())
    copy, same = pickle.loads(pickle.dumps((dataset, micro_batches)))
    batch, copied_batch = dataset[micro_batches[1]], copy[same[1]]
    assert isinstance(batch, PackedBatch)
    assert isinstance(copied_batch, PackedBatch)
    assert torch.equal(batch.input_ids, copied_batch.input_ids)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_worker_errors_keep_type_remedy_and_order(num_workers: int) -> None:
    reader = Samples.of_lengths([60, 59, 58])
    broken = dataclasses.replace(reader.samples[1], input_ids=reader.samples[1].input_ids.copy())
    broken.input_ids[3] = 90
    reader.samples[1] = broken
    spec = reduced_spec("qwen3_vl")
    plan = reader.plan()
    position = [int(plan.samples(step, 0, 0)[0][0]) for step in range(3)].index(1)
    batches = load_micro_batches(MicroBatches(reader.sample, spec), planned(plan), num_workers=num_workers)
    for _ in range(position):
        next(batches)
    with pytest.raises(DataError, match=r"row 1 of reduced\.jsonl: 1 image tokens") as exc_info:
        next(batches)
    assert exc_info.value.remedy
    assert "Traceback" not in str(exc_info.value)


def test_loading_does_not_use_torch_random_numbers() -> None:
    reader = Samples.of_lengths([3, 4])
    dataset, micro_batches = MicroBatches(reader.sample, reduced_spec("qwen3")), planned(reader.plan())
    before = torch.random.get_rng_state()
    list(load_micro_batches(dataset, micro_batches))
    list(load_micro_batches(dataset, micro_batches, num_workers=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_common_prefixes_are_computed_once_if_requested() -> None:
    reader, micro_batch = Samples(samples_with_prefixes("qwen3")), MicroBatch([[0, 2, 3], [6, 5, 1, 4]])
    flat, tree = (
        MicroBatches(reader.sample, reduced_spec("qwen3"), min_shared=min_shared)[micro_batch]
        for min_shared in (None, 5)
    )
    assert type(flat) is PackedBatch
    assert type(tree) is TreeBatch
    assert tree.input_ids.shape[1] < flat.input_ids.shape[1]
    assert (tree.num_samples, tree.num_target_tokens) == (flat.num_samples, flat.num_target_tokens)


def test_missing_image_removes_all_samples_of_its_prefix(tmp_path: Path) -> None:
    save_image_processor("qwen3_vl", str(tmp_path))
    spec, samples = reduced_spec("qwen3_vl", str(tmp_path)), samples_with_prefixes("qwen3_vl")
    missing_image = samples[0].images[0]
    with_it = [index for index, sample in enumerate(samples) if missing_image in sample.images]
    assert 3 <= len(with_it) < len(samples)
    for index in with_it:
        images = tuple(
            dataclasses.replace(one, data=b"no picture") if one == missing_image else one
            for one in samples[index].images
        )
        samples[index] = dataclasses.replace(samples[index], images=images)
    dataset = MicroBatches(Samples(samples).sample, spec, skip_bad_media=True, min_shared=5)
    batch = dataset[MicroBatch([list(range(len(samples)))])]
    assert type(batch) is TreeBatch
    assert [skipped.row for skipped in batch.skipped] == with_it
    assert batch.num_samples == len(samples) - len(with_it)
    lost = sum(int((samples[index].labels[1:] != -100).sum()) for index in with_it)
    assert sum(skipped.num_target_tokens for skipped in batch.skipped) == lost
    remaining_batch = collate_packs([sample for index, sample in enumerate(samples) if index not in with_it], spec)
    assert batch.num_target_tokens == remaining_batch.num_target_tokens


def test_copies_of_a_sample_are_left_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the first copy cannot be read for a moment, as on a network drive."""
    reader = Samples.of_lengths([3, 4])
    results: Iterator[MediaError | None] = iter([MediaError("unreadable"), None, None])

    def raise_error(*_: object) -> None:
        raise MediaError("unreadable")

    monkeypatch.setattr("packtool.batch.dataset.check_unchanged", raise_error)
    monkeypatch.setattr("packtool.batch.dataset.sample_media_error", lambda *_: next(results))
    batch = MicroBatches(reader.sample, reduced_spec("qwen3"), skip_bad_media=True)[MicroBatch([[0, 1, 0]])]
    assert documents(batch) == [reader.sample(1).input_ids.tolist()]
    assert [(skipped.sample, skipped.message) for skipped in batch.skipped] == [(0, "unreadable")] * 2
