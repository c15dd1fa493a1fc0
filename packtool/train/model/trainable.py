"""Trained weights of a model: its frozen and trained parts, LoRA adapters, and learning rates of parts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from peft import (
    BOFTConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.boft.layer import Linear as BOFTLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from packtool.config.model import ADAPTER_SETTINGS, has_name
from packtool.config.settings import flag
from packtool.config.train import TrainConfig
from packtool.encode.families import Towers, family_of
from packtool.errors import ConfigError, MismatchError, UnsupportedModelError
from packtool.train.model.loss import base_model
from packtool.train.model.low_precision import simulate_quantization, use_float8
from packtool.train.model.precision import convert_trained_to_float32, keeps_masters, unsharded_numel
from packtool.train.prepare.trained import ADAPTER_FILE, describe_non_adapter, is_adapter

# Initializations of adapters that need the model's own weights, and change them.
_INITIALIZED_FROM_WEIGHTS = ("pissa", "olora")
_LINEAR = (nn.Linear, Conv1D)  # GPT-2's Conv1D is a linear layer with transposed weights
_ADAPTABLE = (*_LINEAR, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MAX_SHOWN_NAMES = 4
_MAX_ERROR_LENGTH = 300
_LORA_B = re.compile(r"\.lora_(embedding_)?B\b")
_CONFIG_CLASSES: dict[str, type[PeftConfig]] = {
    "lora": LoraConfig,
    "boft": BOFTConfig,
    "bone": MissConfig,
    "oft": OFTConfig,
    "vera": VeraConfig,
}
# Names of options in the configuration of a LoRA adapter.
_LORA_SETTING_NAMES = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_bias": "bias",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
_PEFT_PREFIX = "base_model.model."  # of the names of a model's own parameters


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode inside ``with``; restore each module's mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def tower_prefixes(model: nn.Module, model_type: str) -> Towers:
    """Return the name prefixes of a model's towers and aligner, and of modules that no forward pass uses."""
    towers = family_of({"model_type": model_type}).towers
    module_names = {_bare_name(name) for name, _ in model.named_modules()}
    parameter_names = {_bare_name(name) for name, _ in model.named_parameters()}
    for prefix in (*towers.vision, *towers.aligner):
        if prefix not in module_names | parameter_names:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no module {prefix}, which --freeze-vit or --freeze-aligner should freeze",
                "Install a supported version of transformers (see pyproject.toml), or report the model's name.",
            )
    return dataclasses.replace(towers, unused=(*towers.unused, *_skipped_modules(model, towers)))


def _skipped_modules(model: nn.Module, towers: Towers) -> Iterator[str]:
    """Yield the names of the modules that a model's configuration skips."""
    config: Any = model.config
    if getattr(config, "downsample_mode", None) == "4x":  # MiniCPM, whose merger would downsample further
        yield from (name for name, _ in model.named_modules() if name.endswith(".vit_merger"))
    feature_layers = getattr(config, "vision_feature_layer", None)
    if isinstance(feature_layers, int):
        feature_layers = [feature_layers]
    if feature_layers is not None and towers.vision:
        yield from _unused_vision_layers(model, towers.vision[0], feature_layers)


def _unused_vision_layers(model: nn.Module, vision_tower: str, feature_layers: Sequence[int]) -> Iterator[str]:
    """Yield the names of vision modules after the last layer whose output becomes features, as in LLaVA.

    Output 0 is that of the embeddings, so output n needs the first n layers; -1 is the last output.
    """
    for name, module in model.get_submodule(vision_tower).named_modules(prefix=vision_tower):
        if name.endswith(".post_layernorm"):  # the norm after the last layer
            yield name
        elif isinstance(module, nn.ModuleList):
            num_used = max(layer if layer >= 0 else len(module) + 1 + layer for layer in feature_layers)
            for number in range(num_used, len(module)):
                yield f"{name}.{number}"


