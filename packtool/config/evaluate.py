"""What ``packtool eval`` needs to know, and the options that evaluation has elsewhere too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packtool.config.caches import CacheOptions
from packtool.config.media_cache import MediaCacheOptions, media_cache_problems
from packtool.config.model import ATTN_IMPL_HELP, AttnImpl, DType
from packtool.config.packages import missing_packages
from packtool.config.packing import SEQUENCE_PARALLELISM, SharingOptions, sharing_problems
from packtool.config.parallel import LaunchOptions, ParallelOptions, parallel_problems
from packtool.config.quantization import QuantizationOptions, quantization_problems
from packtool.config.rows import AccessOptions, access_problems
from packtool.config.settings import REQUIRED, option
from packtool.config.sizes import Tokens

Split = Literal["train", "val"]
MAX_TOKENS_OPTION = "--max-tokens-per-micro-batch"
MAX_TOKENS_HELP = (
    "Most tokens of a forward pass of evaluation: a hard limit, also for a single sample. By default 8192, or the "
    "longest sample if that is longer."
)
_SUFFIX = ".parquet"


@dataclass(frozen=True, kw_only=True)
class EvalConfig(
    CacheOptions, MediaCacheOptions, AccessOptions, ParallelOptions, LaunchOptions, SharingOptions, QuantizationOptions
):
    """What ``packtool eval`` needs to know."""

    model: str = option(REQUIRED, "Directory (or hub id) of a model, or of an adapter whose base model is there.")
    base_model: str | None = option(None, "Where the base model of an adapter is now, if it has moved.")
    cached_dataset: tuple[str, ...] = option(REQUIRED, "Caches that packtool export made; several may follow.")
    output: str = option(REQUIRED, "File to write a line for each sample to, ending in .parquet.")
    split: Split | None = option(None, "Split to evaluate; by default val if all caches have one, else train.")
    max_tokens_per_micro_batch: Tokens | None = option(None, MAX_TOKENS_HELP, panel="Speed", minimum=1)
    max_samples_per_micro_batch: int | None = option(None, "Most samples of a forward pass.", panel="Speed", minimum=1)
    limit: int | None = option(None, "Evaluate only so many samples, the first ones.", minimum=1)
    torch_dtype: DType = option(
        "auto", "Precision of the weights; auto is the checkpoint's on a GPU, float32 on a CPU.", panel="Speed"
    )
    attn_impl: AttnImpl = option("auto", ATTN_IMPL_HELP, panel="Speed")
    dataloader_num_workers: int = option(
        1, "Processes a rank that load pictures ahead of the model.", panel="Speed", minimum=0
    )

    @property
    def named_places(self) -> tuple[str, ...]:
        """Directories of caches that were named."""
        return self.cached_dataset

    @property
    def not_shared_with(self) -> list[str]:
        """Options, as they are given, with which no prefixes are shared."""
        bounds = ["--max-samples-per-micro-batch"] if self.max_samples_per_micro_batch is not None else []
        return bounds + ([SEQUENCE_PARALLELISM] if self.sequence_parallel_ranks > 1 else [])

    def missing_packages(self) -> list[str]:
        """Packages that these settings need and this environment lacks."""
        return missing_packages(quant_bits=self.quant_bits)

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = [*parallel_problems(self, attn_impl=self.attn_impl), *access_problems(self), *sharing_problems(self)]
        found += [*quantization_problems(self), *media_cache_problems(self)]
        if not self.output.endswith(_SUFFIX):
            found.append(f"--output {self.output}: the file's name must end in {_SUFFIX}, for that is what is written")
        return found
