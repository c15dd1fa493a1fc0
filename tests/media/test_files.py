"""No address in a row does more than cost its row, and none reaches what the row may not."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from packtool import storage
from packtool.config.data import AccessOptions, MediaAccess
from packtool.errors import MediaError, StorageError
from packtool.media.files import MediaProblem
from packtool.media.measure import load_image, measure_image
from packtool.rows.forms import RowProblem
from packtool.rows.forms.media import media_ref
from packtool.rows.media_policy import MediaPolicy, policy_for_cache
from packtool.rows.sample import MediaRef
from packtool.rows.source import Source


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "PNG")
    return file.getvalue()


class WebServer:
    """Answers by the path: a status, a picture, an endless body, a redirect."""

    def __init__(self) -> None:
        self.requested: Counter[str] = Counter()
        self.bytes_sent = 0
        self.down = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                outer.requested[self.path] += 1
                name = self.path.strip("/")
                if name == "endless":
                    self.send_response(200)
                    self.end_headers()
                    try:
                        while True:
                            self.wfile.write(bytes(2**16))
                            outer.bytes_sent += 2**16
                    except OSError:
                        return
                status = 503 if outer.down else int(name) if name.isdecimal() else 302 if "to=" in name else 200
                body = b"text" if name == "text" else picture() if status == 200 else b""
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", name.partition("to=")[2])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[WebServer]:
    storage.configure(storage.StorageOptions(retries=8, timeout=5.0, first_pause=0.001))
    server = WebServer()
    yield server
    server.close()
    storage.configure(None)


def reason_of(path: str, **policy: Any) -> str:
    with pytest.raises(MediaProblem) as exc_info:
        measure_image(MediaRef(path, policy=MediaPolicy(**{"max_failures": 0, **policy})))
    return exc_info.value.reason


PARTS = [
    "a.png",
    "in",
    "out",
    "link",
    "linked.png",
    "..",
    ".",
    "",
    "~",
    "\0",
    "\ud800",
    "ü b",
    "%2e%2e",
    "x" * 300,
    "?b#c",
]
STARTS = ["", "/", "//", "ROOT/", "OUT/", "file:///", "file://localhost/ROOT/", "/proc/self/root/", "/dev/"]
LOCAL = st.builds(
    lambda start, parts: start + "/".join(parts),
    st.sampled_from(STARTS),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=4),
)
SURE = ["named", "named:80", "NAMED", "named@other", "other@named", "other#@named", "other\\@named", " named", "named."]
HOSTS = [*SURE, "other", "127.0.0.1", "[::1]", "[bad", "169.254.169.254", "h:99999", "", "BAD_bucket!", "b", "b@other"]
REMOTE = st.builds(
    lambda scheme, slashes, host, parts: f"{scheme}:{slashes}{host}/{'/'.join(parts)}",
    st.sampled_from(["http", "https", "HTTP", "s3", "s3a", "oss", "ftp", "memory", "file"]),
    st.sampled_from(["/", "//", "///"]),
    st.sampled_from(HOSTS),
    st.lists(st.sampled_from(PARTS), max_size=3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that may be opened, and others beside them, with links to these."""
    base = tmp_path_factory.mktemp("base")
    for name in ("root/in", "root/out", "out"):
        (base / name).mkdir(parents=True)
    for name in ("root/a.png", "root/in/a.png", "out/a.png"):
        (base / name).write_bytes(picture())
    (base / "root" / "link").symlink_to(base / "out")
    (base / "root" / "linked.png").symlink_to("../out/a.png")
    (base / "root" / "in" / "link").symlink_to("../in")
    return base


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
@given(st.one_of(LOCAL, REMOTE, st.text(max_size=20)), st.sampled_from(["root", "local", "any"]))
def test_any_address_gives_a_medium_or_a_dropped_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, access: MediaAccess
) -> None:
    opened: list[str] = []

    def record(path: str, *_: Any) -> Any:
        opened.append(path)
        raise StorageError("recorded, not opened")

    root = str(folder / "root")
    rows = "http://named/rows.jsonl" if "named" in text else f"{root}/rows.jsonl"
    source = Source(rows, media_root=root, media_access=access)
    text = text.replace("ROOT", root).replace("OUT", str(folder / "out"))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "open_read", record)
        with pytest.raises((RowProblem, MediaProblem)):  # and nothing else
            measure_image(media_ref("image", text, source))
    for path in opened:
        if storage.is_remote(path):
            assert access == "any" or storage.store_name(path) == "http://named", path
        elif access == "root":
            assert os.path.realpath(storage.normalize(path)).startswith(root + os.sep), path


