"""How processes share sequences, and DeepSpeed's settings behind their names and in files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from packtool.config.packing import ParallelOptions
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.train.prepare.parallelism import axes_of, deepspeed_settings


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(stage: int) -> None:
    settings = deepspeed_settings(f"zero{stage}")
    assert settings["zero_optimization"]["stage"] == stage
    assert settings["gradient_accumulation_steps"] == "auto"
    assert "offload_optimizer" not in settings["zero_optimization"]


def test_offloading() -> None:
    assert "offload_param" not in deepspeed_settings("zero2_offload")["zero_optimization"]
    assert deepspeed_settings("zero3_offload")["zero_optimization"]["offload_param"]["device"] == "cpu"
    with pytest.raises(ConfigError, match="only zero2 and zero3"):
        deepspeed_settings("zero1_offload")


def test_a_file_of_settings(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert deepspeed_settings(str(tmp_path / "ds.json")) == {"zero_optimization": {"stage": 1}}
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "gone.json"):
        with pytest.raises(ConfigError, match="Give zero0, zero1, zero2, zero3, or a JSON file"):
            deepspeed_settings(str(tmp_path / name))


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "gpt_neo", "bloom", "falcon"])
def test_models_with_old_names_of_settings_share_sequences(model_type: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    files = ModelFiles(str(tmp_path), config, {}, "", "", {})
    axes = axes_of(ParallelOptions(sequence_parallel_size=2), World(0, 2, 2), files, np.array([4096, 8192]))
    assert axes.ring_size * axes.ulysses_size == 2
