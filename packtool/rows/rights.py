"""Which files and addresses a row may name: whoever wrote the rows need not be whoever runs packtool.

Without further words a row reaches what was named on the command line: files below the folder of the file of rows or
below ``--media-root``, links followed, and the remote stores (a bucket, a web server) that these two lie in. Bytes that
stand in the row itself are always fine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from packtool import storage
from packtool.config.data import AccessOptions, MediaAccess

NOT_ALLOWED = "media_not_allowed"
ALLOWED_BY = (
    "rows name media outside of their folder; --media-root DIR allows that folder (or bucket, or server), "
    "--media-access local any file of this machine, and any everything else too"
)
_BUCKETS = frozenset({"s3:", "oss:"})
DEFAULT_MAX_BYTES = 4 * 10**9
DEFAULT_MAX_IMAGE_BYTES = 500 * 10**6


@dataclass(frozen=True)
class MediaRights:
    """What media may be.

    Args:
        roots: folders of this machine, without links, below which files may lie; None for anywhere.
        places: remote stores, as ``storage.store_name`` names them, or ``s3:`` for all of a kind; None for any.
        max_bytes: a larger file is refused; None for 4 GB, and 500 MB of a picture.
        max_failures: media in a row that one store may fail to give before it counts as down; 0 never stops.
    """

    roots: tuple[str, ...] | None = None
    places: frozenset[str] | None = None
    max_bytes: int | None = None
    max_failures: int = 1

    def refusal(self, path: str) -> str | None:
        """Why a file may not be opened, and the option that allows it; None if it may.

        Raises:
            StorageError: if the path is nothing that can be reached.
        """
        place = storage.store_name(path)
        if place:
            if self.places is None or place in self.places or place.partition("//")[0] in self.places:
                return None
            return f"{storage.origin(path)} is no store that the command line names: --media-access any allows it"
        if self.roots is None:
            return None
        real = os.path.realpath(storage.normalize(path))
        if any(os.path.commonpath((root, real)) == root for root in self.roots):
            return None
        leads = "" if real == path else f"leads to {real}, which "
        return (
            f"{leads}lies neither below the rows' folder nor in --media-root: --media-root DIR allows a folder, "
            "--media-access local any file of this machine"
        )

    def most_bytes(self, is_image: bool) -> int:
        """Bytes of the largest file that may be read."""
        return self.max_bytes or (DEFAULT_MAX_IMAGE_BYTES if is_image else DEFAULT_MAX_BYTES)


def rights_of_rows(
    path: str, media_root: str | None, access: MediaAccess, max_bytes: int | None, max_failures: int
) -> MediaRights:
    """Rights of the rows of one file.

    Args:
        path: of the file of rows.
    """
    if access == "any":
        return MediaRights(max_bytes=max_bytes, max_failures=max_failures)
    named = [path] if media_root is None else [path, media_root]
    folders = [folder for name in named if not storage.is_remote(name) for folder in _folders(name, name != path)]
    places = frozenset(storage.store_name(name) for name in named if storage.is_remote(name))
    return MediaRights(None if access == "local" else tuple(folders), places, max_bytes, max_failures)


def _folders(name: str, is_folder: bool) -> list[str]:
    """The folder of a file, and the one that it really lies in if it is a link, as in the hub's cache."""
    name = storage.normalize(name)
    if is_folder:
        return [os.path.realpath(name)]
    return [os.path.realpath(os.path.dirname(name)), os.path.dirname(os.path.realpath(name))]


def rights_of_cache(options: AccessOptions) -> MediaRights:
    """Rights of media that samples name: the export has checked its rows, but a cache may be somebody else's.

    Files of this machine and buckets, which the user's own credentials open, are read. Of the web only the servers that
    the command line names, if not ``any``.
    """
    named = frozenset(storage.store_name(name) for name in options.named_places if storage.is_remote(name))
    places = None if options.media_access == "any" else _BUCKETS | named
    return MediaRights(places=places, max_bytes=options.max_media_bytes)
