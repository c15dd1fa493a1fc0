"""Media of models whose tokens are determined by running their own transformers processor.

It processes a blank picture for each new size, and the tokens are cached by size. This costs as much as processing
pictures, and needs torch in the worker. Where videos are sequences of pictures, it gets frames without pixels (torch's
meta device), since its text depends only on their size and number; only the first frame is decoded.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

from packtool.config.data import MediaOptions
from packtool.encode.encoded import EncodedImage, EncodedVideo
from packtool.encode.families.qwen_vl import clip_frames
from packtool.encode.families.record import (
    Family,
    MediaEncoding,
    MediaSegment,
    Medium,
    TokenRun,
    encoded_video,
    pad_ids_of,
    square_side,
)
from packtool.encode.model_files import ModelFiles
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.errors import ConfigError, MediaError
from packtool.media.files import MediaProblem, label
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import MediaKind, MediaRef


def special_tokens(processor: Any, others: Sequence[str] = ()) -> re.Pattern[str]:
    """Return a pattern that finds control tokens in a processor's texts: special tokens, and ``others``."""
    tokens = {token.content for token in processor.tokenizer.added_tokens_decoder.values() if token.special}
    names = [processor.image_token, getattr(processor.tokenizer, "image_token", None), *others]
    tokens |= {str(token) for token in names if token}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def split_processor_text(processor_text: str, special: re.Pattern[str]) -> list[MediaSegment]:
    """Split a processor's text into segments: plain texts, and control tokens with their repetitions."""
    segments: list[MediaSegment] = []
    end = 0
    for match in special.finditer(processor_text):
        if match.start() > end:
            segments.append(processor_text[end : match.start()])
        token, previous = match.group(), segments[-1] if segments else ""
        if isinstance(previous, TokenRun) and previous.token == token:
            segments[-1] = TokenRun(token, previous.length + 1)
        else:
            segments.append(TokenRun(token))
        end = match.end()
    return [*segments, processor_text[end:]] if end < len(processor_text) else segments


def refuse_row_limits(ref: MediaRef) -> None:
    """Raise MediaProblem if a row gives limits for a medium of a model whose processor determines sizes."""
    if ref.limits:
        detail = f"its row has {ref.limits[0][0]}, and this model's processor ignores limits of rows"
        raise MediaProblem("media_unsupported", f"{label(ref)}: {detail}")


SLOWER = "each worker loads transformers' processor, which determines the tokens of each video"
"""Warning about the cost of ``ProcessorVideos``."""

_MAX_REMEMBERED = 16  # the segments of a video are needed soon after it is measured
_MAX_REMEMBERED_TEXTS = 20_000  # more than measured media that an encoder remembers
_Tokens = tuple[list[MediaSegment], tuple[int, ...]]  # of a medium, and its grid
_File = tuple[str | None, bytes | None]  # path, or content


