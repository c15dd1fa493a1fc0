"""A saved plan: which samples share a pack, and who trains it when, as an Arrow file that any tool can read.

Columns in pack order: ``pack`` int64, ``sample`` int64 (position in the caches), ``length`` int32; ``step``, ``rank``
and ``micro_batch`` int32, which older files lack: where each sample is trained in the first epoch; and where samples
share prefixes ``shared`` int32: tokens that each has in common with the sample before it, which its ``length`` leaves
out. The file's metadata say which caches it belongs to, so that it cannot be used with others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.errors import MismatchError

_FORMAT = "packtool plan 1"
_SHARED_FORMAT = "packtool plan 2"
"""The format of plans that share prefixes: who does not know of these would take such a plan for damaged."""
_KEY = b"packtool"
_SCHEMA = pa.schema([("pack", pa.int64()), ("sample", pa.int64()), ("length", pa.int32())])
_PLACES = [pa.field(name, pa.int32()) for name in ("step", "rank", "micro_batch")]
_SHARED = pa.field("shared", pa.int32())
_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class PlanInfo:
    """What a plan file says of itself.

    Args:
        capacity: tokens that a pack may hold.
        max_length: samples longer than this were left out.
        seed: of the plan.
        cache: fingerprint of the caches together, in their order.
        plan: fingerprint of the packs.
        num_cached: samples in the caches.
        parts: where steps have the parts of trees that were cut, as ``plan.prefix_trees.PartsIn``; empty where no tree
            is cut.
    """

    capacity: int
    max_length: int
    seed: int
    cache: str
    plan: str
    num_cached: int
    format: str = _FORMAT
    parts: str = ""


@dataclass(frozen=True, eq=False)
class SavedPlan:
    """K packs of N samples, as in ``plan.packing.PackPlan``.

    Args:
        samples: int64 (N,).
        offsets: int64 (K + 1,).
        lengths: int32 (N,).
        shared: int32 (N,), or None where all samples are computed whole.
        places: int32 (N, 3): 0-based step of the first epoch, data-parallel rank, and micro-batch of the rank in the
            step; None where nobody has assigned the packs.
    """

    info: PlanInfo
    samples: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    shared: npt.NDArray[np.int32] | None = None
    places: npt.NDArray[np.int32] | None = None


def write_plan(path: str, plan: SavedPlan) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        StorageError: if it cannot be written.
    """
    sizes = np.diff(plan.offsets)
    packs = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    columns: list[npt.NDArray[np.integer[Any]]]
    schema, columns, info = _SCHEMA, [packs, plan.samples, plan.lengths], plan.info
    if plan.places is not None:
        schema = pa.schema([*schema, *_PLACES])
        columns.extend(plan.places.T)
    if plan.shared is not None:
        schema, info = schema.append(_SHARED), replace(info, format=_SHARED_FORMAT)
        columns.append(plan.shared)
    told = {name: value for name, value in asdict(info).items() if value or name != "parts"}
    schema = schema.with_metadata({_KEY: json.dumps(told).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(packs), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            arrays = [pa.array(column[part]) for column in columns]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    storage.publish(path, sink.getvalue())


def read_plan(path: str) -> SavedPlan:
    """Read a plan file.

    Raises:
        MismatchError: if it is none, or damaged.
        StorageError: if it cannot be read.
    """
    with storage.open_read(path) as file:
        data = file.read()
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        info = PlanInfo(**load_json((reader.schema.metadata or {})[_KEY]))
        table = reader.read_all()
        packs = table.column("pack").to_numpy()
        samples = table.column("sample").to_numpy().astype(np.int64)
        lengths = table.column("length").to_numpy().astype(np.int32)
        is_shared = info.format == _SHARED_FORMAT
        shared = table.column("shared").to_numpy().astype(np.int32) if is_shared else None
        places = None
        if _PLACES[0].name in table.schema.names:
            places = np.stack([table.column(field.name).to_numpy().astype(np.int32) for field in _PLACES], axis=1)
    except (pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
        raise MismatchError(
            f"--plan {path} is no plan file, or is damaged: {error!r}", "Make it again with packtool plan --save."
        ) from error
    if info.format not in (_FORMAT, _SHARED_FORMAT):
        raise MismatchError(f"--plan {path} has format {info.format!r}, not {_FORMAT!r}", "Make it again.")
    starts = np.flatnonzero(np.diff(packs, prepend=-1))
    return SavedPlan(info, samples, np.append(starts, len(packs)).astype(np.int64), lengths, shared, places)


def read_plan_of(reader: CacheReader, plan: str) -> SavedPlan:
    """A saved plan of a cache.

    Raises:
        MismatchError: if the plan belongs to other caches, or is damaged.
        StorageError: if it cannot be read.
    """
    saved = read_plan(plan)
    if saved.info.cache != reader.fingerprint:
        raise MismatchError(
            f"--plan {plan} belongs to the cache {saved.info.cache}, and {' '.join(reader.directories)} is "
            f"{reader.fingerprint}",
            "Give the cache that the plan was made for.",
        )
    return saved
