"""Translations of small configurations of each tool: names, values, defaults, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from packtool.config.data import ExportConfig
from packtool.config.settings import parse_yaml, resolve
from packtool.config.train import TrainConfig
from packtool.rows.forms.segments import PROMPT_FORMATS
from packtool.translate.names import Translation, _convert, as_text
from packtool.translate.read import FIELDS, TOOLS, ForeignConfig, read_command, read_table
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
    assert translated("LLaMA-Factory", {"stage": "pt", "neat_packing": False}).values["packing"] is True
    both = {"stage": "sft", "neat_packing": False, "packing": True}
    assert translated("LLaMA-Factory", both).values["packing"] is True
    assert translated("LLaMA-Factory", {"dataset_dir": "ONLINE", "dataset": "u/a"}).values["dataset"] == ["u/a"]


def test_media_limits_of_llama_factory(tmp_path: Path) -> None:
    """They come before those of the model's processor: the narrower ones apply."""
    values = {"model_name_or_path": "m", "template": "qwen2_vl", "dataset": "a"}
    limits = translated("LLaMA-Factory", values).values
    assert (limits["max_pixels"], limits["video_max_pixels"], limits["fps_max_frames"]) == (768**2, 256**2, 128)
    assert not {"min_pixels", "video_min_pixels"} & set(limits)
    size = {"shortest_edge": 65536, "longest_edge": 300_000}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"min_pixels": 70_000}))
    local = {**values, "model_name_or_path": str(tmp_path), "image_min_pixels": 9999, "video_min_pixels": 80_000}
    local |= {"image_max_pixels": 10**6, "video_max_pixels": 90_000, "video_maxlen": 9}
    translation = translated("LLaMA-Factory", local)
    limits = translation.values
    assert (limits["max_pixels"], limits["video_min_pixels"], limits["video_max_pixels"]) == (300_000, 80_000, 90_000)
    assert limits["fps_max_frames"] == 9
    assert "image_min_pixels" in dict(translation.omitted)
    assert "min_pixels" not in limits
    omni = translated("LLaMA-Factory", {**values, "template": "qwen2_omni"}).values
    assert omni["video_max_pixels"] == 128 * 28 * 28  # the processor's least size of a frame
    for others in ({"template": "intern_vl"}, {"dataset": None}, {"template": "qwen3"}):
        assert "max_pixels" not in translated("LLaMA-Factory", {**values, **others}).values


