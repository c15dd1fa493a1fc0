"""Where a stream stands, and how a checkpoint keeps that.

CHECKPOINT/stream-00000.arrow      samples that rank 0 holds: those held back, then those of the shuffle buffer
CHECKPOINT/stream-00000.json       everything else, written last
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packtool import storage
from packtool.cache.reader import ShardFile
from packtool.cache.shard import ShardWriter
from packtool.config.yaml_values import load_json
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError
from packtool.stream.reading import Place

_HELD = ("carried", "shuffled")


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamState:
    """The beginning of an interval, and how many of its packs are done.

    Args:
        place: right before the block that the next sample comes from; None for the first of all.
        num_taken: samples of that block that were taken already.
        ended: no sample comes any more.
        interval: packed before this one.
        packs_done: of this interval.
        random: state of the generator that draws from the shuffle buffer; None before the first draw.
        carried: samples that were held back from the interval before.
        shuffled: the shuffle buffer.
        dropped: rows, by reason.
        parts_left_out: turns and responses by reason, of rows of which others are kept.
    """

    place: Place | None = None
    num_taken: int = 0
    ended: bool = False
    interval: int = 0
    packs_done: int = 0
    random: dict[str, Any] | None = None
    carried: Sequence[EncodedSample] = ()
    shuffled: Sequence[EncodedSample] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    parts_left_out: Mapping[str, int] = field(default_factory=dict)


def write_stream_state(directory: str, rank: int, state: StreamState) -> None:
    """Keep a rank's state in a directory.

    Raises:
        StorageError: if it cannot be written.
    """
    samples, plain = _paths(directory, rank)
    held = [*state.carried, *state.shuffled]
    writer = ShardWriter(samples, has_parts=any(sample.part is not None for sample in held))
    try:
        writer.write(held)
        writer.close()
    except BaseException:
        writer.discard()
        raise
    values = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in _HELD}
    values |= {f"num_{name}": len(getattr(state, name)) for name in _HELD}
    values["place"] = dataclasses.asdict(state.place) if state.place is not None else None
    storage.publish(plain, json.dumps(values).encode())


def read_stream_state(directory: str, rank: int) -> StreamState:
    """A rank's state as it was kept.

    Raises:
        MismatchError: if the directory has none, or it is damaged.
    """
    samples, plain = _paths(directory, rank)
    try:
        with open(plain, encoding="utf-8") as file:
            values = load_json(file.read())
        counts = [values.pop(f"num_{name}") for name in _HELD]
        place = Place(**values.pop("place")) if values["place"] is not None else values.pop("place")
        kept = ShardFile(samples)
        if len(kept) != sum(counts):
            raise ValueError(f"{len(kept)} samples, not {sum(counts)}")
        held = [kept.sample(i) for i in range(len(kept))]
        return StreamState(**values, place=place, carried=held[: counts[0]], shuffled=held[counts[0] :])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(
            f"{directory} does not tell where the stream of rank {rank} stood: {error}",
            "Give another checkpoint to --resume-from-checkpoint.",
        ) from error


def _paths(directory: str, rank: int) -> tuple[str, str]:
    stem = os.path.join(directory, f"stream-{rank:05d}")
    return stem + ".arrow", stem + ".json"
