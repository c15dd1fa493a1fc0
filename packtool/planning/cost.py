"""Training cost of a model, from its ``config.json``: FLOPs of packs, bytes of weights and activations, and seconds.

Attention's work grows with the square of each sample's length, and every patch of an image attends to all patches of
its frame. A pack costs

    per_token * tokens + per_square * sum(len^2) + per_target_token * targets                        language model
    + per_vision_token * vision tokens + per_patch_square * sum(patches of a frame ^2)               vision tower
    + per_audio_token * audio tokens                                                                 audio tower

with two operations for each multiply-add; for attention windows, len^2 is replaced by ``CostModel.window_squares``.
Forward counts once. Backward counts once more for the gradients of a product's inputs, where anything before it is
trained, and once more for the gradients of its weights, where these are trained. Attention's backward is 2.5 times its
forward: flash kernels compute the scores again (Dao 2023, "FlashAttention-2", section 4.1).

Trained weights are selected by module names, by the rules of ``LearningOptions`` that training applies, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.config.model import LearningOptions
from packtool.encode.families import text_config_of, thinker_of
from packtool.planning.layers import ModelLayers, Step, Trainable, attention_widths, expert_widths, trainable
from packtool.planning.pack_plan import Costs, Int64Array, IntArray

_ATTENTION_BACKWARD = 2.5
ALL_WEIGHTS = LearningOptions(train_type="full", freeze_vit=False, freeze_aligner=False)
"""Options that train every weight."""

_BYTES = 2  # bfloat16
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
    """FLOPs of forward and backward.

    Args:
        per_token: of each token, in the layers of the language model.
        per_square: of each unit of sum(len^2): causal attention, so half of the full square.
        per_target_token: of each label: the head, since logits are computed for labels only.
        per_vision_token: of each token of an image or video, in its tower and the aligner.
        per_patch_square: of each unit of the sum over frames of (patches of the frame)^2.
        per_audio_token: of each token of a sound.
        per_window: of each unit of ``window_squares``.
        window: tokens that sliding layers see.
        in_chunks: the window does not slide: layers see their chunk of ``window`` tokens.
    """

    per_token: float
    per_square: float
    per_target_token: float = 0.0
    per_vision_token: float = 0.0
    per_patch_square: float = 0.0
    per_audio_token: float = 0.0
    per_window: float = 0.0
    window: int = 0
    in_chunks: bool = False

    def __call__(
        self,
        tokens: IntArray,
        attention_flops: npt.NDArray[Any] | float,
        target_tokens: IntArray | int = 0,
        tower_flops: npt.NDArray[Any] | float = 0,
    ) -> Costs:
        """FLOPs of packs (or samples); arguments and result of one shape.

        ``attention_flops`` are those of ``attention``, ``target_tokens`` those with logits, ``tower_flops`` those of
        ``towers``.
        """
        cost: Costs = tokens * self.per_token + attention_flops
        return cost + np.asarray(target_tokens) * self.per_target_token + tower_flops

    def attention(self, lengths: IntArray, shared: IntArray | None = None) -> Costs:
        """FLOPs of the language model's attention, for samples of any shape.

        Args:
            lengths: of samples including their prefixes.
            shared: tokens of each sample's prefix that are computed elsewhere.
        """
        squares = np.square(lengths, dtype=np.int64)
        if shared is not None:
            squares = squares - np.square(shared, dtype=np.int64)
        return self.attention_of(squares, self.window_squares(lengths, shared))

    def attention_of(self, squares: IntArray, windows: IntArray) -> Costs:
        """FLOPs of the language model's attention, from sums of squares and of ``window_squares``, of any shape."""
        flops: Costs = squares * self.per_square + windows * self.per_window
        return flops

    def window_squares(self, lengths: IntArray, shared: IntArray | None = None) -> Int64Array:
        """Equivalent of squared lengths in layers with windows of w tokens; 0 without; arguments as for ``attention``.

        Sliding layers: min(len, w) * (2 len - min(len, w)). Chunks: w^2 for each full chunk and the square of the rest.
        """
        tokens = lengths.astype(np.int64)
        if self.in_chunks:
            squares: Int64Array = tokens // self.window * self.window**2 + (tokens % self.window) ** 2
        else:
            seen = np.minimum(tokens, self.window)
            squares = seen * (2 * tokens - seen)
        return squares if shared is None else squares - self.window_squares(shared)

    def towers(
        self,
        vision_tokens: npt.NDArray[Any],
        patch_squares: npt.NDArray[Any],
        audio_tokens: npt.NDArray[Any] | int = 0,
    ) -> Costs:
        """FLOPs of the towers for media of packs, samples or images, of any shape.

        Args:
            vision_tokens: of images and videos.
            patch_squares: sum over their frames of (patches of the frame)^2.
            audio_tokens: of sounds, including those of videos.
        """
        cost: Costs = vision_tokens * self.per_vision_token + patch_squares * self.per_patch_square
        return cost + np.asarray(audio_tokens) * self.per_audio_token

    @classmethod
    def of_8b(cls) -> CostModel:
        """Costs of a dense model of 8 billion weights, the default where no model is named."""
        return cls.of_config(MODEL_PRESETS["8b"])

    @classmethod
    def of_config(
        cls,
        config: Mapping[str, Any],
        learning: LearningOptions = ALL_WEIGHTS,
        *,
        recomputes_language: bool = False,
        recomputes_towers: bool = False,
        recomputes_head: bool = False,
    ) -> CostModel:
        """Read the widths of a ``config.json``.

        Args:
            learning: options that select the trained weights.
            recomputes_language, recomputes_towers, recomputes_head: forward runs again before their backward pass.

        Raises:
            KeyError: if the configuration names no hidden size or number of layers.
        """
        layers = ModelLayers.of_config(config)
        flops = partial(_flops, trainable(layers, learning), learning.lora_rank)
        vision, vision_square, _, vision_learns = flops(layers.vision, recomputes=recomputes_towers)
        audio, _, _, audio_learns = flops(layers.audio, recomputes=recomputes_towers)
        mergers = [flops(merger, has_gradient=vision_learns) for merger in layers.mergers]
        aligner, _, _, aligner_learns = flops(layers.audio_aligner, has_gradient=audio_learns)
        has_gradient = audio_learns or aligner_learns or any(learns for *_, learns in mergers)
        language = flops(layers.language, has_gradient=has_gradient, recomputes=recomputes_language)
        head = dataclasses.replace(layers.head, layer=0)  # recomputed like a layer
        return cls(
            per_token=language[0],
            per_square=language[1],
            per_target_token=flops([head], has_gradient=language[3], recomputes=recomputes_head)[0],
            per_vision_token=vision + sum(merger for merger, *_ in mergers),
            per_patch_square=vision_square,
            per_audio_token=audio + aligner,
            per_window=language[2],
            window=layers.window,
            in_chunks=layers.in_chunks,
        )


