"""Paths of this machine and URLs: telling them apart, joining them, and showing them without the secrets they carry."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping

from packtool.errors import StorageError

REMOTE_SCHEMES = ("s3", "oss", "http", "https")
_SAME = {"s3a": "s3", "s3n": "s3"}

# Two letters at least, so that a drive is no scheme. One slash is enough: shells and path functions eat the second.
_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+):/")
# A colon before the @ that does not begin a port: user and password, whatever slashes the password has.
_USERINFO = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+:/+)(?:[^/?#@:\s]*:(?!\d+/)[^?#@\s]*|[^/?#\s]*)@")
_URL_IN_TEXT = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://[^\s'\"<>]+")
_SECRET_PAIR = re.compile(
    r"(?i)\b(x-amz-[a-z-]+|signature|sig|token|password|secret|credential|(?:oss|aws)?accesskeyid)=[^\s&'\"]+"
)
_SECRET_NAME = re.compile(r"(?i)(^|_)(secret|token|password|passwd|access_?key|api_?key)(_|$)")
_NO_SECRET_NAME = re.compile(r"(?i)_(file|uri|url|path|dir)$")
_LEAST_SECRET = 8


def scheme_of(path: str) -> str:
    """``s3``, ``https``, ...; empty for a path of this machine."""
    if ":/" not in path:  # as nearly all paths, of which there may be many thousand
        return ""
    match = _URL.match(path)
    name = match[1].lower() if match else ""
    name = _SAME.get(name, name)
    return "" if name == "file" else name


def is_remote(path: str) -> bool:
    """Whether it is a URL of another machine, which can neither be mapped into memory nor given to ``os``."""
    return scheme_of(path) != ""


def normalize(path: str) -> str:
    """The path as all functions here understand it: ``s3:/bucket/x`` becomes ``s3://bucket/x``, ``file:///x`` ``/x``.

    Raises:
        StorageError: if it is a URL of a kind that is not known, or names no bucket or host.
    """
    match = _URL.match(path) if ":/" in path else None
    if match is None:
        return path
    rest = path[match.end() :]
    if match[1].lower() == "file":
        host, slash, tail = rest[1:].partition("/") if rest.startswith("/") else ("", "/", rest)
        if host not in ("", "localhost"):
            raise StorageError(
                f"{masked(path)}: a file:// path of another machine, {host}", "Mount it, or copy it here."
            )
        return slash + tail.lstrip("/")
    scheme = scheme_of(path)
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{name}://" for name in REMOTE_SCHEMES)
        raise StorageError(
            f"{masked(path)}: {match[1]}:// is none of the places that can be reached: {known}, this machine's paths",
            "Copy the data here first, or mount the bucket.",
        )
    rest = rest.lstrip("/")
    if not rest:
        raise StorageError(f"{path}: names no {'host' if scheme in ('http', 'https') else 'bucket'}")
    return f"{scheme}://{rest}"


def join(base: str, *names: str) -> str:
    """``os.path.join`` that also knows URLs: an absolute name, or a URL, stands for itself."""
    path = base
    for name in names:
        if is_remote(name) or os.path.isabs(name):
            path = name
        elif is_remote(path):
            path = _join_remote(normalize(path), name)
        else:
            path = os.path.join(path, name)
    return path


def _join_remote(base: str, name: str) -> str:
    head, mark, query = base.partition("?") if base.startswith("http") else (base, "", "")
    scheme, _, place = head.partition("://")
    bucket, _, key = place.partition("/")
    joined = f"{key.rstrip('/')}/{name}" if key else name
    if any(part in (".", "..") for part in joined.split("/")):
        # Resolved here, since no object store does it; never above the bucket.
        joined = posixpath.normpath("/" + joined).lstrip("/")
    return f"{scheme}://{bucket}/{joined.lstrip('/')}{mark}{query}"


def parent(path: str) -> str:
    """The directory that holds it, without a query; the bucket or host has no parent but itself."""
    if not is_remote(path):
        return os.path.dirname(path)
    scheme, _, place = _without_query(normalize(path)).partition("://")
    head, slash, _ = place.rstrip("/").rpartition("/")
    return f"{scheme}://{head if slash else place.rstrip('/')}"


def name(path: str) -> str:
    """Its last part, without a query: what a file's kind is told from."""
    if not is_remote(path):
        return path.rstrip("/").rpartition("/")[2]
    return _without_query(normalize(path)).rstrip("/").rpartition("/")[2]


def origin(path: str) -> str:
    """Scheme and server or bucket of a URL, for messages: ``https://host:8443``, ``s3://bucket``."""
    scheme, _, rest = masked(normalize(path)).partition("://")
    return f"{scheme}://{re.split(r'[/?#]', rest, maxsplit=1)[0]}"


def _without_query(url: str) -> str:
    return re.split(r"[?#]", url, maxsplit=1)[0] if url.startswith("http") else url


def absolute(path: str) -> str:
    """The path as it is called from any folder of this machine; a URL stays as it is."""
    return path if os.path.isabs(path) or is_remote(path) else os.path.abspath(normalize(path))


def masked(path: str) -> str:
    """The path as it may be shown and stored: without user, password and query, which may hold a signature."""
    if path.startswith("data:"):
        return f"{path[:32].partition(',')[0]},... ({len(path)} characters)"
    if ":/" not in path or not _URL.match(path):
        return path
    path = _USERINFO.sub(r"\1***@", path)
    return re.sub(r"\?[^#]*", "?***", path, count=1)


def scrubbed(text: str, environ: Mapping[str, str]) -> str:
    """A message of somebody else's without URLs' secrets and without the values of secret environment variables."""
    text = _URL_IN_TEXT.sub(lambda match: masked(match[0]), text)
    text = _SECRET_PAIR.sub(r"\1=***", text)
    for key, value in environ.items():
        if len(value) >= _LEAST_SECRET and _SECRET_NAME.search(key) and not _NO_SECRET_NAME.search(key):
            text = text.replace(value, "***")
    return text