def make_trainable(model: PreTrainedModel, config: TrainConfig) -> PreTrainedModel | PeftModel:
    """Prepare a model for training, in place: which modules recompute activations, which weights are trained, and how.

    Returns:
        With ``--train-type full`` the model itself, otherwise a PeftModel that contains it and the adapters.
    """
    towers = tower_prefixes(model, model.config.model_type)
    _set_checkpointing(model, towers, config)
    if config.train_type == "full":
        _set_requires_grad(model, towers, config)
        if keeps_masters(config):  # in float32
            convert_trained_to_float32(model)
        if config.qat is not None:
            simulate_quantization(model, towers, config)
        if config.fp8:
            use_float8(model, towers)
        return model

    adapted = add_adapters(model, towers, config)
    for name, parameter in adapted.named_parameters():
        # An adapter may be in a module that no forward pass uses; it would have no gradient.
        if towers.is_unused(_bare_name(name)):
            parameter.requires_grad_(False)
    if config.deepspeed is None:  # DeepSpeed makes its own float32 copies
        convert_trained_to_float32(adapted)  # peft has converted adapters, but not biases and modules trained in full
    return adapted


def _set_checkpointing(model: PreTrainedModel, towers: Towers, config: TrainConfig) -> None:
    """Set which modules recompute their activations: language model, towers, or only some layers."""
    checkpoints_text = bool(config.gradient_checkpointing)
    checkpoints_towers = checkpoints_text
    if config.vit_gradient_checkpointing is not None:
        checkpoints_towers = config.vit_gradient_checkpointing
    if checkpoints_text or checkpoints_towers:
        enable_checkpointing(model)  # for all modules
    if checkpoints_text != checkpoints_towers:  # switch it off again for one of them
        for name, module in model.named_modules():
            is_tower = towers.part_of(name) != "language model"
            if is_tower != checkpoints_towers and hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False
    num_layers: Any = config.gradient_checkpointing
    if num_layers not in (None, True, False, "auto"):
        _recompute_first(model, num_layers)


def enable_checkpointing(model: Any) -> None:
    """Enable recomputation of activations; the reentrant form fails with frozen embeddings."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def switchable_layers(model: nn.Module) -> list[nn.Module]:
    """Return the language model's layers if each can be switched between keeping and recomputing, else none."""
    inner = base_model(model)
    layers = getattr(inner.get_decoder(), "layers", ())
    return list(layers) if all(isinstance(layer, GradientCheckpointingLayer) for layer in layers) else []


def _recompute_first(model: nn.Module, num_layers: int) -> None:
    """Let only the first ``num_layers`` layers of the language model recompute (``--gradient-checkpointing N``)."""
    layers = switchable_layers(model)
    if num_layers > len(layers):
        reason = f"has {len(layers)} layers" if layers else "has no layers that can be switched one by one"
        raise ConfigError(
            f"--gradient-checkpointing {num_layers}: this {type(model).__name__} {reason}",
            "Give a smaller number, or true for all layers.",
        )
    for layer in layers[num_layers:]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]


def _set_requires_grad(model: nn.Module, towers: Towers, config: TrainConfig) -> None:
    """Set ``requires_grad`` of all parameters by ``--freeze-...`` and ``--trainable-parameters``.

    If both name a parameter, it is trained, except in modules that no forward pass uses. ``--freeze-parameters-ratio``
    freezes the first parameters, up to this share of all elements. Raise a ConfigError if all are frozen.
    """
    parameters = dict(model.named_parameters())
    _check_parameter_names(list(parameters), config)
    total_elements = sum(unsharded_numel(parameter) for parameter in parameters.values())
    max_frozen_elements = int(total_elements * config.freeze_parameters_ratio)

    num_elements = 0  # elements of this parameter and all before it
    for name, parameter in parameters.items():
        num_elements += unsharded_numel(parameter)
        in_frozen_part = towers.part_of(name) in config.frozen_parts
        in_frozen_share = config.freeze_parameters_ratio > 0 and num_elements <= max_frozen_elements
        is_frozen = in_frozen_part or in_frozen_share or config.freezes_name(name)
        is_trained = config.trains_name(name) or not is_frozen
        is_used = not towers.is_unused(name)
        parameter.requires_grad_(is_trained and is_used)

    if not any(parameter.requires_grad for parameter in parameters.values()):
        frozen = ", ".join(sorted(config.frozen_parts)) or "by name"
        raise ConfigError(
            f"all parameters are frozen ({frozen}), so there is nothing to train",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false, or name --trainable-parameters.",
        )


