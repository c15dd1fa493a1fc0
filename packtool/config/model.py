"""How a model computes: the names of precisions and of attention kernels, as options take them."""

from __future__ import annotations

from typing import Annotated, Literal

from packtool.config.settings import Synonyms

DType = Literal["auto", "float32", "bfloat16", "float16"]
AttnImpl = Annotated[
    Literal["auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex"],
    Synonyms(
        {
            "flash_attn": "flash_attention_2",
            "flash_attn_2": "flash_attention_2",
            "flash_attn_3": "flash_attention_3",
            "fa2": "flash_attention_2",
            "fa3": "flash_attention_3",
            "flex_attention": "flex",
        },
        refused={"eager": "it makes a matrix of tokens x tokens, and packs have none: sdpa computes the same without"},
    ),
]
ATTN_IMPL_HELP = (
    "Kernel of the packed attention: auto takes flash attention if it is installed, torch's own varlen on CUDA, and "
    "SDPA for each sample elsewhere."
)
