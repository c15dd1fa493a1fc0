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
    model_option,
    num_tokens,
    option,
    packing_option,
    training_option,
    written_bytes,
)
from packtool.constants import TRAIN_SPLIT


@dataclass(frozen=True, kw_only=True)
class PlanConfig(CacheOptions, MixOptions, PackingOptions, ParallelOptions, MemoryOptions, AdapterOptions):
    """Settings of ``packtool plan``."""

    NEEDED_FIRST: ClassVar[tuple[str, ...]] = (
        *("cached_dataset", "lengths", "packing", "packing_length", "world_size", "gradient_accumulation_steps"),
        *("per_device_train_batch_size", "sweep", "fit", "media", "save", "html"),
    )

    lengths: str | None = option(None, "Plan for the lengths in this .npy, .json or .txt file instead of a cache's.")
    model: str | None = model_option(
        None,
        "Directory whose config.json tells what a token costs; by default the caches' model, or one of 8B. With it the "
        "memory of a rank is told, too, which takes some seconds.",
    )
    packing: bool = packing_option(True, "Pack samples without padding.")
    world_size: int = option(
        1, "Processes; with --sequence-parallel-size several share each pack, without each has its own.", minimum=1
    )
    num_train_epochs: float = training_option(1.0, "Times that every sample is seen.", minimum=0.0)
    max_steps: int | None = training_option(
        None,
        "Optimizer steps of the run, in place of --num-train-epochs: for --tflops, and for the stages of --mix, which "
        "end after so many, or at a share of them.",
    )
    sweep: str | None = option(None, "Packing lengths to compare, one row each: 4096,8192,16K.")
    fit: Bytes | None = option(
        None,
        "Memory of a GPU, as in 80GB: search the packing length, recomputation, sharding and sequence parallel size "
        "that fit into it and train cheapest, and print the train command. What is given beside it is kept.",
    )
    hardware: str | None = model_option(
        None,
        "GPUs that Skrull and --fit plan for: h100, h200, a100, 910b, or a file as simulate takes it; by default those "
        "of this machine.",
    )
    tflops: float | None = model_option(
        None, "Peak TFLOP/s of one device: with --mfu it tells the time.", minimum=0.001
    )
    mfu: float = model_option(0.4, "Share of the peak that training reaches.", minimum=0.001, maximum=1.0)
    media: bool = option(
        False,
        "Load some of the caches' media on this machine, drawn by the seed, and tell the processes and the bandwidth "
        "that a rank's steps will need, by --hardware and --model or --tflops.",
    )
    save: str | None = option(None, "Write the plan to this file, for packtool train --plan and inspect --plan.")
    html: str | None = option(None, "Write a page that draws the plan, or compares those of --sweep, to this file.")

    resume: str | None = option(
        None,
        "The --output-dir of a run, or one of its checkpoints: show how it would go on with these caches (or --mix), "
        "or its own, and what has changed. Options are the run's; --world-size 1 stands for as many processes as it "
        "had.",
    )

    def problems(self, *sections: type) -> list[str]:
        """Return the problems of combined options; ``--resume`` goes with few options at all."""
        if self.resume is None:
            return super().problems(*sections)
        kept = {"resume", "cached_dataset", "mix", "world_size"} | {
            each.name for each in dataclasses.fields(CacheOptions)
        }
        fields = [field for field in dataclasses.fields(self) if field.name not in kept]
        others = [flag(field.name) for field in fields if getattr(self, field.name) != field.default]
        return [f"{name}: --resume takes the options of the run that goes on; leave it out" for name in others]

    def value_problems(self) -> list[str]:
        """Return the problems of numbers that are impossible."""
        problems = []
        if self.world_size % self.sequence_parallel_ranks:
            problems.append(
                f"--world-size {self.world_size} is no multiple of the {self.sequence_parallel_ranks} processes that "
                "share a pack"
            )
        if self.fit is not None and self.fit < 10**6:
            fit = written_bytes(self.fit)
            problems.append(f"--fit {fit}: that many bytes hold no model; memory is given as in 80GB")
        try:
            self.sweep_lengths()
        except ValueError:
            problems.append(f"--sweep {self.sweep}: give packing lengths with commas between them, as in 4096,8K")
        return problems

    @property
    def removes_padding(self) -> bool:
        """True if samples are concatenated instead of padded."""
        return self.packing or self.has_no_rows

    @property
    def not_shared_with(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        return [*self.unshared_packing(self.packing, self.sequence_parallel_ranks), *self.mixing]

    def sweep_lengths(self) -> list[int]:
        """Return the packing lengths to compare; ValueError if one is no number."""
        return [num_tokens(length) for length in (self.sweep or "").split(",") if length]


PacksFormat = Literal["parquet", "arrow", "megatron", "webdataset", "energon"]
PackedMedia = Literal["reference", "embed"]


@dataclass(frozen=True, kw_only=True)
class PackConfig(CacheOptions, AccessOptions, PackOptions):
    """Settings of ``packtool pack``."""

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
    packing_length: Tokens | None = packing_option(
        None, "Tokens of a pack; by default the length of the longest sample.", minimum=1
    )
    plan: str | None = packing_option(
        None, "Write the packs of this plan, from packtool plan --save, instead of packing."
    )
    max_length: Tokens | None = packing_option(None, "Leave out longer samples.")
    seed: int = option(42, "Seed of the packing.", minimum=0)
    split: str = option(TRAIN_SPLIT, "Split whose samples are packed.")
    model: str | None = option(None, "Directory (or hub id) whose config.json tells positions; by default the caches'.")
    media: PackedMedia | None = option(
        None,
        "Keep where media lie (reference), or write their files into the packs (embed); by default embed in tar files, "
        "and elsewhere as the caches have them.",
    )
    packs_per_file: int = option(1000, "Packs of each file.")
    dataset_num_proc: int = option(
        1, "Worker processes that write files; the output is the same for any number.", minimum=1
    )

    @property
    def embeds(self) -> bool:
        """True if the files of all media are written into the packs."""
        return self.media == "embed" or (self.media is None and self.format in ("webdataset", "energon"))

    def media_of(self, cached: Sequence[str]) -> PackedMedia:
        """Return how packs store media, from how each of the caches stores them."""
        return "embed" if self.embeds or (self.media is None and "embed" in cached) else "reference"
