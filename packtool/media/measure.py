"""Pictures: measured by their header for export, decoded for training as by transformers' ``load_image``.

The number of tokens of a picture depends only on its width and height after the EXIF orientation is applied.

Measuring also finds truncated files: by the length or the end mark of the format, else by decoding. Remote files larger
than the first block are not decoded.
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any, BinaryIO

from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from packtool import storage
from packtool.errors import MediaError
from packtool.media.files import MediaProblem, label, open_medium
from packtool.rows.media_policy import MediaPolicy
from packtool.rows.sample import MediaRef

ANY = MediaPolicy()
# Formats that Pillow passes to other programs, such as Ghostscript, which execute them.
_PROGRAMS = ("EPS", "WMF", "EMF")


def load_image(path: str | None, data: bytes | None = None, policy: MediaPolicy = ANY) -> Image.Image:
    """Return the picture in RGB, upright by its EXIF orientation; raises MediaError and StorageError."""
    try:
        ref = MediaRef(path, data, policy=policy)
        with (
            open_medium(ref, storage.ROWS_BLOCK, is_image=True) as file,
            open_picture(io.BytesIO(file.read()) if path is not None and storage.is_remote(path) else file) as picture,
        ):
            ImageOps.exif_transpose(picture, in_place=True)
            picture.load()
            return picture if picture.mode == "RGB" else picture.convert("RGB")  # which copies
    except MediaProblem as problem:
        raise media_error(problem) from problem


def blank_image(height: int, width: int) -> Image.Image:
    """Return a black picture as from ``load_image``; not an array, for processors misread the axes of (3, width, 3)."""
    return Image.new("RGB", (width, height))


def open_picture(file: BinaryIO) -> Image.Image:
    """Read the header of a picture; ValueError if other programs would execute the format, and Pillow's errors."""
    picture = Image.open(file)
    if picture.format in _PROGRAMS:
        raise ValueError(f"{picture.format} files are programs, not pictures")
    return picture


def media_error(problem: MediaProblem) -> MediaError:
    """Return the error for a medium that export could use and training cannot load."""
    return MediaError(
        f"{problem.detail} ({problem.reason})",
        "The export checked only its header and its end. Restore the file, export again without it, or leave out its "
        "sample with packtool train --on-bad-media skip.",
    )


EXPORT_AGAIN = "export the rows again into another directory."
"""Remedy in messages about changed media."""


def changed_since_export(ref: MediaRef, before: str, now: str) -> MediaError:
    """Return the error for a medium whose content differs from the measures of the export."""
    what = "is damaged" if ref.path is None else "is damaged, or has changed since the export"
    message = f"{label(ref)} {what}: the export counted {before}, and now there is {now}"
    return MediaError(message, f"Restore the file, or {EXPORT_AGAIN}")


_ORIENTATION_TAG = 0x0112
_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
_END_MARKS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND", "JPEG2000": b"\xff\xd9"}
_END_BYTES = 1024
# Offsets and sizes of a TIFF's strips and tiles.
_TIFF_PARTS = ((273, 279), (324, 325))


def measure_image(image: MediaRef) -> tuple[int, int]:
    """Return (height, width) of a picture in pixels, upright; raises as ``open_medium``, also if it is truncated."""
    with warnings.catch_warnings(), open_medium(image, is_image=True) as file:
        warnings.simplefilter("ignore")  # relevant damage raises an error
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            is_local = image.path is None or not storage.is_remote(image.path)
            return _measure(file, size, can_decode=is_local or size <= storage.HEADER_BLOCK)
        except UnidentifiedImageError:
            raise MediaProblem("media_unreadable", f"{label(image)}: not a picture") from None
        except Image.DecompressionBombError as error:
            raise MediaProblem("media_size", f"{label(image)}: {error}") from error


def _measure(file: BinaryIO, size: int, can_decode: bool) -> tuple[int, int]:
    """Return (height, width) of an upright picture; raise an error if its file of ``size`` bytes is truncated."""
    picture = open_picture(file)
    width, height = picture.size
    header_stop = file.tell()  # Pillow has read up to here
    declared_size = _declared_bytes(picture, file)
    orientation = _orientation(picture, file)
    if declared_size is None:
        if can_decode and not _has_end_mark(picture.format, file, header_stop, size):
            picture.load()  # raises an error if the file is truncated
    elif declared_size > size:
        raise ValueError(f"the file is truncated: it declares {declared_size:,} bytes and has {size:,}")
    return (width, height) if orientation in _SIDEWAYS_ORIENTATIONS else (height, width)


def _declared_bytes(picture: Any, file: BinaryIO) -> int | None:
    """Return the minimum length in bytes that a file's header declares; None if it declares none."""
    if picture.format == "WEBP":
        file.seek(4)
        return 8 + int.from_bytes(file.read(4), "little")
    if picture.format == "BMP" and picture.tile and picture.tile[0].codec_name == "raw":
        stride = picture.tile[0].args[1]
        return int(picture.tile[0].offset + stride * picture.height)
    if picture.format == "TIFF":
        for offsets, sizes in _TIFF_PARTS:
            begins, counts = picture.tag_v2.get(offsets), picture.tag_v2.get(sizes)
            if begins and counts and len(begins) == len(counts):
                return int(max(begin + count for begin, count in zip(begins, counts, strict=True)))
    return None


def _has_end_mark(image_format: str | None, file: BinaryIO, begin: int, size: int) -> bool:
    """Return whether the last bytes of a file contain its format's end mark; some writers add a few bytes after it."""
    if (mark := _END_MARKS.get(image_format or "")) is None:
        return False
    start = max(size - _END_BYTES, begin if mark == b"\xff\xd9" else 0)
    file.seek(start)
    return mark in file.read(size - start)


def _orientation(picture: Image.Image, file: BinaryIO) -> int:
    """Return the EXIF orientation of a picture (1 to 8); 1 is upright. The position of ``file`` changes."""
    if isinstance(picture, PngImagePlugin.PngImageFile):
        return _png_orientation(picture, file)
    if picture.format == "TIFF":
        return 1  # Pillow has applied the orientation to ``picture.size``
    orientation: int = picture.getexif().get(_ORIENTATION_TAG, 1)
    return orientation


def _png_orientation(picture: PngImagePlugin.PngImageFile, file: BinaryIO) -> int:
    """Return the EXIF orientation of a PNG; 1 if it has none."""
    data = _exif_chunk(file)
    if data is None:
        # ImageMagick stores the data as a text: three lines with its name and length, then hexadecimal digits.
        profile = picture.info.get("Raw profile type exif")
        if not profile:
            return 1
        hexadecimal_lines = str(profile).split("\n")[3:]
        data = bytes.fromhex("".join(hexadecimal_lines))
    exif = Image.Exif()
    exif.load(data)
    return int(exif.get(_ORIENTATION_TAG, 1))


def _exif_chunk(file: BinaryIO) -> bytes | None:
    """Return the data of the chunk ``eXIf`` of a PNG, or None; Pillow would decode the picture to find it."""
    file.seek(8)  # after the signature
    while len(header := file.read(8)) == 8:
        size, chunk_type = int.from_bytes(header[:4], "big"), header[4:]
        if chunk_type == b"eXIf":
            return file.read(size)
        if chunk_type == b"IEND":
            break
        file.seek(size + 4, os.SEEK_CUR)  # the chunk's data and checksum
    return None
