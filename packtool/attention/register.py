"""Registration of packtool's kernels as attention functions of transformers' models.

transformers builds no mask for an attention function that is registered without one, and passes a model's extra keyword
arguments through to the function, such as ``cu_seq_lens_q`` [read in masking_utils and modeling_qwen3_vl of 5.23].
Documents have no other boundaries, so a call without it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from packtool.attention.choose import AUTO, KERNELS, choose
from packtool.attention.features import original_features, set_feature_ranks, towers_of_media
from packtool.attention.kernel import Kernel, LeakError, Varlen, add_up_rows, refuse_leaks, reveal_boundaries
from packtool.attention.parallel.attend import attend_shard
from packtool.attention.parallel.axes import refuse_unshareable_sequences
from packtool.attention.parallel.blocks import choose_blocks
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.recurrent import (
    isolate_recurrent_layers,
    recurrent_layers,
    restore_recurrent_layers,
    set_recurrent_ranks,
)
from packtool.batch.batch import CrossPictures, PictureKeys, WholePictures
from packtool.errors import ConfigError, UnsupportedModelError

ATTENTION_NAME = "packtool"
"""transformers' name of ``--attn-impl auto``: the best kernel for each call's device and precision."""

TOWER_ATTENTION = "packtool_flash_towers"
"""transformers' name of the attention inside towers of media.

It contains "flash", as transformers would otherwise call it once per picture. The text tower's name must not contain
it, as transformers would build flash attention's masks; towers build none.
"""

_NO_PACKING = "Train this model with --packing false."


def attention_name(impl: str) -> str:
    """Return transformers' name of a kernel, without "flash" (see ``TOWER_ATTENTION``); raise if there is none."""
    if impl == AUTO:
        return ATTENTION_NAME
    if impl not in KERNELS:
        raise ConfigError(f"--attn-impl {impl}: there is no such attention", f"There are auto, {', '.join(KERNELS)}.")
    return f"{ATTENTION_NAME}_{impl.replace('flash_attention_', 'fa')}"


def register_kernels() -> None:
    """Register all kernels with transformers; may be called again."""
    for impl in (AUTO, *KERNELS):
        AttentionInterface.register(attention_name(impl), partial(packed_attention, impl=impl))


