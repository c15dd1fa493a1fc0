"""Options of every command that reads caches: where copies lie, and whether files are held against their checksums."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from packtool.config.panels import Panel
from packtool.config.settings import option
from packtool.config.sizes import Bytes

VerifyCache = Literal["always", "once", "never"]
_PANEL: Panel = "Caches"
_VARIABLE = "PACKTOOL_CACHE_DIR"


def default_cache_dir() -> str:
    """``PACKTOOL_CACHE_DIR``, or ``packtool`` in the user's directory for caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get(_VARIABLE) or os.path.join(home, "packtool")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How caches are read on this machine."""

    cache_dir: str | None = option(
        None,
        "Directory of this machine for copies of remote caches and for what was verified; by default packtool in "
        "~/.cache.",
        panel=_PANEL,
        env=_VARIABLE,
    )
    cache_dir_size: Bytes | None = option(
        None,
        "Most that --cache-dir may hold, as in 200GB; copies of other caches go first. By default all the disk has.",
        panel=_PANEL,
        env="PACKTOOL_CACHE_DIR_SIZE",
    )
    verify_cache: VerifyCache = option(
        "once",
        "Hold a cache's files against their checksums when they are first needed: always in every run, once on each "
        "machine and again when a file has changed, or never.",
        panel=_PANEL,
    )
