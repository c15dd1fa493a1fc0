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

_TARGET_COLUMNS = ("input_ids", "labels", "turns", "truncated")


class SampleReader(Protocol):
    """A source of samples, such as a ``CacheReader``; it must be picklable for worker processes."""

    def sample(self, position: int) -> EncodedSample:
        """Return the sample at a position of the plan's numbering."""


class RelabeledReader:
    """A reader of samples with other labels than exported.

    Args:
        reader: of the samples as they were exported.
        choices: target tokens for each of its caches; None for those of the export.
    """

    def __init__(self, reader: CacheReader, choices: Sequence[TargetChoice | None]) -> None:
        self._reader, self._choices = reader, tuple(choices)

    def sample(self, position: int) -> EncodedSample:
        """See ``SampleReader``."""
        sample, choice = self._reader.sample(position), self._choices[self._reader.cache_of(position)[0]]
        return sample if choice is None else choice(sample)

    def target_tokens(self) -> npt.NDArray[np.int32]:
        """Count the labels of each sample that carry loss, int32 (N,).

        Reads every sample of a cache whose targets differ, about 40,000 samples of 400 tokens a second.
        """
        counts = np.array(self._reader.index.target_tokens, np.int32)
        ranges = enumerate(zip(self._choices, pairwise(self._reader.offsets.tolist()), strict=True))
        for cache, (choice, (start, stop)) in ranges:
            if choice is not None:
                counts[start:stop] = self._counts(cache, choice)
        return counts

    def _counts(self, cache: int, choice: TargetChoice) -> npt.NDArray[np.int32]:
        """Count the targets of each sample of one cache, reading only the columns that they depend on."""
        shards, rows = self._reader.places(cache)
        counts = np.zeros(len(rows), np.int32)
        for shard in np.unique(shards):
            here = np.flatnonzero(shards == shard)
            table = self._reader.shard_table(cache, int(shard), _TARGET_COLUMNS)
            in_shard = (np.count_nonzero(choice.targets(sample)[1:]) for sample in _bare_samples(table))
            counts[here] = np.fromiter(in_shard, np.int32, len(table))[rows[here]]
        return counts


def _bare_samples(table: pa.Table) -> Iterator[EncodedSample]:
    """Yield the samples of a shard without their media and origins."""
    for batch in table.to_batches():
        ids, labels, turns = (_lists(batch.column(name)) for name in _TARGET_COLUMNS[:3])
        for each in zip(ids, labels, turns, batch.column("truncated").to_pylist(), strict=True):
            yield EncodedSample(*each[:3], images=(), channel=None, source="", row=0, num_truncated=each[3])


def _lists(column: pa.ListArray) -> Iterator[npt.NDArray[np.int32]]:
    values = column.values.to_numpy(zero_copy_only=True)
    for start, stop in pairwise(column.offsets.to_pylist()):
        yield values[start:stop]


class MixedSamples:
    """A reader of samples with the name of their source as channel, and with loss weights.

    Args:
        reader: of the samples as they were exported, or with other targets.
        offsets: int64 (S + 1,), position of the first sample of each source.
        names: of the sources.
        loss_weights: factor of each source's losses.
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
