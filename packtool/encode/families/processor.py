"""Models with pictures that are not Qwen's, through their own transformers processor.

Other families count tokens by themselves; here the processor is asked what it would write for a picture of
some size, with a blank one, and the answer is remembered by size. That costs what processing costs, once for every size
that comes up, and needs torch in the worker. The chat template writes its own token for a picture, and what the
processor makes of that token takes its place, text and all (Gemma 3 puts blank lines around a picture).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from packtool.config.rows import ImageOptions, MediaOptions
from packtool.encode.encoded import EncodedImage, EncodedVideo
from packtool.encode.families.asked_videos import AskedVideos, has_videos
from packtool.encode.families.base import MediaKind, MediaLimits, Medium, Part
from packtool.encode.families.own_limits import refuse_own_limits
from packtool.encode.families.record import pad_ids_of
from packtool.encode.families.spelling import replacements_in, special_tokens, split_spelling
from packtool.encode.model_files import ModelFiles
from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.errors import ConfigError
from packtool.media.opening import MediaProblem, label
from packtool.rows.sample import MediaRef

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
        from packtool.media.load import blank_image  # here, because families without it need no PIL

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
            kind = "pictures" if field in dataclasses.fields(ImageOptions) else "videos and sounds"
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
