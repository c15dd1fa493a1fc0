"""How stores have answered lately, so that one that is down is not waited for again and again.

Only for files that rows name, of which there may be a million: the first waits as long as the options say, the next one
that fails right after it half as often, and so on, until a success. A web server that has never answered gets a quarter
of the tries. Counted by every process for itself, as connections are.
"""

from __future__ import annotations

from packtool.storage.options import options

_UNKNOWN_WEB = 2
_failures: dict[str, int] = {}
_answered: set[str] = set()


def forget_failures() -> None:
    """Every store is as good as new."""
    _failures.clear()
    _answered.clear()


def retries_for(place: str) -> int:
    """Further tries that a request to a store is worth now."""
    unknown = _UNKNOWN_WEB if place.startswith("http:") and place not in _answered else 0
    return options().retries >> min(_failures.get(place, 0) + unknown, 16)


def worked(place: str) -> None:
    """The store has answered."""
    _answered.add(place)
    _failures.pop(place, None)


def failed(place: str) -> int:
    """The store could not be reached; how often now in a row."""
    _failures[place] = _failures.get(place, 0) + 1
    return _failures[place]
