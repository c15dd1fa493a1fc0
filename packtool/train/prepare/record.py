"""What a run on caches writes down of itself: its history when it begins, and a ledger into every checkpoint.

The file of a checkpoint that says what was trained until then: ``packtool_ledger.npz``, megabytes for 100M samples.

An archive of numpy's arrays (``numpy.load`` reads it): ``told`` is JSON with names, totals and the last change of the
data; ``0.before.0``, ``0.epoch.0``, ... are planes of bits (``plan.ledger``) of the first cache, ``0.skipped`` its rows
that could not be loaded. Caches that the run had before come behind those that it has.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.errors import MismatchError
from packtool.planning.ledger import DataChange, Ledger, RowCounts, SourceLedger
from packtool.train.prepare.data_change import HISTORY, history_of, keep_origins
from packtool.train.prepare.history import Segment, begin_segment
from packtool.train.prepare.timeline import Timeline

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


Skipped = Sequence[tuple[int, int]]
"""Samples that were left out: the step, 0-based, and the sample's position in the caches."""


class RunRecord:
    """Keeps the ledger of a run up to date; on the first rank.

    Args:
        ledger: at the beginning.
        timeline: of the run.
        segment: of the history.
        checkpoint: that it goes on from.
    """

    def __init__(
        self,
        ledger: Ledger,
        timeline: Timeline,
        segment: Segment,
        checkpoint: str | None,
    ) -> None:
        self.ledger, self._checkpoint = ledger, checkpoint
        self._timeline, self._segment = timeline, segment

    def begin(self, output_dir: str) -> None:
        """The first step is next.

        Raises:
            StorageError: if it cannot be written.
        """
        begin_segment(output_dir, self._segment, self._checkpoint)
        change = self.ledger.change
        if change is not None:
            write_ledger(os.path.join(output_dir, HISTORY), self.ledger, ledger_name(change.step))

    def save(self, checkpoint: str, step: int, skipped: Skipped = (), left_out: Sequence[int] = ()) -> None:
        """Complete a checkpoint after so many steps.

        Args:
            skipped: samples that were left out since the one before, of all ranks.
            left_out: steps since then that changed no weight.

        Raises:
            StorageError: if it cannot be written.
        """
        keep_origins(self._timeline.inputs.of_run[2], history_of(checkpoint))
        ledger = ledger_after(self.ledger, self._timeline, step, skipped, left_out)
        write_ledger(checkpoint, ledger)
        self.ledger = ledger


def ledger_name(step: int) -> str:
    """The file in a history that has the ledger of a change of the data after so many steps."""
    return f"ledger-{step}.npz"


def ledger_after(
    ledger: Ledger,
    timeline: Timeline,
    step: int,
    skipped: Skipped = (),
    left_out: Sequence[int] = (),
) -> Ledger:
    """A ledger with all steps of a timeline up to ``step``; other arguments as for ``RunRecord.save``."""
    lengths, targets = timeline.inputs.lengths, timeline.inputs.targets
    while True:
        stretch = timeline.stretch(ledger.step)
        while ledger.epoch < stretch.epoch:
            ledger = ledger.in_next_epoch()
        if ledger.step >= step:
            return dataclasses.replace(ledger, stage=timeline.stage_of(ledger.step))
        plan, first = stretch.plan, stretch.first
        here = range(ledger.step, min(stretch.stop, step))
        none = [plan.samples_of(each - first, each - first + 1) for each in left_out if each in here]
        out = [position for at, position in skipped if at in here and at not in left_out]
        rows = np.concatenate([np.array(out, np.int64), *none])
        ledger = ledger.plus(plan, range(here.start - first, here.stop - first), lengths, targets, rows)


def ledger_of_plan(timeline: Timeline, step: int) -> Ledger:
    """What the plan has trained after so many steps: for a checkpoint that keeps no ledger, of an older packtool.

    It does not know of samples that were skipped.
    """
    inputs, (epoch, done) = timeline.inputs, timeline.locate(step)
    _, _, reader = inputs.of_run
    lengths, targets = inputs.lengths, inputs.targets
    planned = np.bincount(timeline.first.whole_packs.samples, minlength=len(lengths)) > 0

    def taken(number: int) -> npt.NDArray[np.int64]:
        """How often an epoch has each sample: a mixture takes some twice, and other ones in each epoch."""
        return np.asarray(planned if inputs.mixture is None else inputs.wanted_of(number), np.int64)

    before, in_epoch = np.zeros((2, len(lengths)), np.int64)
    for number in range(epoch):
        before += taken(number)
    if done:
        left = timeline.stretch(step).plan.packs_from(done).samples
        in_epoch = taken(epoch) - np.bincount(left, minlength=len(lengths))
    parts = (np.split(each, reader.offsets[1:-1]) for each in (before, in_epoch, lengths, targets))
    sources = []
    for begun, ago, now, length, target in zip(begin_ledger(reader).sources, *parts, strict=True):
        times = ago + now
        sources.append(
            SourceLedger(
                directory=begun.directory,
                fingerprint=begun.fingerprint,
                before=RowCounts.of(ago),
                epoch=RowCounts.of(now),
                skipped=begun.skipped,
                num_samples=int(times.sum()),
                tokens=int((times * length).sum()),
                target_tokens=int((times * target).sum()),
            )
        )
    return Ledger(step=step, epoch=epoch, sources=tuple(sources))


def begin_ledger(reader: CacheReader) -> Ledger:
    """The ledger of a run on some caches before its first step."""
    found = zip(reader.directories, reader.manifests, np.diff(reader.offsets).tolist(), strict=True)
    sources = (SourceLedger.begin(storage.absolute(name), m.fingerprint, num) for name, m, num in found)
    return Ledger(sources=tuple(sources))
