"""Records of families whose media are encoded by their own transformers processor (``ProcessorFamily``).

Their text tower is causal with plain positions, ``config.json`` names one placeholder token for pictures, and the
forward takes the processor's outputs (``tests/batch/test_media_processed.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtool.encode.families.processor import ProcessorFamily
from packtool.encode.families.qwen_vl import QWEN3_5
from packtool.encode.families.record import IN_CHUNKS, INTERNVL_TOKENS, BoxForm, Family, Towers

# Layers of the projector from the vision tower to the text model: the input and output width of each (``Family``).
_PLAIN = ("tower text", "text text")
_MERGED = ("merged text", "text text")
_PIXTRAL = ("merged tower", "tower text", "text text")
_SWIGLU = ("merged aligned", "gated text")


def _family(
    title: str,
    *model_types: str,
    inputs: tuple[str, ...] = (),
    vision: str = "model.vision_tower",
    aligner: tuple[str, ...] = ("model.multi_modal_projector",),
    no_videos: str = "this model does not support videos",
    projector: tuple[str, ...] = _PLAIN,
    unused: tuple[str, ...] = (),
    video_outputs: tuple[str, ...] = (),
    **other_fields: Any,
) -> Family:
    """Return the record of a family whose media are encoded by ``ProcessorFamily``.

    Args:
        inputs: outputs of the processor for pictures that the model takes in addition to ``pixel_values``.
        aligner: modules between the vision tower and the text model.
        no_videos: why videos are refused; "" if they are not. Without effect with ``video_outputs``.
        projector: widths of the linear layers of these modules.
    """
    takes_videos = bool(video_outputs) or not no_videos
    if "whole_pictures" in other_fields:
        other_fields["unshared"] = "tokens of a picture attend to each other in both directions"
    return Family(
        title=title,
        model_types=model_types,
        encoding=ProcessorFamily,
        no_videos="" if takes_videos else no_videos,
        kinds=("image", "video") if takes_videos else ("image",),
        towers=Towers(vision=(vision,), aligner=aligner, unused=unused),
        positions="counted",  # 0, 1, 2, ...
        processor_inputs=("pixel_values", *inputs),
        videos_as_pictures=takes_videos,
        video_outputs=video_outputs,
        projector=projector,
        **other_fields,
    )


# ``image_newline`` is a trained vector at the end of each row of a picture's features.
_NEWLINE = ("model.multi_modal_projector", "model.image_newline")
_POOLED = "this model pools the features of frames, which packtool does not support"
_IDEFICS: Mapping[str, Any] = {
    "inputs": ("pixel_attention_mask",),
    "vision": "model.vision_model",
    "aligner": ("model.connector",),
    "projector": ("merged text",),
}
# These turn the tower's features into visual words.
_OVIS_HEAD = ("model.vision_tower.head_linear", "model.vision_tower.head_norm")

FAMILIES: tuple[Family, ...] = (
    _family(
        "InternVL 3, 3.5",
        "internvl",
        projector=_MERGED,
        boxes=BoxForm("tokens", "thousandths", INTERNVL_TOKENS),
        no_videos="",
    ),
    _family(
        "LLaVA-OneVision",
        "llava_onevision",
        inputs=("image_sizes", "batch_num_images"),
        aligner=_NEWLINE,
        video_outputs=("pixel_values_videos",),
    ),
    _family("LLaVA-NeXT (1.6)", "llava_next", inputs=("image_sizes",), aligner=_NEWLINE),
    _family("LLaVA 1.5, Pixtral", "llava", inputs=("image_sizes",)),
    _family("Mistral 3", "mistral3", inputs=("image_sizes",), projector=_PIXTRAL),
    _family("Idefics 3", "idefics3", **_IDEFICS),
    _family("SmolVLM", "smolvlm", no_videos="", **_IDEFICS),
    _family(
        "Kimi K2.5",
        "kimi_k25",
        inputs=("image_grid_thw",),
        aligner=("model.mm_projector",),
        projector=("merged merged", "merged text"),
        no_videos="transformers' model fails on videos: it expects more features than its vision tower makes",
    ),
    _family(
        "MiniCPM-V 4.6",
        "minicpmv4_6",
        "minicpm_ocr",
        inputs=("target_sizes",),
        aligner=("model.merger",),
        projector=("merged merged", "merged text"),
        video_outputs=("pixel_values_videos", "target_sizes_videos"),
        recurrent_types=QWEN3_5.recurrent_types,
        recurrent_layers=QWEN3_5.recurrent_layers,
    ),
    _family("Aya Vision", "aya_vision", projector=_SWIGLU),
    _family("Command A Vision", "cohere2_vision", projector=_SWIGLU),
    _family(
        "EXAONE 4.5",
        "exaone4_5",
        inputs=("image_grid_thw",),
        vision="model.visual",
        aligner=("model.visual.merger",),
        projector=Family.projector,
        video_outputs=("pixel_values_videos", "video_grid_thw"),
    ),
    _family(
        "HyperCLOVA X SEED Vision",
        "hyperclovax_vision_v2",
        inputs=("image_grid_thw",),
        vision="model.vision_model",
        aligner=("model.projector",),
        projector=(*Family.projector, "out text"),
        video_outputs=("pixel_values_videos", "video_grid_thw"),
    ),
    _family(
        "LightOnOCR",
        "lighton_ocr",
        inputs=("image_sizes",),
        vision="model.vision_encoder",
        aligner=("model.vision_projection",),
        projector=_PIXTRAL,
    ),
    _family("LLaVA-NeXT-Video", "llava_next_video", inputs=("image_sizes",), aligner=_NEWLINE, no_videos=_POOLED),
    _family(
        "Ovis 2",
        "ovis2",
        aligner=(*_OVIS_HEAD, "model.visual_embeddings_table"),
        projector=("merged words", "vocabulary text"),
    ),
    _family(
        "VideoLLaMA 3",
        "video_llama_3",
        inputs=("image_grid_thw", "image_merge_sizes"),
        vision="model.vision_model",
        aligner=("model.projector",),
        video_outputs=("pixel_values_videos", "video_grid_thw", "video_merge_sizes"),
    ),
    _family("ViP-LLaVA", "vipllava"),
    _family(
        "Llama 4",
        "llama4",
        vision="vision_model",
        aligner=("vision_model.vision_adapter", "multi_modal_projector"),
        projector=("merged adapted", "adapted adapted", "output text"),
        unshared=IN_CHUNKS,
    ),
    _family(
        "Llama 3.2 Vision",
        "mllama",
        inputs=("aspect_ratio_ids", "aspect_ratio_mask"),
        vision="model.vision_model",
        projector=("output text",),
        cross_attention=True,
        unshared="text attends to pictures by cross-attention",
    ),
    _family("Gemma 3", "gemma3", projector=("tower text",), whole_pictures="all", token_types="token_type_ids"),
    _family(
        "Gemma 4",
        "gemma4",
        inputs=("image_position_ids",),
        aligner=("model.embed_vision",),
        projector=("tower text",),
        unused=("model.audio_tower", "model.embed_audio"),
        whole_pictures="windows",
        token_types="mm_token_type_ids",
        video_outputs=("pixel_values_videos", "video_position_ids"),
    ),
)
