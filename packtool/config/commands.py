"""Settings of ``packtool inspect``, ``verify``, ``eval``, ``merge`` and ``demo``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packtool.config.conflicts import Settings
from packtool.config.data import AccessOptions, CacheOptions, MediaCacheOptions
from packtool.config.model import ATTN_IMPL_HELP, AttnImpl, DType, QuantizationOptions
from packtool.config.packages import PackageOptions
from packtool.config.packing import SEQUENCE_PARALLELISM, LaunchOptions, ParallelOptions, SharingOptions
from packtool.config.settings import REQUIRED, Tokens, flag, option, speed_option
from packtool.constants import TRAIN_SPLIT


@dataclass(frozen=True, kw_only=True)
class InspectConfig(AccessOptions):
    """Settings of ``packtool inspect``."""

    directory: str = option(REQUIRED, "Cache directory, or --output-dir of a run.")
    row: int | None = option(None, "Show this sample of the split, and when it was trained.", minimum=0)
    run: str | None = option(None, "Output directory of the run that may have trained --row.")
    trained: bool = option(False, "Show what a run or checkpoint has trained, cache by cache.")
    step: int | None = option(None, "Show this step of a run, rank by rank.", minimum=1)
    split: str = option(TRAIN_SPLIT, "Split of --row and of the pages.")
    model: str | None = option(None, "Directory of the tokenizer and config.json; by default the export's model.")
    plan: str | None = option(None, "Plan file of the cache from packtool plan --save.")
    pack: int | None = option(None, "Show this pack of --plan.", minimum=0)
    html: str | None = option(None, "Write web pages of samples, media, dropped rows and packs to this folder.")
    max_samples: int = option(
        1000, "Maximum samples on the pages of --html, evenly chosen from the split.", maximum=1_000_000
    )
    serve: bool = option(False, "Serve pages of the whole cache on this machine until Ctrl-C.")
    port: int = option(0, "Port of --serve; 0 selects a free port.", minimum=0, maximum=65_535)
    verify: bool = option(False, "Verify all files of the cache and list damaged ones with their repair.")

    def value_problems(self) -> list[str]:
        """Return the problem of options that show different things."""
        shown = ("row", "trained", "step", "pack", "html", "serve", "verify")
        names = [flag(name) for name in shown if getattr(self, name) != getattr(type(self), name)]
        return [f"{' and '.join(names)} show different things: give one of them"] if len(names) > 1 else []


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(CacheOptions, AccessOptions, ParallelOptions, LaunchOptions, SharingOptions):
    """Settings of ``packtool verify``."""

    model: str = option(REQUIRED, "Model directory or hub id.")
    cached_dataset: tuple[str, ...] = option(REQUIRED, "Caches whose samples are packed and compared.")
    packing_length: Tokens | None = option(
        None, "Maximum tokens of a pack; by default the export's --max-length.", minimum=2
    )
    num_packs: int = option(2, "Number of packs to check.")
    attn_impl: AttnImpl = option("auto", ATTN_IMPL_HELP)
    torch_dtype: DType = option("auto", "Precision of the weights; auto uses the checkpoint's, or float32 on CPU.")
    trajectory: int | None = option(None, "Instead, train this many steps packed and unpacked, and compare them.")
    samples_per_step: int | None = option(None, "Samples per step of --trajectory; by default 16.")
    seed: int = option(42, "Random seed of the packing.", minimum=0)
    html: str | None = option(None, "Write the report as a web page to this file.")

    @property
    def sharing_conflicts(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        trained = ["--trajectory"] if self.trajectory is not None else []
        return trained + ([SEQUENCE_PARALLELISM] if self.sequence_parallel_ranks > 1 else [])


Split = Literal["train", "val"]
MAX_TOKENS_OPTION = "--max-tokens-per-micro-batch"
MAX_TOKENS_HELP = "Maximum tokens of a forward pass in evaluation."


@dataclass(frozen=True, kw_only=True)
class EvalConfig(
    CacheOptions,
    MediaCacheOptions,
    AccessOptions,
    ParallelOptions,
    LaunchOptions,
    SharingOptions,
    QuantizationOptions,
    PackageOptions,
):
    """Settings of ``packtool eval``."""

    model: str = option(REQUIRED, "Directory or hub id of a model or an adapter.")
    base_model: str | None = option(None, "New location of the adapter's base model.")
    cached_dataset: tuple[str, ...] = option(REQUIRED, "Caches to evaluate.")
    output: str = option(REQUIRED, "Parquet file to write, with one line per sample.")
    split: Split | None = option(None, "Split to evaluate; by default val where all caches have it.")
    max_tokens_per_micro_batch: Tokens | None = speed_option(None, MAX_TOKENS_HELP)
    max_samples_per_micro_batch: int | None = speed_option(None, "Maximum samples of a forward pass.")
    limit: int | None = option(None, "Evaluate only this many samples, from the first.")
    torch_dtype: DType = speed_option(
        "auto", "Precision of the weights; auto uses the checkpoint's, or float32 on CPU."
    )
    attn_impl: AttnImpl = speed_option("auto", ATTN_IMPL_HELP)
    dataloader_num_workers: int = speed_option(1, "Number of processes per rank that load media ahead.", minimum=0)

    @property
    def sharing_conflicts(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        bounds = ["--max-samples-per-micro-batch"] if self.max_samples_per_micro_batch is not None else []
        return bounds + ([SEQUENCE_PARALLELISM] if self.sequence_parallel_ranks > 1 else [])


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Settings):
    """Settings of ``packtool merge``."""

    adapter: str = option(REQUIRED, "Adapter directory: a checkpoint of packtool train or one saved by peft.")
    output: str = option(REQUIRED, "New or empty directory for the merged model.")
    base_model: str | None = option(None, "New location of the adapter's base model.")
    torch_dtype: DType = option("auto", "Precision of the written weights; auto keeps the base model's.")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Settings):
    """Settings of ``packtool demo``."""

    output_dir: str = option("packtool-demo", "Folder that the demo creates and works in.")
    seed: int = option(7, "Random seed of the dataset, the model and the training.", minimum=0)
