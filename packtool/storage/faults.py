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
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "InvalidToken"}
_EXPIRED_KEY = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "SecurityTokenExpired"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}
_MISSING = {"NoSuchKey", "NotFound", "404", "410"}
_AWS_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_OSS_KEYS = "OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET (and OSS_SESSION_TOKEN)"
# By scheme: the variables to set for credentials, region and endpoint.
_VARIABLES = {
    "s3": (_AWS_KEYS, "AWS_REGION", "AWS_ENDPOINT_URL"),
    "oss": (_OSS_KEYS, "OSS_ENDPOINT and OSS_REGION", "OSS_ENDPOINT"),
    "http": (_AWS_KEYS, "AWS_REGION", "the address"),
}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}


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
    cause, remedy, fault = _explain(path, error)
    return RemoteError(f"{masked(path)}: {operation} failed: {cause}", remedy, fault)


def _explain(path: str, error: BaseException) -> tuple[str, str, RemoteFault]:
    """Return the cause, the remedy and the fault (as in ``RemoteError``) of a failed request, without secrets."""
    store_problem = _explain_store_failure(path, error)
    if store_problem is not None:
        cause, remedy = store_problem
        return cause, remedy, "unreachable"
    if code_of(error) in _MISSING and not _is_denied(error):
        return "no such file", "Check the path.", "missing"
    cause, remedy = _explain_request(path, error)
    return cause, remedy, _fault_of(error)


def _is_denied(error: BaseException) -> bool:
    return code_of(error) in _DENIED or status_of(error) in (401, 403)


def _explain_request(path: str, error: BaseException) -> tuple[str, str]:
    """Return the cause and the remedy of an error of a single request."""
    keys, _, endpoint = _variables_of(path)
    if _is_denied(error):
        if scheme_of(path) in ("http", "https"):
            return f"the server refuses ({_message(error)})", "Check the address; a signed one may have expired."
        remedy = f"Allow these credentials to access bucket {_bucket_of(path)}, or check {keys}."
        return f"access denied ({code_of(error)})", remedy
    if is_temporary(error):
        remedy = f"Check network and {endpoint}, then run again; PACKTOOL_STORAGE_RETRIES and "
        remedy += "PACKTOOL_STORAGE_TIMEOUT make it wait longer."
        return _describe_attempts(error), remedy
    error_class = type(error).__name__
    if error_class == "TooManyRedirects":
        return "the address redirects in a loop", "Check the address."
    return f"{error_class}: {_message(error)}", f"Check the path and {endpoint}."


def _fault_of(error: BaseException) -> RemoteFault:
    """Return whether the store could not be reached, has refused the request, or neither."""
    error_class = type(error).__name__
    if is_temporary(error) or "SSL" in error_class or "Certificate" in error_class:
        return "unreachable"
    status = status_of(error)
    return "refused" if status is not None and status >= 400 else "invalid"


def _explain_store_failure(path: str, error: BaseException) -> tuple[str, str] | None:
    """Return the cause and the remedy of an error that all requests to a bucket get; None for other errors."""
    code = code_of(error)
    keys, region, endpoint = _variables_of(path)
    if type(error).__name__ in _NO_CREDENTIALS:
        return f"no credentials ({_message(error)})", f"Set {keys} in the environment."
    if code == "NoSuchBucket":
        return f"there is no bucket {_bucket_of(path)}", f"Create it, or check its name and {endpoint}."
    if code in _EXPIRED_KEY:
        return f"the credentials have expired ({code})", "Log in again, or renew the session token, and run again."
    if code in _WRONG_KEY:
        return f"the server does not accept the credentials ({code})", f"Check {keys}."
    if code == "RequestTimeTooSkewed":
        return "this machine's clock is too far from the server's", "Set the clock, for example with NTP."
    if code in _WRONG_REGION:
        return f"the bucket is in another region ({_message(error)})", f"Set {region} to the bucket's region."
    return None


def _describe_attempts(error: BaseException) -> str:
    """Describe a temporary error that remained after all attempts."""
    num_tries = getattr(error, "tries", options().retries + 1)  # set by ``with_retries``
    tries = "1 try" if num_tries == 1 else f"{num_tries} tries"
    problem = "no answer in time" if type(error).__name__ == "TimeoutError" else _message(error)
    return f"given up after {tries}: {problem}"


def _message(error: BaseException) -> str:
    """Return an error's message on one line and without secrets; the name of its class if it has no message."""
    return scrubbed(" ".join(str(error).split())) or type(error).__name__


def _bucket_of(path: str) -> str:
    return masked(path).partition("://")[2].partition("/")[0]


def _variables_of(path: str) -> tuple[str, str, str]:
    """Return the variables to set for the credentials, region and endpoint of a path's store."""
    return _VARIABLES.get(scheme_of(path), _VARIABLES["http"])
