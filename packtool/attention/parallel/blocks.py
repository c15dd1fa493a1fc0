"""Attention of some queries to some keys: its results can be merged, and its backward pass takes the final ones.

A sequence that several ranks share is attended to in blocks: the queries of one rank, the keys of another. Each block
returns the output and the lse of its own keys; merged in float32 they are those of all keys,

    lse' = logaddexp(lse, lse_b)      out' = exp(lse - lse') out + exp(lse_b - lse') out_b

and the gradients of each block follow from the *final* out and lse (Dao 2023, "FlashAttention-2", section 3.1.2; Liu
et al. 2023, "Ring Attention with Blockwise Transformers"): with D = rowsum(dout * out) and P = exp(S - lse),

    dv_b = P^T dout      dS = P * (dout v_b^T - D)      dq += scale dS k_b      dk_b = scale dS^T q

Shapes: T queries and T' keys of S documents each, Hq and Hkv heads of D numbers.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from packtool.attention.kernel import Varlen, fast_gpu_error, pad_heads
from packtool.batch.prefix_tree import ROOT
from packtool.batch.shard import Int64Array, SequenceShard
from packtool.config.packing import SEQUENCE_PARALLEL_KERNELS
from packtool.errors import ConfigError

_MATH_QUERIES = 256
_MAX_CUDA_FLASH_HEAD_DIM = 256
_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Queries and the keys that they see.

    Args:
        queries: the S documents of the queries.
        keys: those of the keys; document i of the queries sees document i of the keys, and nothing else.
        causal: queries and keys are the same tokens, and none sees later ones; otherwise each query sees all keys.
        window: with ``causal``, a query sees itself and at most ``window - 1`` tokens before it.
    """

    queries: Varlen
    keys: Varlen
    causal: bool
    scale: float
    window: int | None = None

    def documents(self, num_queries: int, num_keys: int) -> Iterator[tuple[slice, slice]]:
        """Yield the queries and keys of each document that has both."""
        query_lengths, key_lengths = self.queries.host_lengths(), self.keys.host_lengths()
        assert (sum(query_lengths), sum(key_lengths)) == (num_queries, num_keys), "the documents do not add up"
        query, key = 0, 0
        for query_length, key_length in zip(query_lengths, key_lengths, strict=True):
            if query_length and key_length:
                yield slice(query, query + query_length), slice(key, key + key_length)
            query, key = query + query_length, key + key_length

    def split_queries(self, queries: slice, keys: slice, max_queries: int) -> Iterator[tuple[slice, slice]]:
        """Yield a document's queries, at most ``max_queries`` at a time, and the range of the keys that they see."""
        num_queries = queries.stop - queries.start
        for start in range(0, num_queries, max_queries):
            stop = min(start + max_queries, num_queries)
            seen_keys = keys
            if self.causal:
                first_key = 0 if self.window is None else max(0, start - self.window + 1)
                seen_keys = slice(keys.start + first_key, keys.start + stop)
            yield slice(queries.start + start, queries.start + stop), seen_keys

    def mask(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """bool (queries, keys) of two slices of one causal document that end with the same token."""
        # Positions are counted back from that token.
        query_at = torch.arange(queries.start - queries.stop, 0, device=device).unsqueeze(1)
        key_at = torch.arange(keys.start - keys.stop, 0, device=device)
        visible = key_at <= query_at
        return visible if self.window is None else visible & (key_at > query_at - self.window)


class BlockKernel(abc.ABC):
    """Attention of blocks; without a graph, as the callers are autograd functions themselves."""

    name: str

    @abc.abstractmethod
    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Return the output (T, Hq, D) of attention, and its lse, float32 (Hq, T), float64 for float64.

        q is (T, Hq, D), k and v are (T', Hkv, D). Queries without keys have an output of 0 and an lse of -inf.
        """

    @abc.abstractmethod
    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        """Return this block's part of the gradients of q, k and v, from the final grad (T, Hq, D), out and lse."""


class MathBlockKernel(BlockKernel):
    """The formulas above in float32 (float64 for float64), 256 queries at a time; shapes: see ``BlockKernel``."""

    name = "math"

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        dtype = _wide(q.dtype)
        out = q.new_zeros((*q.shape[:2], v.shape[-1]))
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=dtype)
        for queries, keys, scores in self._scores(q, k, block):
            part_lse = scores.logsumexp(-1)
            weights = (scores - part_lse.unsqueeze(-1)).exp()
            out[queries] = _from_groups(weights @ v[keys].to(dtype).transpose(0, 1).unsqueeze(1)).to(out.dtype)
            lse[:, queries] = part_lse.flatten(0, 1)
        return out, lse

    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        dtype, num_groups = _wide(q.dtype), k.shape[1]
        dq, dk, dv = (torch.zeros_like(tensor, dtype=dtype) for tensor in (q, k, v))
        for queries, keys, scores in self._scores(q, k, block):
            final = torch.unflatten(lse[:, queries].to(dtype), 0, (num_groups, -1)).unsqueeze(-1)
            weights = (scores - final).exp()
            dout, final_out = (_in_groups(tensor[queries], num_groups) for tensor in (grad, out))
            from_values = dout @ v[keys].to(dtype).transpose(0, 1).unsqueeze(1).transpose(-1, -2)
            slope = weights * (from_values - (dout * final_out).sum(-1, keepdim=True)) * block.scale
            dq[queries] += _from_groups(slope @ k[keys].to(dtype).transpose(0, 1).unsqueeze(1))
            # The query heads of a group share one head of K and V: their gradients add up.
            dk[keys] += (slope.transpose(-1, -2) @ _in_groups(q[queries], num_groups)).sum(1).transpose(0, 1)
            dv[keys] += (weights.transpose(-1, -2) @ dout).sum(1).transpose(0, 1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(q: Tensor, k: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, slice, Tensor]]:
        """Queries, keys and their scores (Hkv, Hq / Hkv, queries, keys)."""
        for document, document_keys in block.documents(len(q), len(k)):
            for queries, keys in block.split_queries(document, document_keys, _MATH_QUERIES):
                grouped_keys = k[keys].to(_wide(q.dtype)).permute(1, 2, 0).unsqueeze(1)
                scores = _in_groups(q[queries], k.shape[1]) @ grouped_keys * block.scale
                if block.causal:
                    scores = scores.masked_fill(~block.mask(queries, keys, q.device), -torch.inf)
                yield queries, keys, scores


class CpuFlashBlockKernel(BlockKernel):
    """torch's flash attention for the CPU, one call per document; shapes: see ``BlockKernel``."""

    name = "cpu_flash"

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=_wide(q.dtype))
        attend = getattr(torch.ops.aten, _CPU_FLASH)
        for queries, keys, options in self._calls(q, k, block):
            part, part_lse = attend(*_one_head_each(q[queries], k[keys], v[keys]), **options)
            out[queries] = _from_groups(part)
            lse[:, queries] = part_lse.flatten(0, 1).to(lse.dtype)
        return out, lse

    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
        attend = getattr(torch.ops.aten, _CPU_FLASH + "_backward")
        num_groups = k.shape[1]
        for queries, keys, options in self._calls(q, k, block):
            heads = _one_head_each(q[queries], k[keys], v[keys])
            dout, final_out = (_in_groups(tensor[queries], num_groups, tensor.dtype) for tensor in (grad, out))
            final_lse = torch.unflatten(lse[:, queries], 0, (num_groups, -1)).contiguous()
            gradients = attend(dout, *heads, final_out, final_lse, **options)
            dq[queries] += _from_groups(gradients[0])
            dk[keys] += gradients[1].sum(1).transpose(0, 1)
            dv[keys] += gradients[2].sum(1).transpose(0, 1)
        return dq, dk, dv

    @staticmethod
    def _calls(q: Tensor, k: Tensor, block: AttentionBlock) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """Queries, keys and options; the mask is additive, for a window that is shorter than its document."""
        options = {"dropout_p": 0.0, "scale": block.scale}
        for document, document_keys in block.documents(len(q), len(k)):
            if block.window is None or document.stop - document.start <= block.window:
                yield document, document_keys, options | {"is_causal": block.causal, "attn_mask": None}
                continue
            for queries, keys in block.split_queries(document, document_keys, block.window):
                visible = block.mask(queries, keys, q.device)
                bias = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
                yield queries, keys, options | {"is_causal": False, "attn_mask": bias}


