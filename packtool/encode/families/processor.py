"""Media of models whose tokens are determined by running their own transformers processor.

It processes a blank picture for each new size, and the tokens are cached by size. This costs as much as processing
pictures, and needs torch in the worker. Where videos are sequences of pictures, it gets frames without pixels (torch's
meta device), since its text depends only on their size and number; only the first frame is decoded.

``FAMILIES`` are trained this way: their text tower is causal with plain positions, ``config.json`` names one
placeholder token for pictures, and the forward takes the processor's outputs
(``tests/batch/test_media_processed.py``). ``REFUSED`` can be exported through their own processor but not trained.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

from packtool.config.data import MediaOptions
from packtool.encode.encoded import EncodedImage, EncodedVideo
from packtool.encode.families.qwen_vl import QWEN3_5, clip_frames
from packtool.encode.families.record import (
    INTERNVL_TOKENS,
    BoxForm,
    Family,
    MediaEncoding,
    MediaSegment,
    Medium,
    TokenRun,
    Towers,
    encoded_video,
    pad_ids_of,
    square_side,
)
from packtool.encode.model_files import ModelFiles
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.errors import ConfigError
from packtool.media.files import MediaProblem, label
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


class ProcessorVideos:
    """Measures videos, and gives their tokens, by a model's own processor.

    Args:
        pad: the placeholder token of pictures and frames.
        marks: further tokens that mark media, which the tokenizer may not mark as special.
    """

    def __init__(self, processor: Any, pad: str, marks: Sequence[str] = ()) -> None:
        self._processor, self._pad = processor, pad
        self._special = special_tokens(processor, marks)
        self._process_once = lru_cache(maxsize=_MAX_REMEMBERED)(self._process)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user, one line each."""
        if self._processor.video_processor.do_sample_frames:
            return ()
        remedy = "set do_sample_frames and num_frames or fps there to sample fewer"
        return (f"all frames of a video are taken, by the settings of the model's video processor: {remedy}",)

    def measure(self, ref: MediaRef) -> EncodedVideo:
        """Measure a video by its header, and sample its frames."""
        from packtool.media.video import measure_video  # here, because most rows need no PyAV

        row_fps = self._row_fps(ref)
        size = measure_video(ref)
        first_frame, num_frames = 0, size.num_frames
        try:
            if ref.clip is not None:
                first_frame, num_frames = clip_frames(ref.clip, num_frames, size.fps)
            sampled = self._frame_indices(ref, num_frames, size.fps, row_fps)  # among the frames of the clip
            indices = tuple(first_frame + index for index in sampled)
            segments, grid = self._process_once(size.height, size.width, num_frames, size.fps, indices)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            detail = f"{label(ref)}: the model's processor cannot process it: {error}"
            raise MediaProblem("media_size", detail) from error
        num_time_steps = grid[0] if grid else len(indices)
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
        num_slow, num_fast = (len(self._sample_frames(3000, 30.0, row_fps)) for row_fps in (1.0, 2.0))
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
        segments, _ = self._process_once(video.height, video.width, video.num_frames, video.fps, video.indices)
        return segments

    def _sample_frames(self, num_frames: int, fps: float, row_fps: float | None = None) -> tuple[int, ...]:
        """Return the indexes of frames sampled by the processor's settings, or at ``row_fps`` frames per second."""
        video_processor = self._processor.video_processor
        if row_fps is not None:
            video_processor = copy.copy(video_processor)
            video_processor.fps, video_processor.num_frames = row_fps, None
        settings = {name: getattr(video_processor, name, None) for name in video_processor.valid_kwargs.__annotations__}
        indices = video_processor.sample_frames(metadata=_metadata(num_frames, fps, None), **settings)
        return tuple(int(index) for index in indices)

    def _process(
        self, height: int, width: int, num_frames: int, fps: float, indices: tuple[int, ...]
    ) -> tuple[list[MediaSegment], tuple[int, ...]]:
        """Return the tokens of a video with these sampled frames, and its grid in patches; () if it has none."""
        import torch

        frames = torch.empty(len(indices), 3, height, width, dtype=torch.uint8, device="meta")
        text, outputs = process_video(self._processor, frames, num_frames, fps, indices)
        grids = outputs.get("video_grid_thw")
        grid = () if grids is None else tuple(grids[0].tolist())
        return split_processor_text(text, self._special), grid


