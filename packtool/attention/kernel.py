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

Where the documents of a packed sequence lie, and what each of their tokens sees.

Three documents of 3, 2 and 4 tokens, ``cu_seqlens = [0, 3, 5, 9]``; a query (row) sees the keys (columns) marked x::

        a a a b b c c c c
    a   x . . . . . . . .
    a   x x . . . . . . .
    a   x x x . . . . . .
    b   . . . x . . . . .
    b   . . . x x . . . .
    c   . . . . . x . . .
    c   . . . . . x x . .
    c   . . . . . x x x .
    c   . . . . . x x x x

Documents that begin alike can have their common prefix computed once. A prefix p of 3 tokens with the continuations a
and b, of 2 tokens each, are 7 tokens, ``cu_seqlens = [0, 3, 5, 7]``. Their keys and values are gathered into the layout
of whole documents, ``keys.cu_seqlens = [0, 3, 8, 13]``, and the queries of a document are the last of its keys::

        p p p p p p a a p p p b b
    p   x . . . . . . . . . . . .
    p   x x . . . . . . . . . . .
    p   x x x . . . . . . . . . .
    a   . . . x x x x . . . . . .
    a   . . . x x x x x . . . . .
    b   . . . . . . . . x x x x .
    b   . . . . . . . . x x x x x

No kernel builds this mask but the reference. Shapes use T packed tokens, S documents, Hq and Hkv heads, D head size.

What every attention kernel is compared with: dense, in float64, with the whole mask written out.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.errors import UnsupportedModelError


class LeakError(RuntimeError):
    """A call in which one document of a pack could see another: a bug in the caller, or a model that is not known."""


@dataclass(frozen=True, eq=False)
class Varlen:
    """Where the documents of a packed sequence lie.

    Args:
        cu_seqlens: int32 (S + 1,), starts of the documents and T at the end.
        max_seqlen: tokens of the longest one.
        lengths: the S lengths on the host, if the caller has them; saves reading ``cu_seqlens`` back from a GPU.
        causal: no token sees later ones; False, as in the towers of media, each sees its whole document.
        keys: where the S documents of keys and values lie, if these begin before their queries do: document i of the
            queries is the end of document i of the keys, and none has keys alone. None where both are the same tokens.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] | None = None
    causal: bool = True
    keys: Varlen | None = None

    @property
    def of_keys(self) -> Varlen:
        """The documents of keys and values; itself where they are those of the queries."""
        return self if self.keys is None else self.keys

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Varlen:
        """Documents of these lengths, end to end."""
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return cls(cu_seqlens, max(lengths, default=0), tuple(lengths))

    def host_lengths(self) -> tuple[int, ...]:
        """Length of every document, as Python integers."""
        if self.lengths is not None:
            return self.lengths
        return tuple(self.cu_seqlens.diff().tolist())

    def documents(self, num_tokens: int) -> Iterator[slice]:
        """The tokens of each document that has any, in order.

        Args:
            num_tokens: T of the sequence, which the documents must add up to.
        """
        lengths = self.host_lengths()
        # Tokens behind the last document would be left without an output, silently.
        assert sum(lengths) == num_tokens, "the documents do not add up to the packed sequence"
        start = 0
        for length in lengths:
            if length:
                yield slice(start, start + length)
            start += length


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


class ReferenceKernel(Kernel):
    """Causal attention within documents, by definition; O(T^2) memory, for tests and ``packtool verify``."""

    name = "reference"

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> Unavailable | None:
        """Everywhere where there is float64."""
        if device.type == "mps":
            return Unavailable("the reference needs float64, which this device lacks", "Use the CPU.")
        return None

    def fwd(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, *, scale: float | None = None, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend as ``Kernel.fwd`` says, but in float64 and with a graph for the lse too."""
        num_tokens, num_heads, _ = q.shape
        scale = default_scale(q, scale)
        groups = num_heads // k.shape[1]
        q, k, v = q.double(), k.double().repeat_interleave(groups, dim=1), v.double().repeat_interleave(groups, dim=1)
        query, query_ends = _places(num_tokens, varlen)
        key, key_ends = _places(len(k), varlen.of_keys)
        visible = query[:, None] == key[None, :]
        # Counted back from the end of the document, which both have in common.
        if varlen.causal:
            visible &= query_ends[:, None] >= key_ends[None, :]
        if window is not None:
            visible &= key_ends[None, :] > query_ends[:, None] - window
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        scores = scores.masked_fill(~visible, -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)

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
        """Attend as ``Kernel.attend`` says, in float64; of the type that q has, as the next layers expect."""
        return super().attend(q, k, v, varlen, scale=scale, window=window, dropout=dropout).to(q.dtype)


def _places(num_tokens: int, varlen: Varlen) -> tuple[Tensor, Tensor]:
    """The number of each token's document, and its distance to the end of it, below zero; int64 (T,) each."""
    index = torch.arange(num_tokens, device=varlen.cu_seqlens.device)
    ends = varlen.cu_seqlens.to(index)[1:]
    document = torch.bucketize(index, ends, right=True)
    return document, index - ends[document]
