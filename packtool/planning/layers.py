"""Modules of a model's forward pass, from its ``config.json``, and the training of each, for ``cost``.

Every part of a model has a unit: a token of the language model; an output token of a vision tower (it stands for
merge^2 patches), or a tile if pictures become tiles of one size; a token of a sound. Products with weights, including
convolutions, and attention are counted. Norms, activations and rotations are below a percent; norms are listed only
because their weights may be trained.

Names are those of transformers' modules, so that options with module or parameter names select the same modules.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from packtool.config.model import LearningOptions, has_name
from packtool.encode.families import FAMILIES, family_of, text_config_of, thinker_of
from packtool.planning.module_cost import LanguageModules, ModuleCost, first_setting, new_module
from packtool.planning.tower_layers import audio_modules, merger_modules, vision_modules, vision_patches

_LINEAR_TYPE = "linear_attention"
_SLIDING_TYPES = ("sliding_attention", "chunked_attention")
_STATE_CHUNK = 64  # positions per chunk of the gated delta rule
# Types of language models that the formulas below describe, besides those of families with pictures.
_FORMULA_TYPES = frozenset(
    """
    cohere cohere2 cwm deepseek_v2 deepseek_v3 emu3_text_model ernie4_5 ernie4_5_moe exaone4 gemma gemma2 glm glm4
    glm4_moe glm4_moe_lite gpt_oss granite granitemoe helium hunyuan_v1_dense jetmoe llama minimax_m2 ministral
    ministral3 mistral mixtral mllama_text_model olmo olmo2 olmo3 olmoe phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
    seed_oss smollm3 solar_open
    """.split()  # noqa: SIM905
)
_OLD_NAMES = (
    *(("hidden_size", "n_embd"), ("intermediate_size", "n_inner"), ("intermediate_size", "dff")),
    *(("num_hidden_layers", "n_layer"), ("num_hidden_layers", "num_layers")),
    *(("num_attention_heads", "n_head"), ("num_attention_heads", "num_heads"), ("num_key_value_heads", "num_kv_heads")),
)


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in a ``config.json``, by the names that most models have."""
    text = dict(text_config_of(config))
    for name, old_name in _OLD_NAMES:
        if name not in text and old_name in text:
            text[name] = text[old_name]
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        text["num_key_value_heads"] = 1
    return text


@dataclass(frozen=True)
class ModelLayers:
    """Parts of a model; each is a tuple of its modules in the order of the forward pass.

    Args:
        language: for each token; ``flops_per_square`` for the square of a sample's length.
        cross_keys: keys and values of layers with cross-attention, for each picture.
        head: for each token with logits.
        is_tied: the head's weights are those of the embeddings, the first module of ``language``.
        window, in_chunks: as in ``CostModel``; 0 without layers that have windows.
        vision: the tower, for each token of images and videos, or for each tile; ``flops_per_square`` for the square of
            the patches of a frame.
        tile_squares: (patches of a tile)^2 if tiles are the unit of ``vision`` and ``mergers``; otherwise 0.
        squares_per_token: estimate of (patches)^2 per token for media without them; 0 if all media have them.
        padded_merge: as in ``CostModel``.
        merges_frames: squares of 2 x 2 patches of frames are merged before the mergers (VideoLLaMA 3).
        mergers: for the same tokens, from outputs of the tower to the text's width; one reads the last layer, others
            earlier layers.
        audio, audio_aligner: for each token of sounds; ``--freeze-aligner`` freezes the second.
    """

    language: tuple[ModuleCost, ...]
    head: ModuleCost
    is_tied: bool
    window: int = 0
    in_chunks: bool = False
    vision: tuple[ModuleCost, ...] = ()
    mergers: tuple[tuple[ModuleCost, ...], ...] = ()
    cross_keys: tuple[ModuleCost, ...] = ()
    tile_squares: int = 0
    squares_per_token: float = 0.0
    padded_merge: int = 0
    merges_frames: bool = False
    audio: tuple[ModuleCost, ...] = ()
    audio_aligner: tuple[ModuleCost, ...] = ()

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelLayers:
        """List the modules of a model, or of an Omni model's thinker; a KeyError if the language model lacks widths."""
        config = thinker_of(config)
        text = language_config(config)
        has_media = bool(config.get("vision_config") or config.get("audio_config"))
        prefix = "model.language_model" if has_media else "model"
        language = _language_modules(config, prefix)
        patches = vision_patches(config)
        audio = tuple(audio_modules(config.get("audio_config") or {}))
        return cls(
            **language._asdict(),
            window=_window(text),
            in_chunks="chunked_attention" in (text.get("layer_types") or ()),
            vision=tuple(vision_modules(config)),
            mergers=merger_modules(config, language.head.inputs),
            cross_keys=tuple(_cross_key_modules(text, prefix, float(patches.num_tokens))),
            tile_squares=patches.tile_squares,
            squares_per_token=patches.squares_per_token,
            padded_merge=patches.padded_merge,
            merges_frames=patches.merges_frames,
            audio=tuple(module for module in audio if module.part != "aligner"),
            audio_aligner=tuple(module for module in audio if module.part == "aligner"),
        )

    @property
    def modules(self) -> tuple[ModuleCost, ...]:
        """All modules in the order of the model's parameters: the norms of a text layer come last in it."""
        mergers = (module for merger in self.mergers for module in merger)
        language = sorted((*self.language, *self.cross_keys), key=_parameter_order)
        return (*self.audio, *self.audio_aligner, *self.vision, *mergers, *language, self.head)


