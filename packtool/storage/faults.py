"""Errors of remote requests: whether a retry may help, and the error message with cause and remedy."""

from __future__ import annotations

from typing import Any

from packtool.errors import RemoteError, RemoteFault
from packtool.storage.options import options
from packtool.storage.paths import masked, scheme_of, scrubbed

_TEMPORARY_CODES = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "TooManyRequests", "RequestLimitExceeded"),
    *("BandwidthLimitExceeded", "RequestTimeout", "RequestTimeoutException", "InternalError", "ServiceUnavailable"),
    *("OperationAborted", "XAmzContentSHA256Mismatch", "BadDigest", "IncompleteBody"),
}
_TEMPORARY_STATUS = {408, 425, 429, 500, 502, 503, 504}

_DENIED = {"AccessDenied", "AllAccessDisabled", "Forbidden", "403", "401"}
_MISSING = {"NoSuchKey", "NotFound", "404", "410"}
_Failure = tuple[tuple[str, ...], str, str]
"""Error codes or names of exceptions, cause and remedy."""
_WAIT_LONGER = (
    "Check network and {endpoint}, then run again; PACKTOOL_STORAGE_RETRIES and PACKTOOL_STORAGE_TIMEOUT make it wait "
    "longer."
)
# Failures that all requests to a bucket get.
_STORE_FAILURES: tuple[_Failure, ...] = (
    (
        ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"),
        "no credentials ({message})",
        "Set {keys} in the environment.",
    ),
    (("NoSuchBucket",), "there is no bucket {bucket}", "Create it, or check its name and {endpoint}."),
    (
        ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "SecurityTokenExpired"),
        "the credentials have expired ({code})",
        "Log in again, or renew the session token, and run again.",
    ),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "InvalidToken"),
        "the server does not accept the credentials ({code})",
        "Check {keys}.",
    ),
    (
        ("RequestTimeTooSkewed",),
        "this machine's clock is too far from the server's",
        "Set the clock, for example with NTP.",
    ),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"),
        "the bucket is in another region ({message})",
        "Set {region} to the bucket's region.",
    ),
)
_AWS_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_OSS_KEYS = "OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET (and OSS_SESSION_TOKEN)"
# By scheme: the variables to set for credentials, region and endpoint.
_VARIABLES = {
    "s3": (_AWS_KEYS, "AWS_REGION", "AWS_ENDPOINT_URL"),
    "oss": (_OSS_KEYS, "OSS_ENDPOINT and OSS_REGION", "OSS_ENDPOINT"),
    "http": (_AWS_KEYS, "AWS_REGION", "the address"),
}


class HttpStatus(Exception):
    """A web server's response with an error status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}".strip())
        self.status = status


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the server's response; None if there was no response."""
    if isinstance(error, HttpStatus):
        return error.status
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return int(status) if status is not None else None
    return None


def code_of(error: BaseException) -> str:
    """Return the error code of S3, or else the HTTP status as text, or else ""."""
    response: Any = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code or status_of(error) or "")


def is_missing(error: BaseException) -> bool:
    """Return whether the error says that the file does not exist."""
    return code_of(error) in _MISSING


def is_temporary(error: BaseException) -> bool:
    """Return whether a retry may succeed: dropped connections, timeouts, busy or broken servers."""
    if status_of(error) is not None:
        return code_of(error) in _TEMPORARY_CODES or status_of(error) in _TEMPORARY_STATUS
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
    """Return the error for a failed ``operation`` ("reading", ...), with cause and remedy and without secrets."""
    code, error_class = code_of(error), type(error).__name__
    keys, region, endpoint = _VARIABLES.get(scheme_of(path), _VARIABLES["http"])
    bucket = masked(path).partition("://")[2].partition("/")[0]
    message = scrubbed(" ".join(str(error).split())) or error_class  # on one line
    words = {"bucket": bucket, "code": code, "message": message, "keys": keys, "region": region, "endpoint": endpoint}
    failures = (*_STORE_FAILURES, _other_failure(path, error))
    names, cause, remedy = next(each for each in failures if not each[0] or code in each[0] or error_class in each[0])
    fault: RemoteFault = "unreachable" if names else _fault_of(error)
    return RemoteError(f"{masked(path)}: {operation} failed: {cause.format(**words)}", remedy.format(**words), fault)


def _fault_of(error: BaseException) -> RemoteFault:
    """Return whether the file is missing, the store could not be reached, has refused the request, or neither."""
    error_class, status = type(error).__name__, status_of(error)
    if is_missing(error) and not _is_denied(error):
        return "missing"
    if is_temporary(error) or "SSL" in error_class or "Certificate" in error_class:
        return "unreachable"
    return "refused" if status is not None and status >= 400 else "invalid"


def _is_denied(error: BaseException) -> bool:
    return code_of(error) in _DENIED or status_of(error) in (401, 403)


def _other_failure(path: str, error: BaseException) -> _Failure:
    """Return the failure of a single request, with no names."""
    if is_missing(error) and not _is_denied(error):
        return (), "no such file", "Check the path."
    if _is_denied(error) and scheme_of(path) in ("http", "https"):
        return (), "the server refuses ({message})", "Check the address; a signed one may have expired."
    if _is_denied(error):
        return (), "access denied ({code})", "Allow these credentials to access bucket {bucket}, or check {keys}."
    if is_temporary(error):
        num_tries = getattr(error, "tries", options().retries + 1)  # set by ``with_retries``
        tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
        problem = "no answer in time" if type(error).__name__ == "TimeoutError" else "{message}"
        return (), f"given up after {tries}: {problem}", _WAIT_LONGER
    if type(error).__name__ == "TooManyRedirects":
        return (), "the address redirects in a loop", "Check the address."
    return (), type(error).__name__ + ": {message}", "Check the path and {endpoint}."