def has_videos(processor: Any) -> bool:
    """Return whether a processor supports videos, and its tokenizer has the token for them."""
    added = processor.tokenizer.added_tokens_decoder.values()
    is_known = getattr(processor, "video_token", None) in {token.content for token in added}
    return getattr(processor, "video_processor", None) is not None and is_known


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
        processor = self._processor = load_processor(files.directory)
        pad_id = pad_ids_of(files.config).get("image")
        self._pad = None if pad_id is None else str(processor.tokenizer.convert_ids_to_tokens(pad_id))
        self._special = special_tokens(processor)
        self._process_once = cache(self._process_picture)  # once for each size
        single_picture, _grid = self._process_once(*_PROBE_SIZE)
        row_form = self._row_form(single_picture)
        self._is_numbered = row_form == "numbered"
        self.one_picture_only = row_form == "unknown"
        self.warnings = (
            f"{files.model_type} models are encoded by transformers' processor, which is slower than by headers: it "
            "processes a blank picture for each new size",
        )
        kinds_by_token: dict[str, MediaKind] = {str(processor.image_token): "image"}
        self._videos = self._make_videos()
        self._no_videos_reason = family.no_videos or "the processor or the tokenizer does not support videos"
        if self._videos is not None:
            self.warnings += self._videos.warnings
            kinds_by_token[str(processor.video_token)] = "video"
        picture_tokens = [segment.token for segment in single_picture if isinstance(segment, TokenRun)]
        all_tokens = [str(processor.image_token), *picture_tokens, *kinds_by_token]
        self.control_tokens = tuple(dict.fromkeys(all_tokens))  # each once
        self.content_as_list = _accepts_content_lists(files)
        self.placeholders = kinds_by_token if self.content_as_list else {}  # tokens that the chat template writes

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
        if self._family.no_videos or self._pad is None or not has_videos(self._processor):
            return None
        if not self._family.video_outputs:
            return ProcessorVideos(self._processor, self._pad)
        pad = str(self._processor.video_token)
        return ProcessorVideos(self._processor, pad, [pad])

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
        try:
            segments, grid = self._process_once(height, width)
        except (ValueError, IndexError, ZeroDivisionError, MemoryError) as error:  # Pillow's, for wide pictures
            detail = f"{label(ref)}: the processor refuses {width}x{height}: {str(error) or type(error).__name__}"
            raise MediaProblem("media_size", detail) from error
        counts = _token_counts(segments)
        # If config.json names no placeholder token, it is the most frequent control token.
        num_tokens = counts[self._pad] if self._pad is not None else max(counts.values(), default=0)
        return EncodedImage(ref.path, ref.data, height, width, grid=grid, num_tokens=num_tokens)

    def segments(self, medium: Medium, number: int = 0) -> list[MediaSegment]:
        if isinstance(medium, EncodedVideo):
            assert self._videos is not None, "it was measured"
            return self._videos.segments(medium)
        assert isinstance(medium, EncodedImage), "nothing else is measured"
        segments, _ = self._process_once(medium.height, medium.width)
        return _numbered(segments, number) if self._is_numbered else segments

    def _process_picture(self, height: int, width: int) -> tuple[list[MediaSegment], tuple[int, ...]]:
        """Return the tokens of a picture of this size, and its grid (``EncodedImage.grid``)."""
        (segments,), outputs = self._process([(height, width)])
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
    return math.prod(num_tiles), height // patch_side, width // patch_side


def refuse_options(files: ModelFiles, options: MediaOptions) -> None:
    """Raise ConfigError that names each limit on media the user gives: only Qwen's families support them."""
    problems = []
    for field in dataclasses.fields(MediaOptions):
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


# Layers of the projector from the vision tower to the text model: the input and output width of each (``Family``).
_PLAIN = ("tower text", "text text")
_MERGED = ("merged text", "text text")
_PIXTRAL = ("merged tower", "tower text", "text text")
_SWIGLU = ("merged aligned", "gated text")


def _family(
    title: str,
    *model_types: str,
    inputs: tuple[str, ...] = (),
    vision: str = "model.vision_tower",
    aligner: tuple[str, ...] = ("model.multi_modal_projector",),
    no_videos: str = "this model does not support videos",
    projector: tuple[str, ...] = _PLAIN,
    unused: tuple[str, ...] = (),
    **other_fields: Any,
) -> Family:
    """Return the record of a family whose media are encoded by ``ProcessorFamily``.

    Args:
        inputs: outputs of the processor for pictures that the model takes in addition to ``pixel_values``.
        aligner: modules between the vision tower and the text model.
        no_videos: why videos are refused; "" if they are not.
        projector: widths of the linear layers of these modules.
    """
    takes_videos = not no_videos
    return Family(
        title=title,
        model_types=model_types,
        encoding=ProcessorFamily,
        no_videos=no_videos,
        kinds=("image", "video") if takes_videos else ("image",),
        towers=Towers(vision=(vision,), aligner=aligner, unused=unused),
        positions="counted",  # 0, 1, 2, ...
        processor_inputs=("pixel_values", *inputs),
        videos_as_pictures=takes_videos,
        projector=projector,
        **other_fields,
    )


