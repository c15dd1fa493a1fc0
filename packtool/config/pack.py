"""What ``packtool pack`` needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from packtool.config.caches import CacheOptions
from packtool.config.packing import PackOptions, budget_problems
from packtool.config.rows import AccessOptions, access_problems
from packtool.config.settings import REQUIRED, option
from packtool.config.sizes import Tokens
from packtool.constants import TRAIN_SPLIT

PacksFormat = Literal["parquet", "arrow", "megatron", "webdataset", "energon"]
PackedMedia = Literal["reference", "embed"]


@dataclass(frozen=True, kw_only=True)
class PackConfig(CacheOptions, AccessOptions, PackOptions):
    """What ``packtool pack`` needs to know."""

    NEEDED_FIRST: ClassVar[tuple[str, ...]] = ("cached_dataset", "output_dir", "format", "packing_length", "plan")

    cached_dataset: tuple[str, ...] = option(
        REQUIRED, "Caches that packtool export made; they may stand without the option's name."
    )
    output_dir: str = option(REQUIRED, "Directory (or s3://, oss:// place) for the packs.")
    format: PacksFormat = option(
        "parquet",
        "What is written: parquet or arrow, one line a pack; megatron, the packed parquet files of NeMo and Megatron "
        "Bridge (text alone); webdataset, tar files; energon, these with what Megatron Energon reads beside them.",
    )
    packing_length: Tokens | None = option(
        None, "Tokens of a pack; by default the length of the longest sample.", panel="Packing", minimum=1
    )
    plan: str | None = option(
        None, "Write the packs of this plan, from packtool plan --save, instead of packing.", panel="Packing"
    )
    max_length: Tokens | None = option(None, "Leave out longer samples.", panel="Packing", minimum=1)
    seed: int = option(42, "Seed of the packing.", minimum=0)
    split: str = option(TRAIN_SPLIT, "Split whose samples are packed.")
    model: str | None = option(None, "Directory (or hub id) whose config.json tells positions; by default the caches'.")
    media: PackedMedia | None = option(
        None,
        "Keep where media lie (reference), or write their files into the packs (embed); by default embed in tar files, "
        "and elsewhere as the caches have them.",
    )
    packs_per_file: int = option(1000, "Packs of each file.", minimum=1)
    dataset_num_proc: int = option(
        1, "Worker processes that write files; the output is the same for any number.", minimum=1
    )

    @property
    def named_places(self) -> tuple[str, ...]:
        """Directories of caches that were named."""
        return self.cached_dataset

    @property
    def embeds(self) -> bool:
        """Whether files of all media are written into the packs."""
        return self.media == "embed" or (self.media is None and self.format in ("webdataset", "energon"))

    def media_of(self, cached: Sequence[str]) -> PackedMedia:
        """How packs have media.

        Args:
            cached: how each of the caches has them.
        """
        return "embed" if self.embeds or (self.media is None and "embed" in cached) else "reference"

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = [*access_problems(self), *budget_problems(self)]
        for name, given in (("packing-length", self.packing_length), ("max-length", self.max_length)):
            if self.plan is not None and given is not None:
                found.append(f"--plan has its own packs: leave out --{name}")
        return found
