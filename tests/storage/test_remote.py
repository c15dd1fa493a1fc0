"""Waiting for the I/O thread."""

from __future__ import annotations

import asyncio
from typing import Never

from packtool.storage import remote
from tests.waiting import check_process_ends, interrupt_repeatedly


def _send_requests() -> Never:
    while True:
        remote.wait(asyncio.sleep(0))


def _interrupt_requests() -> None:
    interrupt_repeatedly(_send_requests)
    assert remote.wait(asyncio.sleep(0, "answer")) == "answer"


def test_interrupts_do_not_stop_the_io_thread() -> None:
    """The thread would wait forever for a lock that the interrupted code holds."""
    check_process_ends(_interrupt_requests)
