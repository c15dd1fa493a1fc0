"""Columns of a cache, in Arrow and as ``datasets`` describes them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

_INTS = pa.list_(pa.int32())
_FILE = [("path", pa.string()), ("bytes", pa.binary())]
_SIZE = [("height", pa.int32()), ("width", pa.int32())]
_SOUND = [("samples", pa.int64()), ("features", pa.int32()), ("tokens", pa.int32())]
_IMAGE = pa.struct([*_FILE, *_SIZE, ("grid", _INTS), ("tokens", pa.int32())])
_AUDIO = pa.struct([*_FILE, *_SOUND])
_VIDEO = pa.struct(
    [
        *_FILE,
        ("frames", pa.list_(pa.struct(_FILE))),
        *_SIZE,
        ("num_frames", pa.int32()),
        ("fps", pa.float64()),
        ("indices", _INTS),
        ("grid", _INTS),
        ("seconds_per_grid", pa.float64()),
        ("tokens", pa.int32()),
        ("audio", pa.struct(_SOUND)),
    ]
)

SAMPLES = pa.schema(
    [
        ("input_ids", _INTS),
        ("labels", _INTS),
        ("length", pa.int32()),
        ("turns", _INTS),
        ("loss_scale", pa.list_(pa.float32())),
        ("images", pa.list_(_IMAGE)),
        ("videos", pa.list_(_VIDEO)),
        ("audios", pa.list_(_AUDIO)),
        ("channel", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("truncated", pa.int32()),
    ]
)
"""One row a sample: the fields of ``EncodedSample`` and of its media.

``turns``: [start, end) of each assistant turn that may be trained, flat. ``loss_scale``: null where all labels weigh 1.
``truncated``: tokens removed.
"""

PARTS = pa.schema(
    [
        (
            "part",
            pa.struct([(name, pa.int32()) for name in ("turn", "num_turns", "response", "num_responses")]),
        ),
        ("borders", _INTS),
    ]
)
"""Further columns where rows may become several samples, by ``--expand-turns`` or by their responses.

``part``: which part of its row a sample is, null for a whole row. ``borders``: where its turns begin and end.
"""

INDEX = pa.schema(
    [
        ("shard", pa.int32()),
        ("row_in_shard", pa.int32()),
        ("length", pa.int32()),
        ("target_tokens", pa.int32()),
        ("media_tokens", pa.int32()),
        ("num_images", pa.int32()),
        ("num_videos", pa.int32()),
        ("num_audios", pa.int32()),
        ("channel", pa.int32()),
        ("audio_tokens", pa.int32()),
        ("patch_squares", pa.int64()),
    ]
)
"""All that planning reads; ``channel`` is -1 or a position in the manifest's list.

The last two are what towers cost: tokens of sounds, and the sum over frames of (patches of the frame)^2. Caches that
were made before they were kept lack them.
"""

UNKNOWN = -1
"""Stands in the last two columns of an index for what an older packtool did not keep."""
ADDED = ("audio_tokens", "patch_squares")


PREFIX = pa.struct(
    [
        ("length", pa.int32()),
        ("hash", pa.uint64()),
        ("media_tokens", pa.int32()),
        ("audio_tokens", pa.int32()),
        ("patch_squares", pa.int64()),
        ("target_tokens", pa.int32()),
    ]
)
"""One prefix of a sample: the fields of ``PrefixHashes``."""

PREFIX_BEFORE = pa.struct([field for field in PREFIX if field.name != "target_tokens"])
"""What older caches tell of one."""

PREFIXES = pa.schema([("prefixes", pa.list_(PREFIX))])
"""A line for each line of the index: some prefixes of the sample, the shorter ones first."""


def with_added_columns(table: pa.RecordBatch | pa.Table) -> pa.RecordBatch | pa.Table:
    """An index, or a part of one, with all columns of ``INDEX``: ``UNKNOWN`` in those that it lacks."""
    for name in ADDED:
        if name not in table.schema.names:
            field = INDEX.field(name)
            table = table.append_column(field, pa.repeat(pa.scalar(UNKNOWN, field.type), table.num_rows))
    return table


def _feature(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if pa.types.is_struct(kind):
        return {kind.field(i).name: _feature(kind.field(i).type) for i in range(kind.num_fields)}
    return {"dtype": str(kind), "_type": "Value"}


def samples_schema(has_parts: bool) -> pa.Schema:
    """The columns of a shard.

    Args:
        has_parts: whether rows may become several samples.
    """
    return pa.schema([*SAMPLES, *PARTS]) if has_parts else SAMPLES


def dataset_info(has_parts: bool) -> bytes:
    """``dataset_info.json``, which ``datasets.load_from_disk`` reads the columns' types from."""
    features = {field.name: _feature(field.type) for field in samples_schema(has_parts)}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    return json.dumps(info, indent=1).encode()


def dataset_state(files: list[str], split: str, fingerprint: str) -> bytes:
    """``state.json``, which ``datasets.load_from_disk`` finds the shards by."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    return json.dumps(state, indent=1).encode()