def _check_parameter_names(names: Sequence[str], config: TrainConfig) -> None:
    """Raise a ConfigError unless each option that freezes or trains parameters by name matches one of ``names``."""
    problems = []
    for option, prefixes, regex in (
        ("freeze-parameters", config.freeze_parameters, config.freeze_parameters_regex),
        ("trainable-parameters", config.trainable_parameters, config.trainable_parameters_regex),
    ):
        for prefix in prefixes:
            if not any(name.startswith(prefix) for name in names):
                problems.append(f"--{option} {prefix}: no parameter's name starts with this")
        if regex is not None and not any(re.search(regex, name) for name in names):
            problems.append(f"--{option}-regex {regex}: no parameter's name matches")
    if problems:
        raise ConfigError("\n".join(problems), f"Parameters have names such as {names[0]} and {names[-1]}.")


def add_adapters(model: PreTrainedModel, towers: Towers, config: TrainConfig) -> PeftModel:
    """Return a model in which only adapters are trained: new ones, or those of ``--adapters``.

    Raise a ConfigError if the model lacks modules that the options name, or if peft cannot adapt it in this way.
    """
    if config.adapters:
        return _load_adapter_to_continue(model, config)

    _check_adapter_names(model, towers, config)
    if config.train_type == "lora":
        settings = _lora_settings(model, towers, config)
    else:
        settings = dict(ADAPTER_SETTINGS.get(config.train_type, {}))  # the defaults
        settings.update(config.adapter_settings or {})
    try:
        targets = adapted_modules(model, towers, config)
        config_class: Any = _CONFIG_CLASSES[config.train_type]
        peft_config = config_class(**settings, target_modules=targets, task_type="CAUSAL_LM")
        return _add_new_adapter(model, peft_config)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--train-type {config.train_type}: peft cannot adapt this model: {error}",
            "Change --adapter-settings, --target-modules or --target-regex.",
        ) from error


def _check_adapter_names(model: PreTrainedModel, towers: Towers, config: TrainConfig) -> None:
    """Raise a ConfigError unless the model has every module and matrix that the options on adapters name."""
    module_names = [name for name, _ in model.named_modules()]
    matrix_names = [name for name, parameter in model.named_parameters() if parameter.ndim in (2, 3)]
    problems = []
    for requested in _saved_modules(towers, config):
        if not any(has_name(name, requested) for name in module_names):
            problems.append(f"--modules-to-save {requested}: the model has no module of this name")
    for requested in config.target_parameters:
        if not any(has_name(name, requested) for name in matrix_names):
            problems.append(f"--target-parameters {requested}: the model has no matrix of this name")
    if problems:
        raise ConfigError("\n".join(problems), "Names are such as embed_tokens, lm_head and experts.down_proj.")


def _lora_settings(model: Any, towers: Towers, config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of peft's ``LoraConfig`` for the options, except the adapted modules."""
    initialization: Any = config.init_weights  # the name of an initialization, or "true" or "false"
    if initialization in ("true", "false"):
        initialization = initialization == "true"
    has_weights = not next(model.parameters()).is_meta
    if config.init_weights in _INITIALIZED_FROM_WEIGHTS and not has_weights:
        initialization = True  # the default, which needs no weights

    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    return {
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "bias": config.lora_bias,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "init_lora_weights": initialization,
        "target_parameters": list(config.target_parameters) or None,
        "modules_to_save": _saved_modules(towers, config) or None,
        # If the head or the embeddings are trained in full, they must stay the same weights.
        "ensure_weight_tying": bool(config.modules_to_save) and is_tied,
    }


def _saved_modules(towers: Towers, config: TrainConfig) -> list[str]:
    """Return the names of ``--modules-to-save``, with those of the model in place of vision-tower and aligner."""
    parts = {"vision-tower": towers.vision, "aligner": towers.aligner}
    names = [each for name in config.modules_to_save for each in parts.get(name) or (name,)]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _bare_name(name: str) -> str:
    """Return a parameter's name in the bare model from its name in a PeftModel."""
    return name.removeprefix(_PEFT_PREFIX).replace(".modules_to_save.default", "")


def _add_new_adapter(model: PreTrainedModel, settings: PeftConfig) -> PeftModel:
    """Return the model with a new adapter of these settings."""
    if not next(model.parameters()).is_meta:
        return get_peft_model(model, settings)
    with patch.multiple(  # BOFT's permutation matrices, which torch cannot compute on the meta device
        BOFTLinear,
        block_butterfly_perm=lambda _, size, *__: torch.arange(size),
        perm2mat=lambda _, indices: torch.empty(len(indices), len(indices)),
    ):
        return get_peft_model(model, settings)


def adapted_modules(model: PreTrainedModel, towers: Towers, config: TrainConfig) -> list[str]:
    """Return the full names of the modules that get adapters, by ``--target-regex`` or ``--target-modules``."""
    if config.target_regex is not None:
        targets = _matching_modules(model, config.target_regex)
    else:
        targets = _named_modules(model, towers, config)
    if config.train_type == "lora" and (config.lora_dropout or config.use_dora):
        _refuse_experts(model, targets)
    return targets


def _named_modules(model: PreTrainedModel, towers: Towers, config: TrainConfig) -> list[str]:
    """Return the full names of the modules of unfrozen parts that ``--target-modules`` selects."""
    adaptable = _adaptable_modules(model, towers, config)
    _check_target_names(adaptable, config)
    targets = [name for name, in_all_linear in adaptable.items() if config.is_target(name, is_linear=in_all_linear)]
    if not targets and not config.target_parameters:
        raise ConfigError(
            f"all parts of the model are frozen ({', '.join(sorted(config.frozen_parts))}), so there is no module to "
            "adapt",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false.",
        )
    return targets


def _matching_modules(model: PreTrainedModel, regex: str) -> list[str]:
    """Return the full names of the modules that can be adapted and match ``--target-regex``."""
    names = [name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE)]
    matching = [name for name in names if re.fullmatch(regex, name)]
    if not matching:
        raise ConfigError(
            f"--target-regex {regex}: no module's full name matches",
            f"Modules have names such as {', '.join(names[-_MAX_SHOWN_NAMES:])}.",
        )
    return matching