class ProcessorVideos:
    """Measures videos, and gives their tokens, by a model's own processor.

    Args:
        pad: the placeholder token of pictures and frames.
        marks: further tokens that mark media, which the tokenizer may not mark as special.
        patch_side: of the vision tower, in pixels.
    """

    def __init__(self, processor: Any, pad: str, marks: Sequence[str] = (), patch_side: int = 1) -> None:
        self._processor, self._pad, self._patch_side = processor, pad, patch_side
        self._special = special_tokens(processor, marks)
        # VideoLLaMA 3 leaves out tokens of regions that do not change from one frame to the next.
        self._depends_on_pixels = bool(getattr(processor.video_processor, "use_token_compression", False))
        self._remembered = lru_cache(maxsize=_MAX_REMEMBERED)(self._process)
        self._remembered_files = lru_cache(maxsize=_MAX_REMEMBERED_TEXTS)(self._process)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user, one line each."""
        warnings = []
        if self._depends_on_pixels:
            warnings.append("each video is decoded to count its tokens: set use_token_compression to false to avoid it")
        if not self._processor.video_processor.do_sample_frames:
            remedy = "set do_sample_frames and num_frames or fps there to sample fewer"
            warnings.append(f"all frames of a video are taken, by the settings of its video processor: {remedy}")
        return tuple(warnings)

    def measure(self, ref: MediaRef) -> EncodedVideo:
        """Measure a video by its header, choose the frames to sample, and count its tokens by the model's processor.

        MediaProblem if the video cannot be read, or if the processor cannot process it.
        """
        from packtool.media.video import measure_video  # here, because most rows need no PyAV

        self._refuse_stacked_frames(ref)
        row_fps = self._row_fps(ref)
        size = measure_video(ref)
        first_frame, num_frames = 0, size.num_frames
        try:
            if ref.clip is not None:  # the row selects part of the video
                first_frame, num_frames = clip_frames(ref.clip, num_frames, size.fps)
            indices_in_clip = self._frame_indices(ref, num_frames, size.fps, row_fps)
            indices = tuple(first_frame + index for index in indices_in_clip)
            frame_files = [(frame.path, frame.data) for frame in ref.frames]
            content = self._content(ref, frame_files, ref.policy)
            segments, grid = self._process_once(content, size.height, size.width, num_frames, size.fps, indices)
        except MediaError as error:
            raise MediaProblem("media_unreadable", f"{label(ref)}: {error.message}") from error
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            detail = f"{label(ref)}: the model's processor cannot process it: {error}"
            raise MediaProblem("media_size", detail) from error

        num_time_steps = sum(grid[::3]) or len(indices)  # the grid is (t, h, w, t, h, w, ...), or empty
        seconds = num_frames / size.fps
        return encoded_video(
            ref,
            size,
            num_frames=num_frames,
            indices=indices,
            grid=grid,
            seconds_per_grid=seconds / num_time_steps,
            num_tokens=_token_counts(segments)[self._pad],
        )

    def _refuse_stacked_frames(self, ref: MediaRef) -> None:
        """Raise MediaProblem if the processor joins several frames to one picture."""
        num_stacked = getattr(self._processor.video_processor, "stack_frames", None) or 1
        if num_stacked > 1:
            detail = "the settings of its video processor stack frames in one picture: set stack_frames to 1"
            raise MediaProblem("media_unsupported", f"{label(ref)}: {detail}")

    def _row_fps(self, ref: MediaRef) -> float | None:
        """Return the frames per second that a row wants sampled; MediaProblem for any limit that has no effect."""
        names = [name for name, _ in ref.limits]
        if not names:
            return None
        if names != ["fps"] or ref.frames or not self._heeds_fps:
            refuse_row_limits(ref)
        return float(ref.limits[0][1])

    @cached_property
    def _heeds_fps(self) -> bool:
        """Return whether the processor samples more frames of 100 seconds of video at 2 per second than at 1."""
        try:
            num_slow, num_fast = (len(self._sample_frames(3000, 30.0, row_fps)) for row_fps in (1.0, 2.0))
        except TypeError:  # SmolVLM samples only with a maximum number of frames
            return False
        return num_slow < num_fast

    def _frame_indices(self, ref: MediaRef, num_frames: int, fps: float, row_fps: float | None) -> tuple[int, ...]:
        """Return the indexes of the sampled frames: all, unless the row or the processor samples frames of a file."""
        if ref.frames:  # transformers does not sample the frames of a video that is given as pictures
            return ref.frame_indices
        if row_fps is not None or self._processor.video_processor.do_sample_frames:
            return self._sample_frames(num_frames, fps, row_fps)
        return tuple(range(num_frames))

    def segments(self, video: EncodedVideo) -> list[MediaSegment]:
        """Return the tokens of a measured video."""
        content = self._content(video, video.frames, MediaPolicy())
        segments, _ = self._process_once(content, video.height, video.width, video.num_frames, video.fps, video.indices)
        return segments

    def _content(self, video: MediaRef | EncodedVideo, frames: Sequence[_File], policy: MediaPolicy) -> MediaRef | None:
        """Return a reference to a video's content; None if its tokens depend only on its size."""
        if not self._depends_on_pixels:
            return None
        return MediaRef(video.path, video.data, tuple(MediaRef(*frame) for frame in frames), policy=policy)

    def _sample_frames(self, num_frames: int, fps: float, row_fps: float | None = None) -> tuple[int, ...]:
        """Return the indexes of frames sampled by the processor's settings, or at ``row_fps`` frames per second."""
        video_processor = self._processor.video_processor
        if row_fps is not None:
            video_processor = copy.copy(video_processor)
            video_processor.fps, video_processor.num_frames = row_fps, None
        settings = {name: getattr(video_processor, name, None) for name in video_processor.valid_kwargs.__annotations__}
        indices = video_processor.sample_frames(metadata=_metadata(num_frames, fps, None), **settings)
        return tuple(int(index) for index in indices)

    def _process_once(self, content: MediaRef | None, *sampling: Any) -> _Tokens:
        """Return ``_process`` of a video; many results are kept for videos in files, few for bytes in rows."""
        is_in_files = content is not None and not any(ref.data for ref in (content, *content.frames))
        return (self._remembered_files if is_in_files else self._remembered)(content, *sampling)

    def _process(
        self, content: MediaRef | None, height: int, width: int, num_frames: int, fps: float, indices: tuple[int, ...]
    ) -> _Tokens:
        """Run the processor on the sampled frames of a video; return its tokens, and its grid in patches or ().

        Args:
            content: the video, if its tokens depend on its pixels; otherwise None, and blank frames are processed.
            num_frames: of the video.
            indices: frame numbers of the sampled frames.
        """
        import torch

        # Frames without pixels (torch's meta device) suffice, except for VideoLLaMA 3: it counts tokens by the values
        # of a tensor, also without compression.
        device = "cpu" if hasattr(self._processor.video_processor, "use_token_compression") else "meta"
        frames = torch.zeros(len(indices), 3, height, width, dtype=torch.uint8, device=device)
        if content is not None:
            from packtool.media.video import load_video

            listed = [(frame.path, frame.data) for frame in content.frames]
            shape = num_frames, height, width
            pixels = load_video(content.path, content.data, listed, indices, content.policy, shape)
            frames = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        text, outputs = process_video(self._processor, frames, num_frames, fps, indices)
        return split_processor_text(text, self._special), _video_grid(outputs, self._patch_side)


