"""Local paths and URLs: classify and join them, and remove secrets before they are shown."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping

from packtool.errors import StorageError

REMOTE_SCHEMES = ("s3", "oss", "http", "https")
_SCHEME_ALIASES = {"s3a": "s3", "s3n": "s3"}

# Two letters at least, so that a Windows drive is no scheme. One slash is enough: path functions drop the second.
_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+):/")
# User and password: a colon before the @ that does not begin a port; the password may have slashes.
_USERINFO = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+:/+)(?:[^/?#@:\s]*:(?!\d+/)[^?#@\s]*|[^/?#\s]*)@")
_URL_IN_TEXT = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://[^\s'\"<>]+")
_SECRET_PAIR = re.compile(
    r"(?i)\b(x-amz-[a-z-]+|signature|sig|token|password|secret|credential|(?:oss|aws)?accesskeyid)=[^\s&'\"]+"
)
_SECRET_NAME = re.compile(r"(?i)(^|_)(secret|token|password|passwd|access_?key|api_?key)(_|$)")
_NOT_SECRET_NAME = re.compile(r"(?i)_(file|uri|url|path|dir)$")
_MIN_SECRET_LENGTH = 8


def scheme_of(path: str) -> str:
    """Return the scheme of a path: ``s3``, ``https``, ...; "" for a local path."""
    if ":/" not in path:  # fast path: there may be many thousand local paths
        return ""
    match = _URL.match(path)
    name = match[1].lower() if match else ""
    name = _SCHEME_ALIASES.get(name, name)
    return "" if name == "file" else name


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of another machine, which functions of ``os`` and memory maps cannot use."""
    return scheme_of(path) != ""


def normalize(path: str) -> str:
    """Return the canonical form of a path: ``s3:/bucket/x`` becomes ``s3://bucket/x``, ``file:///x`` becomes ``/x``."""
    match = _URL.match(path) if ":/" in path else None
    if match is None:
        return path
    scheme = scheme_of(path)
    if not scheme:  # file:
        return _path_of_file_url(path, after_slash=path[match.end() :])
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{name}://" for name in REMOTE_SCHEMES)
        message = f"{masked(path)}: unknown scheme {match[1]}://; supported are {known} and local paths"
        raise StorageError(message, "Copy the data here first, or mount the bucket.")
    host_and_path = path[match.end() :].lstrip("/")
    if not host_and_path:
        raise StorageError(f"{path}: the URL names no {'host' if scheme in ('http', 'https') else 'bucket'}")
    return f"{scheme}://{host_and_path}"


def _path_of_file_url(url: str, after_slash: str) -> str:
    """Return the local path of a ``file:`` URL, of which ``after_slash`` follows ``file:/``."""
    if not after_slash.startswith("/"):  # file:/PATH
        return "/" + after_slash.lstrip("/")
    host, slash, local_path = after_slash[1:].partition("/")  # file://HOST/PATH, where the host may be empty
    if host not in ("", "localhost"):
        raise StorageError(f"{masked(url)}: a file:// path on another machine, {host}", "Mount it, or copy it here.")
    return slash + local_path.lstrip("/")


def join(base: str, *names: str) -> str:
    """Join like ``os.path.join``, also below URLs; an absolute name or a URL replaces what comes before it."""
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
    scheme, _, rest = head.partition("://")
    bucket, _, key = rest.partition("/")
    joined = f"{key.rstrip('/')}/{name}" if key else name
    if any(part in (".", "..") for part in joined.split("/")):
        # Object stores do not resolve dots; the result never leaves the bucket.
        joined = posixpath.normpath("/" + joined).lstrip("/")
    return f"{scheme}://{bucket}/{joined.lstrip('/')}{mark}{query}"


def parent(path: str) -> str:
    """Return the directory of a path, without a query; a bucket or host is its own parent."""
    if not is_remote(path):
        return os.path.dirname(path)
    scheme, _, rest = _without_query(normalize(path)).partition("://")
    head, slash, _ = rest.rstrip("/").rpartition("/")
    return f"{scheme}://{head if slash else rest.rstrip('/')}"


def name(path: str) -> str:
    """Return the last part of a path, without a query."""
    path = _without_query(normalize(path)) if is_remote(path) else path
    return path.rstrip("/").rpartition("/")[2]


def origin(path: str) -> str:
    """Return scheme and server or bucket of a URL, for messages: ``https://host:8443``, ``s3://bucket``."""
    scheme, _, rest = masked(normalize(path)).partition("://")
    return f"{scheme}://{re.split(r'[/?#]', rest, maxsplit=1)[0]}"


def _without_query(url: str) -> str:
    return re.split(r"[?#]", url, maxsplit=1)[0] if url.startswith("http") else url


def absolute(path: str) -> str:
    """Return a local path as an absolute path, a URL unchanged."""
    return path if os.path.isabs(path) or is_remote(path) else os.path.abspath(normalize(path))


def masked(path: str) -> str:
    """Return a path without user, password and query (which may be a signature), so that it may be shown or stored."""
    if path.startswith("data:"):
        return f"{path[:32].partition(',')[0]},... ({len(path)} characters)"
    if ":/" not in path or not _URL.match(path):
        return path
    path = _USERINFO.sub(r"\1***@", path)
    return re.sub(r"\?[^#]*", "?***", path, count=1)


def scrubbed(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Remove secrets of URLs and the values of secret environment variables from a library's message."""
    text = _URL_IN_TEXT.sub(lambda match: masked(match[0]), text)
    text = _SECRET_PAIR.sub(r"\1=***", text)
    for key, value in environ.items():
        if len(value) >= _MIN_SECRET_LENGTH and _SECRET_NAME.search(key) and not _NOT_SECRET_NAME.search(key):
            text = text.replace(value, "***")
    return text
