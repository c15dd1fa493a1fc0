"""Tokenized samples and their measured media, shared by cache, batch and train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packtool.rows.sample import Dropped, RowPart

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class EncodedImage:
    """One picture of a sample, measured.

    Args:
        path: of the encoded file, or None when ``data`` holds it.
        data: the encoded file's bytes, or None.
        height: pixels, after the EXIF orientation is applied.
        width: pixels.
        grid: (t, h, w) in vision patches, as the model's ``image_grid_thw``; empty for families without one.
        num_tokens: placeholder tokens that stand for it in ``input_ids``.
    """

    path: str | None
    data: bytes | None
    height: int
    width: int
    grid: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class EncodedAudio:
    """One sound of a sample, or the sound track of a video, measured.

    Args:
        path, data: as for pictures; both None for a sound track, which lies in its video.
        num_samples: of one channel, at the model's sampling rate.
        num_features: mel frames of the model's feature extractor.
        num_tokens: placeholder tokens that stand for it in ``input_ids``.
    """

    path: str | None
    data: bytes | None
    num_samples: int
    num_features: int
    num_tokens: int


@dataclass(frozen=True)
class EncodedVideo:
    """One video of a sample, measured.

    Args:
        path, data: as for pictures; both None when ``frames`` holds it.
        frames: (path, data) of each picture of a video that is given as pictures.
        height, width: pixels of a frame, after rotation.
        num_frames: frames in the file, or in the clip of it.
        fps: frames a second in the file.
        indices: numbers in the file of the frames that the model sees, ascending.
        grid: (t, h, w) in vision patches, as the model's ``video_grid_thw``; empty for families without one.
        seconds_per_grid: seconds between two steps of the grid's t.
        num_tokens: placeholder tokens that stand for its frames in ``input_ids``.
        audio: its sound track, where that is interleaved in (``USE_AUDIO_IN_VIDEO``).
    """

    path: str | None
    data: bytes | None
    frames: tuple[tuple[str | None, bytes | None], ...]
    height: int
    width: int
    num_frames: int
    fps: float
    indices: tuple[int, ...]
    grid: tuple[int, ...]
    seconds_per_grid: float
    num_tokens: int
    audio: EncodedAudio | None = None

    @property
    def frame_grids(self) -> list[tuple[int, ...]]:
        """Its grid as grids of pictures, one for each step in time."""
        return [(1, *self.grid[1:])] * self.grid[0] if self.grid else []


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample of a training step.

    Args:
        input_ids: int32 (L,).
        labels: int32 (L,): the token itself where it is a target, else -100. Not shifted.
        turns: int32 (2 * num_turns,): [start, end) of every assistant turn that may be trained, flat.
        images: in the order of their placeholder tokens.
        channel: the row's ``channel``, if any.
        source: dataset the row came from.
        row: 0-based row there.
        num_truncated: tokens removed by truncation, those of removed media among them.
        videos, audios: in the order of their placeholder tokens.
        loss_scale: float32 (L,), the weight of each label, or None when all labels weigh 1.
        part: of its row, where the row became several samples.
        borders: int32 (B,), ascending: where the turns of such a sample begin and end, trained or not, since other
            samples of the row continue from there.
        is_read_again: the plan's next epoch is expected to have it, too.
        prefix_hashes: hashes of its prefixes by their lengths, of samples of a cache with media in files.
    """

    input_ids: IntArray
    labels: IntArray
    turns: IntArray
    images: tuple[EncodedImage, ...]
    channel: str | None
    source: str
    row: int
    num_truncated: int = 0
    videos: tuple[EncodedVideo, ...] = ()
    audios: tuple[EncodedAudio, ...] = ()
    loss_scale: npt.NDArray[np.float32] | None = None
    part: RowPart | None = None
    borders: IntArray | None = None
    is_read_again: bool = True
    prefix_hashes: Mapping[int, int] | None = None

    @property
    def place(self) -> str:
        """Its source and row, for messages."""
        return f"{self.source}, row {self.row}" + ("" if self.part is None else f", {self.part}")

    @property
    def length(self) -> int:
        """The number L of tokens."""
        return len(self.input_ids)

    @property
    def media(self) -> list[EncodedImage | EncodedVideo | EncodedAudio]:
        """Its images, then its videos, then its audios."""
        return [*self.images, *self.videos, *self.audios]

    @property
    def num_media_tokens(self) -> int:
        """The number of placeholder tokens of all media."""
        if not (self.images or self.videos or self.audios):
            return 0
        num_image_tokens = sum(image.num_tokens for image in self.images)
        return num_image_tokens + sum(video.num_tokens for video in self.videos) + self.num_audio_tokens

    @property
    def num_audio_tokens(self) -> int:
        """The number of placeholder tokens of its sounds and of its videos' sound tracks."""
        if not (self.videos or self.audios):
            return 0
        tracks = [video.audio for video in self.videos if video.audio is not None]
        return sum(sound.num_tokens for sound in (*self.audios, *tracks))

    @property
    def patch_squares(self) -> int:
        """Sum over the frames of its pictures and videos of (patches of the frame)^2; 0 without grids."""
        grids = [image.grid for image in self.images] + [video.grid for video in self.videos]
        return sum(map(patch_squares, grids))


class EncodedRow(list[EncodedSample]):
    """The samples of a row whose turns or responses are samples.

    Attributes:
        left_out: dropped turns or responses, each with its ``part``.
    """

    left_out: tuple[Dropped, ...] = ()


def left_out_of(samples: list[EncodedSample]) -> tuple[Dropped, ...]:
    """Return the dropped turns or responses of the row that became these samples."""
    return samples.left_out if isinstance(samples, EncodedRow) else ()


def files_of(medium: EncodedImage | EncodedVideo | EncodedAudio) -> list[tuple[str | None, bytes | None]]:
    """Return (path, data) of a medium, and of each picture of a video that is given as pictures."""
    return [(medium.path, medium.data), *(medium.frames if isinstance(medium, EncodedVideo) else ())]


def patch_squares(grid: tuple[int, ...]) -> int:
    """Return the attention work of a vision tower, where patches see those of their own frame.

    Args:
        grid: (t, h, w) in patches, or empty.
    """
    if not grid:
        return 0
    frames, height, width = grid
    return frames * (height * width) ** 2
