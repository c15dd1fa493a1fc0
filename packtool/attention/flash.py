"""Kernels with one call for all documents: flash attention 2 and 3, torch's varlen attention, FlexAttention.

*Flash attention* comes from the packages ``flash-attn`` (module ``flash_attn``) and ``flash-attn-3``
(``flash_attn_interface``) or, where ``kernels`` is installed, from the hub kernels that transformers uses. ``auto``
uses a hub kernel only if it has been downloaded before; naming it in ``--attn-impl`` downloads it.

*torch's varlen attention* needs no further package. Its arguments have grown: torch 2.10 has neither a scale nor
windows, 2.11 has both, 2.12 also takes fewer heads of K and V than of Q [read in the documentation of each, and in the
source of 2.15]. Missing arguments are emulated here, except windows.

*FlexAttention* takes a block mask of the documents. On a GPU it is compiled: the first call takes a minute, and so does
a new shape until the compiler has learned which sizes vary. On the CPU it runs uncompiled, dense and without gradients
[ran: NotImplementedError in 2.15], which is enough to compare its masks with the reference, and not to train.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from packtool.attention.kernel import Kernel, Varlen, fast_gpu_error, pad_heads
from packtool.errors import ConfigError

_MODULES = {2: "flash_attn", 3: "flash_attn_interface"}
_PACKAGES = {2: "flash-attn", 3: "flash-attn-3"}
_HUB = {2: "kernels-community/flash-attn2", 3: "kernels-community/vllm-flash-attn3"}
_HOPPER = 9


class FlashKernel(Kernel):
    """Flash attention of version 2 or 3."""

    max_head_dim = 256
    is_half_only = True

    def __init__(self, version: int) -> None:
        self.version = version
        self.name = f"flash_attention_{version}"
        self.has_dropout = version == 2

    def availability_error(self, device: torch.device, dtype: torch.dtype) -> ConfigError | None:
        """Needs CUDA, 16 bits, a package or the hub's kernel, and for version 3 a GPU since Hopper."""
        if not _has_package(self.version) and importlib.util.find_spec("kernels") is None:
            return ConfigError(
                f"neither {_PACKAGES[self.version]} is installed, nor kernels, which fetches it from the hub",
                f"pip install kernels, or {_PACKAGES[self.version]}; or use varlen, which is torch's own.",
            )
        if error := fast_gpu_error(f"flash attention {self.version}", device, dtype):
            return error
        if self.version == 3 and torch.cuda.get_device_capability(device)[0] < _HOPPER:
            return ConfigError("flash attention 3 needs a GPU since Hopper", "Use flash_attention_2, or varlen.")
        return None

    def is_available(self) -> bool:
        """Check that nothing must be downloaded: the package is installed, or the hub's kernel is cached."""
        if _has_package(self.version):
            return True
        if importlib.util.find_spec("kernels") is None:
            return False
        from huggingface_hub import constants

        folders = (f"{kind}--{_HUB[self.version].replace('/', '--')}" for kind in ("kernels", "models"))
        return any(os.path.isdir(os.path.join(constants.HF_HUB_CACHE, folder)) for folder in folders)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        keys = varlen.key_boundaries
        boundaries = {"cu_seqlens_q": varlen.cu_seqlens, "cu_seqlens_k": keys.cu_seqlens}
        longest = {"max_seqlen_q": varlen.max_seqlen, "max_seqlen_k": keys.max_seqlen}
        # Number of keys before and after a query that it sees; -1 is all of them.
        window_size = (-1, -1) if window is None else (window - 1, 0 if varlen.causal else -1)
        options = {"softmax_scale": scale, "causal": varlen.causal, "window_size": window_size}
        if dropout:
            options["dropout_p"] = dropout
        result = _flash_function(self.version)(*pad_heads(q, k, v), **boundaries, **longest, **options)
        # The hub's kernels and early builds of version 3 also return the lse.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out[..., : v.shape[-1]]


def _has_package(version: int) -> bool:
    if importlib.util.find_spec(_MODULES[version]) is None:
        return False
    # Flash attention 4 is a module flash_attn, too, without this function.
    return hasattr(importlib.import_module(_MODULES[version]), "flash_attn_varlen_func")


@cache
def _flash_function(version: int) -> Callable[..., Any]:
    if _has_package(version):
        return importlib.import_module(_MODULES[version]).flash_attn_varlen_func
    # transformers knows the version of each kernel that its own code was tested with.
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    functions, _ = lazy_import_flash_attention(_HUB[version])
    return functions[1]


