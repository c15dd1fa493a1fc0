"""Videos of models that take a video's frames as pictures: their own processor tells which frames, and what it writes.

Which frames are taken the video processor decides by its settings (``do_sample_frames``, ``fps``, ``num_frames``) from
the number of frames and their rate. What it writes for them, timestamps and all, follows from their size and number, so
it is asked with frames that have a size and no pixels (torch's meta device): nothing is decoded but the first frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from packtool.encode.encoded import EncodedVideo
from packtool.encode.families.base import Part
from packtool.encode.families.own_limits import refuse_own_limits
from packtool.encode.families.spelling import replacements_in, special_tokens, split_spelling
from packtool.media.opening import MediaProblem, label
from packtool.rows.sample import MediaRef

SLOWER = "transformers' own processor is loaded in each worker and says for each video what stands for its frames"
"""What it costs, for the log."""

_REMEMBERED = 16  # a video is measured, and spelled soon after
_Video = tuple[int, int, int, float, tuple[int, ...]]
"""Height, width, number of frames in the file, their rate, and those that are taken."""


class AskedVideos:
    """What a model's own processor makes of videos.

    Args:
        processor: that takes videos (``has_videos``).
        pad: the token that stands for a piece of a picture, and of a frame.
        marks: tokens that mark media, too, whether or not the tokenizer says that they are control tokens.
    """

    def __init__(self, processor: Any, pad: str, marks: Sequence[str] = ()) -> None:
        self._processor, self._pad = processor, pad
        self._special = special_tokens(processor, marks)
        self._spelled = lru_cache(maxsize=_REMEMBERED)(self._ask)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know."""
        if self._processor.video_processor.do_sample_frames:
            return ()
        told = "do_sample_frames with num_frames or fps there takes fewer"
        return (f"all frames of a video are taken, by the settings of the model's video processor: {told}",)

    def measure(self, ref: MediaRef) -> EncodedVideo:
        """Look at a video's header, and choose its frames.

        Raises:
            MediaProblem: if it cannot be used.
        """
        from packtool.media.video import measure_video  # here, because most rows need none of PyAV

        refuse_own_limits(ref)
        if ref.clip is not None:
            raise MediaProblem("media_unsupported", f"{label(ref)}: this model's processor knows no clips of videos")
        size = measure_video(ref)
        try:
            # Pictures that a row gives as a video are all frames, for transformers samples none of such.
            indices = tuple(range(size.num_frames)) if ref.frames else self._taken(size.num_frames, size.fps)
            video = size.height, size.width, size.num_frames, size.fps, indices
            parts, grid = self._spelled(video)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise MediaProblem("media_size", f"{label(ref)}: the processor refuses it: {error}") from error
        return EncodedVideo(
            path=ref.path,
            data=ref.data,
            frames=tuple((frame.path, frame.data) for frame in ref.frames),
            height=size.height,
            width=size.width,
            num_frames=size.num_frames,
            fps=size.fps,
            indices=indices,
            grid=grid,
            seconds_per_grid=size.num_frames / size.fps / (grid[0] if grid else len(indices)),
            num_tokens=sum(part[1] for part in parts if not isinstance(part, str) and part[0] == self._pad),
        )

    def parts(self, video: EncodedVideo) -> list[Part]:
        """What the processor writes for a video."""
        return self._spelled((video.height, video.width, video.num_frames, video.fps, video.indices))[0]

    def _taken(self, num_frames: int, fps: float) -> tuple[int, ...]:
        videos = self._processor.video_processor
        if not videos.do_sample_frames:
            return tuple(range(num_frames))
        settings = {name: getattr(videos, name, None) for name in videos.valid_kwargs.__annotations__}
        found = videos.sample_frames(metadata=_metadata(num_frames, fps, None), **settings)
        return tuple(int(index) for index in found)

    def _ask(self, video: _Video) -> tuple[list[Part], tuple[int, ...]]:
        """What it writes for a video, and its grid in patches, if it has one."""
        import torch

        height, width, num_frames, fps, indices = video
        frames = torch.empty(len(indices), 3, height, width, dtype=torch.uint8, device="meta")
        spelled, made = video_processed(self._processor, frames, num_frames, fps, indices)
        grids = made.get("video_grid_thw")
        return split_spelling(spelled, self._special), () if grids is None else tuple(grids[0].tolist())


def has_videos(processor: Any) -> bool:
    """Whether a processor takes videos, and its tokenizer knows the token that stands for one."""
    token = getattr(processor, "video_token", None)
    known = processor.tokenizer.added_tokens_decoder.values()
    return getattr(processor, "video_processor", None) is not None and token in {each.content for each in known}


def video_processed(
    processor: Any, frames: Any, num_frames: int, fps: float, indices: Sequence[int]
) -> tuple[str, Mapping[str, Any]]:
    """What a processor makes of the frames that are taken of a video.

    Args:
        frames: uint8 (T, 3, H, W), on torch's meta device where only their size matters.
        num_frames, fps: of the whole video.
        indices: the numbers there of the T frames.

    Returns:
        what it writes for the video, and all that it makes.

    Raises:
        ConfigError: if it does not say what it writes.
    """
    metadata = _metadata(num_frames, fps, list(indices), *frames.shape[2:])
    made: Mapping[str, Any] = processor(
        text=[processor.video_token],
        videos=[frames],
        return_text_replacement_offsets=True,
        videos_kwargs={"return_tensors": "pt", "do_sample_frames": False, "video_metadata": [metadata]},
        text_kwargs={"return_tensors": None},
    )
    ((spelled,),) = replacements_in(processor, made, [1], "video")
    return spelled, made


def _metadata(num_frames: int, fps: float, indices: list[int] | None, height: int = 0, width: int = 0) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=num_frames,
        fps=fps,
        width=width or None,
        height=height or None,
        duration=num_frames / fps,
        frames_indices=indices,
    )