_ADAPTABLE = "linear", "convolution", "no_matmul"  # by name; all-linear selects linear modules only


@dataclass(frozen=True)
class Trainable:
    """Training of a module's weights: of all, of an adapter, or of none.

    ``any`` parameter of it is trained, even a bias alone: gradients flow back to its output.
    """

    weights: Literal["full", "lora", "frozen"] = "frozen"
    any: bool = False


def trainable(layers: ModelLayers, options: LearningOptions) -> dict[str, Trainable]:
    """Find the training of each module, by its name; options that name modules this model lacks are ignored."""
    modules = [module for module in layers.modules if module.kind != "attention"]
    if options.train_type != "full":
        training = {module.name: _lora_training(module, options, is_head=module is layers.head) for module in modules}
    else:
        training = _full_training(modules[:-1] if layers.is_tied else modules, options)
    if layers.is_tied:
        training[layers.head.name] = training[layers.language[0].name]
    # Options with names of modules may match none; then only those count that select parts of the model.
    part_options = ("train_type", "lora_rank", "freeze_vit", "freeze_aligner", "freeze_llm")
    by_part = LearningOptions(**{name: getattr(options, name) for name in part_options})
    if options != by_part and not any(module.any for module in training.values()):
        return trainable(layers, by_part)
    return training


def _lora_training(module: ModuleCost, options: LearningOptions, *, is_head: bool) -> Trainable:
    for name in options.modules_to_save:
        in_module = has_name(module.name, name) or module.name.startswith(f"{name}.")
        if in_module or name == module.part.replace(" ", "-"):
            return Trainable("full", True)
    can_adapt = options.target_regex is not None or module.part not in options.frozen_parts
    is_linear = module.kind == "linear" and not is_head
    if can_adapt and module.kind in _ADAPTABLE and options.is_target(module.name, is_linear=is_linear):
        return Trainable("lora", True)
    return Trainable("frozen", options.lora_bias == "all" and module.has_bias)


def _full_training(modules: Sequence[ModuleCost], options: LearningOptions) -> dict[str, Trainable]:
    """Find the training of modules, in the order of the model's parameters, without LoRA."""

    def is_trained(parameter: str, *, by_default: bool) -> bool:
        return options.trains_name(parameter) or (by_default and not options.freezes_name(parameter))

    training: dict[str, Trainable] = {}
    # ``freeze_parameters_ratio`` freezes the first modules, up to that fraction of the weights.
    num_to_freeze = int(sum(module.num_weights for module in modules) * options.freeze_parameters_ratio)
    for module in modules:
        num_to_freeze -= module.num_weights
        is_first = options.freeze_parameters_ratio > 0 and num_to_freeze >= 0
        by_default = not is_first and module.part not in options.frozen_parts
        weights: Literal["full", "frozen"] = "full" if is_trained(module.weight, by_default=by_default) else "frozen"
        has_trained_bias = module.has_bias and is_trained(f"{module.name}.bias", by_default=by_default)
        training[module.name] = Trainable(weights, weights == "full" or has_trained_bias)
    return training


def _parameter_order(module: ModuleCost) -> tuple[int, int]:
    """Return a sort key for modules of the language model: the layer, and the order within it."""
    if module.layer is None:
        return (-1 if module.name.endswith("embed_tokens") else sys.maxsize, 0)
    for order, name_part in enumerate(("_norm", ".mlp.", "layernorm"), start=1):
        if name_part in module.name:
            return module.layer, order
    return module.layer, 0


