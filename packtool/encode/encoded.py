"""Encoded samples and their measured media: the types that cache, batch and train share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.rows.sample import Dropped, RowPart

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class EncodedImage:
    """A picture of a sample, measured but not decoded.

    Args:
        path: of its file; None if ``data`` has the file's content.
        data: the content of its file; None if ``path`` names the file.
        height, width: pixels, after the EXIF orientation is applied.
        grid: (t, h, w) in vision patches, as the model's ``image_grid_thw``. Other families: (n, h, w) of n equal
            tiles without padding, or (1, h, w) of each tile in turn. Empty in older caches of these.
        num_tokens: number of its placeholder tokens in ``input_ids``.
    """

    path: str | None
    data: bytes | None
    height: int
    width: int
    grid: tuple[int, ...]
    num_tokens: int

    @property
    def is_uncut(self) -> bool:
        """True if it is one tile; LLaVA-OneVision cuts only pictures that are alone in their row."""
        return self.grid[:1] == (1,)


@dataclass(frozen=True)
class EncodedAudio:
    """A sound of a sample, or the sound track of a video, measured but not decoded.

    Args:
        path, data: as for pictures; both None for a sound track, whose file is its video's.
        num_samples: audio samples of one channel at the model's sampling rate.
        num_features: mel frames of the model's feature extractor.
        num_tokens: number of its placeholder tokens in ``input_ids``.
    """

    path: str | None
    data: bytes | None
    num_samples: int
    num_features: int
    num_tokens: int


@dataclass(frozen=True)
class EncodedVideo:
    """A video of a sample, measured but not decoded.

    Args:
        path, data: as for pictures; both None when ``frames`` holds it.
        frames: (path, data) of each picture of a video that is given as pictures.
        height, width: pixels of a frame, after rotation.
        num_frames: frames in the file, or in the clip of it.
        fps: frames a second in the file; 1,000 where the row gives the time of each of its ``frames``.
        indices: numbers in the file of the frames that the model sees, ascending; these times in milliseconds.
        grid: (t, h, w) in vision patches, as the model's ``video_grid_thw``, of each part if it has several. Other
            families: (n, h, w) of n frames, or (1, h, w) of each tile in turn; empty where tokens tell the work.
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
        """Its grid as a list of grids of pictures, one for each time step."""
        return [(1, *self.grid[1:])] * self.grid[0] if self.grid else []


@dataclass(frozen=True, eq=False)
class EncodedSample:
    """A sample of L tokens with labels, ready for training.

    Args:
        input_ids: int32 (L,).
        labels: int32 (L,): the token itself for a target, else -100. Not shifted.
        turns: int32 (2 * num_turns,): [start, end) of every assistant turn that may be trained, flat.
        images, videos, audios: in the order of their placeholder tokens.
        source, row: the dataset, and the row's 0-based index in it.
        num_truncated: tokens removed by truncation, including those of removed media.
        loss_scale: float32 (L,): the weight of each label; None if all labels weigh 1.
        part: the part of its row that this sample is, if the row became several samples.
        borders: int32 (B,), ascending: starts and ends of the turns of such a sample, trained or not. Other samples of
            the row diverge there, so prefixes end there. None for other samples.
        is_read_again: whether the plan's next epoch is expected to read it again.
        prefix_hashes: hash by length of each prefix, for samples of a cache with media in files; else None.
        epoch, number_in_row: of a stream: 0-based epoch, and position among the samples of its row.
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
    epoch: int = 0
    number_in_row: int = 0

    @property
    def place(self) -> str:
        """Source and row, for messages."""
        return f"{self.source}, row {self.row}" + ("" if self.part is None else f", {self.part}")

    @property
    def length(self) -> int:
        """Number L of tokens."""
        return len(self.input_ids)

    @property
    def media(self) -> list[EncodedImage | EncodedVideo | EncodedAudio]:
        """All media: images, then videos, then audios."""
        return [*self.images, *self.videos, *self.audios]

    @property
    def num_media_tokens(self) -> int:
        """Number of placeholder tokens of all media."""
        if not (self.images or self.videos or self.audios):
            return 0
        num_image_tokens = sum(image.num_tokens for image in self.images)
        return num_image_tokens + sum(video.num_tokens for video in self.videos) + self.num_audio_tokens

    @property
    def num_audio_tokens(self) -> int:
        """Number of placeholder tokens of sounds and of videos' sound tracks."""
        if not (self.videos or self.audios):
            return 0
        tracks = [video.audio for video in self.videos if video.audio is not None]
        return sum(sound.num_tokens for sound in (*self.audios, *tracks))

    @property
    def patch_squares(self) -> int:
        """Attention work of its media in the vision tower: sum over all frames of (patches of the frame)^2."""
        grids = [image.grid for image in self.images] + [video.grid for video in self.videos]
        return sum(map(patch_squares, grids))

    @property
    def num_patches(self) -> int:
        """Patches of its media in the vision tower, also those of padding and those without tokens; 0 without grids."""
        grids = [image.grid for image in self.images] + [video.grid for video in self.videos]
        return sum(t * h * w for grid in grids for t, h, w in zip(grid[::3], grid[1::3], grid[2::3], strict=True))


class EncodedRow(list[EncodedSample]):
    """The samples of a row that was split; ``left_out``: reasons why others are dropped, each with its ``part``."""

    left_out: tuple[Dropped, ...] = ()


def left_out_of(samples: list[EncodedSample]) -> tuple[Dropped, ...]:
    """Return why other samples of the same row are dropped; empty unless the samples are an ``EncodedRow``."""
    return samples.left_out if isinstance(samples, EncodedRow) else ()


def media_fields(media: Sequence[EncodedImage | EncodedVideo | EncodedAudio]) -> dict[str, Any]:
    """Return media, in order, as the fields ``images``, ``videos`` and ``audios`` of a sample."""
    if not media:  # the usual case
        return {"images": (), "videos": (), "audios": ()}
    types = {"images": EncodedImage, "videos": EncodedVideo, "audios": EncodedAudio}
    return {name: tuple([medium for medium in media if isinstance(medium, cls)]) for name, cls in types.items()}


def files_of(medium: EncodedImage | EncodedVideo | EncodedAudio) -> list[tuple[str | None, bytes | None]]:
    """Return (path, data) of a medium, and of each frame of a video that is given as pictures."""
    return [(medium.path, medium.data), *(medium.frames if isinstance(medium, EncodedVideo) else ())]


def patch_squares(grid: tuple[int, ...]) -> int:
    """Return the attention work of one medium in a vision tower: the sum over its frames of (patches of the frame)^2.

    Patches attend to those of their own frame, or tile of a picture; the result is 0 without a grid.
    """
    sizes = zip(grid[::3], grid[1::3], grid[2::3], strict=True)
    return sum(frames * (height * width) ** 2 for frames, height, width in sizes)
