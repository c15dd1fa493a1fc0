"""The GPUs of this machine by the names that their driver tells, without loading torch or the driver's libraries."""

from __future__ import annotations

import glob
import re

_PLACES = "/proc/driver/nvidia/gpus/*/information"


def gpu_names(places: str = _PLACES) -> tuple[str, ...]:
    """The names of the GPUs, as in ``("NVIDIA H100 80GB HBM3",)``; nothing where the driver's files cannot be read.

    Args:
        places: of the files that describe a GPU each.
    """
    found = []
    for place in sorted(glob.glob(places)):
        try:
            with open(place, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        if match := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE):
            found.append(match.group(1))
    return tuple(found)
