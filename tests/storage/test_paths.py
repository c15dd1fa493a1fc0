"""Paths and URLs: mended, joined, and shown without their secrets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from packtool import storage
from packtool.errors import ConfigError, StorageError
from packtool.storage.paths import origin, scrubbed


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("url", "mended"),
    [
        ("data/rows.jsonl", "data/rows.jsonl"),
        ("/data/a:b", "/data/a:b"),
        ("C:/rows", "C:/rows"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3:/bucket/key", "s3://bucket/key"),
        ("oss:/bucket/key", "oss://bucket/key"),
        ("S3:///bucket/a//b", "s3://bucket/a//b"),
        ("s3a://bucket/key", "s3://bucket/key"),
        ("https://host/a?b=c", "https://host/a?b=c"),
        ("file:///data/rows", "/data/rows"),
        ("file:/data/rows", "/data/rows"),
        ("file://localhost/data/rows", "/data/rows"),
    ],
)
def test_paths_are_normalized(url: str, mended: str) -> None:
    assert storage.normalize(url) == mended
    assert storage.is_remote(url) == ("://" in mended)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/x", "unknown scheme gs://"),
        ("hdfs:/x", "unknown scheme hdfs://"),
        ("s3://", "names no bucket"),
        ("file://elsewhere/x", "another machine"),
        ("gs://user:pw@bucket/x", r"gs://\*\*\*@bucket/x"),
    ],
)
def test_unsupported_urls_are_refused(url: str, message: str) -> None:
    for function in (storage.normalize, storage.exists, storage.read_bytes, storage.AtomicFile):
        with pytest.raises(StorageError, match=message):
            function(url)


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("a", "b", "c.txt"), "a/b/c.txt"),
        (("a", "/b"), "/b"),
        (("s3://bucket", "train", "x.arrow"), "s3://bucket/train/x.arrow"),
        (("s3:/bucket/dir/", "x"), "s3://bucket/dir/x"),
        (("s3://bucket/dir", "../images/./1.png"), "s3://bucket/images/1.png"),
        (("s3://bucket/dir", "../../../1.png"), "s3://bucket/1.png"),
        (("s3://bucket/dir", "oss://other/1.png"), "oss://other/1.png"),
        (("s3://bucket/dir", "/data/1.png"), "/data/1.png"),
        (("https://host/dir?token=t", "1.png"), "https://host/dir/1.png?token=t"),
        (("oss://m", "a"), "oss://m/a"),
    ],
)
def test_paths_are_joined(parts: tuple[str, ...], joined: str) -> None:
    assert storage.join(*parts) == joined


@pytest.mark.parametrize(
    ("path", "parent", "name"),
    [
        ("/data/rows.jsonl", "/data", "rows.jsonl"),
        ("s3://bucket/dir/rows.jsonl", "s3://bucket/dir", "rows.jsonl"),
        ("s3://bucket/rows.jsonl", "s3://bucket", "rows.jsonl"),
        ("s3://bucket/dir/what?.json", "s3://bucket/dir", "what?.json"),
        ("https://host/dir/rows.json?sig=a/b", "https://host/dir", "rows.json"),
    ],
)
def test_parents_and_names(path: str, parent: str, name: str) -> None:
    assert (storage.parent(path), storage.name(path)) == (parent, name)


@pytest.mark.parametrize(
    ("path", "masked"),
    [
        ("/data/what?.json", "/data/what?.json"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://bucket/user@home/key", "s3://bucket/user@home/key"),
        ("s3://KEY:sec/ret@bucket/key", "s3://***@bucket/key"),
        ("https://user:pw@host:8080/a@b", "https://***@host:8080/a@b"),
        ("http://host:9000/a@b/c", "http://host:9000/a@b/c"),
        ("https://token@host/a", "https://***@host/a"),
        ("https://host/a.png?X-Amz-Signature=abc&x=1#1000", "https://host/a.png?***#1000"),
        ("data:image/png;base64,iVBORw0KGgo=", "data:image/png;base64,... (34 characters)"),
    ],
)
def test_paths_are_shown_without_secrets(path: str, masked: str) -> None:
    assert storage.masked(path) == masked


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("https://host/a/b?signature=1", "https://host"),
        ("https://user:password@host:8443?x", "https://***@host:8443"),
        ("http:/host/a", "http://host"),
        ("s3://bucket/a/b", "s3://bucket"),
    ],
)
def test_origins_keep_their_scheme(path: str, expected: str) -> None:
    assert origin(path) == expected


def test_messages_are_shown_without_secrets() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "HF_TOKEN": "hf_abcdefgh",
        "TOKENIZERS_PARALLELISM": "disabled-now",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/tokenfile",
        "OSS_ACCESS_KEY_ID": "short",
    }
    text = (
        "GET 'https://u:p@h/x?sig=1' (/y?X-Amz-Signature=abcd&e=1) with wJalrXUtnFEMI, hf_abcdefgh, "
        "disabled-now, /var/run/tokenfile and short words"
    )
    assert scrubbed(text, environ) == (
        "GET 'https://***@h/x?***' (/y?X-Amz-Signature=***&e=1) with ***, ***, "
        "disabled-now, /var/run/tokenfile and short words"
    )


def test_local_runs_import_no_remote_clients(tmp_path: object) -> None:
    program = (
        "import sys; from packtool import storage\n"
        f"d = {str(tmp_path)!r}\n"
        "storage.publish(storage.join(d, 'a'), b'x'); f = storage.AtomicFile(d + '/b'); f.write(b'y'); f.commit()\n"
        "assert storage.read_bytes(d + '/a') == b'x' and storage.glob(d + '/*') and list(storage.walk(d))\n"
        "assert storage.stat(d + '/b').size and not storage.exists(d + '/c') and storage.entries(d)\n"
        "heavy = {'fsspec', 's3fs', 'aiohttp', 'botocore', 'aiobotocore', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_wrong_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PACKTOOL_STORAGE_RETRIES": "many", "PACKTOOL_STORAGE_TIMEOUT": "-1"}
    with pytest.raises(ConfigError, match=r"(?s)RETRIES: 'many'.*TIMEOUT: '-1'"):
        storage.StorageOptions.from_environment(environ)
    secret = storage.StorageOptions.from_environment({"OSS_ACCESS_KEY_SECRET": "abc", "OSS_ENDPOINT": "oss-cn-x.a.com"})
    assert "abc" not in repr(secret)
    assert (secret.oss_endpoint, secret.oss_region) == ("https://oss-cn-x.a.com", "cn-x")
