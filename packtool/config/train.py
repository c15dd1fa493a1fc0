"""What ``packtool train`` needs to know.

How weights are moved: optimizer, learning rates and their schedule. Names and meanings are ms-swift's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from packtool.config.checkpoints import CheckpointOptions, checkpoint_problems, data_change_problems
from packtool.config.commands import MAX_TOKENS_HELP
from packtool.config.data import (
    EXPAND_HELP,
    LOSS_SCALE_HELP,
    MAX_ROW_BYTES,
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
    access_problems,
    expand_problems,
    image_limit_problems,
    media_cache_problems,
)
from packtool.config.mixture import MixOptions, mixed_rows_problems, mixture_problems
from packtool.config.model import (
    ATTN_IMPL_HELP,
    AdapterOptions,
    AttnImpl,
    DType,
    ExpertOptions,
    MemoryOptions,
    QuantizationOptions,
    adapter_problems,
    expert_problems,
    few_bits_problems,
    master_problems,
    quantization_problems,
    sharding_problems,
)
from packtool.config.packages import missing_packages
from packtool.config.packing import (
    SEQUENCE_PARALLELISM,
    IntervalOptions,
    LaunchOptions,
    PackingOptions,
    ParallelOptions,
    no_sharing_with,
    packing_problems,
    parallel_problems,
    sharing_problems,
)
from packtool.config.settings import NOT_AT_ALL, Panel, Tokens, flag, not_together, option, part_of

_PANEL: Panel = "Optimizer"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
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


def router_problems(options: OptimizerOptions, others: Mapping[str, bool]) -> list[str]:
    """Options that do not go with ``--router-aux-loss-coef``.

    Args:
        others: options, as they are given, and whether they are.
    """
    if not options.router_aux_loss_coef:
        return []
    return not_together(f"--router-aux-loss-coef {options.router_aux_loss_coef:g}", others)


# Settings of a run that say something about rows, and nothing about a cache.
ROWS_ONLY = (
    "streaming",
    "val_dataset",
    "dataset_info",
    "columns",
    "system",
    "split_dataset_ratio",
    "strict",
    "chat_template",
)
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

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = [
            *image_limit_problems(self),
            *access_problems(self),
            *expand_problems(self.expand_turns, self.loss_scale),
            *packing_problems(self, self.packing),
            *mixture_problems(self, rows=self.dataset, plan=self.plan),
            *(mixed_rows_problems(streaming=self.streaming, val_dataset=self.val_dataset) if self.interleaves else []),
            *self._row_problems(),
        ]
        found += parallel_problems(self, removes_padding=self.removes_padding, attn_impl=self.attn_impl)
        found += sharing_problems(self) + media_cache_problems(self)
        if self.padding_free and not self.removes_padding:
            found.append("--padding-free true goes with --packing true, or with --dynamic-batch-tokens N")
        if self.padding_free is False and self.removes_padding:
            found.append("--padding-free false: packs have no padding; leave it out, or set --packing false")
        if self.plan is not None and (not self.packing or self.samples_per_step is not None):
            found.append("--plan names a file of packs: leave out --packing false and --samples-per-step")
        if self.deepspeed is not None and self.on_bad_media == "skip":
            found.append("--on-bad-media skip corrects gradients before they are applied, which DeepSpeed does itself")
        if self.sequence_parallel_ranks > 1 and self.on_bad_media == "skip":
            found.append(
                "--on-bad-media skip: processes that share a sequence load different media of it, and would not "
                "skip alike; leave out --sequence-parallel-size, or skip bad rows at export"
            )
        if not self.num_train_epochs and self.max_steps is None:
            found.append("--num-train-epochs 0 trains nothing: give more, or --max-steps")
        if self.deepspeed is not None and self.on_nan == "skip":
            found.append("--on-nan skip leaves out updates, which DeepSpeed makes itself: use stop or go-on")
        if self.resume_only_model and self.resume_from_checkpoint in (None, "false"):
            found.append("--resume-only-model goes with --resume-from-checkpoint, which names the weights")
        if self.overwrite_output_dir and not self.output_dir:
            found.append("--overwrite-output-dir needs --output-dir: the default directory is new in every run")
        if self.overwrite_output_dir and self.add_version:
            found.append("--add-version never meets an earlier run: leave out --overwrite-output-dir")
        found += master_problems(self, self.optim, self.train_type, self.computation_dtype) + sharding_problems(self)
        return [
            *found,
            *adapter_problems(self),
            *checkpoint_problems(self, may_evaluate=self.eval_strategy != "no" and not self.streaming),
            *data_change_problems(self, streaming=self.streaming, plan=self.plan, only_model=self.resume_only_model),
            *self._precision_problems(),
            *self._compile_problems(),
            *quantization_problems(self),
            *few_bits_problems(self.quant_bits, self, self, compiles=self.torch_compile),
            *self._mixture_of_experts_problems(),
        ]

    def missing_packages(self) -> list[str]:
        """Packages that these settings need and this environment lacks."""
        return missing_packages(
            deepspeed=self.deepspeed,
            use_liger_kernel=self.use_liger_kernel,
            quant_bits=self.quant_bits,
            optim=self.optim,
            report_to=self.report_to,
        )

    def _mixture_of_experts_problems(self) -> list[str]:
        """Options that do not go with what is asked of a mixture's experts."""
        return [
            *expert_problems(
                self,
                {
                    "--fsdp, for the other weights are sharded already": bool(self.fsdp),
                    "--deepspeed, which shards weights itself": self.deepspeed is not None,
                    "--train-type lora, which transformers does not spread": self.train_type == "lora",
                    "--fp16 true, whose gradients cannot be unscaled": self.computation_dtype == "float16",
                    f"--master-weights {self.master_weights}: float32 is sharded": self.master_weights != "float32",
                    "--torch-compile true": self.torch_compile,
                    "--use-liger-kernel true": self.use_liger_kernel,
                },
            ),
            *router_problems(
                self,
                {
                    "--deepspeed": self.deepspeed is not None,
                    "--fp16 true": self.computation_dtype == "float16",
                    "--torch-compile true": self.torch_compile,
                    SEQUENCE_PARALLELISM: self.sequence_parallel_ranks > 1,
                },
            ),
        ]

    @property
    def not_shared_with(self) -> list[str]:
        """Options, as they are given, with which no prefixes are shared."""
        found = no_sharing_with(self, self.packing, self.sequence_parallel_ranks)
        others = ("neftune_noise_alpha", "router_aux_loss_coef")
        return [*found, *self.mixing, *(flag(name) for name in others if getattr(self, name))]

    def _precision_problems(self) -> list[str]:
        """Options of the precision that contradict each other."""
        if self.bf16 and self.fp16:
            return ["--bf16 and --fp16 are two precisions: give one of them"]
        found = []
        for name, asked, dtype in (("bf16", self.bf16, "bfloat16"), ("fp16", self.fp16, "float16")):
            if asked is False and self.torch_dtype == dtype:
                found.append(f"--{name} false contradicts --torch-dtype {dtype}: leave out one of them")
            if asked and self.torch_dtype not in ("auto", "float32", dtype):
                found.append(f"--{name} true contradicts --torch-dtype {self.torch_dtype}: leave out one of them")
        return found

    def _compile_problems(self) -> list[str]:
        """Options that do not go with ``--torch-compile``."""
        if not self.torch_compile:
            is_given = self.torch_compile_backend != type(self).torch_compile_backend
            return ["--torch-compile-backend goes with --torch-compile true"] if is_given else []
        found = []
        if not self.removes_padding:
            found.append(
                "--torch-compile true pads packs to a few lengths, and rows of one sample each have other shapes in "
                "every micro-batch: leave out --packing false"
            )
        if self.use_liger_kernel:
            found.append("--torch-compile and --use-liger-kernel fuse the same operations: give one of them")
        return found

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

    def _validation_problems(self) -> list[str]:
        """Options that evaluate, with rows that leave nothing to evaluate."""
        if not self.dataset or self.val_dataset or self.split_dataset_ratio or self.eval_strategy == "no":
            return []
        asked = {
            f"--eval-strategy {self.eval_strategy}": self.eval_strategy is not None,
            "--load-best-model-at-end": self.load_best_model_at_end,
            "--save-strategy best": self.save_strategy == "best",
            f"--early-stop-interval {self.early_stop_interval}": self.early_stop_interval is not None,
        }
        remedy = "give --split-dataset-ratio 0.01, or --val-dataset with other rows"
        return [f"{name} needs a val split: {remedy}" for name, is_asked in asked.items() if is_asked]

    def _row_problems(self) -> list[str]:
        """Mistakes about where the samples come from."""
        found = []
        if self.dataset and not self.model:
            found.append("--model is missing: rows do not name a model, only caches do")
        if not self.dataset and not self.per_dataset_loss_scale:
            found.append("--per-dataset-loss-scale false goes with --dataset: a cache stays as exported")
        if bool(self.cached_dataset or self.mix) == bool(self.dataset):
            found.append("give either --cached-dataset (or --mix), made by packtool export, or --dataset with rows")
        if not self.dataset:
            given = [name for name in ROWS_ONLY if getattr(self, name)]
            given += ["max_row_bytes"] if self.max_row_bytes != MAX_ROW_BYTES else []
            found += [f"{flag(name)} goes with --dataset: a cache stays as exported" for name in given]
        if not self.streaming:
            return [*found, *self._validation_problems()]
        if self.max_steps is None:
            found.append("--max-steps is missing: --streaming true does not know how many rows there are")
        if not self.packing:
            found.append("--streaming true packs what it reads: leave out --packing false")
        longest, room = self.max_length, self.packing_length
        if longest is not None and room is not None and room < longest:
            found.append(
                f"--packing-length {room} is smaller than --max-length {longest}: nobody has counted the samples of "
                "--streaming true, and one could be longer than a pack; raise the one or lower the other"
            )
        if self.eval_strategy not in (None, "no"):
            found.append("--eval-strategy needs a cache with a val split: leave out --streaming true")
        if self.save_strategy == "epoch":
            found.append("--save-strategy epoch needs a cache: --streaming true does not know where an epoch ends")
        if self.schedule != "packs":
            found.append(f"--schedule {self.schedule} needs a cache: leave out --streaming true")
        if self.samples_per_step is not None:
            found.append("--samples-per-step draws from all samples of a cache: leave out --streaming true")
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
        # What is not given is export's own default; a dry run of training is no dry run of its export.
        return part_of(ExportConfig, self, output_dir=output_dir, max_length=max_length, dry_run=False)

    @property
    def named_places(self) -> tuple[str, ...]:
        """Caches, rows and the media root."""
        return (*self.cached_dataset, *self.dataset, *([self.media_root] if self.media_root else []))

    @property
    def removes_padding(self) -> bool:
        """Whether several samples share a sequence: packed, in dynamic batches, or assigned by Skrull."""
        return self.packing or self.has_no_rows

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate, with the default that goes with the train type."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-4 if self.train_type == "lora" else 1e-5
