"""torch's flex attention with a block mask of the documents.

On a GPU it is compiled: the first call takes a minute, and so does a new shape until the compiler has learned which
sizes vary. On the CPU it runs as written, dense and without gradients [ran: NotImplementedError in 2.15], which is
enough to compare its masks with the reference, and not to train.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from packtool.attention.kernel import Kernel, Unavailable, default_scale
from packtool.attention.varlen import Varlen


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
        function, given = _function(q.device.type), _asking_for_lse()
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
def _function(device_type: str) -> Callable[..., Any]:
    function: Any = flex.flex_attention
    return torch.compile(function) if device_type == "cuda" else function


def _asking_for_lse() -> dict[str, Any]:
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
