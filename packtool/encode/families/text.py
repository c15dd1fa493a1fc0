"""No media: what a model of text alone makes of a row's pictures, videos and sounds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from packtool.config.data import MediaOptions
from packtool.encode.families.record import MediaKind, MediaLimits, Medium, Part
from packtool.encode.model_files import ModelFiles
from packtool.media.opening import MediaProblem
from packtool.rows.sample import MediaRef


class TextOnly:
    """The encoding of media by models that take none: rows that bring some are left out.

    Args:
        files, options: say nothing here.
    """

    limits = MediaLimits()
    control_tokens: tuple[str, ...] = ()
    content_as_list = False
    placeholders: Mapping[str, MediaKind] = MappingProxyType({})
    remarks: tuple[str, ...] = ()
    alone_only = False

    def __init__(self, files: ModelFiles, options: MediaOptions) -> None:
        pass

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        """See ``MediaEncoding``."""
        raise MediaProblem("media_unsupported", f"the row has {kind}s, and the model reads text only")

    def parts(self, medium: Medium, number: int = 0) -> list[Part]:
        """See ``MediaEncoding``."""
        raise AssertionError("nothing is measured")
