"""Fields of transformers' TrainingArguments that ``--set training.NAME=VALUE`` may give, and who decides the others.

Every field either works as transformers documents it, or is refused with what does it here: a field that is taken and
has no effect would be a setting that a run silently lacks.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainingArguments

from packtool.config.settings import option_names
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError

_PLAN = "the plan decides it: --packing, --packing-length, --shuffle, --group-by-length"
_EVALUATES = "packtool evaluates by itself: --eval-strategy, --eval-steps, --max-tokens-per-micro-batch"
_LOADS = "packtool loads by itself, ahead of the step: --dataloader-num-workers"
_PRECISION = "--torch-dtype decides the precision"
_CHECKPOINTING = "--gradient-checkpointing decides it"
_PUSH = "packtool does not push; upload a checkpoint of --output-dir when it is finished"
_LOGS = "--logging-steps decides it; every line of metrics.jsonl has tokens and memory"
_COMPILE = "packs have other shapes in every step, and would be compiled anew; --use-liger-kernel true fuses kernels"
_BEST = "packtool evaluates by itself: --eval-strategy, and metrics.jsonl tells the best of the checkpoints"

# A field that TrainConfig has under the same name is refused with that option's name; see ``reason_against``.
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("output_dir", "num_train_epochs", "max_steps", "per_device_train_batch_size"), ""),
    **dict.fromkeys(("gradient_accumulation_steps", "save_total_limit", "resume_from_checkpoint", "seed"), ""),
    **dict.fromkeys(("deepspeed", "fsdp", "use_liger_kernel", "report_to", "gradient_checkpointing"), ""),
    "auto_find_batch_size": "--packing-length bounds the memory of a step",
    **dict.fromkeys(("remove_unused_columns", "train_sampling_strategy", "length_column_name"), _PLAN),
    **dict.fromkeys(("ignore_data_skip", "accelerator_config"), _PLAN),
    "average_tokens_across_devices": "--loss-reduction says what the loss is the mean of, over all processes",
    "label_smoothing_factor": "the loss is the cross-entropy of the targets; --loss-scale weights them",
    "save_strategy": "--save-steps decides when to save; with more steps than the run has, only its end is saved",
    "save_on_each_node": "the first process saves, to an --output-dir that all machines see",
    "enable_jit_checkpoint": "SIGTERM, SIGUSR1 and Ctrl-C finish the step, save a whole checkpoint and end with 143, "
    "138 and 130; --resume-from-checkpoint true goes on",
    "restore_callback_states_from_checkpoint": "--resume-from-checkpoint restores all that packtool keeps",
    "disable_tqdm": "packtool shows its own progress, in a terminal only; --json keeps it off stdout",
    "data_seed": "--seed draws the order too",
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), _PRECISION),
    "use_cpu": "a run without CUDA devices is one on the CPU: CUDA_VISIBLE_DEVICES= in front; --torch-dtype fits it",
    **dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), _CHECKPOINTING),
    "gradient_checkpointing_kwargs": _CHECKPOINTING,
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILE),
    "liger_kernel_config": "--use-liger-kernel takes what fits packtool's own loss",
    "use_cache": "training keeps no cache of keys; --cached-dataset is another thing",
    **dict.fromkeys(("logging_strategy", "include_num_input_tokens_seen", "skip_memory_metrics"), _LOGS),
    "log_on_each_node": _LOGS,
    **dict.fromkeys(("prediction_loss_only", "batch_eval_metrics", "include_for_metrics", "label_names"), _EVALUATES),
    **dict.fromkeys(("per_device_eval_batch_size", "do_eval", "do_predict", "do_train"), _EVALUATES),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), _BEST),
    "fsdp_config": "--fsdp says all that FSDP2 is told",
    "parallelism_config": "--sequence-parallel-size, --fsdp and --deepspeed say what processes share",
    "ddp_backend": "the devices decide it, NCCL or gloo; --fsdp and --deepspeed work with both",
    "local_rank": "NPROC_PER_NODE=8 in front starts eight processes, and tells each its number; --fsdp shards them",
}
_REFUSED_PREFIXES: Mapping[str, str] = {"dataloader_": _LOADS, "eval_": _EVALUATES, "hub_": _PUSH, "push_to_": _PUSH}


def reason_against(name: str) -> str | None:
    """What decides a field instead of ``--set training.NAME``; None for one that may be given."""
    prefix = next((prefix for prefix in _REFUSED_PREFIXES if name.startswith(prefix)), None)
    if name not in _REFUSED and prefix is None:
        return None
    for field in dataclasses.fields(TrainConfig):
        if field.name == name:
            return f"{option_names(field)[0]} decides it"
    return _REFUSED.get(name) or _REFUSED_PREFIXES[str(prefix)]


def checked_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--set training.NAME=VALUE`` gave, with values of the declared types.

    Raises:
        ConfigError: listing unknown fields, those that packtool decides, and values of another type.
    """
    problems, found = [], {}
    known = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    for name, value in given.items():
        origin = f"--set training.{name}"
        reason = reason_against(name)
        if reason is not None:
            problems.append(f"{origin}: {reason}")
        elif name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            problems.append(f"{origin}: transformers' TrainingArguments has no such field{hint}")
        else:
            try:
                found[name] = _of_type(value, _types_of(name))
            except ValueError as error:
                problems.append(f"{origin}: {error}")
    if problems:
        raise ConfigError.from_problems(problems)
    return found


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainingArguments)


def _types_of(name: str) -> tuple[Any, ...]:
    hint = _hints()[name]
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(typing.get_origin(member) or member for member in members)


def _of_type(value: Any, allowed: Iterable[Any]) -> Any:
    """The value, or what was meant by it where a text was read as something else.

    Raises:
        ValueError: with the value and what was expected.
    """
    allowed = tuple(allowed)
    kinds = {kind for kind in allowed if isinstance(kind, type)}
    takes_text = str in kinds or any(issubclass(kind, enum.Enum) for kind in kinds)
    if isinstance(value, bool):
        if bool in kinds:
            return value
    elif any(isinstance(value, kind) for kind in kinds):
        return value
    elif isinstance(value, int) and float in kinds:
        return float(value)
    elif isinstance(value, float) and int in kinds and value.is_integer():
        return int(value)
    elif isinstance(value, str) and bool in kinds and value.lower() in ("yes", "on", "no", "off"):
        return value.lower() in ("yes", "on")
    if takes_text and isinstance(value, (str, bool, int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "names and values"}
    wanted = " or ".join(names.get(kind, "a list") for kind in allowed if kind is not type(None))
    raise ValueError(f"{value!r} is not {wanted}")
