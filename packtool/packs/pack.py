"""A pack as trainers of others take it: tokens, targets, positions and where each sample begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.batch.positions import sample_positions
from packtool.batch.spec import InputSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample, IntArray


@dataclass(frozen=True, eq=False)
class Pack:
    """Samples laid end to end, L tokens in all.

    Args:
        number: of the pack in the plan.
        positions_in_cache: of its S samples, int64 (S,).
        samples: in their order.
        position_ids: (1, L) of a text model, (4, L) [text, t, h, w] of one with M-RoPE; each sample's begin at 0.
            int64, or float32 where an Omni model's seconds are fractions.
    """

    number: int
    positions_in_cache: npt.NDArray[np.int64]
    samples: tuple[EncodedSample, ...]
    position_ids: npt.NDArray[Any]

    @classmethod
    def of(cls, number: int, places: npt.NDArray[np.int64], samples: Sequence[EncodedSample], spec: InputSpec) -> Pack:
        """Lay samples end to end.

        Raises:
            DataError: if an Omni model cannot place a sample's videos.
        """
        if spec.has_mrope:
            rows = np.concatenate([sample_positions(sample, spec) for sample in samples], axis=1)
        else:
            rows = np.concatenate([np.arange(sample.length) for sample in samples])[None]
        return cls(number, places, tuple(samples), rows)

    @property
    def input_ids(self) -> IntArray:
        """int32 (L,)."""
        return np.concatenate([sample.input_ids for sample in self.samples])

    @property
    def labels(self) -> IntArray:
        """int32 (L,): the token itself where it is a target, else -100. Not shifted; nothing predicts a first token."""
        labels = np.concatenate([sample.labels for sample in self.samples])
        labels[self.cu_seqlens[:-1]] = IGNORE_INDEX
        return labels

    @property
    def cu_seqlens(self) -> IntArray:
        """int32 (S + 1,): where each sample begins, and the end."""
        lengths = [sample.length for sample in self.samples]
        return np.cumsum([0, *lengths]).astype(np.int32)

    @property
    def loss_scale(self) -> npt.NDArray[np.float32] | None:
        """float32 (L,), the weight of each label; None if all weigh 1."""
        if all(sample.loss_scale is None for sample in self.samples):
            return None
        ones = (np.ones(sample.length, np.float32) for sample in self.samples)
        scales = zip((sample.loss_scale for sample in self.samples), ones, strict=True)
        return np.concatenate([one if scale is None else scale for scale, one in scales])

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """uint8 (L,): whether what comes behind each token is a target, as Megatron's packed files have it.

        The last position of each sample is 0: nothing behind it is its own.
        """
        trained = self.labels != IGNORE_INDEX
        return np.append(trained[1:], False).astype(np.uint8)

    def media(self) -> Iterator[tuple[str, list[Any]]]:
        """Kind and media of all samples, in the order of their placeholder tokens."""
        for kind in ("images", "videos", "audios"):
            yield kind, [medium for sample in self.samples for medium in getattr(sample, kind)]
