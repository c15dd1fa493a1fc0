"""Which samples share a pack: plans as compact arrays, and what holds for all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError, DataError
from packtool.planning.shuffle import seeded_order

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.integer[Any]] | Sequence[int]

MAX_CAPACITY = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PackPlan:
    """N samples in K packs, as CSR: pack ``k`` holds ``samples[offsets[k]:offsets[k + 1]]``.

    Args:
        samples: int64 (N,), in pack order: positions in the array of lengths, or, from ``plan_epoch``, in the cache.
        offsets: int64 (K + 1,).
        lengths: int32 (N,), tokens of ``samples``; of those that share a prefix, the tokens that each adds to its pack.
        capacity: tokens that a pack may hold.
        shared: int32 (N,), tokens before those, which a sample has in common with others of its pack; None where all
            samples are computed whole.
        mixture: fingerprint of what the samples were drawn by; empty where every sample is there once.
    """

    samples: Int64Array
    offsets: Int64Array
    lengths: Int32Array
    capacity: int
    shared: Int32Array | None = None
    mixture: str = ""

    @property
    def num_packs(self) -> int:
        """The number K of packs."""
        return len(self.offsets) - 1

    @property
    def num_samples(self) -> int:
        """The number N of samples."""
        return len(self.samples)

    @property
    def whole_lengths(self) -> Int32Array:
        """Tokens of each sample with what it shares; int32 (N,)."""
        return self.lengths if self.shared is None else self.lengths + self.shared

    def pack(self, index: int) -> Int64Array:
        """Samples of a pack; a view, not a copy."""
        if not 0 <= index < self.num_packs:
            raise IndexError(f"pack {index} of {self.num_packs}")
        return self.samples[self.offsets[index] : self.offsets[index + 1]]

    def sums_per_pack(self, values: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Sums over each pack of ``values`` (N,), which are in pack order; int64 (K,)."""
        assert len(values) == self.num_samples
        if self.num_packs == 0:
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(values, self.offsets[:-1], dtype=np.int64)

    def tokens_per_pack(self) -> Int64Array:
        """Tokens in each pack; int64 (K,)."""
        return self.sums_per_pack(self.lengths)

    def sum_squares_per_pack(self) -> Int64Array:
        """Sum of the squared lengths of each pack's samples, to which attention's work is proportional; int64 (K,).

        A sample that goes on from a shared prefix adds what its own tokens see: (prefix + own)^2 - prefix^2.
        """
        squares = np.square(self.whole_lengths, dtype=np.int64)
        return self.sums_per_pack(squares if self.shared is None else squares - np.square(self.shared, dtype=np.int64))

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Tokens over room, 0 to 1; 1 for a plan without packs."""
        return self.num_tokens / (self.num_packs * self.capacity) if self.num_packs else 1.0

    @property
    def lower_bound(self) -> int:
        """Packs that the tokens would need if samples could be cut: no packing has fewer."""
        return -(-self.num_tokens // self.capacity)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over everything in the plan; equal plans, and only they, have the same."""
        digest = hashlib.sha256(f"packtool pack plan 1, capacity {self.capacity}\n{self.mixture}".encode())
        shared = () if self.shared is None else (self.shared,)
        return digest_arrays(digest, self.samples, self.offsets, self.lengths, *shared)


def digest_arrays(digest: hashlib._Hash, *arrays: npt.NDArray[np.integer[Any]]) -> str:
    """Add integer arrays to a hash, each led by its length and stored little-endian; returns the hash in hex."""
    for values in arrays:
        little_endian = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        digest.update(f"{little_endian.dtype.str} {len(values)}\n".encode())
        digest.update(little_endian.data)
    return digest.hexdigest()


def check_lengths(lengths: Lengths, capacity: int) -> Int32Array:
    """Lengths as int32 (N,), all from 1 to ``capacity``, or an error that says how many are not."""
    if not 1 <= capacity <= MAX_CAPACITY:
        raise ConfigError(
            f"The packing length is {capacity}.", f"--packing-length must be between 1 and {MAX_CAPACITY}."
        )
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise DataError(f"The lengths have shape {array.shape}; one number a sample is expected.")
    if len(array) == 0:
        return np.zeros(0, dtype=np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"The lengths are of type {array.dtype}; whole numbers are expected.")
    shortest, longest = int(array.min()), int(array.max())
    if shortest <= 0:
        num_bad = int(np.count_nonzero(array <= 0))
        raise DataError(
            f"{num_bad:,} of {len(array):,} samples have no tokens (the smallest length is {shortest}).",
            "Remove them; packtool export never writes such rows.",
        )
    if longest > capacity:
        num_bad = int(np.count_nonzero(array > capacity))
        raise DataError(
            f"{num_bad:,} of {len(array):,} samples are longer than a pack of {capacity:,} tokens; "
            f"the longest has {longest:,}.",
            f"Raise --packing-length to {longest}, or leave them out with --max-length {capacity}.",
        )
    return array.astype(np.int32, copy=False)


