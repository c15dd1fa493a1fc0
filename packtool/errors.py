"""Every error that packtool raises on purpose, and the exit code each becomes.

    PacktoolError                    1
    ├── ConfigError                  2   an option, a YAML key or an environment variable is wrong
    ├── DataError                    3   rows cannot be read, strict mode met a bad row, nothing is left
    │   ├── RowError                 3   one row, named by source and number
    │   └── MediaError               3   a picture, video or sound is gone, changed or broken since the export
    ├── MismatchError                4   a cache, a plan, a checkpoint and a run do not fit each other
    │   └── UnsupportedModelError    4   a model whose layers cannot be isolated under packing
    ├── StorageError                 5   a local or remote file system said no
    │   ├── RemoteError              5   the same of a remote one, with the kind of its refusal
    │   └── StoreDownError           5   a store gives none of the media that rows name
    ├── DivergedError                1   a loss or a gradient is infinite or not a number
    └── StoppedError                 1   a signal ended the run after a checkpoint; really 128 + the signal's number

Messages say what was wrong, where (file, row, option) and what to do about it. Anything that is not a
``PacktoolError`` is a bug and exits with 1; Ctrl-C exits with 130. A training that is told to stop by SIGTERM (143),
SIGUSR1 (138) or Ctrl-C (130) saves a checkpoint first.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_DATA = 3
EXIT_MISMATCH = 4
EXIT_STORAGE = 5
EXIT_INTERRUPTED = 130

_LEAST_LETTERS = 4  # with the dash in front: too many names begin with fewer


def most_similar(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that is spelled most like another: ``seed`` for ``sed``.

    Where none is, the shortest one that has the name as words of its own, or as how they begin: ``--expand-turns`` for
    ``--expand``.

    Args:
        likeness: from 0 to 1, how similar it must be (``difflib``).
    """
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=likeness):
        return close[0]
    begun = _words(name)
    longer = [other for other in names if len(begun) >= _LEAST_LETTERS and begun in _words(other)]
    return min(longer, key=len, default=None)


def _words(name: str) -> str:
    return "-" + name.lower().strip("-").replace("_", "-")


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The end of a message about a name that nobody knows: the most similar one that is known, if any is.

    Args:
        likeness: see ``most_similar``.
    """
    close = most_similar(name, known, likeness)
    if close is None:
        return ""
    return f"; did you mean {close if close.startswith('--') else repr(close)}?"


class PacktoolError(Exception):
    """Base of all errors that are meant to be read by a user.

    Args:
        message: what went wrong and where.
        remedy: what to do about it, printed on a line of its own.
    """

    exit_code = EXIT_UNEXPECTED

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (export's workers), where the default would lose the remedy.
        return _restore, (type(self), self.message, self.remedy, self.__dict__)


def _restore(cls: type[PacktoolError], message: str, remedy: str | None, state: dict[str, object]) -> PacktoolError:
    error = cls.__new__(cls)
    PacktoolError.__init__(error, message, remedy)
    error.__dict__.update(state)
    return error


class ConfigError(PacktoolError):
    """One or more settings are wrong; all that were found are listed at once."""

    exit_code = EXIT_USAGE

    @classmethod
    def from_problems(cls, problems: Sequence[str]) -> ConfigError:
        """Collect several mistakes into one error."""
        if len(problems) == 1:
            return cls(problems[0])
        lines = "\n".join(f"  - {problem}" for problem in problems)
        return cls(f"{len(problems)} settings are wrong:\n{lines}")


def raise_together(checks: Iterable[Callable[[], object]]) -> None:
    """Run all checks, and raise what they refuse as one error.

    Raises:
        PacktoolError: the only one; or a ConfigError, or what all of several are, that lists them.
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
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 and kinds <= {MismatchError, StorageError} else ConfigError
        raise kind(f"{len(errors)} settings are wrong:\n{lines}")


class DataError(PacktoolError):
    """The rows cannot be used."""

    exit_code = EXIT_DATA


class RowError(DataError):
    """One row cannot be used.

    Args:
        source: file the row came from.
        row: 0-based number of the row in that file.
        reason: the machine-readable reason, as in ``dropped.jsonl``.
        detail: the reason in words, for the user.
    """

    def __init__(self, source: str, row: int, reason: str, detail: str, remedy: str | None = None) -> None:
        super().__init__(f"{source}, row {row}: {reason}: {detail}", remedy)
        self.source = source
        self.row = row
        self.reason = reason
        self.detail = detail


class MediaError(DataError):
    """A picture, video or sound cannot be loaded, or is not what it was when it was measured."""


class MismatchError(PacktoolError):
    """Two things that must fit each other do not."""

    exit_code = EXIT_MISMATCH


class UnsupportedModelError(MismatchError):
    """The model cannot be trained on packed sequences without leaks."""


class StorageError(PacktoolError):
    """Reading or writing a file system failed."""

    exit_code = EXIT_STORAGE


RemoteFault = Literal["missing", "refused", "unreachable", "invalid"]


class RemoteError(StorageError):
    """A remote place did not give a file.

    Args:
        fault: ``missing``: there is no such file. ``refused``: the server answers that this file is not to be had.
            ``unreachable``: the store as a whole: no answer, broken or busy for long, or credentials that it does not
            take. ``invalid``: the address, or what lies there, is nothing that can be read.
    """

    def __init__(self, message: str, remedy: str | None = None, fault: RemoteFault = "invalid") -> None:
        super().__init__(message, remedy)
        self.fault: RemoteFault = fault


class StoreDownError(StorageError):
    """A store gives none of the media that rows name, one after the other."""

    def going_on(self, words: str) -> StoreDownError:
        """The same error, whose remedy also says how to go on."""
        return StoreDownError(self.message, f"{self.remedy} {words}")


class DivergedError(PacktoolError):
    """Training met a loss or a gradient that is infinite or not a number; the weights have not."""


class StoppedError(PacktoolError):
    """A signal ended a run, which has saved a checkpoint.

    Args:
        message: empty on all processes but the first.
        signal: its number; the exit code is 128 more.
    """

    def __init__(self, message: str, remedy: str | None = None, signal: int = 0) -> None:
        super().__init__(message, remedy)
        if signal:
            self.exit_code = 128 + signal
