"""Flash attention 2 and 3, from their packages or, where ``kernels`` is installed, from the hub.

The packages are ``flash-attn`` (module ``flash_attn``) and ``flash-attn-3`` (``flash_attn_interface``). The hub's
kernels are those that transformers takes; ``auto`` uses one only if it has been downloaded before, asking for it by
name downloads it.

torch's own varlen attention: one call for all documents, on CUDA, without a further package.

Its arguments have grown: torch 2.10 has neither a scale nor windows, 2.11 has both, 2.12 also takes fewer heads of K
and V than of Q [read in the documentation of each, and in the source of 2.15]. What is missing is made up for here, but
for windows.

torch's flex attention with a block mask of the documents.

On a GPU it is compiled: the first call takes a minute, and so does a new shape until the compiler has learned which
sizes vary. On the CPU it runs as written, dense and without gradients [ran: NotImplementedError in 2.15], which is
enough to compare its masks with the reference, and not to train.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from packtool.attention.kernel import Kernel, Unavailable, Varlen, default_scale, needs_fast_gpu, pad_heads
from packtool.errors import ConfigError

_MODULES = {2: "flash_attn", 3: "flash_attn_interface"}
_PACKAGES = {2: "flash-attn", 3: "flash-attn-3"}
_HUB = {2: "kernels-community/flash-attn2", 3: "kernels-community/vllm-flash-attn3"}
_HOPPER = 9


class FlashKernel(Kernel):
    """Flash attention of one of its versions.

    Args:
        version: 2 or 3.
    """

    max_head_dim = 256
    is_half_only = True

    def __init__(self, version: int) -> None:
        self.version = version
        self.name = f"flash_attention_{version}"
        self.has_dropout = version == 2

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
        """The reason: no CUDA, 32 bits, no package, or for version 3 a GPU before Hopper."""
        if not _has_package(self.version) and importlib.util.find_spec("kernels") is None:
            return Unavailable(
                f"neither {_PACKAGES[self.version]} is installed, nor kernels, which fetches it from the hub",
                f"pip install kernels, or {_PACKAGES[self.version]}; or use varlen, which is torch's own.",
            )
        if missing := needs_fast_gpu(f"flash attention {self.version}", device, dtype):
            return missing
        if self.version == 3 and torch.cuda.get_device_capability(device)[0] < _HOPPER:
            return Unavailable("flash attention 3 needs a GPU since Hopper", "Use flash_attention_2, or varlen.")
        return None

    def is_at_hand(self) -> bool:
        """Whether nothing has to be downloaded."""
        return _has_package(self.version) or _is_downloaded(_HUB[self.version])

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``Kernel.fwd`` says.

        Raises:
            ConfigError: for a build of version 3 that keeps the lse to itself, as those of flash-attention 2.8.2 do.
        """
        found = self._call(q, k, v, varlen, scale, window, _asking_for_lse(_function(self.version)))
        if not isinstance(found, tuple):
            raise ConfigError(
                f"this build of {_PACKAGES[self.version]} does not tell the lse of its attention",
                "Install one of September 2025 or later, or use --attn-impl varlen.",
            )
        out, lse = found[:2]
        return out[..., : v.shape[-1]], lse.detach()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        varlen: Varlen,
        *,
        scale: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend as ``Kernel.attend`` says; version 2 also applies dropout to the weights."""
        if dropout and not self.has_dropout:
            return super().attend(q, k, v, varlen, scale=scale, window=window, dropout=dropout)
        found = self._call(q, k, v, varlen, scale, window, {"dropout_p": dropout} if dropout else {})
        return (found[0] if isinstance(found, tuple) else found)[..., : v.shape[-1]]

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float | None, window: int | None, more: Any
    ) -> Any:
        keys = varlen.of_keys
        return _function(self.version)(
            *pad_heads(q, k, v),
            cu_seqlens_q=varlen.cu_seqlens,
            cu_seqlens_k=keys.cu_seqlens,
            max_seqlen_q=varlen.max_seqlen,
            max_seqlen_k=keys.max_seqlen,
            softmax_scale=default_scale(q, scale),
            causal=varlen.causal,
            # A query of the kernel's window sees so many keys before itself; -1 is all of them.
            window_size=(-1 if window is None else window - 1, 0 if window is not None else -1),
            **more,
        )


def _asking_for_lse(function: Callable[..., Any]) -> dict[str, bool]:
    """The argument that adds the lse to the result; the hub's and early builds of version 3 always tell it."""
    name = "return_attn_probs"
    return {name: True} if name in inspect.signature(function).parameters else {}


def _has_package(version: int) -> bool:
    if importlib.util.find_spec(_MODULES[version]) is None:
        return False
    # Flash attention 4 is a module flash_attn, too, without this function.
    return hasattr(importlib.import_module(_MODULES[version]), "flash_attn_varlen_func")


def _is_downloaded(repository: str) -> bool:
    if importlib.util.find_spec("kernels") is None:
        return False
    from huggingface_hub import constants

    folders = (f"{kind}--{repository.replace('/', '--')}" for kind in ("kernels", "models"))
    return any(os.path.isdir(os.path.join(constants.HF_HUB_CACHE, folder)) for folder in folders)


