"""Options of every command that loads media for a model: where resized ones are kept."""

from __future__ import annotations

from dataclasses import dataclass

from packtool import storage
from packtool.config.panels import Panel
from packtool.config.settings import option
from packtool.config.sizes import Bytes

_PANEL: Panel = "Caches"


@dataclass(frozen=True, kw_only=True)
class MediaCacheOptions:
    """Where resized pictures and frames are kept."""

    media_cache: str | None = option(
        None,
        "Directory on a disk of this machine for resized pictures and frames of videos, which later epochs and other "
        "runs read without decoding; --media-cache-size bounds it.",
        panel=_PANEL,
    )
    media_cache_size: Bytes | None = option(
        None,
        "Most that --media-cache may hold, as in 500GB; what a run reads in every epoch is not removed for something "
        "else that it reads as often.",
        panel=_PANEL,
    )


def media_cache_problems(options: MediaCacheOptions) -> list[str]:
    """Options of the media cache that say too little, or nothing that can be."""
    directory, size = options.media_cache, options.media_cache_size
    if directory is None:
        return [] if size is None else ["--media-cache-size goes with --media-cache, which names the directory"]
    if storage.is_remote(directory):
        return [f"--media-cache {storage.masked(directory)}: give a directory on a disk of this machine"]
    if size is None:
        return ["--media-cache-size is missing: say how much --media-cache may hold, as in 500GB"]
    return [] if size else ["--media-cache-size 0 keeps nothing: leave out --media-cache"]
