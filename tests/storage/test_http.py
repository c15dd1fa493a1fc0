"""Files on web servers, signed addresses among them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from packtool import storage
from packtool.errors import StorageError
from tests.s3_server import Proxy, S3Server

DATA = random.Random(0).randbytes(5_000_000)


@pytest.fixture
def signed_url(bucket: str, s3_server: S3Server) -> str:
    """A signed address of an object that holds DATA."""
    storage.publish(f"{bucket}/a b+ü.bin", DATA)
    location = {"Bucket": bucket.removeprefix("s3://"), "Key": "a b+ü.bin"}
    return str(s3_server.client().generate_presigned_url("get_object", Params=location))


@pytest.fixture
def plain_server(tmp_path: Path) -> Iterator[str]:
    """A web server that knows no ranges."""
    (tmp_path / "x y.bin").write_bytes(DATA)
    (tmp_path / "empty").write_bytes(b"")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_signed_address_is_read_by_ranges(signed_url: str) -> None:
    assert storage.exists(signed_url)
    state = storage.stat(signed_url)
    assert state.size == len(DATA)
    assert state.modified
    with storage.open_read(signed_url, storage.HEADER_BLOCK) as file:
        assert file.read(100) == DATA[:100]
        file.seek(-100, 2)
        assert file.read() == DATA[-100:]
    assert storage.read_bytes(signed_url) == DATA


def test_broken_connections_are_repaired(signed_url: str, through_proxy: Callable[..., Proxy]) -> None:
    proxy = through_proxy(timeout=1.0, share=0.4, seed=3)
    address = urlsplit(signed_url)
    path = f"{proxy.url}{address.path}?{address.query}"
    assert storage.read_bytes(path) == DATA
    assert [storage.stat(path).size for _ in range(8)] == [len(DATA)] * 8
    assert sum(proxy.counts.values()) - proxy.counts["requests"] > 2


def test_signatures_are_not_shown(signed_url: str, through_proxy: Callable[..., Proxy]) -> None:
    proxy = through_proxy(retries=0, share=1.0, faults=("403 AccessDenied", "500 InternalError", "drop answer"))
    address = urlsplit(signed_url)
    path = f"{proxy.url}{address.path}?{address.query}"
    for message in ("the server refuses", "given up after 1 try", "given up after 1 try"):
        with pytest.raises(StorageError, match=message) as exc_info:
            storage.read_bytes(path)
        assert f"{proxy.url}{address.path}?***" in str(exc_info.value)
        assert "Signature" not in str(exc_info.value)


def test_servers_without_ranges(plain_server: str) -> None:
    path = f"{plain_server}/x y.bin"
    assert storage.stat(path).size == len(DATA)
    with storage.open_read(path) as file:
        file.seek(1000)
        assert file.read(10) == DATA[1000:1010]
        file.seek(0)
        assert file.read() == DATA
    assert storage.read_bytes(f"{plain_server}/empty") == b""
    assert storage.stat(f"{plain_server}/empty").size == 0


def test_unsupported_operations_on_web_addresses_are_errors(plain_server: str) -> None:
    assert not storage.exists(f"{plain_server}/gone")
    with pytest.raises(StorageError, match="no such file"):
        storage.read_bytes(f"{plain_server}/gone")
    for act in (storage.make_directory, storage.remove, storage.AtomicFile, lambda path: storage.publish(path, b"")):
        with pytest.raises(StorageError, match="can only be read"):
            act(f"{plain_server}/x")
    with pytest.raises(StorageError, match="cannot list files"):
        storage.list_names(plain_server)
    assert storage.glob(f"{plain_server}/x?y=*") == [f"{plain_server}/x?y=*"]