def _flops(
    training: Mapping[str, Trainable],
    rank: int,
    steps: Sequence[Step],
    *,
    has_gradient: bool = False,
    recomputes: bool = False,
) -> tuple[float, float, float, bool]:
    """Add up the steps of a part: FLOPs of each unit, of its squares and of its windows; and if it is trained.

    ``rank`` is that of adapters; ``has_gradient`` means that anything before the part is trained.
    """
    gradients = [has_gradient]  # before each step, and after the last one
    for step in steps:
        gradients.append(gradients[-1] or training.get(step.name, Trainable()).any)
    layer_has_gradient = {step.layer: after for step, after in zip(steps, gradients[1:], strict=True)}
    flops = per_square = per_window = 0.0
    before = has_gradient
    for step, has_input_gradient in zip(steps, gradients, strict=False):
        before = before if step.beside else has_input_gradient
        again = float(recomputes and step.layer is not None and layer_has_gradient[step.layer])
        if step.kind == "attention":
            passes = 1 + again + _ATTENTION_BACKWARD * has_input_gradient
            flops += passes * step.local
            per_square += passes * step.per_square
            per_window += passes * step.per_window
            continue
        weights = training[step.name].weights
        flops += 2 * step.num_products * (1 + again + before + (weights == "full"))
        if weights == "lora":
            # Two products; the input of the first one may have no gradient.
            widths = step.inputs * (2 + again + before) * (step.kind != "lookup") + step.outputs * (3 + again)
            flops += 2 * step.times * rank * widths
    return flops, per_square, per_window, gradients[-1]


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Weights, bytes and operations of a dense or sparse decoder, in bfloat16.

    Args:
        num_parameters: all weights, of all experts.
        kept_bytes: activations of a token that a layer keeps for its backward pass.
        input_bytes: the layer's input among them, which alone is kept with recomputation.
        query_bytes: queries of a token in a layer; attention's output has the same size.
        kv_bytes: keys and values of a token in a layer, which context parallelism gathers.
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
        """Read the widths of a ``config.json``; only the text tower is counted.

        A layer keeps, in numbers of a token: two residuals, two norms' results and the attention's projected output (5
        h); queries before and after RoPE and the attention's result (3 q); keys twice and values (3 kv); gate, up, the
        activated gate and the product (4 i, of the token's experts). Neither scores (flash attention) nor logits are
        kept.

        Raises:
            KeyError: if the configuration names no hidden size or number of layers.
        """
        config, text = thinker_of(config), text_config_of(config)
        hidden, num_layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads, key_heads, queries, keys = attention_widths(text)
        experts, width, visited, shared = expert_widths(text)
        layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * (width * max(experts, 1) + shared)
        embeddings = hidden * int(text.get("vocab_size") or 0)
        tied = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
        return cls(
            cost=CostModel.of_config(config),
            num_parameters=num_layers * layer + embeddings * (1 if tied else 2),
            num_layers=num_layers,
            kept_bytes=_BYTES * (5 * hidden + 3 * queries + 3 * keys + 4 * (width * visited + shared)),
            input_bytes=_BYTES * hidden,
            query_bytes=_BYTES * queries,
            kv_bytes=_BYTES * 2 * keys,
            num_heads=heads,
            num_key_heads=key_heads,
        )

    @classmethod
    def or_8b(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Sizes of a model, or of one of 8 billion weights if its ``config.json`` lacks widths."""
        try:
            return cls.of_config(config)
        except (KeyError, TypeError, ValueError):
            return cls.of_config(MODEL_PRESETS["8b"])

    def state_bytes(self, num_ranks: int, zero_stage: int = 2) -> float:
        """Bytes of weights, gradients and optimizer states on one rank; ZeRO-3 gathers two layers at a time."""
        share = 1.0 if zero_stage == 2 else 1 / num_ranks + 2 / self.num_layers
        return self.num_parameters * (_BYTES * share + (_BYTES + _OPTIMIZER_BYTES) / num_ranks)

    def token_bytes(self, *, recompute: bool) -> float:
        """Bytes of one token's activations in all layers; with recomputation, the layers' inputs and one full layer."""
        if recompute:
            return float(self.num_layers * self.input_bytes + self.kept_bytes)
        return float(self.num_layers * self.kept_bytes)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, and of their gradients, in communication."""
        return float(_BYTES * self.num_parameters)


class Load(NamedTuple):
    """FLOPs, and the part of them that is attention's."""

    flops: float
    attention: float

    def plus(self, other: Load) -> Load:
        """Add two loads."""
        return Load(self.flops + other.flops, self.attention + other.attention)

    @staticmethod
    def sum(loads: Iterable[Load]) -> Load:
        """Add up loads, in their order."""
        return reduce(Load.plus, loads, NOTHING)


NOTHING = Load(0.0, 0.0)
"""No work."""


@dataclass(frozen=True)
class Exchange:
    """Repeated communication of one kind in a micro-batch.

    Args:
        times: repetitions: layers, passes and hops.
        fixed_seconds: minimum of one exchange.
        token_seconds: of one exchange for each sharded token (of all ranks), where that is longer.
        behind_local: share of a rank's attention to its local sequences, forward and backward, that overlaps with it.
        behind_sharded: the same of its attention to sharded ones.
    """

    times: int
    fixed_seconds: float
    token_seconds: float
    behind_local: float = 0.0
    behind_sharded: float = 0.0

    def travel(self, num_tokens: int) -> float:
        """Seconds of all repetitions for ``num_tokens`` sharded tokens."""
        return self.times * max(self.fixed_seconds, num_tokens * self.token_seconds) if num_tokens else 0.0


@dataclass(frozen=True)
class StepTime:
    """Speed of a device and of the links between devices, by which Skrull compares placements.

    N ranks share a micro-batch. Each computes its local sequences and its part of the sharded ones, and in every layer
    keys and values (or heads) of the sharded ones travel. Only attention overlaps with that: the layer's other work
    needs its result. With the ``Exchange`` records of a micro-batch, one for each kind,

        time(j) = computation(local to j) + computation(sharded) / N + sum over exchanges of max(0, travel - attention
                  of rank j that runs meanwhile)
        time    = max over ranks j of time(j), and no less than launching the kernels takes

    Computation is given in FLOPs of large matrix products. Attention is slower than these, and slower still with few
    queries at once: a sequence of s tokens costs ``square_flops * s^2`` more, and ``query_flops * s`` on every rank
    that works on it, which is the cost of sharding short sequences.

    The defaults are those of a dense model of 8 billion weights (``CostModel.of_8b``: 36 layers, 32 heads of 128 for Q
    and 8 for K and V, 16 bits) on H100s: 40 % of 989 TFLOP/s, and an all-gather measured at 53, 489 and 6468 us for 2,
    64 and 1024 MB. They need not be accurate to a percent: only placements are compared.

    Args:
        flops_per_second: that a device reaches.
        exchanges: of a micro-batch with sharded sequences.
        attention_flops: of each unit of s^2, included in the FLOPs of sequences.
        square_flops, query_flops: slowness of attention, as above.
        batch_flops: additional cost of every micro-batch, since kernels on few tokens are slow.
        launch_seconds: minimum of a micro-batch.
        device: name of the device.
    """

    flops_per_second: float = 0.4 * 989e12
    exchanges: tuple[Exchange, ...] = (
        Exchange(36, 53e-6, 2 * 8 * 128 * 2 / 160e9, behind_local=1 / 3.5),
        Exchange(36, 53e-6, 2 * 8 * 128 * 2 / 160e9, behind_local=2.5 / 3.5),
        Exchange(36, 53e-6, 2 * 8 * 128 * 4 / 160e9),
    )
    attention_flops: float = 36 * 2 * 32 * 128 * 3.5
    square_flops: float = 0.0
    query_flops: float = 0.0
    batch_flops: float = 0.0
    launch_seconds: float = 0.0
    device: str = "H100"

    def work(self, lengths: IntArray, flops: Costs, num_ranks: int = 1) -> tuple[Costs, Costs]:
        """Work of sequences (n,), and attention's part of it, both increased by the slowness of attention.

        Args:
            lengths: (n,), tokens.
            flops: (n,), of each.
            num_ranks: that share each; the result is the sum over these ranks.
        """
        sizes = np.asarray(lengths, dtype=np.float64)
        slower = sizes * (self.square_flops * sizes + self.query_flops * num_ranks)
        return flops + slower, self.attention_flops * sizes**2 + slower

    def loads(self, lengths: IntArray, flops: Costs, num_ranks: int = 1) -> list[Load]:
        """``work`` as a list, from lengths and FLOPs (n,)."""
        work, attention = self.work(lengths, flops, num_ranks)
        return [Load(*one) for one in zip(work.tolist(), attention.tolist(), strict=True)]

    def micro_batch(self, local: Sequence[Load], sharded: Load, sharded_tokens: int, num_ranks: int) -> float:
        """Seconds of a micro-batch.

        Args:
            local: work of the sequences local to each rank; of ranks with equal loads, one is enough.
            sharded: work of all sharded sequences, the sum over the N ranks.
            sharded_tokens: of all sharded sequences, with their padding.
            num_ranks: N.
        """
        busiest, speed = max(local)[0], self.flops_per_second
        if num_ranks > 1 and sharded_tokens:
            attention, exposed = sharded.attention / num_ranks, 0.0
            hidden = []
            for exchange in self.exchanges:
                flops = speed * exchange.travel(sharded_tokens) - exchange.behind_sharded * attention
                if flops > 0 and exchange.behind_local:
                    hidden.append((flops, exchange.behind_local))
                elif flops > 0:
                    exposed += flops
            busiest = exposed + max(
                load[0] + sum([max(0.0, flops - share * load[1]) for flops, share in hidden]) for load in local
            )
        return max(self.launch_seconds, (busiest + sharded.flops / num_ranks + self.batch_flops) / speed)

    def waited(self, sharded_tokens: Costs, local_attention: Costs, sharded_attention: Costs) -> Costs:
        """Seconds of exchanges that attention does not hide, for many ranks at once.

        Args:
            sharded_tokens: (n,), of the micro-batch of each rank.
            local_attention, sharded_attention: (n,), seconds of each rank, forward and backward.
        """
        seconds = np.zeros(len(sharded_tokens))
        for exchange in self.exchanges:
            travel = exchange.times * np.maximum(exchange.fixed_seconds, sharded_tokens * exchange.token_seconds)
            hidden = exchange.behind_local * local_attention + exchange.behind_sharded * sharded_attention
            seconds += np.where(sharded_tokens > 0, np.maximum(travel - hidden, 0.0), 0.0)
        return seconds