def text_attention(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Return the ``attn_implementation`` that sets the attention of a model's text tower, and no other, to ``name``."""
    towers = [tower for tower in config.sub_configs if getattr(config, tower, None) is not None]
    if "text_config" not in towers:
        return name
    return {tower: name if tower == "text_config" else "sdpa" for tower in towers}


def set_text_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of a model's text tower by transformers' name; its media towers keep ``tower_attention``."""
    model.set_attn_implementation(text_attention(model.config, name))
    route_towers(model)


def route_towers(model: nn.Module) -> None:
    """Route a model's vision and audio towers, if any, through ``tower_attention``."""
    AttentionInterface.register(TOWER_ATTENTION, tower_attention)
    for tower in towers_of_media(model):
        # Not set_attn_implementation, which takes every name that contains "flash" for a package to import.
        tower.config._attn_implementation = TOWER_ATTENTION


def set_attention(model: PreTrainedModel, impl: str = AUTO, parallel: SequenceParallel | None = None) -> None:
    """Make a loaded transformers model keep the samples of a packed sequence apart; changes the model in place.

    Its text tower calls a kernel that knows the documents; its recurrent layers reset their state at every document.
    The model may still be moved or cast: only its forward checks that the kernel supports its device and precision.

    Args:
        model: not yet wrapped in adapters.
        impl: name of the kernel, a value of ``--attn-impl``.
        parallel: ranks that share each sequence; the model then also takes a ``ShardedBatch``. None: no sharing.
    """
    register_kernels()
    name = attention_name(impl)
    if parallel is not None:
        refuse_unshareable_sequences(model.config.to_dict(), parallel.split.size)
        name = f"{name}_shared"  # of all models with sequence parallelism; the last call counts
        AttentionInterface.register(name, partial(packed_attention, impl=impl, parallel=parallel))
    # Media encoders and recurrent layers exchange with the same ranks.
    set_feature_ranks(model, parallel)
    set_recurrent_ranks(model, parallel)
    set_text_attention(model, name)
    isolate_recurrent_layers(model)


@contextmanager
def original_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute as transformers alone would, with SDPA, inside the context."""
    text_config: Any = model.config.get_text_config()
    previous_name = text_config._attn_implementation
    # The instance of an isolated layer has a forward, which replaces that of its class.
    was_isolated = any("forward" in vars(layer) for layer in recurrent_layers(model))
    try:
        model.set_attn_implementation(text_attention(model.config, "sdpa"))  # of text and towers
        restore_recurrent_layers(model)
        with original_features(model):
            yield
    finally:
        set_text_attention(model, previous_name)
        if was_isolated:
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
    """Compute a layer's attention so that tokens of a packed sequence see only their own document.

    transformers' models call it in place of their own attention, with the signature of its attention interface.

    Args:
        module: the attention layer.
        query: (1, Hq, T, D).
        key, value: (1, Hkv, T, D).
        attention_mask: must be None.
        scaling: factor on the scores, by default 1 / sqrt(D).
        kwargs: the boundaries of the documents, from ``model_inputs`` of a batch; the layer's ``sliding_window``; and
            what ``set_attention`` registers: ``impl``, a value of ``--attn-impl``, and ``parallel``. ``kernel`` or, for
            a shard, ``blocks`` overrides ``impl``.

    Returns:
        (1, T, Hq, D) and None for the weights, which are never built.
    """
    kwargs = reveal_boundaries(kwargs)  # which compiled layers hide
    if _attends_to_pictures(module):
        out = _cross_attention(module, query, key, value, kwargs, scaling, dropout)
        return out.unsqueeze(0), None
    refuse_leaks(module, query, attention_mask, kwargs, parallel=kwargs.get("parallel"))
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries != num_keys:
        counts = f"{num_keys} keys for {num_queries} queries"
        raise LeakError(f"{type(module).__name__} sees {counts}: a key-value cache is on")
    window = _supported_window(module, kwargs)
    q, k, v = _to_kernel_layout(query, key, value)
    is_shard = kwargs.get("sequence_shard") is not None
    if is_shard:  # refuse_unshareable_sequences has refused models with chunks and temperatures
        return _attend_shard(q, k, v, kwargs, scaling, window, dropout).unsqueeze(0), None
    kwargs["chunk_size"] = _chunk_size(module)
    # Some layers of Llama 4 scale queries by their positions, which must count from the start of the document.
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        q = _with_document_temperature(module, q, _boundaries(kwargs))
    return _attend_documents(q, k, v, kwargs, scaling, window, dropout).unsqueeze(0), None


def _attends_to_pictures(module: nn.Module) -> bool:
    """Return whether a layer's keys are features of pictures, by cross-attention (Llama 3.2 Vision)."""
    config = getattr(module, "config", None)
    cross_layers = getattr(config, "cross_attention_layers", None) or ()
    return getattr(module, "layer_idx", None) in cross_layers


def _cross_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
    scaling: float | None,
    dropout: float,
) -> Tensor:
    """Compute a layer in which tokens attend to features of the pictures of their own sample.

    ``query`` is (1, Hq, T, D); ``key`` and ``value``, (1, Hkv, T', D), are of the features of all pictures. The other
    arguments are those of ``packed_attention``. Returns (T, Hq, D), 0 for tokens of samples without pictures.
    """
    pictures: CrossPictures | None = kwargs.get("cross_pictures")
    if pictures is None:
        raise LeakError(f"{type(module).__name__} was not told which pictures belong to which sample (cross_pictures)")
    q, k, v = _to_kernel_layout(query, key, value)
    kernel = _kernel_of_call(kwargs, q, v, dropout)
    attend = partial(kernel.attend, scale=scaling, dropout=dropout)
    picture_keys = pictures.keys(q.device)  # the queries that see pictures, and the features that each of them sees
    picture_out = _attend_pictures(q, k, v, picture_keys, attend)
    return torch.zeros_like(q).index_copy(0, picture_keys.queries, picture_out)


