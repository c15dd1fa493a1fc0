"""Models with pictures that are exported for, through their own processor, but not trained: by the reason, in words.

Each is a ``model_type`` of transformers. Types that are not here either are refused as ``OTHER`` of this folder.
"""

from __future__ import annotations

from packtool.encode.families.record import BY_PROCESSOR, Family

UNPROVEN = "nobody has shown that it is exact"
_BECAUSE: dict[str, tuple[str, ...]] = {
    "the tokens of a picture see each other in both directions, and packed attention is causal": (
        *("diffusion_gemma", "gemma3", "gemma4", "gemma4_unified", "molmo2", "paligemma", "pi0", "shieldgemma2"),
    ),
    "its text looks at pictures through cross-attention, which would see those of other packed samples": (
        *("evolla", "idefics", "mllama"),
    ),
    "it is an encoder with a decoder, and packed attention is that of a decoder alone": (
        *("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder"),
    ),
    "its layers mix along the sequence by other means than attention, or choose what they attend to from all of it": (
        *("dots3_note", "glm5_next", "inkling2", "inkling_mm_model", "lfm2_vl", "lfm3_vl", "llama4"),
        *("minimax_m3_vl", "mistral_large4", "nemotron_h_omni", "qwen4_exp", "unlimited_ocr"),
    ),
    "it does not take its attention from transformers' attention interface": (
        *("blip", "deepseek_vl", "deepseek_vl_hybrid", "git", "janus"),
    ),
    "its processor does not say what it writes for a picture": (
        *("blip-2", "idefics2", "instructblip", "instructblipvideo", "pp_chart2table"),
    ),
    "positions in space are made of what its processor makes of pictures, which packtool does not follow": (
        *("cohere_compass", "cosmos3_edge", "cosmos3_omni", "ernie4_5_vl_moe", "glmga", "hunyuan_vl", "minicpmv4_7"),
        *("paddleocr_vl",),
    ),
    UNPROVEN: (
        *(
            "aria",
            "deepseek_ocr2",
            "fast_vlm",
            "gemma3n",
            "got_ocr2",
            "granite4_vision",
            "granite_docling",
            "kosmos-2",
            "kosmos-2.5",
        ),
        *("muse_glimmer", "muse_spark", "perception_lm", "qianfan_ocr", "step3p7", "video_llava"),
    ),
}

REFUSED: tuple[Family, ...] = tuple(
    Family(title=", ".join(types), model_types=types, encoding=BY_PROCESSOR, refused=reason)
    for reason, types in _BECAUSE.items()
)
