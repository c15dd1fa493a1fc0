"""Options of the library's functions: the command line's, by the same names, read and checked by the same code."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from packtool.config.settings import resolve
from packtool.errors import ConfigError, did_you_mean

T = TypeVar("T")


def settings_of(cls: type[T], options: Mapping[str, Any]) -> T:
    """The settings of a command from keyword arguments, and as there from the environment (``MAX_PIXELS``, ...).

    Args:
        cls: the command's settings.
        options: by name; None is not given, and where a path is taken, a ``Cache`` stands for its directory.

    Raises:
        ConfigError: naming every option that is wrong, or not known.
    """
    given = {name: _as_text(value) for name, value in options.items()}
    return resolve(cls, given, environ=os.environ)


def refuse_others(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise a ConfigError for options that mean nothing here, though a command may have them."""
    if others := [name for name in options if name not in known]:
        raise ConfigError.from_problems([f"{name} is no option here{did_you_mean(name, known)}" for name in others])


def _as_text(value: Any) -> Any:
    """A value with paths, and caches among them, as the texts that settings have."""
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
