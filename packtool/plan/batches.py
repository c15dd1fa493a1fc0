"""Packing with the library ``binpacking``, in batches, as ms-swift does."""

from __future__ import annotations

import numpy as np

from packtool.plan.pack_plan import Int32Array, Int64Array
from packtool.plan.windows import map_on_processes

BATCHES_PER_CHAIN = 64
_MANY = 20_000

_Chain = tuple[Int64Array, Int32Array, int, int]


def place_in_batches(
    lengths: Int32Array, capacity: int, batch_size: int, num_proc: int, order: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Give samples to ``binpacking.to_constant_volume`` so many at a time; the last pack, if not full, goes on.

    What the library does differs: 1.5.2 puts a sample into the fullest pack that takes it, 2.0.1 into the emptiest.
    With both, samples go in falling order, and the time grows with the square of the batch.

    ms-swift has one chain of batches a process, so that its packs depend on how many there are. Here a chain has 64
    batches, whatever the processes.

    Args:
        lengths: (N,), from 1 to ``capacity``.
        capacity: tokens that a pack may hold.
        batch_size: samples of a batch, besides those that go on from the batch before.
        num_proc: processes.
        order: (N,), in which samples come into batches.

    Returns:
        int64 (N,) the samples in pack order, and (K,) how many are in each pack.
    """
    step = batch_size * BATCHES_PER_CHAIN
    parts = [order[start : start + step] for start in range(0, len(order), step)]
    chains: list[_Chain] = [(part, lengths[part], capacity, batch_size) for part in parts]
    results = map_on_processes(_pack_chain, chains, num_proc if len(order) >= _MANY else 1)
    nothing = np.zeros(0, dtype=np.int64)
    packed = np.concatenate([nothing, *(packed for packed, _ in results)])
    sizes = np.concatenate([nothing, *(sizes for _, sizes in results)])
    assert len(packed) == len(lengths) == sizes.sum(), "binpacking neither loses samples nor makes empty packs"
    return packed, sizes


def _pack_chain(chain: _Chain) -> tuple[Int64Array, Int64Array]:
    # Takes a moment, and most plans do without.
    from binpacking.to_constant_volume import to_constant_volume

    samples, lengths, capacity, batch_size = chain
    items = list(zip(samples.tolist(), lengths.tolist(), strict=True))
    packs: list[list[tuple[int, int]]] = []
    waiting: list[tuple[int, int]] = []
    for start in range(0, len(items), batch_size):
        made = to_constant_volume([*waiting, *items[start : start + batch_size]], capacity, weight_pos=1)
        waiting = []
        if start + batch_size < len(items) and sum(length for _, length in made[-1]) < capacity:
            waiting = made.pop()
        packs += made
    # It answers an empty list with one empty pack.
    packs = [pack for pack in packs if pack]
    packed = np.array([sample for pack in packs for sample, _ in pack], dtype=np.int64)
    return packed, np.array([len(pack) for pack in packs], dtype=np.int64)
