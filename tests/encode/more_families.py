"""Reduced processors and configurations of further families that encode through their own processor, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as t

VOCABULARY = 1024
TEXT = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY + 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SEES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SEES |= {"image_size": 56, "patch_size": 14}

Tokenizer = Callable[..., Any]
"""A small tokenizer with control tokens of these names."""
_IMAGE, _VIDEO = {"image_token": "<image>"}, {"video_token": "<video>"}
_QWEN = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}}


def _aya(tokenizer: Tokenizer) -> Any:
    names = {"start": "<|START_OF_IMG|>", "end": "<|END_OF_IMG|>", "patch": "<|IMG_PATCH|>", **_IMAGE}
    images = t.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    return t.AyaVisionProcessor(images, tokenizer(**names), patch_size=14, img_size=56, downsample_factor=2)


def _cohere(tokenizer: Tokenizer) -> Any:
    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<patch>", "img_line_break_token": "<break>"}
    images = t.Cohere2VisionImageProcessor(size={"height": 56, "width": 56}, patch_size=2, max_patches=4)
    return t.Cohere2VisionProcessor(images, tokenizer(**names))


def _exaone(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    videos = t.Qwen2VLVideoProcessor(**_QWEN, num_frames=16, do_sample_frames=True)
    return t.Exaone4_5_Processor(t.Qwen2VLImageProcessor(**_QWEN), tokenizer(**names), videos)


def _kimi(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
    names |= {name: f"<|media_{name}|>" for name in ("begin", "content", "end")}
    sizes = {"max_patches": 64, "size": {"max_height": 112, "max_width": 112}}
    videos = t.Kimi_K25VideoProcessor(**sizes)
    return t.Kimi_K25Processor(t.Kimi_K25ImageProcessor(**sizes), tokenizer(**names), videos)


def _lighton(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "<|image_pad|>", "image_break_token": "<break>", "image_end_token": "<end>"}
    images = t.PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14})
    return t.LightOnOcrProcessor(images, tokenizer(**names), patch_size=14, spatial_merge_size=2)


def _minicpm(kind: str, tokenizer: Tokenizer) -> Any:
    names = {**_IMAGE, **_VIDEO, "image_start_token": "<img>", "image_end_token": "</img>"}
    names |= {"slice_start_token": "<slice>", "slice_end_token": "</slice>"}
    names |= {"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"}
    settings = {"scale_resolution": 112, "max_slice_nums": 4, "patch_size": 14}
    images = getattr(t, f"MiniCPM{kind}ImageProcessor")(**settings)
    videos = getattr(t, f"MiniCPM{kind}VideoProcessor")(**settings)
    return getattr(t, f"MiniCPM{kind}Processor")(images, videos, tokenizer(**names))


def _next_video(tokenizer: Tokenizer) -> Any:
    images = t.LlavaNextImageProcessor(
        size={"shortest_edge": 56},
        crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
    )
    return t.LlavaNextVideoProcessor(
        t.LlavaNextVideoVideoProcessor(),
        images,
        tokenizer(**_IMAGE, **_VIDEO),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _ovis(tokenizer: Tokenizer) -> Any:
    marks = {name: f"<IMG_{name}>" for name in ("START", "ATOM", "GRID", "COL", "ROW", "END")}
    images = t.Ovis2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4)
    return t.Ovis2Processor(images, tokenizer(**_IMAGE, **marks), image_seq_length=4)


def _pixtral(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    images = t.PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14})
    return t.PixtralProcessor(images, tokenizer(**names), patch_size=14)


def _video_llama(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    images = t.VideoLlama3ImageProcessor(**_QWEN, merge_size=1)
    videos = t.VideoLlama3VideoProcessor(**_QWEN, do_sample_frames=True, num_frames=4)
    return t.VideoLlama3Processor(images, tokenizer(**names), videos)


def _clova(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    return t.HyperCLOVAXVisionV2Processor(
        t.Qwen2VLImageProcessor(**_QWEN),
        tokenizer(**names),
        t.Qwen2VLVideoProcessor(**_QWEN, num_frames=16, do_sample_frames=True),
    )


def _llava(tokenizer: Tokenizer) -> Any:
    images = t.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return t.LlavaProcessor(
        images,
        tokenizer(**_IMAGE),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _gemma4(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    names |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    images = t.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70)
    videos = t.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70, num_frames=4)
    return t.Gemma4Processor(t.Gemma4AudioFeatureExtractor(), images, tokenizer(**names), videos)


def _mllama(tokenizer: Tokenizer) -> Any:
    images = t.MllamaImageProcessor(size={"height": 56, "width": 56}, max_image_tiles=4)
    marked = tokenizer(image_token="<|image|>")
    marked.bos_token = "<|im_start|>"  # in every row, so that the processor adds none
    return t.MllamaProcessor(images, marked)


def _llama4(tokenizer: Tokenizer) -> Any:
    names = {"image_token": "<|image|>", "start": "<|image_start|>", "end": "<|image_end|>", "patch": "<|patch|>"}
    names |= {"tile_x": "<|tile_x_separator|>", "tile_y": "<|tile_y_separator|>"}
    images = t.Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    return t.Llama4Processor(images, tokenizer(**names), patch_size=14)


PROCESSORS: dict[str, Callable[[Tokenizer], Any]] = {
    "aya_vision": _aya,
    "cohere2_vision": _cohere,
    "exaone4_5": _exaone,
    "gemma4": _gemma4,
    "hyperclovax_vision_v2": _clova,
    "kimi_k25": _kimi,
    "lighton_ocr": _lighton,
    "llama4": _llama4,
    "llava_next_video": _next_video,
    "minicpm_ocr": lambda tokenizer: _minicpm("Ocr", tokenizer),
    "minicpmv4_6": lambda tokenizer: _minicpm("V4_6", tokenizer),
    "mllama": _mllama,
    "ovis2": _ovis,
    "pixtral": _pixtral,
    "video_llama_3": _video_llama,
    "vipllava": _llava,
}
PADS = {
    "aya_vision": "<|IMG_PATCH|>",
    "llama4": "<|patch|>",
    "ovis2": "<IMG_ATOM>",
}
"""The token of a picture's pieces, where it is not the processor's ``image_token``."""
_SIGLIP = SEES | {"model_type": "siglip_vision_model"}
_PATCHES = {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
_PATCHES |= {"window_size": 56, "fullatt_block_indexes": [1]}
_RECURRENT = TEXT | {
    "model_type": "qwen3_5_text",
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]},
}
_RECURRENT["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_interleaved": True}
_MINICPM = {"vision_config": SEES | {"image_size": 112}, "text_config": _RECURRENT, "insert_layer_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "vision_config": _SIGLIP | {"vision_use_head": False},
        "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 2},
        "downsample_factor": 2,
    },
    "cohere2_vision": {
        "vision_config": _SIGLIP | {"vision_use_head": False},
        "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 2},
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
    },
    "exaone4_5": {
        "vision_config": _PATCHES | {"model_type": "exaone4_5_vision", "num_key_value_heads": 2},
        "text_config": TEXT | {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 2},
    },
    "hyperclovax_vision_v2": {
        "vision_config": _PATCHES | {"model_type": "qwen2_5_vl_vision"},
        "text_config": TEXT | {"model_type": "hyperclovax"},
    },
    # Its window is narrower than a picture; half of the layers share keys and values, and heads have two sizes.
    "gemma4": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256},
        "text_config": TEXT
        | {"model_type": "gemma4_text", "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16}
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "attention_k_eq_v": True}
        | {"vocab_size_per_layer_input": VOCABULARY + 64, "sliding_window": 20}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "use_bidirectional_attention": "vision"},
    },
    "kimi_k25": {
        "vision_config": SEES | {"pos_emb_height": 4, "pos_emb_width": 4},
        "text_config": TEXT
        | {
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        "projection_hidden_size": 32,
    },
    "lighton_ocr": {
        "vision_config": SEES | {"model_type": "pixtral", "head_dim": 16, "image_size": 112},
        "text_config": TEXT | {"model_type": "qwen3", "head_dim": 8},
    },
    # Chunks and steps of the temperature are shorter than a sample.
    "llama4": {
        "vision_config": SEES
        | {"intermediate_size": 128, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        "text_config": TEXT
        | {"model_type": "llama4_text", "intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8}
        | {"no_rope_layers": [1, 0], "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.5, "moe_layers": [1]},
    },
    "llava_next_video": {
        "vision_config": SEES | {"model_type": "clip_vision_model"},
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
    },
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "mllama": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "attention_heads": 2}
        | {"num_global_layers": 1, "image_size": 56, "patch_size": 14, "max_num_tiles": 4}
        | {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
        "text_config": TEXT
        | {"model_type": "mllama_text_model", "num_hidden_layers": 3, "cross_attention_layers": [1]}
        | {"pad_token_id": None},
    },
    "ovis2": {
        "vision_config": SEES | {"model_type": "ovis2_vision", "hidden_stride": 2, "vocab_size": 32},
        "hidden_size": 32,
        "vocab_size": VOCABULARY + 64,
    },
    "pixtral": {
        "model_type": "llava",
        "vision_config": SEES | {"model_type": "pixtral", "head_dim": 16},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "video_llama_3": {"vision_config": SEES},
    "vipllava": {
        "vision_config": SEES | {"model_type": "clip_vision_model"},
        "vision_feature_layer": [-1, 1],
        "vision_feature_layers": [-1, 1],  # its name before transformers 5.23
    },
}
