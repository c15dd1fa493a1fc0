"""Media access policy: which files and URLs a row may name, because rows may be untrusted.

By default (``Source.media_policy``) a row may name files below the folder of its own file or below ``--media-root``
(after resolving links), and URLs on the same remote stores (a bucket, a web server) as these two. Media embedded in the
row as bytes are always allowed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from packtool import storage
from packtool.config.data import AccessOptions

NOT_ALLOWED = "media_not_allowed"
_BUCKETS = frozenset({"s3:", "oss:"})
DEFAULT_MAX_BYTES = 4 * 10**9
DEFAULT_MAX_IMAGE_BYTES = 500 * 10**6


@dataclass(frozen=True)
class MediaPolicy:
    """Rules for media files and URLs that may be read.

    Args:
        roots: resolved local folders; files below them are allowed. None allows all local files.
        stores: remote stores that are allowed, named as by ``storage.store_name``, or schemes such as ``s3:``. None
            allows all.
        max_bytes: maximum file size; None for 4 GB, and 500 MB for an image.
        max_failures: consecutive failures of a store after which it counts as down; 0 for no limit.
    """

    roots: tuple[str, ...] | None = None
    stores: frozenset[str] | None = None
    max_bytes: int | None = None
    max_failures: int = 1

    def refusal(self, path: str) -> str | None:
        """Explain why a path or URL may not be read, and which option allows it; return None if it may be read.

        A URL is compared with ``stores``, a local path, after resolving links, with ``roots``.
        """
        store = storage.store_name(path)  # such as s3://bucket; "" for a local file
        if store:
            scheme = store.partition("//")[0]
            if self.stores is None or not self.stores.isdisjoint((store, scheme)):
                return None
            return f"{storage.origin(path)} is not named on the command line; --media-access any allows it"
        if self.roots is None:
            return None
        resolved_path = os.path.realpath(storage.normalize(path))
        if any(os.path.commonpath((root, resolved_path)) == root for root in self.roots):
            return None
        link_note = "" if resolved_path == path else f"is a link to {resolved_path}, which "
        return (
            f"{link_note}is neither in the folder of the rows nor in --media-root; pass --media-root DIR to allow its "
            "folder, or --media-access local to allow all local files"
        )

    def max_file_bytes(self, is_image: bool) -> int:
        """Return the maximum file size in bytes."""
        return self.max_bytes or (DEFAULT_MAX_IMAGE_BYTES if is_image else DEFAULT_MAX_BYTES)


def policy_for_cache(options: AccessOptions) -> MediaPolicy:
    """Return the policy for media paths in a cache, which may come from somebody else's export.

    Allows local files and buckets, which need the user's own credentials, but only those web servers that the command
    line names, unless access is ``any``.
    """
    named = frozenset(storage.store_name(name) for name in options.command_line_sources if storage.is_remote(name))
    stores = None if options.media_access == "any" else _BUCKETS | named
    return MediaPolicy(stores=stores, max_bytes=options.max_media_bytes)