def _adaptable_modules(model: Any, towers: Towers, config: TrainConfig) -> dict[str, bool]:
    """Return, by name of each module of unfrozen parts that may get an adapter, whether all-linear selects it."""
    frozen = config.frozen_parts
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    in_all_linear = {}
    for name, module in model.named_modules():
        is_end = (module is head or module is embeddings) and isinstance(module, _ADAPTABLE)
        # Routers of Llama 4 and PhiMoE are linear modules that return tuples, which peft cannot adapt.
        is_linear = isinstance(module, _LINEAR) and not type(module).__name__.endswith("Router")
        if towers.part_of(name) not in frozen and (is_linear or is_end):
            in_all_linear[name] = is_linear and module is not head
    return in_all_linear


def _check_target_names(adaptable: Collection[str], config: TrainConfig) -> None:
    """Raise a ConfigError if none of ``--target-modules`` is all-linear or the name of an ``adaptable`` module.

    As in peft, names without a module have no effect if another name has one (``adapter_lines`` names them).
    """
    problems = [
        f"--target-modules {target}: no linear module of an unfrozen part has this name"
        for target in config.target_modules
        if target != "all-linear" and not any(has_name(name, target) for name in adaptable)
    ]
    if problems and len(problems) == len(config.target_modules):
        known = sorted({name.rpartition(".")[2] for name in adaptable})
        remedy = f"Choose from {', '.join(known)}; all-linear selects all but head and embeddings."
        raise ConfigError(
            "\n".join(problems), remedy if known else "Its layers are not linear modules; use --target-regex."
        )


def _refuse_experts(model: PreTrainedModel, names: list[str]) -> None:
    """Raise a ConfigError if peft would adapt routed experts in place of modules with these names.

    In some mixtures of experts, peft mistakes other modules, such as ``gate_proj`` of a shared expert, for routed
    experts as in older checkpoints. It cannot adapt routed experts with dropout or DoRA.
    """
    settings = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(settings, model, None)  # removes such names from ``settings``
    kept_names = set(settings.target_modules or ())
    kept = {name.rpartition(".")[2] for name in names if name in kept_names}
    removed = {name.rpartition(".")[2] for name in names if name not in kept_names}
    if removed:
        raise ConfigError(
            f"LoRA on {', '.join(sorted(removed))}: peft would adapt the model's routed experts instead",
            f"Leave them out: --target-modules {' '.join(sorted(kept - removed))}; or adapt the routed experts: "
            "--lora-dropout 0 without --use-dora",
        )