@cache
def _function(version: int) -> Callable[..., Any]:
    if _has_package(version):
        return importlib.import_module(_MODULES[version]).flash_attn_varlen_func
    # transformers knows which version of each kernel its own code was tried with.
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    functions, _ = lazy_import_flash_attention(_HUB[version])
    return functions[1]


class TorchVarlenKernel(Kernel):
    """``torch.nn.attention.varlen``: one call for all documents of a sequence, on CUDA."""

    name = "varlen"
    max_head_dim = 256
    is_half_only = True

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
        """The reason where there is no CUDA, 32 bits are asked for, or torch is older than 2.10."""
        if _module() is None:
            return Unavailable(
                f"torch {torch.__version__} has no torch.nn.attention.varlen",
                "Install torch 2.10 or newer, or use sdpa.",
            )
        return needs_fast_gpu("torch's varlen", device, dtype)

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``Kernel.fwd`` says.

        Raises:
            ConfigError: for a window, where this torch's function has none.
        """
        module: Any = _module()
        known, keys = _parameters(module.varlen_attn), varlen.of_keys
        scale, head_dim = default_scale(q, scale), v.shape[-1]
        q, k, v = pad_heads(q, k, v)
        given: dict[str, Any] = {"return_aux": module.AuxRequest(lse=True)}
        if "window_size" in known:
            # A query of the kernel's window sees so many keys before and behind itself; -1 is all of them.
            given["window_size"] = (-1 if window is None else window - 1, 0 if varlen.causal else -1)
        elif window is not None and window < keys.max_seqlen:
            raise ConfigError(
                f"torch {torch.__version__} has varlen attention without sliding windows",
                "Install torch 2.11 or newer, or use --attn-impl sdpa.",
            )
        else:
            given["is_causal"] = varlen.causal
        if "scale" in known:
            given["scale"] = scale
        else:
            q = q * (scale * math.sqrt(q.shape[-1]))
        if "enable_gqa" in known:
            given["enable_gqa"] = q.shape[1] != k.shape[1]
        else:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        # Where both bounds are one tensor, torch may take cuDNN, which aligns causal masks at the beginning.
        bounds, longest = (varlen.cu_seqlens, keys.cu_seqlens), (varlen.max_seqlen, keys.max_seqlen)
        out, lse = module.varlen_attn(q, k, v, *bounds, *longest, **given)
        return out[..., :head_dim], lse.detach()


@cache
def _module() -> Any:
    try:
        return importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """What a function takes; to look costs as much as a small kernel."""
    return frozenset(inspect.signature(function).parameters)


class FlexKernel(Kernel):
    """FlexAttention with a block mask of the documents."""

    name = "flex"

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
        """The reason where there is no CUDA: the CPU has no backward pass."""
        if device.type != "cuda":
            return Unavailable(
                f"flex attention has no backward pass on the {device.type}", "Use sdpa, which runs anywhere."
            )
        return None

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``Kernel.fwd`` says; on the CPU there are no gradients."""
        keys = varlen.of_keys
        if window is not None and window >= keys.max_seqlen:
            window = None
        heads = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
        function, given = _compiled_flex(q.device.type), _lse_arguments()
        out, told = function(
            *heads,
            block_mask=_block_mask(varlen.host_lengths(), keys.host_lengths(), window, varlen.causal, q.device),
            scale=default_scale(q, scale),
            enable_gqa=q.shape[1] != k.shape[1],
            **given,
        )
        lse = told if isinstance(told, Tensor) else told.lse
        return out[0].transpose(0, 1), lse[0].detach().float()


@cache
def _compiled_flex(device_type: str) -> Callable[..., Any]:
    function: Any = flex.flex_attention
    return torch.compile(function) if device_type == "cuda" else function


def _lse_arguments() -> dict[str, Any]:
    """``return_lse`` gave way to ``return_aux``."""
    if "return_aux" in inspect.signature(flex.flex_attention).parameters:
        return {"return_aux": flex.AuxRequest(lse=True)}
    return {"return_lse": True}


@lru_cache(maxsize=4)
def _block_mask(
    lengths: tuple[int, ...], key_lengths: tuple[int, ...], window: int | None, causal: bool, device: torch.device
) -> Any:
    """Which blocks of the scores hold anything; the same for all layers of a batch with one window."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    of_keys, shift = documents, None
    if key_lengths != lengths:
        of_keys = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(key_lengths)).to(device)
        # From a query's place to that of the key that is the same token.
        shift = (torch.tensor(key_lengths).cumsum(0) - torch.tensor(lengths).cumsum(0)).to(device)[documents]

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[query] == of_keys[key]
        at = query if shift is None else query + shift[query]
        same = same & (at >= key) if causal else same
        return same if window is None else same & (key > at - window)

    # Uncompiled it would build the whole T x T' mask first.
    make = torch.compile(flex.create_block_mask) if device.type == "cuda" else flex.create_block_mask
    return make(visible, None, None, sum(lengths), sum(key_lengths), device=device)