def test_all_problems_come_at_once() -> None:
    values = {"stage": "dpo", "val_size": 100, "shift_attn": True, "use_unsloth": False, "cutof_len": 3}
    problems = translated("LLaMA-Factory", {**values, "cutoff_len": "long"}).problems
    assert len(problems) == 5
    for part in (
        "give a ratio",
        "use stage sft",
        "shift_attn",
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


@pytest.mark.parametrize(
    ("tool", "values", "reasons"),
    [
        ("ms-swift", {"tuner_type": "reft", "reft_rank": 4}, ["adapters lora, boft"]),
        ("ms-swift", {"tuner_type": "full", "use_galore": True, "galore_quantization": True}, ["galore_quantization"]),
        ("ms-swift", {"init_weights": "lora-ga", "lora_ga_iters": 2, "lora_ga_direction": "ArB2r"}, ["pissa"]),
        ("ms-swift", {"tuner_backend": "unsloth", "use_ray": True, "device_groups": {"a": 1}}, []),
        ("LLaMA-Factory", {"stage": "sft", "use_badam": True, "badam_mode": "ratio"}, ["badam_mode"]),
        ("LLaMA-Factory", {"stage": "sft", "ray_num_workers": 4}, []),
    ],
)
def test_a_method_without_equivalent_is_one_problem(tool: str, values: dict[str, Any], reasons: list[str]) -> None:
    problems = translated(tool, {"dataset": "a.jsonl", **values}).problems
    assert [reason in problem for reason, problem in zip(reasons, problems, strict=True)] == [True] * len(reasons)


@pytest.mark.parametrize(
    ("tool", "values", "settings"),
    [
        ("ms-swift", {"tuner_type": "boft", "boft_block_size": 8}, {"boft_block_size": 8}),
        ("ms-swift", {"tuner_type": "bone", "reft_rank": 16}, {"r": 16}),
        ("LLaMA-Factory", {"finetuning_type": "oft", "oft_rank": 0, "oft_target": "all"}, {"r": 0}),
    ],
)
def test_adapters_other_than_lora(tool: str, values: dict[str, Any], settings: dict[str, Any]) -> None:
    translation = translated(tool, {"model": "m"} | values if tool == "ms-swift" else values)
    assert translation.problems == []
    assert translation.values["adapter_settings"] == settings
    assert {"lora_alpha", "lora_dropout"}.isdisjoint(translation.values)
    lora = translated(tool, {key: value for key, value in values.items() if "_type" not in key})
    assert "adapter_settings" not in lora.values


@pytest.mark.parametrize(
    ("tool", "values", "key"),
    [
        ("ms-swift", {"model": "a/b"}, "model_revision"),
        ("LLaMA-Factory", {"model_name_or_path": "a/b", "stage": "sft"}, "model_revision"),
        ("axolotl", {"base_model": "a/b"}, "revision_of_model"),
        ("TRL", {"model_name_or_path": "a/b"}, "model_revision"),
    ],
)
def test_another_revision_of_a_model_is_not_replaced_by_the_main_one(
    tool: str, values: dict[str, Any], key: str
) -> None:
    assert not any(key in problem for problem in translated(tool, values | {key: "main"}).problems)
    (problem,) = (problem for problem in translated(tool, values | {key: "6299b5a"}).problems if key in problem)
    assert "download this revision" in problem


def test_ms_swift_towers_in_full_beside_adapters() -> None:
    values = {"model": "m", "tuner_type": "lora_llm", "lora_rank": 16, "vit_lr": 1e-5}
    translation = translated("ms-swift", values)
    assert translation.problems == []
    expected = {"tuner_type": None, "lora_rank": 16, "lora_dropout": 0, "modules_to_save": ["vision-tower", "aligner"]}
    assert {name: translation.values.get(name) for name in expected} == expected
    assert translation.values["train_type"] == "lora"


FROZEN: dict[str, Any] = {"finetuning_type": "freeze", "freeze_trainable_layers": 2}


@pytest.mark.parametrize(
    ("values", "trained"),
    [
        ({"freeze_trainable_layers": None}, ["6.mlp", "6.self_attn", "7.mlp", "7.self_attn"]),
        ({"freeze_trainable_layers": -1}, ["0.mlp", "0.self_attn"]),
        ({"freeze_trainable_layers": 99, "freeze_trainable_modules": "mlp"}, [f"{layer}.mlp" for layer in range(8)]),
        (
            {"use_llama_pro": True, "freeze_trainable_modules": "mlp,self_attn"},
            ["3.mlp", "3.self_attn", "7.mlp", "7.self_attn"],
        ),
        ({"freeze_trainable_modules": ["mlp"], "freeze_extra_modules": "lm_head"}, ["6.mlp", "7.mlp", "lm_head"]),
    ],
)
def test_llama_factory_trains_a_few_layers(values: dict[str, Any], trained: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8}')
    translation = translated("LLaMA-Factory", {"model_name_or_path": str(tmp_path)} | FROZEN | values)
    assert translation.problems == []
    assert (translation.values["train_type"], translation.values["freeze_parameters_ratio"]) == ("full", 1)
    parts = [f"{layer}.{module}" for layer in range(8) for module in ("mlp", "self_attn")]
    names = {f"model.layers.{part}.weight": part for part in parts} | {
        "lm_head.weight": "lm_head",
        "model.norm.weight": "norm",
    }
    regex = translation.values["trainable_parameters_regex"]
    assert [part for name, part in names.items() if re.search(regex, name)] == trained


@pytest.mark.parametrize(
    ("config", "values", "problem"),
    [
        ("{}", {}, "its layers are unknown"),
        ('{"text_config": {"num_hidden_layers": 8}}', {}, "its layers are unknown"),
        ('{"num_hidden_layers": 8}', {"use_llama_pro": True, "freeze_trainable_layers": 3}, "does not divide"),
        ('{"num_hidden_layers": 8}', {"finetuning_type": "lora", "use_llama_pro": True}, "--target-regex"),
    ],
)
def test_llama_factory_layers_that_are_unknown(
    config: str, values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    (message,) = translated("LLaMA-Factory", {"model_name_or_path": str(tmp_path)} | FROZEN | values).problems
    assert problem in message


def test_optimizers_with_projected_gradients_keep_their_arguments() -> None:
    translation = translated("ms-swift", {"dataset": "a.jsonl", "use_galore": "true", "galore_rank": "8"})
    assert (translation.values["optim"], translation.problems) == ("galore_adamw", [])
    fields = {
        "optim_target_modules": ["attn", "mlp"],
        "optim_args": "rank=8,update_proj_gap=50,scale=1.0,proj_type=std",
    }
    assert translation.values["training"] == fields
    values = {"dataset": "a", "stage": "sft", "use_apollo": True, "apollo_target": "q_proj,v_proj"}
    fields = translated("LLaMA-Factory", {**values, "apollo_layerwise": True}).values["training"]
    assert fields["optim_target_modules"] == ["q_proj", "v_proj"]
    arguments = "rank=16,scale=32.0,proj=random,proj_type=std,scale_type=channel,update_proj_gap=200"
    assert fields["optim_args"] == arguments
    assert "optim" not in translated("LLaMA-Factory", {**values, "use_apollo": False}).values


@pytest.mark.parametrize(
    ("tool", "values"),
    [
        ("ms-swift", {"enable_dft_loss": "true", "lorap_lr_ratio": "16"}),
        ("LLaMA-Factory", {"stage": "sft", "use_dft_loss": True, "loraplus_lr_ratio": 16.0}),
    ],
)
def test_dynamic_fine_tuning_and_lora_plus_are_translated(tool: str, values: dict[str, Any]) -> None:
    translation = translated(tool, {"dataset": "a.jsonl", **values})
    config = resolve(TrainConfig, {}, file={"model": "m", **translation.values})
    assert (config.enable_dft_loss, config.lorap_lr_ratio, translation.problems) == (True, 16, [])


def test_trl_mixture_of_datasets(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    sources = [{"path": str(tmp_path)}, {"path": "trl-lib/tldr", "name": "a", "split": "train"}]
    rows = translated("TRL", {"datasets": sources}).values["dataset"]
    assert rows == [str(tmp_path / "train.jsonl"), "trl-lib/tldr:a:train"]
    assert translated("TRL", {"datasets": "a,b"}).problems


def test_plugins_of_axolotl_that_change_only_speed_are_left_out() -> None:
    names = ["axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.expert_parallel.ExpertParallelPlugin"]
    assert translated("axolotl", {"datasets": [], "plugins": names}).problems == []
    assert translated("axolotl", {"datasets": [], "plugins": [*names, "my.Plugin"]}).problems


def test_ms_swift_sequence_parallelism_keeps_the_samples_of_a_step() -> None:
    values = {"sequence_parallel_size": "4", "per_device_train_batch_size": "2", "gradient_accumulation_steps": "8"}
    translation = translated("ms-swift", values, environ={"NPROC_PER_NODE": "8"})
    assert (translation.values["samples_per_step"], translation.values["packing"]) == (32, True)
    packed = translated("ms-swift", {**values, "packing": "true"}).values
    assert (packed["packing"], packed["gradient_accumulation_steps"]) == (True, 8)
    resolve(TrainConfig, {}, file={"model": "m", "dataset": "a", **translation.values})


def test_ms_swift_record_of_arguments() -> None:
    values = {"model": "m", "dataset": ["a.jsonl"], "global_world_size": 1, "max_new_tokens": 64, "system": None}
    values |= {"label_smoothing_factor": 0.0, "disable_tqdm": None, "rank": -1, "hub_strategy": "every_save"}
    translation = translated("ms-swift", values)
    assert translation.problems == []
    assert "system" not in translation.values
    assert translated("ms-swift", {**values, "optimizer": "muonclip"}).problems


def test_ms_swift_pretraining_and_caches() -> None:
    source = read_command(["swift", "pt", "--dataset", "a.txt"])
    assert translate(source, TRAIN, "train", {}).values["loss_scale"] == "all"
    caches = {"cached_dataset": ["./c/train"], "cached_val_dataset": "./c/val"}
    assert translated("ms-swift", caches).values["cached_dataset"] == ["./c"]


def test_variables_in_front_of_a_command() -> None:
    environ = {"NPROC_PER_NODE": "2", "MAX_PIXELS": "1000", "SIZE_FACTOR": "8", "WANDB_PROJECT": "p"}
    source = ForeignConfig("ms-swift", {}, environ=environ)
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
    for tool, option, text, condition, source in read_table("defaults.tsv"):
        assert tool in TOOLS.values()
        assert source
        each, cls = FIELDS[option]
        value = parse_yaml(text)
        assert as_text(value) != as_text(each.default) or condition != "-", (tool, option)
        assert_conditions(condition)
        if condition == "-":
            assert vars(resolve(cls, {}, file={"model": "m", "dataset": "a", "output_dir": "o", option: value}))
    for tool, names, values, condition, effect, text in read_table("values.tsv"):
        assert tool in ("*", "packtool", *TOOLS.values())
        assert names, values
        assert_conditions(condition)
        if tool == "packtool":
            assert names in FIELDS
            assert effect == "omit"
        assert effect in ("set", "omit", "stop", "used")
        assert bool(text) is (effect != "used")
        if effect == "set":
            for pair in text.replace("{name}", names.split(" ")[0]).split(" "):
                option, equals, value = pair.partition("=")
                assert option.partition(".")[0] in FIELDS
                assert equals
                assert value == "{}" or _convert(option, value) is not None


def assert_conditions(condition: str) -> None:
    for test in [] if condition == "-" else condition.split(" "):
        key, equals, alternatives = test.partition("=")
        assert equals
        assert alternatives == alternatives.lower()
        if key.startswith("--"):
            assert key.removesuffix("!").removeprefix("--").replace("-", "_") in FIELDS


AXOLOTL: dict[str, Any] = {
    "base_model": "m",
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "bf16": "auto",
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 2,
    "batch_size": 8,
    "num_epochs": 2,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "val_set_size": 0.05,
    "lora_target_linear": True,
    "warmup_steps": 0.1,
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-4,
    "tf32": False,
    "image_size": 512,
    "liger_rope": True,
    "liger_layer_norm": False,
    "wandb_project": None,
    "special_tokens": {"pad_token": "x"},
    "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
    "chat_template": "qwen3",
}
CHAT = {"path": "a.jsonl", "type": "chat_template", "field_messages": "conversations"}


def test_prompts_of_axolotl_types() -> None:
    def of_types(*types: str, **keys: Any) -> Translation:
        entries = [{"path": f"{number}.jsonl", "type": row_type} for number, row_type in enumerate(types)]
        return translated("axolotl", {"base_model": "m", "datasets": entries, **keys})

    assert of_types("alpaca:chat", "alpaca:chat").values["prompt_format"] == "alpaca:chat"
    assert "prompt_format" not in of_types("chat_template").values
    assert "set --prompt-format to different values" in str(of_types("alpaca", "alpaca:phi").problems)
    other = [{"path": "v.jsonl", "type": "alpaca:phi"}]
    assert "set --prompt-format to different values" in str(of_types("alpaca", test_datasets=other).problems)
    for prompt_format in set(PROMPT_FORMATS) - {"plain"}:
        assert of_types(prompt_format).values["prompt_format"] == prompt_format
    unknown = of_types("alpaca.load_no_prompt")
    assert "not by axolotl's prompt" in str(unknown.omitted)


def test_axolotl() -> None:
    mapping = {"role": "from", "content": "value"}
    datasets = [
        {**CHAT, "message_property_mappings": mapping, "roles_to_train": ["assistant"]},
        {"path": "u/alpaca", "type": "alpaca", "split": "train[:20%]"},
    ]
    translation = translated("axolotl", {**AXOLOTL, "datasets": datasets})
    assert translation.problems == []
    values = translation.values
    assert values["dataset"] == ["a.jsonl", "u/alpaca::train#first20%"]
    assert values["prompt_format"] == "alpaca"
    assert (values["train_type"], values["quant_bits"], values["target_modules"]) == ("lora", 4, ["all-linear"])
    assert (values["gradient_accumulation_steps"], values["per_device_train_batch_size"]) == (4, 2)
    assert (values["eval_steps"], values["save_steps"]) == (0.125, 0.5)
    assert (values["warmup_ratio"], values["max_pixels"], values["use_liger_kernel"]) == (0.1, 512 * 512, True)
    assert (values["freeze_vit"], values["lora_dropout"], values["weight_decay"]) == (False, 0, 0)
    assert "bf16" in dict(translation.omitted)
    assert "columns" not in values


def test_muon_and_losses_of_routers(tmp_path: Path) -> None:
    assert translated("LLaMA-Factory", {"use_muon": True}).values["optim"] == "muon"
    assert translated("ms-swift", {"optimizer": "muon"}).values["optim"] == "muon"
    assert any("learning rates of AdamW" in line for line in translated("axolotl", {"optimizer": "muon"}).problems)
    values = {**AXOLOTL, "base_model": str(tmp_path), "model_config": {"output_router_logits": True}}
    assert any("output_router_logits" in line for line in translated("axolotl", values).problems)
    (tmp_path / "config.json").write_text('{"router_aux_loss_coef": 0.02}')
    translation = translated("axolotl", values)
    assert (translation.problems, translation.values["router_aux_loss_coef"]) == ([], 0.02)


def test_expert_parallelism_shards_the_other_weights() -> None:
    values = {**AXOLOTL, "adapter": None, "load_in_4bit": False, "expert_parallel_size": 2, "fsdp_config": {"a": 1}}
    translation = translated("axolotl", values)
    assert translation.problems == []
    assert "fsdp" not in translation.values
    assert "shards the other weights" in dict(translation.omitted)["fsdp_config"]
    assert translated("axolotl", values | {"expert_parallel_size": 1}).values["fsdp"] == ["full_shard"]


def test_uploads() -> None:
    values = translated("axolotl", {**AXOLOTL, "hub_model_id": "us/run", "hub_strategy": "end"}).values
    assert (values["push_to_hub"], values["hub_model_id"], values["hub_strategy"]) == (True, "us/run", "end")
    assert values["hub_private_repo"] is True
    values = translated("TRL", {"push_to_hub": True, "hub_model_id": "us/run", "hub_token": "hf_x"}).values
    assert (values["push_to_hub"], values["hub_model_id"]) == (True, "us/run")
    assert "hub_token" not in values


def test_streamed_epochs_are_not_saved() -> None:
    values = {"model": "m", "dataset": ["d"], "streaming": True, "packing": True, "save_strategy": "epoch"}
    translation = translated("ms-swift", {**values, "max_steps": 9})
    assert "save_strategy" not in translation.values
    assert "--save-steps" in dict(translation.omitted)["save_strategy"]
    assert translated("ms-swift", {**values, "streaming": False}).values["save_strategy"] == "epoch"


@pytest.mark.parametrize(
    ("num_datasets", "shuffles", "is_ordered"), [(1, None, True), (2, False, True), (2, None, False)]
)
def test_axolotl_trains_in_the_order_of_rows(num_datasets: int, shuffles: bool | None, is_ordered: bool) -> None:
    """Unless axolotl shuffles the datasets while it merges them, which it does by default."""
    dataset = {"path": "rows.jsonl", "type": "chat_template"}
    values = {**AXOLOTL, "datasets": [dataset] * num_datasets, "curriculum_sampling": True, "sample_packing": True}
    translation = translated("axolotl", values | {"shuffle_merged_datasets": shuffles})
    if is_ordered:
        assert translation.values["shuffle"] is False
        assert translation.values["packing_algorithm"] == "sequential"
    else:
        assert "shuffle" not in translation.values
        assert "shuffles them in every epoch" in dict(translation.omitted)["curriculum_sampling"]
    assert not translation.problems


def test_first_rows_of_a_stream_are_read_before_training() -> None:
    """ms-swift takes the first rows of a stream, and draws rows otherwise."""
    values = {"model": "m", "dataset": ["a.jsonl#20", "b.jsonl"], "packing": True, "max_steps": 9}
    streamed = translated("ms-swift", {**values, "streaming": True})
    assert streamed.values["dataset"] == ["a.jsonl#first20", "b.jsonl"]
    assert "streaming" not in streamed.values
    assert "the first rows" in dict(streamed.omitted)["streaming"]
    assert translated("ms-swift", values).values["dataset"] == ["a.jsonl#20", "b.jsonl"]


def test_axolotl_drops_short_samples() -> None:
    assert translated("axolotl", {**AXOLOTL, "min_sample_len": 9}).values["min_length"] == 9


def test_warmup_of_axolotl() -> None:
    """axolotl limits its default warmup to 100 steps, and warms up over two steps instead of one."""
    assert translated("axolotl", {}).values["max_warmup_steps"] == 100
    for values in ({"warmup_ratio": 0.1}, {"warmup_steps": 300}, {"warmup_steps": 0}):
        assert "max_warmup_steps" not in translated("axolotl", values).values
    assert translated("axolotl", {"warmup_steps": 1}).values["warmup_steps"] == 2


def test_axolotl_without_validation_and_adapters() -> None:
    values = {**AXOLOTL, "adapter": None, "load_in_4bit": False, "val_set_size": 0, "num_epochs": 1, "datasets": []}
    translation = translated("axolotl", values)
    assert translation.values["train_type"] == "full"
    assert translation.values["save_strategy"] == "epoch"
    assert {"eval_steps", "eval_strategy", "lora_dropout"}.isdisjoint(translation.values)
    assert dict(translation.omitted)["evals_per_epoch"] == "there is no validation split"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"datasets": [{"path": "a", "type": "bradley_terry.chat_template"}]}, "type: bradley_terry"),
        ({"datasets": [{**CHAT, "message_property_mappings": {"role": "r"}}]}, "--dataset-info"),
        ({"datasets": [{**CHAT, "roles_to_train": ["tool"]}]}, "roles_to_train: tool"),
        ({"datasets": [{**CHAT, "split": "train[10%:]"}]}, "only the first rows"),
        ({"datasets": [{**CHAT, "drop_system_message": True}]}, "drop_system_message"),
        ({"val_set_size": 500}, "give a ratio"),
        ({"datasets": ["a.jsonl"]}, "expected a list of objects"),
        ({"datasets": [{**CHAT, "message_property_mappings": 4}]}, "message_property_mappings: 4"),
        ({"fsdp_config": 3}, "expected an object"),
        ({"num_epochs": float("nan"), "saves_per_epoch": 2}, "not a number"),
        ({"adapter": "llama-adapter"}, "give lora or qlora"),
        ({"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "SpectrumPlugin"),
        ({"rl": "dpo"}, "supervised training only"),
        ({"qat": {"weight_dtype": "int8"}}, "--qat rounds linear layers, to int8-int4"),
        ({"qat": {"weight_dtype": "int4", "quantize_embedding": True}}, "--qat rounds linear layers"),
        ({"qat": "int4"}, "expected an object"),
    ],
)
def test_axolotl_keys_without_a_counterpart(values: dict[str, Any], problem: str) -> None:
    (message,) = translated("axolotl", {"base_model": "m", **values}).problems
    assert problem in message


def test_axolotl_and_llama_factory_few_bits_and_entropies() -> None:
    qat = {"activation_dtype": "int8", "weight_dtype": "int4", "group_size": 256, "fake_quant_after_n_steps": 9}
    values = translated("axolotl", {"qat": qat, "use_eaft": True, "eaft_k": 10, "fp8": True}).values
    assert (values["qat"], values["qat_group_size"], values["qat_start_step"]) == ("int8-int4", 256, 9)
    assert (values["eaft_divisor"], values["eaft_alpha"], values["eaft_top_k"], values["fp8"]) == (1.0, 1.0, 10, True)
    for formats in (
        {"activation_dtype": "float8", "weight_dtype": "fp8"},
        {"activation_dtype": "nvfp4", "weight_dtype": "nvfp4"},
    ):
        assert translated("axolotl", {"qat": formats}).values["qat"] in ("fp8", "nvfp4")
    factory = translated(
        "LLaMA-Factory", {"use_eaft_loss": True, "eaft_alpha": 0.5, "fp8": True, "fp8_backend": "auto"}
    )
    assert (factory.values["eaft_alpha"], factory.values["fp8"]) == (0.5, True)
    assert "eaft_alpha" not in translated("LLaMA-Factory", {"eaft_alpha": 0.5}).values
    (problem,) = translated("LLaMA-Factory", {"fp8": True, "fp8_backend": "te"}).problems
    assert "use fp8_backend torchao" in problem
    badam = translated("LLaMA-Factory", {"use_badam": True, "badam_switch_interval": 9, "badam_verbose": 2}).values
    assert (badam["badam_switch_interval"], badam["badam_switch_mode"]) == (9, "ascending")
    assert translated("LLaMA-Factory", {"use_badam": True, "badam_mode": "ratio"}).problems
    assert translated("LLaMA-Factory", {"use_adam_mini": True}).values["optim"] == "adam_mini"
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 4}
    for sharding in ({"fsdp_config": {"reshard_after_forward": True}}, {"deepspeed": "deepspeed_configs/zero3.json"}):
        translation = translated("axolotl", {**sizes, **sharding})
        assert translation.values["sequence_parallel_size"] == 8
        assert not translation.problems
    assert "each GPU would hold all weights" in translated("axolotl", sizes).problems[0]
    both = translated("axolotl", {"torch_compile": True, "liger_rope": True})
    assert "use_liger_kernel" not in both.values


