"""The interface of all attention kernels, the documents that they keep apart, and the reference.

A kernel computes attention inside each document of a packed sequence and nowhere else: causal, or in both directions as
in the towers of media. All kernels compute the same; they differ in speed and in what they need:

| kernel | where | cost |
|---|---|---|
| ``reference`` | anywhere, float64 | T x T scores: for tests |
| ``sdpa`` | anywhere | one call per document and layer |
| ``varlen`` | CUDA, bfloat16 and float16 | one call for all documents |
| ``flash_attention_2``, ``flash_attention_3`` | CUDA, bfloat16 and float16; a package or a hub kernel | the same |
| ``flex`` | CUDA; on the CPU without gradients | compiles at first and for new shapes; one block mask per batch |

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
of complete documents, ``keys.cu_seqlens = [0, 3, 8, 13]``, and the queries of a document are the last of its keys::

        p p p p p p a a p p p b b
    p   x . . . . . . . . . . . .
    p   x x . . . . . . . . . . .
    p   x x x . . . . . . . . . .
    a   . . . x x x x . . . . . .
    a   . . . x x x x x . . . . .
    b   . . . . . . . . x x x x .
    b   . . . . . . . . x x x x x

Only the reference builds this mask. Shapes use T packed tokens, S documents, Hq and Hkv heads, D head size.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.errors import ConfigError, UnsupportedModelError


class LeakError(RuntimeError):
    """A call in which one document of a pack could see another: a bug in the caller, or an unknown kind of model."""


def refuse_leaks(
    layer: object, states: Tensor, mask: Tensor | None, kwargs: Mapping[str, Any], parallel: object
) -> None:
    """Raise a LeakError if documents of a pack could see each other in a layer's call.

    ``states`` are queries or hidden states, (1, ...), and ``parallel`` the ranks that share the sequences, if any.
    """
    name = type(layer).__name__
    is_shard = kwargs.get("sequence_shard") is not None
    if is_shard and parallel is None:
        raise LeakError(f"{name} was given a part of a sequence, but the model was not told which ranks have the rest")
    if not is_shard and kwargs.get("cu_seq_lens_q") is None:
        raise LeakError(f"{name} was called without cu_seq_lens_q: the documents of a pack could not be told apart")
    if mask is not None:
        raise LeakError(f"{name} was given a mask; packed documents are told apart by cu_seq_lens_q alone")
    if len(states) != 1:
        raise LeakError(f"{name} was given {len(states)} sequences; a packed micro-batch is one sequence")


@dataclass(frozen=True, eq=False)
class Varlen:
    """Document boundaries of a packed sequence.

    Args:
        cu_seqlens: int32 (S + 1,), starts of the documents and T at the end.
        max_seqlen: tokens of the longest document.
        lengths: the S lengths on the host, if known; saves reading ``cu_seqlens`` back from a GPU.
        causal: no token sees later ones; False: each sees its complete document, as in the towers of media, and in
            models that see a picture as a whole; with a window, all of it but tokens too far before.
        keys: boundaries of the S documents of keys and values, if these begin before their queries: the queries of
            document i are the last tokens of its keys. None where queries and keys are the same tokens.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] | None = None
    causal: bool = True
    keys: Varlen | None = None

    @property
    def key_boundaries(self) -> Varlen:
        """Boundaries of the documents of keys and values; itself where they are those of the queries."""
        return self if self.keys is None else self.keys

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Varlen:
        """Documents of these lengths, end to end."""
        # Created on the host: creating it on the device would wait for all kernels.
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device=device, non_blocking=True)
        return cls(cu_seqlens, max(lengths, default=0), tuple(lengths))

    def host_lengths(self) -> tuple[int, ...]:
        """Length of every document, as Python integers."""
        return tuple(self.cu_seqlens.diff().tolist()) if self.lengths is None else self.lengths

    def documents(self, num_tokens: int) -> Iterator[slice]:
        """The tokens of each document that has any, in order; the documents must add up to ``num_tokens``."""
        lengths = self.host_lengths()
        # Tokens behind the last document would be left without an output, silently.
        assert sum(lengths) == num_tokens, "the documents do not add up to the packed sequence"
        for start, stop in pairwise(accumulate(lengths, initial=0)):
            if start < stop:
                yield slice(start, stop)

    def positions(self, num_tokens: int) -> Tensor:
        """Return the position of each of the T queries among the keys of its document, int64 (T,)."""
        # A document's last query is its last key.
        ends, key_ends = self.cu_seqlens.long(), self.key_boundaries.cu_seqlens.long()
        shifts = (key_ends.diff() - ends[1:]).repeat_interleave(ends.diff(), output_size=num_tokens)
        return torch.arange(num_tokens, device=ends.device) + shifts

    def cut_into_chunks(self, chunk_size: int) -> tuple[Varlen, Tensor | None]:
        """Cut each document into chunks of ``chunk_size`` keys, for layers whose queries see only their own chunk.

        The queries of a document are its last keys. Chunks count from its first key; those without queries are left
        out. Chunks of 4 for a document of 7 keys and 5 queries: 4 keys with 2 queries, then 3 keys with 3 queries.

        Returns:
            The boundaries of the chunks; and the indexes of their keys among the keys of all documents, int64 (T'',),
            or None if these are all keys.
        """
        key_lengths = self.key_boundaries.host_lengths()
        if max(key_lengths, default=0) <= chunk_size:
            return self, None
        query_counts: list[int] = []  # of each chunk
        key_counts: list[int] = []  # of each chunk
        kept_keys: list[Tensor] = []  # of each document
        document_start = 0  # index of its first key among the keys of all documents
        for num_queries, num_keys in zip(self.host_lengths(), key_lengths, strict=True):
            first_query = num_keys - num_queries  # among the document's keys
            num_skipped = first_query // chunk_size * chunk_size if num_queries else num_keys
            for chunk_start in range(num_skipped, num_keys, chunk_size):
                chunk_stop = min(chunk_start + chunk_size, num_keys)
                query_counts.append(chunk_stop - max(chunk_start, first_query))
                key_counts.append(chunk_stop - chunk_start)
            kept_keys.append(torch.arange(document_start + num_skipped, document_start + num_keys))
            document_start += num_keys
        device = self.cu_seqlens.device
        chunks = Varlen.of_lengths(query_counts, device)
        if self.keys is None:
            return chunks, None
        chunks = dataclasses.replace(chunks, keys=Varlen.of_lengths(key_counts, device))
        return chunks, torch.cat(kept_keys).to(device=device, non_blocking=True)


