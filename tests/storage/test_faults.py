"""Requests that fail, through a proxy that breaks them on purpose: what may pass is repaired, the rest is told."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from packtool import storage
from packtool.errors import StorageError
from tests.s3_server import FAULTS, Proxy, S3Server

Through = Callable[..., Proxy]
PART = 8 * 2**20


def _uploads(server: S3Server, bucket: str) -> list[object]:
    return server.client().list_multipart_uploads(Bucket=bucket.removeprefix("s3://")).get("Uploads", [])


def _write(path: str, data: bytes) -> None:
    file = storage.AtomicFile(path)
    view = memoryview(data)
    for i in range(0, len(data), 1_000_000):
        file.write(view[i : i + 1_000_000])
    file.commit()


def test_everything_completes_and_bytes_are_equal(bucket: str, s3_server: S3Server, through_proxy: Through) -> None:
    proxy = through_proxy(timeout=1.0, share=0.3, seed=1)
    data = random.Random(1).randbytes(4 * PART + 123)
    _write(f"{bucket}/big", data)
    for i in range(10):
        storage.publish(f"{bucket}/small/{i}", str(i).encode())
    assert storage.list_names(f"{bucket}/small") == [str(i) for i in range(10)]
    assert [storage.read_bytes(f"{bucket}/small/{i}") for i in range(10)] == [str(i).encode() for i in range(10)]
    assert storage.read_bytes(f"{bucket}/big") == data
    with storage.open_read(f"{bucket}/big", storage.HEADER_BLOCK) as file:
        for place in range(len(data) - 10, 0, -PART):
            file.seek(place)
            assert file.read(10) == data[place : place + 10]
    storage.remove(f"{bucket}/small")
    assert storage.list_names(bucket) == ["big"]
    assert _uploads(s3_server, bucket) == []
    assert all(proxy.counts[fault] for fault in FAULTS), proxy.counts


@pytest.mark.parametrize("fault", FAULTS)
def test_permanent_failures_are_errors_within_the_time_limit(bucket: str, through_proxy: Through, fault: str) -> None:
    storage.publish(f"{bucket}/x", bytes(100))
    proxy = through_proxy(retries=2, timeout=1.0, share=1.0, faults=(fault,))
    with pytest.raises(StorageError, match="opening failed: given up after 3 tries"):
        storage.read_bytes(f"{bucket}/x")
    assert 3 <= proxy.counts["requests"] <= 6  # aiohttp asks again by itself when a connection it kept turns out closed


def test_truncated_bodies_are_requested_again(bucket: str, through_proxy: Through) -> None:
    proxy = through_proxy(retries=2, once=[("GET .*claim", "short answer")])
    assert storage.publish_new(f"{bucket}/claim", b"who this is")
    assert not storage.publish_new(f"{bucket}/claim", b"who that is")
    assert proxy.counts["short answer"] == 1
    storage.publish(f"{bucket}/rows", bytes(1000))
    through_proxy(retries=2, share=1.0, faults=("short answer",))
    with pytest.raises(StorageError, match=r"given up after 3 tries: the server sent 750 bytes and announced .*/1000"):
        storage.read_bytes(f"{bucket}/rows")


def test_errors_name_every_operation(bucket: str, through_proxy: Through) -> None:
    storage.publish(f"{bucket}/x", b"x")
    proxy = through_proxy(retries=1, share=1.0, faults=("503 SlowDown",))
    for name, act in {
        "opening": storage.read_bytes,
        "looking": storage.exists,
        "listing": storage.list_names,
        "writing": lambda path: storage.publish(path, b"y" * 100),
        "removing": storage.remove,
    }.items():
        proxy.heads.clear()
        with pytest.raises(StorageError) as exc_info:
            act(f"{bucket}/x")
        assert f"{bucket}/x: {name} failed: given up after 2 tries" in exc_info.value.message
        assert "PACKTOOL_STORAGE_RETRIES" in str(exc_info.value.remedy)
        assert len(proxy.heads) == 2


def test_failed_upload_leaves_no_files(bucket: str, s3_server: S3Server, through_proxy: Through) -> None:
    faults = [("PUT .*partNumber=2", "stall"), ("PUT .*partNumber=2", "500 InternalError")]
    through_proxy(retries=1, timeout=2.5, once=faults)
    file = storage.AtomicFile(f"{bucket}/x")
    with pytest.raises(StorageError, match="x: writing failed: given up after 2 tries"):
        file.write(bytes(10 * PART))
    assert _uploads(s3_server, bucket) == []
    with pytest.raises(StorageError, match="after its end"):
        file.write(b"more")
    file.discard()
    assert not storage.exists(f"{bucket}/x")


def test_lost_responses_leave_no_files(bucket: str, s3_server: S3Server, through_proxy: Through) -> None:
    """The server has begun, or ended, an upload, and nobody hears of it."""
    proxy = through_proxy(once=[("POST .*uploads", "lose answer"), ("POST .*uploadId=", "lose answer")])
    data = random.Random(0).randbytes(2 * PART)
    _write(f"{bucket}/x", data)
    assert proxy.counts["lose answer"] == 2
    assert len(proxy.requests("POST .*uploads")) == 2
    assert len(proxy.requests("POST .*uploadId=")) == 2
    assert storage.read_bytes(f"{bucket}/x") == data
    assert _uploads(s3_server, bucket) == []


def test_replaced_files_are_noticed(bucket: str) -> None:
    storage.publish(f"{bucket}/x", bytes(200_000))
    with storage.open_read(f"{bucket}/x", 1000) as file:
        file.read(10)
        storage.publish(f"{bucket}/x", bytes(199_999) + b"1")
        with pytest.raises(StorageError, match="replaced while it was being read"):
            file.read()


@pytest.mark.parametrize(
    ("fault", "expected_message", "remedy"),
    [
        ("403 AccessDenied", "access denied", "bucket-"),
        ("403 SignatureDoesNotMatch", "does not accept the credentials", "AWS_SECRET_ACCESS_KEY"),
        ("400 ExpiredToken", "have expired", "Log in again"),
        ("403 RequestTimeTooSkewed", "clock", "NTP"),
        ("404 NoSuchBucket", "there is no bucket", "AWS_ENDPOINT_URL"),
        ("400 AuthorizationHeaderMalformed", "another region", "AWS_REGION"),
        ("418 Teapot", "Teapot", "AWS_ENDPOINT_URL"),
    ],
)
def test_refused_requests_are_errors_with_a_remedy(
    bucket: str, through_proxy: Through, fault: str, expected_message: str, remedy: str
) -> None:
    proxy = through_proxy(share=1.0, faults=(fault,))
    for act in (storage.read_bytes, lambda path: storage.publish(path, b"y")):
        with pytest.raises(StorageError, match=expected_message) as exc_info:
            act(f"{bucket}/x")
        assert remedy in str(exc_info.value.remedy)
        assert exc_info.value.__suppress_context__  # what libraries say may hold secrets
    assert proxy.counts["requests"] <= 4  # no use in asking again (region: botocore looks once)


def test_missing_credentials_are_an_error(
    bucket: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    storage.configure(None)
    request.addfinalizer(lambda: storage.configure(None))
    with pytest.raises(StorageError, match="no credentials") as exc_info:
        storage.exists(f"{bucket}/x")
    assert "AWS_ACCESS_KEY_ID" in str(exc_info.value.remedy)


def test_unreachable_server_is_an_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    storage.configure(storage.StorageOptions(retries=2, first_pause=0.01, s3_endpoint="http://127.0.0.1:1"))
    with pytest.raises(StorageError, match=r"given up after 3 tries.*127\.0\.0\.1"):
        storage.exists(f"{bucket}/x")


def test_a_header_costs_one_small_request(bucket: str, through_proxy: Through) -> None:
    storage.publish(f"{bucket}/x", bytes(10_000_000))
    proxy = through_proxy()
    with storage.open_read(f"{bucket}/x", storage.HEADER_BLOCK) as file:
        file.read(30)
        file.seek(1000)
        file.read(2000)
    assert len(proxy.heads) == 1
    assert "bytes=0-65535" in proxy.heads[0]


def test_threads_share_a_connection(bucket: str) -> None:
    storage.configure(None)  # so that all threads want the first one

    def act(i: int) -> bytes:
        storage.publish(f"{bucket}/{i}", str(i).encode())
        return storage.read_bytes(f"{bucket}/{i}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(act, range(40))) == [str(i).encode() for i in range(40)]


def test_a_forked_process_makes_its_own_connection(bucket: str) -> None:
    storage.publish(f"{bucket}/x", b"parent's")
    file = storage.open_read(f"{bucket}/x")
    child = os.fork()
    if child == 0:
        try:
            ok = storage.read_bytes(f"{bucket}/x") == b"parent's" and file.read() == b"parent's"
            storage.publish(f"{bucket}/y", b"child's")
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.read_bytes(f"{bucket}/y") == b"child's"
    assert file.read() == b"parent's"


def test_writing_holds_a_few_parts_only(bucket: str, tmp_path: Path) -> None:
    program = (
        "import resource, sys; from packtool import storage\n"
        "storage.publish(sys.argv[1] + '/first', b'x')\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak(); file = storage.AtomicFile(sys.argv[1] + '/big')\n"
        "for _ in range(120): file.write(bytes(2**20))\n"
        "file.commit(); print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, bucket], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64  # MiB, of 120 written
    assert storage.stat(f"{bucket}/big").size == 120 * 2**20


def test_an_interrupted_wait_ends_the_request(bucket: str, through_proxy: Through) -> None:
    """Ctrl-C must not wait for a silent server."""
    proxy = through_proxy(share=1.0, faults=("stall",))

    def interrupt() -> None:
        while not proxy.counts["stall"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        storage.read_bytes(f"{bucket}/x")
    assert proxy.counts["stall"] == 1
