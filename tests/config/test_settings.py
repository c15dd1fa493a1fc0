from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from packtool.cli.main import _SETTINGS
from packtool.cli.options import rewrite_arguments
from packtool.config import settings
from packtool.config.data import ExportConfig
from packtool.config.packing import PackOptions
from packtool.config.plan import PlanConfig
from packtool.config.settings import (
    FALSE_WORDS,
    TRUE_WORDS,
    bound_problems,
    declared_type,
    part_of,
    resolve,
    steps_or_fraction,
    unit_of,
    value_type,
)
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError

EXPORT = {"model": "m", "dataset": ("a.json",), "output_dir": "o", "max_length": "100"}
TRAIN = {"model": "m", "cached_dataset": ("c",), "output_dir": "o"}


def problems_of(cls: type, options: dict[str, Any], **sources: Any) -> str:
    with pytest.raises(ConfigError) as exc_info:
        resolve(cls, options, **sources)
    return str(exc_info.value)


def test_texts_are_converted_to_the_declared_types() -> None:
    config = resolve(TrainConfig, {**TRAIN, "learning_rate": "1e-4", "num_train_epochs": "3", "lora_rank": "16"})
    assert (config.learning_rate, config.num_train_epochs, config.lora_rank) == (1e-4, 3.0, 16)
    assert isinstance(config.num_train_epochs, float)
    assert isinstance(config.lora_rank, int)


@pytest.mark.smoke
def test_precedence_is_flag_set_environment_file_default() -> None:
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


@pytest.mark.smoke
def test_all_mistakes_are_reported_at_once() -> None:
    messages = problems_of(
        ExportConfig,
        {"model": "m", "max_length": "ten", "split_dataset_ratio": "2"},
        sets=["sed=3", "no-equals-sign"],
        environ={"MIN_PIXELS": "few"},
        file={"truncation_strategy": "middle"},
    )
    for part in (
        "--max-length: 'ten' is not a number of tokens; give one such as 8192 or 8K",
        "--split-dataset-ratio: 2.0 is above the maximum of 0.999",
        "--set sed: unknown setting 'sed'; did you mean 'seed'?",
        "--set no-equals-sign",
        "environment variable MIN_PIXELS: 'few' is not an integer",
        "--config, truncation_strategy: 'middle' is none of delete, left, right, split, raise",
        "--dataset is missing",
        "--output-dir is missing",
    ):
        assert part in messages
    assert "--max-length is missing" not in messages


@pytest.mark.parametrize("value", ["1.5", "nan", "inf", "", "1_0x", "true"])
def test_values_that_are_not_integers_are_refused(value: str) -> None:
    assert "--max-length" in problems_of(ExportConfig, {**EXPORT, "max_length": value})


def test_aliases_name_the_same_setting() -> None:
    assert resolve(TrainConfig, TRAIN, sets=["tuner_type=full"]).train_type == "full"


def test_booleans() -> None:
    assert resolve(TrainConfig, TRAIN, sets=["packing=true"]).packing is True
    assert resolve(TrainConfig, TRAIN, file={"packing": "false"}).packing is False
    assert "--set packing" in problems_of(TrainConfig, TRAIN, sets=["packing=maybe"])


def test_training_arguments_pass_through_nested_keys() -> None:
    config = resolve(TrainConfig, TRAIN, file={"training": {"a": 1}}, sets=["training.b=2.5", "training.c=text"])
    assert config.training == {"a": 1, "b": 2.5, "c": "text"}


def test_contradictory_settings_are_reported() -> None:
    assert "--max-pixels" in problems_of(ExportConfig, {**EXPORT, "max_pixels": "9", "image_max_token_num": "9"})
    assert "pixels" in problems_of(ExportConfig, {**EXPORT, "max_pixels": "9", "min_pixels": "10"})
    assert "--to-cached-dataset" in problems_of(ExportConfig, {**EXPORT, "to_cached_dataset": False})
    streamed = {**TRAIN, "cached_dataset": None, "dataset": ("a.json",), "streaming": True, "packing": True}
    streamed |= {"max_steps": "1", "max_length": "20", "packing_length": "10"}
    assert "--packing-length" in problems_of(TrainConfig, streamed)
    assert resolve(TrainConfig, {**TRAIN, "max_length": "20", "packing_length": "10"}).packing_length == 10
    messages = problems_of(TrainConfig, {**TRAIN, "freeze_llm": True})
    assert "nothing to train" in messages


