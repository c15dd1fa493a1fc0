"""Pictures measured from their header: a picture's token count needs its width and height, nothing else.

The size is the one after the EXIF orientation is applied, because that is how ``load`` (and transformers'
``load_image``) show a picture to the model.
"""

from __future__ import annotations

import os
import warnings
from typing import BinaryIO

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from packtool.media.opening import MediaProblem, label, open_medium
from packtool.rows.sample import MediaRef

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)


def measure_image(image: MediaRef) -> tuple[int, int]:
    """(height, width) in pixels as the model will see it.

    Raises:
        MediaProblem: if the file is missing, is no picture or has an absurd size.
    """
    with open_medium(image) as file:
        try:
            return _measure(file)
        except UnidentifiedImageError:
            raise MediaProblem("media_unreadable", f"{label(image)}: not a picture") from None
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise MediaProblem("media_unreadable", f"{label(image)}: {error}") from error


def _measure(file: BinaryIO) -> tuple[int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        picture = Image.open(file)
    width, height = picture.size
    if isinstance(picture, PngImagePlugin.PngImageFile):
        orientation = _png_orientation(picture, file)
    elif picture.format == "TIFF":
        orientation = 1  # Pillow's TIFF reader has swapped the sides already
    else:
        orientation = picture.getexif().get(_ORIENTATION_TAG, 1)
    return (width, height) if orientation in _SIDEWAYS else (height, width)


def _png_orientation(picture: PngImagePlugin.PngImageFile, file: BinaryIO) -> int:
    """Pillow would decode the whole picture to look for an ``eXIf`` chunk; the chunks can be walked instead."""
    data: bytes | None = None
    file.seek(8)
    while len(header := file.read(8)) == 8:
        size, kind = int.from_bytes(header[:4], "big"), header[4:]
        if kind == b"eXIf":
            data = file.read(size)
            break
        if kind == b"IEND":
            break
        file.seek(size + 4, os.SEEK_CUR)
    if data is None:
        raw = picture.info.get("Raw profile type exif")
        if not raw:
            return 1
        data = bytes.fromhex("".join(str(raw).split("\n")[3:]))
    exif = Image.Exif()
    exif.load(data)
    return int(exif.get(_ORIENTATION_TAG, 1))
