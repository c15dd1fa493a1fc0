"""Where the chunks of a shard lie in tensors: index tensors, made once for a micro-batch and kept with its shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.attention.varlen import Varlen
from packtool.batch.shard import SequenceShard, assign_tokens
from packtool.plan.skrull import SHARDED


@dataclass(frozen=True, eq=False)
class Gathered:
    """Keys that one half of a rank's queries see, among the keys of all ranks of the ring axis.

    Args:
        documents: of these keys.
        index: int64, their rows in what ``from_all`` returns.
    """

    documents: Varlen
    index: Tensor


@dataclass(frozen=True, eq=False)
class ShardLayout:
    """A ring rank's part of the sharded documents, each of two chunks, as kernels see it.

    Args:
        local: the documents that are this rank's alone.
        whole: both chunks of each sharded document, or all of it where there is no ring.
        half: one chunk of each.
        first, second: int64, tokens of the first chunks and of the second ones.
        before_first, before_second: keys of other ranks that come before them, for the all-gather; None for none.
    """

    local: Varlen
    whole: Varlen
    half: Varlen
    first: Tensor
    second: Tensor
    before_first: Gathered | None
    before_second: Gathered | None


@lru_cache(maxsize=4)
def shard_layout(shard: SequenceShard, device: torch.device) -> ShardLayout:
    """The layout of a rank's shard. The last few are kept: every layer and the backward pass ask again."""
    ring, rank = shard.cut.ring_size, shard.cut.ring_rank
    parts = [length // ring for length in shard.sharded_lengths]
    halves = [part // 2 for part in parts]
    starts = np.cumsum([0, *parts])[:-1]
    first = _runs(starts, halves)
    second = _runs(starts + np.array(halves, np.int64), halves)

    def seen(chunks: Sequence[int]) -> Gathered | None:
        if not chunks or not parts:
            return None
        rows = [_chunk_rows(chunk, ring, starts, halves, sum(parts)) for chunk in chunks]
        by_document = [np.concatenate([row[number] for row in rows]) for number in range(len(parts))]
        lengths = [len(keys) for keys in by_document]
        return Gathered(Varlen.of_lengths(lengths, device), torch.from_numpy(np.concatenate(by_document)).to(device))

    last = 2 * ring - 1 - rank
    return ShardLayout(
        local=Varlen.of_lengths(shard.local_lengths, device),
        whole=Varlen.of_lengths(parts, device),
        half=Varlen.of_lengths(halves, device),
        first=torch.from_numpy(first).to(device),
        second=torch.from_numpy(second).to(device),
        before_first=seen(range(rank)) if ring > 1 else None,
        before_second=seen([chunk for chunk in range(last) if chunk != rank]) if ring > 1 else None,
    )


@lru_cache(maxsize=4)
def sharded_order(shard: SequenceShard, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the tokens of the sharded documents lie in the parts of all P ranks laid end to end, and the way back.

    Returns:
        int64 (T,) each: of every token its row in the parts; of every row of the parts its token.
    """
    places = [SHARDED] * len(shard.sharded_lengths)
    index = np.concatenate(assign_tokens(shard.sharded_lengths, places, shard.cut).index)
    return torch.from_numpy(np.argsort(index)).to(device), torch.from_numpy(index).to(device)


def _runs(starts: npt.NDArray[np.int64], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    runs = [np.arange(start, start + length) for start, length in zip(starts.tolist(), lengths, strict=True)]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _chunk_rows(
    chunk: int, ring: int, starts: npt.NDArray[np.int64], halves: Sequence[int], num_tokens: int
) -> list[npt.NDArray[np.int64]]:
    """Rows of one chunk of each document, in the parts of all ring ranks laid end to end."""
    owner, is_second = (chunk, False) if chunk < ring else (2 * ring - 1 - chunk, True)
    return [
        np.arange(half) + owner * num_tokens + start + (half if is_second else 0)
        for start, half in zip(starts.tolist(), halves, strict=True)
    ]
