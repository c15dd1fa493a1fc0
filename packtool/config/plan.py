"""What ``packtool plan`` needs to know.

What ``packtool pack`` needs to know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from packtool.config.data import AccessOptions, CacheOptions, access_problems
from packtool.config.mixture import MixOptions, mixture_problems
from packtool.config.model import AdapterOptions, LearningOptions, MemoryOptions, adapter_problems, sharding_problems
from packtool.config.packing import (
    PackingOptions,
    PackOptions,
    ParallelOptions,
    budget_problems,
    no_sharing_with,
    packing_problems,
    parallel_problems,
    sharing_problems,
)
from packtool.config.settings import REQUIRED, Bytes, Tokens, flag, num_tokens, option, written_bytes
from packtool.constants import TRAIN_SPLIT


@dataclass(frozen=True, kw_only=True)
class PlanConfig(CacheOptions, MixOptions, PackingOptions, ParallelOptions, MemoryOptions, AdapterOptions):
    """What ``packtool plan`` needs to know."""

    NEEDED_FIRST: ClassVar[tuple[str, ...]] = (
        "cached_dataset",
        "lengths",
        "packing",
        "packing_length",
        "world_size",
        "gradient_accumulation_steps",
        "per_device_train_batch_size",
        "sweep",
        "fit",
        "media",
        "save",
        "html",
    )

    lengths: str | None = option(None, "Plan for the lengths in this .npy, .json or .txt file instead of a cache's.")
    model: str | None = option(
        None,
        "Directory whose config.json tells what a token costs; by default the caches' model, or one of 8B. With it the "
        "memory of a rank is told, too, which takes some seconds.",
        panel="Model and hardware",
    )
    packing: bool = option(True, "Pack samples without padding.", panel="Packing")
    world_size: int = option(
        1, "Processes; with --sequence-parallel-size several share each pack, without each has its own.", minimum=1
    )
    num_train_epochs: float = option(1.0, "Times that every sample is seen.", minimum=0.0, panel="Training")
    max_steps: int | None = option(
        None,
        "Optimizer steps of the run, in place of --num-train-epochs: for --tflops, and for the stages of --mix, which "
        "end after so many, or at a share of them.",
        panel="Training",
        minimum=1,
    )
    sweep: str | None = option(None, "Packing lengths to compare, one row each: 4096,8192,16K.")
    fit: Bytes | None = option(
        None,
        "Memory of a GPU, as in 80GB: search the packing length, recomputation, sharding and sequence parallel size "
        "that fit into it and train cheapest, and print the train command. What is given beside it is kept.",
        minimum=1,
    )
    hardware: str | None = option(
        None,
        "GPUs that Skrull and --fit plan for: h100, h200, a100, 910b, or a file as simulate takes it; by default those "
        "of this machine.",
        panel="Model and hardware",
    )
    tflops: float | None = option(
        None, "Peak TFLOP/s of one device: with --mfu it tells the time.", minimum=0.001, panel="Model and hardware"
    )
    mfu: float = option(
        0.4, "Share of the peak that training reaches.", minimum=0.001, maximum=1.0, panel="Model and hardware"
    )
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

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        if self.resume is not None:
            return self._resume_problems()
        found = packing_problems(self, self.packing)
        found += parallel_problems(self, removes_padding=self.packing or self.has_no_rows)
        if self.bucket_size == "auto":
            found.append("--bucket-size auto measures a device: packtool plan needs a number of tokens")
        if self.world_size % self.sequence_parallel_ranks:
            found.append(
                f"--world-size {self.world_size} is no multiple of the {self.sequence_parallel_ranks} processes that "
                "share a pack"
            )
        if bool(self.cached_dataset or self.mix) == (self.lengths is not None):
            found.append("give either caches (or --mix) or --lengths FILE")
        found += mixture_problems(self)
        if self.lengths is not None and self.packing_length is None and self.sweep is None and self.fit is None:
            found.append("--packing-length is missing: a file of lengths does not tell it")
        if self.sweep is not None and self.save is not None:
            found.append("--save writes one plan, and --sweep makes several: give --packing-length instead of --sweep")
        if self.samples_per_step is not None and self.save is not None:
            found.append(
                "--save writes packs, which are trained in any order, and --samples-per-step packs each step: leave "
                "out one of them"
            )
        if self.lengths is not None and self.save is not None:
            found.append("--save needs caches: a plan belongs to the cache it was made for")
        if self.media and self.lengths is not None:
            found.append("--media needs caches: it loads the media that they name")
        if self.media and (self.sweep is not None or self.fit is not None):
            found.append("--media measures what one plan needs: leave out --sweep and --fit")
        if self.mix is not None and self.save is not None:
            found.append("--save keeps packs, and of a recipe nothing else: give --mix to packtool train instead")
        if self.lengths is not None and self.share_prefix == "true":
            found.append("--share-prefix true needs caches: lengths do not tell what samples begin with")
        found += sharing_problems(self)
        found += sharding_problems(self) + adapter_problems(self) + self._fit_problems()
        try:
            self.sweep_lengths()
        except ValueError:
            found.append(f"--sweep {self.sweep}: give packing lengths with commas between them, as in 4096,8K")
        return found

    def _resume_problems(self) -> list[str]:
        """Options that would be other ones than those of the run that goes on."""
        others = [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in ("resume", "cached_dataset", "mix", "world_size")
            and getattr(self, field.name) != field.default
            and field.name not in {each.name for each in dataclasses.fields(CacheOptions)}
        ]
        return [f"{flag(name)}: --resume takes the options of the run that goes on; leave it out" for name in others]

    @property
    def not_shared_with(self) -> list[str]:
        """Options, as they are given, with which no prefixes are shared."""
        return [*no_sharing_with(self, self.packing, self.sequence_parallel_ranks), *self.mixing]

    def _fit_problems(self) -> list[str]:
        """What does not go with ``--fit``, or only goes with it."""
        if self.fit is None and self.model is not None:
            return []
        if self.fit is None:
            named = {field.name for part in (MemoryOptions, AdapterOptions) for field in dataclasses.fields(part)}
            named -= {field.name for field in dataclasses.fields(LearningOptions)}
            given = [
                field.name
                for field in dataclasses.fields(self)
                if field.name in named and getattr(self, field.name) != field.default
            ]
            return [f"{flag(name)} goes with --model or --fit, which tell of memory" for name in given]
        found = [
            f"{flag(name)} is not for --fit, which makes a plan for each setting: leave out one of them"
            for name in ("sweep", "save", "html", "tflops")
            if getattr(self, name) is not None
        ]
        if self.lengths is not None:
            found.append("--fit needs caches: it plans what training would, and prints the command that trains on them")
        if self.mixing:
            found.append("--fit takes caches whole: leave out --mix, --interleave-probs and what stands behind a #")
        if self.fit < 10**6:
            found.append(f"--fit {written_bytes(self.fit)}: that many bytes hold no model; memory is given as in 80GB")
        if self.share_prefix == "true" or self.max_rows_per_tree is not None:
            found.append("--fit computes every sample whole: leave out --share-prefix true and --max-rows-per-tree")
        if self.has_no_rows or not self.packing:
            found.append(
                "--fit searches packs: leave out --packing false, --dynamic-batch-tokens and --schedule skrull"
            )
        return found

    def sweep_lengths(self) -> list[int]:
        """The packing lengths to compare.

        Raises:
            ValueError: if one is no number.
        """
        return [num_tokens(length) for length in (self.sweep or "").split(",") if length]


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
