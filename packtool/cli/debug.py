"""``--debug`` and ``PACKTOOL_LOG_LEVEL``: show tracebacks and log what every batch holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from packtool.config.settings import FALSE_WORDS
from packtool.errors import ConfigError
from packtool.visible import show

_VARIABLE = "PACKTOOL_LOG_LEVEL"
_MS_SWIFT_VARIABLE = "SWIFT_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO")


def asks_for_debug(arguments: Sequence[str]) -> bool:
    """Whether the command line or the environment asks for it."""
    level = os.environ.get(_VARIABLE) or os.environ.get(_MS_SWIFT_VARIABLE, "")
    if level.upper() == "DEBUG":
        return True
    for at, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == "--debug":
            return (value or " ".join(arguments[at + 1 : at + 2])).lower() not in FALSE_WORDS
    return False


def show_debug(debug: bool) -> None:
    """Send what packtool's loggers say to stderr, from now on; or stop it.

    Raises:
        ConfigError: for a level that means nothing here.
    """
    level = os.environ.get(_VARIABLE, "")
    if level and level.upper() not in _LEVELS:
        raise ConfigError(f"{_VARIABLE}={level}: give {' or '.join(_LEVELS)}")
    logger = logging.getLogger("packtool")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    if debug:
        logger.addHandler(_Shown())
        logger.propagate = False


class _Shown(logging.Handler):
    """Shows what is logged on stderr, with control characters made visible."""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging``."""
        show(f"packtool: {record.getMessage()}", error=True)
