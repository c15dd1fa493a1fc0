"""Caches of rows that become several samples: what is counted, kept and shown of them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache import export as export_module
from packtool.cache import task as task_module
from packtool.cache.manifest import ExportSummary, InputCounts, Manifest
from packtool.cache.reader import CacheReader
from packtool.encode.encoded import EncodedSample
from packtool.errors import RowError
from packtool.report.inspect import cache_figures, figure_lines, sample_view
from packtool.report.tables import export_lines
from packtool.stream.reading import StreamState, read_stream_state, write_stream_state
from tests.cache.conftest import CHATML, CONTROL, RecordingProgress, tree
from tests.cache.test_embed import remove_after_encoding
from tests.cache.test_prefixes import NAMES

Export = Callable[..., ExportSummary]

NUM_ROWS = 30
# Thoughts are written in the last turn alone.
THOUGHT = "{% if loop.last %}{{ m.reasoning_content or '' }}{% endif %}"
THINKING = CHATML.replace("{{ m.content }}", THOUGHT + "{{ m.content }}")


@pytest.fixture(autouse=True)
def _short_prefixes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (task_module, export_module):
        monkeypatch.setattr(module, "MIN_SHARED", 3)


@pytest.fixture(scope="session")
def thinking_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(THINKING)
    ids = {f"{name}_token_id": 256 + CONTROL.index(f"<|{token}|>") for name, token in NAMES.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}} | ids))
    return folder


def conversation(row_index: int) -> dict[str, Any]:
    """One to three turns that think, the second about a picture, the third a long one in every tenth row."""
    messages = []
    for turn in range(row_index % 3 + 1):
        mark = "<image>" if turn == 1 else ""
        messages.append({"role": "user", "content": f"{mark}question {row_index}.{turn}"})
        answer = "word " * (60 if row_index % 10 == 2 and turn == 2 else 3)
        messages.append({"role": "assistant", "content": answer, "reasoning_content": f"hm {row_index}.{turn}. "})
    return {"messages": messages, "images": [f"{row_index % 5}.png"] if row_index % 3 else [], "channel": "c"}


@pytest.fixture
def export_conversations(run_export: Export, thinking_model: Path, rows: Path) -> Export:
    """Exports thirty conversations of one, two or three turns."""
    rows.write_text("".join(json.dumps(conversation(row_index)) + "\n" for row_index in range(NUM_ROWS)))

    def run(name: str = "cache", **settings: Any) -> ExportSummary:
        settings = {"expand_turns": "true", "model": str(thinking_model), "rows_per_shard": 64} | settings
        return run_export(name, **settings)

    return run


def samples_of(cache: Path, split: str = "train") -> list[EncodedSample]:
    reader = CacheReader.open([str(cache)], split)
    return [reader.sample(position) for position in range(len(reader))]


def places(samples: list[EncodedSample]) -> list[tuple[int, str]]:
    return [(sample.row, "" if sample.part is None else str(sample.part)) for sample in samples]


def test_rows_are_counted_and_turns_shown(export_conversations: Export, tmp_path: Path) -> None:
    summary = export_conversations()
    samples = samples_of(tmp_path / "cache")
    expected = [
        (row, f"turn {turn} of {row % 3 + 1}" if row % 3 else "")
        for row in range(NUM_ROWS)
        for turn in range(1, row % 3 + 2)
        if not (row % 10 == 2 and turn == 3)
    ]
    assert places(samples) == expected
    assert (summary.num_rows, summary.num_samples, summary.pieces_added, summary.dropped) == (30, 59, 29, {})
    assert summary.parts_left_out == {"over_max_length": 1} == Manifest.read(str(tmp_path / "cache")).parts_left_out
    (line,) = (tmp_path / "cache" / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line)["part"] == "turn 3 of 3"
    lines = dict(export_lines(summary))
    assert lines["samples"] == "59 from 30 rows"
    assert lines["  turns and responses left out"] == "1"
    figures = cache_figures(str(tmp_path / "cache"))
    assert figures["dropped_examples"] == {}
    shown_figures = dict(figure_lines(figures))
    assert shown_figures["train"] == "59 samples from 30 rows in 1 shards"
    assert shown_figures["turns and responses left out"] == "1 over_max_length"
    assert dict(sample_view(str(tmp_path / "cache"), "train", 2)[0])["part of its row"] == "turn 2 of 2"
    assert "part of its row" not in dict(sample_view(str(tmp_path / "cache"), "train", 0)[0])
    assert export_conversations().already_finished


def test_splits_and_samples_of_rows_keep_their_turns_together(
    export_conversations: Export, rows: Path, tmp_path: Path
) -> None:
    summary = export_conversations("split", split_dataset_ratio=0.2)
    train, val = (samples_of(tmp_path / "split", split) for split in ("train", "val"))
    assert not {sample.row for sample in train} & {sample.row for sample in val}
    assert len({sample.row for sample in val}) == 6
    export_conversations("whole", max_length=2000)
    per_row = Counter(sample.row for sample in samples_of(tmp_path / "whole"))
    export_conversations("drawn", dataset=(f"{rows}#7",), max_length=2000)
    num_drawn = Counter(sample.row for sample in samples_of(tmp_path / "drawn"))
    assert len(num_drawn) == 7
    assert all(num_drawn[row] == per_row[row] for row in num_drawn)
    assert summary.num_rows == 30


def test_samples_of_a_row_share_prefixes_up_to_their_turns(export_conversations: Export, tmp_path: Path) -> None:
    """Two samples of a row have in common what comes before the answer of the shorter one."""
    export_conversations()
    reader = CacheReader.open([str(tmp_path / "cache")])
    prefixes = reader.prefixes()
    assert prefixes is not None
    hashes_and_lengths = prefixes.prefixes
    by_sample = list(itertools.pairwise(prefixes.offsets.tolist()))
    hashes = [
        dict(zip(hashes_and_lengths.hashes[a:b].tolist(), hashes_and_lengths.lengths[a:b].tolist(), strict=True))
        for a, b in by_sample
    ]
    samples = samples_of(tmp_path / "cache")
    for index, (one, other) in enumerate(itertools.pairwise(samples)):
        if one.row == other.row:
            common = hashes[index].keys() & hashes[index + 1].keys()
            assert max(hashes[index][each] for each in common) == int(one.turns[0])


def test_auto_does_not_change_caches_without_lost_thoughts(
    export_conversations: Export, model: Path, tmp_path: Path
) -> None:
    """Byte for byte, where the template keeps what turns thought; and with it, where rows are not expanded."""
    export_conversations("false", expand_turns="false", model=str(model))
    export_conversations("auto", expand_turns="auto", model=str(model))
    assert tree(tmp_path / "auto") == tree(tmp_path / "false")
    manifest = json.loads((tmp_path / "false" / "packtool.json").read_text())
    assert "expand_turns" not in manifest["identity"]["spec"]
    assert "parts_left_out" not in manifest


def test_datasets_reads_the_columns(export_conversations: Export, tmp_path: Path) -> None:
    import datasets

    export_conversations()
    dataset = datasets.load_from_disk(str(tmp_path / "cache" / "train"))
    assert dataset[2]["part"] == {"turn": 2, "num_turns": 2, "response": 0, "num_responses": 0}
    assert dataset[0]["part"] is None


@pytest.mark.parametrize("file", ["data-00000-of-00001.arrow", "index.arrow", "prefixes.arrow"])
def test_damaged_files_are_recreated(export_conversations: Export, tmp_path: Path, file: str) -> None:
    export_conversations()
    expected_files = tree(tmp_path / "cache")
    (tmp_path / "cache" / "train" / file).write_bytes(b"")
    export_conversations(repair=True)
    assert tree(tmp_path / "cache") == expected_files


def test_missing_image_drops_the_row(
    export_conversations: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_after_encoding(monkeypatch, tmp_path / "2.png")
    summary = export_conversations(media="embed", max_length=2000)
    lost = {row for row in range(NUM_ROWS) if row % 5 == 2 and row % 3}
    assert summary.dropped == {"media_missing": len(lost)}
    samples = samples_of(tmp_path / "cache")
    assert {sample.row for sample in samples} == set(range(NUM_ROWS)) - lost
    assert (summary.num_rows, summary.num_samples - summary.pieces_added) == (30, 30 - len(lost))


def test_strict_names_the_turn(export_conversations: Export) -> None:
    with pytest.raises(RowError, match=r"row 2: over_max_length: turn 3 of 3: \d+ tokens"):
        export_conversations(strict=True)


def test_responses_become_samples(run_export: Export, rows: Path, tmp_path: Path) -> None:
    answers, weights = ["a", "b", "c"], [1, 2, 0]
    lines = [
        {"prompt": f"question {n}", "responses": answers[: n % 3 + 1], "weights": weights[: n % 3 + 1]}
        for n in range(9)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = run_export()
    assert (summary.num_rows, summary.num_samples) == (9, 15)
    samples = samples_of(tmp_path / "cache")
    assert places(samples)[:3] == [(0, ""), (1, "response 1 of 2"), (1, "response 2 of 2")]
    assert samples[2].loss_scale is not None
    assert set(samples[2].loss_scale[samples[2].labels >= 0].tolist()) == {2.0}
    assert samples[1].loss_scale is None


def test_a_resumed_stream_keeps_the_parts_of_its_samples(export_conversations: Export, tmp_path: Path) -> None:
    export_conversations()
    carried_samples = samples_of(tmp_path / "cache")[:4]
    counts = InputCounts(rows=0, dropped={}, marks_added=0, parts_left_out={"over_max_length": 2})
    state = StreamState(carried=carried_samples[:1], shuffled=carried_samples[1:], counts=counts)
    write_stream_state(str(tmp_path), 0, state)
    read_back = read_stream_state(str(tmp_path), 0)
    assert places([*read_back.carried, *read_back.shuffled]) == places(carried_samples)
    assert read_back.counts == counts
    for one, other in zip(carried_samples, (*read_back.carried, *read_back.shuffled), strict=True):
        assert (one.borders is None) == (other.borders is None)
        if one.borders is not None and other.borders is not None:
            np.testing.assert_array_equal(one.borders, other.borders)


def test_an_export_notes_the_choice_of_auto(export_conversations: Export, model: Path) -> None:
    for name, options, expected in (("a", {}, "becomes several"), ("b", {"model": str(model)}, "changes nothing")):
        progress = RecordingProgress()
        export_conversations(name, expand_turns="auto", progress=progress, **options)
        assert any("--expand-turns auto" in note and expected in note for note in progress.notes)
