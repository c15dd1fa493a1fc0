"""What a model costs to train, from its own ``config.json``: FLOPs of packs, weights, and bytes of activations.

Equal tokens are not equal work: attention looks back over each sample, so its work grows with the square of the
sample's length, and pictures pass through a tower of their own, where every patch looks at all patches of its frame.
A pack costs

    per_token * tokens + per_square * sum(len^2) + per_target_token * targets                        language model
    + per_vision_token * vision tokens + per_patch_square * sum(patches of a frame ^2)               vision tower
    + per_audio_token * audio tokens                                                                 audio tower

with two operations for each multiply-add of the steps in ``layers``; layers whose attention sees a window of w tokens
have min(len, w) * (2 len - min(len, w)) in place of len^2, and those that see no further than their chunk of w tokens
have w^2 for each whole chunk and the square of the rest. Forward counts once. Backward counts once more for the
gradients of what a product takes, where anything before it learns, and once more for the gradients of its weights,
where these learn. So nothing goes backward below the first weight that learns, a frozen tower costs its forward pass,
and a module with an adapter has gradients of the adapter's weights alone. Attention's backward is 2.5 times its
forward: flash kernels make the scores again (Dao 2023, "FlashAttention-2", section 4.1).

Which weights a run trains is decided by the names of modules, see ``layers``, and by the rules of ``LearningOptions``
that ``train.model.frozen`` and ``train.model.adapters`` apply to real parameters. ``ModelSizes`` has the bytes beside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.config.model import LearningOptions
from packtool.encode.families import text_config_of, thinker_of
from packtool.planning.layers import ModelLayers, Step, attention_widths, expert_widths

_ADAPTABLE = ("linear", "convolution", "lookup")  # by a regular expression; names and all-linear mean linear modules


@dataclass(frozen=True)
class Trainable:
    """What of a step learns.

    Args:
        weights: all of them, through an adapter, or not.
        any: something of it does, were it a bias alone: gradients go back to what it makes.
    """

    weights: Literal["full", "lora", "frozen"] = "frozen"
    any: bool = False


def trainable(layers: ModelLayers, options: LearningOptions) -> dict[str, Trainable]:
    """What learns, by the steps' names; what is not named does not.

    A family that packtool knows nothing of may have other names: where options mean nothing of a model, they count as
    if no names had been given.
    """
    found = _trainable(layers, options)
    if not any(each.any for each in found.values()):
        parts = ("train_type", "lora_rank", "freeze_vit", "freeze_aligner", "freeze_llm")
        found = _trainable(layers, LearningOptions(**{name: getattr(options, name) for name in parts}))
    return found


def _trainable(layers: ModelLayers, options: LearningOptions) -> dict[str, Trainable]:
    steps = [step for step in layers.steps if step.kind != "attention"]
    if options.train_type == "lora":
        found = {step.name: _adapted(step, options, is_head=step is layers.head) for step in steps}
    else:
        found = _unfrozen(steps[:-1] if layers.is_tied else steps, options)
    if layers.is_tied:
        found[layers.head.name] = dataclasses.replace(found[layers.language[0].name])
    return found


def _adapted(step: Step, options: LearningOptions, *, is_head: bool) -> Trainable:
    """What ``--train-type lora`` does."""
    if options.is_saved(step.name):
        return Trainable("full", True)
    if options.target_regex is not None:
        is_target = step.kind in _ADAPTABLE
    else:
        is_target = step.kind == "linear" and not is_head and step.part not in options.frozen_parts
    if is_target and options.is_target(step.name):
        return Trainable("lora", True)
    return Trainable("frozen", options.lora_bias == "all" and step.has_bias)


def _unfrozen(steps: Sequence[Step], options: LearningOptions) -> dict[str, Trainable]:
    """What ``--train-type full`` does."""
    found: dict[str, Trainable] = {}
    budget = int(sum(step.num_weights for step in steps) * options.freeze_parameters_ratio)
    for step in steps:
        budget -= step.num_weights
        is_kept = step.part in options.frozen_parts or (options.freeze_parameters_ratio > 0 and budget >= 0)
        names = (step.weight, f"{step.name}.bias") if step.has_bias else (step.weight,)
        learns = [options.is_unfrozen(name) or not (is_kept or options.is_frozen(name)) for name in names]
        found[step.name] = Trainable("full" if learns[0] else "frozen", any(learns))
    return found


_ATTENTION_BACKWARD = 2.5
ALL_WEIGHTS = LearningOptions(train_type="full", freeze_vit=False, freeze_aligner=False)
"""Every weight learns."""


_BYTES = 2  # bfloat16
# Adam in mixed precision: a master copy and two moments in 32 bits (Rajbhandari et al. 2020, "ZeRO", section 3.1).
_OPTIMIZER_BYTES = 12

_QWEN = {"vocab_size": 151936, "model_type": "qwen2"}
MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
    "qwen2.5-0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
}
"""Sizes in the models' public ``config.json``; 8b, those of Qwen3-8B, stands in where no model is named."""


