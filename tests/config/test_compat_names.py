"""The table of other tools' names says only what is true."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

import pytest
import torch
from transformers import TrainingArguments

from packtool.cli.main import _SETTINGS
from packtool.config.compat_names import (
    EVERY_COMMAND,
    SET_TOO,
    Status,
    compat_names,
    find_compat_name,
    training_argument_problem,
)
from packtool.config.settings import option_names, resolve
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.train.loop.checks import training_arguments

# By command, with dashes; and what other places read.
NAMES = {
    command: {name for field in dataclasses.fields(cls) for name in option_names(field)}
    for command, cls in _SETTINGS.items()
}
VARIABLES = {field.metadata["env"] for cls in _SETTINGS.values() for field in dataclasses.fields(cls)} - {None}
READ_ELSEWHERE = {"NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PACKTOOL_LOG_LEVEL"}
READ_ELSEWHERE |= {"CUDA_VISIBLE_DEVICES", "SWIFT_LOG_LEVEL"}
ENTRIES = compat_names()


def test_every_line_has_a_known_status_and_a_reason() -> None:
    for entry in ENTRIES:
        assert entry.status in get_args(Status), entry
        assert entry.reason or entry.status in ("same", "set", "renamed"), entry
        assert (entry.options in ("-", SET_TOO)) == (entry.status != "renamed"), entry
        assert entry.options != SET_TOO or entry.tool == "transformers", entry
        assert entry.command in (EVERY_COMMAND, *NAMES), entry
        assert entry.is_variable == entry.name.isupper(), entry


def test_names_with_status_same_are_options() -> None:
    for entry in ENTRIES:
        if entry.status != "same":
            continue
        if entry.is_variable:
            assert entry.name in VARIABLES | READ_ELSEWHERE, entry
        else:
            assert "--" + entry.name.replace("_", "-") in NAMES["export"] | NAMES["train"], entry


def test_renamed_options_exist() -> None:
    known = set().union(*NAMES.values())
    for entry in ENTRIES:
        if entry.status != "renamed":
            continue
        named = re.findall(r"--[a-z0-9-]+|[A-Z][A-Z_]{2,}", entry.options)
        for name in named:
            is_known = name in known if name.startswith("--") else name in VARIABLES | READ_ELSEWHERE | {"FILE", "NAME"}
            assert is_known or entry.options == "packtool export", entry


def test_options_named_in_reasons_exist() -> None:
    known = set().union(*NAMES.values()) | {"--set", "--config", "--json"}
    for entry in ENTRIES:
        for name in re.findall(r"--[a-z][a-z0-9-]+", entry.reason):
            assert name in known, entry


def test_names_without_an_equivalent_are_not_options() -> None:
    for entry in ENTRIES:
        if entry.status in ("same", "renamed") or entry.is_variable:
            continue
        commands = ["export", "train"] if entry.command == EVERY_COMMAND else [entry.command]
        for command in commands:
            assert "--" + entry.name.replace("_", "-") not in NAMES[command], entry


def test_every_field_of_training_arguments_has_an_entry() -> None:
    messages = {entry.name for entry in ENTRIES if entry.tool == "transformers"}
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= messages


def test_settable_fields_are_accepted_by_training() -> None:
    for entry in ENTRIES:
        if entry.tool == "transformers":
            can_be_set = entry.status == "set" or entry.options == SET_TOO
            assert (training_argument_problem(entry.name) is None) == can_be_set, entry
    assert training_argument_problem("seed") == "use --seed instead"
    assert training_argument_problem("data_seed") == "use --seed instead: one seed decides packs and order"
    assert training_argument_problem("label_smoothing_factor") == (
        "packtool has no label smoothing; --loss-scale weights target tokens"
    )
    assert training_argument_problem("a field of tomorrow") is None


@pytest.mark.parametrize("field", ["save_strategy", "load_best_model_at_end", "bf16"])
def test_fields_with_an_option_cannot_be_set(field: str, tmp_path: object) -> None:
    run = TrainConfig(model="m", cached_dataset=("c",), output_dir=str(tmp_path), training={field: True})
    with pytest.raises(ConfigError, match=field):
        training_arguments(run, num_steps=1, dtype=torch.float32, on_gpu=False)


def test_entries_of_one_command_take_precedence() -> None:
    of_export, of_plan = find_compat_name("padding_free", "export"), find_compat_name("padding_free", "plan")
    assert of_export is not None
    assert "training" in of_export.reason or "packtool train" in of_export.reason
    assert of_plan is None


@pytest.mark.parametrize(
    ("name", "value", "explanation"),
    [
        ("image_size", 512, "image_size (axolotl) is --max-pixels 262144 here"),
        ("image_size", [640, 480], "image_size (axolotl) is --max-pixels 307200 here"),
        ("image_size", None, "image_size (axolotl) is --max-pixels WIDTH*HEIGHT here"),
        ("evals_per_epoch", 4, "evals_per_epoch (axolotl) is --eval-steps STEPS_PER_EPOCH/4 here"),
        ("saves_per_epoch", "2", "saves_per_epoch (axolotl) is --save-steps STEPS_PER_EPOCH/2 here"),
        ("disable_shuffling", True, "disable_shuffling (LLaMA-Factory) is --shuffle false here"),
        ("disable_shuffling", "no", "disable_shuffling (LLaMA-Factory) is --shuffle true here"),
        ("disable_gradient_checkpointing", "true", "is --gradient-checkpointing false here"),
        ("sample_packing_bin_size", 200, "is --max-samples-per-pack here: a number of samples, not of tokens"),
        ("early_stopping_steps", 3, "is --early-stop-interval here: number of consecutive evaluations"),
        ("trust_remote_code", True, "(LLaMA-Factory, axolotl, TRL) has no effect here: code in a model"),
        ("plugins", "x", "CutCrossEntropy"),
    ],
)
def test_values_are_converted_to_packtools_unit(name: str, value: object, explanation: str) -> None:
    entry = find_compat_name(name, "train")
    assert entry is not None
    assert explanation in entry.sentence(name, value)


def test_a_name_of_several_tools_is_explained_for_each_tool() -> None:
    entry = find_compat_name("optimizer", "train")
    assert entry is not None
    assert entry.status == "renamed"
    for part in ("optimizer (axolotl) is --optim here", "optimizer (ms-swift) is not supported"):
        assert part in entry.sentence("optimizer", "adamw")


def test_every_name_of_every_tool_is_explained() -> None:
    """Whichever tool a user comes from, the explanation names that tool."""
    for entry in ENTRIES:
        if entry.status == "same" or entry.is_variable:
            continue
        command = "train" if entry.command == EVERY_COMMAND else entry.command
        entry_found = find_compat_name(entry.name, command)
        assert entry_found is not None
        tools = {tool for each in (entry_found, *entry_found.other_meanings) for tool in each.tool.split(", ")}
        assert entry.tool in tools, entry


@pytest.mark.parametrize("other", ["lora_llm", "qlora", "adalora", "freeze", "reft"])
def test_unsupported_train_types_suggest_the_nearest_one(other: str) -> None:
    with pytest.raises(ConfigError, match=f"--train-type: {other}: .*(lora|full)") as error:
        resolve(TrainConfig, {"train_type": other, "cached_dataset": "c"})
    assert "did you mean" not in error.value.message