_QUERY_NAMES = "cu_seq_lens_q", "max_length_q", "document_lengths"
_KEY_NAMES = "cu_seq_lens_k", "max_length_k", "key_lengths", "key_index", "document_parents"
_BOUNDARY_NAMES = frozenset((*_QUERY_NAMES, *_KEY_NAMES, "sequence_shard", "whole_pictures", "cross_pictures"))
_HIDDEN_NAME = "packtool_boundaries"


class _Opaque:
    """Container of keyword arguments that torch.compile does not inspect."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


def hide_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Put the document boundaries among a layer's keyword arguments into one opaque object.

    Otherwise torch.compile, which guards all that it can see, would compile a layer again for nearly every micro-batch.
    """
    hidden = {name: value for name, value in kwargs.items() if name in _BOUNDARY_NAMES}
    return {name: value for name, value in kwargs.items() if name not in hidden} | {_HIDDEN_NAME: _Opaque(hidden)}


def reveal_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Undo ``hide_boundaries``; keyword arguments without hidden boundaries stay as they are."""
    if (opaque := kwargs.get(_HIDDEN_NAME)) is None:
        return kwargs
    return {name: value for name, value in kwargs.items() if name != _HIDDEN_NAME} | opaque.arguments


def add_up_rows(index: Tensor, num_rows: int, *tensors: Tensor) -> list[Tensor]:
    """Add each row of ``tensors``, (T', ...), to the row ``index``, int64 (T',), of zeros; return (num_rows, ...) each.

    Rows are added in float32 (float64 for float64), in the order in which the index has them. So sums in bfloat16 are
    rounded once, and two runs on a GPU are bit-identical, which floating-point ``index_add`` does not guarantee.
    """
    by_row = torch.argsort(index, stable=True)  # rows of one sum keep their order
    counts = torch.zeros(num_rows, dtype=torch.int64, device=index.device)
    counts.index_add_(0, index, torch.ones_like(index))
    sums = []
    for tensor in tensors:
        addends = tensor.index_select(0, by_row).to(torch.promote_types(tensor.dtype, torch.float32))
        # Without ``unsafe`` it would wait for the GPU to check the lengths.
        total = torch.segment_reduce(addends, "sum", lengths=counts, axis=0, unsafe=True)
        sums.append(total.to(tensor.dtype))
    return sums


class Kernel(abc.ABC):
    """Attention computed separately for every document.

    Attributes:
        name: the value of ``--attn-impl``.
        max_head_dim: maximum head size D; None for no limit.
        is_half_only: whether it supports only 16-bit types.
    """

    name: str
    has_dropout: bool = False
    max_head_dim: int | None = None
    is_half_only: bool = False

    def availability_error(self, device: torch.device, dtype: torch.dtype) -> ConfigError | None:
        """Return why this kernel cannot compute tensors of this device and type, with a remedy; None if it can."""
        return None

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
        """Compute attention within each document; return (T, Hq, D) in the type of q, differentiable.

        Args:
            q: (T, Hq, D).
            k, v: (T', Hkv, D); Hq is a multiple of Hkv. T' is T unless ``varlen.keys`` is set.
            varlen: boundaries of the documents in q, and with ``keys`` of those in k and v.
            scale: factor on the scores, by default 1 / sqrt(D).
            window: a query sees at most ``window - 1`` tokens before it.
            dropout: probability with which an attention weight is zeroed; for kernels with ``has_dropout``.
        """
        if dropout and not self.has_dropout:
            raise UnsupportedModelError(
                f"the model drops {dropout:g} of its attention weights, which {self.name} attention cannot",
                "Use --attn-impl sdpa, or set attention_dropout to 0 in the model's config.json.",
            )
        return self._attend(q, k, v, varlen, default_scale(q, scale), window, dropout)

    @abc.abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        """Implement ``attend``, with its default scale filled in and dropout already checked."""


def default_scale(q: Tensor, scale: float | None) -> float:
    """Return the factor on the scores: ``scale``, or 1 / sqrt(D) of q (T, H, D)."""
    return scale if scale is not None else 1 / math.sqrt(q.shape[-1])


def pad_heads(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Pad q, k and v (T, H, D) to one head size D that is a multiple of 8, which flash kernels require.

    Zeros appended to a head of Q and K change no score; those appended to V come out as zeros, to be cut off.
    """
    size = max(q.shape[-1], v.shape[-1])
    size += -size % 8
    return [F.pad(heads, (0, size - heads.shape[-1])) if heads.shape[-1] != size else heads for heads in (q, k, v)]


def fast_gpu_error(name: str, device: torch.device, dtype: torch.dtype) -> ConfigError | None:
    """Return an error unless the GPU is Ampere or newer and the numbers have 16 bits, as flash kernels require."""
    if device.type != "cuda":
        problem = f"{name} attention runs on CUDA only, and this run is on the {device.type}"
        return ConfigError(problem, "Use sdpa, which runs anywhere.")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return ConfigError(f"{name} attention needs a GPU since Ampere (compute capability 8.0)", "Use sdpa.")
    return half_precision_error(name, dtype)


def half_precision_error(name: str, dtype: torch.dtype) -> ConfigError | None:
    """Return an error unless ``dtype`` has 16 bits, which flash kernels require on every GPU."""
    if dtype in (torch.bfloat16, torch.float16):
        return None
    run_dtype = str(dtype).removeprefix("torch.")
    problem = f"{name} attention computes in bfloat16 or float16, and this run is in {run_dtype}"
    return ConfigError(problem, "Use --torch-dtype bfloat16, or sdpa.")


class ReferenceKernel(Kernel):
    """Attention by its definition, dense, in float64; O(T^2) memory, for tests and ``packtool verify``."""

    name = "reference"

    def availability_error(self, device: torch.device, dtype: torch.dtype) -> ConfigError | None:
        """Available on every device with float64."""
        if device.type == "mps":
            return ConfigError("the reference needs float64, which this device lacks", "Use the CPU.")
        return None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        values = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        scores = self.scores(q, k, varlen, scale, window)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)

    @staticmethod
    def scores(q: Tensor, k: Tensor, varlen: Varlen, scale: float, window: int | None = None) -> Tensor:
        """Scores of q (T, Hq, D) and k (T', Hkv, D), float64 (Hq, T, T'); -inf where a query does not see a key."""
        query, query_ends = _positions_from_end(len(q), varlen)
        key, key_ends = _positions_from_end(len(k), varlen.key_boundaries)
        visible = query[:, None] == key[None, :]
        # Queries and keys of a document end with the same token, so positions are counted back from it.
        if varlen.causal:
            visible &= query_ends[:, None] >= key_ends[None, :]
        if window is not None:
            visible &= key_ends[None, :] > query_ends[:, None] - window
        keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return (torch.einsum("qhd,khd->hqk", q.double(), keys) * scale).masked_fill(~visible, -math.inf)


def _positions_from_end(num_tokens: int, varlen: Varlen) -> tuple[Tensor, Tensor]:
    """Return each token's document number and its (negative) distance to the document's end, int64 (T,) each."""
    index = torch.arange(num_tokens, device=varlen.cu_seqlens.device)
    ends = varlen.cu_seqlens.to(index)[1:]
    document = torch.bucketize(index, ends, right=True)
    return document, index - ends[document]
