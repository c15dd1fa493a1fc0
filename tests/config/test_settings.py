from __future__ import annotations

from typing import Any

import pytest

from packtool.config.export import ExportConfig
from packtool.config.settings import resolve
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError

EXPORT = {"model": "m", "dataset": ("a.json",), "output_dir": "o", "max_length": "100"}
TRAIN = {"model": "m", "cached_dataset": ("c",), "output_dir": "o"}


def problems_of(cls: type, given: dict[str, Any], **sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(cls, given, **sources)
    return str(caught.value)


def test_text_becomes_the_declared_types() -> None:
    config = resolve(TrainConfig, {**TRAIN, "learning_rate": "1e-4", "num_train_epochs": "3", "lora_rank": "16"})
    assert (config.learning_rate, config.num_train_epochs, config.lora_rank) == (1e-4, 3.0, 16)
    assert isinstance(config.num_train_epochs, float)
    assert isinstance(config.lora_rank, int)


def test_flags_beat_set_beats_environment_beats_file_beats_default() -> None:
    file = {"max_pixels": 1, "seed": 1}
    assert resolve(ExportConfig, EXPORT).max_pixels is None
    assert resolve(ExportConfig, EXPORT, file=file).max_pixels == 1
    environ = {"MAX_PIXELS": "2"}
    assert resolve(ExportConfig, EXPORT, file=file, environ=environ).max_pixels == 2
    sets = ["max-pixels=3"]
    assert resolve(ExportConfig, EXPORT, file=file, environ=environ, sets=sets).max_pixels == 3
    config = resolve(ExportConfig, {**EXPORT, "max_pixels": "4"}, file=file, environ=environ, sets=sets)
    assert config.max_pixels == 4
    assert config.seed == 1


def test_all_mistakes_are_told_at_once() -> None:
    told = problems_of(
        ExportConfig,
        {"model": "m", "max_length": "ten", "split_dataset_ratio": "2"},
        sets=["sed=3", "no-equals-sign"],
        environ={"MIN_PIXELS": "few"},
        file={"truncation_strategy": "middle"},
    )
    for part in (
        "--max-length: 'ten' is not an integer",
        "--split-dataset-ratio: 2.0 is above 0.999",
        "--set sed: unknown setting 'sed'; did you mean 'seed'?",
        "--set no-equals-sign",
        "environment variable MIN_PIXELS: 'few' is not an integer",
        "--config, truncation_strategy: 'middle' is none of delete, left, right, split, raise",
        "--dataset is missing",
        "--output-dir is missing",
    ):
        assert part in told
    assert "--max-length is missing" not in told


@pytest.mark.parametrize("wrong", ["1.5", "nan", "inf", "", "1_0x", "true"])
def test_what_is_no_integer_is_refused(wrong: str) -> None:
    assert "--max-length" in problems_of(ExportConfig, {**EXPORT, "max_length": wrong})


def test_aliases_name_the_same_setting() -> None:
    assert resolve(TrainConfig, TRAIN, sets=["tuner_type=full"]).train_type == "full"


def test_booleans() -> None:
    assert resolve(TrainConfig, TRAIN, sets=["packing=true"]).packing is True
    assert resolve(TrainConfig, TRAIN, file={"packing": "false"}).packing is False
    assert "--set packing" in problems_of(TrainConfig, TRAIN, sets=["packing=maybe"])


def test_training_arguments_pass_through_nested_keys() -> None:
    config = resolve(TrainConfig, TRAIN, file={"training": {"a": 1}}, sets=["training.b=2.5", "training.c=text"])
    assert config.training == {"a": 1, "b": 2.5, "c": "text"}


def test_contradictions_between_settings_are_found() -> None:
    assert "--max-pixels" in problems_of(ExportConfig, {**EXPORT, "max_pixels": "9", "image_max_token_num": "9"})
    assert "pixels" in problems_of(ExportConfig, {**EXPORT, "max_pixels": "9", "min_pixels": "10"})
    assert "--to-cached-dataset" in problems_of(ExportConfig, {**EXPORT, "to_cached_dataset": False})
    streamed = {**TRAIN, "cached_dataset": None, "dataset": ("a.json",), "streaming": True, "packing": True}
    streamed |= {"max_steps": "1", "max_length": "20", "packing_length": "10"}
    assert "--packing-length" in problems_of(TrainConfig, streamed)
    assert resolve(TrainConfig, {**TRAIN, "max_length": "20", "packing_length": "10"}).packing_length == 10
    told = problems_of(TrainConfig, {**TRAIN, "freeze_llm": True})
    assert "nothing to train" in told


def test_resize_takes_only_what_is_understood() -> None:
    assert resolve(ExportConfig, {**EXPORT, "resize": "0"}).resize == 0
    assert "--resize" in problems_of(ExportConfig, {**EXPORT, "resize": "448"})


def test_learning_rate_depends_on_the_train_type() -> None:
    assert resolve(TrainConfig, TRAIN).peak_learning_rate == 1e-4
    assert resolve(TrainConfig, {**TRAIN, "train_type": "full"}).peak_learning_rate == 1e-5
    assert resolve(TrainConfig, {**TRAIN, "learning_rate": "3e-4"}).peak_learning_rate == 3e-4
