"""The file of a checkpoint that says what was trained until then: ``packtool_ledger.npz``, megabytes for 100M samples.

An archive of numpy's arrays (``numpy.load`` reads it): ``told`` is JSON with names, totals and the last change of the
data; ``0.before.0``, ``0.epoch.0``, ... are planes of bits (``plan.ledger``) of the first cache, ``0.skipped`` its rows
that could not be loaded. Caches that the run had before come behind those that it has.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.config.yaml_values import load_json
from packtool.errors import MismatchError
from packtool.plan.ledger import DataChange, Ledger, RowCounts, SourceLedger

LEDGER_NAME = "packtool_ledger.npz"
_TOTALS = ("num_samples", "tokens", "target_tokens")

_Arrays = dict[str, npt.NDArray[Any]]


def write_ledger(directory: str, ledger: Ledger, name: str = LEDGER_NAME) -> None:
    """Write a ledger into a checkpoint, or another directory.

    Raises:
        StorageError: if it cannot be written.
    """
    arrays: _Arrays = {}
    told = {
        "step": ledger.step,
        "epoch": ledger.epoch,
        "sources": [_put(arrays, number, source) for number, source in enumerate(ledger.sources)],
        "retired": [_put(arrays, len(ledger.sources) + n, source) for n, source in enumerate(ledger.retired)],
        "change": None,
    }
    if ledger.stage is not None:
        told["stage"] = ledger.stage
    if (change := ledger.change) is not None:
        told["change"] = [change.step, change.epoch, *(() if change.stage is None else (change.stage,))]
        for what, counts in (("left", change.left), ("trained", change.trained)):
            for number, each in enumerate(counts):
                arrays |= _planes(f"{number}.{what}", each)
    arrays["told"] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    sink = io.BytesIO()
    np.savez_compressed(sink, **arrays)  # type: ignore[arg-type]
    storage.publish(os.path.join(directory, name), sink.getvalue())


def read_ledger(directory: str, name: str = LEDGER_NAME) -> Ledger | None:
    """The ledger of a checkpoint; None if it has none.

    Raises:
        MismatchError: if it is damaged.
    """
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            told = load_json(arrays["told"].tobytes())
            found = [*told["sources"], *told["retired"]]
            sources = tuple(_take(arrays, number, source) for number, source in enumerate(found))
            num = len(told["sources"])
            change = None
            if told["change"] is not None:
                sizes = [source.num for source in sources[:num]]
                left, trained = (
                    tuple(RowCounts(size, _found(arrays, f"{n}.{what}")) for n, size in enumerate(sizes))
                    for what in ("left", "trained")
                )
                step, epoch, *stage = told["change"]
                change = DataChange(step, epoch, left, _stage(*stage), trained if stage else ())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Give another checkpoint.") from error
    return Ledger(
        step=told["step"],
        epoch=told["epoch"],
        sources=sources[:num],
        retired=sources[num:],
        change=change,
        stage=_stage(told.get("stage")),
    )


def _stage(told: list[int] | None = None) -> tuple[int, int] | None:
    return None if told is None else (told[0], told[1])


def _put(arrays: _Arrays, number: int, source: SourceLedger) -> dict[str, Any]:
    arrays |= _planes(f"{number}.before", source.before) | _planes(f"{number}.epoch", source.epoch)
    arrays[f"{number}.skipped"] = source.skipped
    totals = {name: getattr(source, name) for name in _TOTALS}
    return {"directory": source.directory, "fingerprint": source.fingerprint, "num": source.num, **totals}


def _take(arrays: Any, number: int, told: dict[str, Any]) -> SourceLedger:
    num = told.pop("num")
    return SourceLedger(
        before=RowCounts(num, _found(arrays, f"{number}.before")),
        epoch=RowCounts(num, _found(arrays, f"{number}.epoch")),
        skipped=arrays[f"{number}.skipped"],
        **told,
    )


def _planes(name: str, counts: RowCounts) -> _Arrays:
    return {f"{name}.{bit}": plane for bit, plane in enumerate(counts.planes)}


def _found(arrays: Any, name: str) -> tuple[npt.NDArray[np.uint8], ...]:
    def planes() -> Iterator[npt.NDArray[np.uint8]]:
        bit = 0
        while f"{name}.{bit}" in arrays:
            yield arrays[f"{name}.{bit}"]
            bit += 1

    return tuple(planes())
