"""Mean loss of each sample at the step that trained it: a file for each epoch in the history of a run.

``OUTPUT_DIR/history/losses-0.npz`` is of the first epoch. It has an array for each cache, by the cache's fingerprint:
float16 (N,), in nats per target token, without loss weights. NaN: not trained in this epoch, or without targets. A
sample that a mixture repeats within an epoch has the loss of the last step that trained it.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
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
            is_trained: dict[str, Any] = {}  # a run may list a cache several times
            for source in (*ledger.sources, *ledger.retired):
                is_trained[source.fingerprint] = is_trained.get(source.fingerprint, False) | (source.epoch.counts() > 0)
            for fingerprint, values in losses.items():
                values[~is_trained.get(fingerprint, np.zeros(len(values), np.bool_))] = np.nan
            _write(path, losses)


class LossRecord:
    """Writer of the losses of a run's samples, on its first rank, into the folder ``history``."""

    def __init__(self, history: str, timeline: Timeline) -> None:
        self._history, self._timeline = history, timeline
        reader = timeline.inputs.for_training.reader
        self._fingerprints = [manifest.fingerprint for manifest in reader.manifests]
        self._offsets = reader.offsets
        self._epochs: dict[int, CacheLosses] = {}  # changed since they were last written

    def add(
        self,
        skipped_steps: Sequence[int],
        steps: npt.NDArray[np.int64],
        samples: npt.NDArray[np.int64],
        sums: npt.NDArray[np.float32],
        num_targets: npt.NDArray[np.float32],
    ) -> None:
        """Add sums that ``SampleLosses.gather`` returned, (M,) each, but for steps that changed no weight."""
        order = np.argsort(steps, kind="stable")
        for in_step in np.split(order, np.flatnonzero(np.diff(steps[order])) + 1):
            if not len(in_step) or steps[in_step[0]] in skipped_steps:
                continue
            trained, index = np.unique(samples[in_step], return_inverse=True)
            with np.errstate(invalid="ignore", over="ignore"):
                means = np.bincount(index, sums[in_step]) / np.bincount(index, num_targets[in_step])
                self._set(int(steps[in_step[0]]), trained, means.astype(_DTYPE))

    def _set(self, step: int, samples: npt.NDArray[np.int64], means: npt.NDArray[Any]) -> None:
        """Set the losses of samples, ascending positions in the caches, that a step has trained."""
        losses = self._losses(self._timeline.stretch(step).epoch)
        bounds = np.searchsorted(samples, self._offsets).tolist()
        for cache, fingerprint in enumerate(self._fingerprints):
            of_cache = slice(bounds[cache], bounds[cache + 1])
            losses[fingerprint][samples[of_cache] - self._offsets[cache]] = means[of_cache]

    def _losses(self, epoch: int) -> CacheLosses:
        """Return the losses of an epoch, to be changed: those of its file, and NaN for caches without any."""
        if epoch not in self._epochs:
            path = _path(self._history, epoch)
            losses = _read(path) if os.path.exists(path) else {}
            for fingerprint, num_samples in zip(self._fingerprints, np.diff(self._offsets).tolist(), strict=True):
                losses.setdefault(fingerprint, np.full(num_samples, np.nan, _DTYPE))
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
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Remove it: it is not needed to train.") from error