def test_resize_accepts_only_0() -> None:
    assert resolve(ExportConfig, {**EXPORT, "resize": "0"}).resize == 0
    assert "--resize" in problems_of(ExportConfig, {**EXPORT, "resize": "448"})


def test_learning_rate_depends_on_the_train_type() -> None:
    assert resolve(TrainConfig, TRAIN).peak_learning_rate == 1e-4
    assert resolve(TrainConfig, {**TRAIN, "train_type": "full"}).peak_learning_rate == 1e-5
    assert resolve(TrainConfig, {**TRAIN, "learning_rate": "3e-4"}).peak_learning_rate == 3e-4


COMMANDS = {name: cls for name, cls in _SETTINGS.items() if name != "sft"}
FIELDS = [(cls, field) for cls in COMMANDS.values() for field in dataclasses.fields(cls)]


@pytest.mark.parametrize(("word", "value"), [*((w, True) for w in TRUE_WORDS), *((w, False) for w in FALSE_WORDS)])
def test_every_boolean_accepts_yes_no_on_off(word: str, value: bool) -> None:
    for cls, field in FIELDS:
        if value_type(field, cls) is not bool:
            continue
        hint = declared_type(field, cls)
        assert settings._convert(word, hint) is value
        assert settings._convert(word.upper(), hint) is value
    assert resolve(TrainConfig, TRAIN, file={"packing": word}).packing is value
    assert resolve(TrainConfig, TRAIN, sets=[f"packing={word}"]).packing is value
    environ = {"USE_AUDIO_IN_VIDEO": word}
    assert resolve(ExportConfig, EXPORT, environ=environ).use_audio_in_video is value
    words = rewrite_arguments(["--packing", word], {"--packing": "flag"}, None, lambda name, value: None)
    assert words == ["--packing" if value else "--no-packing"]


def test_infinite_numbers_are_refused() -> None:
    for cls, field in FIELDS:
        if value_type(field, cls) not in (int, float):
            continue
        for raw in ("inf", "-inf", "1e400", "nan", float("inf")):
            with pytest.raises(ValueError, match=r"is not|is no "):
                settings._convert(raw, declared_type(field, cls))


def test_zero_epochs_and_too_large_seeds_are_refused() -> None:
    assert "--num-train-epochs 0 trains nothing" in problems_of(TrainConfig, {**TRAIN, "num_train_epochs": "0"})
    assert resolve(TrainConfig, {**TRAIN, "num_train_epochs": "0", "max_steps": "1"}).max_steps == 1
    assert "--seed: 4294967296 is above" in problems_of(TrainConfig, {**TRAIN, "seed": str(2**32)})
    assert resolve(TrainConfig, {**TRAIN, "seed": str(2**32 - 1)}).seed == 2**32 - 1


def test_every_number_of_tokens_accepts_a_suffix() -> None:
    """Whatever a field of whole numbers calls tokens in its help has the type that takes them."""
    of_tokens = re.compile(r"\bN tokens|media tokens|this many tokens")
    field_names = set()
    for cls, field in FIELDS:
        if value_type(field, cls) is int and of_tokens.search(field.metadata["help"]):
            unit = unit_of(field, cls)
            assert unit is not None, (cls, field.name)
            assert settings._convert("8K", declared_type(field, cls)) == 8192
            assert settings._convert("128k", declared_type(field, cls)) == 131072
            assert settings._convert(4096, declared_type(field, cls)) == 4096
            field_names.add(field.name)
    assert {"max_length", "packing_length", "image_max_token_num", "max_tokens_per_micro_batch"} <= field_names
    assert resolve(ExportConfig, {**EXPORT, "max_length": "128K"}).max_length == 128 * 1024
    assert resolve(ExportConfig, EXPORT, environ={"IMAGE_MAX_TOKEN_NUM": "5k"}).image_max_token_num == 5120
    assert resolve(PlanConfig, {"lengths": "l", "sweep": "4096,8K"}).sweep_lengths() == [4096, 8192]


def test_sizes_in_bytes() -> None:
    assert resolve(TrainConfig, {**TRAIN, "cache_dir_size": "200GB"}).cache_dir_size == 200 * 10**9
    assert resolve(TrainConfig, TRAIN, file={"cache_dir_size": 1000}).cache_dir_size == 1000
    assert "give one such as 200GB" in problems_of(TrainConfig, {**TRAIN, "cache_dir_size": "big"})


