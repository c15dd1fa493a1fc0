"""Both commands on a bucket, through a proxy that breaks requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from packtool import storage
from packtool.cli.main import run
from packtool.demo.dataset import make_rows
from packtool.demo.model import make_model
from packtool.errors import EXIT_STORAGE
from tests.s3_server import Proxy, S3Server

Through = Callable[..., Proxy]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and rows with pictures."""
    folder = tmp_path_factory.mktemp("world")
    make_model(str(folder / "model"), 0)
    make_rows(str(folder / "data"), 100, 0)
    return folder


def _export(world: Path, target: str, *more: str) -> int:
    arguments = ["export", "--model", f"{world}/model", "--dataset", f"{world}/data/train.json", "--max-length", "256"]
    return run([*arguments, "--rows-per-shard", "64", "--output-dir", target, *more])


def test_export_to_a_bucket_and_planning_from_it(
    world: Path,
    bucket: str,
    s3_server: S3Server,
    through_proxy: Through,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rows come from the bucket too, and the cache goes there: the same bytes as on this machine."""
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that."}]
    rows = [json.dumps({"messages": [*turns[:1], {**turns[1], "content": "that. " * i}]}) for i in range(1, 20)]
    storage.publish(f"{bucket}/data/rows.jsonl", "\n".join(rows).encode())
    assert _export(world, str(tmp_path / "here"), "--dataset", f"{bucket}/data/rows.jsonl") == 0
    proxy = through_proxy(timeout=1.0, share=0.15, seed=1)
    there = f"{bucket}/out/cache"
    capsys.readouterr()
    more = ["--dataset", f"{bucket}/data/rows.jsonl".replace("s3://", "s3:/"), "--dataset-num-proc", "2", "--json"]
    assert _export(world, there.replace("s3://", "s3:/"), *more) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["dropped"] == {}
    assert summary["media_tokens"] > 0
    names = sorted(str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*.*"))
    assert [path.removeprefix(f"{there}/") for path in storage.walk(there)] == [
        name for name in names if (tmp_path / "here" / name).is_file()
    ]
    for name in storage.walk(there):
        assert storage.read_bytes(name) == (tmp_path / "here" / name.removeprefix(f"{there}/")).read_bytes(), name
    assert "Uploads" not in s3_server.client().list_multipart_uploads(Bucket=bucket.removeprefix("s3://"))
    capsys.readouterr()
    train = ["train", "--model", f"{world}/model", "--packing", "true", "--output-dir", str(tmp_path / "out"), "--json"]
    plans = []
    for cache in (there, str(tmp_path / "here")):
        options = ["--cached-dataset", cache, "--cache-dir", str(tmp_path / "copies"), "--dry-run"]
        assert run([*train, *options]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    for plan in plans:
        plan.pop("seconds", None)
    assert plans[0] == plans[1]
    assert not list((tmp_path / "copies").rglob("*.arrow"))  # the index alone
    assert sum(proxy.counts.values()) > proxy.counts["requests"] + 5


def test_a_bucket_out_of_reach_is_exit_5(
    world: Path, bucket: str, through_proxy: Through, capsys: pytest.CaptureFixture[str]
) -> None:
    through_proxy(retries=1, timeout=0.2, share=1.0, faults=("stall", "drop answer"))
    assert _export(world, f"{bucket}/cache") == EXIT_STORAGE
    message = capsys.readouterr().err
    assert f"{bucket}/cache" in message
    assert "given up after 2 tries" in message
    assert "Traceback" not in message
    train = ["train", "--model", f"{world}/model", "--cached-dataset", f"{bucket}/cache", "--output-dir", "out"]
    assert run([*train, "--dry-run"]) == EXIT_STORAGE
