"""``oss://`` as OSS wants it, to a real S3 server behind names that resolve to this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from packtool import storage
from packtool.errors import StorageError
from tests.s3_server import Proxy, S3Server

HOST = "oss-cn-test-internal.example.com"


@pytest.fixture
def proxy(bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    resolve = socket.getaddrinfo

    def resolve_here(host: Any, *args: Any, **more: Any) -> Any:
        here = isinstance(host, str) and host.endswith(HOST)
        return resolve("127.0.0.1" if here else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with Proxy(s3_server.port) as proxy:
        monkeypatch.setenv("OSS_ENDPOINT", f"http://{HOST}:{proxy.url.rpartition(':')[2]}")
        monkeypatch.setenv("OSS_ACCESS_KEY_ID", "the-oss-key-id")
        monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "the-oss-key-secret")
        monkeypatch.setenv("OSS_SESSION_TOKEN", "the-oss-token")
        storage.configure(None)
        yield proxy


def test_requests_have_the_form_of_oss(bucket: str, proxy: Proxy) -> None:
    base = bucket.replace("s3://", "oss:/")  # as shells leave it
    data = bytes(range(256)) * 2**16
    file = storage.AtomicFile(storage.join(base, "big"))
    file.write(data)
    file.commit()
    storage.publish(storage.join(base, "dir", "small"), b"x")
    assert storage.read_bytes(storage.join(base, "big")) == data
    assert storage.list_names(base) == ["big", "dir"]
    assert storage.stat(storage.join(base, "big")).size == len(data)
    storage.remove(storage.join(base, "dir"))
    assert list(storage.walk(base)) == [f"oss://{bucket[5:]}/big"]
    for head in proxy.heads:
        low = head.lower()
        assert f"\r\nhost: {bucket[5:]}.{HOST}" in low  # virtual-host style
        assert "/cn-test/s3/aws4_request" in low  # signed for the endpoint's region
        assert "x-amz-security-token: the-oss-token" in low
        for refused in ("aws-chunked", "x-amz-trailer", "x-amz-checksum", "x-amz-sdk-checksum", "?delete"):
            assert refused not in low


def test_missing_oss_variables_are_named(bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bucket.replace("s3", "oss") + "/x"
    monkeypatch.delenv("OSS_ACCESS_KEY_SECRET")
    storage.configure(None)
    with pytest.raises(StorageError, match="OSS_ACCESS_KEY_SECRET"):
        storage.exists(path)
    monkeypatch.delenv("OSS_ENDPOINT")
    storage.configure(None)
    with pytest.raises(StorageError, match="OSS_ENDPOINT is not set"):
        storage.exists(path)


def test_secrets_are_not_shown(bucket: str, proxy: Proxy) -> None:
    proxy.share, proxy.faults = 1.0, ("403 SignatureDoesNotMatch",)
    with pytest.raises(StorageError, match="OSS_ACCESS_KEY_SECRET") as exc_info:
        storage.read_bytes(bucket.replace("s3", "oss") + "/x")
    assert "the-oss" not in str(exc_info.value)
