"""What a sample is once it is tokens: the noun that cache, batch and train share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class EncodedImage:
    """One picture of a sample, measured.

    Args:
        path: where the encoded file lies, or None when ``data`` holds it.
        data: the encoded file's bytes, or None.
        height: pixels, after the EXIF orientation is applied.
        width: pixels.
        grid: (t, h, w) in vision patches, as the model's ``image_grid_thw``.
        num_tokens: pads that stand for it in ``input_ids``.
    """

    path: str | None
    data: bytes | None
    height: int
    width: int
    grid: tuple[int, int, int]
    num_tokens: int


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample as a training step sees it.

    Args:
        input_ids: int32 (L,).
        labels: int32 (L,): the token itself where it is a target, else -100. Not shifted.
        turns: int32 (2 * num_turns,): [start, end) of every assistant turn's targets, flat.
        images: in the order of their pads.
        channel: the row's ``channel``, if any.
        source: dataset the row came from.
        row: 0-based row there.
        num_truncated: tokens that truncation removed.
    """

    input_ids: IntArray
    labels: IntArray
    turns: IntArray
    images: tuple[EncodedImage, ...]
    channel: str | None
    source: str
    row: int
    num_truncated: int = 0

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.input_ids)

    @property
    def num_media_tokens(self) -> int:
        """Pads of all media."""
        return sum(image.num_tokens for image in self.images)
