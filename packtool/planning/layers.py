"""Modules of a model's forward pass, from its ``config.json``, and the training of each, for ``cost``.

Every part of a model has a unit: a token of the language model, an output token of a vision tower (it stands for
merge^2 patches), a token of a sound. Products with weights, including convolutions, and attention are counted. Norms,
activations and rotations are below a percent; norms are listed only because their weights may be trained.

Names are those of transformers' modules, so that options with module or parameter names select the same modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from packtool.config.model import LearningOptions, ModelPart, has_name
from packtool.encode.families import family_of, text_config_of, thinker_of

ModuleKind = Literal["linear", "convolution", "tensor", "no_product", "attention"]
"""Linear modules, convolutions, weights without a torch module of their own (experts, routers), modules without
products (norms, embeddings), and attention, which has no weights."""

_LINEAR_TYPES = ("linear_attention", "conv", "mamba", "recurrent")
_SLIDING_TYPES = ("sliding_attention", "chunked_attention")
_STATE_CHUNK = 64  # positions per chunk of the gated delta rule
_GATED = ("silu", "swish")
# Qwen3-Omni: three convolutions of stride 2 over 100 mel frames leave 13 positions, each of an eighth of the bins.
_STRIDES = (50, 25, 13)


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """A module and its forward work for one unit of its part.

    Args:
        times: number of uses for a unit.
        shares_input: its input is that of the module before.
        layer: number of its layer; None outside of layers.
        per_unit: FLOPs of attention for each unit, whatever the length: states, and windows of towers.
        per_square: FLOPs of attention per unit of the sum of squares, halved for causal attention.
        per_window: FLOPs of attention in windows per unit of ``CostModel.window_squares``.
    """

    name: str
    part: ModelPart
    kind: ModuleKind = "linear"
    inputs: int = 0
    outputs: int = 0
    times: float = 1.0
    num_experts: int = 1
    has_bias: bool = False
    shares_input: bool = False
    layer: int | None = None
    per_unit: float = 0.0
    per_square: float = 0.0
    per_window: float = 0.0

    @property
    def num_products(self) -> float:
        """Multiply-adds with weights for one unit."""
        return 0.0 if self.kind == "no_product" else self.times * self.inputs * self.outputs

    @property
    def num_weights(self) -> int:
        """Number of weights without biases."""
        return self.inputs * self.outputs * self.num_experts

    @property
    def weight(self) -> str:
        """Name of the parameter."""
        return self.name if self.kind == "tensor" and ".experts." in self.name else f"{self.name}.weight"


@dataclass(frozen=True)
class ModelLayers:
    """Parts of a model; each is a tuple of its modules in the order of the forward pass.

    Args:
        language: for each token; ``per_square`` for the square of a sample's length.
        head: for each token with logits.
        is_tied: the head's weights are those of the embeddings, the first module of ``language``.
        window, in_chunks: as in ``CostModel``; 0 without layers that have windows.
        vision: the tower, for each token of images and videos; ``per_square`` for the square of a frame's patches.
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
    audio: tuple[ModuleCost, ...] = ()
    audio_aligner: tuple[ModuleCost, ...] = ()

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelLayers:
        """Read the widths of a model, of an Omni model those of its thinker; a KeyError if one is missing."""
        config, text = thinker_of(config), text_config_of(config)
        hidden, vocabulary = int(text["hidden_size"]), int(text.get("vocab_size") or 0)
        has_media = bool(config.get("vision_config") or config.get("audio_config"))
        audio_modules = tuple(_audio_modules(config.get("audio_config") or {}))
        return cls(
            language=tuple(_language_modules(text, "model.language_model" if has_media else "model")),
            head=ModuleCost(name="lm_head", part="language model", inputs=hidden, outputs=vocabulary),
            is_tied=bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings")),
            window=_window(text),
            in_chunks="chunked_attention" in _layer_types(text),
            vision=tuple(_vision_modules(config)),
            mergers=_merger_modules(config, hidden),
            audio=tuple(module for module in audio_modules if module.part != "aligner"),
            audio_aligner=tuple(module for module in audio_modules if module.part == "aligner"),
        )

    @property
    def modules(self) -> tuple[ModuleCost, ...]:
        """All modules in the order of the model's parameters: the norms of a text layer come last in it."""
        mergers = (module for merger in self.mergers for module in merger)
        language = sorted(self.language, key=_parameter_order)
        return (*self.audio, *self.audio_aligner, *self.vision, *mergers, *language, self.head)


_ADAPTABLE = "linear", "convolution", "no_product"  # by name; all-linear selects linear modules only


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


