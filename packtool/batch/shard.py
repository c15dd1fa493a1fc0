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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

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
        return next(num for num in count(0, self.multiple) if (num_tokens + num) % self.size == 0)


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
    """

    split: SequenceSplit
    local_lengths: tuple[int, ...]
    sharded_lengths: tuple[int, ...]
    routes: Mapping[str, FeatureRoute]

    @property
    def num_local(self) -> int:
        """Tokens of the local documents."""
        return sum(self.local_lengths)


def assign_tokens(lengths: Sequence[int], places: Sequence[int], split: SequenceSplit) -> list[Int64Array]:
    """Return each rank's token positions of a sequence.

    Args:
        lengths: of the documents, padded if they are sharded, with a filler that makes their parts even.
        places: of each, ``SHARDED`` or a rank.
        split: its ``rank`` does not matter.

    Returns:
        for each rank, int64 (t,): the positions of its t tokens in the sequence, in the rank's own order.
    """
    starts = np.cumsum([0, *lengths])
    nothing = np.zeros(0, np.int64)
    parts = [[nothing] for _ in range(split.size)]
    rings = [[nothing] for _ in range(split.ring_size)]
    for start, length, place in zip(starts[:-1].tolist(), lengths, places, strict=True):
        tokens = np.arange(start, start + length)
        if place != SHARDED:
            parts[place].append(tokens)
        elif split.ring_size == 1:
            rings[0].append(tokens)
        else:
            chunks = tokens.reshape(2 * split.ring_size, -1)
            for rank, ring in enumerate(rings):
                ring += [chunks[rank], chunks[2 * split.ring_size - 1 - rank]]
    for number, ring in enumerate(rings):
        ring_tokens = np.concatenate(ring)
        assert len(ring_tokens) % split.ulysses_size == 0, "a filler makes it even"
        for offset, piece in enumerate(np.split(ring_tokens, split.ulysses_size)):
            parts[number * split.ulysses_size + offset].append(piece)
    return [np.concatenate(part) for part in parts]


def route_features(
    positions: Int64Array, owners: Int64Array, assigned: Sequence[Int64Array], rank: int
) -> FeatureRoute:
    """Route features from the ranks that compute them to those that hold their tokens.

    Args:
        positions: (n,), of the tokens that stand for features in the sequence, ascending.
        owners: (n,), the rank that computes each one's feature.
        assigned: the tokens of each rank, as ``assign_tokens`` returns them.
        rank: this one.
    """
    size = len(assigned)
    holder = np.empty(sum(map(len, assigned)), np.int64)
    for other, tokens in enumerate(assigned):
        holder[tokens] = other
    slot = np.empty_like(holder)  # the index of each of this rank's tokens in its own sequence
    slot[assigned[rank]] = np.arange(len(assigned[rank]))
    holders = holder[positions]
    own = np.flatnonzero(owners == rank)
    held = np.flatnonzero(holders == rank)
    # Rows arrive rank by rank, and of each rank in the order of the complete sequence.
    arriving = np.argsort(owners[held], kind="stable")
    row = np.empty(len(held), np.int64)
    row[arriving] = np.arange(len(held))
    return FeatureRoute(
        send_order=torch.from_numpy(np.argsort(holders[own], kind="stable")),
        send_counts=tuple(np.bincount(holders[own], minlength=size).tolist()),
        receive_counts=tuple(np.bincount(owners[held], minlength=size).tolist()),
        receive_order=torch.from_numpy(row[np.argsort(slot[positions[held]], kind="stable")]),
    )
