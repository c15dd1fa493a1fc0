"""The size of Skrull's buckets, from what a model keeps of each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from packtool.batch.collate import collate_packs
from packtool.batch.spec import model_config
from packtool.cache.reader import CacheReader
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.simulate.model_sizes import ModelSizes
from packtool.train.loop.execute import load_spec
from packtool.train.model import bucket
from packtool.train.model.load import load_model
from packtool.train.prepare.cached import prepare_run
from packtool.train.run import train
from tests.train.tiny import TinyWorld

SKRULL: dict[str, Any] = {"schedule": "skrull", "bucket_size": "auto", "freeze_vit": True}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has 64 MiB."""
    monkeypatch.setattr(bucket, "device_bytes", lambda *, on_gpu: 64 * 2**20)


def sized(config: TrainConfig) -> int:
    found = bucket.with_bucket(config, World(), SilentProgress()).bucket_tokens
    assert found is not None
    return found


def test_a_token_keeps_what_was_measured(tiny: TinyWorld) -> None:
    """Against the real model on real rows, without its tower: the bytes that autograd keeps, more tokens less fewer."""
    config = tiny.config("out", bucket_size="128", schedule="skrull")
    spec = load_spec(prepare_run(config, World()))
    model = load_model(tiny.model, spec.config, dtype=torch.float32, packing=True)
    model.requires_grad_(True)
    reader = CacheReader.open([tiny.cache])
    kept = []
    for positions in ([0, 3, 6], [0, 3, 6, 9, 12, 15, 18, 21]):
        batch = collate_packs([reader.sample(position) for position in positions], spec)
        inputs = {
            name: value for name, value in batch.model_inputs().items() if "pixel" not in name and "grid" not in name
        }
        seen: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, seen: dict[int, torch.Tensor] = seen) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(**inputs, logits_to_keep=1)
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        size = sum(tensor.untyped_storage().nbytes() for key, tensor in seen.items() if key not in own)
        kept.append((batch.input_ids.shape[1], size))
    (few, less), (more, most) = kept
    measured = (most - less) / (more - few)
    told = bucket.bytes_per_token(config, model_config(tiny.model), torch.float32)
    assert told == pytest.approx(measured, rel=0.1)


def test_what_is_recomputed_is_not_kept(tiny: TinyWorld) -> None:
    model = model_config(tiny.model)
    whole, recomputed = (
        bucket.bytes_per_token(tiny.config("", gradient_checkpointing=on), model, torch.float32) for on in (False, True)
    )
    assert recomputed == whole / 2 + 2 * 4 * 64


def test_half_the_precision_keeps_half(tiny: TinyWorld) -> None:
    model, config = model_config(tiny.model), tiny.config("")
    full, half = (bucket.bytes_per_token(config, model, dtype) for dtype in (torch.float32, torch.bfloat16))
    # Norms compute in 32 bits whatever comes in.
    assert 0.5 < half / full < 0.65


def test_a_model_that_cannot_be_measured_is_reckoned(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> float:
        raise NotImplementedError("no such thing on meta")

    monkeypatch.setattr(bucket, "_measured", fails)
    model = model_config(tiny.model)
    reckoned = ModelSizes.of_config(model.to_dict()).token_bytes(recompute=False)
    assert bucket.bytes_per_token(tiny.config(""), model, torch.bfloat16) == reckoned


@pytest.mark.usefixtures("memory")
def test_more_memory_holds_more_tokens(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config("out", **SKRULL)
    small = sized(config)
    assert small % 128 == 0
    monkeypatch.setattr(bucket, "device_bytes", lambda *, on_gpu: 128 * 2**20)
    per_token = bucket.bytes_per_token(config, model_config(tiny.model), torch.float32)
    logits = 3 * 4 * 272
    assert sized(config) - small == pytest.approx(64 * 2**20 * 0.92 / (per_token + logits), abs=256)


@pytest.mark.usefixtures("memory")
def test_a_run_has_the_number(tiny: TinyWorld) -> None:
    notes: list[str] = []

    class Listening(SilentProgress):
        def note(self, message: str) -> None:
            notes.append(message)

    config = tiny.config("out", **SKRULL, dry_run=True)
    train(config, Listening())
    expected = sized(config)
    assert any(note.startswith(f"bucket size: {expected:,} tokens a process") for note in notes)
    assert any(f"--bucket-size {expected}" in note for note in notes if note.startswith("settings"))


def test_a_number_stays(tiny: TinyWorld) -> None:
    assert sized(tiny.config("", schedule="skrull", bucket_size="2K")) == 2048


def test_no_room_for_a_token(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "device_bytes", lambda *, on_gpu: 2**20)
    with pytest.raises(ConfigError, match="weights, gradients and optimizer need"):
        sized(tiny.config("out", **SKRULL))


def test_pictures_towers_are_not_measured(tiny: TinyWorld) -> None:
    with pytest.raises(ConfigError, match="--freeze-vit false"):
        sized(tiny.config("out", **SKRULL | {"freeze_vit": False}))


def test_the_share_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    whole = bucket.device_bytes(on_gpu=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert bucket.device_bytes(on_gpu=False) == whole // 4