def has_formulas(config: Mapping[str, Any]) -> bool:
    """Return whether formulas describe the language model of a ``config.json``; one without a type is as Llama."""
    text = text_config_of(config)
    model_type = str(text.get("model_type", "llama"))
    is_llama4 = "intermediate_size_mlp" in text  # whose experts compute every token
    is_of_family = family_of({"model_type": model_type.removesuffix("_text")}) in FAMILIES and not is_llama4
    return model_type in _FORMULA_TYPES or is_of_family


def _language_modules(config: Mapping[str, Any], prefix: str) -> LanguageModules:
    text = language_config(config)
    if counted := count_language(config):
        return _with_windows(counted, text, prefix)
    hidden = int(text["hidden_size"])
    vocabulary = int(text.get("vocab_size") or 0)
    return LanguageModules(
        language=tuple(_formula_modules(text, prefix, vision_patches(config).features_per_square)),
        head=ModuleCost(name="lm_head", part="language model", inputs=hidden, outputs=vocabulary),
        is_tied=bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings")),
    )


def count_language(config: Mapping[str, Any]) -> LanguageModules | None:
    """Count the modules of a language model without formulas; None if it has them, or if transformers cannot run it."""
    if has_formulas(config):
        return None
    from packtool.planning.counted_layers import count_modules  # which imports torch and transformers

    return count_modules(text_config_of(config))


def _with_windows(counted: LanguageModules, text: Mapping[str, Any], prefix: str) -> LanguageModules:
    """Return counted modules by their names in the trained model, with attention in windows where layers have them."""
    layer_types = _layer_types(text) if _window(text) and text.get("num_hidden_layers") else []
    modules = []
    for module in counted.language:
        changes: dict[str, Any] = {"name": re.sub("^model[.]", f"{prefix}.", module.name)}
        if module.layer is not None and {*layer_types[module.layer : module.layer + 1]} & {*_SLIDING_TYPES}:
            changes |= {"flops_per_square": 0.0, "flops_per_window": module.flops_per_square}
        modules.append(replace(module, **changes))
    return counted._replace(language=tuple(modules))


def _formula_modules(text: Mapping[str, Any], prefix: str, features_per_square: float) -> Iterator[ModuleCost]:
    """Yield the modules of a language model; ``features_per_square`` is that of ``VisionPatches``."""
    hidden = int(text["hidden_size"])
    module = partial(new_module, f"{prefix}.", part="language model")
    yield module("embed_tokens", int(text.get("vocab_size") or 0), hidden, kind="no_matmul")
    for i, layer_type in enumerate(_layer_types(text)):
        yield module(f"layers.{i}.input_layernorm", 1, hidden, kind="no_matmul", layer=i)
        if layer_type == _LINEAR_TYPE and text.get("linear_num_value_heads"):
            mixer = _gated_delta_modules(text)
        elif i in _cross_layers(text):
            mixer = _cross_modules(text, features_per_square)
        else:
            mixer = _attention_modules(_config_of_layer(text, i, layer_type), layer_type)
        norm: ModuleSettings = ("post_attention_layernorm", {"kind": "no_matmul", "inputs": 1})
        for name, settings in (*mixer, norm, *_mlp_modules(text, i), *_layer_input_modules(text)):
            yield module(f"layers.{i}.{name}", **{"inputs": hidden, "outputs": hidden, "layer": i, **settings})
    if width := _layer_input_width(text):
        yield module("per_layer_model_projection", hidden, width * len(_layer_types(text)))
    yield module("norm", 1, hidden, kind="no_matmul")


def _cross_layers(text: Mapping[str, Any]) -> Sequence[int]:
    """Return the numbers of the layers whose tokens attend to features of pictures (Llama 3.2 Vision)."""
    return text.get("cross_attention_layers") or ()


def _cross_modules(text: Mapping[str, Any], features_per_square: float) -> Iterator[ModuleSettings]:
    """Yield the modules of cross-attention except its keys and values."""
    widths = attention_widths(text)
    pair_flops = 2.0 * (widths.queries + widths.outputs)  # of a token and a feature
    yield "cross_attn.q_proj", {"outputs": widths.queries}
    yield "cross_attn", {"kind": "attention", "outputs": 0, "flops_per_cross": pair_flops * features_per_square}
    yield "cross_attn.o_proj", {"inputs": widths.outputs}