def offsets_of(sizes: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Where groups of so many members begin and end, one after the other: int64 (K + 1,) from (K,)."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def inverse_of(order: Int64Array) -> Int64Array:
    """Where each number from 0 to N - 1 is in ``order``, which has all of them; int64 (N,)."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def plan_of(order: Int64Array, sizes: npt.NDArray[np.integer[Any]], lengths: Int32Array, capacity: int) -> PackPlan:
    """A plan from samples in pack order and the number of them in each pack.

    Args:
        order: int64 (N,), every sample's position, pack after pack.
        sizes: (K,), samples of each pack; they add up to N.
        lengths: int32 (N,), tokens of each sample, by position.
        capacity: tokens of a pack.
    """
    return PackPlan(order, offsets_of(sizes), lengths[order], capacity)


def with_packs_in_order(plan: PackPlan, order: Int64Array) -> PackPlan:
    """The packs of ``order``, int64 (K,) or shorter, one after the other: all K of them, or some."""
    sizes = np.diff(plan.offsets)[order]
    offsets = offsets_of(sizes)
    taken = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - plan.offsets[:-1][order], sizes)
    shared = None if plan.shared is None else plan.shared[taken]
    return PackPlan(plan.samples[taken], offsets, plan.lengths[taken], plan.capacity, shared, plan.mixture)


def with_each_alone(plan: PackPlan) -> PackPlan:
    """A plan of the same samples in the same order, each a pack of its own."""
    assert plan.shared is None, "a sample alone shares nothing"
    each = np.arange(plan.num_samples + 1, dtype=np.int64)
    return PackPlan(plan.samples, each, plan.lengths, plan.capacity, mixture=plan.mixture)


def exchange_equals(plan: PackPlan, values: Int32Array, *, seed: int, epoch: int, stream: int) -> PackPlan:
    """Let samples of one value, such as their length, change places at random; arguments as for ``seeded_order``."""
    places = np.argsort(-values[plan.samples], kind="stable")
    samples = np.empty_like(plan.samples)
    samples[places] = seeded_order(len(places), seed=seed, epoch=epoch, stream=stream, falling=values)
    return PackPlan(samples, plan.offsets, plan.lengths, plan.capacity)


def in_cache_order(plan: PackPlan) -> PackPlan:
    """The same packs with their samples ascending, the pack with the first sample first; samples are 0 to N - 1."""
    num = plan.num_samples
    if num == 0:
        return plan
    sizes = np.diff(plan.offsets)
    first = np.minimum.reduceat(plan.samples, plan.offsets[:-1])
    order = np.argsort(first)
    # Pack and sample in one number: K * N is below 2^63 for three billion samples.
    keys = np.repeat(inverse_of(order) * num, sizes)
    keys += plan.samples
    keys.sort()
    keys %= num
    return PackPlan(keys, offsets_of(sizes[order]), plan.lengths[inverse_of(plan.samples)[keys]], plan.capacity)


def split_to(plan: PackPlan, num_packs: int) -> PackPlan:
    """Take the last sample out of as many packs as it takes to have ``num_packs``, the fullest in samples first.

    Epochs whose packings came out a little different in number are made alike with it, since all epochs must have
    equally many steps; an honest price of a few packs in ten thousand.
    """
    missing = num_packs - plan.num_packs
    assert missing >= 0, "packs are split, never joined"
    offsets = plan.offsets
    while missing:
        sizes = np.diff(offsets)
        ends = offsets[1:][np.argsort(-sizes, kind="stable")[:missing]]
        fullest = np.sort(sizes)[::-1][:missing]
        cuts = ends[fullest > 1] - 1
        assert len(cuts), "there are as many packs as samples"
        offsets = np.sort(np.concatenate((offsets, cuts)))
        missing -= len(cuts)
    return PackPlan(plan.samples, offsets, plan.lengths, plan.capacity)
