"""torch's own varlen attention: one call for all documents, on CUDA, without a further package.

Its arguments have grown: torch 2.10 has neither a scale nor windows, 2.11 has both, 2.12 also takes fewer heads of K
and V than of Q [read in the documentation of each, and in the source of 2.15]. What is missing is made up for here, but
for windows.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from packtool.attention.kernel import Kernel, Unavailable, default_scale, needs_fast_gpu, pad_heads
from packtool.attention.varlen import Varlen
from packtool.errors import ConfigError


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
