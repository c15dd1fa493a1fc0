"""What a model family adds to plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from packtool.config import ImageOptions


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
class ImageTokens:
    """How a picture is written in tokens: ``opening``, ``pad`` as often as it needs, ``closing``."""

    opening: str
    pad: str
    closing: str

    def __iter__(self) -> Any:
        return iter((self.opening, self.pad, self.closing))


class Family(Protocol):
    """A kind of model that understands pictures."""

    @property
    def image_tokens(self) -> ImageTokens:
        """How its pictures are written."""

    def image_limits(self, processor: dict[str, Any], options: ImageOptions) -> ImageLimits:
        """Limits from the processor's settings, overridden by the user's.

        Raises:
            ConfigError: if they contradict each other.
        """

    def image_grid(self, height: int, width: int, limits: ImageLimits) -> tuple[int, int, int]:
        """(t, h, w) in patches of a picture of ``height`` x ``width`` pixels.

        Raises:
            ValueError: if the picture cannot be shown to the model.
        """