def _load_adapter_to_continue(model: PreTrainedModel, config: TrainConfig) -> PeftModel:
    """Return the model with the adapter of ``--adapters``, to train it further.

    A model on the meta device, which serves for estimates, gets an adapter of the same shapes without weights. Raise a
    ConfigError if the adapter has another type or other settings than the options, or does not fit the model.
    """
    (directory,) = config.adapters  # training accepts only one
    adapter_config = _read_adapter_settings(directory)
    _check_adapter_type(adapter_config, config)
    _check_adapter_settings(adapter_config, config)
    adapter_config.inference_mode = False

    has_weights = not next(model.parameters()).is_meta
    if not has_weights:
        if getattr(adapter_config, "init_lora_weights", True) in _INITIALIZED_FROM_WEIGHTS:
            adapter_config.init_lora_weights = True  # peft's default initialization
        return _add_new_adapter(model, adapter_config)
    try:
        return attach_adapter(model, directory, is_trainable=True, config=adapter_config)
    except MismatchError as error:
        raise ConfigError(
            f"--adapters {directory} does not fit the model: {error.message}",
            f"It was trained on {adapter_config.base_model_name_or_path}.",
        ) from error


def _read_adapter_settings(directory: str) -> Any:
    """Return peft's configuration of the adapter in the directory of ``--adapters``."""
    if os.path.isdir(directory) and not is_adapter(directory):  # peft would look for it on the hub
        raise ConfigError(
            f"--adapters {directory}: this is not an adapter: {describe_non_adapter(directory)}",
            f"Give the directory of {ADAPTER_FILE}.",
        )
    try:
        return PeftConfig.from_pretrained(directory)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--adapters {directory}: this is not an adapter: {error}", "Give the directory of adapter_config.json."
        ) from error


def _check_adapter_type(settings: Any, config: TrainConfig) -> None:
    """Raise a ConfigError if the adapter of ``--adapters`` has another type than ``--train-type``."""
    (directory,) = config.adapters
    settings_class = type(settings)
    if settings_class is not _CONFIG_CLASSES[config.train_type]:
        types = [name for name, config_class in _CONFIG_CLASSES.items() if config_class is settings_class]
        remedy = f"Use --train-type {types[0]}." if types else f"Supported are {', '.join(_CONFIG_CLASSES)}."
        raise ConfigError(
            f"--adapters {directory}: a {settings.peft_type.value} adapter, with --train-type {config.train_type}",
            remedy,
        )


def _check_adapter_settings(settings: Any, config: TrainConfig) -> None:
    """Raise a ConfigError if the adapter of ``--adapters`` has other settings than the options."""
    # Settings that the user has requested, by option: name in the adapter's configuration, and value.
    requested = {
        f"--adapter-settings {name}:": (name, value) for name, value in (config.adapter_settings or {}).items()
    }
    if config.train_type == "lora":
        fields = type(config).__dataclass_fields__
        options = [option for option in _LORA_SETTING_NAMES if getattr(config, option) != fields[option].default]
        requested = {flag(option): (_LORA_SETTING_NAMES[option], getattr(config, option)) for option in options}
    differing = []
    for option, (name, value) in requested.items():
        adapter_value = getattr(settings, name)
        if value != adapter_value:
            differing.append(f"{option} {value}: the adapter of --adapters has {adapter_value}")
    if differing:
        raise ConfigError.from_problems(differing)


def adapter_lines(model: nn.Module, config: TrainConfig) -> Iterator[str]:
    """Yield lines about adapters on parameters, if any, and about ``--target-modules`` that the model does not have."""
    if not isinstance(model, PeftModel):
        return
    if parameters := getattr(model.active_peft_config, "target_parameters", None):
        yield f"adapters on parameters, such as those of all routed experts: {', '.join(sorted(parameters))}"
    modules = [name for name, each in model.named_modules() if parameters or isinstance(each, BaseTunerLayer)]
    unused = [name for name in config.target_modules if not any(has_name(module, name) for module in modules)]
    if set(unused) - {"all-linear"} and config.target_regex is None and not config.adapters:
        yield f"warning: --target-modules {' '.join(unused)}: no effect, because no trained part has such a module"


