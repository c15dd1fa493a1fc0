"""Translations of small configurations of each tool: names, values, defaults, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from packtool.config.data import ExportConfig
from packtool.config.settings import parse_yaml, resolve
from packtool.config.train import TrainConfig
from packtool.translate.names import _FIELDS, Translation, _fit, _table, as_text
from packtool.translate.read import TOOLS, ForeignConfig
from packtool.translate.tools import translate

pytestmark = pytest.mark.smoke
TRAIN = [field.name for field in dataclasses.fields(TrainConfig)]


def translated(tool: str, values: dict[str, Any], environ: dict[str, str] | None = None, **fields: Any) -> Translation:
    return translate(ForeignConfig(tool, values, **fields), TRAIN, "train", environ or {})


def test_llama_factory() -> None:
    values = {
        "model_name_or_path": "m",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": 16,
        "lora_target": "q_proj,v_proj",
        "dataset": "a,b",
        "dataset_dir": "d",
        "max_samples": 10,
        "val_size": 0.1,
        "cutoff_len": 4096,
        "template": "qwen3",
        "report_to": "none",
        "flash_attn": "fa2",
        "bf16": True,
    }
    translation = translated("LLaMA-Factory", values)
    assert translation.problems == []
    config = resolve(TrainConfig, {}, file=translation.values)
    assert (config.model, config.dataset_info) == ("m", "d")
    assert config.dataset == ("a#first10", "b#first10")
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout) == (16, 32, 0)
    assert config.target_modules == ("q_proj", "v_proj")
    assert (config.max_length, config.packing, config.truncation_strategy) == (4096, False, "right")
    assert (config.learning_rate, config.lr_scheduler_type, config.warmup_ratio) == (5e-5, "linear", 0)
    assert (config.num_train_epochs, config.weight_decay, config.per_device_train_batch_size) == (3, 0, 8)
    assert (config.split_dataset_ratio, config.attn_impl) == (0.1, "flash_attention_2")
    assert {name for name, _ in translation.omitted} == {"stage", "do_train", "template", "report_to"}
    assert {"lora_alpha", "learning_rate", "packing"} <= set(translation.defaults)


def test_llama_factory_packing_and_pretraining() -> None:
    packed = translated("LLaMA-Factory", {"stage": "sft", "neat_packing": True, "cutoff_len": 2048, "dataset": "a"})
    assert (packed.values["packing"], packed.values["max_length"]) == (True, 2047)
    assert "truncation_strategy" not in packed.values
    texts = translated("LLaMA-Factory", {"stage": "pt", "dataset": "a"})
    assert (texts.values["packing"], texts.values["truncation_strategy"]) == (True, "split")
    assert texts.values["dataset_info"] == "data"
    assert translated("LLaMA-Factory", {"dataset_dir": "ONLINE", "dataset": "u/a"}).values["dataset"] == ["u/a"]


def test_all_problems_come_at_once() -> None:
    values = {"stage": "dpo", "val_size": 100, "use_dft_loss": True, "use_unsloth": False, "cutof_len": 3}
    problems = translated("LLaMA-Factory", {**values, "cutoff_len": "long"}).problems
    assert len(problems) == 5
    for part in (
        "give a ratio",
        "use stage sft",
        "use_dft_loss",
        "did you mean 'cutoff_len'",
        "'long' is not a number",
    ):
        assert any(part in problem for problem in problems), part


def test_ms_swift() -> None:
    values = {"model": "m", "dataset": ["a.jsonl"], "tuner_type": "full", "attn_impl": "flash_attn", "model_name": "x"}
    translation = translated("ms-swift", values, {"NPROC_PER_NODE": "4"})
    config = resolve(TrainConfig, {}, file=translation.values)
    assert (config.train_type, config.packing, config.num_train_epochs) == ("full", False, 3)
    assert (config.warmup_ratio, config.adam_beta2, config.gradient_accumulation_steps) == (0, 0.95, 4)
    assert translation.problems == []
    cognition = translated("ms-swift", {**values, "dataset": "swift/self-cognition#500"})
    assert ["model_name" in problem for problem in cognition.problems] == [True]


def test_ms_swift_sequence_parallelism_keeps_the_samples_of_a_step() -> None:
    values = {"sequence_parallel_size": "4", "per_device_train_batch_size": "2", "gradient_accumulation_steps": "8"}
    translation = translated("ms-swift", values, environ={"NPROC_PER_NODE": "8"})
    assert (translation.values["samples_per_step"], translation.values["packing"]) == (32, True)
    resolve(TrainConfig, {}, file={"model": "m", "dataset": "a", **translation.values})


def test_ms_swift_record_of_arguments() -> None:
    values = {"model": "m", "dataset": ["a.jsonl"], "global_world_size": 1, "max_new_tokens": 64, "system": None}
    values |= {"label_smoothing_factor": 0.0, "disable_tqdm": None, "rank": -1, "hub_strategy": "every_save"}
    translation = translated("ms-swift", values)
    assert translation.problems == []
    assert "system" not in translation.values
    assert translated("ms-swift", {**values, "enable_dft_loss": True}).problems


def test_ms_swift_pretraining_and_caches() -> None:
    translation = translated("ms-swift", {"dataset": "a.txt"}, is_pretraining=True)
    assert translation.values["loss_scale"] == "all"
    caches = {"cached_dataset": ["./c/train"], "cached_val_dataset": "./c/val"}
    assert translated("ms-swift", caches).values["cached_dataset"] == ["./c"]


def test_variables_in_front_of_a_command() -> None:
    environ = {"NPROC_PER_NODE": "2", "MAX_PIXELS": "1000", "SIZE_FACTOR": "8", "WANDB_PROJECT": "p"}
    source = ForeignConfig("ms-swift", {}, environ=environ, num_processes=4)
    translation = translate(source, TRAIN, "train", {})
    assert translation.values["max_pixels"] == "1000"
    assert translation.environ == {"NPROC_PER_NODE": "2", "WANDB_PROJECT": "p"}
    assert translation.values["gradient_accumulation_steps"] == 8
    assert ["SIZE_FACTOR" in problem for problem in translation.problems] == [True]


def test_two_names_of_one_option_may_not_differ() -> None:
    values = {"seed": 1, "data_seed": 2}
    assert "different values" in translated("LLaMA-Factory", values).problems[0]
    assert translated("LLaMA-Factory", {"seed": 1, "data_seed": 1}).problems == []


def test_an_export_of_a_training_file_needs_its_own_directory() -> None:
    source = ForeignConfig("LLaMA-Factory", {"output_dir": "saves", "dataset": "a", "learning_rate": 1.0})
    options = [field.name for field in dataclasses.fields(ExportConfig)]
    translation = translate(source, options, "export", {})
    assert {"output_dir", "learning_rate"}.isdisjoint(translation.values)
    assert "output_dir" in dict(translation.omitted)


def test_tables_name_options_and_tools_that_exist() -> None:
    for tool, option, text, condition, source in _table("defaults.tsv"):
        assert tool in TOOLS.values()
        assert source
        each, cls = _FIELDS[option]
        value = parse_yaml(text)
        assert as_text(value) != as_text(each.default) or condition != "-", (tool, option)
        assert vars(resolve(cls, {}, file={"model": "m", "dataset": "a", "output_dir": "o", option: value}))
    for tool, names, values, effect, text in _table("values.tsv"):
        assert tool in ("*", *TOOLS.values())
        assert names, values
        assert effect in ("set", "omit", "stop")
        if effect == "set":
            for pair in text.split(" "):
                option, equals, value = pair.partition("=")
                assert option in _FIELDS
                assert equals
                assert value == "{}" or _fit(option, value) is not None
