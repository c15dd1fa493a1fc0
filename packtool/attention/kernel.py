"""The one interface of all attention kernels.

A kernel computes attention inside each document of a packed sequence, and nowhere else: causal, or in both directions,
as towers of media have it; ``Varlen`` says which. Which kernel runs is a matter of speed: ``reference`` defines the
result, and tests compare every kernel with it, forward and backward.

| kernel | where | price |
|---|---|---|
| ``reference`` | anywhere, float64 | T x T scores: for tests |
| ``sdpa`` | anywhere | a call for each document and layer |
| ``varlen`` | CUDA, bfloat16 and float16 | one call for all documents |
| ``flash_attention_2``, ``flash_attention_3`` | CUDA, bfloat16 and float16; a package or a hub kernel | the same |
| ``flex`` | CUDA; on the CPU without gradients | compiles at first, and again for new shapes; a block mask a batch |
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.attention.varlen import Varlen
from packtool.errors import UnsupportedModelError

HALF_TYPES = (torch.bfloat16, torch.float16)
_MIN_CAPABILITY = (8, 0)
_HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class Unavailable:
    """Why a kernel cannot be used, and what to do about it."""

    reason: str
    remedy: str


class Kernel(abc.ABC):
    """Causal attention of every document on its own.

    Attributes:
        name: as ``--attn-impl`` has it.
        has_dropout: whether attention weights can be dropped.
        max_head_dim: largest D, or None.
        is_half_only: whether it computes numbers of 16 bits only.
    """

    name: str
    has_dropout: bool = False
    max_head_dim: int | None = None
    is_half_only: bool = False

    @abc.abstractmethod
    def unavailable(self, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
        """Why tensors of this device and type cannot be computed here; None if they can."""

    @abc.abstractmethod
    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention with what is needed to merge it with more keys of the same queries.

        Args:
            q: (T, Hq, D).
            k: (T', Hkv, D); Hq is a multiple of Hkv. T' is T but where ``varlen.keys`` says otherwise.
            v: (T', Hkv, D).
            varlen: boundaries of the documents; their lengths add up to T, those of its keys to T'.
            scale: factor on the scores, by default 1 / sqrt(D).
            window: a query sees itself and at most ``window - 1`` tokens before it.

        Returns:
            out (T, Hq, D), differentiable, and lse float32 (Hq, T), the logarithm of the sum of the exponentials of
            the scores, without a graph: no fast kernel differentiates it. The reference gives both in float64.
        """

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
        """The output of ``fwd``, (T, Hq, D), without the lse, where that is cheaper: what models call.

        The others of the arguments are as for ``fwd``.

        Args:
            dropout: probability with which an attention weight is zeroed; for kernels with ``has_dropout``.
        """
        if dropout:
            raise UnsupportedModelError(
                f"the model drops {dropout:g} of its attention weights, which {self.name} attention cannot",
                "Use --attn-impl sdpa, or set attention_dropout to 0 in the model's config.json.",
            )
        return self.fwd(q, k, v, varlen, scale=scale, window=window)[0]


def default_scale(q: Tensor, scale: float | None) -> float:
    """The factor on the scores: ``scale``, or 1 / sqrt(D) of q (T, H, D)."""
    return scale if scale is not None else 1 / math.sqrt(q.shape[-1])


def pad_heads(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """All three, (T, H, D), with heads of one size D, a multiple of 8, as flash kernels want them.

    Zeros behind a head of Q and K change no score; behind one of V they come out as zeros, to be cut off.
    """
    size = max(q.shape[-1], v.shape[-1])
    size += -size % _HEAD_MULTIPLE
    return [F.pad(heads, (0, size - heads.shape[-1])) if heads.shape[-1] != size else heads for heads in (q, k, v)]


def needs_fast_gpu(name: str, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
    """What all flash kernels have in common: an NVIDIA GPU since Ampere, and numbers of 16 bits."""
    if device.type != "cuda":
        return Unavailable(
            f"{name} attention runs on CUDA only, and this run is on the {device.type}",
            "Use sdpa, which runs anywhere.",
        )
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return Unavailable(f"{name} attention needs a GPU since Ampere (compute capability 8.0)", "Use sdpa.")
    return needs_half(name, dtype)


def needs_half(name: str, dtype: torch.dtype) -> Unavailable | None:
    """What flash kernels can never compute, on whatever machine."""
    if dtype not in HALF_TYPES:
        shown = str(dtype).removeprefix("torch.")
        return Unavailable(
            f"{name} attention computes in bfloat16 or float16, and this run is in {shown}",
            "Use --torch-dtype bfloat16, or sdpa.",
        )
    return None