def _attend_shard(
    q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any], scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    """Return the output (T, Hq, D) of a layer's call with a ``sequence_shard``."""
    if dropout:
        raise UnsupportedModelError(
            f"the model drops {dropout:g} of its attention weights, which sequences that several processes share "
            "cannot",
            "Set attention_dropout to 0 in the model's config.json.",
        )
    shard = kwargs["sequence_shard"]
    blocks = kwargs.get("blocks")
    if blocks is None:
        head_dims = q.shape[-1], v.shape[-1]
        blocks = choose_blocks(kwargs.get("impl", AUTO), q.device, q.dtype, head_dims=head_dims)
    parallel = kwargs["parallel"].of(shard.split)
    return attend_shard(q, k, v, shard, parallel, blocks, scale=scaling, window=window)


def _attend_documents(
    q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any], scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    """Compute causal attention within each document of a packed sequence; return (T, Hq, D).

    Args:
        q: (T, Hq, D).
        k, v: (T, Hkv, D).
        kwargs: those of ``packed_attention``, and ``chunk_size``, None if the layer attends to complete documents.
        window: a query sees itself and at most ``window - 1`` tokens before it; None: all before it.
    """
    varlen = _boundaries(kwargs)
    # The tokens that are keys of each document, int64 (T',): those of its shared prefixes, then its own. None: its own.
    key_index = kwargs.get("key_index")
    chunk_size = kwargs["chunk_size"]
    if chunk_size:
        varlen, keys_of_chunks = varlen.cut_into_chunks(chunk_size)
        if keys_of_chunks is not None:
            key_index = kwargs["key_index"][keys_of_chunks]
    if key_index is not None:
        k, v = GatherTokens.apply(key_index, k, v)
    kernel = _kernel_of_call(kwargs, q, v, dropout)
    attend = partial(kernel.attend, scale=scaling, window=window, dropout=dropout)
    causal_out = attend(q, k, v, varlen)
    # In some models, in all layers or in those with windows, tokens of a picture see each other in both directions.
    pictures: WholePictures | None = kwargs.get("whole_pictures")
    if pictures is None or (pictures.only_windows and window is None):
        return causal_out
    picture_keys = pictures.keys(window, q.device)  # the tokens of pictures, and the keys that they see
    picture_out = _attend_pictures(q, k, v, picture_keys, attend)
    return causal_out.index_copy(0, picture_keys.queries, picture_out)


def _chunk_size(module: Any) -> int | None:
    """Return the size of the chunks of a document that a layer attends within (Llama 4); None if it has none."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None) or ()
    index = getattr(module, "layer_idx", None)
    is_chunked = index is not None and "chunked_attention" in layer_types[index : index + 1]
    return config.attention_chunk_size if is_chunked else None


def _with_document_temperature(module: Any, q: Tensor, varlen: Varlen) -> Tensor:
    """Return the queries (T, Hq, D) of a layer without rotary positions of Llama 4, scaled by positions in documents.

    The layer has scaled them by their positions in the sequence, not by ``position_ids`` [modeling_llama4 of 5.23].
    """
    if len(q) < module.floor_scale:
        return q  # all factors are 1

    def factors(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    positions = varlen.positions(len(q))
    ratios = factors(positions) / factors(torch.arange(len(q), device=positions.device))
    return (q * ratios.to(q.device)[:, None, None]).to(q.dtype)


def _kernel_of_call(kwargs: dict[str, Any], q: Tensor, v: Tensor, dropout: float) -> Kernel:
    """Return the kernel that an attention call names by ``kernel`` or ``impl``, else the fastest usable one."""
    kernel: Kernel | None = kwargs.get("kernel")
    if kernel is not None:
        return kernel
    return _chosen_kernel(kwargs.get("impl", AUTO), q, v, needs_dropout=dropout > 0)


def _chosen_kernel(impl: str, q: Tensor, v: Tensor, *, needs_dropout: bool) -> Kernel:
    head_dim = max(q.shape[-1], v.shape[-1])
    return choose(impl, q.device, q.dtype, needs_dropout=needs_dropout, head_dim=head_dim)


def _boundaries(kwargs: dict[str, Any]) -> Varlen:
    """Return the boundaries of a call's documents, with those of their keys if documents share prefixes."""
    keys = None
    if kwargs.get("key_index") is not None:
        keys = Varlen(kwargs["cu_seq_lens_k"], kwargs["max_length_k"], kwargs.get("key_lengths"))
    return Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("document_lengths"), keys=keys)


