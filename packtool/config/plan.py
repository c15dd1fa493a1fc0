"""Settings of ``packtool plan`` and ``packtool pack``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from packtool.config.data import AccessOptions, CacheOptions
from packtool.config.mixture import MixOptions
from packtool.config.model import AdapterOptions, MemoryOptions
from packtool.config.packing import PackingOptions, PackOptions, ParallelOptions
from packtool.config.settings import (
    REQUIRED,
    Bytes,
    Tokens,
    flag,
    format_bytes,
    model_option,
    num_tokens,
    option,
    packing_option,
    shard_option,
    training_option,
)
from packtool.constants import TRAIN_SPLIT


@dataclass(frozen=True, kw_only=True)
class PlanConfig(CacheOptions, MixOptions, PackingOptions, ParallelOptions, MemoryOptions, AdapterOptions):
    """Settings of ``packtool plan``."""

    COMMON_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("cached_dataset", "lengths", "packing", "packing_length", "world_size", "gradient_accumulation_steps"),
        *("per_device_train_batch_size", "sweep", "fit", "media", "save", "lock", "html", "resume"),
    )

    lengths: str | None = option(None, "Plan for sample lengths (tokens) in this .npy, .json or .txt file.", path=True)
    model: str | None = model_option(None, "Estimate cost and memory for this model; default is the caches' model.")
    packing: bool = packing_option(True, "Pack several samples into each sequence; false pads samples instead.")
    world_size: int = option(1, "Plan for N training processes, one per GPU.", minimum=1)
    num_train_epochs: float = training_option(1.0, "Train this many passes over all samples.", minimum=0.0)
    max_steps: int | None = training_option(None, "Plan a run of N optimizer steps, instead of --num-train-epochs.")
    sweep: str | None = option(None, "Compare these packing lengths, such as 4096,8192,16K.")
    fit: Bytes | None = option(None, "Find the fastest settings that fit into this GPU memory, such as 80GB.")
    hardware: str | None = model_option(None, "Estimate times for this GPU: h100, h200, a100, 910b, or a YAML file.")
    tflops: float | None = model_option(None, "Estimate times for GPUs with this many peak TFLOP/s.", minimum=0.001)
    mfu: float = model_option(0.4, "Assume this fraction of the peak TFLOP/s in training.", minimum=0.001, maximum=1.0)
    media: bool = option(False, "Measure media loading here and estimate the loading processes that training needs.")
    save: str | None = option(None, "Write the plan to this file, for example for packtool train --plan.", path=True)
    lock: str | None = option(
        None, "Write a lock file of everything that determines a run; packtool train --locked checks it.", path=True
    )
    html: str | None = option(None, "Draw the plan, or the results of --sweep, as a web page.", path=True)

    resume: str | None = option(
        None, "Preview how this run or checkpoint would resume, and what has changed.", path=True
    )

    def problems(self, *sections: type) -> list[str]:
        """Return the problems of combined options; ``--resume`` goes with few options at all."""
        if self.resume is None:
            return super().problems(*sections)
        allowed = {field.name for field in dataclasses.fields(CacheOptions)}
        allowed |= {"resume", "cached_dataset", "mix", "world_size"}
        fields = [field for field in dataclasses.fields(self) if field.name not in allowed]
        refused = [flag(field.name) for field in fields if getattr(self, field.name) != field.default]
        return [f"{name}: --resume uses the options of the resumed run; leave it out" for name in refused]

    def value_problems(self) -> list[str]:
        problems = []
        if self.world_size % self.sequence_parallel_ranks:
            problem = f"--world-size {self.world_size} is not a multiple of the {self.sequence_parallel_ranks} ranks"
            problems.append(f"{problem} that share a pack")
        if self.fit is not None and self.fit < 10**6:
            problems.append(f"--fit {format_bytes(self.fit)}: too little memory for a model; give it as in 80GB")
        try:
            self.sweep_lengths()
        except ValueError:
            problems.append(f"--sweep {self.sweep}: give packing lengths with commas between them, as in 4096,8K")
        return problems

    @property
    def removes_padding(self) -> bool:
        """True if samples are concatenated instead of padded."""
        return self.packing or self.has_unpadded_batches

    @property
    def sharing_conflicts(self) -> list[str]:
        return self.packing_sharing_conflicts(self.packing)

    def sweep_lengths(self) -> list[int]:
        """Return the packing lengths to compare; ValueError if one is no number."""
        return [num_tokens(length) for length in (self.sweep or "").split(",") if length]


PacksFormat = Literal["parquet", "arrow", "megatron", "webdataset", "energon"]
PackedMedia = Literal["reference", "embed"]


@dataclass(frozen=True, kw_only=True)
class PackConfig(CacheOptions, AccessOptions, PackOptions):
    """Settings of ``packtool pack``."""

    COMMON_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("cached_dataset", "output_dir", "format", "packing_length", "plan", "split", "media"),
    )

    cached_dataset: tuple[str, ...] = option(REQUIRED, "Use these caches of packtool export.", path=True)
    output_dir: str = option(REQUIRED, "Write the packs to this directory, local or remote (s3://, oss://).", path=True)
    format: PacksFormat = option("parquet", "Write this file format.")
    packing_length: Tokens | None = packing_option(
        None, "Limit each packed sequence to N tokens; default is the longest sample.", minimum=1
    )
    plan: str | None = packing_option(None, "Write the packs of this plan, written by packtool plan --save.", path=True)
    max_length: Tokens | None = packing_option(None, "Drop samples above N tokens.")
    seed: int = packing_option(42, "Set the random seed of packing.", minimum=0)
    split: str = option(TRAIN_SPLIT, "Pack this split, train or val.")
    model: str | None = model_option(
        None, "Compute positions for this model directory or hub id; default is the caches' model."
    )
    media: PackedMedia | None = option(None, "Store paths of media in the packs (reference), or the files (embed).")
    packs_per_file: int = shard_option(1000, "Write N packs per file.")
    dataset_num_proc: int = shard_option(1, "Write in N processes; the output does not depend on N.", minimum=1)

    @property
    def embeds(self) -> bool:
        """True if the files of all media are written into the packs."""
        return self.media == "embed" or (self.media is None and self.format in ("webdataset", "energon"))

    def media_of(self, cached: Sequence[str]) -> PackedMedia:
        """Return how packs store media, from how each of the caches stores them."""
        return "embed" if self.embeds or (self.media is None and "embed" in cached) else "reference"