def test_files_outside_the_media_root_are_explained(folder: Path) -> None:
    source = Source(str(folder / "root" / "rows.jsonl"))
    for name, message in [
        ("../out/a.png", "is neither in the folder"),
        ("linked.png", "is a link to"),
        (str(folder / "out/a.png"), "is neither in the folder"),
    ]:
        with pytest.raises(MediaProblem, match=rf"{message}.*--media-root DIR.*--media-access local") as exc_info:
            measure_image(media_ref("image", name, source))
        assert exc_info.value.reason == "media_not_allowed"
    for allowed in (Source(source.path, media_root=str(folder / "out")), Source(source.path, media_access="local")):
        assert measure_image(media_ref("image", "linked.png", allowed)) == (20, 30)
    (folder / "rows.jsonl").symlink_to("out/rows.jsonl")
    assert measure_image(media_ref("image", "out/a.png", Source(str(folder / "rows.jsonl")))) == (20, 30)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("401", "media_refused"),
        ("403", "media_refused"),
        ("404", "media_missing"),
        ("410", "media_missing"),
        ("429", "media_unreachable"),
        ("500", "media_unreachable"),
        ("503", "media_unreachable"),
        ("to=to=", "media_unreadable"),  # in a circle
        ("to=ftp://h/x", "media_unreadable"),
        ("to=http://127.0.0.1:1/", "media_unreachable"),
    ],
)
def test_responses_of_web_servers(web: WebServer, path: str, reason: str) -> None:
    assert reason_of(f"{web.url}/{path}") == reason


def test_endless_response_body_is_abandoned(web: WebServer) -> None:
    assert reason_of(f"{web.url}/endless", max_bytes=2**21) == "media_size"
    assert web.bytes_sent < 2**25  # what the kernel's buffers hold is sent, too


def test_redirects_follow_the_media_access_policy(web: WebServer) -> None:
    other = WebServer()
    named = frozenset({storage.store_name(web.url)})
    assert reason_of(f"{web.url}/to={other.url}/a", stores=named) == "media_not_allowed"
    assert not other.requested
    assert measure_image(MediaRef(f"{web.url}/to={web.url}/a", policy=MediaPolicy(stores=named))) == (20, 30)
    assert measure_image(MediaRef(f"{web.url}/to={other.url}/a")) == (20, 30)
    other.close()