@dataclass(frozen=True)
class CostModel:
    """FLOPs of forward and backward.

    Args:
        per_token: of each token, in the layers of the language model.
        per_square: of each unit of sum(len^2): causal attention, so half of the full square.
        per_target_token: of each label: the head, for logits are made only where a label is.
        per_vision_token: of each token of a picture or video, in the tower that made it, and in what leads from there
            to the language model.
        per_patch_square: of each unit of the sum over frames of (patches of the frame)^2.
        per_audio_token: of each token of a sound.
        per_window: of each unit of ``window_squares``.
        window: tokens that sliding layers see.
        in_chunks: that window does not slide: layers see what is in their chunk of so many tokens.
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
        tokens: npt.NDArray[np.integer[Any]],
        attention_flops: npt.NDArray[Any] | float,
        target_tokens: npt.NDArray[np.integer[Any]] | int = 0,
        tower_flops: npt.NDArray[Any] | float = 0,
    ) -> npt.NDArray[np.float64]:
        """FLOPs of packs (or samples); arguments and result of one shape.

        Args:
            tokens: computed.
            attention_flops: those of ``attention``.
            target_tokens: of which logits are made.
            tower_flops: those of ``towers``.
        """
        cost: npt.NDArray[np.float64] = tokens * self.per_token + attention_flops
        return cost + np.asarray(target_tokens) * self.per_target_token + tower_flops

    def attention(
        self, lengths: npt.NDArray[np.integer[Any]], shared: npt.NDArray[np.integer[Any]] | None = None
    ) -> npt.NDArray[np.float64]:
        """FLOPs of the language model's attention, for samples of any shape.

        Args:
            lengths: of whole samples.
            shared: tokens of each that it goes on from, and that are computed elsewhere.
        """
        squares = np.square(lengths, dtype=np.int64)
        if shared is not None:
            squares = squares - np.square(shared, dtype=np.int64)
        return self.attention_of(squares, self.window_squares(lengths, shared))

    def attention_of(
        self, squares: npt.NDArray[np.integer[Any]], windows: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.float64]:
        """FLOPs of the language model's attention, from sums of squares and of ``window_squares``, of any shape."""
        found: npt.NDArray[np.float64] = squares * self.per_square + windows * self.per_window
        return found

    def window_squares(
        self, lengths: npt.NDArray[np.integer[Any]], shared: npt.NDArray[np.integer[Any]] | None = None
    ) -> npt.NDArray[np.int64]:
        """What stands for the squares in sliding layers, of each sample; 0 if there are none.

        Args:
            lengths, shared: as for ``attention``, of any shape.
        """
        whole = lengths.astype(np.int64)
        if self.in_chunks:
            found: npt.NDArray[np.int64] = whole // self.window * self.window**2 + (whole % self.window) ** 2
        else:
            seen = np.minimum(whole, self.window)
            found = seen * (2 * whole - seen)
        return found if shared is None else found - self.window_squares(shared)

    def towers(
        self,
        vision_tokens: npt.NDArray[Any],
        patch_squares: npt.NDArray[Any],
        audio_tokens: npt.NDArray[Any] | int = 0,
    ) -> npt.NDArray[np.float64]:
        """FLOPs of the towers for media of packs, samples or pictures; all are of any shape, and of the same.

        Args:
            vision_tokens: of pictures and videos.
            patch_squares: sum over their frames of (patches of the frame)^2.
            audio_tokens: of sounds, those of videos among them.
        """
        cost: npt.NDArray[np.float64] = vision_tokens * self.per_vision_token + patch_squares * self.per_patch_square
        return cost + np.asarray(audio_tokens) * self.per_audio_token

    @classmethod
    def of_8b(cls) -> CostModel:
        """A dense model of 8 billion weights: a stand-in where no model is named."""
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
        """Read the widths off a ``config.json``, see ``layers``.

        Args:
            learning: which weights learn.
            recomputes_language, recomputes_towers: layers run forward once more before they go backward.
            recomputes_head: logits are made once more.

        Raises:
            KeyError: if the configuration names no hidden size or number of layers.
        """
        layers = ModelLayers.of_config(config)
        learns, rank = trainable(layers, learning), learning.lora_rank

        def sums(steps: Sequence[Step], *behind: _Sums, recomputes: bool = False) -> _Sums:
            return _summed(steps, learns, rank, behind=any(sums.learns for sums in behind), recomputes=recomputes)

        vision = sums(layers.vision, recomputes=recomputes_towers)
        audio = sums(layers.audio, recomputes=recomputes_towers)
        mergers = [sums(merger, vision) for merger in layers.mergers]
        joined = sums(layers.audio_aligner, audio)
        language = sums(layers.language, *mergers, audio, joined, recomputes=recomputes_language)
        head = dataclasses.replace(layers.head, layer=0)  # a part that is computed again at once, as a layer is
        return cls(
            per_token=language.flops,
            per_square=language.per_square,
            per_target_token=sums([head], language, recomputes=recomputes_head).flops,
            per_vision_token=vision.flops + sum(merger.flops for merger in mergers),
            per_patch_square=vision.per_square,
            per_audio_token=audio.flops + joined.flops,
            per_window=language.per_window,
            window=layers.window,
            in_chunks=layers.in_chunks,
        )


