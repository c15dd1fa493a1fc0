"""``--media embed``: what becomes of rows whose media could be measured, and then could not be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packtool.cache import shard, task
from packtool.cache.manifest import ExportSummary
from packtool.cache.reader import CacheReader
from packtool.encode.encoder import encode_samples
from packtool.errors import MismatchError, RowError, StoreDownError
from packtool.progress import SilentProgress

Export = Callable[..., ExportSummary]


class Counted(SilentProgress):
    """Records the reported number of dropped rows."""

    dropped = 0

    def advance(self, count: int, **figures: Any) -> None:
        self.dropped = figures["dropped"]


def remove_after_encoding(monkeypatch: pytest.MonkeyPatch, picture: Path) -> None:
    """From now on a picture is gone as soon as the first rows are encoded."""

    def delete_after_encoding(*args: Any) -> Iterator[Any]:
        yield from list(encode_samples(*args))
        picture.unlink(missing_ok=True)

    monkeypatch.setattr(task, "encode_samples", delete_after_encoding)


@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_rows_whose_medium_is_removed_before_it_is_read_are_dropped(
    run_export: Export, tmp_path: Path, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_export("before")
    before = CacheReader.open([str(tmp_path / "before")])
    samples = [before.sample(position) for position in range(len(before))]
    lost = [sample.row for sample in samples if any("2.png" in str(image.path) for image in sample.images)]
    assert len(lost) > 20
    remove_after_encoding(monkeypatch, tmp_path / "2.png")
    progress = Counted()
    summary = run_export(media="embed", split_dataset_ratio=ratio, progress=progress)
    assert summary.num_rows == 600 == summary.num_samples + sum(summary.dropped.values())
    dropped = [json.loads(line) for line in (tmp_path / "cache" / "dropped.jsonl").read_text().splitlines()]
    removed_rows = [line["row"] for line in dropped if "2.png" in line["detail"]]
    assert sorted(removed_rows) == lost
    assert {line["reason"] for line in dropped if "2.png" in line["detail"]} == {"media_missing"}
    assert progress.dropped == len(dropped) == sum(summary.dropped.values())
    for split in ("train", "val") if ratio else ("train",):
        reader = CacheReader.open([str(tmp_path / "cache")], split)
        samples = [reader.sample(position) for position in range(len(reader))]
        assert not {sample.row for sample in samples} & set(lost)
        assert [sample.length for sample in samples] == reader.index.length.tolist()
        assert all(image.data for sample in samples for image in sample.images)


def test_strict_stops_at_a_missing_medium(
    run_export: Export, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_after_encoding(monkeypatch, tmp_path / "2.png")
    rows.write_text("".join(line for line in rows.read_text().splitlines(keepends=True) if '"2.png"' in line))
    with pytest.raises(RowError, match=r"row \d+: media_missing: .*2\.png"):
        run_export(media="embed", strict=True, max_length=1000)


def test_a_store_that_is_down_stops_the_export(
    run_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*args: Any) -> Any:
        raise StoreDownError("http://h: 100 media in a row could not be had", "Look at it.")

    monkeypatch.setattr(shard, "open_medium", down)
    with pytest.raises(StoreDownError, match=r"in a row could not be had\nLook at it. Finished shards are kept: run"):
        run_export(media="embed")
    with pytest.raises(MismatchError, match="no finished cache"):
        CacheReader.open([str(tmp_path / "cache")])