def test_names_resolving_to_private_networks_are_not_followed(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: look_up("127.0.0.1", *more, **named))
    for name in ("no_proxy", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    path = web.url.replace("127.0.0.1", "data.example") + "/a.png"
    named = frozenset({storage.store_name(path)})
    with pytest.raises(
        MediaProblem, match=r"resolves to 127\.0\.0\.1, an address in a private network.*any"
    ) as exc_info:
        measure_image(MediaRef(path, policy=MediaPolicy(stores=named)))
    assert exc_info.value.reason == "media_not_allowed"
    assert not web.requested
    assert measure_image(MediaRef(path)) == (20, 30)


def test_store_outage_backs_off_and_stops_the_run(web: WebServer) -> None:
    policy = MediaPolicy(max_failures=6)
    assert measure_image(MediaRef(f"{web.url}/a", policy=policy)) == (20, 30)
    web.down = True
    tries = []
    for index in range(5):
        assert reason_of(f"{web.url}/{index}.png", max_failures=6) == "media_unreachable"
        tries.append(web.requested[f"/{index}.png"])
    assert tries == [9, 5, 3, 2, 1]
    for answer, reason in {"404": "media_missing", "text": "media_unreadable"}.items():
        web.down = False  # an answer about the file alone makes the store as good as new
        assert reason_of(f"{web.url}/{answer}") == reason
        web.down = True
        for index in range(5):
            assert reason_of(f"{web.url}/{index}.png", max_failures=6) == "media_unreachable"
    with pytest.raises(StorageError, match=rf"{web.url}: 6 media in a row could not be read; the last error: .*/6.png"):
        measure_image(MediaRef(f"{web.url}/6.png", policy=policy))


def test_unresponsive_server_gets_fewer_retries(web: WebServer) -> None:
    web.down = True
    for index, tries in enumerate([3, 2, 1]):
        assert reason_of(f"{web.url}/{index}.png") == "media_unreachable"
        assert web.requested[f"/{index}.png"] == tries


def test_denied_buckets_drop_one_row_each(bucket: str, through_proxy: Any) -> None:
    proxy = through_proxy(share=1.0, faults=("403 AccessDenied",))
    for _ in range(2):
        assert reason_of(f"{bucket}/a.png", max_failures=3) == "media_refused"
    assert len(proxy.heads) == 2  # no use in asking again
    with pytest.raises(StorageError, match=f"{bucket}: 3 media in a row could not be read.*access denied"):
        measure_image(MediaRef(f"{bucket}/a.png", policy=MediaPolicy(max_failures=3)))
    assert reason_of("s3://BAD_bucket!/x") == "media_unreadable"


def test_pipes_and_devices_are_refused_as_media(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        with pytest.raises(MediaProblem, match="not a regular file"):
            measure_image(MediaRef(path))
        with pytest.raises(MediaError, match="not a regular file"):
            load_image(path)


def test_embedded_media_are_read_from_bytes_not_their_path(tmp_path: Path) -> None:
    for path in (str(tmp_path / "gone.png"), "https://packtool.invalid/a.png"):
        assert load_image(path, picture(), MediaPolicy(stores=frozenset())).size == (30, 20)


def test_oversized_media_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    small = MediaPolicy(max_bytes=50)
    for ref in (MediaRef(str(tmp_path / "a.png"), policy=small), MediaRef(None, picture(), policy=small)):
        with pytest.raises(MediaProblem, match="--max-media-bytes allows 50") as exc_info:
            measure_image(ref)
        assert exc_info.value.reason == "media_size"


def test_cache_contacts_no_web_server_without_permission(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    policy = policy_for_cache(AccessOptions())
    assert load_image(str(tmp_path / "a.png"), policy=policy).size == (30, 20)
    with pytest.raises(MediaError, match="--media-access any"):
        load_image(f"{web.url}/a.png", policy=policy)
    assert not web.requested
    assert load_image(f"{web.url}/a.png", policy=policy_for_cache(AccessOptions(media_access="any"))).size == (30, 20)
    web.down = True  # an outage is no fault of the sample, which --on-bad-media skip would leave out
    with pytest.raises(StorageError, match="given up after"):
        load_image(f"{web.url}/a.png")


def test_names_of_stores() -> None:
    same = ["http://Host/x", "https://host", "http://user:pass@host:80/y?z", "https://host:443/"]
    assert {storage.store_name(path) for path in same} == {"http://host"}
    assert storage.store_name("http://host:8000/x") == "http://host:8000"
    assert storage.store_name("s3a://bucket/a/b") == "s3://bucket"
    assert storage.store_name("/a/b") == storage.store_name("file:///a") == ""
    assert json.dumps(Source("s3://b/r.jsonl", media_root="/m").media_policy.roots) == '["/m"]'


@pytest.mark.parametrize("scheme", ["http", "https", "s3"])
def test_a_refusal_names_the_scheme_of_the_row(scheme: str) -> None:
    with pytest.raises(MediaProblem, match=f": {scheme}://place is not named on the command line"):
        measure_image(MediaRef(f"{scheme}://place/a.png", policy=MediaPolicy(stores=frozenset())))
