"""The Trainer's arguments, and checks of options, model and ranks before any weights are loaded.

A field of ``--set training.NAME=VALUE`` either works as transformers documents it, or raises an error that names the
option to use instead (``config.compat_names``): no setting is silently without effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames

from packtool.attention.choose import check_dtype, choose
from packtool.attention.parallel.blocks import choose_blocks
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import InputSpec
from packtool.config.compat_names import training_argument_problem
from packtool.config.packages import TRACKERS
from packtool.config.train import OWN_OPTIMIZERS, TrainConfig
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import absolute_model
from packtool.errors import ConfigError, MismatchError, did_you_mean, raise_together
from packtool.launch.world import World, all_gather_objects
from packtool.train.model.active_layers import ActiveLayers
from packtool.train.model.compiled import LIGER_SETTINGS, check_backend, liger_warning, refuse_without_liger
from packtool.train.model.load import has_gpu, input_spec, model_without_weights, resolve_dtype
from packtool.train.model.loss import RouterBalance
from packtool.train.model.memory import MemoryEstimate, estimate_memory
from packtool.train.model.precision import checkpoint_dtype, precision_line, quantization_config, quantization_lines
from packtool.train.model.recompute import budget_of, plan_recomputation_of_run
from packtool.train.model.sharding import check_experts, sharding_arguments
from packtool.train.model.trainable import adapter_lines
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.parallelism import zero_stage
from packtool.train.prepare.run import Run

_ASSUMED_STEPS = 1_000_000
_CHECK_REMEDY = (
    "Check --optim, --lr-scheduler-type, --torch-dtype, --report-to, and the fields given with --set "
    "training.NAME=VALUE (transformers' TrainingArguments documents them)."
)
# Schedules that follow evaluations of the Trainer.
_NEEDS_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")
_YAML_BOOLS = {"yes": True, "on": True, "no": False, "off": False}
# Optimizers that are created from the modules of a model.
_NEEDS_MODEL = frozenset(
    name for name in OptimizerNames if name.value.startswith(("galore", "apollo", "lomo", "adalomo"))
)


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``--set training.NAME=VALUE``, their values converted to the types that they declare.

    They are fields of transformers' TrainingArguments. Raise a ConfigError that lists all unknown fields, fields that
    packtool sets itself, and values of wrong types.
    """
    if not fields:
        return {}
    hint_by_name = typing.get_type_hints(TrainingArguments)
    known_names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    checked = {}
    problems = []
    for name, value in fields.items():
        option = f"--set training.{name}"
        refusal = training_argument_problem(name)
        if refusal is not None:
            problems.append(f"{option}: {refusal}")
        elif name not in known_names:
            hint = did_you_mean(name, known_names)
            problems.append(f"{option}: transformers' TrainingArguments has no such field{hint}")
        else:
            try:
                checked[name] = _convert_value(value, _allowed_types(hint_by_name[name]))
            except ValueError as error:
                problems.append(f"{option}: {error}")
    if problems:
        raise ConfigError.from_problems(problems)
    return checked


def _allowed_types(hint: Any) -> tuple[Any, ...]:
    """Return the types of a type hint without their parameters: ``list`` and ``None`` for ``list[str] | None``."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    return tuple(typing.get_origin(member) or member for member in members)


def _convert_value(value: Any, allowed: tuple[Any, ...]) -> Any:
    """Convert a value of ``--set``, as parsed by YAML, to one of the allowed types; raise a ValueError if impossible.

    For example, 1 becomes 1.0 for a float, and "yes" becomes True for a bool. ``allowed`` are types without parameters:
    ``list`` for ``list[str]``.
    """
    classes = tuple(member for member in allowed if isinstance(member, type))
    if isinstance(value, bool):
        # For Python a bool is an int, but here true and false are not numbers.
        if bool in classes:
            return value
    elif isinstance(value, classes):
        return value
    elif isinstance(value, int) and float in classes:
        return float(value)
    elif isinstance(value, float) and int in classes and value.is_integer():
        return int(value)
    elif isinstance(value, str) and bool in classes and value.lower() in _YAML_BOOLS:
        return _YAML_BOOLS[value.lower()]

    takes_text = str in classes or any(issubclass(member, enum.Enum) for member in classes)
    if takes_text and isinstance(value, bool):
        return str(value).lower()
    if takes_text and isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError(f"{value!r} is not {_describe_types(allowed)}")


def _describe_types(allowed: tuple[Any, ...]) -> str:
    """Describe allowed types for a message, such as ``a number or a text``."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "names and values"}
    return " or ".join(names.get(each, "a list") for each in allowed if each is not type(None))


