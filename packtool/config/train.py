"""What ``packtool train`` needs to know.

How weights are moved: optimizer, learning rates and their schedule. Names and meanings are ms-swift's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from packtool.config.checkpoints import CheckpointOptions
from packtool.config.commands import MAX_TOKENS_HELP
from packtool.config.conflicts import Settings
from packtool.config.data import (
    EXPAND_HELP,
    LOSS_SCALE_HELP,
    OVERFLOW_HELP,
    TEMPLATE_HELP,
    TRUNCATION_HELP,
    BoxOptions,
    CacheOptions,
    ExpandTurns,
    ExportConfig,
    MediaCacheOptions,
    MediaOptions,
    MediaOverflow,
    RowOptions,
    TruncationStrategy,
    expand_problems,
)
from packtool.config.mixture import MixOptions
from packtool.config.model import (
    ATTN_IMPL_HELP,
    AdapterOptions,
    AttnImpl,
    DType,
    ExpertOptions,
    MemoryOptions,
    QuantizationOptions,
)
from packtool.config.packages import missing_packages
from packtool.config.packing import IntervalOptions, LaunchOptions, PackingOptions, ParallelOptions
from packtool.config.settings import NOT_AT_ALL, Panel, Tokens, flag, option, part_of

_PANEL: Panel = "Optimizer"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Settings):
    """How weights are moved."""

    learning_rate: float | None = option(
        None, "Peak learning rate; by default 1e-4 with lora and 1e-5 with full.", panel=_PANEL, minimum=0.0
    )
    vit_lr: float | None = option(
        None, "Peak learning rate of the vision tower; by default --learning-rate.", panel=_PANEL, minimum=0.0
    )
    aligner_lr: float | None = option(
        None, "Peak learning rate of the aligner; by default --learning-rate.", panel=_PANEL, minimum=0.0
    )
    optim: str = option(
        "adamw_torch_fused", "Optimizer, by transformers' names: adamw_torch, adafactor, sgd, ...", panel=_PANEL
    )
    adam_beta1: float = option(0.9, "Adam's decay of the mean gradient.", panel=_PANEL, minimum=0.0, maximum=1.0)
    adam_beta2: float = option(
        0.999, "Adam's decay of the mean squared gradient.", panel=_PANEL, minimum=0.0, maximum=1.0
    )
    adam_epsilon: float = option(1e-8, "Adam's constant under the fraction.", panel=_PANEL, minimum=0.0)
    weight_decay: float = option(0.1, "AdamW's weight decay.", panel=_PANEL, minimum=0.0)
    warmup_ratio: float = option(
        0.05, "Share of the steps in which the learning rate rises.", panel=_PANEL, minimum=0.0, maximum=1.0
    )
    warmup_steps: int | None = option(
        None, "Steps in which the learning rate rises, instead of --warmup-ratio.", panel=_PANEL, minimum=0
    )
    lr_scheduler_type: str = option("cosine", "Schedule of the learning rate, by transformers' names.", panel=_PANEL)
    lr_scheduler_kwargs: Mapping[str, Any] = option(
        {},
        "What the schedule wants to know beside that, as JSON: '{\"min_lr\": 1e-6}' for cosine_with_min_lr.",
        panel=_PANEL,
    )
    max_grad_norm: float = option(
        1.0, "Gradient norm above which gradients are scaled down.", panel=_PANEL, minimum=0.0
    )
    router_aux_loss_coef: float = option(
        0.0,
        "Weight of the loss that balances the experts of a mixture, over the tokens of samples; 0 leaves it out.",
        panel=_PANEL,
        minimum=0.0,
    )
    neftune_noise_alpha: float | None = option(
        None,
        "Noise on the embeddings of training, NEFTune's alpha; each sample of a pack has the noise of its own length.",
        panel=_PANEL,
        minimum=0.0,
    )

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps of a run of ``num_steps`` in which the learning rate rises."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil(num_steps * self.warmup_ratio)


OnNan = Literal["stop", "skip", "go-on"]
LossReduction = Literal["token", "sample"]
EvalStrategy = Annotated[Literal["no", "steps", "epoch"], NOT_AT_ALL]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    CacheOptions,
    MediaCacheOptions,
    RowOptions,
    BoxOptions,
    MediaOptions,
    MixOptions,
    PackingOptions,
    IntervalOptions,
    ParallelOptions,
    LaunchOptions,
    OptimizerOptions,
    MemoryOptions,
    ExpertOptions,
    AdapterOptions,
    QuantizationOptions,
    CheckpointOptions,
):
    """What ``packtool train`` needs to know."""

    NEEDED_FIRST: ClassVar[tuple[str, ...]] = (
        "model",
        "cached_dataset",
        "dataset",
        "output_dir",
        "packing",
        "packing_length",
        "train_type",
        "learning_rate",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "dry_run",
    )

    model: str = option("", "Directory (or hub id) of the model; by default the cache's.", panel="Options")
    output_dir: str = option(
        "",
        "Directory for checkpoints and logs; by default a new numbered one in output/MODEL.",
        panel="Options",
    )
    truncation_strategy: TruncationStrategy | None = option(None, TRUNCATION_HELP, panel="Rows")
    media_overflow: MediaOverflow | None = option(None, OVERFLOW_HELP, panel="Rows")
    loss_scale: str | None = option(None, LOSS_SCALE_HELP, panel="Rows")
    expand_turns: ExpandTurns | None = option(None, EXPAND_HELP, panel="Rows")
    chat_template: str | None = option(None, TEMPLATE_HELP, panel="Rows")
    streaming: bool = option(
        False,
        "Encode and pack the rows of --dataset while training, without a cache; needs --max-steps.",
        panel="Streaming",
    )
    bf16: bool | None = option(
        None,
        "Compute in bfloat16. Frozen weights are in it too, but for --torch-dtype float32, which keeps them; false "
        "declines the checkpoint's bfloat16.",
        panel="Precision and memory",
    )
    fp16: bool | None = option(None, "The same with float16.", panel="Precision and memory")

    packing: bool = option(True, "Pack samples without padding; false pads rows of one sample each.", panel="Packing")
    attn_impl: AttnImpl = option("auto", ATTN_IMPL_HELP, panel="Precision and memory")
    verify_packing: bool = option(
        True,
        "Before the first step, show on a few samples that packed ones compute what they do alone.",
        panel="Packing",
    )
    plan: str | None = option(None, "Train the packs of this file, which packtool plan --save wrote.", panel="Packing")

    num_train_epochs: float = option(1.0, "Times that every sample is seen.", panel="Training", minimum=0.0)
    max_steps: int | None = option(None, "Stop after so many optimizer steps.", panel="Training", minimum=1)
    loss_reduction: LossReduction = option(
        "token",
        "Mean over the target tokens of a step, or over its samples, each by its own mean.",
        panel="Training",
    )
    padding_free: bool | None = option(
        None,
        "ms-swift's word for batches without padding, which --packing and --dynamic-batch-tokens make.",
        panel="Packing",
        aliases=("use_remove_padding",),
    )
    use_liger_kernel: bool = option(False, "Liger's kernels for norms, RoPE and SwiGLU.", panel="Precision and memory")
    torch_compile: bool = option(
        False,
        "Compile the layers of the language model; micro-batches are padded to one of a few lengths, each of which is "
        "compiled once.",
        panel="Precision and memory",
    )
    torch_compile_backend: str = option(
        "inductor",
        "What --torch-compile compiles with: inductor makes kernels; aot_eager and eager make none, to find mistakes.",
        panel="Precision and memory",
    )

    logging_steps: int = option(5, "Optimizer steps between two log lines.", panel="Checkpoints and logs", minimum=1)
    enable_channel_loss: bool = option(
        False, "Log the loss and the accuracy of each of the rows' channels.", panel="Checkpoints and logs"
    )
    eval_strategy: EvalStrategy | None = option(
        None,
        "Evaluate the caches' val split: every --eval-steps, at the end of every epoch, or not at all. By default as "
        "--save-strategy, where there is a val split.",
        panel="Evaluation",
    )
    eval_steps: int | None = option(
        None, "Optimizer steps between two evaluations; by default --save-steps.", panel="Evaluation", minimum=1
    )
    max_tokens_per_micro_batch: Tokens | None = option(None, MAX_TOKENS_HELP, panel="Evaluation", minimum=1)
    report_to: tuple[str, ...] = option(
        (),
        "Also log to tensorboard, wandb, swanlab, mlflow, ...; metrics.jsonl is always written.",
        panel="Checkpoints and logs",
    )
    dataloader_num_workers: int | None = option(
        None,
        "Processes a rank that load pictures ahead of the step; by default as many as its media and cores suggest, "
        "from 1 to 8.",
        panel="Training",
        minimum=0,
    )
    on_bad_media: Literal["raise", "skip"] = option(
        "raise",
        "What media that cannot be loaded do: stop the run, or leave their sample out, counted and listed.",
        panel="Training",
    )
    on_nan: OnNan = option(
        "stop",
        "What a loss or gradient that is infinite or not a number does: end the run before anything of that step is "
        "kept, leave the step out, or nothing.",
        panel="Training",
    )
    overwrite_output_dir: bool = option(
        False, "Remove the checkpoints and figures of an earlier run in --output-dir.", panel="Checkpoints and logs"
    )
    add_version: bool = option(
        False,
        "Write into a new folder of --output-dir for each run: v0-DATE-TIME, v1-DATE-TIME, ...",
        panel="Checkpoints and logs",
    )
    resume_only_model: bool = option(
        False,
        "Take only the weights of --resume-from-checkpoint, and begin a new schedule with a new optimizer.",
        panel="Checkpoints and logs",
    )
    dry_run: bool = option(False, "Plan, check and print, but do not train.", panel="Options")
    hardware: str | None = option(
        None,
        "GPUs that the plan is for: h100, h200, a100, 910b, or a file as simulate takes it; by default those of this "
        "machine. With --dry-run they may be elsewhere.",
        panel="Precision and memory",
    )
    training: Mapping[str, Any] = option(
        {},
        "Further fields of transformers' TrainingArguments, as --set training.name=value.",
        flag=False,
    )

    def value_problems(self) -> list[str]:
        """Loss scales that do not go with ``--expand-turns``, and epochs that a stream cannot have."""
        problems = expand_problems(self.expand_turns, self.loss_scale)
        if self.streaming and (not float(self.num_train_epochs).is_integer() or self.num_train_epochs < 1):
            problems.append(f"--num-train-epochs {self.num_train_epochs}: streaming reads all rows each time")
        return problems

    def missing_packages(self) -> list[str]:
        """Packages that these settings need and this environment lacks."""
        return missing_packages(
            deepspeed=self.deepspeed,
            use_liger_kernel=self.use_liger_kernel,
            quant_bits=self.quant_bits,
            optim=self.optim,
            report_to=self.report_to,
        )

    @property
    def not_shared_with(self) -> list[str]:
        """Options, as they are given, with which no prefixes are shared."""
        others = ("neftune_noise_alpha", "router_aux_loss_coef")
        found = self.unshared_packing(self.packing, self.sequence_parallel_ranks)
        return [*found, *self.mixing, *(flag(name) for name in others if getattr(self, name))]

    @property
    def removes_padding(self) -> bool:
        """Whether several samples share a sequence: packed, in dynamic batches, or assigned by Skrull."""
        return self.packing or self.has_no_rows

    @property
    def computation_dtype(self) -> DType:
        """Precision that is computed in, as ``--bf16``, ``--fp16`` or else ``--torch-dtype`` say."""
        if self.bf16 or self.fp16:
            return "bfloat16" if self.bf16 else "float16"
        return self.torch_dtype

    @property
    def declined_dtypes(self) -> tuple[str, ...]:
        """Precisions that a checkpoint may have, and that ``--bf16 false`` or ``--fp16 false`` do not want."""
        asked = {"bfloat16": self.bf16, "float16": self.fp16}
        return tuple(name for name, wanted in asked.items() if wanted is False)

    def export_config(self, output_dir: str, max_length: int) -> ExportConfig:
        """The export that turns the rows of ``--dataset`` into a cache."""
        # What is not given is export's own default; a dry run of training is no dry run of its export.
        return part_of(ExportConfig, self, output_dir=output_dir, max_length=max_length, dry_run=False)

    @property
    def named_places(self) -> tuple[str, ...]:
        """Caches, rows and the media root."""
        return (*self.cached_dataset, *self.dataset, *([self.media_root] if self.media_root else []))

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate, with the default that goes with the train type."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-4 if self.train_type == "lora" else 1e-5
