"""Planned FLOPs of every family and of text models, in the forward pass, against those that torch counts."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from packtool.batch.spec import auto_class
from packtool.config.data import MediaOptions
from packtool.config.model import LearningOptions
from packtool.encode.encoded import EncodedImage, patch_squares
from packtool.encode.families import FAMILIES, family_of, media_encoding
from packtool.encode.families.processor import process_images
from packtool.encode.model_files import ModelFiles
from packtool.media.measure import load_image
from packtool.planning.cost import ALL_WEIGHTS, CostModel
from packtool.planning.module_cost import ModuleCost
from packtool.planning.tower_layers import vision_modules
from packtool.rows.sample import MediaRef
from scripts._flop_counter import flop_counter
from tests.encode.other_families import model_of

NUM_TOKENS = 128
FROZEN = LearningOptions(train_type="full", freeze_llm=True)
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "ffn_dim": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_TEXT |= dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2)
# Sizes that only some models have: set where the default is not 0 or None.
_SWITCHES = {"sliding_window": 24, "first_k_dense_replace": 1}
_SWITCHES |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
_TEXT |= _SWITCHES
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_LATENT |= {"num_key_value_heads": 4, "head_dim": 8}
_SPECIAL = {
    "dots1": {"n_routed_experts": 4},
    "modernbert-decoder": {"num_hidden_layers": 6},  # the dense layer of its head is not counted
}
LATENT_TYPES = ["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]
_TEXT_TYPES = """
    afmoe apertus arcee aria_text beam bitnet cohere cohere2 cohere2_moe cwm dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe flex_olmo gemma gemma3_text glm glm4 glm4_moe gpt_neox granite granitemoe granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama
    mellum minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2
"""
IMAGE_FAMILIES = [
    name
    for family in FAMILIES
    if family.kinds == ("image",) or family.videos_as_pictures
    for name in family.model_types
]
NATIVE_FAMILIES = ["exaone4_5", "hyperclovax_vision_v2", "kimi_k25", "lighton_ocr", "minicpm_ocr", "minicpmv4_6"]
NATIVE_FAMILIES += ["mistral3", "pixtral", "video_llama_3", "glm4v", "glm4v_moe", "glm46v", "glm_ocr"]
# (height, width) in pixels, without incomplete tokens or attention windows at the edges, which are only estimated.
SIZES = ((56, 112), (224, 112), (56, 56))


def _small_text_config(name: str) -> Any:
    """A configuration of three layers, with each kind of layer and of MLP that the default has."""
    default = type(AutoConfig.for_model(name))()
    settings = default.to_dict()
    sizes = _TEXT | (_LATENT if name in LATENT_TYPES else {})
    small = {key: size for key, size in sizes.items() if settings.get(key) or key in settings.keys() - _SWITCHES}
    small |= {key: sizes[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    small |= _SPECIAL.get(name, {})
    for key in ("layer_types", "mlp_layer_types"):
        if kinds := settings.get(key):
            small[key] = [kinds[0], *([kinds[-1]] * (small["num_hidden_layers"] - 1))]
    return type(default)(**small)


def _split(counter: FlopCounterMode) -> tuple[int, int]:
    """The counted FLOPs of products with weights, and of attention."""
    flops = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in flops.items() if "attention" in str(op) or "bmm" in str(op))
    return sum(flops.values()) - attention, attention


@pytest.mark.parametrize("name", [*_TEXT_TYPES.split(), *LATENT_TYPES])
def test_text_models(name: str) -> None:
    config = _small_text_config(name)
    # torch does not count the grouped products that experts have otherwise.
    model: Any = AutoModelForCausalLM
    model = model.from_config(config, attn_implementation="sdpa", experts_implementation="eager").eval()
    with torch.no_grad(), flop_counter() as counter:
        model(input_ids=torch.arange(2, 2 + NUM_TOKENS)[None] % 90, use_cache=False)
    cost = CostModel.of_config(config.to_dict(), FROZEN)
    linear = (cost.per_token + cost.per_target_token) * NUM_TOKENS
    squares = np.array(2 * NUM_TOKENS**2)  # torch counts the square of causal attention, and of windows
    assert (linear, cost.attention_of(squares, squares)) == pytest.approx(_split(counter), rel=0.02)


def _noise(height: int, width: int) -> bytes:
    """A PNG file."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.parametrize("name", [*IMAGE_FAMILIES, "pixtral"])
def test_towers(name: str, drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory, processor = model_of(name, drawn_data, tmp_path_factory.getbasetemp() / "flops")
    files = ModelFiles.load(str(directory))
    encoding = media_encoding(files, MediaOptions())
    config = AutoConfig.from_pretrained(directory)
    model = auto_class(config).from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    inputs = family_of(files.config).processor_inputs
    for size in SIZES:
        data = _noise(*size)
        picture = load_image(None, data)
        image = encoding.measure("image", MediaRef(None, data))
        assert isinstance(image, EncodedImage)
        if inputs:
            _, outputs = process_images(processor, [[picture]])
        else:
            outputs = processor.image_processor(images=[picture], return_tensors="pt")
        names = inputs or ("pixel_values", "image_grid_thw")
        tensors = {key: torch.as_tensor(outputs[key]) for key in names if key in outputs}
        with flop_counter() as counter:
            features = model.model.get_image_features(**tensors).pooler_output
            forward = _split(counter)
            torch.cat([*features]).sum().backward()
        planned = _planned(config, FROZEN, image)
        assert planned == pytest.approx(forward, rel=0.02), size
        assert _planned(config, ALL_WEIGHTS, image) == pytest.approx(_split(counter), rel=0.02), size
        # Older caches have no grids. Tokens give the number of tiles, except where padding of tiles has no tokens.
        legacy = sum(_planned(config, FROZEN, dataclasses.replace(image, grid=())))
        has_exact_tiles = name not in (*NATIVE_FAMILIES, "llava_next", "llava_next_video", "llava_onevision")
        assert legacy == pytest.approx(sum(planned)) if has_exact_tiles else legacy > 0


def _planned(config: PreTrainedConfig, learning: LearningOptions, image: EncodedImage) -> tuple[float, float]:
    """The planned FLOPs of products with weights, and of attention, of a picture in the towers."""
    tokens, squares = np.array(image.num_tokens), np.array(patch_squares(image.grid))
    total = float(CostModel.of_config(config.to_dict(), learning).towers(tokens, squares))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packtool.planning.layers.vision_modules", _without_attention)
        linear = float(CostModel.of_config(config.to_dict(), learning).towers(tokens, squares))
    return linear, total - linear


def _without_attention(config: dict[str, Any]) -> list[ModuleCost]:
    return [module for module in vision_modules(config) if module.kind != "attention"]