def process_video(
    processor: Any, frames: Any, num_frames: int, fps: float, indices: Sequence[int]
) -> tuple[str, Mapping[str, Any]]:
    """Run a processor on the sampled frames of a video; return the text that it writes for it, and all its outputs.

    ``frames`` are uint8 (T, 3, H, W), or on torch's meta device; ``indices`` are their frame numbers in the video.
    """
    _, _, height, width = frames.shape
    metadata = _metadata(num_frames, fps, list(indices), height, width)
    outputs: Mapping[str, Any] = processor(
        text=[processor.video_token],
        videos=[frames],
        return_text_replacement_offsets=True,  # outputs have the text that replaces each placeholder
        videos_kwargs={"return_tensors": "pt", "do_sample_frames": False, "video_metadata": [metadata]},
        text_kwargs={"return_tensors": None},
    )
    ((text,),) = _media_texts(processor, outputs, counts=[1], kind="video")  # one row with one video
    return text, outputs


def process_images(processor: Any, rows: Sequence[Sequence[Any]]) -> tuple[list[list[str]], Mapping[str, Any]]:
    """Run a processor on the pictures of some rows; return its text for each picture of each row, and its outputs."""
    if "cross_attention_mask" in processor.model_input_names:  # text attends to a picture, which has a single token
        texts = [[str(processor.image_token)] * len(pictures) for pictures in rows]
        return texts, processor.image_processor(images=[list(pictures) for pictures in rows], return_tensors="pt")
    outputs: Mapping[str, Any] = processor(
        text=[" ".join([processor.image_token] * len(pictures)) for pictures in rows],
        images=[list(pictures) for pictures in rows],
        return_text_replacement_offsets=True,
        images_kwargs={"return_tensors": "pt"},
        text_kwargs={"return_tensors": None},  # rows differ in length, and not every tokenizer can pad
    )
    return _media_texts(processor, outputs, [len(pictures) for pictures in rows], "picture"), outputs