def _attend_pictures(q: Tensor, k: Tensor, v: Tensor, keys: PictureKeys, attend: Callable[..., Tensor]) -> Tensor:
    """Return the output (N, Hq, D) of the queries ``keys.queries`` (N,); each sees the keys of its document."""
    key_boundaries = Varlen(keys.cu_seqlens_k, max(keys.key_lengths), keys.key_lengths)
    pictures = Varlen(keys.cu_seqlens, max(keys.lengths), keys.lengths, causal=False, keys=key_boundaries)
    k, v = GatherTokens.apply(keys.keys, k, v)
    return attend(q.index_select(0, keys.queries), k, v, pictures)


class GatherTokens(torch.autograd.Function):
    """Gather tokens that several documents use, such as the keys and values of a shared prefix."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return ``tensor[index]``, (T', ...), of each of ``tensors``, (T, ...); ``index`` is int64 (T',)."""
        ctx.save_for_backward(index)
        ctx.num_tokens = len(tensors[0])
        return tuple(tensor.index_select(0, index) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients (T, ...) of the tokens from those of the gathered tokens (T', ...)."""
        (index,) = ctx.saved_tensors
        return None, *add_up_rows(index, ctx.num_tokens, *gradients)


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
    """Compute a layer's attention in a media encoder so that each medium of a micro-batch sees only itself.

    transformers' models call it in place of their own attention, with the signature of its attention interface.

    Args:
        query, key, value: (1, H, T, D), of the patches of all images and frames, or of all sounds.
        attention_mask: must be None.
        kwargs: ``cu_seq_lens_q`` int32 (S + 1,) and ``max_length_q``, the boundaries of images, frames or sounds, in
            which tokens see each other in both directions; ``kernel``, by default the fastest usable one.

    Returns:
        (1, T, H, D) and None for the weights.
    """
    if attention_mask is not None or kwargs.get("cu_seq_lens_q") is None:
        raise LeakError(f"{type(module).__name__} does not say where the pictures end that it looks at")
    q, k, v = _to_kernel_layout(query, key, value)
    varlen = Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], causal=False)
    kernel = kwargs.get("kernel") or _chosen_kernel(AUTO, q, v, needs_dropout=dropout > 0)
    out = kernel.attend(q, k, v, varlen, scale=scaling, dropout=dropout)
    return out.unsqueeze(0), None


def _to_kernel_layout(*tensors: Tensor) -> list[Tensor]:
    """Return (1, H, T, D) as (T, H, D), in the precision of an active autocast, as torch's own attention."""
    device_type = tensors[0].device.type
    has_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    if has_autocast and tensors[0].dtype != torch.float64:
        tensors = tuple(tensor.to(torch.get_autocast_dtype(device_type)) for tensor in tensors)
    return [tensor[0].transpose(0, 1) for tensor in tensors]


def _supported_window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the layer's sliding window; raise UnsupportedModelError for features that the kernels do not have."""
    name = type(module).__name__
    for key, feature in (("softcap", "soft-capped scores"), ("s_aux", "attention sinks"), ("position_bias", "biases")):
        if kwargs.get(key) is not None:
            problem = f"{name} uses {feature} ({key}), which packed attention does not compute"
            raise UnsupportedModelError(problem, _NO_PACKING)
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise UnsupportedModelError(f"{name} attends in both directions; packed attention is causal", _NO_PACKING)
    window: int | None = kwargs.get("sliding_window")
    if window is None and getattr(module, "layer_type", None) == "sliding_attention":
        raise UnsupportedModelError(f"{name} is a sliding layer but does not say how wide its window is", _NO_PACKING)
    return window
