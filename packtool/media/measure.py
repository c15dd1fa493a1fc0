"""Pictures measured from their header: a picture's token count needs its width and height, nothing else.

That the rest is there is looked at, too, so that a file that was cut off is found now and not in the middle of
training: where the format says how long it is or how it ends, by that, else by decoding it. Of remote files larger than
the first block only the former is looked at.

The size is the one after the EXIF orientation is applied, because that is how ``load`` (and transformers'
``load_image``) show a picture to the model.

Pictures decoded for a training step, as transformers' ``load_image`` does it.
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any, BinaryIO

from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from packtool import storage
from packtool.errors import MediaError
from packtool.media.opening import MediaProblem, label, open_medium
from packtool.rows.rights import MediaRights
from packtool.rows.sample import MediaRef

ANY = MediaRights()
# Decoded by other programs, such as Ghostscript, that do what the file says.
_PROGRAMS = ("EPS", "WMF", "EMF")


def load_image(path: str | None, data: bytes | None = None, rights: MediaRights = ANY) -> Image.Image:
    """The picture in RGB with its EXIF orientation applied.

    Raises:
        MediaError: if the file is gone, may not be read or cannot be decoded, naming it.
        StorageError: if its store cannot be reached.
    """
    try:
        ref = MediaRef(path, data, rights=rights)
        with (
            open_medium(ref, storage.ROWS_BLOCK, is_image=True) as file,
            open_picture(io.BytesIO(file.read()) if path is not None and storage.is_remote(path) else file) as picture,
        ):
            return ImageOps.exif_transpose(picture).convert("RGB")
    except MediaProblem as problem:
        raise media_error(problem) from problem


def blank_image(height: int, width: int) -> Image.Image:
    """A black picture, in the type that ``load_image`` returns.

    A processor guesses the axes of an array: one of shape (3, width, 3) is read as channels first.
    """
    return Image.new("RGB", (width, height))


def open_picture(file: BinaryIO) -> Image.Image:
    """A picture whose header has been read.

    Raises:
        ValueError: if it is none, but a program that would have to be run.
        OSError, ...: whatever Pillow raises.
    """
    picture = Image.open(file)
    if picture.format in _PROGRAMS:
        raise ValueError(f"{picture.format} files are programs, not pictures")
    return picture


def media_error(problem: MediaProblem) -> MediaError:
    """What training says of a medium that export could use."""
    return MediaError(
        f"{problem.detail} ({problem.reason})",
        "The export looked at its header and end only: restore the file, or export again without it; "
        "packtool train --on-bad-media skip trains without its sample.",
    )


EXPORT_AGAIN = "export the rows again into another directory."
"""Remedy in messages about changed media."""


def unlike_the_export(ref: MediaRef, before: str, now: str) -> MediaError:
    """What training says of a medium that holds something else than the export measured.

    Bytes in a cache cannot change; of a file it is not known which of the two happened.
    """
    what = "is damaged" if ref.path is None else "is damaged, or has changed since the export"
    return MediaError(
        f"{label(ref)} {what}: the export counted {before}, and there is {now}",
        f"Put the whole file back, or {EXPORT_AGAIN}",
    )


_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
_END_MARKS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND", "JPEG2000": b"\xff\xd9"}
_END_BYTES = 1024
# Offsets and sizes of a TIFF's strips and tiles.
_TIFF_PARTS = ((273, 279), (324, 325))


def measure_image(image: MediaRef) -> tuple[int, int]:
    """(height, width) in pixels as the model will see it.

    Raises:
        MediaProblem: if the file is missing, is no picture, was cut off or has an absurd size.
        StorageError: as ``open_medium``.
    """
    with warnings.catch_warnings(), open_medium(image, is_image=True) as file:
        warnings.simplefilter("ignore")  # of large pictures, and of damage that makes an error or none
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            return _measure(file, size, is_cheap=not _is_far(image) or size <= storage.HEADER_BLOCK)
        except UnidentifiedImageError:
            raise MediaProblem("media_unreadable", f"{label(image)}: not a picture") from None
        except Image.DecompressionBombError as error:
            raise MediaProblem("media_size", f"{label(image)}: {error}") from error


def _is_far(image: MediaRef) -> bool:
    return image.path is not None and storage.is_remote(image.path)


def _measure(file: BinaryIO, size: int, is_cheap: bool) -> tuple[int, int]:
    picture = open_picture(file)
    begin, (width, height) = file.tell(), picture.size
    declared = _declared_bytes(picture, file)
    if isinstance(picture, PngImagePlugin.PngImageFile):
        orientation = _png_orientation(picture, file)
    elif picture.format == "TIFF":
        orientation = 1  # Pillow's TIFF reader has swapped the sides already
    else:
        orientation = picture.getexif().get(_ORIENTATION_TAG, 1)
    if declared is not None and declared > size:
        raise ValueError(f"the file is truncated: it declares {declared:,} bytes and has {size:,}")
    if declared is None and is_cheap and not _ends(picture.format, file, begin, size):
        picture.load()
    return (width, height) if orientation in _SIDEWAYS else (height, width)


def _declared_bytes(picture: Any, file: BinaryIO) -> int | None:
    """How long the header says the file is, at least; None if it does not."""
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


def _ends(form: str | None, file: BinaryIO, begin: int, size: int) -> bool:
    """Whether a file's last bytes, of those behind its header, hold its format's end mark.

    Some writers add a little behind it. Where it is not found, only decoding tells whether what is left is all that is
    needed.
    """
    if (mark := _END_MARKS.get(form or "")) is None:
        return False
    start = max(size - _END_BYTES, begin if mark == b"\xff\xd9" else 0)
    file.seek(start)
    return mark in file.read(size - start)


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
