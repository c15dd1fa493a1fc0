"""A model ready to be trained: loaded, its attention routed, its parts frozen or adapted.

Which parameters learn with ``--train-type full``: parts first, then names, then what is wanted all the same.

Keeps transformers from talking beside packtool's own progress.
"""

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
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from packtool.attention.features import run_towers_once
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import route_towers, set_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import InputSpec, auto_class
from packtool.config.commands import EvalConfig, VerifyConfig
from packtool.config.model import QuantizationOptions
from packtool.config.train import TrainConfig
from packtool.encode.families import Towers
from packtool.errors import ConfigError, MismatchError
from packtool.train.model.adapters import add_adapters, attach_adapter
from packtool.train.model.precision import checkpoint_dtype, keeps_masters, raise_to_masters
from packtool.train.model.quantize import quantization_of, stay_trainable, whole_size
from packtool.train.model.sharding import experts_turned_rightly, forget_sharding
from packtool.train.model.towers import towers_of
from packtool.train.prepare.trained import TrainedModel


def freeze(model: nn.Module, towers: Towers, run: TrainConfig) -> None:
    """Set ``requires_grad`` of every parameter.

    Raises:
        ConfigError: if a name matches nothing, or nothing is left to train.
    """
    named = list(model.named_parameters())
    frozen = run.frozen_parts
    _check_names([name for name, _ in named], run)
    budget = int(sum(whole_size(parameter) for _, parameter in named) * run.freeze_parameters_ratio)
    for name, parameter in named:
        budget -= whole_size(parameter)
        is_kept = towers.part_of(name) in frozen or (run.freeze_parameters_ratio > 0 and budget >= 0)
        is_kept = is_kept or run.is_frozen(name)
        is_wanted = run.is_unfrozen(name)
        parameter.requires_grad_((is_wanted or not is_kept) and not towers.is_unused(name))
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


_SHOWN_NAMES = 4


def resolve_dtype(
    config: PreTrainedConfig, run: TrainConfig | EvalConfig | VerifyConfig, *, on_gpu: bool
) -> torch.dtype:
    """Precision of the computation: ``auto`` is the checkpoint's on a GPU, and float32 on a CPU.

    ``--bf16 true`` and ``--fp16 true`` come before ``--torch-dtype``.

    Raises:
        ConfigError: for float16 on a CPU.
    """
    asked: str = run.torch_dtype
    declined: tuple[str, ...] = ()
    if isinstance(run, TrainConfig):
        asked, declined = run.computation_dtype, run.declined_dtypes
    if asked == "auto":
        found = checkpoint_dtype(config) if on_gpu else torch.float32
        return torch.float32 if str(found).removeprefix("torch.") in declined else found
    if asked == "float16" and not on_gpu:
        raise ConfigError(
            "--torch-dtype float16 needs a GPU, and so does --fp16 true", "Use float32 or bfloat16 on the CPU."
        )
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]


