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

    directory: str = option(REQUIRED, "The cache, or the --output-dir of a run; may stand without the option's name.")
    row: int | None = option(
        None,
        "Show this sample of the split, as a person can read it. With --run, or of a run's only cache, when it was "
        "trained, and with which others.",
        minimum=0,
    )
    run: str | None = option(None, "The --output-dir of a run: when it trained the sample of --row.")
    trained: bool = option(False, "Of a run, or of one of its checkpoints: what was trained until then, by cache.")
    step: int | None = option(
        None, "Of a run: what this step held, rank by rank; the first step is 1, as in the log.", minimum=1
    )
    split: str = option(TRAIN_SPLIT, "Split that --row counts in, and that pages show.")
    model: str | None = option(None, "Directory of the tokenizer and config.json; by default the export's model.")
    plan: str | None = option(None, "A plan of the cache, with its steps, from packtool plan --save.")
    pack: int | None = option(None, "Show this pack of --plan; samples that share a prefix as a tree.", minimum=0)
    html: str | None = option(
        None,
        "Write pages into this new folder, to leaf through samples and their media, dropped rows, and the steps and "
        "packs of --plan; they need no server.",
    )
    max_samples: int = option(
        1000,
        "Most samples on the pages of --html, evenly chosen from the split; with --plan about so many, of whole steps.",
        maximum=1_000_000,
    )
    serve: bool = option(False, "Show the pages of the whole cache at an address of this machine, until Ctrl-C.")
    port: int = option(0, "Port of --serve; 0 takes one that is free.", minimum=0, maximum=65_535)
    verify: bool = option(False, "Read the whole cache, and say which files are damaged and how to mend them.")

    def value_problems(self) -> list[str]:
        """Return the problem of options that show different things."""
        shown = ("row", "trained", "step", "pack", "html", "serve", "verify")
        names = [flag(name) for name in shown if getattr(self, name) != getattr(type(self), name)]
        return [f"{' and '.join(names)} show different things: give one of them"] if len(names) > 1 else []


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(CacheOptions, AccessOptions, ParallelOptions, LaunchOptions, SharingOptions):
    """Settings of ``packtool verify``."""

    model: str = option(REQUIRED, "Directory (or hub id) of the model.")
    cached_dataset: tuple[str, ...] = option(
        REQUIRED, "Caches that packtool export made; several may follow. Their samples are packed and compared."
    )
    packing_length: Tokens | None = option(
        None, "Tokens that a pack holds at most; by default the export's --max-length.", minimum=2
    )
    num_packs: int = option(2, "Packs to look at.")
    attn_impl: AttnImpl = option("auto", ATTN_IMPL_HELP)
    torch_dtype: DType = option(
        "auto", "Precision of the weights; auto is the checkpoint's on a GPU, and float32 on the CPU."
    )
    trajectory: int | None = option(
        None,
        "Instead, train so many steps with AdamW in float32 twice, packed with --samples-per-step and unpacked, and "
        "compare the losses of all steps and the weights in the end.",
    )
    samples_per_step: int | None = option(None, "Samples of a step of --trajectory; by default 16.")
    seed: int = option(42, "Seed of the packing.", minimum=0)
    html: str | None = option(None, "Write the report as a page to this file, also if a check fails.")

    @property
    def not_shared_with(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        trained = ["--trajectory"] if self.trajectory is not None else []
        return trained + ([SEQUENCE_PARALLELISM] if self.sequence_parallel_ranks > 1 else [])


Split = Literal["train", "val"]
MAX_TOKENS_OPTION = "--max-tokens-per-micro-batch"
MAX_TOKENS_HELP = (
    "Most tokens of a forward pass of evaluation: a hard limit, also for a single sample. By default 8192, or the "
    "longest sample if that is longer."
)


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

    model: str = option(REQUIRED, "Directory (or hub id) of a model, or of an adapter whose base model is there.")
    base_model: str | None = option(None, "Where the base model of an adapter is now, if it has moved.")
    cached_dataset: tuple[str, ...] = option(REQUIRED, "Caches that packtool export made; several may follow.")
    output: str = option(REQUIRED, "File to write a line for each sample to, ending in .parquet.")
    split: Split | None = option(None, "Split to evaluate; by default val if all caches have one, else train.")
    max_tokens_per_micro_batch: Tokens | None = speed_option(None, MAX_TOKENS_HELP)
    max_samples_per_micro_batch: int | None = speed_option(None, "Most samples of a forward pass.")
    limit: int | None = option(None, "Evaluate only so many samples, the first ones.")
    torch_dtype: DType = speed_option(
        "auto", "Precision of the weights; auto is the checkpoint's on a GPU, float32 on a CPU."
    )
    attn_impl: AttnImpl = speed_option("auto", ATTN_IMPL_HELP)
    dataloader_num_workers: int = speed_option(1, "Processes a rank that load pictures ahead of the model.", minimum=0)

    @property
    def not_shared_with(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        bounds = ["--max-samples-per-micro-batch"] if self.max_samples_per_micro_batch is not None else []
        return bounds + ([SEQUENCE_PARALLELISM] if self.sequence_parallel_ranks > 1 else [])


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Settings):
    """Settings of ``packtool merge``."""

    adapter: str = option(REQUIRED, "Directory of an adapter: a checkpoint of packtool train, or one that peft saved.")
    output: str = option(REQUIRED, "Directory to write the merged model to; it must be empty or new.")
    base_model: str | None = option(None, "Where the adapter's base model is now, if it has moved.")
    torch_dtype: DType = option("auto", "Precision to write the weights in; auto is the base model's.")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Settings):
    """Settings of ``packtool demo``."""

    output_dir: str = option("packtool-demo", "Folder that the demo makes and works in.")
    seed: int = option(7, "Seed of the world, the model and the training.", minimum=0)
