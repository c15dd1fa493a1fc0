"""Imports of libraries of many thousand modules."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def imported_at_once() -> Iterator[None]:
    """Look for no garbage while torch and transformers are imported, and later not in what they hold.

    All of it stays. Python would look through it again with every quarter more of it, which takes a third of the time
    of importing, and whenever a training asks for a collection. Where they have been imported already, nothing is done.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries that count what is left of them in the end would complain
