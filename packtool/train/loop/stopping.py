"""SIGTERM, SIGUSR1 and Ctrl-C: the step is finished, a checkpoint is saved, and the exit code says which it was.

    scheduler ──► launcher ──► every rank     or to one rank alone
                                 │ notes it, works on
              before each update │ all ranks take the largest of what was noted
      with the next log line, or │
          before the next update │ they read it: they agree on the step
                                 ▼
              update, checkpoint, 128 + signal

A second Ctrl-C ends at once. A second SIGTERM does not: schedulers send it to launchers and ranks alike.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Ctrl-C may come to this process and, through its launcher, once more; a person is slower.
_SAME_KEY_SECONDS = 0.5


class StopSignals:
    """Notes the signals that ask for an end; inside ``with``, and in the main thread only.

    Args:
        launched: whether a launcher ends all other processes when the first one ends; they then leave in peace.

    Attributes:
        received: number of the first signal, 0 for none.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.received = 0
        self._launched = launched
        self._process = os.getpid()
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            ends = bool(self.received) and self._launched and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ends else before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._in_child(number)
            return
        now = time.monotonic()
        if not self.received:
            self.received, self._at = number, now
        elif number == signal.SIGINT and now - self._at > _SAME_KEY_SECONDS:
            before = self._before[signal.SIGINT]
            if callable(before):
                before(number, frame)
            raise KeyboardInterrupt

    def _in_child(self, number: int) -> None:
        """Take a signal in a process that was forked off: what goes to all of a job is for the one that trains.

        Those that load pictures have begun to look after themselves (``packtool.batch.worker``).
        """
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