def _media_texts(processor: Any, outputs: Mapping[str, Any], counts: Sequence[int], kind: str) -> list[list[str]]:
    """Return the processor's text for each medium of each row; ConfigError if it does not give these texts."""
    texts = outputs.get("text_replacement_offsets")
    if not texts or [len(row) for row in texts] != list(counts):
        message = f"{type(processor).__name__} does not return the text that it writes for a {kind}"
        raise ConfigError(message, "Use a newer transformers, or a model of another family.")
    return [[str(each["replacement"]) for each in row] for row in texts]


def _metadata(num_frames: int, fps: float, indices: list[int] | None, height: int = 0, width: int = 0) -> Any:
    """Return transformers' metadata of a video; 0 for an unknown height or width."""
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
"""Pictures in the test for numbered pictures; some numbers have two digits."""
_DEFAULT_PATCH_SIDE = 14  # of CLIP's towers, in pixels


class ProcessorFamily(MediaEncoding):
    """Media of a family, by the processor in the model's directory; the user's limits on media are not supported."""

    def __init__(self, files: ModelFiles, options: MediaOptions, family: Family) -> None:
        refuse_options(files, options)
        self._family = family
        self._patch_side = square_side(files.config.get("vision_config") or {}, "patch_size", _DEFAULT_PATCH_SIDE)
        self._processor = load_processor(files.directory)
        self._special = special_tokens(self._processor)
        tokenizer = self._processor.tokenizer
        self._added_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
        # Placeholder tokens, as far as config.json names them:
        pad_ids = pad_ids_of(files.config)
        self._pad_by_kind = {kind: str(tokenizer.convert_ids_to_tokens(pad_id)) for kind, pad_id in pad_ids.items()}
        self._image_pad = self._pad_by_kind.get("image")

        self._process_once = cache(self._process_picture)  # once for each size
        single_picture, _grid = self._process_once(*_PROBE_SIZE, 1)
        row_form = self._row_form(single_picture)
        self._is_numbered = row_form == "numbered"
        self._cuts_single_pictures = "batch_num_images" in family.processor_inputs
        self.one_picture_only = row_form == "unknown" and not self._cuts_single_pictures
        self.warnings = (
            f"{files.model_type} models are encoded by transformers' processor, which is slower than by headers: it "
            "processes a blank picture for each new size",
        )
        self._no_videos_reason = family.no_videos or "processor, tokenizer and config.json name no common video token"
        self._videos = self._make_videos()
        self.content_as_list = _accepts_content_lists(files)
        self._set_tokens(single_picture)

    def _set_tokens(self, single_picture: list[MediaSegment]) -> None:
        """Set the tokens that the chat template and the processor write for media; also template and notes on videos.

        ``single_picture`` has the segments that the processor writes for one picture.
        """
        processor = self._processor
        kind_by_placeholder: dict[str, MediaKind] = {str(processor.image_token): "image"}
        if self._videos is not None:
            self.warnings += self._videos.warnings
            kind_by_placeholder[str(processor.video_token)] = "video"
            # SmolVLM's processor renders rows with videos by a template of its own.
            self.video_template = getattr(sys.modules[type(processor).__module__], "DEFAULT_CHAT_TEMPLATE", "")
        picture_tokens = [segment.token for segment in single_picture if isinstance(segment, TokenRun)]
        added_placeholders = kind_by_placeholder.keys() & self._added_tokens
        all_tokens = [str(processor.image_token), *picture_tokens, *added_placeholders]
        self.control_tokens = tuple(dict.fromkeys(all_tokens))  # each once
        self.placeholders = kind_by_placeholder if self.content_as_list else {}  # tokens that the template writes

    def _row_form(self, single: list[MediaSegment]) -> Literal["repeated", "numbered", "unknown"]:
        """Return how the processor writes each picture of a row: like a ``single`` picture, or with its number."""
        two_pictures, _ = self._process([_PROBE_SIZE] * 2)
        if two_pictures == [single] * 2:
            return "repeated"
        many_pictures, _ = self._process([_PROBE_SIZE] * _NUM_PROBES)
        is_numbered = many_pictures == [_numbered(single, number) for number in range(_NUM_PROBES)]
        return "numbered" if is_numbered else "unknown"

    def _make_videos(self) -> ProcessorVideos | None:
        """Return the encoding of videos; None if the family, the processor or the tokenizer does not support them."""
        has_videos = None not in [getattr(self._processor, name, None) for name in ("video_processor", "video_token")]
        if self._family.no_videos or self._image_pad is None or not has_videos:
            return None
        if not self._family.video_outputs:
            return ProcessorVideos(self._processor, self._image_pad)
        pad = str(self._processor.video_token)
        if pad not in self._added_tokens or pad != self._pad_by_kind.get("video"):
            return None
        return ProcessorVideos(self._processor, pad, [pad], self._patch_side)

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        """Measure a picture by its header; count the tokens of a blank picture of the same size, by the processor."""
        if kind == "video" and self._videos is not None:
            return self._videos.measure(ref)
        if kind != "image":
            reason = self._no_videos_reason if kind == "video" else "the model does not support sound"
            raise MediaProblem("media_unsupported", f"{label(ref)}: {reason}")
        return self._measure_image(ref)

    def _measure_image(self, ref: MediaRef) -> EncodedImage:
        from packtool.media.measure import measure_image  # here, because other families need no PIL

        refuse_row_limits(ref)
        height, width = measure_image(ref)
        segments, grid = self._process_size(ref, height, width, 1)
        counts = _token_counts(segments)
        # If config.json names no placeholder token, it is the most frequent control token.
        num_tokens = counts[self._image_pad] if self._image_pad is not None else max(counts.values(), default=0)
        return EncodedImage(ref.path, ref.data, height, width, grid=grid, num_tokens=num_tokens)

    def _process_size(self, ref: MediaRef | EncodedImage, height: int, width: int, num_pictures: int) -> _Tokens:
        """Return ``_process_picture`` of a size; MediaProblem if the processor cannot process it."""
        try:
            return self._process_once(height, width, num_pictures)
        except (ValueError, IndexError, ZeroDivisionError, MemoryError, RuntimeError) as error:
            name = label(MediaRef(ref.path, ref.data))
            detail = f"{name}: the processor refuses {width}x{height}: {str(error) or type(error).__name__}"
            raise MediaProblem("media_size", detail) from error

    def together(self, images: list[Medium]) -> list[Medium]:
        if not self._cuts_single_pictures:
            return images
        uncut = [replace(image, grid=(1, *image.grid[1:])) for image in images if isinstance(image, EncodedImage)]
        pad = str(self._image_pad)
        return [replace(image, num_tokens=_token_counts(self.segments(image))[pad]) for image in uncut]

    def segments(self, medium: Medium, number: int = 0) -> list[MediaSegment]:
        if isinstance(medium, EncodedVideo):
            assert self._videos is not None, "it was measured"
            segments = self._videos.segments(medium)
        else:
            assert isinstance(medium, EncodedImage), "nothing else is measured"
            is_uncut = self._cuts_single_pictures and medium.is_uncut
            segments, _ = self._process_size(medium, medium.height, medium.width, 2 if is_uncut else 1)
        return _numbered(segments, number) if self._is_numbered else segments

    def _process_picture(self, height: int, width: int, num_pictures: int) -> _Tokens:
        """Return the tokens of a picture of this size in a row, and its grid (``EncodedImage.grid``)."""
        (segments, *_), outputs = self._process([(height, width)] * num_pictures)
        return segments, _tower_grid(outputs, self._patch_side) if self._family.processor_inputs else ()

    def _process(self, sizes: list[tuple[int, int]]) -> tuple[list[list[MediaSegment]], Mapping[str, Any]]:
        """Return the tokens of each picture of a row of these sizes (height, width), and the processor's outputs."""
        from packtool.media.measure import blank_image  # here, because other families need no PIL

        pictures = [blank_image(height, width) for height, width in sizes]
        (texts,), outputs = process_images(self._processor, [pictures])
        return [split_processor_text(text, self._special) for text in texts], outputs