@dataclass(frozen=True)
class _Sums:
    """FLOPs of a part for each unit, of its squares and of its windows; and whether gradients go back to its end."""

    flops: float
    per_square: float
    per_window: float
    learns: bool


def _summed(
    steps: Sequence[Step], learns: Mapping[str, Trainable], rank: int, *, behind: bool, recomputes: bool
) -> _Sums:
    """The work of a part.

    Args:
        behind: whether anything learns that comes before the part.
    """
    after = [behind]
    for step in steps:
        after.append(after[-1] or learns.get(step.name, Trainable()).any)
    goes_back = {step.layer: does for step, does in zip(steps, after[1:], strict=True)}
    flops = per_square = per_window = 0.0
    before = behind
    for step, has_gradient in zip(steps, after, strict=False):
        before = before if step.beside else has_gradient
        again = float(recomputes and step.layer is not None and goes_back[step.layer])
        if step.kind == "attention":
            passes = 1 + again + _ATTENTION_BACKWARD * has_gradient
            flops += passes * step.local
            per_square += passes * step.per_square
            per_window += passes * step.per_window
            continue
        how = learns[step.name].weights
        flops += 2 * step.num_products * (1 + again + before + (how == "full"))
        if how == "lora":
            # Of two products: what the first one takes may have no gradient.
            widths = step.inputs * (2 + again + before) * (step.kind != "lookup") + step.outputs * (3 + again)
            flops += 2 * step.times * rank * widths
    return _Sums(flops, per_square, per_window, after[-1])


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Weights, bytes and operations of a dense or sparse decoder, in bfloat16.

    Args:
        cost: FLOPs.
        num_parameters: all weights, of all experts.
        num_layers: L.
        kept_bytes: activations that a layer keeps of each token for its backward pass.
        input_bytes: the part of them that is the layer's input: all that is kept with recomputation.
        query_bytes: queries of a layer, of each token; attention's output has as many.
        kv_bytes: keys and values of a layer, of each token: what context parallelism gathers.
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
        """Read the widths off a ``config.json``, as ``CostModel.of_config`` does; only the text tower is counted.

        A layer keeps, in units of one token's numbers: two residuals, two norms' results and the attention's output
        projected (5 h); queries before and after RoPE and the attention's result (3 q); keys twice and values (3 kv);
        gate, up, the activated gate and the product (4 i, of the experts that a token visits). Scores are not kept
        (flash attention), logits neither (they are made some targets at a time, see ``train.model.head_loss``).

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
        """The sizes of a model; those of one of 8 billion weights where its ``config.json`` does not tell them."""
        try:
            return cls.of_config(config)
        except (KeyError, TypeError, ValueError):
            return cls.of_config(MODEL_PRESETS["8b"])

    def state_bytes(self, num_ranks: int, zero_stage: int = 2) -> float:
        """Bytes on one rank of weights, and of gradients and optimizer states sharded over all ranks.

        Args:
            zero_stage: 2 keeps the weights whole; 3 shards them too, and holds those of two layers at a time.
        """
        whole = 1.0 if zero_stage == 2 else 1 / num_ranks + 2 / self.num_layers
        return self.num_parameters * (_BYTES * whole + (_BYTES + _OPTIMIZER_BYTES) / num_ranks)

    def token_bytes(self, *, recompute: bool) -> float:
        """Activations of one token through all layers; with recomputation the layers' inputs and one whole layer."""
        if recompute:
            return float(self.num_layers * self.input_bytes + self.kept_bytes)
        return float(self.num_layers * self.kept_bytes)

    @property
    def weight_bytes(self) -> float:
        """All weights, as they travel; their gradients have as many."""
        return float(_BYTES * self.num_parameters)
