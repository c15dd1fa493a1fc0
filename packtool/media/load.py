"""Pictures decoded for a training step, as transformers' ``load_image`` does it."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from packtool import storage
from packtool.errors import MediaError


def load_image(path: str | None, data: bytes | None = None) -> Image.Image:
    """The picture in RGB with its EXIF orientation applied.

    Raises:
        MediaError: if the file is gone or cannot be decoded, naming it.
    """
    try:
        with Image.open(_file(path, data)) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise MediaError(
            f"{path or 'an embedded picture'} cannot be loaded: {error}",
            "The file was readable when the cache was made: restore it, or export again.",
        ) from error


def _file(path: str | None, data: bytes | None) -> io.BytesIO | str:
    if data is None and path is not None and storage.is_remote(path):
        data = storage.read_bytes(path)
    return io.BytesIO(data) if data is not None else str(path)