def test_packing_batch_size_comes_from_the_environment() -> None:
    assert resolve(TrainConfig, TRAIN, environ={"PACKING_BATCH_SIZE": "500"}).packing_batch_size == 500


def test_values_of_other_tools_are_accepted() -> None:
    assert resolve(TrainConfig, {**TRAIN, "attn_impl": "flash_attn"}).attn_impl == "flash_attention_2"
    assert resolve(TrainConfig, TRAIN, file={"save_strategy": False}).save_strategy == "no"
    assert resolve(TrainConfig, {**TRAIN, "resume_from_checkpoint": "yes"}).resume_from_checkpoint == "true"
    assert resolve(TrainConfig, {**TRAIN, "fsdp": ("fsdp2",)}).fsdp == ("fsdp2",)
    kwargs = resolve(TrainConfig, {**TRAIN, "lr_scheduler_kwargs": '{"min_lr": 1e-6}'}).lr_scheduler_kwargs
    assert kwargs == {"min_lr": 1e-6}
    assert "not a JSON object" in problems_of(TrainConfig, {**TRAIN, "lr_scheduler_kwargs": "min_lr=1"})
    assert "sdpa computes the same" in problems_of(TrainConfig, {**TRAIN, "attn_impl": "eager"})


def test_options_are_selected_by_field_name() -> None:
    config = resolve(
        TrainConfig, {"model": "m", "dataset": ("d",), "output_dir": "o", "max_length": 9, "look_ahead": 3}
    )
    part = part_of(ExportConfig, config, output_dir="cache", dry_run=True)
    assert (part.model, part.dataset, part.max_length, part.output_dir, part.dry_run) == ("m", ("d",), 9, "cache", True)
    assert config.truncation_strategy is None
    assert part.truncation_strategy == ExportConfig.truncation_strategy  # None says nothing
    assert part_of(PackOptions, config) == PackOptions(look_ahead=3)


def test_bounds_hold_for_objects_made_without_resolve() -> None:
    assert not bound_problems(PackOptions())
    assert bound_problems(PackOptions(packing_window=0, look_ahead=-1)) == [
        "--packing-window: 0 is below the minimum of 1",
        "--look-ahead: -1 is below the minimum of 0",
    ]


def test_given_options_without_effect_are_warned_about() -> None:
    """All options of what learns are for adapters, for full training, or for both."""
    panel = {f.name: f for f in dataclasses.fields(TrainConfig) if f.metadata["panel"] == "Parameters"}
    for_both = {name for name, field in panel.items() if field.metadata["needs"] is None}
    assert for_both == {"freeze_vit", "freeze_aligner", "freeze_llm"}
    for name in sorted(set(panel) - for_both - {"adapter_settings"}):
        needed, required_type = panel[name].metadata["needs"]
        for train_type in ("lora", "full"):
            default, messages = panel[name].default, list[str]()
            # Also a value that is the default's was given for a purpose.
            value = ("a",) if default == () else str(default).lower() if default is not None else "a"
            try:
                resolve(TrainConfig, {**TRAIN, "train_type": train_type, name: value}, warn=messages.append)
            except ConfigError as error:
                messages.append(str(error))
            message = f"{settings.flag(name)} .*requires --train-type {re.escape(required_type)}$"
            assert needed == "train_type"
            assert any(re.search(message, line, re.MULTILINE) for line in messages) == (
                train_type not in required_type.split("|")
            ), (
                name,
                train_type,
                messages,
            )
    assert not list(training_warnings(lora_rank="8"))
    assert not list(training_warnings(target_modules="q_proj", train_type="oft"))
    (line,) = training_warnings(lora_rank="8", train_type="full")
    assert line == "--lora-rank has no effect with --train-type full: it requires --train-type lora"


def training_warnings(**options: str) -> list[str]:
    messages: list[str] = []
    resolve(TrainConfig, {**TRAIN, **options}, warn=messages.append)
    return messages


@pytest.mark.parametrize(("value", "steps"), [(500, 500), ("500", 500), (2.0, 2), (0.25, 0.25), ("0.1", 0.1)])
def test_steps_are_numbers_or_fractions(value: object, steps: float) -> None:
    converted = steps_or_fraction(value)
    assert (converted, type(converted)) == (steps, type(steps))


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True, None, float("nan")])
def test_other_steps_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="number"):
        steps_or_fraction(value)
