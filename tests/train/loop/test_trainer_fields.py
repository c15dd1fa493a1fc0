"""Every field of transformers' TrainingArguments works through ``--set training.NAME``, or is refused with a remedy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from packtool.cli.options import option_kinds
from packtool.config.compat_names import training_argument_problem
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.loop.checks import checked_fields, training_arguments
from packtool.train.run import train
from tests.train.tiny import TinyWorld, read_metrics

FIELDS = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
# Values that are not the defaults, and can be had on one process without a GPU.
WORKING: dict[str, Any] = {
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 1e-5},
    "warmup_steps": 1,
    "optim": "adamw_torch",
    "optim_args": "amsgrad=False",
    "weight_decay": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "neftune_noise_alpha": 5,
    "torch_empty_cache_steps": 1,
    "logging_steps": 2,
    "logging_first_step": False,
    "logging_nan_inf_filter": True,
    "log_level": "error",
    "log_level_replica": "error",
    "run_name": "a run",
    "project": "a project",
    "trackio_space_id": "a/space",
    "trackio_bucket_id": "a/bucket",
    "trackio_static_space_id": "a/static",
    "save_only_model": True,
    "save_steps": 2,
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 13,
    "ddp_broadcast_buffers": False,
    "ddp_static_graph": False,
    "ddp_timeout": 60,
    "debug": "underflow_overflow",
}
# They change the whole process that they are set in, or need a GPU, or modules by name.
MADE_ONLY: dict[str, Any] = {"full_determinism": False, "tf32": None, "optim_target_modules": ["q_proj"]}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_works_or_names_the_option_to_use(name: str, tiny: TinyWorld) -> None:
    reason = training_argument_problem(name)
    if reason is None:
        value = {**WORKING, **MADE_ONLY}[name]
        config = tiny.config("out", training={name: value})
        if name == "lr_scheduler_kwargs":
            config = dataclasses.replace(config, lr_scheduler_type="cosine_with_min_lr")
        elif name == "lr_scheduler_type":
            config = dataclasses.replace(config, training={name: value, "lr_scheduler_kwargs": {"min_lr": 0.0}})
        args = training_arguments(config, num_steps=4, dtype=torch.float32, on_gpu=False)
        assert getattr(args, name) == (["underflow_overflow"] if name == "debug" else value)
        return
    named = re.findall(r"--[a-z][a-z0-9-]+", reason)
    assert set(named) <= option_kinds(TrainConfig).keys()
    assert named or name.startswith(("hub_", "push_"))
    with pytest.raises(ConfigError, match=rf"--set training\.{name}: "):
        checked_fields({name: None})


def test_working_fields_can_be_combined(tiny: TinyWorld, tmp_path: Path) -> None:
    train(tiny.config(tmp_path, max_steps=3, training=WORKING), SilentProgress())
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [2, 3]
    assert lines[-1]["learning_rate"] >= 1e-5
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    assert not (tmp_path / "checkpoint-3" / "optimizer.pt").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adam_epsilon": "tiny"}, "'tiny' is not a number"),
        ({"ddp_timeout": 1.5}, "1.5 is not a whole number"),
        ({"save_only_model": "perhaps"}, "'perhaps' is not true or false"),
        ({"neftune_noise": 5}, "no such field; did you mean 'neftune_noise_alpha'"),
        ({"save_strategy": "best"}, "--save-s"),
    ],
)
def test_unknown_names_and_wrong_types_are_reported(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_fields(fields)


def test_parsed_values_are_converted_to_the_declared_type() -> None:
    fields = {"run_name": 2024, "optim": "sgd", "save_only_model": "yes", "learning_rate": 1, "ddp_timeout": 60.0}
    assert checked_fields(fields) == fields | {"run_name": "2024", "save_only_model": True}
