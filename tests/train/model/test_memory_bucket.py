"""The size of Skrull's buckets, from what a model keeps of each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from packtool.batch.spec import model_config
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.model import memory as module
from packtool.train.model.load import model_without_weights
from packtool.train.model.memory import estimate_memory
from packtool.train.run import train
from tests.train.tiny import TinyWorld

SKRULL: dict[str, Any] = {"schedule": "skrull", "bucket_size": "auto", "freeze_vit": True}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has 64 MiB."""
    monkeypatch.setattr(module, "device_bytes", lambda *, on_gpu: 64 * 2**20)


def bucket_tokens_of(config: TrainConfig) -> int:
    bucket_tokens = module.with_bucket(config, World(), SilentProgress()).bucket_tokens
    assert bucket_tokens is not None
    return bucket_tokens


def test_recomputed_activations_need_less_memory(tiny: TinyWorld) -> None:
    model = model_config(tiny.model)
    without_recomputing, recomputed = (
        module.bytes_per_token(tiny.config("", gradient_checkpointing=on), model, torch.float32) for on in (False, True)
    )
    assert recomputed < without_recomputing


def test_half_precision_needs_half_the_memory(tiny: TinyWorld) -> None:
    model, config = model_config(tiny.model), tiny.config("")
    full, half = (module.bytes_per_token(config, model, dtype) for dtype in (torch.float32, torch.bfloat16))
    # Norms compute in 32 bits whatever comes in.
    assert 0.5 < half / full < 0.9


@pytest.mark.usefixtures("memory")
def test_more_memory_holds_more_tokens(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config("out", **SKRULL)
    small = bucket_tokens_of(config)
    assert small % 128 == 0
    monkeypatch.setattr(module, "device_bytes", lambda *, on_gpu: 128 * 2**20)
    per_token = module.bytes_per_token(config, model_config(tiny.model), torch.float32)
    assert bucket_tokens_of(config) - small == pytest.approx(64 * 2**20 * 0.92 / per_token, abs=256)


@pytest.mark.usefixtures("memory")
def test_bucket_size_fits_and_the_next_does_not(tiny: TinyWorld) -> None:
    config = tiny.config("out", **SKRULL)
    size, model = bucket_tokens_of(config), model_config(tiny.model)
    empty = model_without_weights(config, model, torch.float32)
    needs = [
        estimate_memory(
            tiny.config("out", **SKRULL | {"bucket_size": str(bucket_size)}),
            empty,
            model,
            dtype=torch.float32,
            world_size=1,
        ).total
        for bucket_size in (size, size + 256)
    ]
    assert needs[0] <= 64 * 0.92 / 1024 < needs[1]


@pytest.mark.usefixtures("memory")
def test_run_uses_the_bucket_size(tiny: TinyWorld) -> None:
    notes: list[str] = []

    class Listening(SilentProgress):
        def note(self, message: str) -> None:
            notes.append(message)

    config = tiny.config("out", **SKRULL, dry_run=True)
    train(config, Listening())
    expected = bucket_tokens_of(config)
    assert any(note.startswith(f"bucket size: {expected:,} tokens per process") for note in notes)
    assert any(f"--bucket-size {expected}" in note for note in notes if note.startswith("settings"))


def test_given_bucket_size_is_kept(tiny: TinyWorld) -> None:
    assert bucket_tokens_of(tiny.config("", schedule="skrull", bucket_size="2K")) == 2048


def test_too_little_memory_is_an_error(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_bytes", lambda *, on_gpu: 2**20)
    with pytest.raises(ConfigError, match="weights, gradients and optimizer need"):
        bucket_tokens_of(tiny.config("out", **SKRULL))


def test_trained_vision_tower_is_refused(tiny: TinyWorld) -> None:
    with pytest.raises(ConfigError, match="--freeze-vit false"):
        bucket_tokens_of(tiny.config("out", **SKRULL | {"freeze_vit": False}))


def test_memory_of_a_machine_is_divided_among_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    memory_bytes = module.device_bytes(on_gpu=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert module.device_bytes(on_gpu=False) == memory_bytes // 4
