"""Retry and timeout options of remote storage, read from the environment when a remote path is first used.

``PACKTOOL_STORAGE_RETRIES`` and ``PACKTOOL_STORAGE_TIMEOUT`` are in docs/buckets.md; ``OSS_*`` are OSS's own variables,
and botocore reads ``AWS_*`` and ``~/.aws``. A request has ``retries + 1`` attempts with pauses of 0.25, 0.5, 1, ...
seconds, at most 20, each shortened at random by up to half. An attempt ends after ``timeout`` seconds without data, and
at the latest after ``timeout`` seconds plus one for each 128 KiB that it transfers. So every request ends.

Rows may name a million files on a server that is down: each consecutive failure of a store halves the retries for its
next file, until a request succeeds. A web server that never responded gets a quarter. Each process counts separately.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from packtool.errors import ConfigError

_MIN_BYTES_PER_S = 128 * 1024
_MAX_PAUSE_S = 20.0
_MAX_RETRIES = 100


@dataclass(frozen=True)
class StorageOptions:
    """Options of remote storage.

    Args:
        first_pause: seconds between the first attempt and the second.
        s3_endpoint: address of the S3 server if it is not Amazon's, from the variables that botocore reads.
        oss_*: address and credentials of OSS.
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
        """Read the environment variables above; raise a ConfigError if a number is invalid."""
        problems: list[str] = []
        endpoint = environ.get("OSS_ENDPOINT")
        options = cls(
            retries=int(_number_from(environ, "PACKTOOL_STORAGE_RETRIES", problems, cls.retries, 0, _MAX_RETRIES)),
            timeout=_number_from(environ, "PACKTOOL_STORAGE_TIMEOUT", problems, cls.timeout, 0.1, 3600.0),
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

    def pause_s(self, attempt: int) -> float:
        """Return the seconds to wait after failed attempt ``attempt`` (0-based), before random shortening."""
        return float(min(self.first_pause * 2.0**attempt, _MAX_PAUSE_S))

    def time_limit(self, num_bytes: int) -> float:
        """Return the seconds after which an attempt that transfers ``num_bytes`` is ended."""
        return self.timeout + num_bytes / _MIN_BYTES_PER_S


_current: StorageOptions | None = None


def options() -> StorageOptions:
    """Return the options of this process, which are read from the environment once; raise a ConfigError if invalid."""
    global _current
    if _current is None:
        _current = StorageOptions.from_environment(os.environ)
    return _current


def set_options(new: StorageOptions | None) -> None:
    """Replace the options of this process and reset the backoff of all stores; None reads the environment again."""
    global _current
    _current = new
    _failures.clear()
    _responsive.clear()


def _number_from(
    environ: Mapping[str, str], name: str, problems: list[str], default: float, low: float, high: float
) -> float:
    """Return a number from the environment, or the default; append a problem if it is not from ``low`` to ``high``."""
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        problems.append(f"environment variable {name}: {text!r} is not a number from {low:g} to {high:g}")
        return default
    return value


def _oss_region(endpoint: str | None) -> str | None:
    """Return the region for signatures: ``cn-hangzhou`` of ``https://oss-cn-hangzhou-internal.aliyuncs.com``."""
    if not endpoint:
        return None
    host = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or ""
    for part in host.split("."):
        if part.startswith("oss-") and part != "oss-accelerate":
            return part.removeprefix("oss-").removesuffix("-internal")
    return None


_UNKNOWN_WEB_SHIFT = 2  # bits by which the retries are shifted: a quarter
_failures: dict[str, int] = {}  # consecutive failures by store
_responsive: set[str] = set()  # stores that have responded


def retries_for(store: str) -> int:
    """Return the number of retries for the next file of a store."""
    shift = _UNKNOWN_WEB_SHIFT if store.startswith("http:") and store not in _responsive else 0
    return options().retries >> min(_failures.get(store, 0) + shift, 16)


def record_success(store: str) -> None:
    """Record that a store has responded."""
    _responsive.add(store)
    _failures.pop(store, None)


def record_failure(store: str) -> int:
    """Record that a store could not be reached; return the number of consecutive failures."""
    _failures[store] = _failures.get(store, 0) + 1
    return _failures[store]
