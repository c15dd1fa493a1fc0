"""packtool's kernels under names that transformers' models can be told to use.

transformers builds no mask for an attention function that is registered without one, and hands a model's extra keyword
arguments through to the function: that is how ``cu_seq_lens_q`` comes here [read in masking_utils and modeling_qwen3_vl
of 5.23]. Nothing else says where a document ends, so a call without it is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from packtool.attention.choose import AUTO, KERNELS, choose
from packtool.attention.features import own_features, share_features, towers_of_media
from packtool.attention.kernel import LeakError, Varlen
from packtool.attention.opaque import with_shown_boundaries
from packtool.attention.parallel.attend import attend_shard
from packtool.attention.parallel.axes import refuse_shared
from packtool.attention.parallel.blocks import choose_blocks
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.recurrent import (
    isolate_recurrent_layers,
    recurrent_layers,
    release_recurrent_layers,
    share_recurrent_layers,
)
from packtool.errors import ConfigError, UnsupportedModelError

ATTENTION_NAME = "packtool"
"""transformers' name of ``--attn-impl auto``: the best kernel for each call's device and precision."""

TOWER_ATTENTION = "packtool_flash_towers"
"""transformers' name of the attention inside towers of media.

With "flash" in it: without, transformers calls it for each picture by itself. The text tower's name is to be without
for its masks; a tower builds none.
"""

_SHARED = "_shared"
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
    short = impl.replace("flash_attention_", "fa")
    return f"{ATTENTION_NAME}_{short}"


def register() -> None:
    """Make all kernels known to transformers; may be called again."""
    for impl in (AUTO, *KERNELS):
        function: Callable[..., Any] = partial(packed_attention, impl=impl)
        AttentionInterface.register(attention_name(impl), function)


def route(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """The ``attn_implementation`` that gives a model's text tower, and only it, the attention of that name."""
    towers = [tower for tower in config.sub_configs if getattr(config, tower, None) is not None]
    if "text_config" not in towers:
        return name
    return {tower: name if tower == "text_config" else "sdpa" for tower in towers}


def set_text_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of a model's text tower by transformers' name; its other towers keep ``tower_attention``."""
    model.set_attn_implementation(route(model.config, name))
    route_towers(model)


def route_towers(model: nn.Module) -> None:
    """Route the towers of a model's media, where it has some, through ``tower_attention``."""
    AttentionInterface.register(TOWER_ATTENTION, tower_attention)
    for tower in towers_of_media(model):
        # Not set_attn_implementation, which takes every name with "flash" in it for a package to import.
        tower.config._attn_implementation = TOWER_ATTENTION


