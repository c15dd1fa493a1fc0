"""Media of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: pictures of any size, and videos as pictures.

Pictures are resized as by ``Glm4vImageProcessor`` of transformers: a picture counts as two equal frames, and the bounds
on pixels are for both. The frames of a video are marked and passed as pictures, two per patch; the model's own
processor gives the tokens of videos.
"""

from __future__ import annotations

from functools import cached_property

from packtool.config.data import MediaOptions
from packtool.encode.encoded import EncodedVideo
from packtool.encode.families.processor import (
    SLOWER,
    ProcessorVideos,
    load_processor,
    refuse_options,
    refuse_row_limits,
)
from packtool.encode.families.qwen_vl import QwenVL, image_limits, resize_together
from packtool.encode.families.record import BoxForm, Family, MediaLimits, MediaSegment, Medium, TokenRun, Towers
from packtool.encode.model_files import ModelFiles
from packtool.rows.sample import MediaRef

_VIDEO_MARKS = "<|begin_of_video|>", "<|end_of_video|>"


class Glm4v(QwenVL):
    """Media of the GLM-V families; users cannot set limits, which would count other pixels than in other families."""

    def __init__(self, files: ModelFiles, options: MediaOptions, family: Family) -> None:
        refuse_options(files, options)
        self._images = image_limits(files.processor, options)
        self.limits = MediaLimits(self._images)
        self._opening, self._closing = "<|begin_of_image|>", "<|end_of_image|>"
        self._pads = {"image": "<|image|>"}
        self.control_tokens = (self._opening, self._closing, self._pads["image"])
        if all(mark in files.tokenizer_json for mark in _VIDEO_MARKS):
            self._pads["video"] = self._pads["image"]
            self.control_tokens += (self._pads["video"], *_VIDEO_MARKS)
        self._directory = files.directory
        self.warnings = (f"rows with videos: {SLOWER}",)

    @cached_property
    def _processor_videos(self) -> ProcessorVideos:
        return ProcessorVideos(load_processor(self._directory), self._pads["image"], self.control_tokens)

    def _measure_video(self, ref: MediaRef) -> EncodedVideo:
        return self._processor_videos.measure(ref)

    def segments(self, medium: Medium, number: int = 0) -> list[MediaSegment]:
        if not isinstance(medium, EncodedVideo):
            return super().segments(medium, number)
        opening, closing = _VIDEO_MARKS
        return [TokenRun(opening), *self._processor_videos.segments(medium), TokenRun(closing)]

    def _picture_grid(self, height: int, width: int, ref: MediaRef) -> tuple[int, int, int]:
        refuse_row_limits(ref)
        limits = self._images
        new_height, new_width = resize_together(
            height, width, limits.temporal_patch_size, limits, limits.min_pixels, limits.max_pixels
        )
        return 1, new_height // limits.patch_size, new_width // limits.patch_size


FAMILY = Family(
    title="GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR",
    model_types=("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
    encoding=Glm4v,
    kinds=("image", "video"),
    towers=Towers(vision=("model.visual",), aligner=("model.visual.merger",)),
    projector=("merged out", "out out", "out wide", "out wide", "wide out"),
    image_marks=("image_start_token_id", "image_end_token_id"),
    video_marks=("video_start_token_id", "video_end_token_id"),
    keeps_bounds=True,
    videos_as_pictures=True,
    boxes=BoxForm("lists", "thousandths"),
)
