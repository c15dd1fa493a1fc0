"""Waiting for what another process or thread does, for as long as a busy machine may need."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
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


def interrupt_repeatedly(endless_work: Callable[[], object]) -> None:
    """Call a function that never returns 1,000 times, and interrupt it each time after 1 to 2 milliseconds."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for i in range(1000):
        with contextlib.suppress(KeyboardInterrupt):
            # Repeated, because Python ignores exceptions in the callbacks of garbage collection.
            signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.00001 * (i % 100), 0.1)
            endless_work()
        signal.setitimer(signal.ITIMER_REAL, 0)


def check_process_ends(main: Callable[[], None]) -> None:
    """Run a function of a module in a new process; AssertionError if it fails or hangs."""
    process = multiprocessing.get_context("spawn").Process(target=main)
    process.start()
    process.join(PATIENCE_S)
    process.kill()
    assert process.exitcode == 0
