"""Estimates of a model's training cost, from its ``config.json``: FLOPs, bytes of weights and activations, and seconds.

A pack costs, with two operations for each multiply-add,

    per_token * tokens + per_square * sum(len^2) + per_target_token * targets                        language model
    + per_cross * sum(len * patches of a tile ^2)                                                    cross-attention
    + per_vision_token * vision tokens + per_patch_square * sum(patches of a frame ^2)               vision tower
    + per_audio_token * audio tokens                                                                 audio tower

In layers with attention windows, ``CostModel.window_squares`` replaces len^2. A forward pass counts once. A backward
pass counts once for the gradients of a product's inputs, if anything before it is trained, and once for the gradients
of its weights, if these are trained. Attention's backward counts 2.5 times its forward, because flash kernels compute
the scores again (Dao 2023, "FlashAttention-2", section 4.1).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.config.model import LearningOptions
from packtool.encode.families import thinker_of
from packtool.planning.layers import (
    ModelLayers,
    Trainable,
    attention_weights,
    attention_widths,
    expert_widths,
    language_config,
    trainable,
)
from packtool.planning.module_cost import ModuleCost
from packtool.planning.pack_plan import Costs, Int64Array, IntArray

_ATTENTION_BACKWARD = 2.5
_FRAME_MERGE = 4  # patches of a frame that VideoLLaMA 3 merges to a token
ALL_WEIGHTS = LearningOptions(train_type="full", freeze_vit=False, freeze_aligner=False)
"""Options that train every weight."""

_BYTES_PER_NUMBER = 2  # bfloat16
# Adam in mixed precision: a master copy and two moments in 32 bits (Rajbhandari et al. 2020, "ZeRO", section 3.1).
_OPTIMIZER_BYTES = 12

_WIDTHS = "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"
_QWEN = {"vocab_size": 151936, "model_type": "qwen2"}
MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "8b": {**dict(zip(_WIDTHS, (4096, 36, 32, 8, 12288), strict=True)), "head_dim": 128, "vocab_size": 151936},
    "qwen2.5-0.5b": {**_QWEN, **dict(zip(_WIDTHS, (896, 24, 14, 2, 4864), strict=True)), "tie_word_embeddings": True},
    "qwen2.5-7b": {**_QWEN, **dict(zip(_WIDTHS, (3584, 28, 28, 4, 18944), strict=True)), "vocab_size": 152064},
}
"""Sizes in the models' public ``config.json``; 8b, those of Qwen3-8B, is the default where no model is named."""


