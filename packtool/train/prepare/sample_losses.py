"""Mean loss of each sample at the step that trained it: a file for each epoch in the history of a run.

``OUTPUT_DIR/history/losses-0.npz`` is of the first epoch. It has an array for each cache, by the cache's fingerprint:
float16 (N,), in nats per target token, without loss weights. NaN: not trained in this epoch, or without targets. A
sample that a mixture repeats within an epoch has the loss of the last step that trained it.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.origins import DAMAGE_ERRORS
from packtool.errors import MismatchError
from packtool.planning.ledger import Ledger
from packtool.train.prepare.timeline import Timeline

_DTYPE: type[np.floating[Any]] = np.float16
CacheLosses = dict[str, npt.NDArray[Any]]
"""Losses of an epoch, (N,) for each cache, by its fingerprint."""


def losses_by_epoch(history: str) -> dict[int, CacheLosses]:
    """Read the losses in a run's folder ``history``, by 0-based epoch, in order; empty if none were kept."""
    return {epoch: _read(_path(history, epoch)) for epoch in _epochs(history)}


def discard_later_losses(history: str, ledger: Ledger | None) -> None:
    """Remove the losses of steps that the ledger of a checkpoint does not include; None removes all."""
    for epoch in _epochs(history):
        path = _path(history, epoch)
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
        steps, samples, sums, num_targets = gathered
        order = np.argsort(steps, kind="stable")
        for in_step in np.split(order, np.flatnonzero(np.diff(steps[order])) + 1):
            if len(in_step) and steps[in_step[0]] not in skipped_steps:
                self._add_step(int(steps[in_step[0]]), samples[in_step], sums[in_step], num_targets[in_step])

    def _add_step(
        self, step: int, samples: npt.NDArray[Any], sums: npt.NDArray[Any], num_targets: npt.NDArray[Any]
    ) -> None:
        """Add the mean losses of the samples of one step, (M,) each."""
        trained, index = np.unique(samples, return_inverse=True)
        losses = self._losses(self._timeline.span_at(step).epoch)
        with np.errstate(invalid="ignore", over="ignore"):
            means = np.bincount(index, sums) / np.bincount(index, num_targets)
            for cache, (start, stop) in zip(self._reader.manifests, pairwise(self._reader.offsets), strict=True):
                is_in_cache = (trained >= start) & (trained < stop)
                losses[cache.fingerprint][trained[is_in_cache] - start] = means[is_in_cache]

    def _losses(self, epoch: int) -> CacheLosses:
        """Return the losses of an epoch, to be changed: those of its file, and NaN for caches without any."""
        if epoch not in self._epochs:
            path = _path(self._history, epoch)
            losses = _read(path) if os.path.exists(path) else {}
            for cache, num_samples in zip(self._reader.manifests, np.diff(self._reader.offsets), strict=True):
                losses.setdefault(cache.fingerprint, np.full(num_samples, np.nan, _DTYPE))
            self._epochs[epoch] = losses
        return self._epochs[epoch]

    def write(self) -> None:
        """Write the losses of all epochs that have changed."""
        for epoch, losses in self._epochs.items():
            _write(_path(self._history, epoch), losses)
        self._epochs.clear()


def _path(history: str, epoch: int) -> str:
    return os.path.join(history, f"losses-{epoch}.npz")


def _epochs(history: str) -> list[int]:
    """Return the epochs whose losses a folder has, in order."""
    names = os.listdir(history) if os.path.isdir(history) else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"losses-(\d+)\.npz", name)))


def _write(path: str, losses: CacheLosses) -> None:
    archive = io.BytesIO()
    np.savez(archive, **losses)  # type: ignore[arg-type]
    storage.publish(path, archive.getvalue())


def _read(path: str) -> CacheLosses:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except DAMAGE_ERRORS as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Remove it: it is not needed to train.") from error
