"""Families whose pictures are counted, written and made by their own transformers processor: a record each.

Their text tower is causal with plain positions, one token in ``config.json`` stands for a piece of a picture, and the
forward takes the processor's outputs and puts features where that token is. ``ProcessorFamily`` encodes for
them, ``batch.media`` loads for them. Each is proven in ``tests/batch/test_media_processed.py``.

``REFUSED`` lists models with pictures that are exported through their own processor but not trained, by the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from packtool.encode.families.processor import ProcessorFamily
from packtool.encode.families.qwen_vl import QWEN3_5
from packtool.encode.families.record import INTERNVL_TOKENS, BoxForm, Family, Towers


def _family(
    title: str,
    *model_types: str,
    inputs: tuple[str, ...] = (),
    vision: str = "model.vision_tower",
    aligner: tuple[str, ...] = ("model.multi_modal_projector",),
    no_videos: str = "this model takes no videos",
    **more: Any,
) -> Family:
    return Family(
        title=title,
        model_types=model_types,
        encoding=ProcessorFamily,
        no_videos=no_videos,
        kinds=("image",) if no_videos else ("image", "video"),
        towers=Towers(vision=(vision,), aligner=aligner),
        positions="counted",
        processor_inputs=("pixel_values", *inputs),
        videos_as_pictures=not no_videos,
        **more,
    )


# The second is learned, and stands at the end of each row of a picture's features.
_NEWLINE = ("model.multi_modal_projector", "model.image_newline")
_APART = "this model looks at videos in another call than at pictures, and packtool makes one"
_STACKED = "this model looks at videos in a call of its own, which takes those of equally many frames only"
# These make visual words of the tower's features.
_OVIS_HEAD = ("model.vision_tower.head_linear", "model.vision_tower.head_norm")

FAMILIES: tuple[Family, ...] = (
    _family("InternVL 3, 3.5", "internvl", boxes=BoxForm("tokens", "thousandths", INTERNVL_TOKENS), no_videos=""),
    _family(
        "LLaVA-OneVision (one picture in a row)",
        "llava_onevision",
        inputs=("image_sizes", "batch_num_images"),
        aligner=_NEWLINE,
        no_videos=_STACKED,
    ),
    _family("LLaVA-NeXT (1.6)", "llava_next", inputs=("image_sizes",), aligner=_NEWLINE),
    _family("LLaVA 1.5, Pixtral", "llava", inputs=("image_sizes",)),
    _family("Mistral 3", "mistral3", inputs=("image_sizes",)),
    _family(
        "Idefics 3, SmolVLM",
        "idefics3",
        "smolvlm",
        inputs=("pixel_attention_mask",),
        vision="model.vision_model",
        aligner=("model.connector",),
        no_videos="Idefics 3 takes no videos, and the chat template of SmolVLM has no place for one",
    ),
    _family("Kimi K2.5", "kimi_k25", inputs=("image_grid_thw",), aligner=("model.mm_projector",), no_videos=_APART),
    _family(
        "MiniCPM-V 4.6",
        "minicpmv4_6",
        "minicpm_ocr",
        inputs=("target_sizes",),
        aligner=("model.merger",),
        no_videos=_APART,
        recurrent_types=QWEN3_5.recurrent_types,
        recurrent_layers=QWEN3_5.recurrent_layers,
    ),
    _family("Aya Vision", "aya_vision"),
    _family("Command A Vision", "cohere2_vision"),
    _family(
        "EXAONE 4.5",
        "exaone4_5",
        inputs=("image_grid_thw",),
        vision="model.visual",
        aligner=("model.visual.merger",),
        no_videos=_APART,
    ),
    _family(
        "HyperCLOVA X SEED Vision",
        "hyperclovax_vision_v2",
        inputs=("image_grid_thw",),
        vision="model.vision_model",
        aligner=("model.projector",),
        no_videos=_APART,
    ),
    _family(
        "LightOnOCR",
        "lighton_ocr",
        inputs=("image_sizes",),
        vision="model.vision_encoder",
        aligner=("model.vision_projection",),
    ),
    _family("LLaVA-NeXT-Video", "llava_next_video", inputs=("image_sizes",), aligner=_NEWLINE, no_videos=_STACKED),
    _family("Ovis 2", "ovis2", aligner=(*_OVIS_HEAD, "model.visual_embeddings_table")),
    _family(
        "VideoLLaMA 3",
        "video_llama_3",
        inputs=("image_grid_thw", "image_merge_sizes"),
        vision="model.vision_model",
        aligner=("model.projector",),
        no_videos="how many tokens stand for a video follows from what its frames show",
    ),
    _family("ViP-LLaVA", "vipllava"),
)


UNPROVEN = "nobody has shown that it is exact"
_REFUSED_TYPES = {
    "the tokens of a picture see each other in both directions, and packed attention is causal": (
        "diffusion_gemma gemma3 gemma4 gemma4_unified molmo2 paligemma pi0 shieldgemma2"
    ),
    "its text looks at pictures through cross-attention, which would see those of other packed samples": (
        "evolla idefics mllama"
    ),
    "it is an encoder with a decoder, and packed attention is that of a decoder alone": (
        "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder"
    ),
    "its layers mix along the sequence by other means than attention, or choose what they attend to from all of it": (
        "dots3_note glm5_next inkling2 inkling_mm_model lfm2_vl lfm3_vl llama4 minimax_m3_vl mistral_large4 "
        "nemotron_h_omni qwen4_exp unlimited_ocr"
    ),
    "it does not take its attention from transformers' attention interface": (
        "blip deepseek_vl deepseek_vl_hybrid git janus"
    ),
    "its processor does not say what it writes for a picture": (
        "blip-2 idefics2 instructblip instructblipvideo pp_chart2table"
    ),
    "positions in space are made of what its processor makes of pictures, which packtool does not follow": (
        "cohere_compass cosmos3_edge cosmos3_omni ernie4_5_vl_moe glmga hunyuan_vl minicpmv4_7 paddleocr_vl"
    ),
    UNPROVEN: (
        "aria deepseek_ocr2 fast_vlm gemma3n got_ocr2 granite4_vision granite_docling kosmos-2 kosmos-2.5 "
        "muse_glimmer muse_spark perception_lm qianfan_ocr step3p7 video_llava"
    ),
}

OTHER = Family(
    title="other models with pictures",
    encoding=ProcessorFamily,
    no_videos="of this model packtool knows pictures only",
    refused=UNPROVEN,
)
"""Every other multimodal model: its rows can be exported through its own processor, but it is not trained."""

REFUSED: tuple[Family, ...] = tuple(
    replace(OTHER, title=", ".join(types.split()), model_types=tuple(types.split()), refused=reason)
    for reason, types in _REFUSED_TYPES.items()
)