def _tower_grid(outputs: Mapping[str, Any], patch_side: int) -> tuple[int, ...]:
    """Return the grid of the only picture in a processor's outputs, as in ``EncodedImage.grid``."""
    if "image_grid_thw" in outputs:
        return tuple(int(number) for number in outputs["image_grid_thw"][0])
    if "target_sizes" in outputs:  # (height, width) in patches of each tile
        return tuple(int(number) for size in outputs["target_sizes"] for number in (1, *size))
    if "image_position_ids" in outputs:  # patches of all pictures are padded to one number
        return (1, *outputs["pixel_values"].shape[:2])
    *num_tiles, _, height, width = outputs["pixel_values"].shape  # the axis of channels is left out
    if "aspect_ratio_mask" in outputs:  # the other tiles are padding
        num_tiles = [int(outputs["aspect_ratio_mask"].sum())]
    return math.prod(num_tiles), height // patch_side, width // patch_side


def _video_grid(outputs: Mapping[str, Any], patch_side: int) -> tuple[int, ...]:
    """Return the grid of the only video in a processor's outputs, as in ``EncodedVideo.grid``."""
    if "video_grid_thw" in outputs:
        return tuple(outputs["video_grid_thw"].flatten().tolist())
    if "target_sizes_videos" in outputs:
        return _tower_grid({"target_sizes": outputs["target_sizes_videos"]}, patch_side)
    pixels = outputs.get("pixel_values_videos")
    if "video_position_ids" in outputs:  # patches of all frames, padded to one number
        num_frames, num_patches, _ = outputs["pixel_values_videos"].shape
        return num_frames, 1, num_patches
    is_tiled = pixels is not None and pixels.ndim == 5  # (1, T, C, H, W)
    return _tower_grid({"pixel_values": pixels}, patch_side) if is_tiled else ()


