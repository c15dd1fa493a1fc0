"""Settings of ``packtool train``, with those of the optimizer. Names and meanings are mostly ms-swift's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from packtool.config import data
from packtool.config.commands import MAX_TOKENS_HELP
from packtool.config.conflicts import Settings
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
from packtool.config.packages import PackageOptions
from packtool.config.packing import IntervalOptions, LaunchOptions, PackingOptions, ParallelOptions
from packtool.config.settings import (
    NOT_AT_ALL,
    YES_OR_NO,
    Tokens,
    checkpoint_option,
    evaluation_option,
    flag,
    memory_option,
    optimizer_option,
    option,
    packing_option,
    part_of,
    row_option,
    stream_option,
    training_option,
)

_LEARNING_RATES = {"lora": "1e-4", "full": "1e-5"}


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Settings):
    """Optimizer, learning rates and their schedule."""

    learning_rate: float | None = optimizer_option(
        None,
        f"Peak learning rate; by default {_LEARNING_RATES['lora']} with lora and {_LEARNING_RATES['full']} with full.",
        minimum=0.0,
    )
    vit_lr: float | None = optimizer_option(
        None, "Peak learning rate of the vision tower; by default --learning-rate.", minimum=0.0
    )
    aligner_lr: float | None = optimizer_option(
        None, "Peak learning rate of the aligner; by default --learning-rate.", minimum=0.0
    )
    optim: str = optimizer_option(
        "adamw_torch_fused", "Optimizer, by transformers' names: adamw_torch, adafactor, sgd, ..."
    )
    adam_beta1: float = optimizer_option(0.9, "Adam's decay of the mean gradient.", minimum=0.0, maximum=1.0)
    adam_beta2: float = optimizer_option(0.999, "Adam's decay of the mean squared gradient.", minimum=0.0, maximum=1.0)
    adam_epsilon: float = optimizer_option(1e-8, "Adam's constant under the fraction.", minimum=0.0)
    weight_decay: float = optimizer_option(0.1, "AdamW's weight decay.", minimum=0.0)
    warmup_ratio: float = optimizer_option(
        0.05, "Share of the steps in which the learning rate rises.", minimum=0.0, maximum=1.0
    )
    warmup_steps: int | None = optimizer_option(
        None, "Steps in which the learning rate rises, instead of --warmup-ratio.", minimum=0
    )
    lr_scheduler_type: str = optimizer_option("cosine", "Schedule of the learning rate, by transformers' names.")
    lr_scheduler_kwargs: Mapping[str, Any] = optimizer_option(
        {}, "What the schedule wants to know beside that, as JSON: '{\"min_lr\": 1e-6}' for cosine_with_min_lr."
    )
    max_grad_norm: float = optimizer_option(1.0, "Gradient norm above which gradients are scaled down.", minimum=0.0)
    router_aux_loss_coef: float = optimizer_option(
        0.0,
        "Weight of the loss that balances the experts of a mixture, over the tokens of samples; 0 leaves it out.",
        minimum=0.0,
    )
    neftune_noise_alpha: float | None = optimizer_option(
        None,
        "Noise on the embeddings of training, NEFTune's alpha; each sample of a pack has the noise of its own length.",
        minimum=0.0,
    )

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the number of warm-up steps of a run of ``num_steps`` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil(num_steps * self.warmup_ratio)


SaveStrategy = Annotated[Literal["steps", "epoch", "best", "no"], NOT_AT_ALL]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Settings):
    """Saving, keeping and resuming of checkpoints."""

    save_strategy: SaveStrategy = checkpoint_option(
        "steps",
        "When to save: every --save-steps, at the end of every epoch, where an evaluation is the best so far, or not "
        "at all. The end is saved too, but with no and best.",
    )
    save_steps: int = checkpoint_option(500, "Optimizer steps between two checkpoints.")
    save_total_limit: int | None = checkpoint_option(None, "Checkpoints to keep.")
    save_only_model: bool = checkpoint_option(False, "Save weights only; such checkpoints cannot be gone on from.")
    load_best_model_at_end: bool = evaluation_option(
        False,
        "End with the checkpoint whose evaluation was best: it is saved and kept, whatever else is, and told at the "
        "end.",
    )
    metric_for_best_model: str = evaluation_option(
        "loss", "What best means: loss, perplexity, token_accuracy, or loss/CHANNEL."
    )
    greater_is_better: bool | None = evaluation_option(
        None, "Whether more of --metric-for-best-model is better; by default of accuracies only."
    )
    early_stop_interval: int | None = evaluation_option(
        None, "End after so many evaluations in a row in which --metric-for-best-model was not better than its best."
    )
    resume_from_checkpoint: Annotated[str, YES_OR_NO] | None = checkpoint_option(
        None, "true for the newest checkpoint in --output-dir, or the directory of one."
    )
    data_change: Literal["refuse", "allow"] = checkpoint_option(
        "refuse",
        "What a resumed run does whose caches are others than its checkpoint's: refuse to go on, naming them; or plan "
        "what is left of the epoch anew, so that nothing is trained in it twice and nothing is lost.",
    )

    @property
    def seeks_best(self) -> bool:
        """True if evaluations determine which checkpoint is saved or reported."""
        return self.load_best_model_at_end or self.save_strategy == "best"

    @property
    def best_metric(self) -> str:
        """The evaluation metric that selects the best checkpoint, as in log lines: ``eval_loss``."""
        return "eval_" + self.metric_for_best_model.removeprefix("eval_")

    @property
    def prefers_greater(self) -> bool:
        """True if a larger value of ``best_metric`` is better."""
        return "accuracy" in self.best_metric if self.greater_is_better is None else self.greater_is_better


OnNan = Literal["stop", "skip", "go-on"]
LossReduction = Literal["token", "sample"]
EvalStrategy = Annotated[Literal["no", "steps", "epoch"], NOT_AT_ALL]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    data.CacheOptions,
    data.MediaCacheOptions,
    data.RowOptions,
    data.BoxOptions,
    data.MediaOptions,
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
    PackageOptions,
):
    """Settings of ``packtool train``."""

    NEEDED_FIRST: ClassVar[tuple[str, ...]] = (
        *("model", "cached_dataset", "dataset", "output_dir", "packing", "packing_length", "train_type"),
        *("learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "dry_run"),
    )

    model: str = option("", "Directory (or hub id) of the model; by default the cache's.", panel="Options")
    output_dir: str = option(
        "", "Directory for checkpoints and logs; by default a new numbered one in output/MODEL.", panel="Options"
    )
    truncation_strategy: data.TruncationStrategy | None = row_option(None, data.TRUNCATION_HELP)
    media_overflow: data.MediaOverflow | None = row_option(None, data.OVERFLOW_HELP)
    loss_scale: str | None = row_option(None, data.LOSS_SCALE_HELP)
    expand_turns: data.ExpandTurns | None = row_option(None, data.EXPAND_HELP)
    chat_template: str | None = row_option(None, data.TEMPLATE_HELP)
    streaming: bool = stream_option(
        False, "Encode and pack the rows of --dataset while training, without a cache; needs --max-steps."
    )
    bf16: bool | None = memory_option(
        None,
        "Compute in bfloat16. Frozen weights are in it too, but for --torch-dtype float32, which keeps them; false "
        "declines the checkpoint's bfloat16.",
    )
    fp16: bool | None = memory_option(None, "The same with float16.")

    packing: bool = packing_option(True, "Pack samples without padding; false pads rows of one sample each.")
    attn_impl: AttnImpl = memory_option("auto", ATTN_IMPL_HELP)
    verify_packing: bool = packing_option(
        True, "Before the first step, show on a few samples that packed ones compute what they do alone."
    )
    plan: str | None = packing_option(None, "Train the packs of this file, which packtool plan --save wrote.")

    num_train_epochs: float = training_option(1.0, "Times that every sample is seen.", minimum=0.0)
    max_steps: int | None = training_option(None, "Stop after so many optimizer steps.")
    loss_reduction: LossReduction = training_option(
        "token", "Mean over the target tokens of a step, or over its samples, each by its own mean."
    )
    padding_free: bool | None = packing_option(
        None,
        "ms-swift's word for batches without padding, which --packing and --dynamic-batch-tokens make.",
        aliases=("use_remove_padding",),
    )
    use_liger_kernel: bool = memory_option(False, "Liger's kernels for norms, RoPE and SwiGLU.")
    torch_compile: bool = memory_option(
        False,
        "Compile the layers of the language model; micro-batches are padded to one of a few lengths, each of which is "
        "compiled once.",
    )
    torch_compile_backend: str = memory_option(
        "inductor",
        "What --torch-compile compiles with: inductor makes kernels; aot_eager and eager make none, to find mistakes.",
    )

    logging_steps: int = checkpoint_option(5, "Optimizer steps between two log lines.")
    enable_channel_loss: bool = checkpoint_option(False, "Log the loss and the accuracy of each of the rows' channels.")
    eval_strategy: EvalStrategy | None = evaluation_option(
        None,
        "Evaluate the caches' val split: every --eval-steps, at the end of every epoch, or not at all. By default as "
        "--save-strategy, where there is a val split.",
    )
    eval_steps: int | None = evaluation_option(
        None, "Optimizer steps between two evaluations; by default --save-steps.", minimum=1
    )
    max_tokens_per_micro_batch: Tokens | None = evaluation_option(None, MAX_TOKENS_HELP)
    report_to: tuple[str, ...] = checkpoint_option(
        (), "Also log to tensorboard, wandb, swanlab, mlflow, ...; metrics.jsonl is always written."
    )
    dataloader_num_workers: int | None = training_option(
        None,
        "Processes a rank that load pictures ahead of the step; by default as many as its media and cores suggest, "
        "from 1 to 8.",
        minimum=0,
    )
    on_bad_media: Literal["raise", "skip"] = training_option(
        "raise", "What media that cannot be loaded do: stop the run, or leave their sample out, counted and listed."
    )
    on_nan: OnNan = training_option(
        "stop",
        "What a loss or gradient that is infinite or not a number does: end the run before anything of that step is "
        "kept, leave the step out, or nothing.",
    )
    overwrite_output_dir: bool = checkpoint_option(
        False, "Remove the checkpoints and figures of an earlier run in --output-dir."
    )
    add_version: bool = checkpoint_option(
        False, "Write into a new folder of --output-dir for each run: v0-DATE-TIME, v1-DATE-TIME, ..."
    )
    resume_only_model: bool = checkpoint_option(
        False, "Take only the weights of --resume-from-checkpoint, and begin a new schedule with a new optimizer."
    )
    dry_run: bool = option(False, "Plan, check and print, but do not train.", panel="Options")
    hardware: str | None = memory_option(
        None,
        "GPUs that the plan is for: h100, h200, a100, 910b, or a file as simulate takes it; by default those of this "
        "machine. With --dry-run they may be elsewhere.",
    )
    training: Mapping[str, Any] = option(
        {}, "Further fields of transformers' TrainingArguments, as --set training.name=value.", flag=False
    )

    def value_problems(self) -> list[str]:
        """Return the problems of a loss scale with ``--expand-turns``, and of epochs of a stream."""
        problems = data.expand_problems(self.expand_turns, self.loss_scale)
        if self.streaming and (not float(self.num_train_epochs).is_integer() or self.num_train_epochs < 1):
            problems.append(f"--num-train-epochs {self.num_train_epochs}: streaming reads all rows each time")
        return problems

    @property
    def not_shared_with(self) -> list[str]:
        """Given options that exclude shared prefixes, as on the command line."""
        others = [flag(name) for name in ("neftune_noise_alpha", "router_aux_loss_coef") if getattr(self, name)]
        return [*self.unshared_packing(self.packing, self.sequence_parallel_ranks), *self.mixing, *others]

    @property
    def removes_padding(self) -> bool:
        """True if samples are concatenated: packed, in dynamic batches, or assigned by Skrull."""
        return self.packing or self.has_no_rows

    @property
    def computation_dtype(self) -> DType:
        """Precision of the computation, from ``--bf16``, ``--fp16`` or else ``--torch-dtype``."""
        if self.bf16 or self.fp16:
            return "bfloat16" if self.bf16 else "float16"
        return self.torch_dtype

    @property
    def declined_dtypes(self) -> tuple[str, ...]:
        """Precisions that ``--bf16 false`` or ``--fp16 false`` exclude, even if the checkpoint has them."""
        return tuple(name for name, value in {"bfloat16": self.bf16, "float16": self.fp16}.items() if value is False)

    def export_config(self, output_dir: str, max_length: int) -> data.ExportConfig:
        """Return the settings of the export that turns the rows of ``--dataset`` into a cache."""
        # A dry run of training still exports.
        return part_of(data.ExportConfig, self, output_dir=output_dir, max_length=max_length, dry_run=False)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate, or the default for the train type."""
        return float(_LEARNING_RATES[self.train_type]) if self.learning_rate is None else self.learning_rate
