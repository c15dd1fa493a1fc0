"""Adapters: which modules get them, how they begin, and going on from some that were trained before."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from packtool.config.model import has_name
from packtool.config.train import TrainConfig
from packtool.encode.families import Towers
from packtool.errors import ConfigError, MismatchError
from packtool.train.prepare.trained import ADAPTER_FILE, instead_of_adapter, is_adapter

# Ways to begin that change the model's own weights: only where there are weights.
_NEEDS_WEIGHTS = ("pissa", "olora")
_ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SHOWN_NAMES = 4
_MOST_TOLD = 300
_OF_LORA = ".lora_"
# What an adapter's own settings say, by the option that says it otherwise.
_OPTIONS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_bias": "bias",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


def add_adapters(model: PreTrainedModel, towers: Towers, run: TrainConfig) -> PeftModel:
    """A model with adapters that learn: new ones, or those of ``--adapters``. Nothing else learns.

    Raises:
        ConfigError: if a name matches nothing, or the adapter of ``--adapters`` does not fit.
    """
    has_weights = not next(model.parameters()).is_meta
    if run.adapters:
        return _go_on(model, run, has_weights)
    begin: Any = {"true": True, "false": False}.get(run.init_weights, run.init_weights)
    if not has_weights and run.init_weights in _NEEDS_WEIGHTS:
        begin = True
    saved = _whole_modules(model, run)
    settings = LoraConfig(
        r=run.lora_rank,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        bias=run.lora_bias,
        use_rslora=run.use_rslora,
        use_dora=run.use_dora,
        init_lora_weights=begin,
        # Sorted by peft's own rule into the shortest list of endings that matches these modules and no others.
        target_modules=adapted_modules(model, towers, run),
        modules_to_save=saved or None,
        # Where head and embeddings are one matrix, they stay one.
        ensure_weight_tying=bool(saved) and _is_tied(model),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)


def adapted_modules(model: PreTrainedModel, towers: Towers, run: TrainConfig) -> list[str]:
    """Full names of the modules that get adapters: those asked for, of linear ones of unfrozen parts without the head.

    With ``--target-regex`` it alone decides.

    Raises:
        ConfigError: naming a target that matches nothing.
    """
    if run.target_regex is not None:
        return _kept_by_peft(model, _matching(model, run.target_regex))
    frozen = run.frozen_parts
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
            if not any(has_name(name, target) for name in linear)
        ]
        if problems:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError("\n".join(problems), f"There are {', '.join(known)}; all-linear takes all of them.")
        wanted = [name for name in linear if run.is_target(name)]
    if not wanted:
        raise ConfigError(
            f"no module is left to adapt: {', '.join(sorted(frozen))} are frozen, and the model has no other part",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false.",
        )
    return _kept_by_peft(model, wanted)


def _kept_by_peft(model: PreTrainedModel, names: list[str]) -> list[str]:
    """The names, if peft adapts these modules and no others.

    Of some mixtures of experts peft takes a module that ends like one of an expert, such as ``gate_proj`` of an expert
    that all tokens share, for what older checkpoints called the routed experts, and adapts those: also when it loads.

    Raises:
        ConfigError: naming the modules, and what can be adapted.
    """
    settings = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(settings, model, None)
    kept = set(settings.target_modules or ())
    if lost := {name.rpartition(".")[2] for name in names if name not in kept}:
        others = sorted({name.rpartition(".")[2] for name in names if name in kept} - lost)
        raise ConfigError(
            f"LoRA on {', '.join(sorted(lost))}: peft would adapt the routed experts of this model in their place",
            f"Leave them out: --target-modules {' '.join(others)}",
        )
    return names


def _matching(model: PreTrainedModel, regex: str) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE)]
    found = [name for name in names if re.fullmatch(regex, name)]
    if not found:
        raise ConfigError(
            f"--target-regex {regex}: no module has a name that it matches as a whole",
            f"Modules have names such as {', '.join(names[-_SHOWN_NAMES:])}.",
        )
    return found


def _whole_modules(model: PreTrainedModel, run: TrainConfig) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    problems = [
        f"--modules-to-save {wanted}: no module has this name"
        for wanted in run.modules_to_save
        if not any(has_name(name, wanted) for name in names)
    ]
    if problems:
        raise ConfigError("\n".join(problems), "Usual are embed_tokens and lm_head.")
    return list(run.modules_to_save)


def _is_tied(model: Any) -> bool:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embeddings.weight


def _go_on(model: PreTrainedModel, run: TrainConfig, has_weights: bool) -> PeftModel:
    (directory,) = run.adapters
    if os.path.isdir(directory) and not is_adapter(directory):  # peft would ask the hub for it
        raise ConfigError(
            f"--adapters {directory}: there is no adapter: {instead_of_adapter(directory)}",
            f"Give the directory of {ADAPTER_FILE}.",
        )
    try:
        settings: Any = PeftConfig.from_pretrained(directory)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--adapters {directory}: there is no adapter: {error}", "Give the directory of adapter_config.json."
        ) from error
    if not isinstance(settings, LoraConfig):
        raise ConfigError(f"--adapters {directory}: a {settings.peft_type} adapter; only LoRA's can be gone on from")
    defaults = type(run).__dataclass_fields__
    differing = [
        f"--{option.replace('_', '-')} {getattr(run, option)}: the adapter of --adapters has {getattr(settings, name)}"
        for option, name in _OPTIONS.items()
        if getattr(run, option) not in (defaults[option].default, getattr(settings, name))
    ]
    if differing:
        raise ConfigError.from_problems(differing)
    settings.inference_mode = False
    if not has_weights:
        if settings.init_lora_weights in _NEEDS_WEIGHTS:
            settings.init_lora_weights = True
        return get_peft_model(model, settings)
    try:
        return attach_adapter(model, directory, is_trainable=True, config=settings)
    except MismatchError as error:
        raise ConfigError(
            f"--adapters {directory} does not fit the model: {error.message}",
            f"It was trained on {settings.base_model_name_or_path}.",
        ) from error


def attach_adapter(model: nn.Module, directory: str, **settings: Any) -> PeftModel:
    """A model with an adapter that was saved, all of it.

    peft leaves out, without a word that is seen, what a model has no place for, and begins anew what is not there.

    Args:
        model: that the adapter was trained on.
        settings: of ``PeftModel.from_pretrained``.

    Raises:
        MismatchError: for an adapter of another model, or one that cannot be read.
    """
    remedy = "Give the model that it was trained on, and another checkpoint if its files are damaged."
    try:
        adapted = PeftModel.from_pretrained(model, directory, **settings)
        # Embeddings, which peft may have saved beside it, are another matter.
        here = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        differing = _differing({name: weight for name, weight in here.items() if _OF_LORA in name}, directory, _OF_LORA)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        told = f"the adapter in {directory} cannot be put onto this model: {str(error)[:_MOST_TOLD]}"
        raise MismatchError(told, remedy) from error
    if differing:
        raise MismatchError(f"the adapter in {directory} is that of another model: {differing}", remedy)
    return adapted


def take_adapter(model: PeftModel, checkpoint: str) -> None:
    """Give a new adapter the weights of one that was saved, all of them.

    Raises:
        MismatchError: if that one has other modules or another rank, or cannot be read.
    """
    remedy = "Give the --lora-rank, --target-modules and --freeze-... that it was trained with."
    try:
        differing = _differing(get_peft_model_state_dict(model), checkpoint)
        state = load_file(os.path.join(checkpoint, SAFETENSORS_WEIGHTS_NAME))
    except (OSError, SafetensorError) as error:
        raise MismatchError(f"the adapter in {checkpoint} cannot be read: {error}") from error
    if differing:
        raise MismatchError(f"the adapter in {checkpoint} is not that of these settings: {differing}", remedy)
    set_peft_model_state_dict(model, state)


def _differing(wanted: Mapping[str, Tensor], directory: str, infix: str = "") -> str | None:
    """What of an adapter's weights is not there, is there alone or has another shape; None if all fits.

    Args:
        wanted: the weights by name.
        infix: which of those that were saved are looked at: this is in their names.
    """
    path = os.path.join(directory, SAFETENSORS_WEIGHTS_NAME)
    if not os.path.exists(path):  # as older versions of peft saved it
        return None
    with safe_open(path, "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys() if infix in name}  # noqa: SIM118
    differing = sorted(
        {name for name, _ in found.items() ^ {name: tuple(w.shape) for name, w in wanted.items()}.items()}
    )
    return f"{len(differing)} of its weights do not fit, such as {differing[0]}" if differing else None