def _cross_key_modules(text: Mapping[str, Any], prefix: str, num_features: float) -> Iterator[ModuleCost]:
    """Yield the modules of keys and values of layers with cross-attention; a picture has ``num_features``."""
    for number, layer in enumerate(_cross_layers(text)):
        widths = attention_widths(text)
        module = partial(new_module, f"{prefix}.layers.{layer}.cross_attn.", part="language model", layer=layer)
        for name, outputs in (("k_proj", widths.keys), ("v_proj", widths.values)):
            shares_input = number > 0 or name == "v_proj"  # all read the output of the projector
            yield module(name, text["hidden_size"], outputs, uses_per_unit=num_features, shares_input=shares_input)


def _config_of_layer(text: Mapping[str, Any], layer: int, layer_type: str) -> dict[str, Any]:
    """Return the settings of a layer, of which some may differ from those of others."""
    settings = dict(text) | (text.get("per_layer_config") or {}).get(str(layer), {})
    if "per_layer_config" not in text and text.get("global_head_dim") and layer_type == "full_attention":
        settings["head_dim"] = text["global_head_dim"]  # as in the files of Gemma 4
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
            settings["num_key_value_heads"] = text["num_global_key_value_heads"]
    keys_are_values = text.get("attention_k_eq_v") and layer_type not in _SLIDING_TYPES
    return settings | {"has_keys": not _shares_keys(text, layer), "keys_are_values": keys_are_values}


