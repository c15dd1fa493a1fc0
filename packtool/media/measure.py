"""Pictures measured from their header: a picture's token count needs its width and height, nothing else.

Of local files the end is looked at, too: one that was cut off is found now, not in the middle of training.

The size is the one after the EXIF orientation is applied, because that is how ``load`` (and transformers'
``load_image``) show a picture to the model.
"""

from __future__ import annotations

import os
import warnings
from typing import BinaryIO

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from packtool import storage
from packtool.media.opening import MediaProblem, label, open_medium
from packtool.rows.sample import MediaRef

_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_END_MARKS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_END_BYTES = 1024


def measure_image(image: MediaRef) -> tuple[int, int]:
    """(height, width) in pixels as the model will see it.

    Raises:
        MediaProblem: if the file is missing, is no picture or has an absurd size.
    """
    with open_medium(image) as file:
        try:
            return _measure(file, look_at_end=image.path is None or not storage.is_remote(image.path))
        except UnidentifiedImageError:
            raise MediaProblem("media_unreadable", f"{label(image)}: not a picture") from None
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise MediaProblem("media_unreadable", f"{label(image)}: {error}") from error


def _measure(file: BinaryIO, look_at_end: bool) -> tuple[int, int]:
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
    if look_at_end and (mark := _END_MARKS.get(picture.format or "")) and not _ends_with(file, mark):
        # Cut off, perhaps: only decoding tells whether what is left is all that is needed.
        picture.load()
    return (width, height) if orientation in _SIDEWAYS else (height, width)


def _ends_with(file: BinaryIO, mark: bytes) -> bool:
    """Whether a file's last bytes hold its format's end mark; some writers add a little behind it."""
    file.seek(0, os.SEEK_END)
    size = file.tell()
    file.seek(max(size - _END_BYTES, 0))
    return mark in file.read(_END_BYTES)


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
