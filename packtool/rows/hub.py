"""Data sets of the Hugging Face hub, through ``datasets`` and its cache on this machine."""

from __future__ import annotations

import os
import re

from packtool.errors import DataError

HUB_PREFIX = "hf::"
_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w. /-]*){0,2}")
_ID_WITH_PREFIX = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?::[\w. /-]*){0,2}")


def hub_id(name: str) -> str | None:
    """The id, perhaps with subset and split, if a name can be one: ``owner/set:subset:split``, ``hf::set``."""
    if name.startswith(HUB_PREFIX):
        name = name.removeprefix(HUB_PREFIX)
        return name if _ID_WITH_PREFIX.fullmatch(name) else None
    return name if _ID.fullmatch(name) and not name.startswith(".") else None


def hub_files(name: str, subset: str | None = None, split: str | None = None, folder: str | None = None) -> list[str]:
    """Arrow files of a set, downloaded if they are not yet in ``datasets``' cache.

    Args:
        name: id, perhaps with ``:subset`` and ``:split`` (``train`` by default), or a folder with a copy of the set.
        subset, split: the same, where the name has none.
        folder: sub-directory of the set; only what lies in it is read.

    Raises:
        DataError: if there is no such set, or the hub cannot be reached.
    """
    import datasets  # here, because it takes a second and most exports read files

    identifier = name
    if not os.path.isdir(name):
        identifier, of_name, split_of_name = [*name.split(":"), "", ""][:3]
        subset, split = of_name or subset, split_of_name or split
    split = split or "train"
    try:
        found = datasets.load_dataset(identifier, subset, split=split, data_dir=folder)
    except Exception as error:  # of the hub, of the network, of whatever code reads the set
        first_line = str(error).strip().partition("\n")[0]
        inside = f", folder {folder}" if folder else ""
        raise DataError(
            f"--dataset {name}: no such file here, and the hub's set {identifier} (subset {subset or 'default'}, split "
            f"{split}{inside}) cannot be loaded: {type(error).__name__}: {first_line}",
            "Check the path or id; id:subset:split names another part. Without a network, HF_HUB_OFFLINE=1 uses what "
            "was downloaded before.",
        ) from error
    files = [file["filename"] for file in found.cache_files]
    if not files:
        raise DataError(f"--dataset {name}: datasets keeps this set in no files", "Save it with save_to_disk first.")
    return files