def _shares_keys(text: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer attends to the keys and values of an earlier one (Gemma 3n and 4)."""
    return layer >= int(text["num_hidden_layers"]) - int(text.get("num_kv_shared_layers") or 0)


def _layer_input_width(text: Mapping[str, Any]) -> int:
    """Return the width of the embeddings that each layer of Gemma 3n and 4 has of its own; 0 without."""
    return int(text.get("hidden_size_per_layer_input") or 0)


def _layer_input_modules(text: Mapping[str, Any]) -> Iterator[ModuleSettings]:
    if width := _layer_input_width(text):
        yield "per_layer_input_gate", {"outputs": width}
        yield "per_layer_projection", {"inputs": width}


ModuleSettings = tuple[str, dict[str, Any]]
"""A module's name in its layer, and the fields of its ``ModuleCost``; ``inputs`` and ``outputs`` are by default the
model's width."""


class AttentionWidths(NamedTuple):
    """Heads of queries, and of keys and values, and the widths of a token's queries, keys, values, and the output."""

    num_heads: int
    num_key_heads: int
    queries: int
    keys: int
    values: int
    outputs: int


def attention_widths(text: Mapping[str, Any]) -> AttentionWidths:
    """Read the heads and widths of attention."""
    heads = int(text["num_attention_heads"])
    if text.get("kv_lora_rank"):
        key_size = int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"])
        values = heads * int(text["v_head_dim"])
        return AttentionWidths(heads, heads, heads * key_size, heads * key_size, values, values)
    key_heads = int(text.get("num_key_value_heads") or heads)
    head_size = first_setting(text, "head_dim", "kv_channels") or int(text["hidden_size"]) // heads
    value_size = int(text.get("v_head_dim") or head_size)
    sizes = (heads * head_size, key_heads * head_size, key_heads * value_size, heads * value_size)
    return AttentionWidths(heads, key_heads, *sizes)


class ExpertWidths(NamedTuple):
    """Experts of a layer, 0 if it is dense, the width of one, those of a token, and the shared expert's width."""

    num_experts: int
    expert_width: int
    experts_per_token: int
    shared_width: int


def expert_widths(text: Mapping[str, Any]) -> ExpertWidths:
    """Read the experts of a layer; a dense layer counts as one expert of its width."""
    num_experts = first_setting(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    dense_width = width = _mlp_width(text)
    per_token = 1
    if num_experts:
        width = first_setting(text, "moe_intermediate_size") or width
        per_token = first_setting(text, "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts") or 1
    num_shared = first_setting(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    own_width = first_setting(text, "shared_expert_intermediate_size", "shared_intermediate_size")
    shared = own_width + width * num_shared
    if num_experts and text.get("enable_moe_block"):  # beside the layer's dense MLP
        shared += dense_width
    return ExpertWidths(num_experts, width, per_token, shared)


def _mlp_width(text: Mapping[str, Any]) -> int:
    """Return the width of a dense MLP."""
    return first_setting(text, "intermediate_size") or 4 * int(text["hidden_size"])


def _attention_modules(text: Mapping[str, Any], layer_type: str) -> Iterator[ModuleSettings]:
    """Yield the modules of attention to complete samples or, in a sliding layer, to a window."""
    widths = attention_widths(text)
    projections = _latent_modules if text.get("kv_lora_rank") else _query_modules
    yield from projections(text, widths)
    flops = {}  # linear layers without sizes of their own have no FLOPs of attention
    if layer_type in _SLIDING_TYPES:
        flops = {"flops_per_window": float(widths.queries + widths.outputs)}
    elif layer_type != _LINEAR_TYPE:
        flops = {"flops_per_square": float(widths.queries + widths.outputs)}
    yield "self_attn", {"kind": "attention", "outputs": 0, **flops}
    yield "self_attn.o_proj", {"inputs": widths.outputs}


def attention_weights(text: Mapping[str, Any]) -> int:
    """Return the number of attention's weights in a layer, without biases and gates."""
    hidden = int(text["hidden_size"])
    widths = attention_widths(text)
    if not text.get("kv_lora_rank"):
        return hidden * (widths.queries + widths.keys + widths.values + widths.outputs)
    modules = [settings for _, settings in _latent_modules(text, widths)]
    return hidden * widths.outputs + sum(module.get("inputs", hidden) * module["outputs"] for module in modules)


def _latent_modules(text: Mapping[str, Any], widths: AttentionWidths) -> Iterator[ModuleSettings]:
    """Yield the projections of multi-head latent attention (DeepSeek-V2): of low rank, with a common rotated key."""
    q_rank = int(text.get("q_lora_rank") or 0)
    kv_rank = int(text["kv_lora_rank"])
    rotated = int(text["qk_rope_head_dim"])
    yield "self_attn.q_a_proj" if q_rank else "self_attn.q_proj", {"outputs": q_rank or widths.queries}
    yield "self_attn.kv_a_proj_with_mqa", {"outputs": kv_rank + rotated, "shares_input": True}
    if q_rank:
        yield "self_attn.q_b_proj", {"inputs": q_rank, "outputs": widths.queries}
    unrotated = widths.keys - widths.num_heads * rotated
    yield "self_attn.kv_b_proj", {"inputs": kv_rank, "outputs": unrotated + widths.outputs}


def _query_modules(text: Mapping[str, Any], widths: AttentionWidths) -> Iterator[ModuleSettings]:
    """Yield the projections of grouped-query attention, and its norms."""
    head_size = widths.queries // widths.num_heads
    has_bias = bool(text.get("attention_bias", True))  # the default of models without the setting, such as Qwen2
    # In Qwen3-Next and Qwen3.5, ``q_proj`` also computes a gate for the output, as wide as the queries.
    has_gate = bool(text.get("linear_num_value_heads"))
    q_outputs = 2 * widths.queries if has_gate else widths.queries
    norm = {"kind": "no_matmul", "inputs": 1, "outputs": head_size}
    yield "self_attn.q_proj", {"outputs": q_outputs, "has_bias": has_bias}
    if text.get("has_keys", True):
        yield "self_attn.k_proj", {"outputs": widths.keys, "shares_input": True, "has_bias": has_bias}
        if not text.get("keys_are_values"):
            yield "self_attn.v_proj", {"outputs": widths.values, "shares_input": True, "has_bias": has_bias}
    yield "self_attn.q_norm", norm
    yield "self_attn.k_norm", norm


def _gated_delta_modules(text: Mapping[str, Any]) -> Iterator[ModuleSettings]:
    """Yield name and settings of each module of a gated delta layer: linear attention, which keeps a state per head.

    Its FLOPs are those of the usual kernels, which process chunks of positions at a time.
    """
    num_key_heads, key_size = int(text["linear_num_key_heads"]), int(text["linear_key_head_dim"])
    num_value_heads, value_size = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
    value_width = num_value_heads * value_size
    qkv_width = 2 * num_key_heads * key_size + value_width
    # z gates the output; b and a are the update strength and the decay of each value head's state.
    if family_of(text).has_joint_inputs:
        output_widths = {"in_proj_qkvz": qkv_width + value_width, "in_proj_ba": 2 * num_value_heads}
    else:
        output_widths = {"in_proj_qkv": qkv_width, "in_proj_z": value_width}
        output_widths |= {"in_proj_b": num_value_heads, "in_proj_a": num_value_heads}
    for index, (name, width) in enumerate(output_widths.items()):
        yield f"linear_attn.{name}", {"outputs": width, "shares_input": index > 0}
    kernel_size = int(text.get("linear_conv_kernel_dim") or 4)
    yield "linear_attn.conv1d", {"kind": "convolution", "inputs": kernel_size, "outputs": qkv_width}
    flops = num_value_heads * _delta_rule_flops(key_size, value_size)  # of the states, without any weights
    yield "linear_attn", {"kind": "attention", "outputs": 0, "flops_per_unit": flops}
    yield "linear_attn.norm", {"kind": "no_matmul", "inputs": 1, "outputs": value_size}
    yield "linear_attn.out_proj", {"inputs": value_width}


def _delta_rule_flops(key_size: int, value_size: int) -> float:
    """Return the FLOPs of the gated delta rule for one position and head.

    With the positions of its chunk: products of keys and of queries with keys (4 key_size), of scores with values (2
    value_size), and the solution of a triangular system for keys and values (key_size + value_size). With the state,
    key_size x value_size: products of the key, the query and the value.
    """
    chunk_flops = _STATE_CHUNK * (4.0 * key_size + 2 * value_size + key_size + value_size)
    state_flops = 3 * 2 * key_size * value_size
    return chunk_flops + state_flops


def _mlp_modules(text: Mapping[str, Any], layer: int) -> Iterator[ModuleSettings]:
    """Yield the modules of a dense layer's MLP, gated or not, or the router, experts and shared expert of a layer."""
    mlp = expert_widths(text)
    if not mlp.num_experts or _is_dense(text, layer):
        is_wide = text.get("use_double_wide_mlp") and _shares_keys(text, layer)
        width = first_setting(text, "dense_intermediate_size") or _mlp_width(text) * (2 if is_wide else 1)
        yield from _swiglu("mlp", width)
        return
    experts = {"kind": "tensor", "uses_per_unit": mlp.experts_per_token, "num_experts": mlp.num_experts}
    # Router (``gate``), experts and shared expert read the same input, so their first modules follow one another.
    yield "mlp.gate", {"kind": "tensor", "outputs": mlp.num_experts}
    yield "mlp.experts.gate_up_proj", experts | {"outputs": 2 * mlp.expert_width, "shares_input": True}
    if mlp.shared_width:
        if text.get("shared_expert_intermediate_size"):
            yield "mlp.shared_expert_gate", {"outputs": 1, "shares_input": True}
        yield from _swiglu("mlp.shared_expert", mlp.shared_width, shares_input=True)
    yield "mlp.experts.down_proj", experts | {"inputs": mlp.expert_width}


def _is_dense(text: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer of a model with experts has none; each family has its own rule."""
    if text.get("mlp_layer_types"):
        return "dense" in text["mlp_layer_types"][layer : layer + 1]
    first_sparse = first_setting(text, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    last_sparse = int(text.get("moe_layer_end_index") or -1)
    is_outside = layer < first_sparse or 0 <= last_sparse < layer
    interval = first_setting(text, "decoder_sparse_step", "moe_layer_interval") or 1
    return is_outside or layer in (text.get("mlp_only_layers") or ()) or (layer + 1) % interval != 0


def _swiglu(name: str, width: int, *, shares_input: bool = False) -> Iterator[ModuleSettings]:
    yield f"{name}.gate_proj", {"outputs": width, "shares_input": shares_input}
    yield f"{name}.up_proj", {"outputs": width, "shares_input": True}
    yield f"{name}.down_proj", {"inputs": width}


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """Return each layer's type, as in the ``layer_types`` of transformers; older configs have rules instead."""
    if types := text.get("layer_types"):
        return [str(layer_type) for layer_type in types]
    layers = range(int(text["num_hidden_layers"]))
    if text.get("linear_num_value_heads"):
        interval = int(text.get("full_attention_interval") or 4)
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    if not _window(text) or not text.get("use_sliding_window", True):
        return ["full_attention"] * len(layers)
    if interval := int(text.get("sliding_window_pattern") or 0):
        return ["sliding_attention" if (i + 1) % interval else "full_attention" for i in layers]
    first_sliding = int(text.get("max_window_layers") or 0)
    return ["sliding_attention" if i >= first_sliding else "full_attention" for i in layers]


def _window(text: Mapping[str, Any]) -> int:
    return int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
