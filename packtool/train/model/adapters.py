"""LoRA adapters: the modules that get them, their initial weights, and continuing from trained ones."""

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

# Initializations that change the model's own weights, and therefore need them.
_NEEDS_WEIGHTS = ("pissa", "olora")
_ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAX_SHOWN_NAMES = 4
_MAX_ERROR_LENGTH = 300
_LORA_PART = ".lora_"
# Options, and the names of the same settings in an adapter's configuration.
_OPTIONS = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_bias": "bias",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


def add_adapters(model: PreTrainedModel, towers: Towers, run: TrainConfig) -> PeftModel:
    """Return a model in which only adapters are trained: new ones, or those of ``--adapters``.

    Raises:
        ConfigError: if a name matches nothing, or the adapter of ``--adapters`` does not fit.
    """
    has_weights = not next(model.parameters()).is_meta
    if run.adapters:
        return _continue_adapter(model, run, has_weights)
    initialization: Any = {"true": True, "false": False}.get(run.init_weights, run.init_weights)
    if not has_weights and run.init_weights in _NEEDS_WEIGHTS:
        initialization = True
    names = [name for name, _ in model.named_modules()]
    problems = [
        f"--modules-to-save {module}: no module has this name"
        for module in run.modules_to_save
        if not any(has_name(name, module) for name in names)
    ]
    if problems:
        raise ConfigError("\n".join(problems), "Usual are embed_tokens and lm_head.")
    untyped: Any = model
    head = untyped.get_output_embeddings()
    is_tied = head is not None and head.weight is untyped.get_input_embeddings().weight
    settings = LoraConfig(
        r=run.lora_rank,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        bias=run.lora_bias,
        use_rslora=run.use_rslora,
        use_dora=run.use_dora,
        init_lora_weights=initialization,
        # peft shortens these to a list of endings that matches these modules and no others.
        target_modules=adapted_modules(model, towers, run),
        modules_to_save=list(run.modules_to_save) or None,
        ensure_weight_tying=bool(run.modules_to_save) and is_tied,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)


def adapted_modules(model: PreTrainedModel, towers: Towers, run: TrainConfig) -> list[str]:
    """Return the full names of the modules that get adapters.

    These match ``--target-regex``, or ``--target-modules`` among the linear modules of unfrozen parts without the head.

    Raises:
        ConfigError: naming a target that matches nothing.
    """
    if run.target_regex is not None:
        names = [name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE)]
        matching = [name for name in names if re.fullmatch(run.target_regex, name)]
        if not matching:
            raise ConfigError(
                f"--target-regex {run.target_regex}: no module has a name that it matches as a whole",
                f"Modules have names such as {', '.join(names[-_MAX_SHOWN_NAMES:])}.",
            )
        return _checked_with_peft(model, matching)
    frozen = run.frozen_parts
    untyped: Any = model
    head = untyped.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and towers.part_of(name) not in frozen
    ]
    targets = linear
    if run.target_modules != ("all-linear",):
        problems = [
            f"--target-modules {target}: no linear module of an unfrozen part has this name"
            for target in run.target_modules
            if not any(has_name(name, target) for name in linear)
        ]
        if problems:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError("\n".join(problems), f"There are {', '.join(known)}; all-linear takes all of them.")
        targets = [name for name in linear if run.is_target(name)]
    if not targets:
        raise ConfigError(
            f"no module is left to adapt: {', '.join(sorted(frozen))} are frozen, and the model has no other part",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false.",
        )
    return _checked_with_peft(model, targets)


def _checked_with_peft(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Return the names if peft adapts these modules and no others.

    In some mixtures of experts, peft takes modules named like an expert's, such as ``gate_proj`` of a shared expert,
    for the routed experts of older checkpoints, and adapts these instead; also when it loads an adapter.
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


def _continue_adapter(model: PreTrainedModel, run: TrainConfig, has_weights: bool) -> PeftModel:
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
    """Return a model with a saved adapter, or raise if not all of it fits.

    peft would silently drop weights that the model does not have, and initialize missing ones.

    Args:
        model: the one that the adapter was trained on.
        settings: of ``PeftModel.from_pretrained``.

    Raises:
        MismatchError: for an adapter of another model, or one that cannot be read.
    """
    remedy = "Give the model that it was trained on, and another checkpoint if its files are damaged."
    try:
        adapted = PeftModel.from_pretrained(model, directory, **settings)
        # Without embeddings, which peft may have saved, too.
        weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        lora = {name: weight for name, weight in weights.items() if _LORA_PART in name}
        difference = _difference(lora, directory, _LORA_PART)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        message = f"the adapter in {directory} cannot be put onto this model: {str(error)[:_MAX_ERROR_LENGTH]}"
        raise MismatchError(message, remedy) from error
    if difference:
        raise MismatchError(f"the adapter in {directory} is that of another model: {difference}", remedy)
    return adapted


def load_adapter_weights(model: PeftModel, checkpoint: str) -> None:
    """Load the weights of a saved adapter into a new one.

    Raises:
        MismatchError: if the saved one has other modules or another rank, or cannot be read.
    """
    remedy = "Give the --lora-rank, --target-modules and --freeze-... that it was trained with."
    try:
        difference = _difference(get_peft_model_state_dict(model), checkpoint)
        state = load_file(os.path.join(checkpoint, SAFETENSORS_WEIGHTS_NAME))
    except (OSError, SafetensorError) as error:
        raise MismatchError(f"the adapter in {checkpoint} cannot be read: {error}") from error
    if difference:
        raise MismatchError(f"the adapter in {checkpoint} is not that of these settings: {difference}", remedy)
    set_peft_model_state_dict(model, state)


def _difference(weights: Mapping[str, Tensor], directory: str, infix: str = "") -> str | None:
    """Describe weights that a saved adapter lacks, has in addition or has in another shape; None if all fit.

    Args:
        weights: the model's, by name.
        infix: compare only saved weights with this in their names.
    """
    path = os.path.join(directory, SAFETENSORS_WEIGHTS_NAME)
    if not os.path.exists(path):  # saved by an older version of peft
        return None
    with safe_open(path, "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys() if infix in name}  # noqa: SIM118
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    names = sorted({name for name, _ in saved.items() ^ shapes.items()})
    return f"{len(names)} of its weights do not fit, such as {names[0]}" if names else None
