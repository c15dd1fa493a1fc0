"""packtool's kernels under names that transformers' models can be told to use.

transformers builds no mask for an attention function that is registered without one, and hands a model's extra keyword
arguments through to the function: that is how ``cu_seq_lens_q`` comes here [read in masking_utils and modeling_qwen3_vl
of 5.23]. Nothing else says where a document ends, so a call without it is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from packtool.attention.choose import AUTO, KERNELS, choose
from packtool.attention.varlen import Varlen
from packtool.errors import ConfigError, UnsupportedModelError

ATTENTION_NAME = "packtool"
"""transformers' name of ``--attn-impl auto``: the best kernel for each call's device and precision."""

_SHORT_NAMES = {"flash_attention_2": "fa2", "flash_attention_3": "fa3"}
_NO_PACKING = "Train this model with --packing false."


def attention_name(impl: str) -> str:
    """transformers' name of a kernel.

    Never with "flash" in it: transformers takes that for its own flash attention, with masks of its own.

    Raises:
        ConfigError: if there is no such kernel.
    """
    if impl == AUTO:
        return ATTENTION_NAME
    if impl not in KERNELS:
        raise ConfigError(f"--attn-impl {impl}: there is no such attention", f"There are auto, {', '.join(KERNELS)}.")
    return f"{ATTENTION_NAME}_{_SHORT_NAMES.get(impl, impl)}"


def register() -> None:
    """Make all kernels known to transformers; may be called again."""
    for impl in (AUTO, *KERNELS):
        function: Callable[..., Any] = partial(packed_attention, impl=impl)
        AttentionInterface.register(attention_name(impl), function)


def attention_for(config: PreTrainedConfig, impl: str = AUTO) -> str | dict[str, str]:
    """The ``attn_implementation`` that routes a model's text tower, and only it, through a kernel.

    A vision tower separates its pictures itself, and does so with boundaries of its own.
    """
    name = attention_name(impl)
    towers = [tower for tower in config.sub_configs if getattr(config, tower, None) is not None]
    if "text_config" not in towers:
        return name
    return {tower: name if tower == "text_config" else "sdpa" for tower in towers}


def set_attention(model: PreTrainedModel, impl: str = AUTO) -> None:
    """Route the text tower of a loaded model through a kernel: the one line that packed training needs.

    The kernel must be there for the model's device and precision (``choose`` asks); a model may be moved or cast
    afterwards, and is asked again at each call.

    Args:
        model: bare, not yet wrapped in adapters.
        impl: what ``--attn-impl`` takes.

    Raises:
        ConfigError: if there is no such kernel.
    """
    register()
    model.set_attn_implementation(attention_for(model.config, impl))


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
    """transformers' attention interface over the kernels.

    Args:
        module: the attention layer.
        query: (1, Hq, T, D).
        key: (1, Hkv, T, D).
        value: (1, Hkv, T, D).
        attention_mask: must be None; documents are told apart by ``cu_seq_lens_q``.
        kwargs: ``cu_seq_lens_q`` int32 (S + 1,), ``max_length_q``, optionally ``document_lengths`` (host integers),
            ``sliding_window``; ``impl``, as ``--attn-impl`` has it.

    Returns:
        (1, T, Hq, D) and None for the weights, which are never built.

    Raises:
        UnsupportedModelError: the layer asks for something that would silently be left out.
        RuntimeError: the call does not say where the documents end; a bug in the caller.
    """
    _refuse_leaks(module, query, key, attention_mask, kwargs)
    window = _window(module, kwargs)
    varlen = Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("document_lengths"))
    q, k, v = (tensor[0].transpose(0, 1) for tensor in _as_autocast(query, key, value))
    kernel = choose(
        kwargs.get("impl", AUTO), q.device, q.dtype, needs_dropout=dropout > 0, head_dim=max(q.shape[-1], v.shape[-1])
    )
    out = kernel.attend(q, k, v, varlen, scale=scaling, window=window, dropout=dropout)
    return out.unsqueeze(0), None


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """In the precision of an autocast that is on: torch casts for its own attention only."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type) or tensors[0].dtype == torch.float64:
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) for tensor in tensors]


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
    """The layer's sliding window; refuses what the kernels do not know."""
    for name, what in (("softcap", "soft-capped scores"), ("s_aux", "attention sinks"), ("position_bias", "biases")):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses {what} ({name}), which packed attention does not compute", _NO_PACKING
            )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends in both directions; packed attention is causal", _NO_PACKING
        )
    window: int | None = kwargs.get("sliding_window")
    if window is None and getattr(module, "layer_type", None) == "sliding_attention":
        raise UnsupportedModelError(
            f"{type(module).__name__} is a sliding layer but does not say how wide its window is", _NO_PACKING
        )
    return window
