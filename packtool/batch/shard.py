"""Assignment of a packed sequence's tokens to the P ranks that share it: one permutation for all of a token's data.

A document is *sharded* over all ranks or *local* to one. With R ranks on the ring axis, a sharded document is padded to
a multiple of 2R and cut into 2R chunks, of which rank i holds chunks i and 2R - 1 - i: a late chunk, whose queries see
much, goes with an early one, and all ranks do equal work within every document. The U ranks of a Ulysses axis share
such a part of the sequence, cut into U even pieces. A document of 8 tokens and one of 3, R = 2 and U = 1::

    sequence  a a a a a a a a b b b .        "." is padding: it has positions, and never a label
    rank 0    a0 a1       a6 a7 b0    .      chunks 0 and 3
    rank 1    a2 a3 a4 a5       b1 b2        chunks 1 and 2

A rank's own sequence is its local documents, then its part of the sharded ones. Everything here follows from lengths,
so every rank knows the tokens of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.planning.skrull import SHARDED

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SequenceSplit:
    """Split of a sequence over ranks, with the rank of one of them.

    Args:
        ring_size: R, of the axis whose ranks hold chunks.
        ulysses_size: U, of the axis whose ranks share a part evenly; its ranks are next to each other.
        rank: among the P = R * U that share a sequence.
    """

    ring_size: int = 1
    ulysses_size: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        """The number P of ranks that share a sequence."""
        return self.ring_size * self.ulysses_size

    @property
    def ring_rank(self) -> int:
        """This process's rank on the ring axis."""
        return self.rank // self.ulysses_size

    @property
    def multiple(self) -> int:
        """The multiple that the length of a sharded document is padded to."""
        return 2 * self.ring_size if self.ring_size > 1 else 1

    def num_filler_tokens(self, num_tokens: int) -> int:
        """Return the filler tokens that make ``num_tokens`` of padded documents divisible among the ranks."""
        return -num_tokens % math.lcm(self.multiple, self.size)


@dataclass(frozen=True, eq=False)
class FeatureRoute:
    """Exchange of tower features from the ranks that compute them to those that hold their tokens.

    Args:
        send_order: int64 (n,), rows of this rank's features, those for rank 0 first.
        send_counts: rows for each rank, (P,).
        receive_counts: rows from each rank, (P,).
        receive_order: int64 (m,), received rows in the order of this rank's tokens.
    """

    send_order: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    receive_order: Tensor


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """A rank's part of a packed sequence, as attention needs it.

    Args:
        split: ranks that share a sequence, and this rank.
        local_lengths: documents that are this rank's alone, first in its sequence.
        sharded_lengths: complete, with their padding: the same on all ranks.
        routes: of the features of ``image``, ``video`` and ``audio``, if the sequence has any.
        parents: with shared prefixes, of each sharded document, the number of the one that it continues, or ``ROOT``.
        sharded_tokens: with shared prefixes, tokens of each sharded document without its padding.
    """

    split: SequenceSplit
    local_lengths: tuple[int, ...]
    sharded_lengths: tuple[int, ...]
    routes: Mapping[str, FeatureRoute]
    parents: tuple[int, ...] = ()
    sharded_tokens: tuple[int, ...] = ()

    @property
    def num_local(self) -> int:
        """Tokens of the local documents."""
        return sum(self.local_lengths)


def assign_tokens(lengths: Sequence[int], placement: Sequence[int], split: SequenceSplit) -> list[Int64Array]:
    """Assign every token of a packed sequence to one of the ranks that compute it together.

    Args:
        lengths: tokens of each document. Those of sharded documents must be multiples of ``split.multiple``, and their
            sum a multiple of the number of ranks.
        placement: for each document, the rank that holds it, or ``SHARDED`` if its tokens are divided among all.

    Returns:
        For each rank, positions of its tokens in the sequence, int64 (t,): those of its own documents, in order, then
        its part of the sharded ones.
    """
    no_tokens = np.zeros(0, np.int64)  # so that a rank without tokens gets an array of the right type
    token_arrays_by_rank = [[no_tokens] for _ in range(split.size)]
    sharded_documents: list[Int64Array] = []
    start = 0
    for length, rank in zip(lengths, placement, strict=True):
        document_tokens = np.arange(start, start + length)
        start += length
        if rank == SHARDED:
            sharded_documents.append(document_tokens)
        else:
            token_arrays_by_rank[rank].append(document_tokens)
    for rank, sharded_tokens in enumerate(_divide_sharded(sharded_documents, split)):
        token_arrays_by_rank[rank].append(sharded_tokens)
    return [np.concatenate(token_arrays) for token_arrays in token_arrays_by_rank]


