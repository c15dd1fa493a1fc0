"""What ``packtool export`` needs to know."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from packtool.config.packages import missing_packages
from packtool.config.rows import (
    BOX_SETTINGS,
    DATASET_HELP,
    EXPAND_HELP,
    LOSS_SCALE_HELP,
    OVERFLOW_HELP,
    TEMPLATE_HELP,
    TRUNCATION_HELP,
    BoxOptions,
    ExpandTurns,
    MediaOptions,
    MediaOverflow,
    RowOptions,
    TruncationStrategy,
    access_problems,
    expand_problems,
    image_limit_problems,
)
from packtool.config.settings import REQUIRED, option, part_of
from packtool.config.sizes import Tokens

Executor = Literal["local", "ray"]
MediaStorage = Literal["reference", "embed"]


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(BoxOptions, MediaOptions):
    """Everything that decides what a row becomes: two exports with the same spec write the same tokens."""

    model: str = option(
        REQUIRED, "Directory (or hub id) of the model: only its tokenizer, processor settings and config are read."
    )
    max_length: Tokens = option(
        0, "Maximum tokens of a sample; by default the model's maximum, but at most 8192.", minimum=2
    )
    truncation_strategy: TruncationStrategy = option("delete", TRUNCATION_HELP)
    media_overflow: MediaOverflow = option("drop", OVERFLOW_HELP, panel="Rows")
    loss_scale: str = option("default", LOSS_SCALE_HELP, panel="Rows")
    expand_turns: ExpandTurns = option("false", EXPAND_HELP, panel="Rows")
    chat_template: str | None = option(None, TEMPLATE_HELP, panel="Rows")
    media: MediaStorage = option(
        "reference", "Keep the media's paths, or embed the encoded files' bytes into the cache.", panel="Rows"
    )

    def recorded(self) -> dict[str, Any]:
        """What a cache's manifest keeps of it.

        A later option that is not given leaves no trace, so that the identity of caches that need none of it stays.
        """
        values = dataclasses.asdict(self)
        for name in BOX_SETTINGS:
            if values[name] is None:
                del values[name]
        if self.expand_turns == "false":
            del values["expand_turns"]
        if self.chat_template is None:
            del values["chat_template"]
        else:
            values["chat_template"] = os.path.abspath(self.chat_template)
        return values


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RowOptions, EncodeSpec):
    """What ``packtool export`` needs to know."""

    TAKES_TOKENS: ClassVar[bool] = False
    """Whether rows that have tokens and what these were made of are taken as tokens."""
    NEEDED_FIRST: ClassVar[tuple[str, ...]] = (
        "model",
        "dataset",
        "output_dir",
        "max_length",
        "truncation_strategy",
        "split_dataset_ratio",
        "dataset_num_proc",
        "overwrite",
        "repair",
        "dry_run",
    )

    dataset: tuple[str, ...] = option(REQUIRED, DATASET_HELP, panel="Rows")
    output_dir: str = option(REQUIRED, "Directory that becomes the cache.")
    seed: int = option(42, "Seed of the split.", minimum=0, panel="Scale")
    rows_per_shard: int | None = option(
        None,
        "Rows that one shard holds, in steps of 64; by default total/64, between 256 and 16384.",
        minimum=1,
        panel="Scale",
    )
    to_cached_dataset: bool = option(
        True, "Accepted for ms-swift's sake: export always writes a cached dataset.", panel="Scale"
    )
    overwrite: bool = option(False, "Delete the cache in the output directory first.")
    repair: bool = option(False, "Make again only those files of a finished cache that are damaged.")
    executor: Executor = option("local", "Where the work is done: this machine, or a Ray cluster.", panel="Scale")
    ray_address: str | None = option(
        None, "Address of the Ray cluster; by default one is started here.", panel="Scale", env="RAY_ADDRESS"
    )
    task_index: int | None = option(
        None,
        "Export only part i of --num-tasks, from 0 on; the last part to finish publishes.",
        panel="Scale",
        minimum=0,
    )
    num_tasks: int | None = option(None, "Parts that a job array exports.", panel="Scale", minimum=1)
    finalize: bool = option(False, "Publish what the parts of a job array have exported.", panel="Scale")
    dry_run: bool = option(False, "Encode and count, but write nothing.")

    @property
    def encode_spec(self) -> EncodeSpec:
        """The part that decides what a row becomes."""
        return part_of(EncodeSpec, self)

    @property
    def is_part(self) -> bool:
        """Whether other commands, perhaps on other machines, export other parts into the same directory."""
        return self.task_index is not None or self.finalize

    def missing_packages(self) -> list[str]:
        """Packages that these settings need and this environment lacks."""
        return missing_packages(executor=self.executor)

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = [*image_limit_problems(self), *access_problems(self)]
        found += expand_problems(self.expand_turns, self.loss_scale)
        if (self.task_index is None) != (self.num_tasks is None):
            found.append("--task-index and --num-tasks go together: part i of n")
        elif self.task_index is not None and self.num_tasks is not None and self.task_index >= self.num_tasks:
            found.append(f"--task-index {self.task_index}: the parts of --num-tasks {self.num_tasks} begin at 0")
        if self.is_part and (self.dry_run or self.overwrite or self.repair):
            found.append("--dry-run, --overwrite and --repair are for whole exports, not for parts of one")
        if self.repair and (self.dry_run or self.overwrite):
            found.append("--repair keeps what is whole: leave out --overwrite and --dry-run")
        if not self.to_cached_dataset:
            found.append("--to-cached-dataset false: export does nothing but write a cached dataset; leave it out")
        return found
