"""Media access policy: which files and addresses a row may name, because rows may come from somebody else.

By default (``Source.media_policy``) a row may name files below the folder of its file of rows or below ``--media-root``
(after resolving links), and addresses in the remote stores (a bucket, a web server) of these two. Bytes in the row
itself are always allowed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from packtool import storage
from packtool.config.data import AccessOptions

NOT_ALLOWED = "media_not_allowed"
ALLOWED_BY = (
    "rows name media outside of their folder; --media-root DIR allows that folder (or bucket, or server), "
    "--media-access local any file of this machine, and any everything else too"
)
_BUCKETS = frozenset({"s3:", "oss:"})
DEFAULT_MAX_BYTES = 4 * 10**9
DEFAULT_MAX_IMAGE_BYTES = 500 * 10**6


@dataclass(frozen=True)
class MediaPolicy:
    """Media that may be read.

    Args:
        roots: resolved folders of this machine below which files may lie; None for anywhere.
        stores: remote stores, as ``storage.store_name`` names them, or ``s3:`` for all of a scheme; None for any.
        max_bytes: a larger file is refused; None for 4 GB, and 500 MB for a picture.
        max_failures: consecutive media that a store may fail to deliver before it counts as down; 0 never stops.
    """

    roots: tuple[str, ...] | None = None
    stores: frozenset[str] | None = None
    max_bytes: int | None = None
    max_failures: int = 1

    def refusal(self, path: str) -> str | None:
        """Return why a file may not be opened and which option allows it; None if it may be opened.

        Raises:
            StorageError: if the path is invalid.
        """
        store = storage.store_name(path)
        if store:
            if self.stores is None or store in self.stores or store.partition("//")[0] in self.stores:
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

    def max_file_bytes(self, is_image: bool) -> int:
        """Return the size in bytes above which a file is refused."""
        return self.max_bytes or (DEFAULT_MAX_IMAGE_BYTES if is_image else DEFAULT_MAX_BYTES)


def policy_for_cache(options: AccessOptions) -> MediaPolicy:
    """Return the policy for media that cached samples name: the export checked its rows, but not everybody's caches.

    Files of this machine and buckets, which need the user's own credentials, may be read. Of web servers only those
    that the command line names, unless access is ``any``.
    """
    named = frozenset(storage.store_name(name) for name in options.command_line_sources if storage.is_remote(name))
    stores = None if options.media_access == "any" else _BUCKETS | named
    return MediaPolicy(stores=stores, max_bytes=options.max_media_bytes)
