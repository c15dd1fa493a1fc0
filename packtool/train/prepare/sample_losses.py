"""Mean loss of each sample at the step that trained it: files in the history of a run.

Losses are float16, in nats per target token, without loss weights. NaN: not trained in this epoch, or without targets.
A sample that a mixture repeats within an epoch has the loss of the last step that trained it.

OUTPUT_DIR/history/
    losses-0.npz                  of caches, in the first epoch: (N,) for each cache, by its fingerprint
    stream-losses-120.parquet     of a stream, from step 120 to a later file: a row for each trained sample
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.evaluation_file import join_tables, load_table, publish_table
from packtool.cache.origins import DAMAGE_ERRORS
from packtool.cache.shard import num_targets
from packtool.config.settings import load_json
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError
from packtool.planning.ledger import Ledger
from packtool.train.prepare.checkpoint import run_directory
from packtool.train.prepare.output_dir import HISTORY
from packtool.train.prepare.timeline import Timeline

_DTYPE: type[np.floating[Any]] = np.float16
_KEY = ("epoch", "source", "row", "sample", "part", "channel", "tokens", "target_tokens")
"""Columns of a stream's file besides ``step`` and ``loss``; 0-based epochs and steps; sample: ``number_in_row``."""
_EPOCH_FILE, _STREAM_FILE = "losses-{}.npz", "stream-losses-{}.parquet"
_MAX_PENDING = 100_000  # losses of a stream that are kept in memory
CacheLosses = dict[str, npt.NDArray[Any]]
"""Losses of an epoch, (N,) for each cache, by its fingerprint."""


def losses_by_epoch(history: str) -> dict[int, CacheLosses]:
    """Read the losses in a run's folder ``history``, by 0-based epoch, in order; empty if none were kept."""
    return {epoch: _read(path) for epoch, path in _files(history, _EPOCH_FILE).items()}


def discard_later_losses(history: str, ledger: Ledger | None) -> None:
    """Remove the losses of steps that the ledger of a checkpoint does not include; None removes all."""
    for epoch, path in _files(history, _EPOCH_FILE).items():
        if ledger is None or epoch > ledger.epoch:
            os.remove(path)
        elif epoch == ledger.epoch:
            losses = _read(path)
            counts: dict[str, npt.NDArray[Any]] = dict.fromkeys(losses, np.zeros(1))
            for source in (*ledger.sources, *ledger.retired):  # several of them may be the same cache
                counts[source.fingerprint] = counts.get(source.fingerprint, 0) + source.epoch.counts()
            for fingerprint, values in losses.items():
                losses[fingerprint] = np.where(counts[fingerprint] > 0, values, np.nan).astype(_DTYPE)
            _write(path, losses)


class LossRecord:
    """Writer of the losses of a run's samples, on its first rank, into the folder ``history``."""

    def __init__(self, history: str, timeline: Timeline) -> None:
        self._history, self._timeline = history, timeline
        self._reader = timeline.inputs.for_training.reader
        self._epochs: dict[int, CacheLosses] = {}  # changed since they were last written

    def add(self, gathered: Sequence[npt.NDArray[Any]], skipped_steps: Sequence[int]) -> None:
        """Add the four (M,) of ``SampleLosses.gather``, except ``skipped_steps``; a sample may repeat within a step."""
        for step, trained, means in _losses_by_step(gathered, skipped_steps):
            losses = self._losses(self._timeline.span_at(step).epoch)
            for cache, (start, stop) in zip(self._reader.manifests, pairwise(self._reader.offsets), strict=True):
                is_in_cache = (trained >= start) & (trained < stop)
                losses[cache.fingerprint][trained[is_in_cache] - start] = means[is_in_cache]

    def _losses(self, epoch: int) -> CacheLosses:
        """Return the losses of an epoch, to be changed: those of its file, and NaN for caches without any."""
        if epoch not in self._epochs:
            path = _files(self._history, _EPOCH_FILE).get(epoch)
            losses = {} if path is None else _read(path)
            for cache, num_samples in zip(self._reader.manifests, np.diff(self._reader.offsets), strict=True):
                losses.setdefault(cache.fingerprint, np.full(num_samples, np.nan, _DTYPE))
            self._epochs[epoch] = losses
        return self._epochs[epoch]

    def write(self) -> None:
        """Write the losses of all epochs that have changed."""
        for epoch, losses in self._epochs.items():
            _write(os.path.join(self._history, _EPOCH_FILE.format(epoch)), losses)
        self._epochs.clear()