def attach_adapter(model: nn.Module, directory: str, **load_arguments: Any) -> PeftModel:
    """Return a model with a saved adapter; raise a MismatchError unless all weights of the adapter fit the model.

    Without this check, peft would silently drop weights that the model does not have, and initialize missing weights.
    ``load_arguments`` are further arguments of peft's ``from_pretrained``.
    """
    remedy = "Give the model that it was trained on; if its files are damaged, use another checkpoint."
    try:
        adapted = PeftModel.from_pretrained(model, directory, **load_arguments)
        weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        # Compare only weights of adapters, whose names contain this, such as ".lora_": peft may also save embeddings.
        adapter_prefix = PEFT_TYPE_TO_PREFIX_MAPPING[adapted.active_peft_config.peft_type]
        misfit = _describe_misfit(weights, directory, name_part=f".{adapter_prefix}")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        message = f"the adapter in {directory} cannot be attached to this model: {str(error)[:_MAX_ERROR_LENGTH]}"
        raise MismatchError(message, remedy) from error
    if misfit is not None:
        raise MismatchError(f"the adapter in {directory} belongs to another model: {misfit}", remedy)
    return adapted


def load_adapter_weights(model: PeftModel, checkpoint: str) -> None:
    """Load the weights of a checkpoint's adapter into a model's adapter of the same modules and ranks."""
    remedy = "Use the same --train-type, --lora-rank, --adapter-settings and --target-modules as for its training."
    try:
        misfit = _describe_misfit(get_peft_model_state_dict(model), checkpoint)
        state = load_file(os.path.join(checkpoint, SAFETENSORS_WEIGHTS_NAME))
    except (OSError, SafetensorError) as error:
        raise MismatchError(f"the adapter in {checkpoint} cannot be read: {error}") from error
    if misfit is not None:
        raise MismatchError(f"the adapter in {checkpoint} does not match the options: {misfit}", remedy)
    set_peft_model_state_dict(model, state)


def _describe_misfit(weights: Mapping[str, Tensor], directory: str, name_part: str = "") -> str | None:
    """Describe how ``weights`` whose names have ``name_part`` differ from an adapter's file; None if they do not."""
    path = os.path.join(directory, SAFETENSORS_WEIGHTS_NAME)
    if not os.path.exists(path):  # saved by an older version of peft
        return None
    with safe_open(path, "pt") as file:
        saved_names = [name for name in file.keys() if name_part in name]  # noqa: SIM118
        saved_shapes = {name: tuple(file.get_slice(name).get_shape()) for name in saved_names}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if name_part in name}
    misfits = sorted({name for name, _ in saved_shapes.items() ^ shapes.items()})
    return f"{len(misfits)} of its weights do not fit, such as {misfits[0]}" if misfits else None


def split_by_rate(optimizer: torch.optim.Optimizer, trained: nn.Module, model: nn.Module, config: TrainConfig) -> None:
    """Split an optimizer's parameter groups, in place, so that parts of the model have their own learning rates.

    These parts are the vision tower (``--vit-lr``), the aligner (``--aligner-lr``) and the B matrices of LoRA, whose
    rate is multiplied by ``--lorap-lr-ratio`` (LoRA+, Hayou et al. 2024, arXiv 2402.12354). The parameters of the
    optimizer are those of ``trained``, which is ``model`` or contains it.
    """
    if config.vit_lr is None and config.aligner_lr is None and config.lorap_lr_ratio is None:
        return
    base = base_model(model)
    towers = tower_prefixes(base, base.config.model_type)
    names_by_id = {id(parameter): _bare_name(name) for name, parameter in trained.named_parameters()}

    new_groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        weights_by_rate: dict[float, list[Tensor]] = {}
        for weight in group["params"]:
            rate = _learning_rate(names_by_id[id(weight)], group["lr"], towers, config)
            weights_by_rate.setdefault(rate, []).append(weight)
        for rate, weights in weights_by_rate.items():
            new_groups.append({**group, "params": weights, "lr": rate})
    optimizer.param_groups[:] = new_groups


def _learning_rate(name: str, default_rate: float, towers: Towers, config: TrainConfig) -> float:
    """Return the learning rate of a parameter by its name in the bare model."""
    rate_of_part = {"vision tower": config.vit_lr, "aligner": config.aligner_lr}
    rate = rate_of_part.get(towers.part_of(name))
    if rate is None:
        rate = default_rate
    if config.lorap_lr_ratio is not None and _LORA_B.search(name):
        rate *= config.lorap_lr_ratio
    return rate
