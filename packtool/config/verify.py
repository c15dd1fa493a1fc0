"""What ``packtool verify`` needs to know, and the names of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from packtool.config.caches import CacheOptions
from packtool.config.parallel import ParallelOptions, parallel_problems
from packtool.config.rows import AccessOptions, access_problems
from packtool.config.settings import REQUIRED, Synonyms, option
from packtool.config.sizes import Tokens

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
        }
    ),
]
ATTN_IMPL_HELP = (
    "Kernel of the packed attention: auto takes flash attention if it is installed, torch's own varlen on CUDA, and "
    "SDPA for each sample elsewhere."
)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(CacheOptions, AccessOptions, ParallelOptions):
    """What ``packtool verify`` needs to know."""

    model: str = option(REQUIRED, "Directory (or hub id) of the model.")
    cached_dataset: tuple[str, ...] = option(
        REQUIRED, "Caches that packtool export made; several may follow. Their samples are packed and compared."
    )
    packing_length: Tokens | None = option(
        None, "Tokens that a pack holds at most; by default the export's --max-length.", minimum=2
    )
    num_packs: int = option(2, "Packs to look at.", minimum=1)
    attn_impl: AttnImpl = option("auto", ATTN_IMPL_HELP)
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Precision of the weights; auto is the checkpoint's on a GPU, and float32 on the CPU."
    )
    seed: int = option(42, "Seed of the packing.", minimum=0)

    @property
    def named_places(self) -> tuple[str, ...]:
        """Caches."""
        return self.cached_dataset

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        return [*parallel_problems(self, attn_impl=self.attn_impl), *access_problems(self)]
