"""Samples of several sources, with what a mixture says of each source: the weight of its losses, and its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packtool.cache.chosen import SampleReader
from packtool.encode.encoded import EncodedSample


class MixedSamples:
    """A reader whose samples know their source by its name, in place of their channel.

    Args:
        reader: of the samples as they were exported, or with other targets.
        offsets: int64 (S + 1,), where each source's samples begin.
        names: of the sources.
        loss_weights: that each source's losses are multiplied by.
        keeps_channels: samples that have a channel keep it.
    """

    def __init__(
        self,
        reader: SampleReader,
        offsets: npt.NDArray[np.int64],
        names: Sequence[str],
        loss_weights: Sequence[float],
        *,
        keeps_channels: bool,
    ) -> None:
        self._reader, self._offsets, self._names = reader, offsets, tuple(names)
        self._loss_weights, self._keeps_channels = tuple(loss_weights), keeps_channels

    def sample(self, position: int) -> EncodedSample:
        """See ``SampleReader``."""
        source = int(np.searchsorted(self._offsets, position, side="right")) - 1
        sample, weight = self._reader.sample(position), self._loss_weights[source]
        channel = sample.channel if self._keeps_channels and sample.channel is not None else self._names[source]
        scale = sample.loss_scale
        if weight != 1:
            scale = np.full(sample.length, weight, np.float32) if scale is None else scale * np.float32(weight)
        return dataclasses.replace(sample, channel=channel, loss_scale=scale)