def has_gpu(run: TrainConfig) -> bool:
    """Whether a run computes on a GPU: one of this machine, or one that a dry run plans for."""
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
        packing: route the text tower through packed attention; False leaves transformers' own.
        attn_impl: kernel of the packed attention.
        parallel: ranks that share each sequence.
        quantization: bits of the language model's layers; None for those of ``dtype``.
        experts: how processes divide a mixture's experts; None where each has them all.

    Raises:
        ConfigError: for few bits without bitsandbytes.
        UnsupportedModelError: before any weight is read, if packed samples could not be kept apart.
        MismatchError: if the checkpoint lacks weights, which would otherwise be random, or its files cannot be read.
    """
    if packing:
        refuse_unsupported(config)
    # A copy: loading writes the choice of attention into the config, and collation's meta model must not inherit it.
    few_bits = None if quantization is None else quantization_of(quantization, config, dtype)
    sharded = {"distributed_config": experts} if experts is not None else {}
    with _reading(model), experts_turned_rightly() if experts is not None else contextlib.nullcontext():
        loaded, info = auto_class(config).from_pretrained(
            model,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            quantization_config=few_bits,
            **sharded,
        )
    if experts is not None:
        forget_sharding(loaded)
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:_SHOWN_NAMES]) + (", ..." if len(missing) > _SHOWN_NAMES else "")
        raise MismatchError(
            f"{model} lacks {len(missing)} weights of a {type(loaded).__name__}: {shown}",
            "Check that --model is a complete checkpoint with a language head.",
        )
    if few_bits is not None:
        stay_trainable(loaded)
    # Under ZeRO-3 transformers would undo renamings in every checkpoint that this one never needed.
    if renamings := getattr(loaded, "_weight_conversions", None):
        loaded._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]
    route_attention(loaded, packing=packing, attn_impl=attn_impl, parallel=parallel)
    return loaded


@contextlib.contextmanager
def _reading(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MismatchError(
            f"the weights of {model} cannot be read: {error}",
            "Download its files again, whole: a clone without git lfs has pointers in their place.",
        ) from error


def route_attention(
    model: PreTrainedModel, *, packing: bool, attn_impl: str = "auto", parallel: SequenceParallel | None = None
) -> None:
    """Route a loaded model's towers through one call, and with ``packing`` its text through packed attention."""
    run_towers_once(model)
    route_towers(model)
    if packing:
        set_attention(model, attn_impl, parallel)


def make_trainable(model: PreTrainedModel, run: TrainConfig) -> PreTrainedModel | PeftModel:
    """Freeze what the options keep, add adapters with ``--train-type lora``, and keep float32 of what is trained.

    Raises:
        ConfigError: if a name matches nothing, or nothing is left to train.
        UnsupportedModelError: if a part that is to be frozen cannot be found.
    """
    towers = towers_of(model, model.config.model_type)
    recomputes = bool(run.gradient_checkpointing)
    in_vision = recomputes if run.vit_gradient_checkpointing is None else run.vit_gradient_checkpointing
    if recomputes or in_vision:
        _enable_checkpointing(model)
    if recomputes != in_vision:
        _keep_activations(model, towers, in_vision=not in_vision)
    if run.train_type == "lora":
        adapted = add_adapters(model, towers, run)
        # peft does so for adapters alone, and not for biases and whole modules that are trained beside them.
        if run.deepspeed is None:
            raise_to_masters(adapted)
        return adapted
    freeze(model, towers, run)
    if keeps_masters(run):
        raise_to_masters(model)
    return model


def _enable_checkpointing(model: Any) -> None:
    """Recompute activations; the non-reentrant form needs no gradients on the inputs, which frozen embeddings lack."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _keep_activations(model: nn.Module, towers: Towers, *, in_vision: bool) -> None:
    """Undo it, in the towers of media or outside of them."""
    for name, module in model.named_modules():
        is_vision = towers.part_of(name) != "language model"
        if is_vision == in_vision and hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False


def load_trained(
    trained: TrainedModel,
    spec: InputSpec,
    dtype: torch.dtype,
    *,
    packing: bool = True,
    attn_impl: str = "auto",
    parallel: SequenceParallel | None = None,
    quantization: QuantizationOptions | None = None,
) -> nn.Module:
    """Read the weights of a model as training left it, with its adapter if it has one.

    Args:
        packing: keep packed samples apart, with the kernel ``attn_impl``.
        parallel: ranks that share each sequence.
        quantization: bits of the language model's layers; None for those of ``dtype``.

    Raises:
        ConfigError: for few bits without bitsandbytes.
        UnsupportedModelError: for a model that cannot be packed.
        MismatchError: if the checkpoint lacks weights, which would otherwise be random.
    """
    loaded: nn.Module = load_model(
        trained.base,
        spec.config,
        dtype=dtype,
        packing=packing,
        attn_impl=attn_impl,
        parallel=parallel,
        quantization=quantization,
    )
    return attach_adapter(loaded, trained.adapter) if trained.adapter is not None else loaded


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers inside; warnings stay, but for those that only peft or torch could heed."""
    bars: Any = logging
    # torch says how experts that are spread could be gathered faster.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
