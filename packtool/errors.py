"""Every error that packtool raises on purpose, and the exit code each becomes.

    PacktoolError                    1
    ├── ConfigError                  2   an option, a YAML key or an environment variable is wrong
    ├── DataError                    3   rows cannot be read, strict mode met a bad row, nothing is left
    │   ├── RowError                 3   one row, named by source and number
    │   └── MediaError               3   an image, video or audio is missing, changed or broken since the export
    ├── MismatchError                4   a cache, a plan, a checkpoint and a run do not match
    │   └── UnsupportedModelError    4   a model whose layers cannot be isolated under packing
    ├── StorageError                 5   reading or writing files failed, locally or remotely
    │   ├── RemoteError              5   the same for remote files, with the kind of failure
    │   └── StoreDownError           5   a store provides none of the media that rows reference
    ├── DivergedError                1   a loss or a gradient is not finite
    └── StoppedError                 1   a signal ended the run after a checkpoint; in fact 128 + the signal's number

Messages say what was wrong, where (file, row, option) and how to fix it. Any exception that is not a ``PacktoolError``
is a bug and exits with 1; Ctrl-C exits with 130. Training that is stopped by SIGTERM (143), SIGUSR1 (138) or Ctrl-C
(130) saves a checkpoint first.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from packtool.config.codes import SEVERAL_PROBLEMS, code_of_error, reason_codes

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_DATA = 3
EXIT_MISMATCH = 4
EXIT_STORAGE = 5
EXIT_INTERRUPTED = 130

_MIN_PREFIX = 4  # letters including the dash in front: too many names begin with fewer


def most_similar(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name with the most similar spelling, such as ``seed`` for ``sed``; ``likeness`` is the minimum, 0 to 1.

    If none is similar, the shortest known name with a word that begins with it: ``--expand-turns`` for ``--expand``.
    """
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=likeness):
        return close[0]
    prefix = _words(name)
    longer = [other for other in names if len(prefix) >= _MIN_PREFIX and prefix in _words(other)]
    return min(longer, key=len, default=None)


def _words(name: str) -> str:
    return "-" + name.lower().strip("-").replace("_", "-")


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The end of a message about an unknown name: ``; did you mean 'seed'?``, or "" without a similar name."""
    close = most_similar(name, known, likeness)
    if close is None:
        return ""
    return f"; did you mean {close if close.startswith('--') else repr(close)}?"


class PacktoolError(Exception):
    """Base of all errors that are meant for users.

    Args:
        message: what went wrong and where.
        remedy: how to fix it, printed on a line of its own.
        code: a code of ``config/codes.tsv``; by default, that of errors of this class from the module that raises it.
    """

    exit_code = EXIT_UNEXPECTED

    def __init__(self, message: str, remedy: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code or code_of_error(tuple(cls.__name__ for cls in type(self).__mro__), _raising_module())

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message

    def with_code(self) -> str:
        """Return the text with the code at the end of its first line."""
        first_line, newline, rest = str(self).partition("\n")
        return f"{first_line} [{self.code}]{newline}{rest}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes (export's workers), where the default would lose the remedy.
        return _restore, (type(self), self.message, self.remedy, self.__dict__)


def _raising_module() -> str:
    """Return the module that makes an error, such as ``cache.index``: the first caller outside this module."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"] == __name__:
        frame = frame.f_back
    return str(frame.f_globals["__name__"]).removeprefix("packtool.")


def _restore(cls: type[PacktoolError], message: str, remedy: str | None, state: dict[str, object]) -> PacktoolError:
    error = cls.__new__(cls)
    PacktoolError.__init__(error, message, remedy)
    error.__dict__.update(state)
    return error


class ConfigError(PacktoolError):
    """One or more settings are wrong; all of them are listed at once."""

    exit_code = EXIT_USAGE

    @classmethod
    def from_problems(cls, problems: Sequence[str], code: str | None = None) -> ConfigError:
        """Combine several messages into one error."""
        if len(problems) == 1:
            return cls(problems[0], code=code)
        lines = "\n".join(f"  - {problem}" for problem in problems)
        return cls(f"{len(problems)} settings are wrong:\n{lines}", code=code)


def raise_together(checks: Iterable[Callable[[], object]]) -> None:
    """Run all checks, and raise their errors as one.

    Several MismatchErrors become a MismatchError, several StorageErrors a StorageError, all others a ConfigError.
    """
    errors = []
    for check in checks:
        try:
            check()
        except PacktoolError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "\n".join("  - " + str(error).replace("\n", "\n    ") for error in errors)
        first, kinds, codes = errors[0], {type(error) for error in errors}, {error.code for error in errors}
        kind = type(first) if kinds in ({MismatchError}, {StorageError}) else ConfigError
        code = first.code if len(codes) == 1 else SEVERAL_PROBLEMS
        raise kind(f"{len(errors)} settings are wrong:\n{lines}", code=code)


class DataError(PacktoolError):
    """The rows cannot be used."""

    exit_code = EXIT_DATA


class RowError(DataError):
    """One row cannot be used.

    Args:
        row: 0-based number in the file ``source``.
        reason: the machine-readable reason, as in ``dropped.jsonl``; ``detail`` is the reason in words.
    """

    def __init__(self, source: str, row: int, reason: str, detail: str, remedy: str | None = None) -> None:
        known = reason_codes().get(reason)
        super().__init__(f"{source}, row {row}: {reason}: {detail}", remedy, None if known is None else known.code)
        self.source = source
        self.row = row
        self.reason = reason
        self.detail = detail


class MediaError(DataError):
    """An image, video or audio cannot be loaded, or has changed since it was measured."""


class MismatchError(PacktoolError):
    """Two things that must match do not."""

    exit_code = EXIT_MISMATCH


class UnsupportedModelError(MismatchError):
    """The model cannot be trained on packed sequences without leaks."""


class StorageError(PacktoolError):
    """Reading or writing a file system failed."""

    exit_code = EXIT_STORAGE


RemoteFault = Literal["missing", "refused", "unreachable", "invalid"]


class RemoteError(StorageError):
    """A remote file cannot be read or written.

    Args:
        fault: ``missing``: there is no such file. ``refused``: the server denies access to this file. ``unreachable``:
            the whole store does not answer, is broken or busy for long, or rejects the credentials. ``invalid``: the
            address or the file is not readable.
    """

    def __init__(self, message: str, remedy: str | None = None, fault: RemoteFault = "invalid") -> None:
        super().__init__(message, remedy)
        self.fault: RemoteFault = fault


class StoreDownError(StorageError):
    """A store provides none of the media that rows reference."""

    def with_resume_advice(self, words: str) -> StoreDownError:
        """The same error, whose remedy also says how to resume."""
        return StoreDownError(self.message, f"{self.remedy} {words}")


class DivergedError(PacktoolError):
    """A loss or a gradient of a training step is not finite; the weights are."""


class StoppedError(PacktoolError):
    """A signal ended a run after it saved a checkpoint; the exit code is 128 + its number.

    ``message`` is empty on all processes except the first.
    """

    def __init__(self, message: str, remedy: str | None = None, signal: int = 0) -> None:
        super().__init__(message, remedy)
        if signal:
            self.exit_code = 128 + signal
            self.code = f"E{self.exit_code}"