def refuse_options(files: ModelFiles, options: MediaOptions) -> None:
    """Raise ConfigError that names each limit on media the user gives: only Qwen's families support them."""
    problems = []
    for field in fields(MediaOptions):
        if field.name != "resize" and getattr(options, field.name) is not None:
            kind = "pictures" if field.metadata["panel"] == "Pictures" else "videos and sounds"
            name = "--" + field.name.replace("_", "-")
            problems.append(
                f"{name} ({field.metadata['env']}) limits {kind} of Qwen models only; {files.model_type} models "
                "use the limits of their processor settings: leave it out"
            )
    if problems:
        raise ConfigError.from_problems(problems)


def load_processor(directory: str) -> Any:
    """Load transformers' processor of a model; ConfigError if it cannot be loaded, or does not take pictures."""
    import transformers

    auto_processor: Any = transformers.AutoProcessor  # its method has no type annotations
    try:
        processor = auto_processor.from_pretrained(directory)
    except Exception as error:  # each model's processor raises errors of its own types
        raise ConfigError(
            f"{directory}: the model's processor cannot be loaded: {error}",
            "Put the model's processor settings beside config.json, or update transformers.",
        ) from error
    if getattr(processor, "image_token", None) is None or getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"{type(processor).__name__} has no image_token or no image_processor: packtool cannot count its pictures",
            "Use a model whose processor has both.",
        )
    return processor


def _numbered(segments: list[MediaSegment], number: int) -> list[MediaSegment]:
    """Return the tokens of picture ``number`` of a row, given those of picture 0; MiniCPM-V writes the number."""
    for i, segment in enumerate(segments):
        if isinstance(segment, str) and "0" in segment:
            return [*segments[:i], segment.replace("0", str(number), 1), *segments[i + 1 :]]
    return segments


def _token_counts(segments: list[MediaSegment]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for segment in segments:
        if not isinstance(segment, str):
            counts[segment.token] += segment.length
    return counts


def _accepts_content_lists(files: ModelFiles) -> bool:
    """Return whether the chat template supports contents that are lists of texts and media."""
    template = ChatTemplate(files.chat_template, files.template_variables)
    content = [{"type": "image"}, {"type": "text", "text": _PROBE}]
    try:
        rendered = template.render([{"role": "user", "content": content}])
    except TemplateFailure:
        return False
    return _PROBE in rendered and "'text'" not in rendered
