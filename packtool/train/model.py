"""A model ready to be trained: loaded, its attention routed, its parts frozen or adapted."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import set_attention
from packtool.attention.support import refuse_unsupported
from packtool.config.evaluate import EvalConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError
from packtool.train.precision import checkpoint_dtype, keeps_masters, raise_to_masters
from packtool.train.towers import Towers, frozen_parts, towers_of

_SHOWN_NAMES = 4


def resolve_dtype(config: PreTrainedConfig, run: TrainConfig | EvalConfig, *, on_gpu: bool) -> torch.dtype:
    """Precision of the computation: ``auto`` is the checkpoint's on a GPU, and float32 on a CPU.

    Raises:
        ConfigError: for float16 on a CPU.
    """
    if run.torch_dtype == "auto":
        return checkpoint_dtype(config) if on_gpu else torch.float32
    if run.torch_dtype == "float16" and not on_gpu:
        raise ConfigError("--torch-dtype float16 needs a GPU", "Use float32 or bfloat16 on the CPU.")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[run.torch_dtype]


def has_gpu(run: TrainConfig) -> bool:
    """Whether a run computes on a GPU: one of this machine, or one that a dry run plans for."""
    return run.hardware is not None or torch.cuda.is_available()


def load_model(
    model: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    packing: bool,
    attn_impl: str = "auto",
    parallel: SequenceParallel | None = None,
) -> PreTrainedModel:
    """Read a model's weights.

    Args:
        packing: route the text tower through packed attention; False leaves transformers' own.
        attn_impl: kernel of the packed attention.
        parallel: ranks that share each row.

    Raises:
        UnsupportedModelError: before any weight is read, if packed samples could not be kept apart.
        MismatchError: if the checkpoint lacks weights, which would otherwise be random.
    """
    if packing:
        refuse_unsupported(config)
    auto: Any = (
        AutoModelForImageTextToText
        if type(config) in AutoModelForImageTextToText._model_mapping
        else AutoModelForCausalLM
    )
    # A copy: loading writes the choice of attention into the config, and collation's meta model must not inherit it.
    loaded, info = auto.from_pretrained(
        model, config=copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:_SHOWN_NAMES]) + (", ..." if len(missing) > _SHOWN_NAMES else "")
        raise MismatchError(
            f"{model} lacks {len(missing)} weights of a {type(loaded).__name__}: {shown}",
            "Check that --model is a complete checkpoint with a language head.",
        )
    if packing:
        set_attention(loaded, attn_impl, parallel)
    return loaded


def make_trainable(model: PreTrainedModel, run: TrainConfig) -> PreTrainedModel | PeftModel:
    """Freeze what the options keep, add adapters with ``--train-type lora``, and keep float32 of what is trained.

    Raises:
        ConfigError: if a target module's name matches nothing, or nothing is left to train.
        UnsupportedModelError: if a part that is to be frozen cannot be found.
    """
    towers = towers_of(model, model.config.model_type)
    if run.gradient_checkpointing:
        _enable_checkpointing(model)
    if run.train_type == "lora":
        # Sorted by peft's own rule into the shortest list of endings that matches these modules and no others.
        names = adapted_modules(model, towers, run)
        adapters = LoraConfig(
            r=run.lora_rank,
            lora_alpha=run.lora_alpha,
            lora_dropout=run.lora_dropout,
            target_modules=names,
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, adapters)
    frozen = frozen_parts(run)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(towers.part_of(name) not in frozen)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"nothing is left to train: {', '.join(sorted(frozen))} are frozen, and the model has no other part",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false.",
        )
    if keeps_masters(run):
        raise_to_masters(model)
    return model


def adapted_modules(model: PreTrainedModel, towers: Towers, run: TrainConfig) -> list[str]:
    """Full names of the linear modules that get adapters: those asked for in unfrozen parts, without the head.

    Raises:
        ConfigError: naming a target that matches nothing.
    """
    frozen = frozen_parts(run)
    any_model: Any = model
    head = any_model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and towers.part_of(name) not in frozen
    ]
    wanted = linear
    if run.target_modules != ("all-linear",):
        problems = [
            f"--target-modules {target}: no linear module of an unfrozen part has this name"
            for target in run.target_modules
            if not any(_is_named(name, target) for name in linear)
        ]
        if problems:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError("\n".join(problems), f"There are {', '.join(known)}; all-linear takes all of them.")
        wanted = [name for name in linear if any(_is_named(name, target) for target in run.target_modules)]
    if not wanted:
        raise ConfigError(
            f"no module is left to adapt: {', '.join(sorted(frozen))} are frozen, and the model has no other part",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false.",
        )
    return wanted


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all)."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _enable_checkpointing(model: Any) -> None:
    """Recompute activations; the non-reentrant form needs no gradients on the inputs, which frozen embeddings lack."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
