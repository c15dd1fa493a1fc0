"""Models ready to be trained: loaded, their attention routed, their parts frozen or adapted."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, set_seed
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from packtool.attention.features import run_towers_once
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import route_towers, set_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import InputSpec, auto_class, weights_in_one_piece
from packtool.config.commands import EvalConfig, VerifyConfig
from packtool.config.model import QuantizationOptions
from packtool.config.train import TrainConfig
from packtool.encode.families import Towers
from packtool.encode.model_files import absolute_model
from packtool.errors import ConfigError, MismatchError
from packtool.progress import Progress
from packtool.train.model.adapters import add_adapters, attach_adapter, load_adapter_weights
from packtool.train.model.compiled import compile_layers
from packtool.train.model.precision import (
    SavedPrecision,
    checkpoint_dtype,
    full_size,
    keep_backward_pass,
    keeps_masters,
    load_masters,
    loaded_dtype,
    precision_lines,
    quantization_config,
    quantization_line,
    raise_to_masters,
)
from packtool.train.model.sharding import expert_sharding, experts_transposed_correctly
from packtool.train.model.towers import towers_of
from packtool.train.model.unloaded import unloaded_line, unloaded_tensors
from packtool.train.prepare.run import Run
from packtool.train.prepare.trained import TrainedModel

_MAX_SHOWN_NAMES = 4


def resolve_dtype(
    config: PreTrainedConfig, run: TrainConfig | EvalConfig | VerifyConfig, *, on_gpu: bool
) -> torch.dtype:
    """Return the precision of the computation: ``auto`` is the checkpoint's on a GPU, and float32 on a CPU.

    ``--bf16 true`` and ``--fp16 true`` override ``--torch-dtype``.

    Raises:
        ConfigError: for float16 on a CPU.
    """
    name: str = run.computation_dtype if isinstance(run, TrainConfig) else run.torch_dtype
    if name == "auto":
        dtype = checkpoint_dtype(config) if on_gpu else torch.float32
        is_declined = isinstance(run, TrainConfig) and str(dtype).removeprefix("torch.") in run.declined_dtypes
        return torch.float32 if is_declined else dtype
    if name == "float16" and not on_gpu:
        raise ConfigError(
            "--torch-dtype float16 needs a GPU, and so does --fp16 true", "Use float32 or bfloat16 on the CPU."
        )
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def has_gpu(run: TrainConfig) -> bool:
    """Return whether a run computes on a GPU: of this machine, or one that a dry run plans for."""
    return (run.dry_run and run.hardware is not None) or torch.cuda.is_available()


def load_model(
    model: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    packing: bool,
    attn_impl: str = "auto",
    parallel: SequenceParallel | None = None,
    quantization: QuantizationOptions | None = None,
    experts: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Read a model's weights.

    Args:
        packing: route the text tower through packed attention instead of transformers' own.
        attn_impl: kernel of the packed attention.
        parallel: ranks that share each sequence.
        quantization: bits of the language model's layers; None for those of ``dtype``.
        experts: how processes divide a mixture's experts; None if each process has all experts.

    Raises:
        UnsupportedModelError: before any weight is read, if the model cannot be packed.
        MismatchError: if the checkpoint's files cannot be read, or lack weights, which would be random.
    """
    if packing:
        refuse_unsupported(config)
    settings: dict[str, Any] = {"dtype": dtype, "quantization_config": None}
    if quantization is not None:
        settings["quantization_config"] = quantization_config(quantization, config, dtype)
    if experts is not None:
        settings["distributed_config"] = experts
    with experts_transposed_correctly() if experts is not None else contextlib.nullcontext():
        loaded: Any = _read_weights(model, config, settings)
    if experts is not None:
        # Checkpoints must be like any other: without the processes that loaded this one.
        loaded.config.__dict__.pop("distributed_config", None)
    if settings["quantization_config"] is not None:
        keep_backward_pass(loaded)
    # Under ZeRO-3 transformers would also revert renamings that this checkpoint never needed.
    if renamings := getattr(loaded, "_weight_conversions", None):
        loaded._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]
    route_attention(loaded, packing=packing, attn_impl=attn_impl, parallel=parallel)
    return loaded


def _read_weights(model: str, config: PreTrainedConfig, settings: dict[str, Any]) -> PreTrainedModel:
    try:
        loaded, info = auto_class(config).from_pretrained(
            model,
            # A copy: loading writes the attention into the config, and collation's meta model must not inherit it.
            config=copy.deepcopy(config),
            attn_implementation="sdpa",
            output_loading_info=True,
            **settings,
        )
    except (OSError, SafetensorError) as error:
        raise MismatchError(
            f"the weights of {model} cannot be read: {error}",
            "Download its files again, whole: a clone without git lfs has pointers in their place.",
        ) from error
    if missing := sorted(info["missing_keys"]):
        names = ", ".join(missing[:_MAX_SHOWN_NAMES]) + (", ..." if len(missing) > _MAX_SHOWN_NAMES else "")
        raise MismatchError(
            f"{model} lacks {len(missing)} weights of a {type(loaded).__name__}: {names}",
            "Check that --model is a complete checkpoint with a language head.",
        )
    return loaded


def load_trained(trained: TrainedModel, spec: InputSpec, dtype: torch.dtype, **settings: Any) -> nn.Module:
    """Read a model as training left it, with its adapter if it has one; ``settings`` are those of ``load_model``."""
    model = load_model(trained.base, spec.config, dtype=dtype, **{"packing": True, **settings})
    return attach_adapter(model, trained.adapter) if trained.adapter is not None else model


