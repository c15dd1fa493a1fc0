"""Reading samples and figures of a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import CacheReader
from packtool.encode.encoded import EncodedSample
from packtool.report.drawing import render
from packtool.report.inspect import cache_figures, figure_lines, marked_text, sample_view


class Cache:
    """Samples of a cache that ``export`` wrote, by number.

        cache = packtool.Cache("cache")
        len(cache), cache.lengths.max(), cache[7].input_ids, print(cache.text(7))

    Args:
        path: its directory, local or in a bucket.
        split: ``train`` or ``val``.

    Raises:
        MismatchError: if it is unfinished, damaged, or has no such split.
        StorageError: if it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train") -> None:
        self.path, self.split = os.fspath(path), split
        self._reader = CacheReader.open([self.path], split)

    def __len__(self) -> int:
        """Return the number of samples in the split."""
        return len(self._reader)

    def __getitem__(self, number: int) -> EncodedSample:
        """Return a sample: ``input_ids``, ``labels`` (-100 without a target), media, ``source`` and ``row``.

        Its arrays are views of the memory-mapped file and must not be modified.

        Raises:
            IndexError: if there is no such sample.
        """
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self._reader.sample(number % len(self))

    def __iter__(self) -> Iterator[EncodedSample]:
        """Yield all samples in order."""
        return (self._reader.sample(number) for number in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Number of tokens of each sample, int32 (N,)."""
        return self._reader.index.length

    @property
    def target_tokens(self) -> npt.NDArray[np.int32]:
        """Number of tokens of each sample that carry loss, int32 (N,)."""
        return self._reader.index.target_tokens

    @property
    def media_tokens(self) -> npt.NDArray[np.int32]:
        """Number of placeholder tokens of each sample's media, int32 (N,)."""
        return self._reader.index.media_tokens

    @property
    def fingerprint(self) -> str:
        """Hash of the cache's content, which plans and checkpoints store."""
        return self._reader.fingerprint

    @property
    def statistics(self) -> dict[str, Any]:
        """Figures of ``packtool inspect CACHE --json``: settings, sources, drops by reason, figures of each split."""
        return self._figures.copy()

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return cache_figures(self._reader.directories[0])

    def text(self, number: int, model: str | None = None) -> str:
        """Return a sample as readable text: media in brackets, trained text between « and ».

        Args:
            model: directory of the tokenizer; by default that of the export.

        Raises:
            ConfigError: if the sample or the model does not exist.
        """
        _, parts = sample_view(self.path, self.split, number, model)
        return marked_text(parts)

    def __fspath__(self) -> str:
        """Return the directory, so that functions that take a path also take a Cache."""
        return self.path

    def __repr__(self) -> str:
        return f"Cache({self.path!r}, {self.split!r}): {len(self):,} samples, {int(self.lengths.sum()):,} tokens"

    def _repr_html_(self) -> str:
        return render("figures.html", title=self.path, lines=figure_lines(self._figures))