class CudaFlashBlockKernel(BlockKernel):
    """torch's own flash attention 2 for CUDA: one call for all documents; shapes: see ``BlockKernel``."""

    name = "cuda_flash"

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        bounds, options = self._arguments(block)
        arguments = (*pad_heads(q, k, v), *bounds, 0.0, block.causal, False)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*arguments, **options)
        # The kernel returns +inf for a document without keys, which adds nothing.
        return out[..., : v.shape[-1]], torch.where(torch.isposinf(lse), -torch.inf, lse)

    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        heads = pad_heads(q, k, v)
        size = heads[0].shape[-1]
        dout, final_out = (F.pad(tensor, (0, size - tensor.shape[-1])).contiguous() for tensor in (grad, out))
        # Without dropout the state of the random numbers is not used.
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        bounds, options = self._arguments(block)
        arguments = (dout, *heads, final_out, lse.contiguous(), *bounds, 0.0, block.causal, *unused)
        gradients = torch.ops.aten._flash_attention_backward(*arguments, **options)
        dq, dk, dv = (part[..., : tensor.shape[-1]] for part, tensor in zip(gradients, (q, k, v), strict=True))
        return dq, dk, dv

    @staticmethod
    def _arguments(block: AttentionBlock) -> tuple[tuple[Tensor, Tensor, int, int], dict[str, float | int]]:
        queries, keys = block.queries, block.keys
        options: dict[str, float | int] = {"scale": block.scale}
        if block.window is not None:
            options |= {"window_size_left": block.window - 1, "window_size_right": 0}
        return (queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen), options


