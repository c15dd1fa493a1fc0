"""Steps of a model's forward pass, from its ``config.json``, and the training of each, for ``cost``.

Every part of a model has a unit: a token of the language model, an output token of a vision tower (it stands for
merge^2 patches), a token of a sound. Products with weights, including convolutions, and attention are counted. Norms,
activations and rotations are below a percent; norms are listed only because their weights may be trained.

Steps have the names of transformers' modules, so that options with module or parameter names select the same steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from packtool.config.model import LearningOptions, ModelPart, has_name
from packtool.encode.families import family_of, text_config_of, thinker_of

StepKind = Literal["linear", "convolution", "tensor", "lookup", "attention"]
"""Linear modules, convolutions, weights without a torch module of their own (experts, routers), modules without
products (norms, embeddings), and attention, which has no weights."""

_LINEAR_TYPES = ("linear_attention", "conv", "mamba", "recurrent")
_SLIDING_TYPES = ("sliding_attention", "chunked_attention")
_STATE_CHUNK = 64  # positions per chunk of the gated delta rule
_GATED = ("silu", "swish")
# Qwen3-Omni: three convolutions of stride 2 over 100 mel frames leave 13 positions, each of an eighth of the bins.
_STRIDES = (50, 25, 13)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A module and its forward work for one unit of its part.

    Args:
        name: of the module, or of the tensor.
        times: number of uses for a unit.
        shares_input: its input is that of the step before.
        layer: number of its layer; None outside of layers.
        per_unit: FLOPs of attention for each unit, whatever the length: states, and windows of towers.
        per_square: FLOPs of attention per unit of the sum of squares, halved for causal attention.
        per_window: FLOPs of attention in windows per unit of ``CostModel.window_squares``.
    """

    name: str
    part: ModelPart
    kind: StepKind = "linear"
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
        """Multiply-adds with weights; a lookup has none."""
        return 0.0 if self.kind == "lookup" else self.times * self.inputs * self.outputs

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
    """Parts of a model; each is a tuple of its steps in the order of the forward pass.

    Args:
        language: for each token; ``per_square`` for the square of a sample's length.
        head: for each token with logits.
        is_tied: the head's weights are those of the embeddings, the first step of ``language``.
        window, in_chunks: as in ``CostModel``; 0 without layers that have windows.
        vision: the tower, for each token of images and videos; ``per_square`` for the square of a frame's patches.
        mergers: for the same tokens, from outputs of the tower to the text's width; one reads the last layer, others
            earlier layers.
        audio, audio_aligner: for each token of sounds; ``--freeze-aligner`` freezes the second.
    """

    language: tuple[Step, ...]
    head: Step
    is_tied: bool
    window: int = 0
    in_chunks: bool = False
    vision: tuple[Step, ...] = ()
    mergers: tuple[tuple[Step, ...], ...] = ()
    audio: tuple[Step, ...] = ()
    audio_aligner: tuple[Step, ...] = ()

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelLayers:
        """Read the widths of a model, of an Omni model those of its thinker; a KeyError if one is missing."""
        config, text = thinker_of(config), text_config_of(config)
        hidden, vocabulary = int(text["hidden_size"]), int(text.get("vocab_size") or 0)
        audio, vision = config.get("audio_config") or {}, config.get("vision_config")
        audio_steps = tuple(_audio(audio))
        return cls(
            language=tuple(_language(text, "model.language_model" if vision or audio else "model")),
            head=Step(name="lm_head", part="language model", inputs=hidden, outputs=vocabulary),
            is_tied=bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings")),
            window=_window(text),
            in_chunks="chunked_attention" in _layer_types(text),
            vision=tuple(_vision(config)),
            mergers=_mergers(config, hidden),
            audio=tuple(step for step in audio_steps if step.part != "aligner"),
            audio_aligner=tuple(step for step in audio_steps if step.part == "aligner"),
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in the order of the model's parameters: the norms of a text layer come last in it."""
        mergers = (step for merger in self.mergers for step in merger)
        language = sorted(self.language, key=_place_of_parameters)
        return (*self.audio, *self.audio_aligner, *self.vision, *mergers, *language, self.head)


_ADAPTABLE = ("linear", "convolution", "lookup")  # by a regular expression; names and all-linear mean linear modules


@dataclass(frozen=True)
class Trainable:
    """Training of a step.

    Args:
        weights: all are trained, an adapter is, or none.
        any: any parameter of it is trained, even a bias alone: gradients flow back to its output.
    """

    weights: Literal["full", "lora", "frozen"] = "frozen"
    any: bool = False


def trainable(layers: ModelLayers, options: LearningOptions) -> dict[str, Trainable]:
    """Find the training of each step, by its name; options that name modules this model lacks are ignored."""
    steps = [step for step in layers.steps if step.kind != "attention"]
    training: dict[str, Trainable] = {}
    if options.train_type == "lora":
        for step in steps:
            is_target = step.kind in _ADAPTABLE
            if options.target_regex is None:
                is_target = step.kind == "linear" and step is not layers.head and step.part not in options.frozen_parts
            training[step.name] = Trainable("frozen", options.lora_bias == "all" and step.has_bias)
            if any(has_name(step.name, wanted) for wanted in options.modules_to_save):
                training[step.name] = Trainable("full", True)
            elif is_target and options.is_target(step.name):
                training[step.name] = Trainable("lora", True)
    else:
        untied = steps[:-1] if layers.is_tied else steps
        # ``freeze_parameters_ratio`` freezes that share of the weights, from the first ones on.
        budget = int(sum(step.num_weights for step in untied) * options.freeze_parameters_ratio)
        for step in untied:
            budget -= step.num_weights
            is_frozen = step.part in options.frozen_parts or (options.freeze_parameters_ratio > 0 and budget >= 0)
            names = (step.weight, f"{step.name}.bias") if step.has_bias else (step.weight,)
            is_trained = [options.is_unfrozen(name) or not (is_frozen or options.is_frozen(name)) for name in names]
            training[step.name] = Trainable("full" if is_trained[0] else "frozen", any(is_trained))
    if layers.is_tied:
        training[layers.head.name] = training[layers.language[0].name]
    # The options that name parts of a model, and not modules.
    part_options = ("train_type", "lora_rank", "freeze_vit", "freeze_aligner", "freeze_llm")
    by_part = LearningOptions(**{name: getattr(options, name) for name in part_options})
    if options != by_part and not any(step.any for step in training.values()):
        return trainable(layers, by_part)
    return training


def _step(prefix: str, name: str, inputs: int = 0, outputs: int = 0, **rest: Any) -> Step:
    return Step(name=prefix + name, inputs=inputs, outputs=outputs, **rest)


def _place_of_parameters(step: Step) -> tuple[int, int]:
    if step.layer is None:
        return (-1 if step.name.endswith("embed_tokens") else sys.maxsize, 0)
    order = (".mlp.", 2), ("layernorm", 3), ("_norm", 1)
    return step.layer, next((place for mark, place in order if mark in step.name), 0)


def _language(text: Mapping[str, Any], prefix: str) -> Iterator[Step]:
    hidden = int(text["hidden_size"])

    step = partial(_step, f"{prefix}.", part="language model")
    yield step("embed_tokens", int(text.get("vocab_size") or 0), hidden, kind="lookup")
    for i, kind in enumerate(_layer_types(text)):
        yield step(f"layers.{i}.input_layernorm", 1, hidden, kind="lookup", layer=i)
        mixer = _state(text) if kind in _LINEAR_TYPES and text.get("linear_num_value_heads") else _attention(text, kind)
        for name, settings in (*mixer, ("post_attention_layernorm", {"kind": "lookup", "inputs": 1}), *_mlp(text, i)):
            yield step(f"layers.{i}.{name}", **{"inputs": hidden, "outputs": hidden, "layer": i, **settings})
    yield step("norm", 1, hidden, kind="lookup")


Named = tuple[str, dict[str, Any]]
"""A step's name in its layer, and its settings where they differ from the model's width."""


def attention_widths(text: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the number of query heads and of key heads, and the widths of a token's queries and keys."""
    heads = int(text["num_attention_heads"])
    key_heads = int(text.get("num_key_value_heads") or heads)
    head_size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return heads, key_heads, heads * head_size, key_heads * head_size


def expert_widths(text: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Read a layer's number of experts (0 if dense), their width, experts per token, and the shared expert's width."""
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    width = int(text.get("intermediate_size") or 4 * int(text["hidden_size"]))
    width = int((experts and text.get("moe_intermediate_size")) or width)
    shared = int(text.get("shared_expert_intermediate_size") or 0) + width * int(text.get("n_shared_experts") or 0)
    return experts, width, int((experts and text.get("num_experts_per_tok")) or 1), shared


def _attention(text: Mapping[str, Any], kind: str) -> Iterator[Named]:
    """Yield grouped-query attention to complete samples or, in a sliding layer, to a window."""
    heads, _, queries, keys = attention_widths(text)
    has_bias = bool(text.get("attention_bias", True))  # the default of models without the setting, such as Qwen2
    # Qwen3-Next and Qwen3.5 gate the output of attention with a gate of the width of the queries.
    of_queries = queries * (2 if text.get("linear_num_value_heads") else 1)
    yield "self_attn.q_proj", {"outputs": of_queries, "has_bias": has_bias}
    yield "self_attn.k_proj", {"outputs": keys, "shares_input": True, "has_bias": has_bias}
    yield "self_attn.v_proj", {"outputs": keys, "shares_input": True, "has_bias": has_bias}
    yield "self_attn.q_norm", {"kind": "lookup", "inputs": 1, "outputs": queries // heads}
    yield "self_attn.k_norm", {"kind": "lookup", "inputs": 1, "outputs": queries // heads}
    unit = "per_window" if kind in _SLIDING_TYPES else "per_unit" if kind in _LINEAR_TYPES else "per_square"
    yield "self_attn", {"kind": "attention", "outputs": 0, unit: 2.0 * queries if unit != "per_unit" else 0.0}
    yield "self_attn.o_proj", {"inputs": queries}


def _state(text: Mapping[str, Any]) -> Iterator[Named]:
    """Yield a gated delta layer, by the chunked rule."""
    heads, values = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
    keys, key_heads = int(text["linear_key_head_dim"]), int(text["linear_num_key_heads"])
    qkv_width, value_width = 2 * key_heads * keys + heads * values, heads * values
    if family_of(text).has_joint_inputs:
        inputs = {"in_proj_qkvz": qkv_width + value_width, "in_proj_ba": 2 * heads}
    else:
        inputs = {"in_proj_qkv": qkv_width, "in_proj_z": value_width, "in_proj_b": heads, "in_proj_a": heads}
    for number, (name, width) in enumerate(inputs.items()):
        yield f"linear_attn.{name}", {"outputs": width, "shares_input": number > 0}
    kernel = int(text.get("linear_conv_kernel_dim") or 4)
    yield "linear_attn.conv1d", {"kind": "convolution", "inputs": kernel, "outputs": qkv_width}
    # In a chunk: keys and queries times keys, scores times values, a triangular system for keys and values; and keys,
    # queries and values times the state.
    flops = heads * (_STATE_CHUNK * (4.0 * keys + 2 * values + keys + values) + 6 * keys * values)
    yield "linear_attn", {"kind": "attention", "outputs": 0, "per_unit": flops}
    yield "linear_attn.norm", {"kind": "lookup", "inputs": 1, "outputs": values}
    yield "linear_attn.out_proj", {"inputs": value_width}


def _mlp(text: Mapping[str, Any], layer: int) -> Iterator[Named]:
    """Yield SwiGLU (three matrices), or the experts of a token, the router and the shared expert."""
    experts, width, experts_per_token, shared = expert_widths(text)
    dense_layers = text.get("mlp_only_layers") or ()
    interval = int(text.get("decoder_sparse_step") or 1)
    first_dense = int(text.get("first_k_dense_replace") or 0)
    if not experts or layer in dense_layers or layer < first_dense or (layer + 1) % interval:
        yield from _swiglu("mlp", int(text.get("intermediate_size") or 4 * int(text["hidden_size"])))
        return
    expert_step = {"kind": "tensor", "times": experts_per_token, "num_experts": experts}
    # Router, shared expert and experts have the same input.
    yield "mlp.gate", {"kind": "tensor", "outputs": experts}
    yield "mlp.experts.gate_up_proj", expert_step | {"outputs": 2 * width, "shares_input": True}
    if shared:
        if text.get("shared_expert_intermediate_size"):
            yield "mlp.shared_expert_gate", {"outputs": 1, "shares_input": True}
        gate, up, down = _swiglu("mlp.shared_expert", shared)
        yield from ((gate[0], gate[1] | {"shares_input": True}), up, down)
    yield "mlp.experts.down_proj", expert_step | {"inputs": width}


def _swiglu(name: str, width: int) -> tuple[Named, Named, Named]:
    up = {"outputs": width, "shares_input": True}
    return (f"{name}.gate_proj", {"outputs": width}), (f"{name}.up_proj", up), (f"{name}.down_proj", {"inputs": width})


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    types = text.get("layer_types") or text.get("layers_block_type")
    if types:
        return [str(kind) for kind in types]
    layers = range(int(text["num_hidden_layers"]))
    if text.get("linear_num_value_heads"):
        every = int(text.get("full_attention_interval") or 4)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    if not _window(text) or not text.get("use_sliding_window", True):
        return ["full_attention"] * len(layers)
    every, first = int(text.get("sliding_window_pattern") or 0), int(text.get("max_window_layers") or 0)
    slides = [bool((i + 1) % every) if every else i >= first for i in layers]
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _window(text: Mapping[str, Any]) -> int:
    return int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)


def _tower_width(vision: Mapping[str, Any]) -> int:
    """Return the width of a patch: Qwen2-VL's config calls it embed_dim, and the text's width hidden_size."""
    depth = vision.get("depth") or vision.get("num_hidden_layers")
    return int(vision.get("embed_dim") or vision.get("hidden_size") or 0) if depth else 0


def _vision(config: Mapping[str, Any]) -> Iterator[Step]:
    """Yield the steps of a vision tower, for each output token."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return
    depth = int(vision.get("depth") or vision["num_hidden_layers"])
    width = int(vision.get("intermediate_size") or hidden * float(vision.get("mlp_ratio") or 4))
    side = _side(vision, "patch_size", 14)
    pixels = int(vision.get("in_channels") or vision.get("in_chans") or 3) * side**2
    pixels *= int(vision.get("temporal_patch_size") or 1)
    patches, window, full_layers = _patches(config, vision, depth)

    step = partial(_step, "model.visual.", part="vision tower", times=patches, has_bias=True)
    yield step("patch_embed.proj", pixels, hidden, kind="convolution")
    if positions := int(vision.get("num_position_embeddings") or 0):
        yield step("pos_embed", positions, hidden, kind="lookup")
    is_first_generation = "num_position_embeddings" not in vision
    is_split = "audio_config" in config and is_first_generation
    for i in range(depth):
        yield step(f"blocks.{i}.norm1", 1, hidden, kind="lookup", layer=i)
        for number, name in enumerate(("q", "k", "v") if is_split else ("qkv",)):
            outputs = hidden if is_split else 3 * hidden
            yield step(f"blocks.{i}.attn.{name}", hidden, outputs, layer=i, shares_input=number > 0)
        per_unit, square = (0.0, 4.0 * hidden) if i in full_layers else (patches * 4.0 * hidden * window, 0.0)
        yield step(f"blocks.{i}.attn", 0, 0, kind="attention", layer=i, per_unit=per_unit, per_square=square)
        yield step(f"blocks.{i}.attn.proj", hidden, hidden, layer=i)
        yield step(f"blocks.{i}.norm2", 1, hidden, kind="lookup", layer=i)
        if str(vision.get("hidden_act")) in _GATED:
            yield step(f"blocks.{i}.mlp.gate_proj", hidden, width, layer=i)
            yield step(f"blocks.{i}.mlp.up_proj", hidden, width, layer=i, shares_input=True)
            yield step(f"blocks.{i}.mlp.down_proj", width, hidden, layer=i)
        else:
            first, second = ("fc1", "fc2") if is_first_generation else ("linear_fc1", "linear_fc2")
            yield step(f"blocks.{i}.mlp.{first}", hidden, width, layer=i)
            yield step(f"blocks.{i}.mlp.{second}", width, hidden, layer=i)


def _side(vision: Mapping[str, Any], name: str, default: int) -> int:
    size = vision.get(name) or default
    return int(size[0] if isinstance(size, list) else size)  # or height and width


def _mergers(config: Mapping[str, Any], text_hidden: int) -> tuple[tuple[Step, ...], ...]:
    """Return the modules that project outputs of the tower's last and other layers to the text's width."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return ()
    depth = int(vision.get("depth") or vision["num_hidden_layers"])
    output = int(vision.get("out_hidden_size") or text_hidden)
    merged = hidden * int(vision.get("spatial_merge_size") or 1) ** 2
    is_omni = "audio_config" in config
    levels = [number for number, i in enumerate(vision.get("deepstack_visual_indexes") or ()) if int(i) < depth]
    lists = "merger_list" if is_omni else "deepstack_merger_list"
    first, second, norm = "linear_fc1", "linear_fc2", "norm"
    if is_omni or "num_position_embeddings" not in vision:
        first, second, norm = "mlp.0", "mlp.2", "ln_q"

    step = partial(_step, "model.visual.", part="aligner", has_bias=True)
    return tuple(
        (
            step(f"{name}.{norm}", 1, hidden, kind="lookup"),
            step(f"{name}.{first}", merged, merged),
            step(f"{name}.{second}", merged, output),
        )
        for name in ("merger", *(f"{lists}.{number}" for number in levels))
    )


def _patches(config: Mapping[str, Any], vision: Mapping[str, Any], depth: int) -> tuple[float, int, range | set[int]]:
    """Return the patches per token, the patches per window, and the layers with attention to full frames."""
    side = _side(vision, "patch_size", 14)
    if vision.get("spatial_merge_size"):
        merge = int(vision["spatial_merge_size"])
        full_layers = vision.get("fullatt_block_indexes")
        if full_layers is None or not vision.get("window_size"):
            return float(merge**2), 0, range(depth)
        window = int(vision["window_size"]) // merge // side * merge
        return float(merge**2), window**2, set(map(int, full_layers))
    # A tower that resizes all images to one size: each is a window, and the cache has no grid.
    of_image = (_side(vision, "image_size", side) // side) ** 2
    merge = int(config.get("spatial_merge_size") or config.get("scale_factor") or 1)
    tokens = int(config.get("mm_tokens_per_image") or config.get("image_seq_length") or of_image // merge**2)
    return of_image / tokens, of_image, range(0)


def _audio(audio: Mapping[str, Any]) -> Iterator[Step]:
    """Yield an audio tower and its projections, for each token; windows of attention count at their full width."""
    hidden, depth = int(audio.get("d_model") or 0), int(audio.get("encoder_layers") or 0)
    if not hidden or not depth:
        return
    bins, window = int(audio.get("num_mel_bins") or 128), int(audio.get("n_window") or 100)
    channels = int(audio.get("downsample_hidden_size") or 0)
    # Qwen2.5-Omni: four frames make two positions, and these one token.
    positions = 1.0 if channels else 2.0

    step = partial(_step, "model.audio_tower.", part="vision tower", times=positions, has_bias=True)
    if channels:
        rows, inputs = bins, 1
        for number, columns in enumerate(_STRIDES, start=1):
            rows = (rows - 1) // 2 + 1
            yield step(f"conv2d{number}", 9 * inputs, channels, times=rows * columns / _STRIDES[-1], kind="convolution")
            inputs = channels
        yield step("conv_out", channels * rows, hidden)
        window = int(audio.get("n_window_infer") or 8 * window) // (2 * window) * _STRIDES[-1]
    else:
        yield step("conv1", 3 * bins, hidden, times=4.0, kind="convolution")
        yield step("conv2", 3 * hidden, hidden, kind="convolution")
    width = int(audio.get("encoder_ffn_dim") or 4 * hidden)
    for i in range(depth):
        yield step(f"layers.{i}.self_attn_layer_norm", 1, hidden, kind="lookup", layer=i)
        for name in ("k_proj", "v_proj", "q_proj"):
            yield step(f"layers.{i}.self_attn.{name}", hidden, hidden, layer=i, shares_input=name != "k_proj")
        per_unit = positions * 4 * hidden * window
        yield step(f"layers.{i}.self_attn", 0, 0, kind="attention", layer=i, per_unit=per_unit)
        yield step(f"layers.{i}.self_attn.out_proj", hidden, hidden, layer=i)
        yield step(f"layers.{i}.final_layer_norm", 1, hidden, kind="lookup", layer=i)
        yield step(f"layers.{i}.fc1", hidden, width, layer=i)
        yield step(f"layers.{i}.fc2", width, hidden, layer=i)
    yield step("ln_post", 1, hidden, kind="lookup")
    output = int(audio.get("output_dim") or hidden)
    if channels:
        yield step("proj1", hidden, hidden, times=1.0, part="aligner")
        yield step("proj2", hidden, output, times=1.0, part="aligner")
    else:
        yield step("proj", hidden, output, times=1.0)
