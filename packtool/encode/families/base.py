"""What encoding asks of a family of models: limits on media, and what stands for a medium in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.rows.sample import MediaRef


@dataclass(frozen=True)
class ImageLimits:
    """Everything that turns a picture's height and width into patches.

    Args:
        min_pixels, max_pixels: bounds on height x width after resizing.
        patch_size: pixels along one side of a patch.
        merge_size: patches along one side of a token.
        temporal_patch_size: frames of a patch; a picture is repeated to fill it.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def pixels_per_token(self) -> int:
        """Pixels that one token stands for."""
        return (self.patch_size * self.merge_size) ** 2


@dataclass(frozen=True)
class VideoLimits:
    """Everything that turns a video's frames into patches.

    Args:
        fps: frames a second to take.
        min_frames, max_frames: bounds on the frames that are taken.
        min_pixels, max_pixels: bounds on the pixels after resizing: of each frame, or of all frames together.
        over_all_frames: which of the two.
        frame_min_pixels, frame_max_pixels: the user's bounds for one frame where the others are for all.
        total_pixels: the user's bound on the pixels of all frames where the others are for one.
        even_ends: frames are spread from the first to the last one (Qwen3-VL), not at equal steps from the first.
        patch_size, merge_size, temporal_patch_size: as for pictures.
    """

    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    over_all_frames: bool
    frame_min_pixels: int | None
    frame_max_pixels: int | None
    total_pixels: int | None
    even_ends: bool
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    def bounds(self, num_frames: int) -> tuple[int, int]:
        """(least, most) pixels that the processor is given for a video of which ``num_frames`` are taken."""
        if self.over_all_frames:
            most = self.max_pixels
            if self.frame_max_pixels is not None:
                most = min(most, self.frame_max_pixels * num_frames)
            return min(max(self.min_pixels, (self.frame_min_pixels or 0) * num_frames), most), most
        if self.total_pixels is None:
            return self.min_pixels, self.max_pixels
        # An even share of the whole, but a little more than the least, as qwen-vl-utils has it.
        share = self.total_pixels * self.temporal_patch_size // num_frames
        return self.min_pixels, max(min(self.max_pixels, share), int(self.min_pixels * 1.05))


@dataclass(frozen=True)
class AudioLimits:
    """Everything that turns sound into tokens.

    Args:
        sampling_rate: samples a second that the model's feature extractor wants.
        hop_length: samples from one mel frame to the next.
        max_features: most mel frames of one sound, what comes later is cut off; None for no bound.
        in_video: whether a video's sound track is woven in between its frames.
        tokens_per_second: positions in time of a second of sound, by which frames and sound are woven.
        seconds_per_chunk: of video and sound that follow each other, where they are woven in chunks.
    """

    sampling_rate: int
    hop_length: int
    max_features: int | None
    in_video: bool
    tokens_per_second: float
    seconds_per_chunk: float


@dataclass(frozen=True)
class MediaLimits:
    """Limits of each kind of medium, None for kinds that the model does not take."""

    image: ImageLimits | None = None
    video: VideoLimits | None = None
    audio: AudioLimits | None = None

    @property
    def without_bounds(self) -> dict[str, Any]:
        """What bounds no size and no number of frames, by name: caches that differ in it cannot be trained together."""
        kinds = asdict(self).items()
        return {
            f"{kind} {name}": value
            for kind, limits in kinds
            for name, value in (limits or {}).items()
            if name not in _BOUNDS
        }


_BOUNDS = {"fps", "min_frames", "max_frames", "min_pixels", "max_pixels"}
_BOUNDS |= {"frame_min_pixels", "frame_max_pixels", "total_pixels"}
MediaKind = Literal["image", "video", "audio"]
Medium = EncodedImage | EncodedVideo | EncodedAudio
Part = str | tuple[str, int]
"""A piece of what stands for a medium in tokens: plain text, or a control token and how often it comes."""


class MediaEncoding(Protocol):
    """How a model that sees or hears has its media in tokens, with the limits of one export.

    Attributes:
        limits: resolved from processor settings, environment and options.
        control_tokens: tokens that mark media.
        content_as_list: how its chat template wants media. False: ``parts`` are put where the row's text has a mark,
            and must bring opening and closing marks with them. True: contents are lists of texts and media, the
            template writes ``placeholders``, and ``parts`` replace these.
        placeholders: the control token that the template writes for each kind; empty unless ``content_as_list``.
        remarks: what a user should know, a line each.
        alone_only: a row may have one picture only.
    """

    @property
    def alone_only(self) -> bool: ...

    @property
    def remarks(self) -> tuple[str, ...]: ...

    @property
    def limits(self) -> MediaLimits: ...

    @property
    def control_tokens(self) -> tuple[str, ...]: ...

    @property
    def content_as_list(self) -> bool: ...

    @property
    def placeholders(self) -> Mapping[str, MediaKind]: ...

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        """Look at a medium, at its header where that is enough.

        Raises:
            MediaProblem: if it cannot be used.
        """

    def parts(self, medium: Medium, number: int = 0) -> list[Part]:
        """What stands for a medium in tokens, from its first mark to its last.

        Args:
            number: of the medium among those of its kind in the row.
        """