def route_attention(
    model: PreTrainedModel, *, packing: bool, attn_impl: str = "auto", parallel: SequenceParallel | None = None
) -> None:
    """Let a model's towers run once a micro-batch, and with ``packing`` route its text through packed attention."""
    run_towers_once(model)
    route_towers(model)
    if packing:
        set_attention(model, attn_impl, parallel)


def make_trainable(model: PreTrainedModel, run: TrainConfig) -> PreTrainedModel | PeftModel:
    """Freeze parameters, add adapters with ``--train-type lora``, and keep trained weights in float32 if requested."""
    towers = towers_of(model, model.config.model_type)
    recomputes = bool(run.gradient_checkpointing)
    in_vision = recomputes if run.vit_gradient_checkpointing is None else run.vit_gradient_checkpointing
    if recomputes or in_vision:
        enable_checkpointing(model)
    if recomputes != in_vision:
        for name, module in model.named_modules():
            is_vision = towers.part_of(name) != "language model"
            if is_vision != in_vision and hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
    if run.train_type == "lora":
        adapted = add_adapters(model, towers, run)
        # peft does this for adapters only, not for biases and modules that are trained in full.
        if run.deepspeed is None:
            raise_to_masters(adapted)
        return adapted
    _freeze(model, towers, run)
    if keeps_masters(run):
        raise_to_masters(model)
    return model


def enable_checkpointing(model: Any) -> None:
    """Recompute activations; the reentrant form would need gradients on inputs, which frozen embeddings lack."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def _freeze(model: nn.Module, towers: Towers, run: TrainConfig) -> None:
    """Set ``requires_grad`` of every parameter: by part and name, unless ``--trainable-parameters`` names it."""
    named, frozen = list(model.named_parameters()), run.frozen_parts
    _check_names([name for name, _ in named], run)
    budget = int(sum(full_size(parameter) for _, parameter in named) * run.freeze_parameters_ratio)
    for name, parameter in named:
        budget -= full_size(parameter)
        in_ratio = run.freeze_parameters_ratio > 0 and budget >= 0
        is_frozen = towers.part_of(name) in frozen or in_ratio or run.is_frozen(name)
        parameter.requires_grad_((run.is_unfrozen(name) or not is_frozen) and not towers.is_unused(name))
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"nothing is left to train: {', '.join(sorted(frozen)) or 'all parameters'} are frozen, and the model has "
            "no other part",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false, or name --trainable-parameters.",
        )


def _check_names(names: list[str], run: TrainConfig) -> None:
    problems = []
    for option, prefixes, regex in (
        ("freeze-parameters", run.freeze_parameters, run.freeze_parameters_regex),
        ("trainable-parameters", run.trainable_parameters, run.trainable_parameters_regex),
    ):
        problems += [
            f"--{option} {prefix}: no parameter's name begins so"
            for prefix in prefixes
            if not any(name.startswith(prefix) for name in names)
        ]
        if regex is not None and not any(re.search(regex, name) for name in names):
            problems.append(f"--{option}-regex {regex}: it is found in no parameter's name")
    if problems:
        raise ConfigError("\n".join(problems), f"Parameters have names such as {names[0]} and {names[-1]}.")


def model_without_weights(config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """Return the model made trainable, on the meta device: takes a second instead of minutes, and no memory."""
    with weights_in_one_piece(), torch.device("meta"):
        model = auto_class(model_config).from_config(model_config, dtype=loaded_dtype(dtype, model_config, config))
        return make_trainable(model, config)


def build_model(
    run: Run, spec: InputSpec, dtype: torch.dtype, parallel: SequenceParallel | None, progress: Progress
) -> tuple[PreTrainedModel | PeftModel, SavedPrecision, dict[str, str]]:
    """Load the model that a run trains, add its adapter, and compile its layers if requested.

    Args:
        dtype: of the computation.

    Returns:
        the model, bare or inside a LoRA adapter; the precision of its weights in checkpoints; and tensors of the base
        model that transformers does not load, with their files.
    """
    # Every rank, and every run with this seed, initializes adapters with the same random weights.
    set_seed(run.config.seed)
    weights = run.resume_point.weights
    is_adapter = run.config.train_type == "lora"
    weight_dtype = loaded_dtype(dtype, spec.config, run.config)
    experts = None
    if run.config.shares_experts:
        empty = model_without_weights(run.config, spec.config, weight_dtype)
        experts = expert_sharding(empty, run.config, run.world, dtype)
    model = load_model(
        # An adapter stores the name of the model that was loaded as its base.
        weights if weights is not None and not is_adapter else absolute_model(run.config.model),
        spec.config,
        dtype=weight_dtype,
        packing=run.config.removes_padding,
        attn_impl=run.config.attn_impl,
        parallel=parallel,
        quantization=run.config,
        experts=experts,
    )
    saved = SavedPrecision.of(spec.config, model)
    unloaded = {} if is_adapter else unloaded_tensors(model, run.source.files.directory)
    trained = make_trainable(model, run.config)
    if weights is not None:
        if isinstance(trained, PeftModel):
            load_adapter_weights(trained, weights)
        else:
            load_masters(trained, weights)
        progress.note(f"weights are those of {weights}; optimizer, schedule and data begin anew")
    lines = [*precision_lines(trained, dtype, run.config, saved.dtype), *unloaded_line(unloaded, run.config.model)]
    for line in (*lines, *quantization_line(trained, spec.config.model_type, run.config)):
        progress.note(line)
    if run.config.torch_compile:
        compile_layers(trained, run.config.torch_compile_backend)
    return trained, saved, unloaded


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars; also warnings that only peft or torch themselves could resolve."""
    bars: Any = logging
    # torch's advice on how to gather divided experts faster.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()