@dataclass(frozen=True)
class CostModel:
    """FLOPs of forward and backward passes, for each unit of a pack's work.

    Args:
        per_token: of a token, in the layers of the language model.
        per_square: of a unit of sum(len^2); half of the full square, as attention is causal.
        per_target_token: of a label, in the head, since logits are computed for labels only.
        per_vision_token: of a token of an image or video, in the tower, the aligner, and as keys and values of
            cross-attention; 0 for towers of tiles.
        per_patch_square: of a unit of the sum over frames, or tiles, of (patches of the frame)^2.
        per_audio_token: of a token of a sound, in the tower and the aligner.
        per_cross: of a unit of a sample's length multiplied by its sum of (patches of a tile)^2, in cross-attention.
        per_window: of a unit of ``window_squares``.
        window: size of attention windows in tokens.
        squares_per_token: estimate of the squares per vision token, for media without them.
        padded_merge: patches of a vision token, if the tower also computes patches without tokens: padding of pictures
            and frames (Gemma 4), or parts of videos that the processor leaves out (VideoLLaMA 3). Otherwise 0.
        merger_share: fraction of ``per_vision_token`` in the mergers, if ``ModelLayers.merges_frames``; otherwise 0.
        in_chunks: windows are consecutive chunks of ``window`` tokens, and do not slide.
    """

    per_token: float
    per_square: float
    per_target_token: float = 0.0
    per_vision_token: float = 0.0
    per_patch_square: float = 0.0
    per_audio_token: float = 0.0
    per_cross: float = 0.0
    per_window: float = 0.0
    window: int = 0
    in_chunks: bool = False
    squares_per_token: float = 0.0
    padded_merge: int = 0
    merger_share: float = 0.0

    def __call__(
        self,
        tokens: IntArray,
        attention_flops: npt.NDArray[Any] | float,
        target_tokens: IntArray | int = 0,
        tower_flops: npt.NDArray[Any] | float = 0,
    ) -> Costs:
        """Compute the FLOPs of packs or samples, of one shape, (K,); ``target_tokens`` are the tokens with logits."""
        cost: Costs = tokens * self.per_token + attention_flops
        return cost + np.asarray(target_tokens) * self.per_target_token + tower_flops

    def attention(self, lengths: IntArray, shared: IntArray | None = None) -> Costs:
        """Compute attention's FLOPs for lengths with prefixes, of any shape, of which others compute ``shared``."""
        squares = np.square(lengths, dtype=np.int64)
        if shared is not None:
            squares = squares - np.square(shared, dtype=np.int64)
        return self.attention_of(squares, self.window_squares(lengths, shared))

    def attention_of(self, squares: IntArray, windows: IntArray) -> Costs:
        """Compute the FLOPs of attention from sums of squares and of ``window_squares``, of any shape."""
        return squares * self.per_square + windows * self.per_window

    def window_squares(self, lengths: IntArray, shared: IntArray | None = None) -> Int64Array:
        """Compute the equivalent of squared lengths in layers with windows; arguments as for ``attention``."""
        tokens = lengths.astype(np.int64)
        if self.in_chunks:
            squares: Int64Array = tokens // self.window * self.window**2 + (tokens % self.window) ** 2
        else:
            seen = np.minimum(tokens, self.window)
            squares = seen * (2 * tokens - seen)
        return squares if shared is None else squares - self.window_squares(shared)

    def padded_tokens(
        self, vision_tokens: npt.NDArray[Any], patch_squares: npt.NDArray[Any], picture_squares: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """Return the vision tokens of samples, of any shape, as if all patches that the tower computes made tokens.

        n pictures, each of P patches with padding, have ``picture_squares`` of P^2, and ``patch_squares`` of n P^2.
        Mergers compute a token for each 2 x 2 patches of a frame, and one for each patch of a picture.
        """
        if not self.padded_merge:
            return vision_tokens
        num_patches = patch_squares / np.sqrt(np.maximum(picture_squares, 1))
        tokens = np.maximum(vision_tokens, num_patches / self.padded_merge)
        num_merged = np.maximum(vision_tokens, num_patches / _FRAME_MERGE)
        return tokens - (tokens - num_merged) * self.merger_share

    def towers(
        self,
        vision_tokens: npt.NDArray[Any],
        patch_squares: npt.NDArray[Any],
        audio_tokens: npt.NDArray[Any] | int = 0,
    ) -> Costs:
        """Compute the FLOPs of the towers for the media of packs, samples or single images, of any shape.

        ``vision_tokens`` are ``padded_tokens``, ``patch_squares`` is the sum over frames of (patches of the frame)^2,
        and ``audio_tokens`` include those of videos.
        """
        squares = self.squares_of(vision_tokens, patch_squares)
        cost: Costs = vision_tokens * self.per_vision_token + squares * self.per_patch_square
        return cost + np.asarray(audio_tokens) * self.per_audio_token

    def cross_attention(self, lengths: IntArray, patch_squares: npt.NDArray[Any]) -> Costs:
        """Compute the FLOPs of cross-attention of samples to all pictures of each, (N,); 0 for most models."""
        return lengths * (patch_squares * self.per_cross)

    def squares_of(self, vision_tokens: npt.NDArray[Any], patch_squares: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return ``patch_squares``, estimated for media without them, of any shape."""
        return np.where(patch_squares == 0, vision_tokens * self.squares_per_token, patch_squares)

    @classmethod
    def of_8b(cls) -> CostModel:
        """Return the costs of a dense model of 8 billion weights, the default where no model is named."""
        return cls.of_config(MODEL_PRESETS["8b"])

    @classmethod
    def of_config(
        cls,
        config: Mapping[str, Any],
        learning: LearningOptions = ALL_WEIGHTS,
        *,
        recomputes_language: bool | int = False,
        recomputes_towers: bool = False,
        recomputes_head: bool = False,
    ) -> CostModel:
        """Compute costs from a ``config.json``; a KeyError if it has no hidden size or number of layers.

        ``learning`` selects the trained weights. ``recomputes_...``: backward runs the forward pass of that part again;
        a number is that of its first layers.
        """
        layers = ModelLayers.of_config(config)
        flops = partial(_part_flops, trainable(layers, learning), learning.lora_rank)
        # Each part reads the output of the one before: it computes the gradient of its input if that one is trained.
        vision = flops(layers.vision, recomputes=recomputes_towers)
        mergers = [flops(merger, has_input_gradient=vision.has_output_gradient) for merger in layers.mergers]
        audio = flops(layers.audio, recomputes=recomputes_towers)
        audio_aligner = flops(layers.audio_aligner, has_input_gradient=audio.has_output_gradient)
        media_has_gradient = any(part.has_output_gradient for part in (audio, audio_aligner, *mergers))
        cross_keys = flops(layers.cross_keys, has_input_gradient=media_has_gradient, recomputes=recomputes_language)
        language = flops(
            layers.language,
            has_input_gradient=media_has_gradient and not layers.cross_keys,  # else media enter by cross-attention
            has_cross_gradient=cross_keys.has_output_gradient,
            recomputes=recomputes_language,
        )
        head_layer = dataclasses.replace(layers.head, layer=0)  # only layers can be recomputed
        head = flops([head_layer], has_input_gradient=language.has_output_gradient, recomputes=recomputes_head)
        per_vision_token, per_patch_square = _vision_flops(vision, mergers, layers.tile_squares)
        merger_flops = sum(merger.per_unit for merger in mergers)
        return cls(
            per_token=language.per_unit,
            per_square=language.per_square,
            per_target_token=head.per_unit,
            per_vision_token=per_vision_token + cross_keys.per_unit,
            per_patch_square=per_patch_square,
            per_audio_token=audio.per_unit + audio_aligner.per_unit,
            per_cross=language.per_cross,
            per_window=language.per_window,
            window=layers.window,
            in_chunks=layers.in_chunks,
            squares_per_token=layers.squares_per_token,
            padded_merge=layers.padded_merge,
            merger_share=merger_flops / per_vision_token if layers.merges_frames else 0.0,
        )


class _PartFlops(NamedTuple):
    """FLOPs of a part of a model, for the units of ``CostModel``.

    ``has_output_gradient``: backward computes the gradient of the part's output.
    """

    per_unit: float
    per_square: float
    per_window: float
    per_cross: float
    has_output_gradient: bool


def _part_flops(
    training: Mapping[str, Trainable],
    lora_rank: int,
    modules: Sequence[ModuleCost],
    *,
    has_input_gradient: bool = False,
    has_cross_gradient: bool = False,
    recomputes: bool | int = False,
) -> _PartFlops:
    """Sum the FLOPs of consecutive modules of a model, forward and backward.

    Args:
        training: which weights of a module are trained, by the module's name; attention has none.
        lora_rank: of the adapters, if there are any.
        has_input_gradient: backward computes the gradient of the first module's input.
        has_cross_gradient: backward computes the gradients of the keys and values of cross-attention.
        recomputes: backward runs the forward pass again, of all layers or of that number of first layers.
    """
    is_trained = [
        has_cross_gradient and module.flops_per_cross > 0 if module.kind == "attention" else training[module.name].any
        for module in modules
    ]
    # Backward reaches a module if that one, or anything before it, is trained.
    is_reached = list(accumulate(is_trained, operator.or_, initial=has_input_gradient))  # before all, and after each
    reached_before, reached_after = is_reached[:-1], is_reached[1:]
    recomputed_layers = _recomputed_layers(modules, reached_after, recomputes)
    per_unit = per_square = per_window = per_cross = 0.0
    num_input_gradients = _num_input_gradients(modules, reached_before)
    for module, needs_gradient, num_gradients in zip(modules, is_trained, num_input_gradients, strict=True):
        num_forward = 2.0 if module.layer in recomputed_layers else 1.0
        if module.kind == "attention":
            num_passes = num_forward + _ATTENTION_BACKWARD * max(num_gradients, needs_gradient)
            per_unit += num_passes * module.flops_per_unit
            per_square += num_passes * module.flops_per_square
            per_window += num_passes * module.flops_per_window
            per_cross += num_passes * module.flops_per_cross
            continue
        weights = training[module.name].weights
        num_passes = num_forward + num_gradients
        num_weight_gradients = 1.0 if weights == "full" else 0.0
        per_unit += 2 * module.num_products * (num_passes + num_weight_gradients)  # a multiply-add is two operations
        if weights == "lora":
            per_unit += _adapter_flops(module, lora_rank, num_forward, num_passes)
    return _PartFlops(per_unit, per_square, per_window, per_cross, has_output_gradient=is_reached[-1])


def _num_input_gradients(modules: Sequence[ModuleCost], is_reached_before: Sequence[bool]) -> Iterator[float]:
    """Yield 1.0 for each module whose input gradient backward computes, for earlier modules, and 0.0 for others."""
    num_gradients = 0.0
    for module, is_reached in zip(modules, is_reached_before, strict=True):
        # Modules that share an input, such as Q, K and V, need its gradient if the first of them does.
        if not module.shares_input:
            num_gradients = float(is_reached)
        yield num_gradients


def _vision_flops(vision: _PartFlops, mergers: Sequence[_PartFlops], tile_squares: int) -> tuple[float, float]:
    """Return the FLOPs of a vision tower and its mergers for a token, and for a unit of squared patches."""
    per_unit = vision.per_unit + sum(merger.per_unit for merger in mergers)
    if not tile_squares:
        return per_unit, vision.per_square
    # The unit is a tile. Caches do not count tiles, but squared patches, equally many in each tile.
    return 0.0, vision.per_square + per_unit / tile_squares


def _recomputed_layers(modules: Sequence[ModuleCost], is_reached: list[bool], recomputes: bool | int) -> set[int]:
    """Return the layers whose forward pass is run again: those that backward reaches, of all or of the first."""
    layers = {m.layer for m, reached in zip(modules, is_reached, strict=True) if reached and m.layer is not None}
    if recomputes is True:
        return layers
    return {layer for layer in layers if layer < recomputes}


def _adapter_flops(module: ModuleCost, rank: int, num_forward: float, num_passes: float) -> float:
    """Compute the FLOPs of a module's LoRA adapter, forward and backward.

    ``num_passes`` are the forward passes, and the gradient of the module's input if it is needed.
    """
    # Two products, with a gradient of the weights each: inputs to rank (for embeddings a lookup, without FLOPs), and
    # rank to outputs, which also needs the gradient of its input.
    to_rank = 0.0 if module.kind == "no_matmul" else module.inputs * (num_passes + 1)
    to_outputs = module.outputs * (num_forward + 1 + 1)
    return 2 * module.uses_per_unit * rank * (to_rank + to_outputs)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Weights, activations and attention heads of a dense or sparse decoder; all bytes are in bfloat16.

    Args:
        num_parameters: weights, including those of all experts.
        kept_bytes: activations of a token that a layer keeps for its backward pass.
        input_bytes: the layer's input among them, the only one kept with recomputation.
        query_bytes: queries of a token in a layer; the output of attention has the same size.
        kv_bytes: keys and values of a token in a layer.
        num_heads, num_key_heads: of queries, and of keys and values.
    """

    cost: CostModel
    num_parameters: int
    num_layers: int
    kept_bytes: int
    input_bytes: int
    query_bytes: int
    kv_bytes: int
    num_heads: int
    num_key_heads: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Compute the sizes of a language model from its ``config.json``; a KeyError if it lacks widths."""
        config = thinker_of(config)  # the trained part of an Omni model
        text = language_config(config)
        hidden, num_layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        attention = attention_widths(text)
        mlp = expert_widths(text)
        token_mlp_width = mlp.expert_width * mlp.experts_per_token + mlp.shared_width
        # Numbers that a layer keeps of a token. Flash attention keeps no scores.
        kept = 5 * hidden  # two residuals, the results of two norms, and the projected output of attention
        kept += 3 * attention.queries  # queries before and after RoPE, and the output of attention
        kept += 2 * attention.keys + attention.values  # keys before and after RoPE, and values
        kept += 4 * token_mlp_width  # gate, up, the activated gate, and the product
        return cls(
            cost=CostModel.of_config(config),
            num_parameters=_num_parameters(config, text),
            num_layers=num_layers,
            kept_bytes=_BYTES_PER_NUMBER * kept,
            input_bytes=_BYTES_PER_NUMBER * hidden,
            query_bytes=_BYTES_PER_NUMBER * attention.queries,
            kv_bytes=_BYTES_PER_NUMBER * (attention.keys + attention.values),
            num_heads=attention.num_heads,
            num_key_heads=attention.num_key_heads,
        )

    @classmethod
    def or_8b(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Return the sizes of a model, or of one of 8 billion weights if its ``config.json`` lacks widths."""
        try:
            return cls.of_config(config)
        except (KeyError, TypeError, ValueError):
            return cls.of_config(MODEL_PRESETS["8b"])

    def state_bytes(self, num_ranks: int, zero_stage: int = 2) -> float:
        """Return the bytes of weights, gradients and optimizer on one rank; ZeRO-3 also holds two gathered layers."""
        share = 1.0 if zero_stage == 2 else 1 / num_ranks + 2 / self.num_layers
        return self.num_parameters * (_BYTES_PER_NUMBER * share + (_BYTES_PER_NUMBER + _OPTIMIZER_BYTES) / num_ranks)

    def token_bytes(self, *, recompute: bool) -> float:
        """Return a token's bytes of activations in all layers: with recomputation all inputs, and one layer in full."""
        if recompute:
            return float(self.num_layers * self.input_bytes + self.kept_bytes)
        return float(self.num_layers * self.kept_bytes)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, or of their gradients, when they are communicated."""
        return float(_BYTES_PER_NUMBER * self.num_parameters)


def _num_parameters(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Count the weights of a language model, from the model's config and that of its text part."""
    hidden = int(text["hidden_size"])
    mlp = expert_widths(text)
    mlp_weights = 3 * hidden * (mlp.expert_width * max(mlp.num_experts, 1) + mlp.shared_width)
    has_tied_embeddings = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
    num_embeddings = 1 if has_tied_embeddings else 2
    embedding_weights = num_embeddings * hidden * int(text.get("vocab_size") or 0)
    return int(text["num_hidden_layers"]) * (attention_weights(text) + mlp_weights) + embedding_weights


class Load(NamedTuple):
    """FLOPs of sequences, and the part of them that is attention."""

    flops: float
    attention: float

    def plus(self, other: Load) -> Load:
        return Load(self.flops + other.flops, self.attention + other.attention)

    def minus(self, other: Load) -> Load:
        """Subtract a part of this load; rounding errors leave no less than 0."""
        return Load(max(self.flops - other.flops, 0.0), max(self.attention - other.attention, 0.0))

    @staticmethod
    def sum(loads: Iterable[Load]) -> Load:
        """Add up loads in their order."""
        return reduce(Load.plus, loads, NO_LOAD)


NO_LOAD = Load(0.0, 0.0)


@dataclass(frozen=True)
class Exchange:
    """One kind of communication between the ranks that share a micro-batch, repeated in every layer.

    Args:
        times: number of repetitions: layers, passes and hops.
        fixed_seconds: minimum of one repetition.
        token_seconds: of one repetition, for each sharded token of all ranks, where that is longer.
        overlap_local: share of a rank's attention to its local sequences, 0 to 1, that hides the exchange.
        overlap_sharded: the same of its attention to sharded sequences.
    """

    times: int
    fixed_seconds: float
    token_seconds: float
    overlap_local: float = 0.0
    overlap_sharded: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of all repetitions for ``num_tokens`` sharded tokens."""
        return self.times * max(self.fixed_seconds, num_tokens * self.token_seconds) if num_tokens else 0.0


@dataclass(frozen=True)
class StepTime:
    """Speed of a device and of the links between devices, to estimate the time of micro-batches.

    N ranks share a micro-batch. Each computes its local sequences and its part of the sharded ones. In every layer,
    keys and values (or heads) of sharded sequences are exchanged, which only attention can hide:

        time(j) = computation(local to j) + computation(sharded) / N
                  + sum over exchanges of max(0, seconds of the exchange - attention of rank j that hides it)
        time    = max over ranks j of time(j), and no less than launching the kernels takes

    FLOPs count at the speed of large matrix products. Attention is slower, and slower still with few queries at once: a
    sequence of s tokens costs ``square_flops * s^2`` more, and ``query_flops * s`` on every rank that works on it.

    The defaults are those of ``CostModel.of_8b`` (36 layers, 32 heads of 128 for Q and 8 for K and V, 16 bits) on
    H100s: 40 % of 989 TFLOP/s, and an all-gather measured at 53, 489 and 6468 us for 2, 64 and 1024 MB.

    ``attention_flops``, of a unit of s^2, are included in the FLOPs of sequences. Every micro-batch costs
    ``batch_flops`` more, and takes at least ``launch_seconds``. With shared prefixes, gathering keys and values takes
    ``key_seconds`` for each key of a document.
    """

    flops_per_second: float = 0.4 * 989e12
    exchanges: tuple[Exchange, ...] = (
        Exchange(36, 53e-6, 2 * 8 * 128 * 2 / 160e9, overlap_local=1 / 3.5),
        Exchange(36, 53e-6, 2 * 8 * 128 * 2 / 160e9, overlap_local=2.5 / 3.5),
        Exchange(36, 53e-6, 2 * 8 * 128 * 4 / 160e9),
    )
    attention_flops: float = 36 * 2 * 32 * 128 * 3.5
    square_flops: float = 0.0
    query_flops: float = 0.0
    batch_flops: float = 0.0
    launch_seconds: float = 0.0
    key_seconds: float = 0.0
    device: str = "H100"

    def work(self, lengths: IntArray, flops: Costs, num_ranks: int = 1) -> tuple[Costs, Costs]:
        """Compute the work of sequences and attention's part of it, (n,) each, both with the slowness of attention.

        ``lengths`` and ``flops`` are of each sequence; ``num_ranks`` share each, and results are sums over them.
        """
        sizes = np.asarray(lengths, dtype=np.float64)
        slower = sizes * (self.square_flops * sizes + self.query_flops * num_ranks)
        return flops + slower, self.attention_flops * sizes**2 + slower

    def loads(self, lengths: IntArray, flops: Costs, num_ranks: int = 1) -> list[Load]:
        """Return ``work`` of each sequence as a list."""
        work, attention = self.work(lengths, flops, num_ranks)
        return list(map(Load, work.tolist(), attention.tolist()))

    def micro_batch(self, local: Sequence[Load], sharded: Load, sharded_tokens: int, num_ranks: int) -> float:
        """Estimate the seconds of a micro-batch on ``num_ranks`` ranks.

        ``local`` is the work of the sequences local to each rank (ranks with equal work may be listed once),
        ``sharded`` that of all sharded sequences, summed over the ranks. ``sharded_tokens`` include padding.
        """
        if num_ranks > 1 and sharded_tokens:
            busiest_flops = self._flops_with_exchanges(local, sharded.attention / num_ranks, sharded_tokens)
        else:
            busiest_flops = max(local).flops
        flops = busiest_flops + sharded.flops / num_ranks + self.batch_flops
        return max(self.launch_seconds, flops / self.flops_per_second)

    def _flops_with_exchanges(self, local: Sequence[Load], sharded_attention: float, sharded_tokens: int) -> float:
        """Return the FLOPs of the busiest rank's local sequences, and of its waiting for exchanges.

        Ranks exchange tensors of sharded sequences while they compute attention, which hides a part of the exchange.
        The remaining seconds count as the FLOPs that a rank could compute meanwhile.

        Args:
            local: work of the sequences that each rank computes alone.
            sharded_attention: FLOPs of attention to sharded sequences, on every rank.
        """
        waiting_of_all_ranks = 0.0
        partly_hidden = []  # FLOPs of exchanges, and the share of a rank's local attention during which they run
        for exchange in self.exchanges:
            exchange_flops = self.flops_per_second * exchange.seconds(sharded_tokens)
            remaining = exchange_flops - exchange.overlap_sharded * sharded_attention
            if remaining > 0 and exchange.overlap_local:
                partly_hidden.append((remaining, exchange.overlap_local))
            elif remaining > 0:
                waiting_of_all_ranks += remaining
        rank_flops = []
        for load in local:
            waiting = sum([max(0.0, remaining - share * load.attention) for remaining, share in partly_hidden])
            rank_flops.append(load.flops + waiting)
        return waiting_of_all_ranks + max(rank_flops)

    def exposed_seconds(self, sharded_tokens: Costs, local_attention: Costs, sharded_attention: Costs) -> Costs:
        """Estimate the seconds of exchanges that attention does not hide, (n,), for n ranks at once.

        ``sharded_tokens`` are of the micro-batch of each rank; the seconds of attention are forward and backward.
        """
        seconds = np.zeros(len(sharded_tokens))
        for exchange in self.exchanges:
            travel = exchange.times * np.maximum(exchange.fixed_seconds, sharded_tokens * exchange.token_seconds)
            hidden = exchange.overlap_local * local_attention + exchange.overlap_sharded * sharded_attention
            seconds += np.where(sharded_tokens > 0, np.maximum(travel - hidden, 0.0), 0.0)
        return seconds
