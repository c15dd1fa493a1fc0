"""Readers over a ``CacheReader``: with other targets, and with the names and loss weights of a mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packtool.cache.reader import CacheReader
from packtool.encode.encoded import EncodedSample
from packtool.encode.targets import TargetChoice

_TELL_TARGETS = ("input_ids", "labels", "turns", "truncated")


class SampleReader(Protocol):
    """Where samples come from: a ``CacheReader``, or a list in disguise. Must be picklable for worker processes."""

    def sample(self, position: int) -> EncodedSample:
        """The sample at a position of the plan's numbering."""


class RelabeledReader:
    """A reader of samples with other labels than exported.

    Args:
        reader: of the samples as they were exported.
        choices: which tokens are targets, for each of its caches; None where they are those of the export.
    """

    def __init__(self, reader: CacheReader, choices: Sequence[TargetChoice | None]) -> None:
        self._reader, self._choices = reader, tuple(choices)

    def sample(self, position: int) -> EncodedSample:
        """See ``SampleReader``."""
        sample, choice = self._reader.sample(position), self._choices[self._reader.cache_of(position)[0]]
        return sample if choice is None else choice(sample)

    def target_tokens(self) -> npt.NDArray[np.int32]:
        """Labels of each sample that carry loss, int32 (N,).

        Price: reads every sample of a cache whose targets differ, some 40,000 of 400 tokens a second.
        """
        found = np.array(self._reader.index.target_tokens, np.int32)
        places = enumerate(zip(self._choices, pairwise(self._reader.offsets.tolist()), strict=True))
        for cache, (choice, (start, stop)) in places:
            if choice is not None:
                found[start:stop] = self._counts(cache, choice)
        return found

    def _counts(self, cache: int, choice: TargetChoice) -> npt.NDArray[np.int32]:
        """The same of the samples of one cache; of its shards only the columns that tell them are read."""
        shards, rows = self._reader.places(cache)
        found = np.zeros(len(rows), np.int32)
        for shard in np.unique(shards):
            here = np.flatnonzero(shards == shard)
            table = self._reader.shard_table(cache, int(shard), _TELL_TARGETS)
            counts = (np.count_nonzero(choice.targets(sample)[1:]) for sample in _bare_samples(table))
            found[here] = np.fromiter(counts, np.int32, len(table))[rows[here]]
        return found


def _bare_samples(table: pa.Table) -> Iterator[EncodedSample]:
    """Samples without their media and origins, in the order of a shard."""
    for batch in table.to_batches():
        ids, labels, turns = (_lists(batch.column(name)) for name in _TELL_TARGETS[:3])
        for each in zip(ids, labels, turns, batch.column("truncated").to_pylist(), strict=True):
            yield EncodedSample(*each[:3], images=(), channel=None, source="", row=0, num_truncated=each[3])


def _lists(column: pa.ListArray) -> Iterator[npt.NDArray[np.int32]]:
    values = column.values.to_numpy(zero_copy_only=True)
    for start, stop in pairwise(column.offsets.to_pylist()):
        yield values[start:stop]


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
