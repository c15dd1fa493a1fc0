"""Tokens of a shared sequence: each on one rank, all ranks with equal work, features where their tokens are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.batch.shard import SequenceSplit, assign_tokens, route_features
from packtool.planning.skrull import SHARDED

sizes = st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 3), (3, 2), (8, 1)])
documents = st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=12)


def sequence(given_documents: list[tuple[int, bool]], split: SequenceSplit) -> tuple[list[int], list[int]]:
    """Lengths, padded and with a filler as collation makes them, and places: locals go round the ranks."""
    places = [index % split.size if is_local else SHARDED for index, (_, is_local) in enumerate(given_documents)]
    lengths = [
        length if place != SHARDED else -(-length // split.multiple) * split.multiple
        for (length, _), place in zip(given_documents, places, strict=True)
    ]
    num_sharded = sum(length for length, place in zip(lengths, places, strict=True) if place == SHARDED)
    if filler := split.num_filler_tokens(num_sharded):
        lengths, places = [*lengths, filler], [*places, SHARDED]
    return lengths, places


@pytest.mark.smoke
@given(documents, sizes)
def test_every_token_is_on_one_rank(given_documents: list[tuple[int, bool]], size: tuple[int, int]) -> None:
    split = SequenceSplit(*size)
    lengths, places = sequence(given_documents, split)
    assigned = assign_tokens(lengths, places, split)
    assert np.sort(np.concatenate(assigned)).tolist() == list(range(sum(lengths)))
    for rank, index in enumerate(assigned):
        # What is local comes first, and of what is sharded every rank has as much.
        num_local = sum(length for length, place in zip(lengths, places, strict=True) if place == rank)
        sharded = sum(length for length, place in zip(lengths, places, strict=True) if place == SHARDED)
        assert len(index) == num_local + sharded // split.size
        documents_of = np.repeat(np.arange(len(lengths)), lengths)[index[:num_local]]
        assert all(places[document] == rank for document in documents_of)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.sampled_from([2, 3, 4, 8]))
def test_zigzag_gives_every_rank_of_a_ring_the_same_work(lengths: list[int], ring: int) -> None:
    split = SequenceSplit(ring, 1)
    padded = [-(-length // split.multiple) * split.multiple for length in lengths]
    positions = np.concatenate([np.arange(length) for length in padded])
    index = assign_tokens(padded, [SHARDED] * len(padded), split)
    # A query at position p sees p + 1 keys.
    assert len({int((positions[positions_of_rank] + 1).sum()) for positions_of_rank in index}) == 1


@given(st.integers(0, 500), sizes)
def test_filler_equalizes_shares(num_tokens: int, size: tuple[int, int]) -> None:
    split = SequenceSplit(*size)
    num_tokens -= num_tokens % split.multiple
    filler = split.num_filler_tokens(num_tokens)
    assert (num_tokens + filler) % split.size == 0
    assert filler % split.multiple == 0
    assert filler < split.multiple * split.size


@given(documents, sizes, st.randoms(use_true_random=False))
def test_features_arrive_on_the_ranks_of_their_tokens(
    given_documents: list[tuple[int, bool]], size: tuple[int, int], random: object
) -> None:
    split = SequenceSplit(*size)
    lengths, places = sequence(given_documents, split)
    assigned = assign_tokens(lengths, places, split)
    generator = np.random.default_rng(sum(lengths))
    positions = np.flatnonzero(generator.random(sum(lengths)) < 0.4)
    owners = generator.integers(0, split.size, len(positions))
    arrived = _exchanged(positions, owners, assigned)
    for rank, index in enumerate(assigned):
        expected = [position for position in index.tolist() if position in set(positions.tolist())]
        assert arrived[rank] == expected


def _exchanged(positions: np.ndarray, owners: np.ndarray, assigned: list[np.ndarray]) -> list[list[int]]:
    """The exchange of all ranks in one process; a feature is the position of its token."""
    routes = [route_features(positions, owners, assigned, rank) for rank in range(len(assigned))]
    sent = [
        np.split(positions[owners == rank][route.send_order.numpy()], np.cumsum(route.send_counts)[:-1])
        for rank, route in enumerate(routes)
    ]
    arrived = []
    for rank, route in enumerate(routes):
        came = [sent[other][rank] for other in range(len(assigned))]
        assert tuple(map(len, came)) == route.receive_counts
        arrived.append(np.concatenate(came)[route.receive_order.numpy()].tolist())
    return arrived
