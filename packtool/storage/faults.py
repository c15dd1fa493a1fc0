"""What went wrong at a remote place: whether it may pass, and what to tell the user."""

from __future__ import annotations

import os
from typing import Any

from packtool.errors import RemoteError, RemoteFault
from packtool.storage.options import options
from packtool.storage.paths import masked, scheme_of, scrubbed

_PASSING_CODES = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "TooManyRequests", "RequestLimitExceeded"),
    *("BandwidthLimitExceeded", "RequestTimeout", "RequestTimeoutException", "InternalError", "ServiceUnavailable"),
    *("OperationAborted", "XAmzContentSHA256Mismatch", "BadDigest", "IncompleteBody"),
}
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}

_DENIED = {"AccessDenied", "AllAccessDisabled", "Forbidden", "403", "401"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "InvalidToken"}
_OLD_KEY = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "SecurityTokenExpired"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
_GONE = {"NoSuchKey", "NotFound", "404", "410"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}


class HttpStatus(Exception):
    """A web server's answer that is no success."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}".strip())
        self.status = status


def status_of(error: BaseException) -> int | None:
    """The HTTP status that a server answered with."""
    if isinstance(error, HttpStatus):
        return error.status
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return int(status) if status is not None else None
    return None


def code_of(error: BaseException) -> str:
    """S3's word for it, or the HTTP status as text, or nothing."""
    response: Any = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code or status_of(error) or "")


def is_missing(error: BaseException) -> bool:
    """Whether it says that there is no such file."""
    return code_of(error) in _GONE


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment: dropped connections, silence, busy or broken servers."""
    if status_of(error) is not None:
        return code_of(error) in _PASSING_CODES or status_of(error) in _PASSING_STATUS
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    import aiohttp
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    connection = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, ResponseParserError)
    address = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, aiohttp.TooManyRedirects)
    if isinstance(error, (*address, boto.SSLError, aiohttp.ClientSSLError)):
        return False
    return isinstance(error, (*connection, aiohttp.ClientError))


def storage_error(path: str, operation: str, error: BaseException) -> RemoteError:
    """The error for the user, without secrets.

    Args:
        path: the place.
        operation: what was being done: ``reading``.
        error: as the library raised it.
    """
    what, remedy = _explained(path, error)
    return RemoteError(f"{masked(path)}: {operation} failed: {what}", remedy, _fault(error))


def _fault(error: BaseException) -> RemoteFault:
    code, status = code_of(error), status_of(error)
    if code == "NoSuchBucket" or code in _OLD_KEY | _WRONG_KEY | _WRONG_REGION or code == "RequestTimeTooSkewed":
        return "unreachable"
    if type(error).__name__ in _NO_CREDENTIALS:
        return "unreachable"
    if code in _GONE:
        return "missing"
    if is_passing(error) or "SSL" in type(error).__name__ or "Certificate" in type(error).__name__:
        return "unreachable"
    return "refused" if status is not None and status >= 400 else "invalid"


def _explained(path: str, error: BaseException) -> tuple[str, str]:
    """The cause and the remedy, a sentence each."""
    text = scrubbed(" ".join(str(error).split()), os.environ) or type(error).__name__
    scheme, code, kind = scheme_of(path), code_of(error), type(error).__name__
    bucket = masked(path).partition("://")[2].partition("/")[0]
    keys = _key_names(scheme)
    if kind in _NO_CREDENTIALS:
        return f"no credentials ({text})", f"Set {keys} in the environment."
    if code == "NoSuchBucket":
        return f"there is no bucket {bucket}", f"Create it, or check its name and {_endpoint_name(scheme)}."
    if code in _OLD_KEY:
        return f"the credentials have expired ({code})", "Log in again, or renew the session token, and run again."
    if code in _WRONG_KEY:
        return f"the server does not accept the credentials ({code})", f"Check {keys}."
    if code == "RequestTimeTooSkewed":
        return "this machine's clock is too far from the server's", "Set the clock, for example with NTP."
    if code in _WRONG_REGION:
        return f"the bucket is in another region ({text})", f"Set {_region_name(scheme)} to the bucket's region."
    if code in _DENIED or status_of(error) in (401, 403):
        if scheme in ("http", "https"):
            return f"the server refuses ({text})", "Check the address; a signed one may have expired."
        return f"access denied ({code})", f"Let these credentials do it to bucket {bucket}, or check {keys}."
    if code in _GONE:
        return "no such file", "Check the path."
    if is_passing(error):
        tries = getattr(error, "tries", options().retries + 1)
        text = "no answer in time" if kind == "TimeoutError" else text
        return (
            f"given up after {tries} {'try' if tries == 1 else 'tries'}: {text}",
            f"Check network and {_endpoint_name(scheme)}, then run again; PACKTOOL_STORAGE_RETRIES and "
            "PACKTOOL_STORAGE_TIMEOUT make it wait longer.",
        )
    if kind == "TooManyRedirects":
        return "it redirects in a circle", "Check the address."
    return f"{kind}: {text}", f"Check the path and {_endpoint_name(scheme)}."


def _key_names(scheme: str) -> str:
    if scheme == "oss":
        return "OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET (and OSS_SESSION_TOKEN)"
    return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"


def _endpoint_name(scheme: str) -> str:
    return {"oss": "OSS_ENDPOINT", "s3": "AWS_ENDPOINT_URL"}.get(scheme, "the address")


def _region_name(scheme: str) -> str:
    return "OSS_ENDPOINT and OSS_REGION" if scheme == "oss" else "AWS_REGION"
