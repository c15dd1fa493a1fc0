"""Which tokens of a packed sequence each of P ranks holds that share it: one permutation for all that a token has.

A document is *sharded* over all ranks or *local* to one. With R ranks on the ring axis, a sharded document is padded to
a multiple of 2R and cut into 2R chunks, of which rank i holds chunks i and 2R - 1 - i: a late chunk, whose queries see
much, goes with an early one, and all ranks do equal work within every document. What the U ranks of a Ulysses axis
share is such a part of the sequence, cut into U even pieces. A document of 8 tokens and one of 3, R = 2 and U = 1::

    sequence  a a a a a a a a b b b .        "." is padding: it has positions, and never a label
    rank 0    a0 a1       a6 a7 b0    .      chunks 0 and 3
    rank 1    a2 a3 a4 a5       b1 b2        chunks 1 and 2

A rank's own sequence is its local documents, then its part of the sharded ones. Everything here follows from lengths,
so every rank knows what the others hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.planning.skrull import SHARDED

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """How a sequence is cut, and the rank whose part this is.

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
        """This process's place on the ring axis."""
        return self.rank // self.ulysses_size

    @property
    def multiple(self) -> int:
        """The multiple that the length of a sharded document is padded to."""
        return 2 * self.ring_size if self.ring_size > 1 else 1

    def num_filler_tokens(self, num_tokens: int) -> int:
        """Tokens of a last document with which ``num_tokens``, of padded documents, can be shared evenly."""
        step, num = self.multiple, 0
        while (num_tokens + num) % self.size:
            num += step
        return num


@dataclass(frozen=True, eq=False)
class FeatureRoute:
    """How what a tower makes of a rank's pictures or sounds gets to the ranks that hold their tokens.

    Args:
        send_order: int64 (n,), rows of this rank's features, those for rank 0 first.
        send_counts: rows for each rank, (P,).
        receive_counts: rows from each rank, (P,).
        receive_order: int64 (m,), of the rows as they come, the order in which this rank's sequence has their tokens.
    """

    send_order: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    receive_order: Tensor


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """A rank's part of a packed sequence, as attention must know it.

    Args:
        cut: how.
        local_lengths: documents that are this rank's alone, first in its sequence.
        sharded_lengths: whole, with their padding: the same on all ranks.
        routes: of the features of ``image``, ``video`` and ``audio``, where the sequence has some.
    """

    cut: Cut
    local_lengths: tuple[int, ...]
    sharded_lengths: tuple[int, ...]
    routes: Mapping[str, FeatureRoute]

    @property
    def num_local(self) -> int:
        """Tokens of the local documents."""
        return sum(self.local_lengths)


@dataclass(frozen=True, eq=False)
class TokenAssignment:
    """A sequence cut for P ranks.

    Args:
        index: for each rank, int64: the positions of the sequence that it holds, in its own order.
        holder: int64 (T,), the rank of each position.
        slot: int64 (T,), where in that rank's own sequence.
    """

    index: tuple[Int64Array, ...]
    holder: Int64Array
    slot: Int64Array


def assign_tokens(lengths: Sequence[int], places: Sequence[int], cut: Cut) -> TokenAssignment:
    """Assign a sequence's tokens to the ranks.

    Args:
        lengths: of the documents, padded where they are sharded, with a filler that makes them even.
        places: of each, ``SHARDED`` or a rank.
        cut: its ``rank`` does not matter.
    """
    starts = np.cumsum([0, *lengths])
    parts: list[list[Int64Array]] = [[] for _ in range(cut.size)]
    rings: list[list[Int64Array]] = [[] for _ in range(cut.ring_size)]
    for start, length, place in zip(starts[:-1].tolist(), lengths, places, strict=True):
        if place != SHARDED:
            parts[place].append(np.arange(start, start + length))
        elif cut.ring_size == 1:
            rings[0].append(np.arange(start, start + length))
        else:
            chunks = np.arange(start, start + length).reshape(2 * cut.ring_size, -1)
            for rank, ring in enumerate(rings):
                ring += [chunks[rank], chunks[2 * cut.ring_size - 1 - rank]]
    nothing = np.zeros(0, np.int64)
    for number, ring in enumerate(rings):
        whole = np.concatenate([nothing, *ring])
        assert len(whole) % cut.ulysses_size == 0, "a filler makes it even"
        for offset, piece in enumerate(np.split(whole, cut.ulysses_size)):
            parts[number * cut.ulysses_size + offset].append(piece)
    index = tuple(np.concatenate([nothing, *part]) for part in parts)
    holder, slot = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
    for rank, held in enumerate(index):
        holder[held], slot[held] = rank, np.arange(len(held))
    return TokenAssignment(index, holder, slot)


def route_features(
    positions: Int64Array, owners: Int64Array, assigned: TokenAssignment, rank: int, size: int
) -> FeatureRoute:
    """Bring features from the ranks that compute them to those that hold their tokens.

    Args:
        positions: (n,), in the sequence, of the tokens that stand for features, rising.
        owners: (n,), the rank that computes each one's feature.
        assigned: the sequence.
        rank: this one, of ``size``.
    """
    holders = assigned.holder[positions]
    mine = np.flatnonzero(owners == rank)
    held = np.flatnonzero(holders == rank)
    # They come rank by rank, of each rank in the order of the whole sequence.
    coming = np.argsort(owners[held], kind="stable")
    place = np.empty(len(held), np.int64)
    place[coming] = np.arange(len(held))
    return FeatureRoute(
        send_order=torch.from_numpy(np.argsort(holders[mine], kind="stable")),
        send_counts=tuple(np.bincount(holders[mine], minlength=size).tolist()),
        receive_counts=tuple(np.bincount(owners[held], minlength=size).tolist()),
        receive_order=torch.from_numpy(place[np.argsort(assigned.slot[positions[held]], kind="stable")]),
    )
