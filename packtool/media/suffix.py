"""File name suffix of a medium, by its name or its first bytes."""

from __future__ import annotations

import posixpath

_KNOWN = frozenset(
    (
        *(".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".wav", ".flac", ".ogg", ".mp3", ".m4a", ".aac", ".opus"),
        *(".mp4", ".mov", ".mkv", ".webm", ".avi"),
    )
)
_FIRST_BYTES = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tiff"),
    (b"MM\0*", ".tiff"),
    (b"fLaC", ".flac"),
    (b"OggS", ".ogg"),
    (b"ID3", ".mp3"),
    *((first, ".mp3") for first in (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2")),
    *((first, ".aac") for first in (b"\xff\xf1", b"\xff\xf9")),
    (b"\x1aE\xdf\xa3", ".webm"),
)
_RIFF = {b"WEBP": ".webp", b"WAVE": ".wav", b"AVI ": ".avi"}


def suffix_of(path: str | None, data: bytes | None = None) -> str:
    """Return the known suffix of a file's name, else that for its first 12 bytes; ``.bin`` if unknown."""
    if path is not None:
        suffix = posixpath.splitext(path.partition("?")[0])[1].lower()
        if suffix in _KNOWN:
            return suffix
    start = (data or b"")[:12]
    if start[:4] == b"RIFF":
        return _RIFF.get(start[8:], ".bin")
    if start[4:8] == b"ftyp":
        return ".m4a" if start[8:11] == b"M4A" else ".mp4"
    return next((suffix for first, suffix in _FIRST_BYTES if start.startswith(first)), ".bin")


def is_media(data: bytes) -> bool:
    """Return whether a file begins like a picture, video or sound.

    Checked before files that a cache names are copied: a cache of another user could name any file of this machine, to
    have it published.
    """
    return suffix_of(None, data) != ".bin"
