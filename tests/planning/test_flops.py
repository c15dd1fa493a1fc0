"""What work is said to cost against the products that torch counts while a real (small) model is trained."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from packtool.config.train import TrainConfig
from packtool.planning.cost import CostModel
from packtool.planning.layers import ModelLayers
from packtool.train.model.trainable import make_trainable, tower_prefixes
from scripts._flop_counter import flop_counter

aten = torch.ops.aten
IMAGE, VIDEO, AUDIO = 90, 91, 92
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
_STATES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 56}
_SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
_VISION = {"depth": 4, "num_heads": 2, **_PATCHES}
_QWEN3_VISION = {
    **_VISION,
    "hidden_size": 32,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "num_position_embeddings": 144,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [0, 2, 9],
}
_WINDOWS = {
    **_VISION,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 80,
    "out_hidden_size": 64,
    "hidden_act": "silu",
    "window_size": 32,
    "fullatt_block_indexes": [1, 9],
}
_AUDIO = {"d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2, "encoder_ffn_dim": 80, "num_mel_bins": 16}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO, "tie_word_embeddings": False}
_OMNI = {**_IDS, "image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": AUDIO}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": _TEXT | _SLIDING | {"use_sliding_window": True},
    "qwen3": _TEXT | {"attention_bias": False},
    "gemma3_text": _TEXT | _SLIDING,
    "mistral": _TEXT | {"sliding_window": 24},
    "qwen3_moe": _TEXT | _EXPERTS,
    "qwen3_5_text": _TEXT | _STATES,
    "qwen3_next": _TEXT | _STATES | _SHARED_EXPERT,
    "qwen2_vl": {
        "text_config": _TEXT,
        "vision_config": {**_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3},
        **_IDS,
    },
    "qwen2_5_vl": {"text_config": _TEXT, "vision_config": _WINDOWS, **_IDS},
    "qwen3_vl": {"text_config": _TEXT | {"attention_bias": False}, "vision_config": _QWEN3_VISION, **_IDS},
    "qwen3_vl_moe": {"text_config": _TEXT | _EXPERTS, "vision_config": _QWEN3_VISION, **_IDS},
    "qwen3_5": {
        "text_config": _TEXT | _STATES,
        "vision_config": {k: v for k, v in _QWEN3_VISION.items() if "deepstack" not in k},
        **_IDS,
    },
    "qwen3_5_moe": {
        "text_config": _TEXT | _STATES | _SHARED_EXPERT,
        "vision_config": {k: v for k, v in _QWEN3_VISION.items() if "deepstack" not in k},
        **_IDS,
    },
    "qwen2_5_omni_thinker": {
        "text_config": _TEXT,
        "vision_config": _WINDOWS,
        "audio_config": {**_AUDIO, "output_dim": 64, "n_window": 100},
        **_OMNI,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": _TEXT | _EXPERTS,
        "vision_config": _QWEN3_VISION,
        "audio_config": {
            **_AUDIO,
            "output_dim": 64,
            "n_window": 50,
            "n_window_infer": 800,
            "downsample_hidden_size": 8,
        },
        **_OMNI,
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"train_type": "full", "freeze_vit": False, "freeze_aligner": False},
    "full, frozen towers": {"train_type": "full"},
    "aligner": {"train_type": "full", "freeze_llm": True, "freeze_aligner": False},
    "towers": {"train_type": "full", "freeze_llm": True, "freeze_vit": False},
    "lora": {"train_type": "lora", "lora_rank": 4},
    "lora everywhere": {"train_type": "lora", "lora_rank": 4, "freeze_vit": False, "freeze_aligner": False},
}
# Some modules and parameters only, of a family of text and of one that sees: TEXT is where the language model lies.
SUBSETS: dict[str, dict[str, Any]] = {
    "queries and values": {"target_modules": ("q_proj", "v_proj")},
    "outputs": {"target_modules": ("o_proj", "down_proj"), "freeze_vit": False},
    "late layers": {"target_regex": r"TEXT\.layers\.[23]\..*(up|down)_proj"},
    "a late block of the tower": {"target_regex": r".*(blocks\.2\.mlp|layers\.0\.self_attn)\..*"},
    "adapters and a whole head": {"target_modules": ("o_proj",), "modules_to_save": ("lm_head",)},
    "adapters and embeddings": {"target_modules": ("k_proj",), "modules_to_save": ("embed_tokens",)},
    "biases": {"target_modules": ("down_proj",), "lora_bias": "all"},
    "without the first layers": {
        "train_type": "full",
        "freeze_parameters": ("TEXT.embed_tokens", "TEXT.layers.0.", "TEXT.layers.1.self_attn", "TEXT.layers.1.input"),
    },
    "the later part": {"train_type": "full", "freeze_parameters_ratio": 0.6, "freeze_vit": False},
    "no MLPs": {"train_type": "full", "freeze_parameters_regex": "mlp", "freeze_vit": False, "freeze_aligner": False},
    "the head": {"train_type": "full", "freeze_llm": True, "trainable_parameters": ("lm_head",)},
    "norms": {"train_type": "full", "freeze_llm": True, "trainable_parameters_regex": r"layers\.2.*norm"},
}
GRIDS = ((1, 8, 24), (1, 8, 8), (2, 8, 8))  # two pictures and a video of two steps
CHUNKS = 8  # of a hundred mel frames each


def _config(family: str) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES[family]}


def _has_vision(family: str) -> bool:
    return "vision_config" in FAMILIES[family]


@cache
def _model(family: str) -> Any:
    config = AutoConfig.for_model(family, **copy.deepcopy(FAMILIES[family]))
    auto: Any = AutoModelForImageTextToText if _has_vision(family) else AutoModelForCausalLM
    # torch does not count the grouped products that experts have otherwise.
    return auto.from_config(config, attn_implementation="sdpa", experts_implementation="eager")


def _inputs(family: str) -> tuple[dict[str, Any], int, int]:
    """A row, and its tokens of pictures and sounds."""
    config = FAMILIES[family]
    inputs: dict[str, Any] = {}
    num_image_tokens = num_audio_tokens = 0
    ids: list[int] = []
    if vision := config.get("vision_config"):
        patches = sum(t * h * w for t, h, w in GRIDS)
        dim = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        inputs |= {"pixel_values": torch.randn(patches, dim), "image_grid_thw": torch.tensor(GRIDS)}
        num_image_tokens = patches // vision["spatial_merge_size"] ** 2
        ids += [IMAGE] * num_image_tokens
    if audio := config.get("audio_config"):
        frames = 100 * CHUNKS
        num_audio_tokens = CHUNKS * (13 if "n_window_infer" in audio else 25)
        inputs["input_features"] = torch.randn(1, audio["num_mel_bins"], frames)
        inputs["feature_attention_mask"] = torch.ones(1, frames, dtype=torch.long)
        ids += [AUDIO] * num_audio_tokens
    ids += [1] * (-len(ids) % 64 or 64)  # what layers with a state work on at once
    inputs["input_ids"] = torch.tensor([ids])
    positions = torch.arange(len(ids)).expand(1, -1)
    inputs["position_ids"] = positions.expand(3, 1, -1) if num_image_tokens else positions
    return inputs, num_image_tokens, num_audio_tokens


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        *((family, name) for family in FAMILIES for name in (SETTINGS if _has_vision(family) else ("full", "lora"))),
        *((family, name) for family in ("qwen3", "qwen3_vl") for name in SUBSETS),
    ],
)
def test_costs_equal_the_flops_that_torch_counts(family: str, setting: str) -> None:
    result, counted = _found_and_counted(family, _run(family, setting))
    assert result == pytest.approx(counted, rel=0.02)


def _run(family: str, setting: str) -> TrainConfig:
    settings = SETTINGS.get(setting) or SUBSETS[setting]
    place = "model.language_model" if _has_vision(family) else "model"
    if family == "qwen3_next" and setting == "lora":  # peft takes its shared expert's modules for the routed experts'
        settings = settings | {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj")}

    def placed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(placed, value))
        return value.replace("TEXT", place) if isinstance(value, str) else value

    settings = {name: placed(value) for name, value in settings.items()}
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", gradient_checkpointing=False, **settings)


def _found_and_counted(family: str, run: TrainConfig) -> tuple[float, float]:
    """FLOPs of a row, as they are planned and as torch counts them."""
    model: Any = make_trainable(copy.deepcopy(_model(family)), run)
    model.train()
    inputs, num_image_tokens, num_audio_tokens = _inputs(family)
    with flop_counter() as counter:
        logits = model(**inputs, use_cache=False).logits
        logits.sum().backward()
    tokens = inputs["input_ids"].shape[1]
    cost = CostModel.of_config(_config(family), run)
    squares = sum(t * (h * w) ** 2 for t, h, w in GRIDS) if num_image_tokens else 0
    towers = cost.towers(np.array(num_image_tokens), np.array(squares), np.array(num_audio_tokens))
    # torch counts the whole square of causal attention, and of windows.
    attention = cost.attention_of(np.array(2 * tokens**2), np.array(2 * tokens**2))
    result = float(cost(np.array(tokens), attention, np.array(tokens), towers))
    counted = counter.get_total_flops()
    if "layer_types" in FAMILIES[family].get("text_config", FAMILIES[family]):
        # Without what layers with a state compute besides products with weights, and without convolutions: torch takes
        # one of single channels for one of all with all, and does not know triangular systems.
        left_out = aten.bmm, aten.convolution, aten.convolution_backward
        counted -= sum(counter.get_flop_counts()["Global"].get(op, 0) for op in left_out)
        layers = ModelLayers.of_config(_config(family))
        trained = run.train_type == "full"
        result -= 3.5 * tokens * sum(step.flops_per_unit for step in layers.language)
        narrow = sum(step.num_products for step in layers.language if step.kind == "convolution")
        result -= 2 * tokens * narrow * (3 if trained and not run.freeze_llm else 2)
        patches = sum(step.num_products for step in layers.vision if step.kind == "convolution")
        result -= 2 * num_image_tokens * patches * (2 if trained and not run.freeze_vit else 1)
    return result, counted


def test_a_layer_with_a_state_costs_its_products_and_two_triangular_systems() -> None:
    inputs, _, _ = _inputs("qwen3_5_text")
    tokens = inputs["input_ids"].shape[1]
    with flop_counter() as counter, torch.no_grad():
        _model("qwen3_5_text")(**inputs, use_cache=False)
    counted = counter.get_flop_counts()["Global"][aten.bmm]
    solved = 2 * 4 * tokens * 64 * (16 + 16)  # layers, heads, half a square of each chunk, twice: multiply and add
    steps = ModelLayers.of_config(FAMILIES["qwen3_5_text"]).language
    assert sum(step.flops_per_unit for step in steps) * tokens == counted + solved


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_have_the_names_and_sizes_of_the_modules(family: str) -> None:
    model = _model(family)
    steps = {step.name: step for step in ModelLayers.of_config(_config(family)).modules if step.kind != "attention"}
    towers = tower_prefixes(model, family)
    # What no layer of the reduced tower feeds has no work.
    unused = re.compile(r".*(merger_list\.2\..*|dt_bias|A_log|(pre|post)_feedforward_layernorm\.weight)")
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not unused.fullmatch(name)
    }
    assert {name for name, step in steps.items() if step.kind == "linear"} == linear
    for name in linear:
        module = model.get_submodule(name)
        assert (steps[name].inputs, steps[name].outputs) == (module.in_features, module.out_features), name
        assert steps[name].part == towers.part_of(name)
    known = {step.weight for step in steps.values()} | {f"{name}.bias" for name in steps}
    others = {name for name, _ in model.named_parameters() if not towers.is_unused(name)} - known
    assert {name for name in others if not unused.fullmatch(name)} == set()
