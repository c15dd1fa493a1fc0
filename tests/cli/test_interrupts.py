"""An interrupt that a library swallows is raised again at the next step."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from packtool.cli.train import repeated_interrupts
from packtool.progress import Progress, SilentProgress


@pytest.mark.parametrize(
    "tell",
    [
        lambda progress: progress.start("train", 3),
        lambda progress: progress.advance(1, loss=1.0),
        lambda progress: progress.note("a line"),
        lambda progress: progress.finish(),
    ],
)
def test_swallowed_interrupt_is_raised_again(tell: Callable[[Progress], None]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with repeated_interrupts(SilentProgress()) as progress:
        tell(progress)
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("nothing was raised")
        with pytest.raises(KeyboardInterrupt):
            tell(progress)
    assert signal.getsignal(signal.SIGINT) == before
