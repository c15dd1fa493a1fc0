"""A run's settings as transformers' TrainingArguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainingArguments

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.train.sharding import sharding_arguments

# Decided by the plan, by packtool's own options, or without effect because packtool does that part itself.
_TAKEN = frozenset(
    {
        "output_dir",
        "num_train_epochs",
        "max_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "auto_find_batch_size",
        "remove_unused_columns",
        "ignore_data_skip",
        "label_smoothing_factor",
        "train_sampling_strategy",
        "disable_tqdm",
        "save_total_limit",
        "resume_from_checkpoint",
        "seed",
        "data_seed",
        "bf16",
        "fp16",
        "use_cpu",
        "gradient_checkpointing",
        "activation_checkpointing",
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "use_liger_kernel",
        "report_to",
    }
)
_TAKEN_PREFIXES = ("dataloader_", "eval_", "hub_", "push_to_")


def training_arguments(config: TrainConfig, *, num_steps: int, dtype: torch.dtype, on_gpu: bool) -> TrainingArguments:
    """What the Trainer needs to know; see ``trainer`` for why a step is its batch and the run its epoch.

    Args:
        num_steps: of the whole run.
        dtype: precision of the weights, or of the computation where weights are kept in float32.

    Raises:
        ConfigError: for a setting that transformers does not know or does not accept.
    """
    fields: dict[str, Any] = {
        "output_dir": config.output_dir,
        "max_steps": num_steps,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": 1,
        "learning_rate": config.peak_learning_rate,
        "weight_decay": config.weight_decay,
        "warmup_steps": math.ceil(num_steps * config.warmup_ratio),
        "lr_scheduler_type": config.lr_scheduler_type,
        "max_grad_norm": config.max_grad_norm,
        "seed": config.seed,
        "logging_steps": config.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "save_steps": config.save_steps,
        "report_to": list(config.report_to) or "none",
        "use_liger_kernel": config.use_liger_kernel,
        # The loss is made in packtool's own head.
        "liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": False}
        if config.use_liger_kernel
        else None,
        **sharding_arguments(config),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "ignore_data_skip": True,
        "ddp_find_unused_parameters": False,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu": not on_gpu,
    }
    if config.training.get("enable_jit_checkpoint"):
        raise ConfigError(
            "--set training.enable_jit_checkpoint: its checkpoints are half written when the process ends",
            "Leave it out: SIGTERM, SIGUSR1 and Ctrl-C finish the step, save a whole checkpoint and end with 143, 138 "
            "and 130, whatever the settings.",
        )
    taken = [name for name in config.training if name in _TAKEN or name.startswith(_TAKEN_PREFIXES)]
    if taken:
        raise ConfigError.from_problems(
            [f"--set training.{name}: packtool decides this by its own options or plan" for name in taken]
        )
    try:
        args = TrainingArguments(**{**fields, **config.training})
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"transformers refuses these settings: {error}",
            "Check --lr-scheduler-type, --torch-dtype, --report-to, and the fields given with --set "
            "training.NAME=VALUE; --deepspeed and --use-liger-kernel need their packages (pip install deepspeed, "
            "liger-kernel).",
        ) from error
    # One process drives one device; seeing several, the Trainer would wrap the model in DataParallel.
    assert args.device is not None
    args._n_gpu = min(args.n_gpu, 1)
    return args