def _module(prefix: str, name: str, inputs: int = 0, outputs: int = 0, **rest: Any) -> ModuleCost:
    return ModuleCost(name=prefix + name, inputs=inputs, outputs=outputs, **rest)


def _parameter_order(module: ModuleCost) -> tuple[int, int]:
    """Return a sort key for modules of the language model: the layer, and the order within it."""
    if module.layer is None:
        return (-1 if module.name.endswith("embed_tokens") else sys.maxsize, 0)
    for order, name_part in enumerate(("_norm", ".mlp.", "layernorm"), start=1):
        if name_part in module.name:
            return module.layer, order
    return module.layer, 0


def _language_modules(text: Mapping[str, Any], prefix: str) -> Iterator[ModuleCost]:
    hidden = int(text["hidden_size"])

    module = partial(_module, f"{prefix}.", part="language model")
    yield module("embed_tokens", int(text.get("vocab_size") or 0), hidden, kind="no_product")
    for i, layer_type in enumerate(_layer_types(text)):
        yield module(f"layers.{i}.input_layernorm", 1, hidden, kind="no_product", layer=i)
        if layer_type in _LINEAR_TYPES and text.get("linear_num_value_heads"):
            mixer = _gated_delta_modules(text)
        else:
            mixer = _attention_modules(text, layer_type)
        norm: ModuleSettings = ("post_attention_layernorm", {"kind": "no_product", "inputs": 1})
        for name, settings in (*mixer, norm, *_mlp_modules(text, i)):
            yield module(f"layers.{i}.{name}", **{"inputs": hidden, "outputs": hidden, "layer": i, **settings})
    yield module("norm", 1, hidden, kind="no_product")


ModuleSettings = tuple[str, dict[str, Any]]
"""A module's name in its layer, and the fields of its ``ModuleCost``; ``inputs`` and ``outputs`` are by default the
model's width."""


class AttentionWidths(NamedTuple):
    """Heads of queries, and of keys and values, and the widths of a token's queries, and of its keys."""

    num_heads: int
    num_key_heads: int
    queries: int
    keys: int


def attention_widths(text: Mapping[str, Any]) -> AttentionWidths:
    """Read the heads and widths of attention; a token's values are as wide as its keys."""
    heads = int(text["num_attention_heads"])
    key_heads = int(text.get("num_key_value_heads") or heads)
    head_size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return AttentionWidths(heads, key_heads, heads * head_size, key_heads * head_size)


class ExpertWidths(NamedTuple):
    """Experts of a layer, 0 if it is dense, the width of one, those of a token, and the shared expert's width."""

    num_experts: int
    expert: int
    experts_per_token: int
    shared_expert: int


def expert_widths(text: Mapping[str, Any]) -> ExpertWidths:
    """Read the experts of a layer; a dense layer counts as one expert of its width."""
    num_experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    width, per_token = int(text.get("intermediate_size") or 4 * int(text["hidden_size"])), 1
    if num_experts:
        width = int(text.get("moe_intermediate_size") or width)
        per_token = int(text.get("num_experts_per_tok") or 1)
    shared = int(text.get("shared_expert_intermediate_size") or 0) + width * int(text.get("n_shared_experts") or 0)
    return ExpertWidths(num_experts, width, per_token, shared)


def _attention_modules(text: Mapping[str, Any], layer_type: str) -> Iterator[ModuleSettings]:
    """Yield the modules of grouped-query attention to complete samples or, in a sliding layer, to a window."""
    widths = attention_widths(text)
    head_size = widths.queries // widths.num_heads
    has_bias = bool(text.get("attention_bias", True))  # the default of models without the setting, such as Qwen2
    # In Qwen3-Next and Qwen3.5, ``q_proj`` also computes a gate for the output, as wide as the queries.
    has_gate = bool(text.get("linear_num_value_heads"))
    q_outputs = 2 * widths.queries if has_gate else widths.queries
    norm = {"kind": "no_product", "inputs": 1, "outputs": head_size}
    yield "self_attn.q_proj", {"outputs": q_outputs, "has_bias": has_bias}
    yield "self_attn.k_proj", {"outputs": widths.keys, "shares_input": True, "has_bias": has_bias}
    yield "self_attn.v_proj", {"outputs": widths.keys, "shares_input": True, "has_bias": has_bias}
    yield "self_attn.q_norm", norm
    yield "self_attn.k_norm", norm
    flops = {}  # linear layers without sizes of their own have no FLOPs of attention
    if layer_type in _SLIDING_TYPES:
        flops = {"per_window": 2.0 * widths.queries}
    elif layer_type not in _LINEAR_TYPES:
        flops = {"per_square": 2.0 * widths.queries}
    yield "self_attn", {"kind": "attention", "outputs": 0, **flops}
    yield "self_attn.o_proj", {"inputs": widths.queries}


