"""Waiting for what another process or thread does, for as long as a busy machine may need."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 900.0
"""Only what hangs takes so long: no test tells from it how fast anything is."""


def wait_for(condition: Callable[[], object], given_up: Callable[[], object] = lambda: False) -> None:
    """Look again and again until the condition holds.

    Args:
        condition: what is waited for.
        given_up: true when it cannot come any more, as when the process that is to bring it about has ended.

    Raises:
        AssertionError: if it was given up, or nothing came in so long.
    """
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert not given_up(), "what was waited for cannot come any more"
        assert time.monotonic() < until, f"nothing came in {PATIENCE_S:g} seconds"
        time.sleep(0.01)