def test_axolotl_targets_sharding_and_columns() -> None:
    pattern = r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"
    values = {"lora_target_modules": pattern, "fsdp_config": {"offload_params": True}, "fsdp_version": 2}
    rows = [{"path": "a.jsonl", "type": "completion", "field": "chapter"}]
    translation = translated("axolotl", {**values, "datasets": rows, "adapter": "lora", "cosine_min_lr_ratio": 0.1})
    assert translation.values["target_regex"] == pattern
    assert translation.values["fsdp"] == ["full_shard", "offload"]
    assert translation.values["columns"] == ["text=chapter"]
    rows.append({"path": "b.jsonl", "type": "completion", "field": "text"})
    assert translated("axolotl", {"datasets": rows}).values["columns"] == ["text=chapter", "text=text"]
    assert translation.values["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    names = translated("axolotl", {"lora_target_modules": ["q_proj", "v_proj"], "deepspeed": "x/zero3_bf16.json"})
    assert names.values["target_modules"] == ["q_proj", "v_proj"]
    assert names.values["deepspeed"] == "zero3"


@pytest.mark.parametrize(("config", "num_added"), [({"vocab_size": 100}, 28), ({"text_config": {"vocab_size": 95}}, 1)])
def test_axolotl_embeddings_that_would_grow(tmp_path: Path, config: dict[str, Any], num_added: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values = {"base_model": str(tmp_path), "resize_token_embeddings_to_32x": True}
    (problem,) = translated("axolotl", values).problems
    assert f"adds {num_added} rows" in problem
    assert translated("axolotl", {**values, "resize_token_embeddings_to_32x": False}).problems == []


@pytest.mark.parametrize("config", [{"vocab_size": 128}, {"text_config": {"vocab_size": 96}}, None])
def test_axolotl_embeddings_that_stay(tmp_path: Path, config: dict[str, Any] | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    translation = translated("axolotl", {"base_model": str(tmp_path), "resize_token_embeddings_to_32x": True})
    assert translation.problems == []
    assert "resize_token_embeddings_to_32x" in dict(translation.omitted)


@pytest.mark.parametrize(("shuffles", "buffer_size"), [(None, 500), (True, 500), (False, 1)])
def test_axolotl_streaming_buffer(shuffles: bool | None, buffer_size: int) -> None:
    values = {"streaming": True, "sample_packing": True, "streaming_multipack_buffer_size": 500, "max_steps": 9}
    translation = translated("axolotl", {**values, "shuffle_merged_datasets": shuffles})
    assert translation.problems == []
    assert (translation.values["packing_interval"], translation.values["shuffle_buffer_size"]) == (500, buffer_size)
    assert "packing_window" not in translation.values
    cached = translated("axolotl", {**values, "streaming": False})
    assert (cached.values["packing_window"], cached.values.get("packing_interval")) == (500, None)


@pytest.mark.parametrize(
    ("tool", "values"),
    [
        ("LLaMA-Factory", {"torch_compile_mode": "max-autotune"}),
        ("axolotl", {"eta_min": 7e-7}),
        ("axolotl", {"test_value": True}),
        ("axolotl", {"plugins": ["axolotl.integrations.swanlab.SwanLabPlugin"]}),
        ("axolotl", {"do_causal_lm_eval": True, "eval_causal_lm_metrics": ["perplexity"], "eval_table_size": 2}),
        ("axolotl", {"debug": True}),
    ],
)
def test_settings_that_do_not_change_training(tool: str, values: dict[str, Any]) -> None:
    translation = translated(tool, values)
    assert translation.problems == []
    assert set(values) <= {name for name, _ in translation.omitted}
    assert not set(values) & set(translation.values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"eval_causal_lm_metrics": ["perplexity", "chrf"]}, "generates no text"),
        ({"dataset_exact_deduplication": True}, "--on-duplicates drop removes them"),
        ({"plugins": ["some.OtherPlugin"]}, "no plugins"),
        ({"nvfp4_merge_aware": True}, "packtool does not quantize to NVFP4"),
    ],
)
def test_axolotl_settings_that_stay_refused(values: dict[str, Any], problem: str) -> None:
    (message,) = translated("axolotl", {"base_model": "m", **values}).problems
    assert problem in message