# ``image_newline`` is a trained vector at the end of each row of a picture's features.
_NEWLINE = ("model.multi_modal_projector", "model.image_newline")
_APART = "the model encodes videos by a function of its own, which packtool does not call"
_STACKED = "the model can encode videos together only with equal numbers of frames"
# These turn the tower's features into visual words.
_OVIS_HEAD = ("model.vision_tower.head_linear", "model.vision_tower.head_norm")

FAMILIES: tuple[Family, ...] = (
    _family(
        "InternVL 3, 3.5",
        "internvl",
        projector=_MERGED,
        boxes=BoxForm("tokens", "thousandths", INTERNVL_TOKENS),
        no_videos="",
    ),
    _family(
        "LLaVA-OneVision (one picture per row)",
        "llava_onevision",
        inputs=("image_sizes", "batch_num_images"),
        aligner=_NEWLINE,
        no_videos=_STACKED,
    ),
    _family("LLaVA-NeXT (1.6)", "llava_next", inputs=("image_sizes",), aligner=_NEWLINE),
    _family("LLaVA 1.5, Pixtral", "llava", inputs=("image_sizes",)),
    _family("Mistral 3", "mistral3", inputs=("image_sizes",), projector=_PIXTRAL),
    _family(
        "Idefics 3, SmolVLM",
        "idefics3",
        "smolvlm",
        inputs=("pixel_attention_mask",),
        vision="model.vision_model",
        aligner=("model.connector",),
        projector=("merged text",),
        no_videos="Idefics 3 does not support videos, nor does the chat template of SmolVLM",
    ),
    _family(
        "Kimi K2.5",
        "kimi_k25",
        inputs=("image_grid_thw",),
        aligner=("model.mm_projector",),
        projector=("merged merged", "merged text"),
        no_videos=_APART,
    ),
    _family(
        "MiniCPM-V 4.6",
        "minicpmv4_6",
        "minicpm_ocr",
        inputs=("target_sizes",),
        aligner=("model.merger",),
        projector=("merged merged", "merged text"),
        no_videos=_APART,
        recurrent_types=QWEN3_5.recurrent_types,
        recurrent_layers=QWEN3_5.recurrent_layers,
    ),
    _family("Aya Vision", "aya_vision", projector=_SWIGLU),
    _family("Command A Vision", "cohere2_vision", projector=_SWIGLU),
    _family(
        "EXAONE 4.5",
        "exaone4_5",
        inputs=("image_grid_thw",),
        vision="model.visual",
        aligner=("model.visual.merger",),
        projector=Family.projector,
        no_videos="",
        video_outputs=("pixel_values_videos", "video_grid_thw"),
    ),
    _family(
        "HyperCLOVA X SEED Vision",
        "hyperclovax_vision_v2",
        inputs=("image_grid_thw",),
        vision="model.vision_model",
        aligner=("model.projector",),
        projector=(*Family.projector, "out text"),
        no_videos=_APART,
    ),
    _family(
        "LightOnOCR",
        "lighton_ocr",
        inputs=("image_sizes",),
        vision="model.vision_encoder",
        aligner=("model.vision_projection",),
        projector=_PIXTRAL,
    ),
    _family("LLaVA-NeXT-Video", "llava_next_video", inputs=("image_sizes",), aligner=_NEWLINE, no_videos=_STACKED),
    _family(
        "Ovis 2",
        "ovis2",
        aligner=(*_OVIS_HEAD, "model.visual_embeddings_table"),
        projector=("merged words", "vocabulary text"),
    ),
    _family(
        "VideoLLaMA 3",
        "video_llama_3",
        inputs=("image_grid_thw", "image_merge_sizes"),
        vision="model.vision_model",
        aligner=("model.projector",),
        no_videos="the number of tokens of a video depends on the content of its frames",
    ),
    _family("ViP-LLaVA", "vipllava"),
    _family("Gemma 3", "gemma3", projector=("tower text",), whole_pictures="all", token_types="token_type_ids"),
    _family(
        "Gemma 4",
        "gemma4",
        inputs=("image_position_ids",),
        aligner=("model.embed_vision",),
        projector=("tower text",),
        unused=("model.audio_tower", "model.embed_audio"),
        whole_pictures="windows",
        token_types="mm_token_type_ids",
        no_videos="",
        video_outputs=("pixel_values_videos", "video_position_ids"),
    ),
)