def set_attention(model: PreTrainedModel, impl: str = AUTO, parallel: SequenceParallel | None = None) -> None:
    """Make a loaded model keep packed samples apart: the one line that packed training needs.

    Its text tower is routed through a kernel, and its recurrent layers start anew with every document. The kernel must
    be there for the model's device and precision (``choose`` tells); each call asks again, so the model may still be
    moved or cast.

    Args:
        model: bare, not yet wrapped in adapters.
        impl: what ``--attn-impl`` takes.
        parallel: ranks that share each sequence; the model takes a ``ShardedBatch`` then, a ``PackedBatch`` as ever.

    Raises:
        ConfigError: if there is no such kernel.
        UnsupportedModelError: for what cannot be computed of sequences that ranks share.
    """
    register()
    name = attention_name(impl)
    share_features(model, parallel)
    share_recurrent_layers(model, parallel)
    if parallel is not None:
        refuse_shared(model.config.to_dict(), parallel.cut.size)
        name += _SHARED
        AttentionInterface.register(name, partial(packed_attention, impl=impl, parallel=parallel))
    set_text_attention(model, name)
    isolate_recurrent_layers(model)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model computes as transformers would by itself: SDPA, its own recurrent layers and calls of towers.

    For comparisons; what was set before is set again afterwards.
    """
    text: Any = model.config.get_text_config()
    name = text._attn_implementation
    isolated = any("forward" in vars(layer) for layer in recurrent_layers(model))
    model.set_attn_implementation(route(model.config, "sdpa"))
    release_recurrent_layers(model)
    try:
        with own_features(model):
            yield
    finally:
        set_text_attention(model, name)
        if isolated:
            isolate_recurrent_layers(model)


@torch.compiler.disable(reason="boundaries differ in every micro-batch")  # type: ignore[no-untyped-call]
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
            ``sliding_window``; ``impl``, as ``--attn-impl`` has it, or a ``kernel`` and ``blocks`` themselves. Where
            documents share prefixes also ``key_index`` int64 (T',), the tokens of all documents with their prefixes,
            with ``cu_seq_lens_k``, ``max_length_k`` and optionally ``key_lengths``. Instead of boundaries a
            ``sequence_shard``, for a sequence that the ranks of ``parallel`` share.

    Returns:
        (1, T, Hq, D) and None for the weights, which are never built.

    Raises:
        UnsupportedModelError: the layer asks for something that would silently be left out.
        LeakError: the call does not say where the documents end, or there is a mask or a cache.
    """
    kwargs = with_shown_boundaries(kwargs)
    _refuse_leaks(module, query, key, attention_mask, kwargs)
    window = _window(module, kwargs)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in _as_autocast(query, key, value))
    if (shard := kwargs.get("sequence_shard")) is not None:
        if dropout:
            raise UnsupportedModelError(
                f"the model drops {dropout:g} of its attention weights, which sequences that several processes share "
                "cannot",
                "Set attention_dropout to 0 in the model's config.json.",
            )
        head_dims = q.shape[-1], v.shape[-1]
        blocks = kwargs.get("blocks") or choose_blocks(kwargs["impl"], q.device, q.dtype, head_dims=head_dims)
        parallel = kwargs["parallel"].of(shard.cut)
        shared = attend_shard(q, k, v, shard, parallel, blocks, scale=scaling, window=window)
        return shared.unsqueeze(0), None
    varlen = Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("document_lengths"))
    if (key_index := kwargs.get("key_index")) is not None:
        # The backward pass of this adds up what a prefix gets from all documents that begin with it.
        k, v = k.index_select(0, key_index), v.index_select(0, key_index)
        keys = Varlen(kwargs["cu_seq_lens_k"], kwargs["max_length_k"], kwargs.get("key_lengths"))
        varlen = replace(varlen, keys=keys)
    impl, head_dim = kwargs.get("impl", AUTO), max(q.shape[-1], v.shape[-1])
    kernel = kwargs.get("kernel") or choose(impl, q.device, q.dtype, needs_dropout=dropout > 0, head_dim=head_dim)
    out = kernel.attend(q, k, v, varlen, scale=scaling, window=window, dropout=dropout)
    return out.unsqueeze(0), None


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface for a tower: all pictures, frames or sounds of a micro-batch by one call.

    Args:
        module: the attention layer.
        query, key, value: (1, H, T, D).
        attention_mask: None.
        kwargs: ``cu_seq_lens_q`` int32 (S + 1,) and ``max_length_q``: which tokens see each other, in both directions;
            ``kernel``, by default the best that is there.

    Returns:
        (1, T, H, D) and None for the weights, which are never built.

    Raises:
        LeakError: the call does not say where pictures end.
    """
    if attention_mask is not None or kwargs.get("cu_seq_lens_q") is None:
        raise LeakError(f"{type(module).__name__} does not say where the pictures end that it looks at")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in _as_autocast(query, key, value))
    varlen = Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], causal=False)
    kernel = kwargs.get("kernel") or choose(AUTO, q.device, q.dtype, needs_dropout=dropout > 0, head_dim=q.shape[-1])
    return kernel.attend(q, k, v, varlen, scale=scaling, dropout=dropout).unsqueeze(0), None


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast to the precision of an active autocast, which torch does for its own attention only."""
    device_type = tensors[0].device.type
    is_known = torch.amp.is_autocast_available(device_type)
    if not is_known or not torch.is_autocast_enabled(device_type) or tensors[0].dtype == torch.float64:
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [tensor.to(dtype) for tensor in tensors]


def _refuse_leaks(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Raise on any call in which one document could see another. Not asserts: ``python -O`` must not open the door."""
    name = type(module).__name__
    shard = kwargs.get("sequence_shard")
    if shard is not None and kwargs.get("parallel") is None:
        raise LeakError(f"{name} was given a part of a sequence, but the model was not told which ranks have the rest")
    if shard is None and kwargs.get("cu_seq_lens_q") is None:
        raise LeakError(f"{name} was called without cu_seq_lens_q: the documents of a pack could not be told apart")
    if attention_mask is not None:
        raise LeakError(f"{name} was given a mask; packed documents are told apart by cu_seq_lens_q alone")
    if query.shape[0] != 1:
        raise LeakError(f"{name} was given {query.shape[0]} sequences; a packed micro-batch is one sequence")
    if query.shape[2] != key.shape[2]:
        raise LeakError(f"{name} sees {key.shape[2]} keys for {query.shape[2]} queries: a key-value cache is on")


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