def test_trl(tmp_path: Path) -> None:
    values = {"model_name_or_path": "m", "dataset_name": "u/a", "use_peft": True, "lora_r": "32", "report_to": "none"}
    translation = translated("TRL", {**values, "dataset_config": "en", "eval_strategy": "steps"})
    assert translation.problems == []
    config = resolve(TrainConfig, {}, file=translation.values)
    assert (config.dataset, config.val_dataset) == (("u/a:en:train",), ("u/a:en:test",))
    assert (config.train_type, config.lora_rank, config.target_modules) == ("lora", 32, ("q_proj", "v_proj"))
    assert (config.learning_rate, config.lr_scheduler_type, config.bf16) == (2e-5, "linear", True)
    assert (config.loss_scale, config.packing, config.max_length) == ("all", False, 1024)
    assert translated("TRL", {**values, "use_peft": False}).values["train_type"] == "full"
    assert "bf16" not in translated("TRL", {**values, "fp16": True}).values
    answers = translated("TRL", {**values, "assistant_only_loss": True, "completion_only_loss": False})
    assert (answers.problems, answers.values["loss_scale"]) == ([], "default")
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    completions = translated("TRL", {**values, "dataset_name": str(file)})
    assert completions.values["loss_scale"] == "default"
    assert completions.values["dataset"] == [str(file)]
    assert completions.values["prompt_format"] == "plain"
    file.write_text('{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant"}]}\n')
    messages = translated("TRL", {**values, "dataset_name": str(file)})
    assert "prompt_format" not in messages.values


@pytest.mark.parametrize(
    ("tool", "values", "expected"),
    [
        ("ms-swift", {}, "default+train_newline"),
        ("ms-swift", {"loss_scale": "last_round"}, "last_round+train_newline"),
        ("ms-swift", {"loss_scale": "all"}, "all"),
        ("ms-swift", {"cached_dataset": "cache"}, None),
        ("LLaMA-Factory", {"stage": "sft"}, "default+train_newline"),
        ("LLaMA-Factory", {"stage": "sft", "train_on_prompt": True}, "all"),
        ("axolotl", {}, None),
    ],
)
def test_newlines_after_answers_are_trained_as_in_the_other_tool(
    tool: str, values: dict[str, Any], expected: str | None
) -> None:
    assert translated(tool, values).values.get("loss_scale") == expected
