"""``PackPlan``: which samples share a pack, as compact arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError, DataError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer[Any]]
Costs = npt.NDArray[np.float64]
Lengths = IntArray | Sequence[int]

MAX_CAPACITY = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PackPlan:
    """N samples in K packs, as CSR: pack ``k`` holds ``samples[offsets[k]:offsets[k + 1]]``.

    Args:
        samples: int64 (N,), in pack order: positions in the array of lengths, or, from ``plan_epoch``, in the cache.
        offsets: int64 (K + 1,).
        lengths: int32 (N,), tokens of ``samples``; with shared prefixes, the tokens that each sample adds to its pack.
        capacity: maximum tokens of a pack.
        shared_tokens: int32 (N,), prefix tokens that each sample shares with the sample before it, not in ``lengths``;
            None without shared prefixes.
        mixture: fingerprint of the mixture that drew the samples; empty where every sample occurs once.
    """

    samples: Int64Array
    offsets: Int64Array
    lengths: Int32Array
    capacity: int
    shared_tokens: Int32Array | None = None
    mixture: str = ""

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def full_lengths(self) -> Int32Array:
        """Tokens of each sample including its shared prefix; int32 (N,)."""
        return self.lengths if self.shared_tokens is None else self.lengths + self.shared_tokens

    def pack(self, index: int) -> Int64Array:
        """Return the samples of a pack, (n,); a view, not a copy."""
        if not 0 <= index < self.num_packs:
            raise IndexError(f"pack {index} of {self.num_packs}")
        return self.samples[self.offsets[index] : self.offsets[index + 1]]

    def sums_per_pack(self, values: IntArray) -> Int64Array:
        """Sum ``values`` (N,), which are in pack order, over each pack; int64 (K,)."""
        return sums_of_groups(values, self.offsets)

    def tokens_per_pack(self) -> Int64Array:
        """Sum the tokens of each pack; int64 (K,)."""
        return self.sums_per_pack(self.lengths)

    def gathered_keys_per_pack(self) -> Int64Array:
        """Estimate the attention keys that each pack with shared prefixes gathers; int64 (K,), 0 for other packs."""
        if self.shared_tokens is None:
            return np.zeros(self.num_packs, np.int64)
        is_fork = np.diff(self.shared_tokens, prepend=0) != 0  # neighbors with equal prefixes have one fork
        keys = self.sums_per_pack(self.full_lengths + self.shared_tokens * is_fork)
        return np.where(self.sums_per_pack(self.shared_tokens) > 0, keys, 0)

    def sum_squares_per_pack(self) -> Int64Array:
        """Sum the squared sample lengths of each pack, proportional to the work of attention; int64 (K,).

        A sample with a shared prefix adds (prefix + own)^2 - prefix^2.
        """
        squares = np.square(self.full_lengths, dtype=np.int64)
        if self.shared_tokens is not None:
            squares -= np.square(self.shared_tokens, dtype=np.int64)
        return self.sums_per_pack(squares)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Tokens divided by the capacity of all packs, 0 to 1; 1 for a plan without packs."""
        return self.num_tokens / (self.num_packs * self.capacity) if self.num_packs else 1.0

    @property
    def lower_bound(self) -> int:
        """Minimum number of packs for this many tokens, if samples could be split."""
        return -(-self.num_tokens // self.capacity)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over all arrays: equal for equal plans only."""
        digest = hashlib.sha256(f"packtool pack plan 1, capacity {self.capacity}\n{self.mixture}".encode())
        shared = () if self.shared_tokens is None else (self.shared_tokens,)
        return digest_arrays(digest, self.samples, self.offsets, self.lengths, *shared)


def digest_arrays(digest: hashlib._Hash, *arrays: IntArray) -> str:
    """Add integer arrays (N,) to a hash, each after its type and length, little-endian; return the hash in hex."""
    for values in arrays:
        little_endian = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        digest.update(f"{little_endian.dtype.str} {len(values)}\n".encode())
        digest.update(little_endian.data)
    return digest.hexdigest()


def check_lengths(lengths: Lengths, capacity: int) -> Int32Array:
    """Convert lengths to int32 (N,), and check that all are from 1 to ``capacity`` tokens."""
    if not 1 <= capacity <= MAX_CAPACITY:
        remedy = f"--packing-length must be between 1 and {MAX_CAPACITY}."
        raise ConfigError(f"The packing length is {capacity}.", remedy)
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise DataError(f"The lengths have shape {array.shape}; one number a sample is expected.")
    if len(array) == 0:
        return np.zeros(0, dtype=np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"The lengths are of type {array.dtype}; whole numbers are expected.")
    _check_range(array, capacity)
    return array.astype(np.int32, copy=False)


def _check_range(lengths: IntArray, capacity: int) -> None:
    """Check that lengths, of at least one sample, are from 1 to ``capacity`` tokens."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest <= 0:
        num_empty = np.count_nonzero(lengths <= 0)
        raise DataError(
            f"{num_empty:,} of {len(lengths):,} samples have no tokens (the smallest length is {shortest}).",
            "Remove them; packtool export never writes such rows.",
        )
    if longest > capacity:
        num_too_long = np.count_nonzero(lengths > capacity)
        raise DataError(
            f"{num_too_long:,} of {len(lengths):,} samples are longer than a pack of {capacity:,} tokens; "
            f"the longest has {longest:,}.",
            f"Raise --packing-length to {longest}, or leave them out with --max-length {capacity}.",
        )


def to_offsets(sizes: IntArray) -> Int64Array:
    """Compute the offsets of consecutive groups, int64 (K + 1,), from their sizes (K,)."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def sums_of_groups(values: IntArray, offsets: Int64Array) -> Int64Array:
    """Sum ``values`` (N,) over consecutive, nonempty groups, given by their offsets (K + 1,); int64 (K,)."""
    if len(offsets) == 1:
        return np.zeros(0, dtype=np.int64)
    assert len(values) == offsets[-1]
    return np.add.reduceat(values, offsets[:-1], dtype=np.int64)


def gather_groups(offsets: Int64Array, order: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Select groups by number, (k,); return their members' positions, int64 (n,), and offsets, int64 (k + 1,)."""
    sizes = np.diff(offsets)[order]
    new_offsets = to_offsets(sizes)
    members: Int64Array = np.repeat(offsets[:-1][order] - new_offsets[:-1], sizes)
    members += np.arange(len(members))
    return members, new_offsets


def invert_order(order: Int64Array) -> Int64Array:
    """Invert a permutation; int64 (N,)."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return inverse


def build_plan(order: Int64Array, sizes: IntArray, lengths: Int32Array, capacity: int) -> PackPlan:
    """Build a plan from sample positions in pack order, (N,), sizes of packs, (K,), and lengths by position."""
    return PackPlan(order, to_offsets(sizes), lengths[order], capacity)


def select_packs(plan: PackPlan, order: Int64Array) -> PackPlan:
    """Select the packs numbered ``order``, int64 (k,), in that order: all K packs, or a part of them."""
    members, offsets = gather_groups(plan.offsets, order)
    shared = None if plan.shared_tokens is None else plan.shared_tokens[members]
    return PackPlan(plan.samples[members], offsets, plan.lengths[members], plan.capacity, shared, plan.mixture)


def split_into_samples(plan: PackPlan) -> PackPlan:
    """Make every sample a pack of its own, in the same order; with shared prefixes, packs of what it adds to others."""
    return replace(plan, offsets=np.arange(plan.num_samples + 1, dtype=np.int64))


def sort_by_sample(plan: PackPlan) -> PackPlan:
    """Sort the samples 0 to N - 1 within their packs, and packs by their first sample."""
    num = plan.num_samples
    if num == 0:
        return plan
    sizes = np.diff(plan.offsets)
    order = np.argsort(np.minimum.reduceat(plan.samples, plan.offsets[:-1]))
    # Pack and sample in one number: K * N is below 2^63 for three billion samples.
    keys = np.repeat(invert_order(order) * num, sizes)
    keys += plan.samples
    keys.sort()
    keys %= num
    return PackPlan(keys, to_offsets(sizes[order]), plan.lengths[invert_order(plan.samples)[keys]], plan.capacity)


def split_to_count(plan: PackPlan, num_packs: int) -> PackPlan:
    """Split packs until there are ``num_packs``: in turns, the last sample of each of the fullest becomes a pack."""
    num_missing = num_packs - plan.num_packs
    assert num_missing >= 0, "packs are split, never joined"
    offsets = plan.offsets
    while num_missing > 0:
        sizes = np.diff(offsets)
        divisible = np.flatnonzero(sizes > 1)
        assert len(divisible) > 0, "more packs than samples"
        fullest_first = divisible[np.argsort(-sizes[divisible], kind="stable")]
        pack_stops = offsets[1:]
        last_samples = pack_stops[fullest_first[:num_missing]] - 1
        offsets = np.sort(np.append(offsets, last_samples))
        num_missing -= len(last_samples)
    split = replace(plan, offsets=offsets)
    return split if plan.shared_tokens is None else _unshare_first_samples(split, plan.shared_tokens)


def _unshare_first_samples(plan: PackPlan, shared_tokens: Int32Array) -> PackPlan:
    """Let the first sample of each pack compute the prefix that it shared with the sample before it."""
    first_samples = plan.offsets[:-1]
    lengths, shared_tokens = plan.lengths.copy(), shared_tokens.copy()
    lengths[first_samples] += shared_tokens[first_samples]
    shared_tokens[first_samples] = 0
    return replace(plan, lengths=lengths, shared_tokens=shared_tokens)
