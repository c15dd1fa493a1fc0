"""An export of rows of several kinds: named, sampled, for the val split; the same for any number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packtool.cache.manifest import ExportSummary
from packtool.errors import MismatchError
from tests.cache.conftest import RecordingProgress, tree

Export = Callable[..., ExportSummary]


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, Any]:
    """Settings that name a csv file, a folder of a parquet file, and a set for the val split."""
    folder = tmp_path / "mixed"
    (folder / "tables").mkdir(parents=True)
    (folder / "rows.csv").write_text("question,answer\n" + "".join(f"q{i},a{i}\n" for i in range(300)))
    table = pa.table({"instruction": ["do"] * 200, "output": [f"done {i}" for i in range(200)]})
    pq.write_table(table, folder / "tables" / "rows.parquet")
    (folder / "val.txt").write_text("a text\n" * 7)
    (folder / "info.json").write_text(json.dumps({"texts": {"file_name": "val.txt", "loss_scale": "last_round"}}))
    return {
        "dataset": (f"{folder}/rows.csv#100", f"{folder}/tables"),
        "val_dataset": ("texts",),
        "dataset_info": f"{folder}/info.json",
        "system": "be brief",
        "split_dataset_ratio": 0.1,
    }


def test_the_same_bytes_for_any_number_of_processes(run_export: Export, tmp_path: Path, mixed: dict[str, Any]) -> None:
    summary = run_export("one", **mixed)
    assert summary.num_samples_by_split == {"train": 270, "val": 37}
    run_export("two", dataset_num_proc=2, **mixed)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert run_export("one", **mixed).already_finished


@pytest.mark.parametrize(
    "changed", [{"system": "be long"}, {"val_dataset": ("texts#3",)}, {"columns": ("query=question",)}]
)
def test_reading_options_identify_a_cache(run_export: Export, mixed: dict[str, Any], changed: dict[str, Any]) -> None:
    run_export(**mixed)
    with pytest.raises(MismatchError, match="holds a finished cache with other settings:\n  - dataset: "):
        run_export(**{**mixed, **changed})


def test_ignored_splits_of_a_saved_dataset_dict_are_noted(run_export: Export, tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": ["c", "d"]})
    folder = str(tmp_path / "saved")
    datasets.DatasetDict(train=data, validation=data, extra=data).save_to_disk(folder)
    progress = RecordingProgress()
    assert run_export(dataset=(folder,), progress=progress).num_rows == 2
    assert [note for note in progress.notes if "only the split" in note] == [
        f"{folder}: only the split train is read, not validation, extra; to use it for validation, add --val-dataset "
        f"{folder}/validation"
    ]