def training_arguments(config: TrainConfig, *, num_steps: int, dtype: torch.dtype, on_gpu: bool) -> TrainingArguments:
    """Return the Trainer's arguments, and check that it can create the optimizer, the schedule and the reports.

    For the Trainer, an optimizer step is one batch, whatever its micro-batches are, and the run is one epoch.
    """
    # Options with the same name in TrainingArguments.
    same_names = ("weight_decay", "lr_scheduler_type", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon")
    fields: dict[str, Any] = {
        "output_dir": config.output_dir,
        "max_steps": num_steps,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": 1,
        **{name: getattr(config, name) for name in same_names},
        "neftune_noise_alpha": config.neftune_noise_alpha,
        "optim": "adamw_torch" if config.optim in OWN_OPTIMIZERS else config.optim,
        "learning_rate": config.peak_learning_rate,
        "warmup_steps": config.num_warmup_steps(num_steps),
        "lr_scheduler_kwargs": dict(config.lr_scheduler_kwargs) or None,
        "seed": config.seed,
        "logging_steps": config.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        # RunCallback saves after epochs and evaluations: for the Trainer a run is one epoch without evaluations.
        "save_strategy": "steps" if config.save_strategy == "steps" else "no",
        "save_steps": config.save_steps,
        "save_only_model": config.save_only_model,
        "report_to": list(config.report_to) or "none",
        "use_liger_kernel": config.use_liger_kernel,
        "liger_kernel_config": LIGER_SETTINGS if config.use_liger_kernel else None,
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
    if (schedule := str(fields["lr_scheduler_type"])) in _NEEDS_EVALUATIONS:
        raise ConfigError(
            f"--lr-scheduler-type {schedule} needs evaluations by transformers' Trainer, which packtool does not use",
            "Choose a schedule that depends only on the step, such as cosine, cosine_with_min_lr or linear.",
        )
    try:
        args = TrainingArguments(**fields)
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"transformers refuses these settings: {error}", _CHECK_REMEDY) from error
    raise_together([partial(_check_reports, args), partial(_check_optimizer, args, num_steps)])
    # One process uses one device; with several visible devices, the Trainer would wrap the model in DataParallel. Their
    # number is known once ``args.device`` was read.
    assert args.device is not None
    args._n_gpu = min(args.n_gpu, 1)
    return args


def _check_reports(args: TrainingArguments) -> None:
    """Raise if the Trainer could not create the reporting callbacks."""
    callbacks: dict[str, Any] = integration_utils.INTEGRATION_TO_CALLBACK
    for name in args.report_to or ():
        if name not in callbacks:
            unknown = f"--report-to {name}: transformers has no such integration{did_you_mean(name, callbacks)}"
            raise ConfigError(unknown, f"Choose from {', '.join(callbacks)}.")
        try:
            callbacks[name]()
        except (RuntimeError, ImportError) as error:
            package = TRACKERS[name][1] if name in TRACKERS else name
            raise ConfigError(f"--report-to {name}: cannot use {package}: {error}", f"pip install {package}") from error


@contextlib.contextmanager
def name_failed_tracker() -> Iterator[None]:
    """Turn an exception from a callback of ``--report-to``, raised anywhere inside, into an error that names it."""
    try:
        yield
    except Exception as error:
        callbacks = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        for name, callback_class in integration_utils.INTEGRATION_TO_CALLBACK.items():
            if any(type(callback) is callback_class for callback in callbacks):
                failed = f"--report-to {name}: {type(error).__name__}: {error}"
                raise ConfigError(failed, "Correct its settings, or leave it out of --report-to.") from error
        raise


def _check_optimizer(args: TrainingArguments, num_steps: int) -> None:
    """Create optimizer and schedule for a single weight, so that wrong settings raise before the model is loaded.

    Optimizers that are created from the modules of a model are checked later, by ``check_optimizer_of``.
    """
    weights = [torch.nn.Parameter(torch.zeros(1))]
    with refused_by_transformers():
        optimizer: torch.optim.Optimizer
        if args.optim in _NEEDS_MODEL:
            with contextlib.suppress(ValueError):  # because there is no model; other errors are raised
                Trainer.get_optimizer_cls_and_kwargs(args)
            optimizer = torch.optim.SGD(weights, lr=args.learning_rate)  # any one, to check the schedule
        else:
            optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args)
            optimizer = optimizer_class(weights, **settings)
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),  # type: ignore[arg-type]
        )


