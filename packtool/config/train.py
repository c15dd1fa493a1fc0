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
    Steps,
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
        f"Set the peak learning rate; default {_LEARNING_RATES['full']} for full, else {_LEARNING_RATES['lora']}.",
        minimum=0.0,
    )
    vit_lr: float | None = optimizer_option(
        None, "Set the vision tower's peak learning rate; default is --learning-rate.", minimum=0.0
    )
    aligner_lr: float | None = optimizer_option(
        None, "Set the vision-to-text projection's peak learning rate; default is --learning-rate.", minimum=0.0
    )
    lorap_lr_ratio: float | None = optimizer_option(
        None, "Multiply the learning rate of LoRA's B matrices by this ratio (LoRA+).", minimum=0.0
    )
    optim: str = optimizer_option(
        "adamw_torch_fused",
        "Use muon, adam_mini, or an optimizer of transformers, such as adamw_torch, adafactor or sgd.",
    )
    adam_beta1: float = optimizer_option(0.9, "Set Adam's beta1 (mean gradient).", minimum=0.0, maximum=1.0)
    adam_beta2: float = optimizer_option(
        0.999, "Set Adam's beta2 (decay of squared gradients).", minimum=0.0, maximum=1.0
    )
    adam_epsilon: float = optimizer_option(1e-8, "Set Adam's epsilon, added to the denominator.", minimum=0.0)
    weight_decay: float = optimizer_option(0.1, "Set the weight decay of AdamW.", minimum=0.0)
    warmup_ratio: float = optimizer_option(
        0.05, "Warm up the learning rate over this fraction of all steps.", minimum=0.0, maximum=1.0
    )
    warmup_steps: int | None = optimizer_option(None, "Warm up over N steps, instead of --warmup-ratio.", minimum=0)
    max_warmup_steps: int | None = optimizer_option(None, "Limit the warmup of --warmup-ratio to N steps.", minimum=0)
    lr_scheduler_type: str = optimizer_option("cosine", "Use this learning rate schedule, such as linear or constant.")
    lr_scheduler_kwargs: Mapping[str, Any] = optimizer_option(
        {}, "Pass these JSON arguments to the learning rate schedule, such as '{\"min_lr\": 1e-6}'."
    )
    max_grad_norm: float = optimizer_option(1.0, "Clip gradients to this norm.", minimum=0.0)
    router_aux_loss_coef: float = optimizer_option(
        0.0, "Add the router's load-balancing loss with this weight (mixture of experts only).", minimum=0.0
    )
    neftune_noise_alpha: float | None = optimizer_option(
        None, "Add noise of this strength (NEFTune's alpha) to embeddings; default is none.", minimum=0.0
    )

    def num_warmup_steps(self, num_steps: int) -> int:
        """Return the number of warm-up steps of a run of ``num_steps`` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        warmup_steps = math.ceil(num_steps * self.warmup_ratio)
        return warmup_steps if self.max_warmup_steps is None else min(warmup_steps, self.max_warmup_steps)


SaveStrategy = Annotated[Literal["steps", "epoch", "best", "no"], NOT_AT_ALL]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Settings):
    """Saving, keeping and resuming of checkpoints."""

    save_strategy: SaveStrategy = checkpoint_option(
        "steps", "Save a checkpoint every --save-steps, every epoch, after the best evaluation, or never."
    )
    save_steps: Steps = checkpoint_option(
        500, "Save a checkpoint every N optimizer steps; below 1, a fraction of all steps.", minimum=None
    )
    save_total_limit: int | None = checkpoint_option(None, "Keep at most N checkpoints; default keeps all.")
    save_only_model: bool = checkpoint_option(False, "Save only weights; such checkpoints cannot be resumed.")
    load_best_model_at_end: bool = evaluation_option(False, "Keep the checkpoint with the best evaluation.")
    metric_for_best_model: str = evaluation_option(
        "loss", "Select the best checkpoint by loss, perplexity, token_accuracy or loss/CHANNEL."
    )
    greater_is_better: bool | None = evaluation_option(
        None, "Treat larger values of the metric as better; default is true for accuracies."
    )
    early_stop_interval: int | None = evaluation_option(None, "Stop after N evaluations in a row without improvement.")
    resume_from_checkpoint: Annotated[str, YES_OR_NO] | None = checkpoint_option(
        None, "Resume from this checkpoint directory; true selects the newest in --output-dir."
    )
    push_to_hub: bool = checkpoint_option(False, "Upload checkpoints to a model repository of the Hugging Face hub.")
    hub_model_id: str | None = checkpoint_option(
        None, "Upload to this repository, such as OWNER/NAME; default is the name of --output-dir."
    )
    hub_strategy: Literal["every_save", "end", "checkpoint", "all_checkpoints"] = checkpoint_option(
        "every_save", "Upload the model at every save or only at the end, or upload complete checkpoints."
    )
    hub_private_repo: bool | None = checkpoint_option(None, "Create a private repository; by default, the hub decides.")
    data_change: Literal["refuse", "allow"] = checkpoint_option(
        "refuse", "If caches have changed since the checkpoint, stop (refuse) or continue with them (allow)."
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
        return "accuracy" in self.best_metric if self.greater_is_better is None else self.greater_is_better


LayerOrder = Literal["ascending", "descending", "random"]
OWN_OPTIMIZERS = ("muon", "adam_mini")
"""Values of ``--optim`` that are no optimizers of transformers."""
OnNan = Literal["stop", "skip", "go-on"]
QatRecipe = Literal["int8-int4", "int4", "fp8-int4", "fp8", "mxfp4", "nvfp4"]
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

    COMMON_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("model", "cached_dataset", "dataset", "output_dir", "train_type", "lora_rank", "freeze_vit"),
        *("learning_rate", "num_train_epochs", "max_steps", "packing_length", "gradient_accumulation_steps"),
        *("samples_per_step", "gradient_checkpointing", "fsdp", "sequence_parallel_size"),
        *("save_steps", "eval_steps", "resume_from_checkpoint", "dry_run"),
    )

    model: str = option("", "Train this model directory or hub id; default is the cache's model.")
    output_dir: str = option(
        "", "Write checkpoints and logs to this directory; default is a new one in output/MODEL.", path=True
    )
    truncation_strategy: data.TruncationStrategy | None = row_option(None, data.TRUNCATION_HELP)
    media_overflow: data.MediaOverflow | None = row_option(None, data.OVERFLOW_HELP)
    min_length: Tokens | None = row_option(None, data.MIN_LENGTH_HELP, minimum=0)
    loss_scale: str | None = row_option(None, data.LOSS_SCALE_HELP)
    expand_turns: data.ExpandTurns | None = row_option(None, data.EXPAND_HELP)
    chat_template: str | None = row_option(None, data.TEMPLATE_HELP, path=True)
    chat_template_kwargs: Mapping[str, Any] | None = row_option(None, data.TEMPLATE_KWARGS_HELP)
    streaming: bool = stream_option(False, "Tokenize and pack --dataset during training, without a cache.")
    bf16: bool | None = memory_option(None, "Compute in bfloat16; false computes bfloat16 checkpoints in float32.")
    fp16: bool | None = memory_option(
        None, "Compute in float16; if false, float16 checkpoints are computed in float32."
    )

    packing: bool = packing_option(True, "Pack several samples into each sequence; false pads samples instead.")
    attn_impl: AttnImpl = memory_option("auto", ATTN_IMPL_HELP)
    verify_packing: bool = packing_option(
        True, "Check before training that packing does not change the model's outputs."
    )
    plan: str | None = packing_option(None, "Train the plan in this file, written by packtool plan --save.", path=True)

    num_train_epochs: float = training_option(1.0, "Train this many passes over all samples.", minimum=0.0)
    max_steps: int | None = training_option(None, "Stop after N optimizer steps, instead of after --num-train-epochs.")
    loss_reduction: LossReduction = training_option(
        "token", "Average the loss of a step over its trained tokens or its samples."
    )
    enable_dft_loss: bool = training_option(
        False, "Weight each target's loss by its predicted probability (dynamic fine-tuning)."
    )
    train_from_scratch: bool = training_option(
        False, "Start from random weights, with the model's configuration and tokenizer."
    )
    lisa_activated_layers: int | None = training_option(
        None, "Train only N random layers of the language model at a time (LISA).", minimum=1
    )
    badam_switch_interval: int | None = training_option(
        None, "Train one layer of the language model at a time, for N steps each (BAdam).", minimum=1
    )
    badam_switch_mode: LayerOrder = training_option("ascending", "Train BAdam's layers in this order.")
    lisa_step_interval: int = training_option(20, "Draw the layers of LISA anew every N steps.", minimum=1)
    eaft_alpha: float | None = training_option(
        None, "Weight each loss by its prediction's entropy to this power (EAFT).", minimum=0.0
    )
    asft_alpha: float | None = training_option(
        None, "Use the ASFT loss: DFT, plus X times the divergence from the initial model.", minimum=0.0
    )
    eaft_top_k: int = training_option(20, "Compute EAFT's entropy from the K most likely tokens.", minimum=2)
    eaft_divisor: float = training_option(3.0, "Divide EAFT's entropy by this; axolotl divides by 1.", minimum=1e-6)
    padding_free: bool | None = packing_option(
        None, "Accepted only for ms-swift scripts; packing always removes padding.", aliases=("use_remove_padding",)
    )
    qat: QatRecipe | None = memory_option(
        None, "Train for quantization: round inputs and weights of linear layers to these formats."
    )
    qat_group_size: int | None = memory_option(None, "Scale groups of N weights together (--qat with int4).", minimum=1)
    qat_start_step: int = memory_option(0, "Begin to round weights with --qat after N optimizer steps.", minimum=0)
    fp8: bool = memory_option(False, "Compute the language model's matrix products in float8.")
    use_liger_kernel: bool = memory_option(False, "Use Liger kernels for norms, RoPE and SwiGLU.")
    torch_compile: bool = memory_option(False, "Compile the language model's layers with torch.compile.")
    torch_compile_backend: str = memory_option(
        "inductor", "Compile with this backend; aot_eager and eager are for debugging."
    )

    logging_steps: int = checkpoint_option(5, "Log every N optimizer steps.")
    enable_channel_loss: bool = checkpoint_option(
        False, "Log loss and accuracy separately for each `channel` of the rows."
    )
    sample_losses: bool = checkpoint_option(True, "Keep the mean loss of every sample in every epoch.")
    eval_strategy: EvalStrategy | None = evaluation_option(
        None, "Evaluate the validation split every --eval-steps, every epoch, or never."
    )
    eval_steps: Steps | None = evaluation_option(
        None, "Evaluate every N optimizer steps, or fraction of all steps; default is --save-steps.", minimum=None
    )
    max_tokens_per_micro_batch: Tokens | None = evaluation_option(None, MAX_TOKENS_HELP)
    report_to: tuple[str, ...] = checkpoint_option(
        (), "Send metrics to tensorboard, wandb, swanlab, mlflow or another tracker."
    )
    dataloader_num_workers: int | None = training_option(
        None, "Load media in N processes per GPU; default depends on media and CPU cores.", minimum=0
    )
    on_bad_media: Literal["raise", "skip"] = training_option(
        "raise", "Stop the run at an unreadable media file (raise), or skip its sample."
    )
    on_nan: OnNan = training_option("stop", "Stop at NaN or Inf, skip the step, or continue (go-on).")
    locked: str | None = checkpoint_option(
        None, "Refuse to train if the run differs from this lock file of packtool plan --lock.", path=True
    )
    overwrite_output_dir: bool = checkpoint_option(
        False, "Delete an earlier run's checkpoints and metrics in --output-dir."
    )
    add_version: bool = checkpoint_option(
        False, "Write each run to a new folder in --output-dir, such as v0-DATE-TIME."
    )
    resume_only_model: bool = checkpoint_option(
        False, "Load only weights from --resume-from-checkpoint; start a new schedule and optimizer."
    )
    dry_run: bool = option(False, "Check options, print the plan and estimate memory without training.")
    hardware: str | None = memory_option(None, "Plan for this GPU: h100, h200, a100, 910b, or a file.")
    training: Mapping[str, Any] = option(
        {}, "Set other fields of transformers' TrainingArguments, as in --set training.name=value.", panel=None
    )

    def value_problems(self) -> list[str]:
        problems = data.row_option_problems(self.expand_turns, self.loss_scale, self.chat_template_kwargs)
        if self.streaming and (not float(self.num_train_epochs).is_integer() or self.num_train_epochs < 1):
            problems.append(f"--num-train-epochs {self.num_train_epochs}: streaming reads all rows each time")
        return problems

    @property
    def sharing_conflicts(self) -> list[str]:
        others = [flag(name) for name in ("neftune_noise_alpha", "router_aux_loss_coef") if getattr(self, name)]
        return [*self.packing_sharing_conflicts(self.packing), *others]

    @property
    def removes_padding(self) -> bool:
        """True if samples are concatenated: packed, in dynamic batches, or assigned by Skrull."""
        return self.packing or self.has_unpadded_batches

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
        default = _LEARNING_RATES["full" if self.train_type == "full" else "lora"]
        return float(default) if self.learning_rate is None else self.learning_rate
