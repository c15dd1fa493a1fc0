"""The matrix products of each part of a model, read off its ``config.json``: what ``cost`` multiplies.

A part runs over units: the language model over tokens, a vision tower over the tokens that leave it (each stands for
merge^2 patches), an audio tower over the tokens of a sound. Counted are products with weights, convolutions included,
and attention; norms, activations and rotations are below a percent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LINEAR_TYPES = ("linear_attention", "conv", "mamba", "recurrent")
_SLIDING_TYPES = ("sliding_attention", "chunked_attention")
_STATE_CHUNK = 64  # positions that the gated delta rule works on at once
_GATED = ("silu", "swish")
# Qwen3-Omni: three convolutions of stride 2 over 100 mel frames leave 13 positions, each of an eighth of the bins.
_STRIDES = (50, 25, 13)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Work of one unit going forward; multiply-adds but for ``local`` and ``per_square``, which are FLOPs.

    Args:
        embed: of what takes the part's input, and adapters leave alone (a convolution).
        convolutions: of what follows it before the first linear module, and adapters leave alone.
        first: of the linear modules that take what comes out of that, or the part's input.
        rest: of all other products with weights.
        widths: sum of inputs and outputs over the linear modules that may get adapters.
        local: attention that does not grow with the length: windows, states.
        per_square: attention of each unit of the sum of squares.
        embeds: whether weights come before ``first`` that learn with the part: convolutions, embeddings, a norm's.
    """

    embed: float = 0.0
    convolutions: float = 0.0
    first: float = 0.0
    rest: float = 0.0
    widths: float = 0.0
    local: float = 0.0
    per_square: float = 0.0
    embeds: bool = True


@dataclass(frozen=True)
class Stacks:
    """All parts of a model.

    Args:
        language: over tokens; ``per_square`` over the squares of samples' lengths, half of them for causality.
        head: multiply-adds of a token whose logits are made.
        vision: the tower over tokens of pictures and videos; ``per_square`` over squares of the patches of a frame.
        aligner: of the same tokens, from tower to text.
        audio, audio_aligner: over tokens of sounds; the second is what ``--freeze-aligner`` keeps.
    """

    language: Stack
    head: float
    vision: Stack = Stack()
    aligner: Stack = Stack()
    audio: Stack = Stack()
    audio_aligner: Stack = Stack(embeds=False)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Stacks:
        """Read the widths; of an Omni model those of its thinker.

        Raises:
            KeyError: if the configuration names no hidden size or number of layers.
        """
        config = config.get("thinker_config") or config
        text = config.get("text_config") or config
        hidden = int(text["hidden_size"])
        vision, aligner = _vision(config, hidden)
        audio, audio_aligner = _audio(config.get("audio_config") or {})
        head = float(hidden * int(text.get("vocab_size") or 0))
        return cls(_language(text), head, vision, aligner, audio, audio_aligner)