class TorchVarlenKernel(Kernel):
    """``torch.nn.attention.varlen``: one call for all documents of a sequence, on CUDA."""

    name = "varlen"
    max_head_dim = 256
    is_half_only = True

    def availability_error(self, device: torch.device, dtype: torch.dtype) -> ConfigError | None:
        """Needs CUDA, 16 bits, and torch 2.10 or newer."""
        if _varlen_module() is None:
            problem = f"torch {torch.__version__} has no torch.nn.attention.varlen"
            return ConfigError(problem, "Install torch 2.10 or newer, or use sdpa.")
        return fast_gpu_error("torch's varlen", device, dtype)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Implement ``attend`` by torch's ``varlen_attn``, whose parameters depend on the version of torch.

        Raises a ConfigError for a window if the installed torch does not support windows.
        """
        varlen_attn = _varlen_module().varlen_attn
        parameters = _parameters(varlen_attn)
        options = _window_and_causal_options(parameters, varlen, window)
        value_dim = v.shape[-1]
        q, k, v = pad_heads(q, k, v)  # to one head size, a multiple of 8
        if "scale" in parameters:
            options["scale"] = scale
        else:
            # The function multiplies scores by 1 / sqrt(padded_dim), which this factor undoes.
            padded_dim = q.shape[-1]
            q = q * (scale * math.sqrt(padded_dim))
        num_query_heads = q.shape[1]
        if "enable_gqa" in parameters:
            options["enable_gqa"] = num_query_heads != k.shape[1]
        else:
            k = _repeat_heads(k, num_query_heads)
            v = _repeat_heads(v, num_query_heads)
        # With prefixes among the keys, causal masks must be aligned at the last tokens. torch uses cuDNN, which does
        # not do this, only if both ``cu_seqlens`` are the same tensor.
        keys = varlen.key_boundaries
        out: Tensor = varlen_attn(
            q, k, v, varlen.cu_seqlens, keys.cu_seqlens, varlen.max_seqlen, keys.max_seqlen, **options
        )
        return out[..., :value_dim]  # without the padding


def _repeat_heads(keys_or_values: Tensor, num_heads: int) -> Tensor:
    return keys_or_values.repeat_interleave(num_heads // keys_or_values.shape[1], dim=1)


def _window_and_causal_options(parameters: Collection[str], varlen: Varlen, window: int | None) -> dict[str, Any]:
    """Return the options of ``varlen_attn``, which has these parameters, that limit the keys a query sees."""
    if "window_size" in parameters:
        # How many keys before and after itself a query sees (-1: all of them), instead of is_causal.
        num_before = -1 if window is None else window - 1
        num_after = 0 if varlen.causal else -1
        return {"window_size": (num_before, num_after)}
    if window is not None and window < varlen.key_boundaries.max_seqlen:
        problem = f"torch {torch.__version__} has varlen attention without sliding windows"
        raise ConfigError(problem, "Install torch 2.11 or newer, or use --attn-impl sdpa.")
    return {"is_causal": varlen.causal}


@cache
def _varlen_module() -> Any:
    try:
        return importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's parameters; cached, because inspection takes as long as a small kernel."""
    return frozenset(inspect.signature(function).parameters)


class FlexKernel(Kernel):
    """FlexAttention with a block mask of the documents."""

    name = "flex"

    def availability_error(self, device: torch.device, dtype: torch.dtype) -> ConfigError | None:
        """Needs CUDA: the CPU has no backward pass."""
        if device.type != "cuda":
            return ConfigError(
                f"flex attention has no backward pass on the {device.type}", "Use sdpa, which runs anywhere."
            )
        return None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        keys = varlen.key_boundaries
        if window is not None and window >= keys.max_seqlen:
            window = None
        heads = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
        block_mask = _block_mask(varlen.host_lengths(), keys.host_lengths(), window, varlen.causal, q.device)
        attend, enable_gqa = _flex_function(q.device.type), q.shape[1] != k.shape[1]
        return attend(*heads, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)


@cache
def _flex_function(device_type: str) -> Callable[..., Any]:
    function: Any = flex.flex_attention
    return torch.compile(function) if device_type == "cuda" else function


@lru_cache(maxsize=4)
def _block_mask(
    lengths: tuple[int, ...], key_lengths: tuple[int, ...], window: int | None, causal: bool, device: torch.device
) -> Any:
    """Return FlexAttention's mask for attention within packed documents; cached for all layers with one window.

    Args:
        lengths: queries of each document.
        key_lengths: keys of each document, which may be more than its queries: these are the last of the keys.
        window: a query sees itself and at most ``window - 1`` tokens before it; None: all before it.
    """
    document_of_query = document_of_key = _document_of_token(lengths).to(device)
    key_shift_of_query = None  # by how much a token's index among all keys exceeds that among all queries
    if key_lengths != lengths:
        document_of_key = _document_of_token(key_lengths).to(device)
        key_shift_of_document = _key_shifts(lengths, key_lengths).to(device)
        key_shift_of_query = key_shift_of_document[document_of_query]

    def is_visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the query of one index sees the key of another, a bool tensor, as FlexAttention requires."""
        own_key = query if key_shift_of_query is None else query + key_shift_of_query[query]  # of the same token
        visible = document_of_query[query] == document_of_key[key]
        if causal:
            visible = visible & (key <= own_key)
        if window is not None:
            visible = visible & (key > own_key - window)
        return visible

    # On CUDA compiled, because otherwise create_block_mask first builds a mask of every query with every key.
    create = torch.compile(flex.create_block_mask) if device.type == "cuda" else flex.create_block_mask
    return create(is_visible, B=None, H=None, Q_LEN=sum(lengths), KV_LEN=sum(key_lengths), device=device)


def _key_shifts(lengths: Sequence[int], key_lengths: Sequence[int]) -> Tensor:
    """Return, int64 (S,), by how much a token's index among the keys exceeds that among the queries, per document."""
    return torch.tensor(key_lengths).cumsum(0) - torch.tensor(lengths).cumsum(0)


def _document_of_token(lengths: Sequence[int]) -> Tensor:
    """Return, int64 (T,), the index of the document that each of the packed tokens belongs to."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
