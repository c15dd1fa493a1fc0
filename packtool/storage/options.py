"""How patient the storage is, and where OSS is: read from the environment once, when a remote place is first used.

    PACKTOOL_STORAGE_RETRIES   how often a request that failed for a passing reason is sent again
    PACKTOOL_STORAGE_TIMEOUT   seconds without a byte after which a connection is given up
    OSS_ENDPOINT, OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET, OSS_SESSION_TOKEN, OSS_REGION

S3's own (``AWS_*`` and the profiles in ``~/.aws``) are read by botocore.

A request is tried ``retries + 1`` times. Between two tries it waits 0.25, 0.5, 1, ... seconds, at most 20 and with some
chance in it. A try ends after ``timeout`` seconds of silence, and in any case after ``timeout`` seconds and one more
for each 128 KiB that it moves. So nothing waits for ever, and the defaults outlive an outage of half a minute.

How stores have answered lately, so that one that is down is not waited for again and again.

Only for files that rows name, of which there may be a million: the first waits as long as the options say, the next one
that fails right after it half as often, and so on, until a success. A web server that has never answered gets a quarter
of the tries. Counted by every process for itself, as connections are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from packtool.errors import ConfigError

_SLOWEST_BYTES_PER_S = 128 * 1024
_LONGEST_PAUSE_S = 20.0
_MOST_RETRIES = 100


@dataclass(frozen=True)
class StorageOptions:
    """Settings of remote places.

    Args:
        retries: further tries of a request after the first.
        timeout: seconds without a byte.
        first_pause: seconds between the first try and the second.
        s3_endpoint: of S3 if it is not Amazon's, as botocore will take it from the environment.
        oss_*: place and credentials of OSS.
    """

    retries: int = 8
    timeout: float = 30.0
    first_pause: float = 0.25
    s3_endpoint: str | None = None
    oss_endpoint: str | None = None
    oss_access_key_id: str | None = field(default=None, repr=False)
    oss_access_key_secret: str | None = field(default=None, repr=False)
    oss_session_token: str | None = field(default=None, repr=False)
    oss_region: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> StorageOptions:
        """Read the variables above.

        Raises:
            ConfigError: if one is no number.
        """
        problems: list[str] = []
        endpoint = environ.get("OSS_ENDPOINT")
        options = cls(
            retries=int(_number(environ, "PACKTOOL_STORAGE_RETRIES", cls.retries, 0, _MOST_RETRIES, problems)),
            timeout=_number(environ, "PACKTOOL_STORAGE_TIMEOUT", cls.timeout, 0.1, 3600.0, problems),
            s3_endpoint=environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None,
            oss_endpoint=endpoint if not endpoint or "://" in endpoint else f"https://{endpoint}",
            oss_access_key_id=environ.get("OSS_ACCESS_KEY_ID"),
            oss_access_key_secret=environ.get("OSS_ACCESS_KEY_SECRET"),
            oss_session_token=environ.get("OSS_SESSION_TOKEN"),
            oss_region=environ.get("OSS_REGION") or _oss_region(endpoint),
        )
        if problems:
            raise ConfigError.from_problems(problems)
        return options

    def pause(self, attempt: int) -> float:
        """Seconds to wait after the failed try ``attempt`` (0-based), before chance shortens them."""
        return float(min(self.first_pause * 2.0**attempt, _LONGEST_PAUSE_S))

    def limit(self, num_bytes: int) -> float:
        """Seconds that one try may take that moves so many bytes."""
        return self.timeout + num_bytes / _SLOWEST_BYTES_PER_S


_current: StorageOptions | None = None


def options() -> StorageOptions:
    """The settings of this process, read once.

    Raises:
        ConfigError: if the environment is wrong.
    """
    global _current
    if _current is None:
        _current = StorageOptions.from_environment(os.environ)
    return _current


def set_options(new: StorageOptions | None) -> None:
    """Use others; None reads the environment again."""
    global _current
    _current = new


def _number(
    environ: Mapping[str, str], name: str, default: float, low: float, high: float, problems: list[str]
) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        problems.append(f"environment variable {name}: {text!r} is no number from {low:g} to {high:g}")
        return default
    return value


def _oss_region(endpoint: str | None) -> str | None:
    """``cn-hangzhou`` of ``https://oss-cn-hangzhou-internal.aliyuncs.com``: what signatures are made for."""
    if not endpoint:
        return None
    host = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or ""
    for part in host.split("."):
        if part.startswith("oss-") and part != "oss-accelerate":
            return part.removeprefix("oss-").removesuffix("-internal")
    return None


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
