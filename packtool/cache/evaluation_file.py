"""The result file of an evaluation: Parquet with a row for each sample, in the order of the caches.

| column | |
|---|---|
| sample | int64, position in the caches |
| source, row | dataset of the sample, and its 0-based row there |
| part | turn, num_turns, response and num_responses of a part of a row, as in the cache; null for a whole row |
| channel | null for none |
| tokens, target_tokens | number of tokens, and of tokens with loss |
| loss | mean over the target tokens in nats; null without target tokens, as are the next two |
| perplexity | exp(loss) |
| token_accuracy | fraction of target tokens to which the model gives the highest probability |
| first_wrong | position in the sample of the first target token for which that is not so; -1 if there is none |

The metadata's ``packtool`` is a JSON object: model, caches, split, and totals of all samples and of each channel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packtool import storage
from packtool.cache.shard import PARTS

_KEY = b"packtool"
_SCHEMA = pa.schema(
    [
        ("sample", pa.int64()),
        ("source", pa.string()),
        ("row", pa.int64()),
        PARTS.field("part"),
        ("channel", pa.string()),
        ("tokens", pa.int32()),
        ("target_tokens", pa.int32()),
        ("loss", pa.float64()),
        ("perplexity", pa.float64()),
        ("token_accuracy", pa.float64()),
        ("first_wrong", pa.int32()),
    ]
)


def write_evaluation(path: str, columns: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Write columns of equal length, by name, and metadata to a file, atomically; NaN becomes null."""
    _write_table(path, _SCHEMA.with_metadata({_KEY: json.dumps(plain_json(info)).encode()}), columns)


def write_losses(path: str, columns: Mapping[str, Any]) -> None:
    """Write losses of samples during training: ``cache``, columns of an evaluation, and ``loss_1`` of epoch 1, ..."""
    losses = [pa.field(name, pa.float32()) for name in columns if name.startswith("loss_")]
    fields = [pa.field("cache", pa.string()), *_SCHEMA, *losses]
    _write_table(path, pa.schema([field for field in fields if field.name in columns]), columns)


def _write_table(path: str, schema: pa.Schema, columns: Mapping[str, Any]) -> None:
    # from_pandas takes nan for null.
    arrays = [pa.array(columns[field.name], field.type, from_pandas=True) for field in schema]
    publish_table(path, pa.Table.from_arrays(arrays, schema=schema))


def publish_table(path: str, table: pa.Table | dict[str, Any]) -> None:
    """Write a table, or columns whose types follow from their values, to a Parquet file, atomically."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(table) if isinstance(table, dict) else table, sink)
    storage.publish(path, sink.getvalue())


def load_table(path: str) -> pa.Table:
    """Read a Parquet file."""
    with pq.ParquetFile(path) as file:
        return file.read()


def join_tables(tables: Sequence[pa.Table], order: Sequence[str]) -> pa.Table:
    """Concatenate tables with the same columns, and sort the rows by the columns ``order``."""
    # The type of a column without any value is null.
    return pa.concat_tables(tables, promote_options="default").sort_by([(name, "ascending") for name in order])


def plain_json(value: Any) -> Any:
    """Copy nested mappings and lists, with None for every NaN and infinity, because JSON has neither."""
    if isinstance(value, Mapping):
        return {name: plain_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
