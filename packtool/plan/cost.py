"""What a pack costs to train, in floating-point operations, from the model's own ``config.json``.

Equal tokens are not equal work: attention looks back over each sample, so its work grows with the square of the
sample's length, and pictures pass through a tower of their own. A pack costs

    per_token * tokens + per_square * sum(len^2) + per_media_token * media tokens + per_target_token * targets

Counted are matrix products, two operations each; backward takes twice the forward. What is left out (norms,
activations, optimizer) is below a percent of a step for models that are worth balancing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_FORWARD_AND_BACKWARD = 3
_LINEAR_TYPES = ("linear_attention", "conv", "mamba", "recurrent")
_SLIDING_TYPES = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class CostModel:
    """FLOPs of forward and backward.

    Args:
        per_token: of each token, in the layers of the language model.
        per_square: of each unit of sum(len^2): causal attention, so half of the full square.
        per_media_token: of each media token, in the tower that made it.
        per_target_token: of each label: the head, for logits are made only where a label is.
    """

    per_token: float
    per_square: float
    per_media_token: float = 0.0
    per_target_token: float = 0.0

    def __call__(
        self,
        tokens: npt.NDArray[np.integer[Any]],
        squares: npt.NDArray[np.integer[Any]],
        media_tokens: npt.NDArray[np.integer[Any]] | int = 0,
        target_tokens: npt.NDArray[np.integer[Any]] | int = 0,
    ) -> npt.NDArray[np.float64]:
        """FLOPs of packs (or samples); arguments and result of one shape."""
        cost: npt.NDArray[np.float64] = tokens * self.per_token + squares * self.per_square
        return (
            cost + np.asarray(media_tokens) * self.per_media_token + np.asarray(target_tokens) * self.per_target_token
        )

    @classmethod
    def of_8b(cls) -> CostModel:
        """A dense model of 8 billion weights with the sizes of Qwen3-8B: a stand-in where no model is named."""
        sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
        return cls.of_config({**sizes, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936})

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> CostModel:
        """Read the widths off a ``config.json``.

        Grouped heads, SwiGLU (three matrices), experts (those that a token visits, and the router), sliding windows
        (counted as linear at their full width) and the vision tower's layers are taken into account.

        Raises:
            KeyError: if the configuration names no hidden size or number of layers.
        """
        config = config.get("thinker_config") or config
        text = config.get("text_config") or config
        layers = _layer_types(text)
        hidden = int(text["hidden_size"])
        heads = int(text["num_attention_heads"])
        head_size = int(text.get("head_dim") or hidden // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        projections = 2 * hidden * head_size * (2 * heads + 2 * kv_heads)
        num_full = sum(kind not in (*_LINEAR_TYPES, *_SLIDING_TYPES) for kind in layers)
        num_sliding = sum(kind in _SLIDING_TYPES for kind in layers)
        window = int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
        per_token = len(layers) * projections + sum(_mlp(text, i) for i in range(len(layers)))
        # Scores and weighted sum, 2 * 2 * heads * head_size for each pair of positions; a causal mask halves the pairs.
        per_token += num_sliding * 4 * heads * head_size * window
        return cls(
            per_token=float(_FORWARD_AND_BACKWARD * per_token),
            per_square=float(_FORWARD_AND_BACKWARD * num_full * 2 * heads * head_size),
            per_media_token=float(_FORWARD_AND_BACKWARD * _vision(config.get("vision_config") or {}, hidden)),
            per_target_token=float(_FORWARD_AND_BACKWARD * 2 * hidden * int(text.get("vocab_size") or 0)),
        )


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    types = text.get("layer_types") or text.get("layers_block_type")
    if types:
        return [str(kind) for kind in types]
    return ["full_attention"] * int(text["num_hidden_layers"])


def _mlp(text: Mapping[str, Any], layer: int) -> int:
    """FLOPs of one layer's feed-forward part for one token."""
    hidden = int(text["hidden_size"])
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    dense_layers = text.get("mlp_only_layers") or ()
    every = int(text.get("decoder_sparse_step") or 1)
    first_dense = int(text.get("first_k_dense_replace") or 0)
    if not experts or layer in dense_layers or layer < first_dense or (layer + 1) % every:
        return 2 * 3 * hidden * int(text.get("intermediate_size") or 4 * hidden)
    width = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden)
    shared = int(text.get("shared_expert_intermediate_size") or 0) + width * int(text.get("n_shared_experts") or 0)
    visited = int(text.get("num_experts_per_tok") or 1)
    return 2 * 3 * hidden * (width * visited + shared) + 2 * hidden * experts


def _vision(vision: Mapping[str, Any], text_hidden: int) -> int:
    """FLOPs of a vision tower for one token that leaves it: merge^2 patches through all layers, then the merger."""
    hidden = int(vision.get("hidden_size") or vision.get("embed_dim") or 0)
    depth = int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
    if not hidden or not depth:
        return 0
    # Qwen2-VL's config calls the tower's width embed_dim and the text's hidden_size.
    hidden = int(vision.get("embed_dim") or hidden)
    width = int(vision.get("intermediate_size") or hidden * float(vision.get("mlp_ratio") or 4))
    matrices = 3 if str(vision.get("hidden_act")) in ("silu", "swish") else 2
    patches = int(vision.get("spatial_merge_size") or 1) ** 2
    layer = 2 * 4 * hidden * hidden + 2 * matrices * hidden * width
    out = int(vision.get("out_hidden_size") or text_hidden)
    merged = hidden * patches
    return patches * depth * layer + 2 * merged * (merged + out)
