"""What is frozen, what is adapted, and what is said when a name fits nothing."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from packtool.attention.features import install_tower_hooks
from packtool.attention.parallel.axes import refuse_unshareable_sequences
from packtool.attention.recurrent import recurrent_layers
from packtool.attention.register import ATTENTION_NAME
from packtool.batch.spec import InputSpec, auto_class
from packtool.config.train import TrainConfig
from packtool.encode.families import FAMILIES, MediaLimits, Towers, family_of
from packtool.errors import ConfigError, MismatchError, UnsupportedModelError
from packtool.train.model.load import load_model, resolve_dtype
from packtool.train.model.precision import checkpoint_dtype, count_parameters, loaded_dtype
from packtool.train.model.trainable import adapted_modules, make_trainable, tower_prefixes
from tests.batch.reduced import VISION_MODELS, reduced_config, reduced_model


def run_config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)


def trained_parts(name: str, **settings: Any) -> set[str]:
    """Parts with a parameter that learns."""
    model = make_trainable(reduced_model(name), run_config(**settings))
    towers = tower_prefixes(reduced_model(name), reduced_config(name).model_type)
    prefix = "base_model.model." if settings.get("train_type") == "lora" else ""
    return {towers.part_of(n.removeprefix(prefix)) for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.smoke
@pytest.mark.parametrize("train_type", ["full", "lora"])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_each_model_part_has_a_freeze_option(name: str, train_type: str) -> None:
    flags = {"vision tower": "freeze_vit", "aligner": "freeze_aligner", "language model": "freeze_llm"}
    for part, flag in flags.items():
        others = dict.fromkeys(flags.values(), False)
        assert trained_parts(name, train_type=train_type, **others | {flag: True}) == set(flags) - {part}
        assert trained_parts(name, train_type=train_type, **{option: option != flag for option in others}) == {part}


def test_by_default_only_the_language_model_is_adapted() -> None:
    assert trained_parts("qwen3_vl", train_type="lora") == {"language model"}


def test_all_linear_modules_except_the_head_are_adapted() -> None:
    model = reduced_model("qwen3")
    names = adapted_modules(model, Towers(), run_config())
    kinds = {name.rpartition(".")[2] for name in names}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(names) == 7 * model.config.num_hidden_layers


def test_peft_adapts_exactly_the_chosen_modules() -> None:
    """The vision tower has modules of the same names, and a convolution called proj."""
    for settings in ({"freeze_vit": False}, {"freeze_vit": False, "freeze_llm": True}, {}):
        model = reduced_model("qwen2_5_vl")
        run = run_config(train_type="lora", **settings)
        expected = set(adapted_modules(model, tower_prefixes(model, "qwen2_5_vl"), run))
        adapted = make_trainable(model, run)
        adapted_names = {
            name.removeprefix("base_model.model.").removesuffix(".lora_A")
            for name, module in adapted.named_modules()
            if name.endswith(".lora_A") and len(list(module.parameters()))
        }
        assert adapted_names == expected


def test_target_modules_by_name() -> None:
    model = reduced_model("qwen3")
    names = adapted_modules(model, Towers(), run_config(target_modules=("q_proj", "layers.1.self_attn.v_proj")))
    assert names == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    with pytest.raises(ConfigError, match="wq") as exc_info:
        adapted_modules(model, Towers(), run_config(target_modules=("wq", "wk")))
    assert "gate_proj" in str(exc_info.value.remedy)
    # As in peft: a name without a module has no effect if another one has a module.
    names = adapted_modules(model, Towers(), run_config(target_modules=("q_proj", "wq")))
    assert names == adapted_modules(model, Towers(), run_config(target_modules=("q_proj",)))


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_freezing_everything_is_an_error(train_type: Any) -> None:
    with pytest.raises(ConfigError, match="are frozen"):
        make_trainable(reduced_model("qwen3"), run_config(train_type=train_type, freeze_llm=True))


def test_missing_module_of_a_tower_is_an_error() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no module model\.visual"):
        tower_prefixes(reduced_model("qwen3"), "qwen3_vl")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_loading_routes_the_attention_of_packed_runs(name: str, tmp_path: Path) -> None:
    reduced_model(name).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    model = load_model(str(tmp_path), config, dtype=torch.float32, packing=True)
    assert model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    assert config.get_text_config()._attn_implementation != ATTENTION_NAME
    model = load_model(str(tmp_path), config, dtype=torch.bfloat16, packing=False)
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("num_bytes_left", [0, 100, None])
def test_unreadable_weights_are_named(num_bytes_left: int | None, tmp_path: Path) -> None:
    """A pointer of git lfs, a download that was cut off, nothing."""
    reduced_model("qwen3").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if num_bytes_left is None:
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:num_bytes_left] or b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(MismatchError, match=f"the weights of {tmp_path} cannot be read"):
        load_model(str(tmp_path), AutoConfig.from_pretrained(tmp_path), dtype=torch.float32, packing=True)


def test_a_checkpoint_without_all_weights_is_refused(tmp_path: Path) -> None:
    model = reduced_model("qwen3")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(MismatchError, match=r"lacks 1 weights .* lm_head\.weight"):
        load_model(str(tmp_path), AutoConfig.from_pretrained(tmp_path), dtype=torch.float32, packing=True)


def test_precision() -> None:
    config = reduced_config("qwen3")
    config.dtype = torch.bfloat16
    assert resolve_dtype(config, run_config(), on_gpu=True) == torch.bfloat16
    assert resolve_dtype(config, run_config(), on_gpu=False) == torch.float32
    assert resolve_dtype(config, run_config(torch_dtype="bfloat16"), on_gpu=False) == torch.bfloat16
    assert resolve_dtype(config, run_config(torch_dtype="float16"), on_gpu=True) == torch.float16
    with pytest.raises(ConfigError, match="GPU"):
        resolve_dtype(config, run_config(torch_dtype="float16"), on_gpu=False)
    assert loaded_dtype(torch.float16, config, run_config(train_type="full")) == torch.float32
    assert loaded_dtype(torch.float16, config, run_config(train_type="lora")) == torch.float16
    assert loaded_dtype(torch.bfloat16, config, run_config(train_type="full")) == torch.bfloat16
    assert loaded_dtype(torch.float32, config, run_config(train_type="full")) == torch.float32
    config.dtype = "float16"
    assert checkpoint_dtype(config) == torch.float16
    config.dtype = None
    assert checkpoint_dtype(config) == torch.float32


def test_parameters_are_counted() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert count_parameters(model) == (6, 8)


def test_freeze_ratio_freezes_complete_parameters() -> None:
    """ZeRO-3 leaves empty tensors, which say elsewhere how many numbers they stand for."""
    model, sharded = reduced_model("qwen3"), reduced_model("qwen3")
    for parameter in sharded.parameters():
        parameter.ds_numel = parameter.numel()
        parameter.data = torch.empty(0)
    trainable_flags = []
    for each in (model, sharded):
        make_trainable(each, run_config(train_type="full", freeze_parameters_ratio=0.5))
        trainable_flags.append([parameter.requires_grad for parameter in each.parameters()])
    assert trainable_flags[0] == trainable_flags[1]
    assert set(trainable_flags[0]) == {True, False}


def _is_shared(config: dict[str, Any]) -> bool:
    try:
        refuse_unshareable_sequences(config)
    except UnsupportedModelError:
        return False
    return True


@pytest.mark.parametrize("model_type", [name for family in FAMILIES for name in family.model_types])
def test_family_records_match_the_classes_of_transformers(model_type: str) -> None:
    """Of a model of its type with few layers and no weights: parts, pads and recurrent layers are where it says."""
    # Gemma 4 has no tower unless its configuration names one.
    config = AutoConfig.for_model(model_type, **({"vision_config": {}} if model_type == "gemma4" else {}))
    config = getattr(config, "thinker_config", config)
    parts = [config, *(getattr(config, name) for name in config.sub_configs)]
    for part, name in product(parts, ("num_hidden_layers", "depth", "encoder_layers")):
        if hasattr(part, name):
            setattr(part, name, 1)
    if model_type == "aya_vision":  # the heads that transformers has for it do not divide its width
        config.vision_config.num_attention_heads = 16
    text, family = config.get_text_config(), family_of({"model_type": model_type})
    if getattr(config, "image_token_id", 0) is None:  # which every model of it names
        config.image_token_id = 1
    if model_type.startswith("minicpm"):  # the same
        config.video_token_id = 2
    assert family.title
    assert family.refused or _is_shared(config.to_dict()) != bool(family.whole_pictures or family.unshared)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    towers = tower_prefixes(model, config.model_type)
    assert family_of({"model_type": config.model_type}) is family
    assert bool(towers.vision) == bool(family.kinds)
    assert InputSpec("", config, MediaLimits()).pad_ids.keys() == set(family.kinds)
    assert (text.model_type in family.recurrent_types) == bool(recurrent_layers(model))
    install_tower_hooks(model)
    has_hooks = any(hasattr(module, "_packtool_towers") for module in model.modules())
    assert has_hooks == (bool(family.kinds) and not family.cross_attention)
