"""Plan files: the packs of a plan and their assignment to steps and ranks, as an Arrow file that any tool can read.

There is one row per sample, in pack order. Columns: ``pack`` int64; ``sample`` int64, position in the caches;
``length`` int32. Newer files also have the assignment in the first epoch: ``step``, ``rank`` and ``micro_batch``,
int32. Plans with shared prefixes have ``shared`` int32: the tokens that a sample has in common with the one before it,
which its ``length`` excludes. The metadata identify the caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool import storage
from packtool.cache.reader import CacheReader
from packtool.cache.shard import arrow_bytes
from packtool.config.settings import load_json
from packtool.errors import MismatchError

_FORMAT = "packtool plan 1"
_SHARED_FORMAT = "packtool plan 2"
"""Format of plans with shared prefixes, so that older versions refuse them."""
_METADATA = ("capacity", "max_length", "seed", "cache", "plan", "num_cached", "format", "parts")
_METADATA_KEY = b"packtool"
_SCHEMA = pa.schema([("pack", pa.int64()), ("sample", pa.int64()), ("length", pa.int32())])
_LOCATIONS = [pa.field(name, pa.int32()) for name in ("step", "rank", "micro_batch")]
_SHARED = pa.field("shared", pa.int32())
_BATCH_ROWS = 1 << 20
_CREATE_AGAIN = "Create it again with packtool plan --save."


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedPlan:
    """The content of a plan file: K packs of N samples, their assignment, caches and settings.

    Args:
        samples: int64 (N,), position of each sample in the caches, in pack order.
        offsets: int64 (K + 1,): pack ``k`` has the samples from ``offsets[k]`` up to ``offsets[k + 1]``.
        lengths: int32 (N,), tokens of each sample, without its shared prefix.
        shared_tokens: int32 (N,), tokens of each sample's shared prefix; None for a plan without shared prefixes.
        locations: int32 (N, 3): 0-based step of the first epoch, data-parallel rank, and micro-batch of the rank in the
            step; None if the packs are not assigned.
        capacity: maximum tokens of a pack.
        max_length: maximum tokens of a sample; longer ones are left out.
        cache: fingerprint of the caches, in their order.
        plan: fingerprint of the packs.
        num_cached: number of samples in the caches.
        parts: steps of the parts of divided trees (``planning.prefix_trees.PartPlacement``); empty if none is divided.
    """

    samples: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    shared_tokens: npt.NDArray[np.int32] | None = None
    locations: npt.NDArray[np.int32] | None = None
    capacity: int
    max_length: int
    seed: int
    cache: str
    plan: str
    num_cached: int
    parts: str = ""

    @property
    def format(self) -> str:
        return _FORMAT if self.shared_tokens is None else _SHARED_FORMAT


def write_plan(path: str, plan: SavedPlan) -> None:
    """Write a plan file: an Arrow table with a row for each sample, and settings in the metadata of its schema."""
    samples_per_pack = np.diff(plan.offsets)
    pack_of_sample = np.repeat(np.arange(len(samples_per_pack), dtype=np.int64), samples_per_pack)
    schema = _SCHEMA
    columns: list[npt.NDArray[np.integer[Any]]] = [pack_of_sample, plan.samples, plan.lengths]  # in the schema's order
    if plan.locations is not None:
        schema = pa.schema([*schema, *_LOCATIONS])
        columns.extend(plan.locations.T)
    if plan.shared_tokens is not None:
        schema = schema.append(_SHARED)
        columns.append(plan.shared_tokens)
    metadata = {name: getattr(plan, name) for name in _METADATA}
    if not plan.parts:
        del metadata["parts"]  # so that older versions, which do not know it, can read plans without divided trees
    schema = schema.with_metadata({_METADATA_KEY: json.dumps(metadata).encode()})
    storage.publish(path, arrow_bytes(_batches(columns, schema), schema))


def _batches(columns: Sequence[npt.NDArray[np.integer[Any]]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a million rows at a time of columns of N samples, (N,) each."""
    for start in range(0, len(columns[0]), _BATCH_ROWS):
        arrays = [pa.array(column[start : start + _BATCH_ROWS]) for column in columns]
        yield pa.record_batch(arrays, schema=schema)


def read_plan(path: str) -> SavedPlan:
    """Read a plan file; raise a MismatchError if it is damaged, of another format, or no plan file at all."""
    data = storage.read_bytes(path)
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
        metadata = load_json((reader.schema.metadata or {})[_METADATA_KEY])  # the names in _METADATA
        file_format = metadata.pop("format", _FORMAT)
        table = reader.read_all()
        columns = {name: table.column(name).to_numpy() for name in table.schema.names}
        if file_format not in (_FORMAT, _SHARED_FORMAT):
            raise MismatchError(f"--plan {path} has format {file_format!r}, not {_FORMAT!r}", _CREATE_AGAIN)
        return _plan_of_columns(columns, metadata, has_shared=file_format == _SHARED_FORMAT)
    except (pa.ArrowInvalid, KeyError, ValueError, TypeError) as error:
        message = f"--plan {path} is not a plan file, or is damaged: {error!r}"
        raise MismatchError(message, _CREATE_AGAIN) from error


def _plan_of_columns(
    columns: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, Any], *, has_shared: bool
) -> SavedPlan:
    """Return the plan with these columns, (N,) each, and settings; ``has_shared``: with shared prefixes."""
    locations = None
    if _LOCATIONS[0].name in columns:
        locations = np.stack([columns[field.name].astype(np.int32) for field in _LOCATIONS], axis=1)
    # Packs are numbered from 0, so the number changes at the first sample of each pack.
    pack_starts = np.flatnonzero(np.diff(columns["pack"], prepend=-1))
    return SavedPlan(
        samples=columns["sample"].astype(np.int64),
        offsets=np.append(pack_starts, len(columns["pack"])).astype(np.int64),
        lengths=columns["length"].astype(np.int32),
        shared_tokens=columns["shared"].astype(np.int32) if has_shared else None,
        locations=locations,
        **metadata,
    )


def read_plan_of(reader: CacheReader, path: str) -> SavedPlan:
    """Read a plan file; raise a MismatchError if it belongs to other caches than the reader's."""
    plan = read_plan(path)
    if plan.cache != reader.fingerprint:
        raise MismatchError(
            f"--plan {path} was made for the cache {plan.cache}, but {' '.join(reader.directories)} is "
            f"{reader.fingerprint}",
            "Give the cache that the plan was made for.",
        )
    return plan
