"""Seeded orders that are the same on every machine and with every version of numpy."""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError


@unique
class RandomStream(IntEnum):
    """Purposes of random numbers, from one seed and epoch: no two purposes share a number.

    With another number, a resumed run would not find its order. Windows of samples that are packed separately use the
    streams of packing at an offset of 16 per window (``of_window``); those of mixtures begin after every window, at
    2^40, and are offset by the number of a source or of a level of halving.
    """

    WITHIN_LENGTH = 0
    PACK_ORDER = 1
    SINGLE_ORDER = 2
    JITTER = 3
    SAVED_ORDER = 4
    BUDGET_ORDER = 5
    WINDOWS = 6
    BATCHES = 7
    WITHIN_LENGTH_OF_BATCHES = 8
    BUDGET_JITTER_2 = 9
    BUDGET_JITTER_3 = 10
    FILE_ORDER = 11
    SHUFFLE_BUFFER = 12
    SIMULATED_ORDER = 14
    SIMULATED_LENGTHS = 15
    MIX_KINDS = 1 << 40
    MIX_TURNS = (1 << 40) + (1 << 20)
    MIX_COINS = (1 << 40) + (2 << 20)
    MIX_STEPS = (1 << 40) + (3 << 20)
    MIX_NEIGHBOURS = (1 << 40) + (4 << 20)
    MIX_START = (1 << 40) + (5 << 20)
    MIX_COMPANIONS = (1 << 40) + (6 << 20)


def of_window(number: int) -> int:
    """Return the offset of the streams of packing for a window of samples, numbered from 0."""
    return _STREAMS_PER_WINDOW * (1 + number)


_STREAMS_PER_WINDOW = 16

CHUNK = 1 << 18
"""Numbers processed at a time, so that temporaries stay in the processor's cache."""


def seeded_order(
    num: int, *, seed: int, epoch: int, stream: int, descending_by: npt.NDArray[np.integer[Any]] | None = None
) -> npt.NDArray[np.int64]:
    """Order the numbers 0 to ``num`` - 1 at random, the same on every machine.

    With ``descending_by``, the numbers are sorted by these values, and only those of equal value are in random order.

    Args:
        stream: purpose of the random numbers, a ``RandomStream``, plus ``of_window`` for a window of samples that is
            packed by itself. Different streams give independent orders.
        descending_by: integers of 0 or more, (num,).
    """
    largest = int(descending_by.max()) if descending_by is not None and num else 0
    value_bits = largest.bit_length()
    number_bits = max(num - 1, 0).bit_length()
    assert number_bits + value_bits < 64, "there are random bits"
    # numpy guarantees the output of ``SeedSequence`` and ``random_raw``, but not of ``permutation``.
    bit_generator = _random_source(seed, epoch, stream)
    # A key of 64 bits per number: first ``largest`` minus its value, then random bits, then the number itself.
    keys = np.empty(num, dtype=np.uint64)
    for start in range(0, num, CHUNK):
        stop = min(start + CHUNK, num)
        numbers = np.arange(start, stop, dtype=np.uint64)
        random_bits = np.asarray(bit_generator.random_raw(len(numbers))) >> (value_bits + number_bits)
        chunk_keys = (random_bits << number_bits) | numbers
        if descending_by is not None and value_bits:
            below_largest = (largest - descending_by[start:stop]).astype(np.uint64)
            chunk_keys |= below_largest << (64 - value_bits)
        keys[start:stop] = chunk_keys
    keys.sort()
    order = keys.view(np.int64)
    order &= (1 << number_bits) - 1  # keeps only the numbers
    return order


def seeded_uniform(num: int, *, seed: int, epoch: int, stream: int) -> npt.NDArray[np.float64]:
    """Draw random numbers, 0 <= x < 1, float64 (num,); arguments, errors and guarantee as of ``seeded_order``."""
    raw = np.asarray(_random_source(seed, epoch, stream).random_raw(num))
    return (raw >> np.uint64(11)).astype(np.float64) / 2**53


def _random_source(seed: int, epoch: int, stream: int) -> np.random.PCG64:
    if seed < 0 or epoch < 0:
        raise ConfigError(f"The seed is {seed} and the epoch {epoch}.", "Give numbers of 0 or more.")
    return np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, epoch)))