def _gated_delta_modules(text: Mapping[str, Any]) -> Iterator[ModuleSettings]:
    """Yield the modules of a gated delta layer (linear attention with a state), computed in chunks of positions."""
    num_heads, num_key_heads = int(text["linear_num_value_heads"]), int(text["linear_num_key_heads"])
    value_size, key_size = int(text["linear_value_head_dim"]), int(text["linear_key_head_dim"])
    value_width = num_heads * value_size
    qkv_width = 2 * num_key_heads * key_size + value_width
    # z gates the output; b and a are the update strength and the decay of each head's state.
    if family_of(text).has_joint_inputs:
        projections = {"in_proj_qkvz": qkv_width + value_width, "in_proj_ba": 2 * num_heads}
    else:
        projections = {"in_proj_qkv": qkv_width, "in_proj_z": value_width}
        projections |= {"in_proj_b": num_heads, "in_proj_a": num_heads}
    for index, (name, width) in enumerate(projections.items()):
        yield f"linear_attn.{name}", {"outputs": width, "shares_input": index > 0}
    kernel_size = int(text.get("linear_conv_kernel_dim") or 4)
    yield "linear_attn.conv1d", {"kind": "convolution", "inputs": kernel_size, "outputs": qkv_width}
    # FLOPs of one position and head. With the positions of its chunk: products of keys and of queries with keys (4
    # key_size), of scores with values (2 value_size), and the solution of a triangular system for keys and values
    # (key_size + value_size). With the state, key_size x value_size: products of the key, the query and the value.
    chunk_flops = _STATE_CHUNK * (4.0 * key_size + 2 * value_size + key_size + value_size)
    state_flops = 3 * 2 * key_size * value_size
    yield "linear_attn", {"kind": "attention", "outputs": 0, "per_unit": num_heads * (chunk_flops + state_flops)}
    yield "linear_attn.norm", {"kind": "no_product", "inputs": 1, "outputs": value_size}
    yield "linear_attn.out_proj", {"inputs": value_width}


def _mlp_modules(text: Mapping[str, Any], layer: int) -> Iterator[ModuleSettings]:
    """Yield the modules of a dense SwiGLU, or of the router, the experts of a token and the shared expert."""
    num_experts, expert_width, experts_per_token, shared_width = expert_widths(text)
    is_listed_dense = layer in (text.get("mlp_only_layers") or ())
    is_first_dense = layer < int(text.get("first_k_dense_replace") or 0)
    sparse_interval = int(text.get("decoder_sparse_step") or 1)
    is_between_sparse = (layer + 1) % sparse_interval != 0
    if not num_experts or is_listed_dense or is_first_dense or is_between_sparse:
        yield from _swiglu("mlp", int(text.get("intermediate_size") or 4 * int(text["hidden_size"])))
        return
    experts = {"kind": "tensor", "times": experts_per_token, "num_experts": num_experts}
    # Router (``gate``), shared expert and experts have the same input.
    yield "mlp.gate", {"kind": "tensor", "outputs": num_experts}
    yield "mlp.experts.gate_up_proj", experts | {"outputs": 2 * expert_width, "shares_input": True}
    if shared_width:
        if text.get("shared_expert_intermediate_size"):
            yield "mlp.shared_expert_gate", {"outputs": 1, "shares_input": True}
        yield from _swiglu("mlp.shared_expert", shared_width, shares_input=True)
    yield "mlp.experts.down_proj", experts | {"inputs": expert_width}


def _swiglu(name: str, width: int, *, shares_input: bool = False) -> Iterator[ModuleSettings]:
    yield f"{name}.gate_proj", {"outputs": width, "shares_input": shares_input}
    yield f"{name}.up_proj", {"outputs": width, "shares_input": True}
    yield f"{name}.down_proj", {"inputs": width}


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """Return each layer's type, as in the ``layer_types`` of transformers; older configs have rules instead."""
    types = text.get("layer_types") or text.get("layers_block_type")
    if types:
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


def _tower_width(vision: Mapping[str, Any]) -> int:
    """Return the width of a patch: Qwen2-VL's config calls it embed_dim, and the text's width hidden_size."""
    depth = vision.get("depth") or vision.get("num_hidden_layers")
    return int(vision.get("embed_dim") or vision.get("hidden_size") or 0) if depth else 0


