"""When Python looks for garbage while an export is prepared."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def collecting_later() -> Iterator[Callable[[], None]]:
    """Look for no garbage until the function is called that this gives, and in what there is by then not at all.

    What is found of many thousand files all stays; it would be looked through again with every quarter more of it.
    Where a program has switched collections off, they stay off, and what it has frozen stays frozen.
    """
    if not gc.isenabled():
        yield lambda: None
        return

    def collect() -> None:
        gc.freeze()
        gc.enable()

    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        gc.enable()