def _language(text: Mapping[str, Any]) -> Stack:
    """Grouped heads, SwiGLU (three matrices), the experts that a token visits and the router; sliding windows count at
    their full width, layers with a state by the chunked gated delta rule."""
    types = _layer_types(text)
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    head_size = int(text.get("head_dim") or hidden // heads)
    queries, keys = heads * head_size, int(text.get("num_key_value_heads") or heads) * head_size
    has_state = bool(text.get("linear_num_value_heads"))
    # Qwen3-Next and Qwen3.5 gate what attention gives, with as many numbers as there are queries.
    inputs = queries * (2 if has_state else 1) + 2 * keys
    attention = hidden * (inputs + queries), 4 * hidden + inputs + queries
    state, state_flops = _state(text, hidden) if has_state else (attention, 0.0)
    window = int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
    products = widths = local = per_square = 0.0
    for i, kind in enumerate(types):
        mixer = state if kind in _LINEAR_TYPES else attention
        mlp = _mlp(text, i)
        products += mixer[0] + mlp[0]
        widths += mixer[1] + mlp[1]
        if kind in _LINEAR_TYPES:
            local += state_flops
        elif kind in _SLIDING_TYPES:
            local += 4 * queries * window
        else:
            per_square += 2 * queries
    first = float(hidden * inputs)
    return Stack(first=first, rest=products - first, widths=widths, local=local, per_square=per_square)


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    types = text.get("layer_types") or text.get("layers_block_type")
    if types:
        return [str(kind) for kind in types]
    num_layers = int(text["num_hidden_layers"])
    if text.get("linear_num_value_heads"):
        every = int(text.get("full_attention_interval") or 4)
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    return ["full_attention"] * num_layers


def _state(text: Mapping[str, Any], hidden: int) -> tuple[tuple[int, int], float]:
    """Products and widths of a gated delta layer, and the FLOPs of its state for one token."""
    heads, values = int(text["linear_num_value_heads"]), int(text["linear_value_head_dim"])
    keys = int(text["linear_key_head_dim"])
    inner = heads * values
    inputs = 2 * int(text["linear_num_key_heads"]) * keys + 2 * inner + 2 * heads
    # In a chunk: keys and queries with keys, scores with values, a triangular system solved for keys and values; and
    # keys, queries and values with the state.
    flops = heads * (_STATE_CHUNK * (4.0 * keys + 2 * values + keys + values) + 6 * keys * values)
    return (hidden * (inputs + inner), 5 * hidden + inputs + inner), flops


def _mlp(text: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Multiply-adds of one layer's feed-forward part for one token, and the widths of its linear modules.

    Experts are one tensor and no linear modules.
    """
    hidden = int(text["hidden_size"])
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    dense_layers = text.get("mlp_only_layers") or ()
    every = int(text.get("decoder_sparse_step") or 1)
    first_dense = int(text.get("first_k_dense_replace") or 0)
    if not experts or layer in dense_layers or layer < first_dense or (layer + 1) % every:
        width = int(text.get("intermediate_size") or 4 * hidden)
        return 3 * hidden * width, 3 * (hidden + width)
    width = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden)
    shared = int(text.get("shared_expert_intermediate_size") or 0) + width * int(text.get("n_shared_experts") or 0)
    visited = int(text.get("num_experts_per_tok") or 1)
    return 3 * hidden * (width * visited + shared) + hidden * experts, 3 * (hidden + shared) if shared else 0


def _vision(config: Mapping[str, Any], text_hidden: int) -> tuple[Stack, Stack]:
    """A vision tower and its mergers, of one token that leaves them."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    depth = int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
    # Qwen2-VL's config calls the tower's width embed_dim and the text's hidden_size.
    hidden = int(vision.get("embed_dim") or vision.get("hidden_size") or 0)
    if not hidden or not depth:
        return Stack(), Stack()
    width = int(vision.get("intermediate_size") or hidden * float(vision.get("mlp_ratio") or 4))
    matrices = 3 if str(vision.get("hidden_act")) in _GATED else 2
    side = int(vision.get("patch_size") or 14)
    pixels = int(vision.get("in_channels") or vision.get("in_chans") or 3) * side**2
    pixels *= int(vision.get("temporal_patch_size") or 1)
    patches, window, num_full = _patches(config, vision, depth)
    layer = 4 * hidden**2 + matrices * hidden * width
    first = patches * 3 * hidden**2
    tower = Stack(
        embed=patches * pixels * hidden,
        first=first,
        rest=patches * depth * layer - first,
        widths=patches * depth * (6 * hidden + matrices * (hidden + width)),
        local=patches * (depth - num_full) * 4.0 * hidden * window,
        per_square=num_full * 4.0 * hidden,
    )
    out = int(vision.get("out_hidden_size") or text_hidden)
    merged = hidden * int(vision.get("spatial_merge_size") or 1) ** 2
    num_mergers = 1 + sum(int(i) < depth for i in vision.get("deepstack_visual_indexes") or ())
    aligner = Stack(
        first=float(num_mergers * merged**2),
        rest=float(num_mergers * merged * out),
        widths=float(num_mergers * (3 * merged + out)),
    )
    return tower, aligner


def _patches(config: Mapping[str, Any], vision: Mapping[str, Any], depth: int) -> tuple[float, int, int]:
    """Patches of a token, patches of a window, and how many layers look at whole frames."""
    side = int(vision.get("patch_size") or 14)
    if vision.get("spatial_merge_size"):
        merge = int(vision["spatial_merge_size"])
        whole = vision.get("fullatt_block_indexes")
        if whole is None or not vision.get("window_size"):
            return float(merge**2), 0, depth
        window = int(vision["window_size"]) // merge // side * merge
        return float(merge**2), window**2, sum(int(i) < depth for i in whole)
    # A tower that makes all pictures one size: each is a window, and the cache has no grid of it.
    of_picture = (int(vision.get("image_size") or side) // side) ** 2
    tokens = int(config.get("mm_tokens_per_image") or config.get("image_seq_length") or of_picture)
    return of_picture / tokens, of_picture, 0


def _audio(audio: Mapping[str, Any]) -> tuple[Stack, Stack]:
    """An audio tower, of one token; what of it is called aligner comes second.

    Attention sees windows, which count at their full width.
    """
    hidden, depth = int(audio.get("d_model") or 0), int(audio.get("encoder_layers") or 0)
    if not hidden or not depth:
        return Stack(), Stack(embeds=False)
    width, bins = int(audio.get("encoder_ffn_dim") or 4 * hidden), int(audio.get("num_mel_bins") or 128)
    out, window = int(audio.get("output_dim") or hidden), int(audio.get("n_window") or 100)
    layer, widths = 4 * hidden**2 + 2 * hidden * width, 8 * hidden + 2 * (hidden + width)
    channels = int(audio.get("downsample_hidden_size") or 0)
    if not channels:  # Qwen2.5-Omni: four frames make two positions, and these one token
        first = 2.0 * 3 * hidden**2
        stack = Stack(
            embed=4.0 * bins * 3 * hidden,
            convolutions=2.0 * 3 * hidden**2,
            first=first,
            rest=2.0 * depth * layer - first + hidden * out,
            widths=2.0 * depth * widths + hidden + out,
            local=2.0 * depth * 4 * hidden * window,
        )
        return stack, Stack(embeds=False)
    halves = [bins]
    for _ in _STRIDES:
        halves.append((halves[-1] - 1) // 2 + 1)
    positions = _STRIDES[-1]
    seen = int(audio.get("n_window_infer") or 8 * window) // (2 * window) * positions
    whole = [9 * channels * rows * columns / positions for rows, columns in zip(halves[1:], _STRIDES, strict=True)]
    joined = channels * halves[-1]
    stack = Stack(
        embed=whole[0],
        convolutions=channels * (whole[1] + whole[2]),
        first=float(joined * hidden),
        rest=float(depth * layer),
        widths=float(depth * widths + joined + hidden),
        local=depth * 4.0 * hidden * seen,
    )
    aligner = Stack(first=float(hidden**2), rest=float(hidden * out), widths=float(3 * hidden + out), embeds=False)
    return stack, aligner
