"""Families that are exported by their own processor but not trained, with the reason."""

from __future__ import annotations

from dataclasses import replace

from packtool.encode.families.processor import ProcessorFamily
from packtool.encode.families.record import Family

UNPROVEN = "packed training has not been verified"
_REFUSED_TYPES = {
    "attention in both directions is not limited to the tokens of one picture": "diffusion_gemma molmo2 paligemma pi0",
    "transformers' masks for its pictures differ between a forward pass and generation": "gemma4_unified",
    "it classifies pictures and writes no text": "shieldgemma2",
    "its text attends to pictures by cross-attention, which would include those of other samples in a pack": (
        "evolla idefics"
    ),
    "it is an encoder-decoder model, and packed attention supports only decoders": (
        "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder"
    ),
    "its layers mix tokens by other means than attention, or select tokens from the entire sequence": (
        "dots3_note glm5_next inkling2 inkling_mm_model lfm2_vl lfm3_vl minimax_m3_vl mistral_large4 "
        "nemotron_h_omni qwen4_exp unlimited_ocr"
    ),
    "it does not use transformers' attention interface": ("blip deepseek_vl deepseek_vl_hybrid git janus"),
    "its processor does not report which text replaces the placeholder of a picture": (
        "blip-2 idefics2 instructblip instructblipvideo pp_chart2table"
    ),
    "the positions of picture tokens depend on outputs of its processor that packtool does not support": (
        "cohere_compass cosmos3_edge cosmos3_omni ernie4_5_vl_moe glmga hunyuan_vl minicpmv4_7 paddleocr_vl"
    ),
    "rotary positions depend on the longest sample of a pack, and its adapters are separate files": "phi4_multimodal",
    "its processor does not accept texts in which one image token marks each picture": "got_ocr2 qianfan_ocr",
    "its vision tower needs timm, with which packed training has not been verified": "fast_vlm perception_lm",
    UNPROVEN: (
        "aria deepseek_ocr2 gemma3n granite4_vision granite_docling kosmos-2 kosmos-2.5 muse_glimmer muse_spark "
        "step3p7 video_llava"
    ),
}

OTHER = Family(
    title="other models with pictures",
    encoding=ProcessorFamily,
    no_videos="packtool supports only pictures for this model",
    refused=UNPROVEN,
)
"""Every other multimodal model: rows can be exported by its own processor, but it is not trained."""

REFUSED: tuple[Family, ...] = tuple(
    replace(OTHER, title=", ".join(types.split()), model_types=tuple(types.split()), refused=reason)
    for reason, types in _REFUSED_TYPES.items()
)
