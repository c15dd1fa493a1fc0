"""What ``packtool train`` needs to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packtool.config.evaluate import MAX_TOKENS_HELP
from packtool.config.export import ExportConfig
from packtool.config.packing import PackingOptions, packing_problems
from packtool.config.parallel import ParallelOptions, parallel_problems
from packtool.config.rows import (
    LOSS_SCALE_HELP,
    OVERFLOW_HELP,
    TRUNCATION_HELP,
    MediaOptions,
    MediaOverflow,
    RowOptions,
    TruncationStrategy,
    image_limit_problems,
)
from packtool.config.settings import REQUIRED, option
from packtool.config.sizes import num_bytes
from packtool.config.verify import ATTN_IMPL_HELP, AttnImpl

TrainType = Literal["lora", "full"]
FSDP_WORDS = ("full_shard", "shard_grad_op", "auto_wrap", "offload")
# Settings of a run that say something about rows, and nothing about a cache.
ROWS_ONLY = (
    "streaming",
    "val_dataset",
    "dataset_info",
    "columns",
    "system",
    "split_dataset_ratio",
    "strict",
)
DType = Literal["auto", "float32", "bfloat16", "float16"]
MasterWeights = Literal["float32", "kahan", "none"]
OnNan = Literal["stop", "skip", "go-on"]
LossReduction = Literal["token", "sample"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RowOptions, MediaOptions, PackingOptions, ParallelOptions):
    """What ``packtool train`` needs to know."""

    model: str = option(REQUIRED, "Directory (or hub id) of the model.", panel="Model and data")
    cached_dataset: tuple[str, ...] = option(
        (),
        "Caches that packtool export made; several may follow. --dataset gives rows instead.",
        panel="Model and data",
    )
    output_dir: str = option(REQUIRED, "Directory for checkpoints and figures.", panel="Model and data")
    cache_dir: str | None = option(
        None,
        "Directory of this machine for copies of remote caches; by default packtool in ~/.cache.",
        panel="Model and data",
        env="PACKTOOL_CACHE_DIR",
    )
    cache_dir_size: str | None = option(
        None,
        "Most that --cache-dir may hold, as in 200GB; copies of other caches go first. By default all the disk has.",
        panel="Model and data",
        env="PACKTOOL_CACHE_DIR_SIZE",
    )
    truncation_strategy: TruncationStrategy | None = option(None, TRUNCATION_HELP, panel="Rows")
    media_overflow: MediaOverflow | None = option(None, OVERFLOW_HELP, panel="Rows")
    loss_scale: str | None = option(None, LOSS_SCALE_HELP, panel="Rows")
    streaming: bool = option(
        False,
        "Encode and pack the rows of --dataset while training, without a cache; needs --max-steps.",
        panel="Streaming",
    )
    packing_interval: int = option(
        1000, "Samples that streaming holds and packs at a time.", panel="Streaming", minimum=1
    )
    shuffle_buffer_size: int = option(
        1000, "Samples that streaming draws the next one from; 1 keeps the order.", panel="Streaming", minimum=1
    )
    torch_dtype: DType = option(
        "auto",
        "Precision of the computation; auto is the checkpoint's on a GPU and float32 on a CPU.",
        panel="Model and data",
    )
    master_weights: MasterWeights = option(
        "float32",
        "How all weights are kept while they are trained in 16 bits: float32 (16 bytes each with gradient and AdamW); "
        "kahan, bfloat16 and what rounding takes (12 bytes); none, bfloat16 alone, which loses small updates (8).",
        panel="Training",
    )

    packing: bool = option(False, "Pack samples without padding.", panel="Packing")
    attn_impl: AttnImpl = option("auto", ATTN_IMPL_HELP, panel="Packing")
    verify_packing: bool = option(
        True,
        "Before the first step, show on a few samples that packed ones compute what they do alone.",
        panel="Packing",
    )
    plan: str | None = option(None, "Train the packs of this file, which packtool plan --save wrote.", panel="Packing")

    train_type: TrainType = option(
        "lora", "Low-rank adapters, or all weights.", panel="Training", aliases=("tuner_type",)
    )
    num_train_epochs: float = option(1.0, "Times that every sample is seen.", panel="Training", minimum=0.0)
    max_steps: int | None = option(None, "Stop after so many optimizer steps.", panel="Training", minimum=1)
    learning_rate: float | None = option(
        None, "Peak learning rate; by default 1e-4 with lora and 1e-5 with full.", panel="Training", minimum=0.0
    )
    vit_lr: float | None = option(
        None, "Peak learning rate of the vision tower; by default --learning-rate.", panel="Training", minimum=0.0
    )
    aligner_lr: float | None = option(
        None, "Peak learning rate of the aligner; by default --learning-rate.", panel="Training", minimum=0.0
    )
    weight_decay: float = option(0.1, "AdamW's weight decay.", panel="Training", minimum=0.0)
    warmup_ratio: float = option(
        0.05, "Share of the steps in which the learning rate rises.", panel="Training", minimum=0.0, maximum=1.0
    )
    lr_scheduler_type: str = option(
        "cosine", "Schedule of the learning rate, by transformers' names.", panel="Training"
    )
    max_grad_norm: float = option(
        1.0, "Gradient norm above which gradients are scaled down.", panel="Training", minimum=0.0
    )
    loss_reduction: LossReduction = option(
        "token",
        "Mean over the target tokens of a step, or over its samples, each by its own mean.",
        panel="Training",
    )
    gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations to save memory; by default for models of more than 100 million parameters.",
        panel="Training",
    )

    deepspeed: str | None = option(
        None,
        "DeepSpeed: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload, or a JSON file of its settings.",
        panel="Training",
    )
    fsdp: tuple[str, ...] = option(
        (),
        "FSDP2: full_shard, or shard_grad_op to keep weights whole between forward and backward; and offload.",
        panel="Training",
    )
    use_liger_kernel: bool = option(False, "Liger's kernels for norms, RoPE and SwiGLU.", panel="Training")

    lora_rank: int = option(8, "Rank of the adapters.", panel="Parameters", minimum=1)
    lora_alpha: int = option(32, "Scale of the adapters.", panel="Parameters", minimum=1)
    lora_dropout: float = option(0.05, "Dropout before the adapters.", panel="Parameters", minimum=0.0, maximum=1.0)
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "Modules that get adapters: all-linear or names.", panel="Parameters"
    )
    freeze_vit: bool = option(
        True, "Keep the vision tower (and an Omni model's audio tower) as it is.", panel="Parameters"
    )
    freeze_aligner: bool = option(True, "Keep the projection from vision to text as it is.", panel="Parameters")
    freeze_llm: bool = option(False, "Keep the language model as it is.", panel="Parameters")

    logging_steps: int = option(5, "Optimizer steps between two log lines.", panel="Run", minimum=1)
    enable_channel_loss: bool = option(
        False, "Log the loss and the accuracy of each of the rows' channels.", panel="Run"
    )
    eval_strategy: Literal["no", "steps", "epoch"] = option(
        "no", "Evaluate the caches' val split: every --eval-steps, or at the end of every epoch.", panel="Run"
    )
    eval_steps: int = option(500, "Optimizer steps between two evaluations.", panel="Run", minimum=1)
    max_tokens_per_micro_batch: int | None = option(None, MAX_TOKENS_HELP, panel="Run", minimum=1)
    save_steps: int = option(500, "Optimizer steps between two checkpoints.", panel="Run", minimum=1)
    report_to: tuple[str, ...] = option(
        (), "Also log to tensorboard, wandb, swanlab, mlflow, ...; metrics.jsonl is always written.", panel="Run"
    )
    save_total_limit: int | None = option(None, "Checkpoints to keep.", panel="Run", minimum=1)
    dataloader_num_workers: int = option(
        1, "Processes a rank that load pictures ahead of the step.", panel="Run", minimum=0
    )
    on_bad_media: Literal["raise", "skip"] = option(
        "raise",
        "What media that cannot be loaded do: stop the run, or leave their sample out, counted and listed.",
        panel="Run",
    )
    on_nan: OnNan = option(
        "stop",
        "What a loss or gradient that is infinite or not a number does: end the run before the update, leave the step "
        "out, or nothing.",
        panel="Run",
    )
    resume_from_checkpoint: str | None = option(
        None, "true for the newest checkpoint in --output-dir, or the directory of one.", panel="Run"
    )
    overwrite_output_dir: bool = option(
        False, "Remove the checkpoints and figures of an earlier run in --output-dir.", panel="Run"
    )
    add_version: bool = option(
        False, "Write into a new folder of --output-dir for each run: v0-DATE-TIME, v1-DATE-TIME, ...", panel="Run"
    )
    resume_only_model: bool = option(
        False,
        "Take only the weights of --resume-from-checkpoint, and begin a new schedule with a new optimizer.",
        panel="Run",
    )
    dry_run: bool = option(False, "Plan, check and print, but do not train.", panel="Run")
    hardware: str | None = option(
        None,
        "GPUs elsewhere that --dry-run plans for: h100, h200, a100, 910b, or a file as simulate takes it.",
        panel="Run",
    )
    training: Mapping[str, Any] = option(
        {},
        "Further fields of transformers' TrainingArguments, as --set training.name=value.",
        flag=False,
    )

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = [*image_limit_problems(self), *packing_problems(self, self.packing), *self._row_problems()]
        found += parallel_problems(self, removes_padding=self.removes_padding, attn_impl=self.attn_impl)
        try:
            _ = self.cache_dir_bytes
        except ValueError as error:
            found.append(f"--cache-dir-size: {error}")
        if self.plan is not None and not self.packing:
            found.append("--plan names a file of packs: it goes with --packing true")
        if self.deepspeed is not None and self.on_bad_media == "skip":
            found.append("--on-bad-media skip corrects gradients before they are applied, which DeepSpeed does itself")
        if self.num_sharing > 1 and self.on_bad_media == "skip":
            found.append(
                "--on-bad-media skip: processes that share a row load different media of it, and would not skip alike; "
                "leave out --sequence-parallel-size, or skip bad rows at export"
            )
        if self.deepspeed is not None and self.on_nan == "skip":
            found.append("--on-nan skip leaves out updates, which DeepSpeed makes itself: use stop or go-on")
        if self.resume_only_model and self.resume_from_checkpoint in (None, "false"):
            found.append("--resume-only-model goes with --resume-from-checkpoint, which names the weights")
        found += self._master_problems()
        if self.hardware is not None and not self.dry_run:
            found.append("--hardware is for plans of runs on other machines: it goes with --dry-run")
        if self.overwrite_output_dir and self.add_version:
            found.append("--add-version never meets an earlier run: leave out --overwrite-output-dir")
        if self.deepspeed is not None and self.fsdp:
            found.append("--deepspeed and --fsdp are two ways to shard: give one of them")
        found += [f"--fsdp {word}: known are {', '.join(FSDP_WORDS)}" for word in self.fsdp if word not in FSDP_WORDS]
        if self.freeze_vit and self.freeze_aligner and self.freeze_llm:
            found.append("--freeze-vit, --freeze-aligner and --freeze-llm together leave nothing to train")
        return found

    def _master_problems(self) -> list[str]:
        """Where ``--master-weights`` says something that would not be done."""
        if self.master_weights == "float32":
            return []
        given, found = f"--master-weights {self.master_weights}", []
        if self.train_type == "lora":
            found.append(f"{given}: adapters are small and always float32; it goes with --train-type full")
        if self.fsdp or self.deepspeed is not None:
            found.append(f"{given}: FSDP and DeepSpeed keep float32 weights, shared out over the processes")
        if self.torch_dtype == "float16":
            found.append(f"{given}: float16 gradients cannot be unscaled; use --torch-dtype bfloat16")
        if self.master_weights == "kahan" and "optim" in self.training:
            found.append(f"{given} is an AdamW of its own: leave out --set training.optim")
        return found

    def _row_problems(self) -> list[str]:
        """Mistakes about where the samples come from."""
        found = []
        if bool(self.cached_dataset) == bool(self.dataset):
            found.append("give either --cached-dataset, made by packtool export, or --dataset with rows")
        if not self.dataset:
            given = [name for name in ROWS_ONLY if getattr(self, name)]
            found += [f"--{name.replace('_', '-')} goes with --dataset: a cache stays as exported" for name in given]
        if not self.streaming:
            return found
        if self.max_steps is None:
            found.append("--max-steps is missing: --streaming true does not know how many rows there are")
        if not self.packing:
            found.append("--streaming true packs what it reads: it goes with --packing true")
        longest, room = self.max_length, self.packing_length
        if longest is not None and room is not None and room < longest:
            found.append(
                f"--packing-length {room} is smaller than --max-length {longest}: nobody has counted the samples of "
                "--streaming true, and one could be longer than a pack; raise the one or lower the other"
            )
        if self.eval_strategy != "no":
            found.append("--eval-strategy needs a cache with a val split: leave out --streaming true")
        if self.schedule != "packs":
            found.append(f"--schedule {self.schedule} needs a cache: leave out --streaming true")
        if self.plan is not None:
            found.append("--plan needs a cache: --streaming true plans while it reads")
        if self.val_dataset or self.split_dataset_ratio:
            found.append("--val-dataset and --split-dataset-ratio need a cache: leave out --streaming true")
        if not float(self.num_train_epochs).is_integer() or self.num_train_epochs < 1:
            found.append(f"--num-train-epochs {self.num_train_epochs}: streaming reads all rows each time")
        if self.packing_window is not None:
            found.append("--packing-window needs a cache: --packing-interval is streaming's window")
        return found

    def export_config(self, output_dir: str, max_length: int) -> ExportConfig:
        """The export that turns the rows of ``--dataset`` into a cache."""
        names = {field.name for base in (RowOptions, MediaOptions) for field in dataclasses.fields(base)}
        return ExportConfig(
            **{name: getattr(self, name) for name in names},
            model=self.model,
            max_length=max_length,
            truncation_strategy=self.truncation_strategy or "delete",
            media_overflow=self.media_overflow or "drop",
            loss_scale=self.loss_scale or "default",
            seed=self.seed,
            output_dir=output_dir,
        )

    @property
    def cache_dir_bytes(self) -> int | None:
        """The limit of the directory of copies, or None."""
        return None if self.cache_dir_size is None else num_bytes(self.cache_dir_size)

    @property
    def removes_padding(self) -> bool:
        """Whether several samples share a row: packed, in dynamic batches, or dealt by Skrull."""
        return self.packing or self.has_no_rows

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate, with the default that goes with the train type."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-4 if self.train_type == "lora" else 1e-5