def check_optimizer_of(model: Any, args: TrainingArguments) -> None:
    """Check an optimizer that is created from the modules of a model; do not train this model afterwards."""
    if args.optim in _NEEDS_MODEL:
        with refused_by_transformers():
            Trainer.get_optimizer_cls_and_kwargs(args, model)


@contextlib.contextmanager
def refused_by_transformers() -> Iterator[None]:
    """Turn transformers' errors about the optimizer or its schedule into a ConfigError."""
    try:
        yield
    except (TypeError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise ConfigError(f"the optimizer or its schedule cannot be created: {error}", _CHECK_REMEDY) from error


def load_spec(run: Run) -> InputSpec:
    """Return the model's properties that collation needs, and check that the model can be trained."""
    trains_few_layers = (run.config.lisa_activated_layers or run.config.badam_switch_interval) is not None
    if trains_few_layers and run.world.size > 1:
        raise ConfigError(
            "--lisa-activated-layers and --badam-switch-interval require a single process: DDP needs all gradients",
            "Start one process, without NPROC_PER_NODE.",
        )
    spec = input_spec(run)
    raise_together(_model_checks(run.config, spec.config))
    return spec


def checks_without_rows(config: TrainConfig) -> list[Callable[[], object]]:
    """Return the checks that do not depend on rows, as functions that raise."""
    model = InputSpec.load(absolute_model(config.model), MediaLimits()).config

    def check_trainable() -> None:
        num_steps = config.max_steps or _ASSUMED_STEPS  # the number is unknown until rows are counted
        check_optimizer_of(*_empty_model(config, model, num_steps))

    return [*_model_checks(config, model), check_trainable]


def _model_checks(config: TrainConfig, model_config: PreTrainedConfig) -> list[Callable[[], object]]:
    """Return checks of the model with the run's options, as functions that raise a PacktoolError."""
    dtype = resolve_dtype(model_config, config, on_gpu=has_gpu(config))
    checks: list[Callable[[], object]] = [
        partial(quantization_config, config, model_config, dtype),
        partial(_check_compilation, config),
        partial(_check_zero3, config),
    ]
    if config.use_liger_kernel or config.shares_experts:
        checks.append(partial(_check_experts_and_liger, config, model_config))
    if config.removes_padding:
        checks += [partial(refuse_unsupported, model_config), partial(_check_kernel, config, dtype)]
    return checks


def _check_compilation(config: TrainConfig) -> None:
    """Raise if layers cannot be compiled, because DeepSpeed gathers weights inside them."""
    if config.torch_compile and zero_stage(config) == 3:
        raise ConfigError(
            f"--torch-compile true: --deepspeed {config.deepspeed} gathers weights inside the compiled layers, "
            "which is not supported",
            "Shard weights with --fsdp full_shard instead, or leave out --torch-compile.",
        )


def _check_zero3(config: TrainConfig) -> None:
    """Raise if an option needs complete weights, and ``--deepspeed`` is a JSON file that shards them.

    The names zero3 and zero3_offload are refused with the settings, by ``conflicts.tsv``.
    """
    needs_weights = {
        "--asft-alpha": config.asft_alpha is not None,
        "--router-aux-loss-coef": bool(config.router_aux_loss_coef),
        "--train-from-scratch true": config.train_from_scratch,
    }
    refused = [option for option, is_given in needs_weights.items() if is_given]
    if refused and zero_stage(config) == 3:
        raise ConfigError(f"{', '.join(refused)} cannot be combined with ZeRO-3", "Use --deepspeed zero2.")


def _check_experts_and_liger(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    """Raise if the model's experts cannot be shared, or Liger's kernels cannot run."""
    if config.shares_experts:
        check_experts(model_without_weights(config, model_config, torch.float32), config)
    if config.use_liger_kernel:
        refuse_without_liger(on_gpu=has_gpu(config))


def _check_kernel(config: TrainConfig, dtype: torch.dtype) -> None:
    """Raise if the attention kernel or the compiler cannot run on this machine."""
    on_gpu = has_gpu(config)
    if on_gpu and not torch.cuda.is_available():  # a dry run for a GPU that this machine does not have
        check_dtype(config.attn_impl, dtype)
        return
    device = torch.device("cuda" if on_gpu else "cpu")
    choose(config.attn_impl, device, dtype)
    if config.torch_compile:
        check_backend(config.torch_compile_backend, device)
    if config.sequence_parallel_ranks > 1:
        choose_blocks(config.attn_impl, device, dtype, head_dims=(0, 0))  # for heads of any size


def _empty_model(
    config: TrainConfig, model_config: PreTrainedConfig, num_steps: int
) -> tuple[nn.Module, TrainingArguments]:
    """Return the model on the meta device and the Trainer's arguments; raise the errors that training would raise."""
    dtype = resolve_dtype(model_config, config, on_gpu=has_gpu(config))
    args = training_arguments(config, num_steps=num_steps, dtype=dtype, on_gpu=torch.cuda.is_available())
    model = model_without_weights(config, model_config, dtype)
    if config.router_aux_loss_coef:
        RouterBalance(model, config.router_aux_loss_coef)
    ActiveLayers.of(model, config)
    if config.optim == "adam_mini":
        refuse_adam_mini(model)
    return model, args


def refuse_adam_mini(model: nn.Module) -> None:
    """Raise if Adam-mini cannot train a model: it groups vectors and matrices alone."""
    names = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.ndim > 2]
    if names:
        raise ConfigError(
            f"--optim adam_mini: {names[0]} is trained, and is neither a vector nor a matrix",
            "Use another optimizer, or freeze such weights (--freeze-vit true).",
        )


def estimate_training(run: Run, spec: InputSpec) -> tuple[MemoryEstimate, list[str]]:
    """Estimate training memory without weights, raise the errors of training, and describe the precision of weights."""
    dtype = resolve_dtype(spec.config, run.config, on_gpu=has_gpu(run.config))
    model, args = _empty_model(run.config, spec.config, run.timeline.num_steps)
    estimate = estimate_run(run, model, spec, dtype)
    lines = [precision_line(model, dtype, run.config, checkpoint_dtype(spec.config))]
    lines += [*adapter_lines(model, run.config), *quantization_lines(model, spec.config.model_type, run.config)]
    if run.config.plans_recomputation:
        _, line = plan_recomputation_of_run(run, spec, dtype, budget_of(run.config))
        lines.append(line)
    if (warning := liger_problem(run.config, spec.config)) is not None:
        lines.append(warning)
    check_optimizer_of(model, args)
    return estimate, lines


def liger_problem(config: TrainConfig, model_config: PreTrainedConfig) -> str | None:
    """Return a warning if ``--use-liger-kernel`` is given and Liger cannot patch the model."""
    if not config.use_liger_kernel:
        return None
    return liger_warning(model_without_weights(config, model_config, torch.float32), model_config.model_type)


def estimate_run(run: Run, model: nn.Module, spec: InputSpec, dtype: torch.dtype) -> MemoryEstimate:
    """Return the largest estimate of a rank's memory over all configurations of steps (several with stages)."""
    estimates = [
        estimate_memory(
            config,
            model,
            spec.config,
            dtype=dtype,
            world_size=run.world.size,
            micro_batches=run.peak_memory_batches(number),
            axes=axes,
        )
        for number, (config, axes) in enumerate(run.step_configs)
    ]
    return max(estimates, key=lambda estimate: estimate.total or 0)


def check_ranks_agree(state: RunState, world: World, sequence_parallel: str = "") -> None:
    """Raise a MismatchError on every rank, naming the differences, if ranks have different plans.

    The process group must exist; ``sequence_parallel`` describes how ranks share sequences.
    """
    own_state: dict[str, Any] = dataclasses.asdict(state) | {"sequence parallel": sequence_parallel}
    first, *_ = states = all_gather_objects(own_state, world.size)
    for rank, other in enumerate(states):
        if other != first:
            names = [name for name in first if other[name] != first[name]]
            lines = [f"  - {name}: {first[name]} on rank 0, {other[name]} on rank {rank}" for name in names]
            raise MismatchError(
                f"rank {rank} has another plan than rank 0:\n" + "\n".join(lines),
                "Use the same caches, options and version of packtool on all machines.",
            )
