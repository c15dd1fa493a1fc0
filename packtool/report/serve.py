"""Serves pages on this machine alone: to whoever knows the token in their address."""

from __future__ import annotations

import hmac
import mimetypes
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from packtool.errors import ConfigError, PacktoolError

_HOST = "127.0.0.1"
_KINDS = {"": "text/html", ".html": "text/html", ".js": "text/javascript", ".jpg": "image/jpeg"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self'; "
    "media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@contextmanager
def serving(content: Callable[[str], bytes | None], port: int = 0) -> Iterator[str]:
    """Answer requests in the background.

    Args:
        content: a file's bytes by its name, ``index.html`` for the address itself; None where there is none. Is called
            by one thread at a time.
        port: to listen on; 0 for one that is free.

    Returns:
        the address, which ends in the token.

    Raises:
        ConfigError: if the port is taken.
    """
    token, lock = secrets.token_urlsafe(16), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, kind = self._answer()
            self.send_response(status)
            for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[HTTPStatus, bytes, str]:
            plain = "text/plain; charset=utf-8"
            # Another page's script may reach this address under a name of its own, but not under these.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            given, _, name = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
            if host not in (_HOST, "localhost") or not hmac.compare_digest(given.encode(), token.encode()):
                return HTTPStatus.FORBIDDEN, b"The address lacks its token.\n", plain
            try:
                with lock:
                    body = content(name or "index.html")
            except PacktoolError as error:
                return HTTPStatus.BAD_GATEWAY, f"{error}\n".encode(), plain
            if body is None:
                return HTTPStatus.NOT_FOUND, b"There is no such file.\n", plain
            kind = _KINDS.get(os.path.splitext(name)[1]) or mimetypes.guess_type(name)[0] or "application/octet-stream"
            return HTTPStatus.OK, body, f"{kind}; charset=utf-8" if kind.startswith("text/") else kind

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not logged: their addresses hold the token."""

    try:
        server = ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"--port {port} cannot be used: {error.strerror or error}", "0 takes a free one.") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="serve", daemon=True)
    thread.start()
    try:
        yield f"http://{_HOST}:{server.server_port}/{token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
