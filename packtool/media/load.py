"""Pictures decoded for a training step, as transformers' ``load_image`` does it."""

from __future__ import annotations

import io
from typing import BinaryIO

from PIL import Image, ImageOps

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
