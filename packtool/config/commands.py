"""Settings of the commands without a file of their own, from ``packtool check`` to ``packtool demo``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from packtool.config import data
from packtool.config.conflicts import Settings
from packtool.config.model import ATTN_IMPL_HELP, AttnImpl, DType, QuantizationOptions
from packtool.config.packages import PackageOptions
from packtool.config.packing import SEQUENCE_PARALLELISM, LaunchOptions, ParallelOptions, SharingOptions
from packtool.config.settings import REQUIRED, Tokens, flag, option, row_option, speed_option
from packtool.constants import TRAIN_SPLIT

_THRESHOLD = re.compile(r"\d+|\d+(\.\d+)?%")


@dataclass(frozen=True, kw_only=True)
class InspectConfig(data.AccessOptions):
    """Settings of ``packtool inspect``."""

    directory: str = option(REQUIRED, "Inspect this cache, or this --output-dir of a run.", path=True)
    row: int | None = option(None, "Show sample N as text; with --run, also the steps that trained it.", minimum=0)
    run: str | None = option(None, "Show when this run (its --output-dir) trained --row.", path=True)
    trained: bool = option(False, "Show how often a run trained the samples of each cache.")
    losses: bool = option(False, "Show samples of a run with unusual losses; --html and --serve show their media.")
    export_losses: str | None = option(
        None, "Write the losses of all samples of a run to this Parquet file.", path=True
    )
    step: int | None = option(None, "Show the samples of step N of a run, rank by rank.", minimum=1)
    split: str = option(TRAIN_SPLIT, "Show this split, train or val.")
    model: str | None = option(None, "Use the tokenizer in this model directory; default is the export's model.")
    plan: str | None = option(None, "Show packs of this plan, written by packtool plan --save.", path=True)
    pack: int | None = option(None, "Show pack N of --plan.", minimum=0)
    html: str | None = option(None, "Write web pages of samples, dropped rows and packs to this new folder.", path=True)
    max_samples: int = option(1000, "Show at most N samples on the pages of --html, evenly spaced.", maximum=1_000_000)
    serve: bool = option(False, "Serve web pages of the complete cache on this machine until Ctrl-C.")
    port: int = option(0, "Serve on this port; 0 selects a free one.", minimum=0, maximum=65_535)
    verify: bool = option(False, "Check all files and list damaged ones with the command that repairs them.")

    @property
    def shows_losses(self) -> bool:
        return self.losses or self.export_losses is not None

    def value_problems(self) -> list[str]:
        shown = ("row", "trained", "step", "pack", "html", "serve", "verify")
        names = [flag(name) for name in shown if getattr(self, name) != getattr(type(self), name)]
        if self.shows_losses and names not in (["--html"], ["--serve"]):
            names.append("--losses")
        return [f"{' and '.join(names)} show different things: give one of them"] if len(names) > 1 else []


@dataclass(frozen=True, kw_only=True)
class ExplainConfig(Settings):
    """Settings of ``packtool explain``."""

    code: str = option("", "Explain this code, such as R002, or its name; default lists all codes.")


@dataclass(frozen=True, kw_only=True)
class CheckConfig(data.RowOptions, data.EncodeSpec, PackageOptions):
    """Settings of ``packtool check``."""

    COMMON_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("dataset", "model", "max_dropped", "markdown", "gitlab", "github", "max_length", "truncation_strategy"),
    )

    dataset: tuple[str, ...] = option(REQUIRED, data.DATASET_HELP, path=True)
    max_dropped: str = option("0", "Fail if more than this number of rows is dropped, or percentage, such as 1%.")
    check_against: tuple[str, ...] = row_option((), data.CHECK_AGAINST_HELP, path=True)
    max_overlap: str | None = row_option(
        None, "Fail if more rows than this number or percentage occur in evaluation data."
    )
    markdown: str | None = option(None, "Write the summary to this Markdown file.", path=True)
    gitlab: str | None = option(None, "Write a code quality report for GitLab to this JSON file.", path=True)
    github: bool = option(False, "Print annotations for GitHub on stderr.", env="GITHUB_ACTIONS")

    def value_problems(self) -> list[str]:
        problems = data.row_option_problems(self.expand_turns, self.loss_scale, self.chat_template_kwargs)
        for name, threshold in (("--max-dropped", self.max_dropped), ("--max-overlap", self.max_overlap or "0")):
            if _THRESHOLD.fullmatch(threshold) is None:
                problems.append(f"{name} {threshold}: give a number of rows, or a percentage such as 1%")
        return problems

    def num_allowed(self, threshold: str, num_rows: int) -> int:
        """Return how many of ``num_rows`` rows a threshold allows, such as ``max_dropped``."""
        number = float(threshold.removesuffix("%"))
        return int(number * num_rows / 100) if threshold.endswith("%") else int(number)


SchemaName = Literal["train", "export", "mixture"]


@dataclass(frozen=True, kw_only=True)
class SchemaConfig(Settings):
    """Settings of ``packtool schema``."""

    kind: SchemaName = option("train", "Print the schema of options of train or export, or of recipes (mixture).")
    output: str | None = option(None, "Write the schema to this file instead.", path=True)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(data.CacheOptions, data.AccessOptions, ParallelOptions, LaunchOptions, SharingOptions):
    """Settings of ``packtool verify``."""

    model: str = option(REQUIRED, "Check this model, a directory or hub id.")
    cached_dataset: tuple[str, ...] = option(REQUIRED, "Check with samples of these caches.", path=True)
    packing_length: Tokens | None = option(
        None, "Limit each packed sequence to N tokens; default is the export's --max-length.", minimum=2
    )
    num_packs: int = option(2, "Compare N packed sequences with their samples computed alone.")
    attn_impl: AttnImpl = option("auto", ATTN_IMPL_HELP)
    torch_dtype: DType = option("auto", "Load weights in this precision; auto uses the checkpoint's, float32 on CPU.")
    trajectory: int | None = option(None, "Train N steps packed and unpacked, and compare their losses and weights.")
    samples_per_step: int | None = option(None, "Train N samples per step with --trajectory; default is 16.")
    seed: int = option(42, "Set the random seed of packing.", minimum=0)
    html: str | None = option(None, "Write the report to this file as a web page.", path=True)

    @property
    def sharing_conflicts(self) -> list[str]:
        return ["--trajectory"] if self.trajectory is not None else []


Split = Literal["train", "val"]
MAX_TOKENS_OPTION = "--max-tokens-per-micro-batch"
MAX_TOKENS_HELP = "Limit each forward pass of evaluation to N tokens."


@dataclass(frozen=True, kw_only=True)
class EvalConfig(
    data.CacheOptions,
    data.MediaCacheOptions,
    data.AccessOptions,
    ParallelOptions,
    LaunchOptions,
    SharingOptions,
    QuantizationOptions,
    PackageOptions,
):
    """Settings of ``packtool eval``."""

    model: str = option(REQUIRED, "Evaluate this model or adapter, a directory or hub id.")
    base_model: str | None = option(
        None, "Load the adapter's base model from this directory instead of its recorded location.", path=True
    )
    cached_dataset: tuple[str, ...] = option(REQUIRED, "Evaluate the samples of these caches.", path=True)
    output: str = option(REQUIRED, "Write the results to this Parquet file, one row per sample.", path=True)
    split: Split | None = option(None, "Evaluate this split; default is val if all caches have it, else train.")
    max_tokens_per_micro_batch: Tokens | None = speed_option(None, MAX_TOKENS_HELP)
    max_samples_per_micro_batch: int | None = speed_option(None, "Limit each forward pass to N samples.")
    limit: int | None = option(None, "Evaluate only the first N samples.")
    torch_dtype: DType = speed_option(
        "auto", "Load weights in this precision; auto uses the checkpoint's, float32 on CPU."
    )
    attn_impl: AttnImpl = speed_option("auto", ATTN_IMPL_HELP)
    dataloader_num_workers: int = speed_option(1, "Load media in N processes per GPU.", minimum=0)

    @property
    def sharing_conflicts(self) -> list[str]:
        bounds = ["--max-samples-per-micro-batch"] if self.max_samples_per_micro_batch is not None else []
        return bounds + ([SEQUENCE_PARALLELISM] if self.sequence_parallel_ranks > 1 else [])


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Settings):
    """Settings of ``packtool merge``."""

    adapter: str = option(REQUIRED, "Merge this adapter, a checkpoint of packtool train or peft.", path=True)
    output: str = option(REQUIRED, "Write the merged model to this new or empty directory.", path=True)
    base_model: str | None = option(
        None, "Load the adapter's base model from this directory instead of its recorded location.", path=True
    )
    torch_dtype: DType = option("auto", "Write weights in this precision; auto keeps the base model's.")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Settings):
    """Settings of ``packtool demo``."""

    output_dir: str = option("packtool-demo", "Write all files to this folder.", path=True)
    seed: int = option(7, "Set the random seed of dataset, model and training.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class TranslateConfig(Settings):
    """Settings of ``packtool translate``."""

    file: str = option("", "Translate this YAML or JSON file of another tool.", path=True)
    command_line: tuple[str, ...] = option((), "Translate this command line; you can also write it after --.")
    tool: str | None = option(
        None, "Read the format of ms-swift, llama-factory, axolotl or trl; default detects it.", aliases=("from",)
    )
    form: Literal["yaml", "command"] = option("yaml", "Print a YAML file or a command line.", aliases=("as",))
