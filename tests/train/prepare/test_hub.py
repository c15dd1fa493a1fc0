"""Uploads of checkpoints, by the command, to a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packtool.config.train import TrainConfig
from tests.hub_server import HubServer
from tests.train.tiny import TinyWorld
from tests.waiting import PATIENCE_S

_MODEL_FILES = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "preprocessor_config.json"}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


def train_and_upload(
    tiny: TinyWorld, hub: HubServer, output_dir: Path, *options: str, token: str = "hf_right"
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packtool", "train", "--model", tiny.model, "--cached-dataset", tiny.cache]
    command += ["--output-dir", str(output_dir), "--packing-length", "256", "--verify-packing", "false"]
    command += ["--max-steps", "2", "--save-steps", "1", "--push-to-hub", "true", *options]
    environ = os.environ | hub.environment(token)
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PATIENCE_S)


def local_files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "README.md"}


def test_model_and_newest_checkpoint_are_uploaded(tiny: TinyWorld, hub: HubServer, tmp_path: Path) -> None:
    words = ["--hub-model-id", "us/run", "--hub-private-repo", "true", "--hub-strategy", "checkpoint"]
    done = train_and_upload(tiny, hub, tmp_path / "output", *words)
    assert done.returncode == 0, done.stderr
    assert f"uploaded to {hub.url}/us/run" in done.stderr
    assert hub.settings["us/run"]["visibility"] == "private"
    files, local = hub.repositories["us/run"], local_files(tmp_path / "output" / "checkpoint-2")
    top = {name for name in files if "/" not in name}
    assert top >= _MODEL_FILES
    assert not top & {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "packtool_state.json"}
    assert {name: files[name] for name in top} == {name: local[name] for name in top}
    prefix = "last-checkpoint/"
    assert {name.removeprefix(prefix): files[name] for name in files if name.startswith(prefix)} == local
    assert hub.messages[-2:] == [f"Training in progress, step 2{end}" for end in ("", ", checkpoint")]
    assert not list((tmp_path / "output").glob(".upload-*"))


def test_a_failed_upload_loses_nothing(tiny: TinyWorld, hub: HubServer, tmp_path: Path) -> None:
    hub.refused_step = 2
    done = train_and_upload(tiny, hub, tmp_path / "output", "--hub-strategy", "end")
    assert done.returncode == 5, done.stderr
    last = tmp_path / "output" / "checkpoint-2"
    assert "Storage quota exceeded" in done.stderr
    assert f"hf upload me/output {last}" in done.stderr
    assert local_files(last).keys() >= _MODEL_FILES | {"packtool_state.json"}
    assert hub.repositories == {"me/output": {}}


@pytest.mark.parametrize(("words", "token"), [([], "hf_wrong"), (["--hub-model-id", "a/b/c"], "hf_right")])
def test_refused_token_or_name_stops_before_anything_is_read(
    tiny: TinyWorld, hub: HubServer, tmp_path: Path, words: list[str], token: str
) -> None:
    done = train_and_upload(tiny, hub, tmp_path / "output", *words, token=token)
    assert done.returncode == 2, done.stderr
    assert "--push-to-hub true: the repository " in done.stderr
    assert "HF_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("output/checkpoint-*"))


def test_options_without_uploads_are_refused() -> None:
    def config(**settings: object) -> TrainConfig:
        return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)  # type: ignore[arg-type]

    assert any("requires --push-to-hub true" in line for line in config(hub_model_id="us/run").problems())
    assert any("saves none" in line for line in config(push_to_hub=True, save_strategy="no").problems())
    assert not config(push_to_hub=True, hub_model_id="us/run").problems()
