"""The boundary between one row and all the others: whatever a row holds, it costs that row only.

What is wrong with a row is usually foreseen and has a reason of its own. This is for the rest: an exception that
nobody thought of becomes a ``Dropped`` with the reason ``unexpected``, which names the exception and the place in
packtool's code, so that it can be counted, looked at and reported.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from packtool.errors import PacktoolError
from packtool.rows.sample import Dropped

UNEXPECTED = "unexpected"
"""The reason of rows that met something unforeseen."""

P = ParamSpec("P")
T = TypeVar("T")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The machine's trouble, which the next row would meet too.
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
# What a panic in a library written in Rust (tokenizers) arrives as: no Exception, and its class cannot be imported.
_PANIC = "PanicException"


def held(source: str, row: int, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Dropped:
    """Do something with one row; what nobody foresaw becomes ``Dropped``.

    Raises:
        PacktoolError: what was raised on purpose: a row that may not be dropped, an output that cannot be written.
        MemoryError, OSError: where the machine and not the row is at fault: no memory, no free file handle, a full
            disk.
        BaseException: Ctrl-C and its like.
    """
    try:
        return act(*args, **kwargs)
    except BaseException as error:
        return unexpected(source, row, error)


def unexpected(source: str, row: int, error: BaseException) -> Dropped:
    """The ``Dropped`` that an exception becomes.

    Raises:
        the error: if it says nothing about the row; see ``held``.
    """
    is_ordinary = isinstance(error, Exception) or type(error).__name__ == _PANIC
    if not is_ordinary or isinstance(error, (PacktoolError, MemoryError)):
        raise error
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        raise error
    return Dropped(source, row, UNEXPECTED, f"{type(error).__name__} at {_place(error)}: {error}")


def unforeseen_note(dropped: Mapping[str, int], where: str) -> str:
    """What to tell at the end about rows that met something unforeseen; "" if none did.

    Args:
        dropped: rows by reason.
        where: what lists them.
    """
    if not (count := dropped.get(UNEXPECTED, 0)):
        return ""
    rows = "1 row" if count == 1 else f"{count:,} rows"
    return (
        f"{rows} left out for something that packtool did not foresee: see the lines with "
        f'"{UNEXPECTED}" in {where}. Please report one of them; --strict stops at the first'
    )


def _place(error: BaseException) -> str:
    """File and line of packtool's code that the exception came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_PACKAGE + os.sep)]
    if not own:
        return "an unknown place"
    return f"{os.path.relpath(own[-1].filename, _PACKAGE).replace(os.sep, '/')}:{own[-1].lineno}"
