"""``attend`` under a name that transformers' models can be told to use.

transformers builds no mask for an attention function that is registered without one, and hands a model's extra keyword
arguments through to the function: that is how ``cu_seq_lens_q`` comes here [read in masking_utils and modeling_qwen3_vl
of 5.23]. Nothing else says where a document ends, so a call without it is an error, never a guess.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from packtool.attention.varlen import Varlen, attend
from packtool.errors import UnsupportedModelError

ATTENTION_NAME = "packtool"


def register() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def attention_for(config: PreTrainedConfig) -> str | dict[str, str]:
    """The ``attn_implementation`` that routes a model's text tower, and only it, through ``packed_attention``.

    A vision tower separates its pictures itself, and does so with boundaries of its own.
    """
    towers = [name for name in config.sub_configs if getattr(config, name, None) is not None]
    if "text_config" not in towers:
        return ATTENTION_NAME
    return {name: ATTENTION_NAME if name == "text_config" else "sdpa" for name in towers}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over ``attend``.

    Args:
        module: the attention layer.
        query: (1, Hq, T, D).
        key: (1, Hkv, T, D).
        value: (1, Hkv, T, D).
        attention_mask: must be None; documents are told apart by ``cu_seq_lens_q``.
        kwargs: ``cu_seq_lens_q`` int32 (S + 1,), ``max_length_q``, optionally ``document_lengths`` (host integers),
            ``sliding_window``.

    Returns:
        (1, T, Hq, D) and None for the weights, which are never built.

    Raises:
        UnsupportedModelError: the layer asks for something that would silently be left out.
        RuntimeError: the call does not say where the documents end; a bug in the caller.
    """
    _refuse_leaks(module, query, key, attention_mask, kwargs)
    window = _window(module, kwargs)
    varlen = Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("document_lengths"))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = attend(q, k, v, varlen, scale=scaling, window=window, dropout=dropout)
    return out.unsqueeze(0), None


def _refuse_leaks(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Raise on any call in which one document could see another. Not asserts: ``python -O`` must not open the door."""
    name = type(module).__name__
    if kwargs.get("cu_seq_lens_q") is None:
        raise RuntimeError(f"{name} was called without cu_seq_lens_q: the documents of a pack could not be told apart")
    if attention_mask is not None:
        raise RuntimeError(f"{name} was given a mask; packed documents are told apart by cu_seq_lens_q alone")
    if query.shape[0] != 1:
        raise RuntimeError(f"{name} was given {query.shape[0]} rows; a packed micro-batch is one row")
    if query.shape[2] != key.shape[2]:
        raise RuntimeError(f"{name} sees {key.shape[2]} keys for {query.shape[2]} queries: a key-value cache is on")


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """The layer's sliding window; refuses what ``attend`` does not know."""
    for name, what in (("softcap", "soft-capped scores"), ("s_aux", "attention sinks"), ("position_bias", "biases")):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses {what} ({name}), which packed attention does not compute",
                "Train this model with --packing false.",
            )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends in both directions; packed attention is causal",
            "Train this model with --packing false.",
        )
    window: int | None = kwargs.get("sliding_window")
    if window is None and getattr(module, "layer_type", None) == "sliding_attention":
        raise UnsupportedModelError(
            f"{type(module).__name__} is a sliding layer but does not say how wide its window is",
            "Train this model with --packing false.",
        )
    return window
