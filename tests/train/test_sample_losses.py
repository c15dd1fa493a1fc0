"""The kept loss of each sample is its loss alone, at the weights of the step that trained it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from packtool.batch.collate import collate_packs
from packtool.cache.manifest import Manifest
from packtool.cache.reader import CacheReader
from packtool.errors import MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.loop.checks import load_spec
from packtool.train.loop.watch import StepWatch
from packtool.train.model.load import load_model
from packtool.train.model.loss import LossFunction
from packtool.train.prepare import sample_losses
from packtool.train.prepare.history import read_ledger
from packtool.train.prepare.run import Run
from packtool.train.prepare.sample_losses import losses_by_epoch
from packtool.train.run import train
from tests.forked import run_ranks
from tests.train.alike import make_alike_world
from tests.train.jobs import Job, run_jobs
from tests.train.test_gradients import DESCENT
from tests.train.test_resume import BrokenOffError, Interrupting
from tests.train.tiny import TinyWorld, export_rows, read_metrics

Losses = npt.NDArray[Any]

ONE_PROCESS: dict[str, dict[str, Any]] = {
    "packed": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "padded": {"packing": False, "per_device_train_batch_size": 10, "gradient_accumulation_steps": 4},
    "padding removed": {"packing": False, "padding_free": True, "per_device_train_batch_size": 40},
    "dynamic": {"packing": False, "per_device_train_batch_size": 40, "dynamic_batch_tokens": 300},
    "workers": {"per_device_train_batch_size": 8, "dataloader_num_workers": 2},
    "loss per sample": {"per_device_train_batch_size": 8, "loss_reduction": "sample"},
    "weighted": {"per_device_train_batch_size": 8, "enable_dft_loss": True},
}
TWO: dict[str, Any] = {"sequence_parallel_size": 2}
TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "data parallel": {"gradient_accumulation_steps": 4},
    "sharded weights": {"fsdp": ["full_shard"], "gradient_accumulation_steps": 4},
    "uneven": {"packing_length": 320, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 7},
    "ring": TWO | {"sequence_parallel_type": "ring", "per_device_train_batch_size": 8},
    "ulysses": TWO | {"sequence_parallel_type": "ulysses", "per_device_train_batch_size": 8},
    "skrull": TWO | {"schedule": "skrull", "bucket_size": "96", "per_device_train_batch_size": 8},
}
# 8 packs in steps of 3: two whole steps and one of 2 packs in each of two epochs.
EPOCHS: dict[str, Any] = {"num_train_epochs": 2.0, "gradient_accumulation_steps": 3, "save_steps": 1}


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are stored before they are rounded to 16 bits, so that they can be compared closely."""
    monkeypatch.setattr(sample_losses, "_DTYPE", np.float32)


def losses_alone(world: TinyWorld, output_dir: Path) -> Losses:
    """The mean loss of each sample of the cache in a micro-batch of its own, before any training."""
    run = Run.of(world.config(output_dir), World())
    spec = load_spec(run)
    model = load_model(world.model, spec.config, dtype=torch.float32, packing=True).eval()
    with torch.no_grad(), LossFunction.temporary(model) as loss_function:
        reader = CacheReader.open([world.cache])
        samples = [reader.sample(number) for number in range(len(reader))]
        return np.array([float(loss_function(model, collate_packs([each], spec)).losses.mean()) for each in samples])


def kept(output_dir: Path, cache: str) -> list[Losses]:
    """The losses of a cache's samples in each epoch."""
    fingerprint = Manifest.read(cache).fingerprint
    epochs = losses_by_epoch(str(output_dir / "history"))
    assert list(epochs) == list(range(len(epochs)))
    return [losses[fingerprint] for losses in epochs.values()]