def _vision_modules(config: Mapping[str, Any]) -> Iterator[ModuleCost]:
    """Yield the modules of the vision tower; ``times`` are its patches per output token."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return
    depth = int(vision.get("depth") or vision["num_hidden_layers"])
    mlp_width = int(vision.get("intermediate_size") or hidden * float(vision.get("mlp_ratio") or 4))
    pixels_per_patch = _side(vision, "patch_size", 14) ** 2 * int(vision.get("temporal_patch_size") or 1)
    values_per_patch = pixels_per_patch * int(vision.get("in_channels") or vision.get("in_chans") or 3)
    patches = _vision_patches(config, vision, depth)

    module = partial(_module, "model.visual.", part="vision tower", times=patches.per_token, has_bias=True)
    yield module("patch_embed.proj", values_per_patch, hidden, kind="convolution")
    if positions := int(vision.get("num_position_embeddings") or 0):
        yield module("pos_embed", positions, hidden, kind="no_product")
    # Towers before Qwen3-VL have other names, and the tower of Qwen2.5-Omni has separate modules for Q, K and V.
    is_before_qwen3 = "num_position_embeddings" not in vision
    qkv_outputs = {"qkv": 3 * hidden}
    if is_before_qwen3 and "audio_config" in config:
        qkv_outputs = {"q": hidden, "k": hidden, "v": hidden}
    up, down = ("fc1", "fc2") if is_before_qwen3 else ("linear_fc1", "linear_fc2")
    is_gated = str(vision.get("hidden_act")) in _GATED
    if is_gated:
        up, down = "up_proj", "down_proj"
    frame_attention: dict[str, Any] = {"per_square": 4.0 * hidden}
    window_attention: dict[str, Any] = {"per_unit": patches.per_token * 4.0 * hidden * patches.per_window}
    for i in range(depth):
        yield module(f"blocks.{i}.norm1", 1, hidden, kind="no_product", layer=i)
        for index, (name, outputs) in enumerate(qkv_outputs.items()):
            yield module(f"blocks.{i}.attn.{name}", hidden, outputs, layer=i, shares_input=index > 0)
        flops = frame_attention if i in patches.full_layers else window_attention
        yield module(f"blocks.{i}.attn", kind="attention", layer=i, **flops)
        yield module(f"blocks.{i}.attn.proj", hidden, hidden, layer=i)
        yield module(f"blocks.{i}.norm2", 1, hidden, kind="no_product", layer=i)
        if is_gated:
            yield module(f"blocks.{i}.mlp.gate_proj", hidden, mlp_width, layer=i)
        yield module(f"blocks.{i}.mlp.{up}", hidden, mlp_width, layer=i, shares_input=is_gated)
        yield module(f"blocks.{i}.mlp.{down}", mlp_width, hidden, layer=i)


def _side(vision: Mapping[str, Any], name: str, default: int) -> int:
    """Read the side of a square in pixels; configs have one number, or height and width."""
    size = vision.get(name) or default
    return int(size[0] if isinstance(size, list) else size)


def _merger_modules(config: Mapping[str, Any], text_hidden: int) -> tuple[tuple[ModuleCost, ...], ...]:
    """Return the modules of each merger, which projects outputs of a layer of the vision tower to the text's width.

    A merger joins merge^2 patches to one token. The first one reads the last layer, others read earlier layers.
    """
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return ()
    depth = int(vision.get("depth") or vision["num_hidden_layers"])
    output_width = int(vision.get("out_hidden_size") or text_hidden)
    merged_width = hidden * int(vision.get("spatial_merge_size") or 1) ** 2
    is_omni = "audio_config" in config
    names = ["merger"]
    # Qwen3's "deepstack" has further mergers.
    list_name = "merger_list" if is_omni else "deepstack_merger_list"
    for number, layer in enumerate(vision.get("deepstack_visual_indexes") or ()):
        if int(layer) < depth:
            names.append(f"{list_name}.{number}")
    up, down, norm = "linear_fc1", "linear_fc2", "norm"
    if is_omni or "num_position_embeddings" not in vision:
        up, down, norm = "mlp.0", "mlp.2", "ln_q"

    module = partial(_module, "model.visual.", part="aligner", has_bias=True)
    mergers = []
    for name in names:
        norm_module = module(f"{name}.{norm}", 1, hidden, kind="no_product")
        up_module = module(f"{name}.{up}", merged_width, merged_width)
        down_module = module(f"{name}.{down}", merged_width, output_width)
        mergers.append((norm_module, up_module, down_module))
    return tuple(mergers)


class _VisionPatches(NamedTuple):
    per_token: float
    per_window: int
    full_layers: range | set[int]  # layers with attention to full frames; the others attend to windows


def _vision_patches(config: Mapping[str, Any], vision: Mapping[str, Any], depth: int) -> _VisionPatches:
    patch_side = _side(vision, "patch_size", 14)
    if vision.get("spatial_merge_size"):
        merge = int(vision["spatial_merge_size"])
        full_layers = vision.get("fullatt_block_indexes")
        if full_layers is None or not vision.get("window_size"):
            return _VisionPatches(float(merge**2), 0, range(depth))
        window_side = int(vision["window_size"]) // merge // patch_side * merge
        return _VisionPatches(float(merge**2), window_side**2, set(map(int, full_layers)))
    # A tower that resizes all images to one size: each is a window, and the cache has no grid.
    per_image = (_side(vision, "image_size", patch_side) // patch_side) ** 2
    merge = int(config.get("spatial_merge_size") or config.get("scale_factor") or 1)
    tokens = int(config.get("mm_tokens_per_image") or config.get("image_seq_length") or per_image // merge**2)
    return _VisionPatches(per_image / tokens, per_image, range(0))


def _audio_modules(audio: Mapping[str, Any]) -> Iterator[ModuleCost]:
    """Yield the modules of an audio tower and its projections; windows of attention count at their full width.

    The unit is an output token of the tower. ``part`` is "vision tower", since ``--freeze-vit`` freezes audio towers,
    too. Only the tower of Qwen3-Omni has ``downsample_hidden_size``; others are like that of Qwen2.5-Omni.
    """
    hidden, depth = int(audio.get("d_model") or 0), int(audio.get("encoder_layers") or 0)
    if not hidden or not depth:
        return
    mel_bins = int(audio.get("num_mel_bins") or 128)
    window = int(audio.get("n_window") or 100)  # positions, or for Qwen3-Omni half the frames of a chunk
    channels = int(audio.get("downsample_hidden_size") or 0)
    # In Qwen2.5-Omni, four frames make two positions of the tower, which are averaged to one token.
    positions_per_token = 1.0 if channels else 2.0

    module = partial(_module, "model.audio_tower.", part="vision tower", times=positions_per_token, has_bias=True)
    if channels:
        # Each convolution halves the bins (height) and the frames (width).
        height, in_channels = mel_bins, 1
        for number, width in enumerate(_STRIDES, start=1):
            height = (height - 1) // 2 + 1
            outputs_per_token = height * width / _STRIDES[-1]
            yield module(f"conv2d{number}", 9 * in_channels, channels, times=outputs_per_token, kind="convolution")
            in_channels = channels
        yield module("conv_out", channels * height, hidden)
        # An attention window has several chunks of 2 * n_window frames, each of 13 positions.
        chunks_per_window = int(audio.get("n_window_infer") or 8 * window) // (2 * window)
        window = chunks_per_window * _STRIDES[-1]
    else:
        yield module("conv1", 3 * mel_bins, hidden, times=4.0, kind="convolution")
        yield module("conv2", 3 * hidden, hidden, kind="convolution")
    mlp_width = int(audio.get("encoder_ffn_dim") or 4 * hidden)
    attention_flops = positions_per_token * 4 * hidden * window
    for i in range(depth):
        yield module(f"layers.{i}.self_attn_layer_norm", 1, hidden, kind="no_product", layer=i)
        for name in ("k_proj", "v_proj", "q_proj"):
            yield module(f"layers.{i}.self_attn.{name}", hidden, hidden, layer=i, shares_input=name != "k_proj")
        yield module(f"layers.{i}.self_attn", kind="attention", layer=i, per_unit=attention_flops)
        yield module(f"layers.{i}.self_attn.out_proj", hidden, hidden, layer=i)
        yield module(f"layers.{i}.final_layer_norm", 1, hidden, kind="no_product", layer=i)
        yield module(f"layers.{i}.fc1", hidden, mlp_width, layer=i)
        yield module(f"layers.{i}.fc2", mlp_width, hidden, layer=i)
    yield module("ln_post", 1, hidden, kind="no_product")
    output_width = int(audio.get("output_dim") or hidden)
    if channels:
        yield module("proj1", hidden, hidden, times=1.0, part="aligner")
        yield module("proj2", hidden, output_width, times=1.0, part="aligner")
    else:
        yield module("proj", hidden, output_width, times=1.0)