def merge_outputs(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries to two blocks of keys; return out and lse over the keys of both.

    ``out`` is (T, Hq, D), and ``lse`` (Hq, T) is -inf for queries that see no keys; both are float32 or float64.
    """
    merged_lse = torch.logaddexp(lse, block_lse)

    def weight_of_part(part_lse: Tensor) -> Tensor:
        """Return the weight of one block in the merged output, (T, Hq, 1): exp(part_lse - merged_lse)."""
        # Without keys the difference could be -inf minus -inf, which is NaN; -inf makes the weight 0.
        log_weight = torch.where(torch.isneginf(part_lse), part_lse, part_lse - merged_lse)
        return log_weight.exp().transpose(0, 1).unsqueeze(-1)

    return out * weight_of_part(lse) + block_out * weight_of_part(block_lse), merged_lse


def choose_blocks(impl: str, device: torch.device, dtype: torch.dtype, *, head_dims: tuple[int, int]) -> BlockKernel:
    """Return the attention kernel for sequences that several ranks share, which attends to keys block by block.

    ``impl`` is a value of ``--attn-impl``; a ConfigError is raised for one without such a kernel. ``head_dims`` are the
    head size D of queries and keys, and that of values.
    """
    if impl not in SEQUENCE_PARALLEL_KERNELS:
        raise ConfigError(
            f"--attn-impl {impl}: sequences that several processes share are attended to in blocks, by torch's kernels "
            "only",
            "Use --attn-impl auto: on CUDA that is torch's flash attention 2.",
        )
    gpu_error = fast_gpu_error("torch's varlen", device, dtype)
    if impl == "varlen" and gpu_error is not None:
        raise ConfigError(f"--attn-impl varlen: {gpu_error.message}", gpu_error.remedy)
    query_dim, value_dim = head_dims
    has_cuda_flash = gpu_error is None and max(query_dim, value_dim) <= _MAX_CUDA_FLASH_HEAD_DIM
    if has_cuda_flash and impl in ("auto", "varlen"):
        return CudaFlashBlockKernel()
    has_cpu_flash = device.type == "cpu" and hasattr(torch.ops.aten, _CPU_FLASH) and query_dim == value_dim
    if has_cpu_flash and impl != "reference":
        return CpuFlashBlockKernel()
    return MathBlockKernel()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _in_groups(heads: Tensor, num_groups: int, dtype: torch.dtype | None = None) -> Tensor:
    """(T, Hq, D) as (Hkv, Hq / Hkv, T, D)."""
    grouped = torch.unflatten(heads.transpose(0, 1), 0, (num_groups, -1))
    return grouped.to(dtype or _wide(heads.dtype))


def _from_groups(heads: Tensor) -> Tensor:
    """Undo ``_in_groups``: heads (T, H, D) from groups (groups, heads of a group, T, D)."""
    return heads.flatten(0, 1).transpose(0, 1)


def _one_head_each(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as a batch of groups, (Hkv, Hq / Hkv, T, D); K and V with a stride of zero over the heads of a group."""
    num_groups = k.shape[1]
    keys, values = (t.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1] // num_groups, -1, -1) for t in (k, v))
    return _in_groups(q, num_groups, q.dtype), keys, values


Rows = Tensor | slice
"""Rows of a tensor: their int64 indexes, or a slice for all of them."""
_ALL_ROWS = slice(None)
_NO_ROWS = np.zeros(0, np.int64)


class VisibleKeys(NamedTuple):
    """Some of this rank's queries, and the received keys that all of these queries see, document by document.

    Args:
        query_rows: rows of the queries in this rank's sharded tokens.
        key_rows: rows of the keys in the received tokens.
        query_documents, key_documents: how many of the queries and of the keys belong to each document.
        repeats_keys: whether several documents may have the same keys.
    """

    query_rows: Rows
    key_rows: Rows
    query_documents: Varlen
    key_documents: Varlen
    repeats_keys: bool = False


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """The documents of one rank's shard, and index tensors of their chunks.

    With R ring ranks, a sharded document is divided into 2R chunks: ring rank i has an early one, number i, and a late
    one, number 2R - 1 - i.

    Args:
        local: documents that are this rank's alone.
        sharded: this rank's tokens of each sharded document: two chunks, or the complete document without a ring.
        from_lower_rank, from_higher_rank: visible keys of a ring rank with a lower or a higher number than this rank.
        from_all_ranks: visible keys in the tokens gathered from all ring ranks.
        prefixes_by_rank: for each ring rank, its keys of the prefixes that documents continue; None without prefixes.
    """

    local: Varlen
    sharded: Varlen
    from_lower_rank: VisibleKeys
    from_higher_rank: VisibleKeys
    from_all_ranks: list[VisibleKeys]
    prefixes_by_rank: list[VisibleKeys | None]


@lru_cache(maxsize=4)
def shard_layout(shard: SequenceShard, device: torch.device) -> ShardLayout:
    """Find the keys that queries see on each rank of a shared sequence; cached, because every layer needs them.

    Ranks on a ring divide each sharded document into chunks in order: each has an early chunk and a late one, and those
    of a lower rank lie further outside. With two ranks: early 0, early 1, late 1, late 0.
    """
    lengths = _lengths_on_rank(shard)
    half_lengths = [length // 2 for length in lengths]
    documents = Varlen.of_lengths(lengths, device)
    half_documents = Varlen.of_lengths(half_lengths, device)  # one of a rank's two chunks
    early_rows = _join_rows(_chunk_rows(shard, is_late=False), device)
    late_rows = _join_rows(_chunk_rows(shard, is_late=True), device)
    ring_ranks = range(shard.split.ring_size)
    return ShardLayout(
        local=Varlen.of_lengths(shard.local_lengths, device),
        sharded=documents,
        # A lower rank's early chunk lies before both of this rank's chunks, its late chunk after both.
        from_lower_rank=VisibleKeys(
            query_rows=_ALL_ROWS, key_rows=early_rows, query_documents=documents, key_documents=half_documents
        ),
        # Both chunks of a higher rank lie between this rank's early and late chunk.
        from_higher_rank=VisibleKeys(
            query_rows=late_rows, key_rows=_ALL_ROWS, query_documents=half_documents, key_documents=documents
        ),
        from_all_ranks=_visible_keys_of_all_ranks(shard, device),
        prefixes_by_rank=[_prefix_keys(shard, [ring_rank], device) for ring_rank in ring_ranks],
    )


def _visible_keys_of_all_ranks(shard: SequenceShard, device: torch.device) -> list[VisibleKeys]:
    """Return the visible keys in the gathered tokens of all ring ranks: of other ranks, and of prefixes."""
    ring_size, rank = shard.split.ring_size, shard.split.ring_rank
    early_chunk, late_chunk = rank, 2 * ring_size - 1 - rank
    # A query sees the keys of all chunks before its own. This rank's early chunk needs no exchange.
    seen_by_early = list(range(early_chunk))
    seen_by_late = [chunk for chunk in range(late_chunk) if chunk != early_chunk]
    visible = []
    if shard.sharded_lengths and seen_by_early:
        visible.append(_keys_seen_by_chunk(shard, seen_by_early, is_late=False, device=device))
    if shard.sharded_lengths and seen_by_late:
        visible.append(_keys_seen_by_chunk(shard, seen_by_late, is_late=True, device=device))
    prefix_keys = _prefix_keys(shard, range(ring_size), device)
    if prefix_keys is not None:
        visible.append(prefix_keys)
    return visible


def _keys_seen_by_chunk(
    shard: SequenceShard, seen_chunks: Sequence[int], *, is_late: bool, device: torch.device
) -> VisibleKeys:
    """Return the queries of this rank's early or late chunk, and the gathered keys of ``seen_chunks``."""
    queries = _chunk_rows(shard, is_late=is_late)
    rows_by_chunk = [_gathered_chunk_rows(shard, chunk) for chunk in seen_chunks]
    keys = [np.concatenate(rows) for rows in zip(*rows_by_chunk, strict=True)]
    return _visible_keys(queries, keys, device)


def _visible_keys(
    queries: Sequence[Int64Array], keys: Sequence[Int64Array], device: torch.device, *, repeats_keys: bool = False
) -> VisibleKeys:
    """Return ``VisibleKeys`` from the rows of each document's queries and keys."""
    return VisibleKeys(
        query_rows=_join_rows(queries, device),
        key_rows=_join_rows(keys, device),
        query_documents=Varlen.of_lengths([len(rows) for rows in queries], device),
        key_documents=Varlen.of_lengths([len(rows) for rows in keys], device),
        repeats_keys=repeats_keys,
    )


def _prefix_keys(shard: SequenceShard, key_ranks: Sequence[int], device: torch.device) -> VisibleKeys | None:
    """Find the keys of prefixes on the ring ranks ``key_ranks`` that this rank's queries see.

    A document may continue an earlier one, its parent, which several documents begin with. Its queries see the keys of
    its parent, of the parent's parent, and so on. Rows of keys count the tokens of ``key_ranks``, one rank after the
    other. None if no document continues another.
    """
    continuing = [document for document, parent in enumerate(shard.parents) if parent != ROOT]
    if not continuing:
        return None
    own_key_rows = _rows_on_ranks(shard, key_ranks)  # of each document
    prefix_rows: list[Int64Array] = []  # of each document: rows of all its prefixes, from the root down
    for parent in shard.parents:
        if parent == ROOT:
            prefix_rows.append(_NO_ROWS)
        else:
            prefix_rows.append(np.concatenate([prefix_rows[parent], own_key_rows[parent]]))
    query_rows = _document_rows(shard)
    queries = [query_rows[document] for document in continuing]
    keys = [prefix_rows[document] for document in continuing]
    # Documents that continue the same prefix have the same keys.
    return _visible_keys(queries, keys, device, repeats_keys=True)


def _rows_on_ranks(shard: SequenceShard, ring_ranks: Sequence[int]) -> list[Int64Array]:
    """Return the rows of each document, without padding, in the tokens of some ring ranks, one rank after the other."""
    tokens_per_rank = sum(_lengths_on_rank(shard))
    rows_by_document = []
    for rank_rows, num_tokens in zip(_document_rows(shard), shard.sharded_tokens, strict=True):
        rows = []
        for index, ring_rank in enumerate(ring_ranks):
            positions = _positions_on_rank(len(rank_rows), ring_rank, shard.split.ring_size)
            is_padding = positions >= num_tokens
            rows.append(index * tokens_per_rank + rank_rows[~is_padding])
        rows_by_document.append(np.concatenate(rows))
    return rows_by_document


def _positions_on_rank(length: int, ring_rank: int, ring_size: int) -> Int64Array:
    """Return the positions in a document of the ``length`` tokens of it that a ring rank has."""
    if ring_size == 1:
        return np.arange(length)
    chunk_positions = np.arange(length // 2)
    late_chunk = 2 * ring_size - 1 - ring_rank
    early_start, late_start = ring_rank * len(chunk_positions), late_chunk * len(chunk_positions)
    return np.concatenate([early_start + chunk_positions, late_start + chunk_positions])


def _lengths_on_rank(shard: SequenceShard) -> list[int]:
    """Return the number of tokens that each ring rank has of each sharded document: two chunks."""
    return [length // shard.split.ring_size for length in shard.sharded_lengths]


def _document_rows(shard: SequenceShard) -> list[Int64Array]:
    """Return the rows of each document in the sharded tokens of one ring rank."""
    bounds = accumulate(_lengths_on_rank(shard), initial=0)
    return [np.arange(start, stop) for start, stop in pairwise(bounds)]


def _chunk_rows(shard: SequenceShard, *, is_late: bool) -> list[Int64Array]:
    """Return the rows of each document's early or late chunk in the sharded tokens of one ring rank."""
    documents = _document_rows(shard)
    if is_late:
        return [rows[len(rows) // 2 :] for rows in documents]
    return [rows[: len(rows) // 2] for rows in documents]


def _gathered_chunk_rows(shard: SequenceShard, chunk: int) -> list[Int64Array]:
    """Return the rows of each document's chunk of this number, of 2R, in the sharded tokens of all ring ranks."""
    ring_size = shard.split.ring_size
    is_late = chunk >= ring_size
    ring_rank = 2 * ring_size - 1 - chunk if is_late else chunk  # whose chunk it is
    rank_start = ring_rank * sum(_lengths_on_rank(shard))
    return [rank_start + rows for rows in _chunk_rows(shard, is_late=is_late)]


def _join_rows(rows: Sequence[Int64Array], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([_NO_ROWS, *rows])).to(device)  # a shard may have no documents