@pytest.fixture(scope="module")
def alone(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    losses = losses_alone(tiny, tmp_path_factory.mktemp("alone"))
    assert len(np.unique(losses.round(4))) > 30, "they differ"
    return losses


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_loss_is_that_of_the_sample_alone(name: str, tiny: TinyWorld, alone: Losses, tmp_path: Path) -> None:
    result = train(tiny.config(tmp_path, **DESCENT | ONE_PROCESS[name]), SilentProgress())
    assert result.steps == 1
    (losses,) = kept(tmp_path, tiny.cache)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


def test_loss_on_two_processes(tiny: TinyWorld, alone: Losses, tmp_path: Path) -> None:
    jobs: list[Job] = [("train", tmp_path / name, DESCENT | job) for name, job in TWO_PROCESSES.items()]
    run_ranks(2, run_jobs, tiny, jobs, scratch=tmp_path)
    for name in TWO_PROCESSES:
        (losses,) = kept(tmp_path / name, tiny.cache)
        np.testing.assert_allclose(losses, alone, rtol=1e-5, err_msg=name)


def test_target_of_a_shared_prefix_counts_for_each_sample(tiny: TinyWorld, tmp_path: Path) -> None:
    world = make_alike_world(tiny, tmp_path)
    expected = losses_alone(world, tmp_path / "alone")
    shared = DESCENT | {"gradient_accumulation_steps": 16, "share_prefix": "true"}
    train(world.config(tmp_path / "tree", **shared), SilentProgress())
    (line,) = read_metrics(tmp_path / "tree")
    assert line["tokens"] < 0.75 * CacheReader.open([world.cache]).index.length.sum(), "prefixes are shared"
    np.testing.assert_allclose(kept(tmp_path / "tree", world.cache)[0], expected, rtol=1e-5)
    run_ranks(2, run_jobs, world, [("train", tmp_path / "two", shared)], scratch=tmp_path)
    np.testing.assert_allclose(kept(tmp_path / "two", world.cache)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("amount", ["", "#2x"])
def test_each_cache_has_its_own_losses(amount: str, tiny: TinyWorld, alone: Losses, tmp_path: Path) -> None:
    """Also of a mixture that repeats samples within a step."""
    world = dataclasses.replace(tiny, cache=str(tmp_path / "small"))
    export_rows(world, world.cache, image_max_token_num=6)
    settings = DESCENT | {"cached_dataset": (tiny.cache + amount, world.cache), "per_device_train_batch_size": 40}
    result = train(tiny.config(tmp_path / "run", **settings), SilentProgress())
    assert (result.steps, result.num_samples) == (1, 120 if amount else 80)
    (losses,), (others,) = (kept(tmp_path / "run", cache) for cache in (tiny.cache, world.cache))
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    small = losses_alone(world, tmp_path / "alone")
    assert not np.allclose(small, alone, rtol=1e-5), "the caches differ"
    np.testing.assert_allclose(others, small, rtol=1e-5)


def test_samples_of_a_skipped_step_have_no_loss(
    tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bad_step, before_update = 1, StepWatch.before_update

    def before_bad_update(self: StepWatch, step: int, model: Any, device: Any) -> None:
        if step == bad_step:
            self.record_norm(float("nan"))
        before_update(self, step, model, device)

    monkeypatch.setattr(StepWatch, "before_update", before_bad_update)
    config = tiny.config(tmp_path, **EPOCHS | {"num_train_epochs": 1.0, "save_steps": 9}, on_nan="skip")
    train(config, SilentProgress())
    plan = Run.of(dataclasses.replace(config, output_dir=str(tmp_path / "planned")), World()).caches.timeline.first_plan
    (losses,) = kept(tmp_path, tiny.cache)
    assert np.flatnonzero(np.isnan(losses)).tolist() == sorted(plan.samples_of(bad_step, bad_step + 1).tolist())


def test_losses_are_those_of_the_step_and_epoch(tiny: TinyWorld, tmp_path: Path) -> None:
    """Their mean over the targets of a step is the logged loss, in both epochs."""
    config = tiny.config(tmp_path, **EPOCHS)
    train(config, SilentProgress())
    first, second = kept(tmp_path, tiny.cache)
    assert (second < first).mean() > 0.9, "it learns"
    run = Run.of(dataclasses.replace(config, output_dir=str(tmp_path / "planned")), World())
    timeline, targets = run.caches.timeline, run.caches.inputs.targets
    lines = read_metrics(tmp_path)
    assert len(lines) == timeline.num_steps == 6
    for step, line in enumerate(lines):
        span = timeline.span_at(step)
        samples = span.plan.samples_of(step - span.first_step, step - span.first_step + 1)
        losses = (first, second)[span.epoch][samples]
        assert np.average(losses, weights=targets[samples]) == pytest.approx(line["loss"], rel=1e-5)


def test_resumed_run_keeps_what_an_uninterrupted_one_keeps(tiny: TinyWorld, tmp_path: Path) -> None:
    train(tiny.config(tmp_path / "whole", **EPOCHS), SilentProgress())
    whole = kept(tmp_path / "whole", tiny.cache)
    for step in (1, 3, 4):
        resumed_dir, checkpoint = tmp_path / f"resumed-{step}", str(tmp_path / "whole" / f"checkpoint-{step}")
        train(tiny.config(resumed_dir, **EPOCHS, resume_from_checkpoint=checkpoint), SilentProgress())
        np.testing.assert_array_equal(kept(resumed_dir, tiny.cache), whole)
    # In the same directory, losses of steps after the checkpoint are discarded when the run begins.
    settings = EPOCHS | {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-4"), "sample_losses": False}
    with pytest.raises(BrokenOffError):
        train(tiny.config(tmp_path / "whole", **settings), Interrupting(4))
    ledger = read_ledger(str(tmp_path / "whole" / "checkpoint-4"))
    assert ledger is not None
    first, second = kept(tmp_path / "whole", tiny.cache)
    np.testing.assert_array_equal(first, whole[0])
    np.testing.assert_array_equal(second, np.where(ledger.sources[0].epoch.counts() > 0, whole[1], np.nan))


def _resume_with_damaged_losses(tiny: TinyWorld, output_dir: Path) -> None:
    train(tiny.config(output_dir, **EPOCHS), SilentProgress())
    if os.environ["RANK"] == "0":
        (output_dir / "history" / "losses-0.npz").write_bytes(b"damaged")
    settings = EPOCHS | {"resume_from_checkpoint": str(output_dir / "checkpoint-1")}
    with pytest.raises(MismatchError, match=r"losses-0\.npz cannot be read"):
        train(tiny.config(output_dir, **settings), SilentProgress())


def test_damaged_losses_end_all_ranks_with_the_same_error(tiny: TinyWorld, tmp_path: Path) -> None:
    run_ranks(2, _resume_with_damaged_losses, tiny, tmp_path / "run", scratch=tmp_path)


def test_two_bytes_per_sample_and_epoch(
    tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch, alone: Losses, tmp_path: Path
) -> None:
    monkeypatch.setattr(sample_losses, "_DTYPE", np.float16)
    train(tiny.config(tmp_path, **DESCENT, per_device_train_batch_size=8, save_strategy="no"), SilentProgress())
    (losses,) = kept(tmp_path, tiny.cache)
    assert losses.nbytes == 2 * len(alone)
    np.testing.assert_allclose(losses, alone, rtol=1e-3)


def test_losses_can_be_disabled(tiny: TinyWorld, tmp_path: Path) -> None:
    settings = DESCENT | {"per_device_train_batch_size": 8}
    train(tiny.config(tmp_path / "kept", **settings), SilentProgress())
    train(tiny.config(tmp_path / "none", **settings, sample_losses=False), SilentProgress())
    assert losses_by_epoch(str(tmp_path / "none" / "history")) == {}
    assert set(os.listdir(tmp_path / "kept" / "history")) - set(os.listdir(tmp_path / "none" / "history")) == {
        "losses-0.npz"
    }
    assert read_metrics(tmp_path / "kept") == read_metrics(tmp_path / "none")