def _divide_sharded(documents: Sequence[Int64Array], split: SequenceSplit) -> list[Int64Array]:
    """Divide the tokens of the sharded documents among the ranks; return int64 (t,) for each rank."""
    tokens_by_ring_rank = [[np.zeros(0, np.int64)] for _ in range(split.ring_size)]
    for tokens in documents:
        if split.ring_size == 1:
            tokens_by_ring_rank[0].append(tokens)
            continue
        chunks = tokens.reshape(2 * split.ring_size, -1)
        for ring_rank, ring_tokens in enumerate(tokens_by_ring_rank):
            ring_tokens += [chunks[ring_rank], chunks[-1 - ring_rank]]  # an early chunk and a late one
    # The ranks of a Ulysses axis divide the tokens of their ring rank evenly, each a consecutive piece.
    tokens_by_rank: list[Int64Array] = []
    for ring_tokens in tokens_by_ring_rank:
        tokens = np.concatenate(ring_tokens)
        assert len(tokens) % split.ulysses_size == 0, "a filler makes it even"
        tokens_by_rank += np.split(tokens, split.ulysses_size)
    return tokens_by_rank


def route_features(
    positions: Int64Array, source_ranks: Int64Array, tokens_by_rank: Sequence[Int64Array], rank: int
) -> FeatureRoute:
    """Plan how ranks exchange the features of media, from the ranks that compute them to those that hold their tokens.

    Each of n placeholder tokens stands for one feature: a row of a media encoder's output.

    Args:
        positions: (n,), positions in the sequence of the placeholder tokens, ascending.
        source_ranks: (n,), the rank that computes each feature.
        tokens_by_rank: positions in the sequence of the tokens that each rank holds, in the rank's own order.
        rank: this rank, whose part of the exchange is returned.
    """
    num_ranks = len(tokens_by_rank)
    num_tokens = sum(len(tokens) for tokens in tokens_by_rank)
    rank_of_token = np.empty(num_tokens, np.int64)
    for token_rank, tokens in enumerate(tokens_by_rank):
        rank_of_token[tokens] = token_rank
    target_ranks = rank_of_token[positions]  # (n,), the rank that holds each feature's token

    is_sent = source_ranks == rank
    send_targets = target_ranks[is_sent]
    send_order = np.argsort(send_targets, kind="stable")

    is_received = target_ranks == rank
    receive_sources = source_ranks[is_received]
    receive_order = _receive_order(positions[is_received], receive_sources, tokens_by_rank[rank])
    return FeatureRoute(
        send_order=torch.from_numpy(send_order),
        send_counts=tuple(np.bincount(send_targets, minlength=num_ranks).tolist()),
        receive_counts=tuple(np.bincount(receive_sources, minlength=num_ranks).tolist()),
        receive_order=torch.from_numpy(receive_order),
    )


def _receive_order(positions: Int64Array, source_ranks: Int64Array, rank_tokens: Int64Array) -> Int64Array:
    """Return the received row that each of a rank's m placeholder tokens needs, (m,), in the order of ``rank_tokens``.

    ``positions``, ascending, and ``source_ranks``, (m,), are those of the received features.
    """
    # Features arrive sorted by source rank, then by position.
    arrival_order = np.argsort(source_ranks, kind="stable")
    row_by_feature = np.argsort(arrival_order)  # the inverse permutation
    placeholders = rank_tokens[np.isin(rank_tokens, positions)]
    return row_by_feature[np.searchsorted(positions, placeholders)]