def _losses_by_step(
    gathered: Sequence[npt.NDArray[Any]], skipped_steps: Sequence[int]
) -> Iterator[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]]:
    """Yield each step that changed weights, its distinct samples (K,), and their mean losses (K,)."""
    steps, samples, sums, targets = gathered
    order = np.argsort(steps, kind="stable")
    for in_step in np.split(order, np.flatnonzero(np.diff(steps[order])) + 1):
        if len(in_step) and steps[in_step[0]] not in skipped_steps:
            trained, index = np.unique(samples[in_step], return_inverse=True)
            with np.errstate(invalid="ignore", over="ignore"):
                means = (np.bincount(index, sums[in_step]) / np.bincount(index, targets[in_step])).astype(_DTYPE)
            yield int(steps[in_step[0]]), trained, means


def stream_key(sample: EncodedSample) -> str:
    """Return the values of ``_KEY`` as JSON, which identify a sample of a stream."""
    part = None if sample.part is None else vars(sample.part)
    numbers = sample.epoch, sample.source, sample.row, sample.number_in_row
    return json.dumps([*numbers, part, sample.channel, sample.length, num_targets(sample)])


class StreamRecord:
    """Writer of the history of a stream, its losses, on the first rank; ``start`` is the first step to train."""

    def __init__(self, start: int, checkpoint: str | None) -> None:
        self._start, self._checkpoint = start, checkpoint
        self._history = ""
        self._rows: list[tuple[Any, ...]] = []  # not yet written
        self.losses = self  # as of ``RunRecord``: what losses are added to

    def begin(self, output_dir: str) -> None:
        """Copy the losses if the checkpoint is in another output directory; remove those of steps trained again."""
        self._history = os.path.join(output_dir, HISTORY)
        if self._checkpoint is not None:
            resumed_history = os.path.join(run_directory(self._checkpoint), HISTORY)
            if os.path.isdir(resumed_history) and os.path.realpath(resumed_history) != os.path.realpath(self._history):
                shutil.copytree(resumed_history, self._history, dirs_exist_ok=True)
        paths = _files(self._history, _STREAM_FILE)
        for step in [step for step in paths if step >= self._start]:
            os.remove(paths.pop(step))
        for path in [*paths.values()][-1:]:  # only the last one may have later steps
            table = _read(path)
            publish_table(path, table.filter(table["step"].to_numpy() < self._start))

    def add(self, gathered: Sequence[npt.NDArray[Any]], skipped_steps: Sequence[int]) -> None:
        """Add the four (M,) of ``SampleLosses.gather``, as ``LossRecord.add`` does."""
        for step, keys, means in _losses_by_step(gathered, skipped_steps):
            self._rows += [(*load_json(key), step, loss) for key, loss in zip(keys.tolist(), means, strict=True)]
        if len(self._rows) > _MAX_PENDING:
            self.write()

    def write(self, *_: Any) -> None:
        """Write the losses since the last call into a new file, by epoch and row, so that they compress well."""
        if not self._rows:
            return
        storage.make_directory(self._history)
        *key, steps, losses = zip(*sorted(self._rows, key=lambda row: row[:4]), strict=True)
        columns = dict(zip(_KEY, key, strict=True)) | {"step": steps, "loss": np.array(losses, _DTYPE)}
        path = os.path.join(self._history, _STREAM_FILE.format(min(steps)))
        publish_table(path, columns)
        self._rows = []

    save = write  # with the arguments of ``RunRecord.save``, which have no effect


def stream_losses(history: str) -> Any:
    """Read the table of losses of a stream's samples, ordered by row, epoch and step; None if none were kept."""
    tables = [_read(path) for path in _files(history, _STREAM_FILE).values()]
    return join_tables(tables, ("source", "row", "sample", "epoch", "step")) if tables else None


def _files(history: str, name: str) -> dict[int, str]:
    """Return the files of a folder with this name, where ``{}`` stands for a number, by this number, in order."""
    prefix, suffix = name.split("{}")
    names = os.listdir(history) if os.path.isdir(history) else []
    matches = filter(None, (re.fullmatch(rf"{prefix}(\d+){re.escape(suffix)}", name) for name in names))
    return dict(sorted((int(match[1]), os.path.join(history, match[0])) for match in matches))


def _write(path: str, losses: CacheLosses) -> None:
    archive = io.BytesIO()
    np.savez(archive, **losses)  # type: ignore[arg-type]
    storage.publish(path, archive.getvalue())


def _read(path: str) -> Any:
    """Read the losses in a file: ``CacheLosses``, or the table of a stream."""
    try:
        if path.endswith(".parquet"):
            return load_table(path)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except DAMAGE_ERRORS as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Remove it: it is not needed to train.") from error
