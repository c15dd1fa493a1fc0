"""Uploads of checkpoints, by the command, to a hub on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from packtool.cli.main import run
from packtool.config.train import TrainConfig
from tests.hub_server import TOKEN, HubServer
from tests.train.tiny import TinyWorld

Command = Callable[..., tuple[int, str]]
_MODEL_FILES = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "preprocessor_config.json"}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def train_and_upload(
    tiny: TinyWorld, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command with this hub; returns its exit code and what it prints on stderr."""

    def run_command(*options: str, token: str = TOKEN) -> tuple[int, str]:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", token)
        words = ["train", "--model", tiny.model, "--cached-dataset", tiny.cache, "--packing-length", "256"]
        words += ["--output-dir", str(tmp_path / "output"), "--verify-packing", "false", "--max-steps", "2"]
        code = run([*words, "--save-steps", "1", "--push-to-hub", "true", *options])
        return code, capfd.readouterr().err

    return run_command


def local_files(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "README.md"}


def test_model_and_newest_checkpoint_are_uploaded(train_and_upload: Command, hub: HubServer, tmp_path: Path) -> None:
    words = ["--hub-model-id", "us/run", "--hub-private-repo", "true", "--hub-strategy", "checkpoint"]
    code, err = train_and_upload(*words)
    assert code == 0, err
    assert f"uploaded to {hub.url}/us/run" in err
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


def test_a_failed_upload_loses_nothing(train_and_upload: Command, hub: HubServer, tmp_path: Path) -> None:
    hub.refused_step = 2
    code, err = train_and_upload("--hub-strategy", "end")
    assert code == 5, err
    last = tmp_path / "output" / "checkpoint-2"
    assert "Storage quota exceeded" in err
    assert f"hf upload me/output {last}" in err
    assert local_files(last).keys() >= _MODEL_FILES | {"packtool_state.json"}
    assert hub.repositories == {"me/output": {}}


@pytest.mark.parametrize(("words", "token"), [([], "hf_wrong"), (["--hub-model-id", "a/b/c"], TOKEN)])
def test_refused_token_or_name_stops_before_anything_is_read(
    train_and_upload: Command, tmp_path: Path, words: list[str], token: str
) -> None:
    code, err = train_and_upload(*words, token=token)
    assert code == 2, err
    assert "--push-to-hub true: the repository " in err
    assert "HF_TOKEN" in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("output/checkpoint-*"))


def test_options_without_uploads_are_refused() -> None:
    def config(**settings: object) -> TrainConfig:
        return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)  # type: ignore[arg-type]

    assert any("requires --push-to-hub true" in line for line in config(hub_model_id="us/run").problems())
    assert any("saves none" in line for line in config(push_to_hub=True, save_strategy="no").problems())
    assert not config(push_to_hub=True, hub_model_id="us/run").problems()
