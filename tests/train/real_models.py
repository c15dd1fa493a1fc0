"""Reduced models of every family: for real tokenizers, templates and processor settings, or for random tokens."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    Qwen3_5MoeConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)

from tests.attention.hybrids import hybrid_config
from tests.batch.reduced import reduced_config

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ON_TEXT = ("qwen2", "qwen2_sliding", "qwen3", "qwen3_moe", "qwen3_next")
THAT_SEE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
THAT_HEAR = ("qwen2.5-omni", "qwen3-omni")
ADAPTED = ["q_proj", "v_proj", "qkv", "in_proj_qkv", "down_proj"]
FAMILIES = ("qwen2.5-vl", "qwen3-vl", "qwen2.5-omni", "qwen3-omni")

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 2,
}
_VISION = {"depth": 2, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
_AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "num_hidden_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "output_dim": 64,
    "downsample_hidden_size": 8,
}


def reduced(config: dict[str, Any], family: str) -> None:
    """Make a ``config.json``'s model small, in place."""
    inner = config.get("thinker_config", config)
    text = inner.get("text_config", inner)
    text |= _TEXT
    if "num_experts" in text:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text["rope_scaling"]["mrope_section"] = [4, 2, 2]
    inner["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    vision = inner["vision_config"] | _VISION
    vision |= {"embed_dim": 32} if family == "qwen2.5-omni" else {}
    vision |= {"hidden_size": 32}
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = [0]
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = [1]
    inner["vision_config"] = vision
    if "audio_config" in inner:
        inner["audio_config"] |= _AUDIO


@cache
def small_model(drawn_data: Path, family: str, folder: Path) -> Path:
    """A directory with weights that can be exported for and trained."""
    target = folder / family
    shutil.copytree(drawn_data / "tokenizers" / family, target)
    for path in (target, *target.iterdir()):
        path.chmod(0o755)
    config = json.loads((target / "config.json").read_text())
    reduced(config, family)
    (target / "config.json").write_text(json.dumps(config))
    loaded = AutoConfig.from_pretrained(target)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(getattr(loaded, "thinker_config", loaded)).float()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(target)
    # Saving a thinker writes its own config over the whole model's, which the real checkpoints have.
    (target / "config.json").write_text(json.dumps(config))
    return target


def config_of(name: str, drawn_data: Path, folder: Path) -> PreTrainedConfig:
    if name in THAT_HEAR:
        settings = json.loads((drawn_data / "tokenizers" / name / "config.json").read_text())
        reduced(settings, name)
        (folder / "config.json").write_text(json.dumps(settings))
        thinker: PreTrainedConfig = AutoConfig.from_pretrained(folder).thinker_config
        return thinker
    if name == "qwen3_moe":
        return Qwen3MoeConfig(**reduced_config("qwen3").to_dict() | {"model_type": "qwen3_moe"} | EXPERTS)
    if name == "qwen3_vl_moe":
        settings = reduced_config("qwen3_vl").to_dict() | {"model_type": "qwen3_vl_moe"}
        return Qwen3VLMoeConfig(**with_experts(settings, "qwen3_vl_moe"))
    if name == "qwen3_5_moe":
        settings = hybrid_config("qwen3_5").to_dict() | {"model_type": "qwen3_5_moe"}
        return Qwen3_5MoeConfig(**with_experts(settings, "qwen3_5_moe"))
    return hybrid_config(name) if name in ("qwen3_next", "qwen3_5") else reduced_config(name)


def with_experts(settings: dict[str, Any], name: str) -> dict[str, Any]:
    settings["text_config"] |= EXPERTS | {"model_type": f"{name}_text", "shared_expert_intermediate_size": 16}
    settings["vision_config"]["model_type"] = f"{name}_vision" if name == "qwen3_5_moe" else name
    return settings


def has_experts(config: PreTrainedConfig) -> bool:
    """Whether the language model has routed experts."""
    return bool(getattr(config.get_text_config(), "num_experts", 0))


@cache
def traces_float32_experts() -> bool:
    """Whether torch gives shapes for grouped products of float32, without which experts cannot be traced."""
    tokens, weights = torch.empty(8, 16, device="meta"), torch.empty(2, 16, 16, device="meta")
    try:
        torch.nn.functional.grouped_mm(tokens, weights, offs=torch.empty(2, dtype=torch.int32, device="meta"))
    except RuntimeError:
        return False
    return True
