"""Targets chosen anew: which turns of an encoded sample are trained, without encoding its row again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import family_of, pad_ids_of, thinker_of
from packtool.encode.loss_scale import Base


@dataclass(frozen=True)
class TargetChoice:
    """Which tokens of a sample are targets.

    ``default``: the assistant's turns; ``last_round``: the last one that is left; ``all``: every token that is not a
    medium's. A turn that its row's ``loss: false`` leaves out stays out of the first two. Weights of labels that were
    targets before stay; new ones weigh 1.

    Args:
        base: see above.
        among_targets: only tokens that were targets before stay some. A rule of the loss scale left the others out,
            and which ones cannot be told without the row.
        opening, closing, pads: ids of the tokens before and behind media, and of their placeholder tokens.
    """

    base: Base
    opening: frozenset[int]
    closing: frozenset[int]
    pads: frozenset[int]
    among_targets: bool = False

    @classmethod
    def of_config(cls, base: Base, config: Mapping[str, Any], among_targets: bool = False) -> TargetChoice:
        """Make the choice with the tokens that a ``config.json`` names."""
        inner, family = thinker_of(config), family_of(config)
        opening, closing = (
            frozenset(int(inner[name]) for name in names if inner.get(name) is not None)
            for names in zip(family.image_marks, family.sound_marks, strict=True)
        )
        return cls(base, opening, closing, frozenset(pad_ids_of(config).values()), among_targets)

    def targets(self, sample: EncodedSample) -> npt.NDArray[np.bool_]:
        """Which tokens are targets, bool (L,); the first is none, for nothing comes before it."""
        trained = np.zeros(sample.length, bool)
        if self.base == "all":
            trained[:] = True
        else:
            spans = sample.turns.reshape(-1, 2)
            for start, end in spans[-1:] if self.base == "last_round" else spans:
                trained[start:end] = True
        trained &= ~self._in_media(sample.input_ids)
        if self.among_targets:
            trained &= sample.labels != IGNORE_INDEX
        if sample.num_truncated:
            trained[:1] = False
        return trained

    def __call__(self, sample: EncodedSample) -> EncodedSample:
        """The sample with its labels, and their weights, chosen so."""
        trained = self.targets(sample)
        scale = sample.loss_scale
        if scale is not None:
            scale = np.where(trained, np.where(sample.labels != IGNORE_INDEX, scale, np.float32(1)), np.float32(0))
        labels = np.where(trained, sample.input_ids, np.int32(IGNORE_INDEX))
        return dataclasses.replace(sample, labels=labels, loss_scale=scale)

    def _in_media(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """bool (L,): placeholder tokens, and all between a medium's marks, timestamps of a video too."""
        if not self.pads:
            return np.zeros(len(ids), bool)
        opens, closes = _is_any(ids, self.opening), _is_any(ids, self.closing)
        depth = np.cumsum(opens.astype(np.int32) - np.concatenate(([0], closes[:-1].astype(np.int32))))
        return (depth > 0) | _is_any(ids, self.pads)


def _is_any(ids: npt.NDArray[np.int32], wanted: frozenset[int]) -> npt.NDArray[np.bool_]:
    """bool (L,): which ids are some of a few; ten times as fast as ``np.isin``, which sorts."""
    found = np.zeros(len(ids), bool)
    for each in wanted:
        found |= ids == each
    return found
