"""The ledger of a run on caches: which samples its steps have trained, kept up to date in its checkpoints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.reader import CacheReader
from packtool.planning.ledger import Ledger, RowCounts, SourceLedger
from packtool.train.prepare.history import Segment, begin_segment, history_of, keep_origins, ledger_name, write_ledger
from packtool.train.prepare.output_dir import HISTORY
from packtool.train.prepare.timeline import Timeline

Skipped = Sequence[tuple[int, int]]
"""Samples that were left out: the step, 0-based, and the sample's position in the caches."""


class RunRecord:
    """Keeps history and ledger of a run up to date; on the first rank.

    Args:
        ledger: of what was trained before.
        timeline: of the run.
        segment: of the history.
        checkpoint: that the run resumes from.
    """

    def __init__(self, ledger: Ledger, timeline: Timeline, segment: Segment, checkpoint: str | None) -> None:
        self.ledger, self._checkpoint = ledger, checkpoint
        self._timeline, self._segment = timeline, segment

    def begin(self, output_dir: str) -> None:
        """Write the history before the first step."""
        begin_segment(output_dir, self._segment, self._checkpoint)
        change = self.ledger.change
        if change is not None:
            write_ledger(os.path.join(output_dir, HISTORY), self.ledger, ledger_name(change.step))

    def save(self, checkpoint: str, step: int, skipped: Skipped = (), left_out: Sequence[int] = ()) -> None:
        """Write the ledger into a checkpoint after ``step`` steps.

        Args:
            skipped: samples that all ranks skipped since the last checkpoint.
            left_out: steps since then that changed no weight.
        """
        keep_origins(self._timeline.inputs.of_run[2], history_of(checkpoint))
        self.ledger = ledger_after(self.ledger, self._timeline, step, skipped, left_out)
        write_ledger(checkpoint, self.ledger)


def ledger_after(
    ledger: Ledger, timeline: Timeline, step: int, skipped: Skipped = (), left_out: Sequence[int] = ()
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
    """The ledger of a checkpoint of an older packtool, from its plan; it has no skipped samples."""
    inputs, (epoch, done) = timeline.inputs, timeline.locate(step)
    reader = inputs.of_run[2]
    lengths, targets = inputs.lengths, inputs.targets
    planned = np.bincount(timeline.first.full_packs.samples, minlength=len(lengths)) > 0

    def taken(number: int) -> npt.NDArray[np.int64]:
        """Occurrences of each sample in an epoch, (N,)."""
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
            dataclasses.replace(
                begun,
                before=RowCounts.of(ago),
                epoch=RowCounts.of(now),
                num_samples=int(times.sum()),
                tokens=int((times * length).sum()),
                target_tokens=int((times * target).sum()),
            )
        )
    return Ledger(step=step, epoch=epoch, sources=tuple(sources))


def begin_ledger(reader: CacheReader) -> Ledger:
    """The ledger of a run before its first step."""
    caches = zip(reader.directories, reader.manifests, np.diff(reader.offsets).tolist(), strict=True)
    sources = (SourceLedger.begin(storage.absolute(name), m.fingerprint, num) for name, m, num in caches)
    return Ledger(sources=tuple(sources))
