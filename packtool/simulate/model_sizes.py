"""How large a model is: its weights, and what a token needs in memory and on the wire, from its ``config.json``.

Beside ``cost``, which counts operations, for whoever must know what fits: simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packtool.plan.cost import CostModel

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
"""What the models' public ``config.json`` say; 8b has the sizes of Qwen3-8B, as ``CostModel.of_8b``."""


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
        config = config.get("thinker_config") or config
        text = config.get("text_config") or config
        hidden, num_layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads = int(text["num_attention_heads"])
        key_heads = int(text.get("num_key_value_heads") or heads)
        head_size = int(text.get("head_dim") or hidden // heads)
        queries, keys = heads * head_size, key_heads * head_size
        experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
        dense_width = int(text.get("intermediate_size") or 4 * hidden)
        width = int(text.get("moe_intermediate_size") or dense_width) if experts else dense_width
        visited = int(text.get("num_experts_per_tok") or 1) if experts else 1
        shared = int(text.get("shared_expert_intermediate_size") or 0) + width * int(text.get("n_shared_experts") or 0)
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
