"""Flash attention 2 and 3, from their packages or, where ``kernels`` is installed, from the hub.

The packages are ``flash-attn`` (module ``flash_attn``) and ``flash-attn-3`` (``flash_attn_interface``). The hub's
kernels are those that transformers takes; ``auto`` uses one only if it has been downloaded before, asking for it by
name downloads it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from packtool.attention.kernel import Kernel, Unavailable, default_scale, needs_fast_gpu, pad_heads
from packtool.attention.varlen import Varlen
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
