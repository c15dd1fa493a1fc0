"""A run's settings as transformers' TrainingArguments.

Fields of transformers' TrainingArguments that ``--set training.NAME=VALUE`` may give, with values of their types.

Every field either works as transformers documents it, or is refused with what does it here, as ``config.peers`` tells:
a field that is taken and has no effect would be a setting that a run silently lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames

from packtool.config.packages import TRACKERS
from packtool.config.peers import reason_against
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, did_you_mean, raise_together
from packtool.train.model.compiled import SETTINGS
from packtool.train.model.sharding import sharding_arguments


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
            problems.append(f"{origin}: transformers' TrainingArguments has no such field{did_you_mean(name, known)}")
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


_CHECK = (
    "Check --optim, --lr-scheduler-type, --torch-dtype, --report-to, and the fields given with --set "
    "training.NAME=VALUE (transformers' TrainingArguments documents them)."
)
_AFTER_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")
# Made from the modules of a model.
_OF_A_MODEL = frozenset(
    name for name in OptimizerNames if name.value.startswith(("galore", "apollo", "lomo", "adalomo"))
)


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
        **_optimizer_fields(config, num_steps),
        "seed": config.seed,
        "logging_steps": config.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        # What saves at other times is in the callbacks: for the Trainer a run is one epoch, and nothing is evaluated.
        "save_strategy": "steps" if config.save_strategy == "steps" else "no",
        "save_steps": config.save_steps,
        "save_only_model": config.save_only_model,
        "report_to": list(config.report_to) or "none",
        "use_liger_kernel": config.use_liger_kernel,
        "liger_kernel_config": SETTINGS if config.use_liger_kernel else None,
        **sharding_arguments(config),
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "ignore_data_skip": True,
        "ddp_find_unused_parameters": False,
        **({"ddp_timeout": config.ddp_timeout} if config.ddp_timeout is not None else {}),
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu": not on_gpu,
    }
    fields |= checked_fields(config.training)
    if missing := config.missing_packages():
        raise ConfigError.from_problems(missing)
    if (schedule := str(fields["lr_scheduler_type"])) in _AFTER_EVALUATIONS:
        raise ConfigError(
            f"--lr-scheduler-type {schedule} follows evaluations of the Trainer's, and packtool evaluates by itself",
            "Take cosine, cosine_with_min_lr, linear or another one that follows the steps.",
        )
    try:
        args = TrainingArguments(**fields)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"transformers refuses these settings: {error}", _CHECK) from error
    raise_together([partial(_check_reports, args), partial(_check_optimizer, args, num_steps)])
    # One process drives one device; seeing several, the Trainer would wrap the model in DataParallel.
    assert args.device is not None
    args._n_gpu = min(args.n_gpu, 1)
    return args


def _optimizer_fields(config: TrainConfig, num_steps: int) -> dict[str, Any]:
    names = ("weight_decay", "lr_scheduler_type", "max_grad_norm", "optim", "adam_beta1", "adam_beta2", "adam_epsilon")
    return {
        **{name: getattr(config, name) for name in (*names, "neftune_noise_alpha")},
        "learning_rate": config.peak_learning_rate,
        "warmup_steps": config.num_warmup_steps(num_steps),
        "lr_scheduler_kwargs": dict(config.lr_scheduler_kwargs) or None,
    }


def _check_reports(args: TrainingArguments) -> None:
    """What the Trainer will log to, made as the Trainer will make it.

    Raises:
        ConfigError: for an unknown name, or with the command that installs what is missing.
    """
    callbacks: dict[str, Any] = integration_utils.INTEGRATION_TO_CALLBACK
    for name in args.report_to or ():
        if name not in callbacks:
            there_is_none = f"--report-to {name}: there is no such place{did_you_mean(name, callbacks)}"
            raise ConfigError(there_is_none, f"Known are {', '.join(callbacks)}.")
        try:
            callbacks[name]()
        except (RuntimeError, ImportError) as error:
            package = TRACKERS[name][1] if name in TRACKERS else name
            raise ConfigError(f"--report-to {name}: {package} is not installed", f"pip install {package}") from error


def _check_optimizer(args: TrainingArguments, num_steps: int) -> None:
    """Optimizer and schedule, made for a parameter of one number: their settings are found wrong now, not at step 1.

    Raises:
        ConfigError: with what they say.
    """
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    with refused_by_transformers():
        if args.optim in _OF_A_MODEL:
            with contextlib.suppress(ValueError):  # said of the model; ``check_optimizer_of`` has one
                Trainer.get_optimizer_cls_and_kwargs(args)
            optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=args.learning_rate)
        else:
            kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
            optimizer = kind(parameters, **settings)
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),  # type: ignore[arg-type]
        )


def check_optimizer_of(model: Any, args: TrainingArguments) -> None:
    """Make what an optimizer that looks into a model would be told; the model is not to be trained afterwards.

    Raises:
        ConfigError: with what it says.
    """
    if args.optim in _OF_A_MODEL:
        with refused_by_transformers():
            Trainer.get_optimizer_cls_and_kwargs(args, model)


@contextlib.contextmanager
def refused_by_transformers() -> Iterator[None]:
    """Inside, what transformers says of the optimizer or its schedule is a mistake in the settings.

    Raises:
        ConfigError: with what it says.
    """
    try:
        yield
    except (TypeError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise ConfigError(f"the optimizer or its schedule cannot be made: {error}", _CHECK) from error
