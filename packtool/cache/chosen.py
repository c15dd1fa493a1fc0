"""Samples of a cache with their targets chosen anew: training's ``--loss-scale``."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import CacheReader
from packtool.encode.encoded import EncodedSample
from packtool.encode.relabel import TargetChoice


class SampleReader(Protocol):
    """Where samples come from: a ``CacheReader``, or a list in disguise. Must be picklable for worker processes."""

    def sample(self, position: int) -> EncodedSample:
        """The sample at a position of the plan's numbering."""


class ChosenTargets:
    """A reader whose samples have other labels.

    Args:
        reader: of the samples as they were exported.
        choice: which tokens are targets.
    """

    def __init__(self, reader: CacheReader, choice: TargetChoice) -> None:
        self._reader, self._choice = reader, choice

    def sample(self, position: int) -> EncodedSample:
        """See ``SampleReader``."""
        return self._choice(self._reader.sample(position))

    def target_tokens(self) -> npt.NDArray[np.int32]:
        """Labels of each sample that carry loss, (N,). Price: reads every sample, some 50,000 a second."""
        counts = (
            np.count_nonzero(self._choice.targets(self._reader.sample(position))[1:])
            for position in range(len(self._reader))
        )
        return np.fromiter(counts, np.int32, len(self._reader))
