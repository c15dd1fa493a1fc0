"""torchrun, ending with the exit code of the process that failed first, and without a traceback of its own.

``python -m packtool.train.elastic`` takes what ``python -m torch.distributed.run`` takes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from packtool.errors import EXIT_UNEXPECTED

_SIGNAL_BASE = 128


def run(arguments: Sequence[str]) -> int:
    """Run torchrun to its end.

    Returns:
        0, the code of the first process that failed (128 + n for one that signal n ended), or 128 + n if signal n came.
    """
    # The failed process has said what was wrong; torchrun would add a table and a stack of its own.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(list(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = int(failure.exitcode)
        return _SIGNAL_BASE - code if code < 0 else code or EXIT_UNEXPECTED
    except SignalException as error:
        return _SIGNAL_BASE + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
