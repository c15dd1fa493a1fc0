"""What ``packtool verify`` needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.config.caches import CacheOptions
from packtool.config.model import ATTN_IMPL_HELP, AttnImpl, DType
from packtool.config.packing import SEQUENCE_PARALLELISM, SharingOptions, sharing_problems
from packtool.config.parallel import LaunchOptions, ParallelOptions, parallel_problems
from packtool.config.rows import AccessOptions, access_problems
from packtool.config.settings import REQUIRED, option
from packtool.config.sizes import Tokens


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(CacheOptions, AccessOptions, ParallelOptions, LaunchOptions, SharingOptions):
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
    torch_dtype: DType = option(
        "auto", "Precision of the weights; auto is the checkpoint's on a GPU, and float32 on the CPU."
    )
    trajectory: int | None = option(
        None,
        "Instead, train so many steps with AdamW in float32 twice, packed with --samples-per-step and unpacked, and "
        "compare the losses of all steps and the weights in the end.",
        minimum=1,
    )
    samples_per_step: int | None = option(None, "Samples of a step of --trajectory; by default 16.", minimum=1)
    seed: int = option(42, "Seed of the packing.", minimum=0)
    html: str | None = option(None, "Write the report as a page to this file, also if a check fails.")

    @property
    def named_places(self) -> tuple[str, ...]:
        """Directories of caches that were named."""
        return self.cached_dataset

    @property
    def not_shared_with(self) -> list[str]:
        """Options, as they are given, with which no prefixes are shared."""
        trained = ["--trajectory"] if self.trajectory is not None else []
        return trained + ([SEQUENCE_PARALLELISM] if self.sequence_parallel_ranks > 1 else [])

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = [*parallel_problems(self, attn_impl=self.attn_impl), *access_problems(self), *sharing_problems(self)]
        if self.trajectory is None:
            return found + (["--samples-per-step goes with --trajectory"] if self.samples_per_step is not None else [])
        if self.torch_dtype not in ("auto", "float32"):
            found.append(
                f"--trajectory computes in float32, for {self.torch_dtype} would round steps apart: leave out "
                "--torch-dtype"
            )
        if self.sequence_parallel_ranks > 1:
            found.append("--trajectory trains in one process: leave out --sequence-parallel-size")
        if self.num_packs != type(self).num_packs:
            found.append("--num-packs is for single packs, and --trajectory trains whole steps: leave out one of them")
        return found
