"""Waiting for the I/O thread."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal

from packtool.storage import remote


def _interrupt_repeatedly() -> None:
    """Interrupt the wait for requests 1,000 times; the main function of a process."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for i in range(1000):
        with contextlib.suppress(KeyboardInterrupt):
            # Repeated, because Python ignores exceptions in the callbacks of garbage collection.
            signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.00001 * (i % 100), 0.1)
            while True:
                remote.wait(asyncio.sleep(0))
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert remote.wait(asyncio.sleep(0, "answer")) == "answer"


def test_interrupts_do_not_stop_the_io_thread() -> None:
    """The thread would wait forever for a lock that the interrupted code holds."""
    process = multiprocessing.get_context("spawn").Process(target=_interrupt_repeatedly)
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0
