"""Models with pictures that are not Qwen's, through their own transformers processor.

Other families count tokens by themselves; here the processor is asked what it would write for a picture of
some size, with a blank one, and the answer is remembered by size. That costs what processing costs, once for every size
that comes up, and needs torch in the worker. The chat template writes its own token for a picture, and what the
processor makes of that token takes its place, text and all (Gemma 3 puts blank lines around a picture).

What a processor of transformers writes for media, as text and as the parts that encoding knows.

Videos of models that take a video's frames as pictures: their own processor tells which frames, and what it writes.

Which frames are taken the video processor decides by its settings (``do_sample_frames``, ``fps``, ``num_frames``) from
the number of frames and their rate. What it writes for them, timestamps and all, follows from their size and number, so
it is asked with frames that have a size and no pixels (torch's meta device): nothing is decoded but the first frame.

The limits of one medium: the export's, but for what its row says of it, in the words of Qwen's tools.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from packtool.config.data import MediaOptions
from packtool.encode.encoded import EncodedImage, EncodedVideo
from packtool.encode.families.record import ImageLimits, MediaKind, MediaLimits, Medium, Part, VideoLimits, pad_ids_of
from packtool.encode.model_files import ModelFiles
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.errors import ConfigError
from packtool.media.opening import MediaProblem, label
from packtool.rows.sample import MediaRef


def replacements_in(processor: Any, made: Mapping[str, Any], counts: Sequence[int], what: str) -> list[list[str]]:
    """What a processor wrote for each medium of each row.

    Args:
        made: all that it made.
        counts: media of each row.
        what: they are, for messages.

    Raises:
        ConfigError: if it does not say.
    """
    found = made.get("text_replacement_offsets")
    if not found or [len(row) for row in found] != list(counts):
        raise ConfigError(
            f"{type(processor).__name__} does not say what it writes for a {what}",
            "Use a newer transformers, or a model of another family.",
        )
    return [[str(replaced["replacement"]) for replaced in row] for row in found]


def special_tokens(processor: Any, others: Sequence[str] = ()) -> re.Pattern[str]:
    """Finds a processor's control tokens in what it writes.

    Args:
        others: that are control tokens too, whether or not its tokenizer says so.
    """
    tokens = {token.content for token in processor.tokenizer.added_tokens_decoder.values() if token.special}
    named = [processor.image_token, getattr(processor.tokenizer, "image_token", None), *others]
    tokens |= {str(token) for token in named if token}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def split_spelling(spelled: str, special: re.Pattern[str]) -> list[Part]:
    """Text and control tokens, repeated ones counted."""
    parts: list[Part] = []
    at = 0
    for match in special.finditer(spelled):
        if match.start() > at:
            parts.append(spelled[at : match.start()])
        last = parts[-1] if parts else ""
        if isinstance(last, tuple) and last[0] == match.group():
            parts[-1] = (last[0], last[1] + 1)
        else:
            parts.append((match.group(), 1))
        at = match.end()
    return [*parts, spelled[at:]] if at < len(spelled) else parts


def of_image(limits: ImageLimits, ref: MediaRef) -> ImageLimits:
    """The limits of a picture.

    Raises:
        ValueError: if its row's contradict each other.
    """
    own = dict(ref.limits)
    return replace(limits, **_bounds(own, "pixels", limits.min_pixels, limits.max_pixels)) if own else limits


def refuse_own_limits(ref: MediaRef) -> None:
    """Raise if a row has limits of its own for a medium whose size the model's processor decides.

    Raises:
        MediaProblem: naming the limit.
    """
    if ref.limits:
        told = f"its row has {ref.limits[0][0]}, and this model's processor decides sizes by itself"
        raise MediaProblem("media_unsupported", f"{label(ref)}: {told}")


def of_video(limits: VideoLimits, ref: MediaRef) -> VideoLimits:
    """The limits of a video; pixels are those of a frame, but for ``total_pixels``.

    Raises:
        ValueError: if its row's contradict each other.
    """
    own = dict(ref.limits)
    if not own:
        return limits
    found: dict[str, Any] = _bounds(own, "frames", limits.min_frames, limits.max_frames)
    total = int(own["total_pixels"]) if "total_pixels" in own else None
    if limits.over_all_frames:
        given = {f"frame_{name}": int(own[name]) for name in ("min_pixels", "max_pixels") if name in own}
        found |= {**given, **({"max_pixels": total, "min_pixels": min(limits.min_pixels, total)} if total else {})}
    else:
        found |= _bounds(own, "pixels", limits.min_pixels, limits.max_pixels)
        found |= {"total_pixels": total} if total else {}
    return replace(limits, fps=float(own.get("fps", limits.fps)), **found)


def _bounds(own: dict[str, float], what: str, least: int, most: int) -> dict[str, int]:
    """Both bounds, of which one that the row does not give makes room for the other."""
    low, high = own.get(f"min_{what}"), own.get(f"max_{what}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"its row wants at least {low:g} and at most {high:g} {what}")
    return {
        f"min_{what}": int(low if low is not None else min(least, high or least)),
        f"max_{what}": int(high if high is not None else max(most, low or most)),
    }


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


_PROBE = "packtoolquestion"
_PROBE_SIZE = (64, 96)
_NUM_PROBES = 12
"""Pictures of a row by which it is found whether each tells its number: some of two digits."""


class ProcessorFamily:
    """A family that packtool does not know by itself.

    Args:
        files: the model's settings; its directory must hold a processor.
        options: the user's limits; all must be unset, for this processor takes none of them.
        no_videos: why rows with videos are left out; "" if its model takes a video's frames as pictures.

    Raises:
        ConfigError: if the processor cannot be loaded or does not take pictures, or a limit is set.
    """

    limits = MediaLimits()

    def __init__(self, files: ModelFiles, options: MediaOptions, *, no_videos: str) -> None:
        refuse_options(files, options)
        self._processor = load_processor(files.directory)
        self._image_token = str(self._processor.image_token)
        self._special = special_tokens(self._processor)
        pad = pad_ids_of(files.config).get("image")
        # Where config.json names none: the most frequent control token, which stands for the picture's pieces.
        self._pad = None if pad is None else str(self._processor.tokenizer.convert_ids_to_tokens(pad))
        self._parts: dict[tuple[int, int], list[Part]] = {}
        first = self._parts_of(*_PROBE_SIZE)
        self._spelled = tuple(part[0] for part in first if not isinstance(part, str))
        self._tells_number, self.alone_only = self._spells_rows()
        self.content_as_list = _takes_lists(files)
        self.placeholders: dict[str, MediaKind] = {self._image_token: "image"} if self.content_as_list else {}
        self._videos: AskedVideos | None = None
        self._no_videos = no_videos or "the processor takes no videos, or the tokenizer has no token for them"
        self._video_tokens: tuple[str, ...] = ()
        if not no_videos and self._pad is not None and has_videos(self._processor):
            self._videos = AskedVideos(self._processor, self._pad)
            self._video_tokens = (str(self._processor.video_token),)
            self.placeholders |= {token: "video" for token in self._video_tokens if self.content_as_list}
        self.remarks = (
            f"{files.model_type} models are encoded through transformers' own processor, which is slower than from "
            "headers: it resizes a blank picture for each size that comes up",
            *(self._videos.remarks if self._videos is not None else ()),
        )

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """See ``MediaEncoding``."""
        return tuple(dict.fromkeys((self._image_token, *self._spelled, *self._video_tokens)))

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        """See ``MediaEncoding``."""
        if kind == "video" and self._videos is not None:
            return self._videos.measure(ref)
        if kind != "image":
            told = self._no_videos if kind == "video" else "the model hears nothing"
            raise MediaProblem("media_unsupported", f"{label(ref)}: {told}")
        refuse_own_limits(ref)
        from packtool.media.measure import measure_image  # here, because families without it need no PIL

        height, width = measure_image(ref)
        try:
            parts = self._parts_of(height, width)
        except (ValueError, IndexError, ZeroDivisionError, MemoryError) as error:  # Pillow's, for wide pictures
            detail = f"{label(ref)}: the processor refuses {width}x{height}: {str(error) or type(error).__name__}"
            raise MediaProblem("media_size", detail) from error
        return EncodedImage(ref.path, ref.data, height, width, (), _num_pads(parts, self._pad))

    def parts(self, medium: Medium, number: int = 0) -> list[Part]:
        """See ``MediaEncoding``."""
        if isinstance(medium, EncodedVideo):
            assert self._videos is not None, "it was measured"
            return self._videos.parts(medium)
        assert isinstance(medium, EncodedImage), "nothing else is measured"
        parts = self._parts_of(medium.height, medium.width)
        return _numbered(parts, number) if self._tells_number else parts

    def _parts_of(self, height: int, width: int) -> list[Part]:
        if (height, width) not in self._parts:
            (self._parts[height, width],) = self._asked([(height, width)])
        return self._parts[height, width]

    def _spells_rows(self) -> tuple[bool, bool]:
        """Whether each picture tells its number in its row, and whether a row must have a single one.

        The latter where several of them are spelled in another way than each alone.
        """
        alone = self._parts_of(*_PROBE_SIZE)
        if self._asked([_PROBE_SIZE] * 2) == [alone] * 2:
            return False, False
        numbered = [_numbered(alone, number) for number in range(_NUM_PROBES)]
        tells_number = self._asked([_PROBE_SIZE] * _NUM_PROBES) == numbered
        return tells_number, not tells_number

    def _asked(self, sizes: list[tuple[int, int]]) -> list[list[Part]]:
        """What the processor writes for pictures of these sizes, (height, width) each, in one row."""
        from packtool.media.measure import blank_image  # here, because families without it need no PIL

        blank = [blank_image(height, width) for height, width in sizes]
        return [split_spelling(spelled, self._special) for spelled in processed(self._processor, [blank])[0][0]]


def refuse_options(files: ModelFiles, options: MediaOptions) -> None:
    """Raise if a limit on Qwen's media is set for another family.

    Raises:
        ConfigError: naming each.
    """
    problems = []
    for field in dataclasses.fields(MediaOptions):
        if field.name != "resize" and getattr(options, field.name) is not None:
            kind = "pictures" if field.metadata["panel"] == "Pictures" else "videos and sounds"
            name = "--" + field.name.replace("_", "-")
            problems.append(
                f"{name} ({field.metadata['env']}) limits {kind} of Qwen models; a {files.model_type} model takes its "
                "limits from its own processor settings"
            )
    if problems:
        raise ConfigError.from_problems(problems)


def load_processor(directory: str) -> Any:
    """transformers' processor of a model.

    Raises:
        ConfigError: if it cannot be loaded, or does not take pictures.
    """
    import transformers

    auto: Any = transformers.AutoProcessor
    try:
        processor = auto.from_pretrained(directory)
    except Exception as error:  # whatever a processor of any model raises
        raise ConfigError(
            f"{directory}: no processor of the model can be loaded: {error}",
            "Put the model's processor settings beside config.json, or update transformers.",
        ) from error
    if getattr(processor, "image_token", None) is None or getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"{type(processor).__name__} takes no pictures that packtool could count",
            "Models are encoded so whose processor has an image_token.",
        )
    return processor


def processed(processor: Any, rows: Sequence[Sequence[Any]]) -> tuple[list[list[str]], Mapping[str, Any]]:
    """What a processor makes of the pictures of some rows.

    Args:
        rows: pictures of each, at least one.

    Returns:
        what it writes for each picture of each row, and all that it makes; of pictures as tensors of torch.

    Raises:
        ConfigError: if it does not say what it writes.
    """
    made: Mapping[str, Any] = processor(
        text=[" ".join([processor.image_token] * len(pictures)) for pictures in rows],
        images=[list(pictures) for pictures in rows],
        return_text_replacement_offsets=True,
        images_kwargs={"return_tensors": "pt"},
        text_kwargs={"return_tensors": None},  # rows differ in length, and not every tokenizer can pad
    )
    return replacements_in(processor, made, [len(pictures) for pictures in rows], "picture"), made


def _numbered(parts: list[Part], number: int) -> list[Part]:
    """What stands for the picture of a number in its row, from what stands for the first: MiniCPM-V tells it."""
    at = next((i for i, part in enumerate(parts) if isinstance(part, str) and "0" in part), None)
    return parts if at is None else [*parts[:at], str(parts[at]).replace("0", str(number), 1), *parts[at + 1 :]]


def _num_pads(parts: list[Part], pad: str | None) -> int:
    """How often the token comes that stands for the picture's pieces: ``pad``, or the most frequent control token."""
    counts: dict[str, int] = {}
    for part in parts:
        if not isinstance(part, str):
            counts[part[0]] = counts.get(part[0], 0) + part[1]
    return max(counts.values(), default=0) if pad is None else counts.get(pad, 0)


def _takes_lists(files: ModelFiles) -> bool:
    """Whether the chat template understands contents that are lists of texts and media."""
    template = ChatTemplate(files.chat_template, files.template_variables)
    content = [{"type": "image"}, {"type": "text", "text": _PROBE}]
    try:
        rendered = template.render([{"role": "user", "content": content}])
    except TemplateFailure:
        return False
    return _PROBE in rendered and "'text'" not in rendered
