"""Duplicates, conflicting answers and overlaps: found as by plain Python, listed, dropped or refused."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.cache import hygiene, output_dir
from packtool.cache.hygiene import HASHED_INDEX, HeldOut, compare, hash_columns, ngram_hashes
from packtool.cache.manifest import ExportSummary, Manifest
from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.config.data import ExportConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import MediaTokens
from packtool.errors import EXIT_DATA, EXIT_OK, DataError, MismatchError
from packtool.report.tables import export_figures, export_lines
from tests.cache.conftest import RecordingProgress, export_rows, tree

Export = Callable[..., ExportSummary]
Place = tuple[str, int]


def conversation(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(seed: int, num: int = 12) -> str:
    drawn = random.Random(seed)
    return " ".join("".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(num))


def findings(cache: Path) -> list[dict[str, Any]]:
    path = cache / "hygiene.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []


def listed(cache: Path, kind: str) -> dict[tuple[str, int], Any]:
    """The row or question that a row of kind is related to, by file name and number of the row."""
    return {
        (Path(line["source"]).name, line["row"]): (Path(line["of"]["source"]).name, line["of"]["row"])
        for line in findings(cache)
        if line["kind"] == kind
    }


def kept(cache: Path, split: str = "train") -> list[Place]:
    reader = CacheReader.open([str(cache)], split)
    samples = (reader.sample(position) for position in range(len(reader)))
    return [(Path(sample.source).name, sample.row) for sample in samples]


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    """Rows with duplicates within and across files, conflicts, overlap with val and with held-out questions."""
    first = [conversation(words(i), words(1000 + i)) for i in range(40)]
    first[7] = first[3]  # a duplicate
    first[9] = conversation(words(4), "another answer")  # a conflict with row 4
    second = [conversation(words(100 + i), words(2000 + i)) for i in range(40)]
    second[5] = first[3]  # a duplicate across sources
    second[6] = conversation("see: " + words(500) + " end", words(501))  # contains a held-out question
    second[8] = conversation(words(502), "their answer")  # has the prompt of a held-out question
    second[11] = conversation(words(600), "the answer for training")  # has the prompt of a validation row
    second[13] = second[12]
    val = [conversation(words(600 + i), words(3000 + i)) for i in range(5)]
    held_out = [{"messages": [{"role": "user", "content": words(500 + i)}]} for i in range(0, 40, 2)]
    return {
        "first": write(tmp_path / "first.jsonl", first),
        "second": write(tmp_path / "second.jsonl", second),
        "val": write(tmp_path / "val.jsonl", val),
        "eval": write(tmp_path / "eval.jsonl", held_out),
    }


@pytest.fixture
def run_hygiene(model: Path, sources: dict[str, str], tmp_path: Path) -> Export:
    def run(name: str = "cache", progress: RecordingProgress | None = None, **options: Any) -> ExportSummary:
        defaults = {
            "model": str(model),
            "dataset": (sources["first"], sources["second"]),
            "val_dataset": (sources["val"],),
            "check_against": (sources["eval"],),
            "max_length": 400,
            "rows_per_shard": 10,
        }
        return export_rows(tmp_path / name, progress, **{**defaults, **options})

    return run


COUNTS = {"duplicates": 3, "conflicts": 4, "val_overlaps": 1, "held_out_overlaps": 2}
DUPLICATES = {
    ("first.jsonl", 7): ("first.jsonl", 3),
    ("second.jsonl", 5): ("first.jsonl", 3),
    ("second.jsonl", 13): ("second.jsonl", 12),
}


PAIRS = (("first.jsonl", 4), ("first.jsonl", 9)), (("second.jsonl", 11), ("val.jsonl", 0))
CONFLICTS = {row: other for pair in PAIRS for row, other in (pair, pair[::-1])}


@pytest.mark.smoke
def test_findings_are_counted_and_listed_and_change_no_other_file(run_hygiene: Export, tmp_path: Path) -> None:
    summary = run_hygiene()
    assert summary.hygiene == COUNTS
    cache = tmp_path / "cache"
    assert listed(cache, "duplicate") == DUPLICATES
    assert listed(cache, "conflict") == CONFLICTS
    assert listed(cache, "val_overlap") == {("second.jsonl", 11): ("val.jsonl", 0)}
    of_eval = {("second.jsonl", 6): ("eval.jsonl", 0), ("second.jsonl", 8): ("eval.jsonl", 1)}
    assert listed(cache, "held_out_overlap") == of_eval
    assert [line["of"]["by"] for line in findings(cache) if line["kind"] == "held_out_overlap"] == ["13-gram", "prompt"]
    assert not any(line["dropped"] for line in findings(cache))
    shown = dict(export_lines(summary))
    assert (shown["rows listed in hygiene.jsonl"], shown["  duplicates"], shown["  conflicts"]) == ("10", "3", "4")
    assert export_figures(summary)["hygiene"] == COUNTS
    run_hygiene("unchecked", check_against=())
    files = tree(cache)
    for name, digest in tree(tmp_path / "unchecked").items():
        # The manifest alone has the digest of the held-out questions, and with it another fingerprint.
        assert digest == files[name] or name in ("packtool.json", "hygiene.jsonl") or name.endswith("state.json"), name
    assert run_hygiene().already_finished
    assert run_hygiene().hygiene == COUNTS


def test_a_cache_without_findings_has_no_list(model: Path, sources: dict[str, str], tmp_path: Path) -> None:
    summary = export_rows(tmp_path / "cache", model=str(model), dataset=(sources["val"],))
    assert summary.hygiene == {}
    assert "hygiene" not in export_figures(summary)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["dropped.jsonl", "packtool.json", "train"]


@pytest.mark.smoke
def test_dropped_rows_are_in_no_index_and_counted(run_hygiene: Export, tmp_path: Path) -> None:
    whole, cache = tmp_path / "whole", tmp_path / "cache"
    complete = run_hygiene("whole")
    summary = run_hygiene(on_duplicates="drop", on_overlap="drop")
    dropped = {*DUPLICATES, ("second.jsonl", 6), ("second.jsonl", 8), ("second.jsonl", 11)}
    assert kept(cache) == [place for place in kept(whole) if place not in dropped]
    assert kept(cache, "val") == kept(whole, "val")
    assert summary.dropped == {"duplicate": 3, "held_out_overlap": 2, "val_overlap": 1}
    assert (summary.num_rows, summary.num_samples) == (complete.num_rows, complete.num_samples - 6)
    manifest = Manifest.read(str(cache))
    split = manifest.splits["train"]
    assert (split.rows, sum(shard.rows for shard in split.shards)) == (74, 80)
    reader = CacheReader.open([str(cache)])
    assert (summary.tokens, summary.target_tokens) == (
        int(reader.index.length.sum()) + manifest.splits["val"].tokens,
        int(reader.index.target_tokens.sum()) + manifest.splits["val"].target_tokens,
    )
    assert sum(split.length_histogram) == 74
    lines = [json.loads(line) for line in (cache / "dropped.jsonl").read_text().splitlines()]
    assert {(Path(line["source"]).name, line["row"]) for line in lines} == dropped
    details = {line["code"]: line["detail"] for line in lines}
    assert details["R057"].startswith("equals row 12 of ")
    assert details["R058"].startswith("has the prompt of row 0 of ")
    assert {line["row"] for line in findings(cache) if line["dropped"]} == {row for _, row in dropped}
    # Shards are not written again: they are those of the complete cache.
    files, all_files = tree(cache), tree(whole)
    assert all(files[name] == all_files[name] for name in files if "/data-" in name)
    assert len(reader.prefixes().offsets) == 75  # type: ignore[union-attr]


def test_a_finished_cache_of_another_policy_is_refused(run_hygiene: Export) -> None:
    run_hygiene()
    with pytest.raises(MismatchError, match=r"spec\.on_duplicates: None there, drop here"):
        run_hygiene(on_duplicates="drop")
    with pytest.raises(MismatchError, match=r"spec\.check_against"):
        run_hygiene(check_against=())


def test_workers_parts_and_interruptions_give_the_same_lists(
    run_hygiene: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"on_duplicates": "drop", "on_overlap": "drop"}
    run_hygiene("one", **options)
    reduce, num_pickled = HeldOut.__reduce__, itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(HeldOut, "__reduce__", lambda held_out: (next(num_pickled), reduce(held_out))[1])
        run_hygiene("two", dataset_num_proc=2, **options)
    assert next(num_pickled) in (1, 2), "once for each worker, not for each of the three tasks"
    for index in (1, 0, 2):
        summary = run_hygiene("parts", num_tasks=3, task_index=index, **options)
    assert summary.num_missing_shards == 0
    assert summary.hygiene == COUNTS

    def fail(*_: object) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(hygiene, "compare", fail)
        with pytest.raises(RuntimeError):
            run_hygiene("resumed", **options)
    (tmp_path / "resumed" / ".tasks" / "00001.json").unlink()  # of a task that has not finished
    assert run_hygiene("resumed", **options).num_reused == 2
    expected = tree(tmp_path / "one")
    for name in ("two", "parts", "resumed"):
        assert tree(tmp_path / name) == expected, name


@pytest.mark.parametrize("policy", ["keep", "fail"])
def test_a_run_that_lost_its_lock_leaves_the_list_of_the_other(
    run_hygiene: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    cache = tmp_path / "cache"

    def compare_while_another_takes_over(*args: Any) -> Any:
        for path in cache.glob(".lock-*"):
            path.unlink()
        (cache / "hygiene.jsonl").write_text("of another run")
        return compare(*args)

    monkeypatch.setattr(hygiene, "compare", compare_while_another_takes_over)
    with pytest.raises(MismatchError, match="was taken over by another run"):
        run_hygiene(on_overlap=policy)
    assert (cache / "hygiene.jsonl").read_text() == "of another run"


def test_a_refused_export_needs_no_second_encoding(run_hygiene: Export, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--on-overlap fail: 1 val_overlaps and 2 held_out_overlaps, in ") as error:
        run_hygiene(on_overlap="fail")
    assert error.value.code == "D010"
    assert len(findings(tmp_path / "cache")) == 10
    assert not (tmp_path / "cache" / "packtool.json").exists()
    summary = run_hygiene(on_overlap="drop")
    assert (summary.rows_made, summary.num_reused) == (0, 3)
    run_hygiene("direct", on_overlap="drop")
    assert tree(tmp_path / "cache") == tree(tmp_path / "direct")


def test_a_finished_cache_is_refused_too(run_hygiene: Export) -> None:
    run_hygiene()
    with pytest.raises(DataError, match="--on-overlap fail"):
        run_hygiene(on_overlap="fail")


def test_a_dry_run_counts_the_same(run_hygiene: Export) -> None:
    for options in ({}, {"on_duplicates": "drop", "on_overlap": "drop"}):
        summary, dry = run_hygiene(f"cache{len(options)}", **options), run_hygiene("none", dry_run=True, **options)
        for name in ("num_samples", "num_samples_by_split", "dropped", "tokens", "target_tokens", "length", "hygiene"):
            assert getattr(dry, name) == getattr(summary, name), name
    with pytest.raises(DataError, match="--on-overlap fail"):
        run_hygiene("none", dry_run=True, on_overlap="fail")


@pytest.mark.parametrize("damaged", ["index.arrow", "prefixes.arrow", "data-00001-of-00002.arrow"])
def test_files_without_the_dropped_rows_are_repaired(run_hygiene: Export, tmp_path: Path, damaged: str) -> None:
    options = {"on_duplicates": "drop", "on_overlap": "drop"}
    run_hygiene(**options)
    before = tree(tmp_path / "cache")
    path = tmp_path / "cache" / "train" / damaged
    path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    assert run_hygiene(repair=True, **options).num_samples == 79
    assert tree(tmp_path / "cache") == before


def test_all_rows_may_overlap(run_hygiene: Export, sources: dict[str, str], tmp_path: Path) -> None:
    options = {
        "dataset": (sources["val"],),
        "check_against": (sources["val"],),
        "val_dataset": (),
        "on_overlap": "drop",
    }
    with pytest.raises(DataError, match="none of 5 rows was kept: 5 held_out_overlap"):
        run_hygiene(**options)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["dropped.jsonl"]


def test_a_row_drawn_twice_equals_itself_only(run_hygiene: Export, sources: dict[str, str], tmp_path: Path) -> None:
    val = sources["val"]
    assert run_hygiene("twice", dataset=(f"{val}#3x",), val_dataset=(), check_against=()).hygiene == {}
    assert run_hygiene("named", dataset=(val, val), val_dataset=(), check_against=()).hygiene == {}
    copy = tmp_path / "copy.jsonl"
    shutil.copy(val, copy)
    summary = run_hygiene("copy", dataset=(val, f"{copy}#2x"), val_dataset=(), check_against=(), on_duplicates="drop")
    assert (summary.hygiene, summary.num_samples) == ({"duplicates": 10}, 5)


def test_rows_with_several_samples_are_dropped_whole(model: Path, tmp_path: Path) -> None:
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": words(i, 3)} for i, role in enumerate(roles)]
    other = conversation(words(9), words(10))
    rows = [{"messages": turns}, other, {"messages": turns}, {"messages": [*turns[:3], turns[1]]}]
    options: dict[str, Any] = {"model": str(model), "dataset": (write(tmp_path / "turns.jsonl", rows),)}
    options |= {"expand_turns": "true", "max_length": 400}
    whole = export_rows(tmp_path / "whole", **options)
    summary = export_rows(tmp_path / "turns", on_duplicates="drop", **options)
    assert summary.hygiene == {"duplicates": 1, "conflicts": 3}  # all but the other row have one prompt
    assert (whole.pieces_added, summary.pieces_added, summary.dropped) == (3, 2, {"duplicate": 1})
    assert [row for _, row in kept(tmp_path / "turns")] == [0, 0, 1, 3, 3]
    options |= {"dataset": (write(tmp_path / "texts.jsonl", [{"text": words(i // 2, 60)} for i in range(4)]),)}
    options |= {"expand_turns": "false", "truncation_strategy": "split", "max_length": 200}
    summary = export_rows(tmp_path / "texts", on_duplicates="drop", **options)
    assert summary.hygiene == {"duplicates": 2}
    assert (summary.num_samples, summary.pieces_added) == (6, 4)
    assert [row for _, row in kept(tmp_path / "texts")] == [0, 0, 0, 2, 2, 2]


def test_pictures_are_compared_by_content(model: Path, rows: Path, tmp_path: Path) -> None:
    shutil.copy(tmp_path / "1.png", tmp_path / "copy.png")
    names = ("1.png", "copy.png", "2.png")
    texts = [conversation("<image>what?", "a picture", images=[name]) for name in names]
    texts.append(conversation("<image>what?", "another", images=["1.png"]))
    path = write(tmp_path / "pictures.jsonl", texts)
    for media in ("reference", "embed"):
        cache = tmp_path / media
        summary = export_rows(cache, model=str(model), dataset=(path,), media=media)
        assert summary.hygiene == {"duplicates": 1, "conflicts": 3}
        assert listed(cache, "duplicate") == {("pictures.jsonl", 1): ("pictures.jsonl", 0)}
        assert {row for _, row in listed(cache, "conflict")} == {0, 1, 3}
    held_out = write(tmp_path / "eval.jsonl", [texts[2] | {"messages": texts[2]["messages"][:1]}])
    summary = export_rows(tmp_path / "held", model=str(model), dataset=(path,), check_against=(held_out,))
    assert listed(tmp_path / "held", "held_out_overlap") == {("pictures.jsonl", 2): ("eval.jsonl", 0)}


def test_near_duplicates(model: Path, rows: Path, tmp_path: Path) -> None:
    """Rows with one other word; not those with half of the words, with another picture, or in another split."""
    answer = words(1, 60).split()
    texts = [
        conversation("<image>what?", " ".join(changed), images=[picture])
        for changed, picture in (
            (answer, "1.png"),
            ([*answer[:30], "other", *answer[31:]], "1.png"),
            (answer, "2.png"),
            ([*answer[:30], *words(2, 30).split()], "1.png"),
            ([*answer[:59], "another"], "1.png"),
            (answer, "1.png"),
        )
    ]
    texts.append(conversation("hi", "yo"))  # fewer tokens than are compared at once
    texts.append(conversation("so, <image>what?", " ".join(answer), images=["1.png"]))
    path = write(tmp_path / "near.jsonl", texts)
    validation = write(tmp_path / "val.jsonl", [conversation("<image>so?", " ".join(answer), images=["1.png"])])
    options: dict[str, Any] = {"model": str(model), "dataset": (path,), "val_dataset": (validation,), "max_length": 900}
    for processes in (1, 2):
        cache = tmp_path / f"cache{processes}"
        summary = export_rows(cache, near_duplicates=0.8, dataset_num_proc=processes, rows_per_shard=64, **options)
        assert summary.hygiene["near_duplicates"] == 3
        near = listed(cache, "near_duplicate")
        assert near == {("near.jsonl", row): ("near.jsonl", 0) for row in (1, 4, 7)}
        assert listed(cache, "duplicate") == {("near.jsonl", 5): ("near.jsonl", 0)}
    export_rows(tmp_path / "dropped", near_duplicates=0.8, on_duplicates="drop", **options)
    assert [row for _, row in kept(tmp_path / "dropped")] == [0, 2, 3, 6]
    drops = (tmp_path / "dropped" / "dropped.jsonl").read_text().splitlines()
    reasons = {line["row"]: line["reason"] for line in map(json.loads, drops)}
    assert reasons == {1: "near_duplicate", 4: "near_duplicate", 5: "duplicate", 7: "near_duplicate"}
    options["dataset"] = (f"{path}#2x",)
    export_rows(tmp_path / "twice", near_duplicates=0.8, on_duplicates="drop", **options)
    assert sorted(row for _, row in kept(tmp_path / "twice")) == [0, 0, 2, 2, 3, 3, 6, 6]


def test_unfinished_exports_of_older_versions_have_no_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pa.RecordBatch.from_arrays([pa.nulls(2, field.type) for field in HASHED_INDEX], schema=HASHED_INDEX)
    older = batch.select([name for name in HASHED_INDEX.names if name != "signature"])
    monkeypatch.setattr(output_dir, "_batches_of", lambda *_: [(None, older), (None, batch)])
    parts = output_dir._index_parts(None, [])
    assert pa.Table.from_batches([part for _, _, part in parts], HASHED_INDEX).num_rows == 8  # two splits


@given(
    length=st.integers(30, 120),
    changes=st.sets(st.integers(0, 119), max_size=40),
    threshold=st.sampled_from([0.3, 0.6, 0.9]),
    seed=st.integers(0, 5),
)
@settings(deadline=None)
def test_near_duplicates_have_the_similarity(length: int, changes: set[int], threshold: float, seed: int) -> None:
    """MinHash with 128 permutations has a standard deviation of at most 0.045."""
    ids = np.random.default_rng(seed).integers(0, 1000, length)
    changed = ids.copy()
    changed[sorted(i for i in changes if i < length)] += 1000
    shingles, others = ({tuple(row[i : i + 5]) for i in range(length - 4)} for row in (ids.tolist(), changed.tolist()))
    similarity = len(shingles & others) / len(shingles | others)
    samples = [replace(sample_of(row.tolist()), row=i) for i, row in enumerate((ids, changed))]
    columns = hash_columns([[sample] for sample in samples], "train", MediaTokens({}), None, finds_near_duplicates=True)
    index = pa.table({name: columns.get(name, [0, 0]) for name in HASHED_INDEX.names}, schema=HASHED_INDEX)
    config = ExportConfig(model="", dataset=(), output_dir="", near_duplicates=threshold)
    counts, _, _ = compare(index, None, config)
    if similarity < 1 and abs(similarity - threshold) > 0.2:
        assert counts.get("near_duplicates", 0) == (similarity > threshold)


def test_planted_overlaps_are_all_found(model: Path, tmp_path: Path) -> None:
    """The 13 tokens of the tiny tokenizer are 13 characters, so 2 of a question's words."""
    drawn = random.Random(5)
    rows = [conversation(words(10_000 + i, 6), words(20_000 + i, 6)) for i in range(3000)]
    questions = [words(90_000 + i, 4) for i in range(200)]
    planted = sorted(drawn.sample(range(3000), 50))
    for i, row in enumerate(planted):
        question, kind = questions[i], i % 4
        if kind == 0:
            rows[row] = conversation(question, "-")
        elif kind == 1:
            rows[row] = conversation(f"{words(i, 3)} {question[5:19]} {words(-i - 1, 3)}", "-")
        elif kind == 2:
            rows[row] = conversation(words(i, 3), f"It is {question}.")
        else:
            rows[row]["messages"].insert(0, {"role": "system", "content": f"{words(i, 9)}\n{question}"})
    path = write(tmp_path / "rows.jsonl", rows)
    held_out = write(tmp_path / "eval.jsonl", [{"query": question, "response": "?"} for question in questions])
    settings = {
        "model": str(model),
        "dataset": (path,),
        "check_against": (held_out,),
        "rows_per_shard": 1000,
        "max_length": 400,
    }
    export_rows(tmp_path / "cache", **settings)
    assert listed(tmp_path / "cache", "held_out_overlap") == {
        ("rows.jsonl", row): ("eval.jsonl", i) for i, row in enumerate(planted)
    }


def test_instructions_of_all_questions_are_no_overlap(model: Path, tmp_path: Path) -> None:
    instruction = "Answer with one letter only, please. "
    rows = write(tmp_path / "rows.jsonl", [conversation(instruction + words(i), "a") for i in range(5)])
    for num in (4, 30):
        questions = [conversation(instruction + words(50 + i), "b") for i in range(num)]
        held_out = write(tmp_path / f"{num}.jsonl", questions)
        summary = export_rows(tmp_path / f"to{num}", model=str(model), dataset=(rows,), check_against=(held_out,))
        assert summary.hygiene == {}


def test_unusable_questions_are_named(run_hygiene: Export, tmp_path: Path) -> None:
    progress = RecordingProgress()
    (tmp_path / "broken.jsonl").write_text(json.dumps(conversation("a", "b")) + "\n{broken\n")
    run_hygiene(check_against=(str(tmp_path / "broken.jsonl"),), progress=progress)
    assert any("--check-against: 1 unusable rows; the first: " in note for note in progress.notes)
    (tmp_path / "broken.jsonl").write_text("{broken\n")
    with pytest.raises(DataError, match="there is no question"):
        run_hygiene("other", check_against=(str(tmp_path / "broken.jsonl"),))
    with pytest.raises(DataError, match=r"--check-against .*gone\.jsonl: there is no such file"):
        run_hygiene("gone", check_against=(str(tmp_path / "gone.jsonl"),))


def test_check_fails_by_its_threshold(
    model: Path, sources: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", sources["first"], sources["second"], "--model", str(model), "--max-length", "400"]
    held_out = ["--check-against", sources["eval"]]
    assert run([*command, *held_out]) == EXIT_OK
    capsys.readouterr()
    for threshold, code in (("0", EXIT_DATA), ("1", EXIT_DATA), ("2", EXIT_OK), ("2%", EXIT_DATA), ("3%", EXIT_OK)):
        assert run([*command, *held_out, "--max-overlap", threshold, "--json"]) == code
        output = capsys.readouterr()
        figures = json.loads(output.out)
        assert (figures["passed"], figures["num_overlaps"], figures["num_dropped"]) == (code == EXIT_OK, 2, 0)
        assert [row["row"] for row in figures["dropped_rows"]] == [6, 8]
        assert ("D010" in output.err) == (code == EXIT_DATA)
    assert run([*command, "--max-overlap", "0"]) != EXIT_OK
    assert "--max-overlap compares rows with validation or held-out rows" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["text_gsm8k_test.jsonl", "text_gpteacher_toolformer.jsonl", "mm_mathvision_a.jsonl"])
def test_real_rows(realdata: Path, tmp_path: Path, name: str) -> None:
    """Half of the real rows are held out: each is found in the complete file, and no other text but by 13 tokens."""
    lines = (realdata / name).read_text().splitlines()[:300]
    held_out = realdata / name if name.startswith("mm") else tmp_path / name
    if held_out.parent == tmp_path:
        held_out.write_text("\n".join(lines[::2]))
    settings = {"model": str(realdata / "tokenizers" / "qwen3-vl"), "max_length": 8192}
    dataset = (f"{realdata / name}#first300",)
    export_rows(tmp_path / "cache", dataset=dataset, check_against=(str(held_out),), rows_per_shard=100, **settings)
    overlaps = {row for _, row in listed(tmp_path / "cache", "held_out_overlap")}
    rows = {row for _, row in kept(tmp_path / "cache")}
    assert overlaps == rows if held_out.parent == realdata else overlaps >= {row for row in rows if row % 2 == 0}
    if name == "text_gsm8k_test.jsonl":
        assert len(overlaps) < 0.6 * len(rows)


def test_real_duplicates_are_equal_rows(realdata: Path, tmp_path: Path) -> None:
    path = realdata / "tool_glaive_en.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    model = str(realdata / "tokenizers" / "qwen3-vl")
    export_rows(tmp_path / "cache", model=model, dataset=(str(path),), max_length=8192, rows_per_shard=100)
    expected = {i: rows.index(row) for i, row in enumerate(rows) if rows.index(row) < i}
    assert len(expected) > 30
    assert {row: other for (_, row), (_, other) in listed(tmp_path / "cache", "duplicate").items()} == expected


def sample_of(ids: list[int]) -> EncodedSample:
    tokens = np.array(ids, np.int32)
    return EncodedSample(tokens, tokens, np.empty(0, np.int32), images=(), channel=None, source="", row=0)


IDS = st.lists(st.integers(0, 3), max_size=40)


@given(IDS, st.lists(IDS, max_size=4))
@settings(max_examples=200, deadline=None)
def test_ngrams_are_found_as_by_comparing_lists(ids: list[int], texts: list[list[int]]) -> None:
    def ngrams(values: list[int]) -> list[tuple[int, ...]]:
        return [tuple(values[i : i + 13]) for i in range(len(values) - 12)]

    hashes = ngram_hashes(np.array(ids, np.int32))
    assert len(hashes) == len(ngrams(ids))
    assert len(set(hashes.tolist())) == len(set(ngrams(ids)))
    keys = np.unique(np.concatenate([np.empty(0, np.uint64), *(ngram_hashes(np.array(t, np.int32)) for t in texts)]))
    held_out = HeldOut(keys, np.arange(len(keys), dtype=np.int32))
    rows = [[sample_of(ids)], [sample_of(ids[:20]), sample_of(ids[20:])]]  # of two samples: no n-gram across them
    matches = held_out.match(rows, np.ones(2, np.uint64)).tolist()  # 0 is the hash of 13 zeros
    expected = {ngram for text in texts for ngram in ngrams(text)}
    for match, parts in zip(matches, ([ids], [ids[:20], ids[20:]]), strict=True):
        shared = [ngram for part in parts for ngram in ngrams(part) if ngram in expected]
        assert (match >= 0) == bool(shared)
        if shared:
            assert keys[match] in ngram_hashes(np.array([token for ngram in shared for token in ngram], np.int32))[::13]


NUMBERS = (st.integers(0, 4), st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 2))
ROWS = st.lists(st.tuples(st.booleans(), *NUMBERS), max_size=25)


@given(ROWS, st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_rows_are_compared_as_in_plain_python(rows: list[Any], drops_duplicates: bool, drops_overlap: bool) -> None:
    """A row: whether it is of the val split, prompt, answer, source, number, number of samples."""
    columns: dict[str, list[Any]] = {name: [] for name in HASHED_INDEX.names}
    for is_val, prompt, answer, source, number, num_samples in rows:
        for i in range(num_samples):
            values = {"content": prompt * 10 + answer, "prompt": prompt + 100, "is_val": is_val, "source": source}
            values |= {"row": number, "question": -1, "signature": None, "is_first": i == 0}
            for name, column in columns.items():
                column.append(values.get(name, 0))
    config = ExportConfig(
        model="",
        dataset=(),
        output_dir="",
        on_duplicates="drop" if drops_duplicates else "keep",
        on_overlap="drop" if drops_overlap else "keep",
    )
    counts, lines, drops = compare(pa.table(columns, schema=HASHED_INDEX), None, config)
    expected = {"val_overlaps": 0, "duplicates": 0, "conflicts": 0}
    reasons = []
    for i, (is_val, prompt, answer, source, number, _) in enumerate(rows):
        originals = [row for row in rows[:i] if row[:3] == (is_val, prompt, answer)]
        is_duplicate = bool(originals) and originals[0][3:5] != (source, number)
        overlaps = not is_val and any(row[0] and row[1] == prompt for row in rows)
        expected["duplicates"] += is_duplicate
        expected["val_overlaps"] += overlaps
        expected["conflicts"] += any(row[1] == prompt and row[2] != answer for row in rows)
        duplicate = "duplicate" if is_duplicate and drops_duplicates else None
        reasons.append("val_overlap" if overlaps and drops_overlap else duplicate)
    assert counts == {name: count for name, count in expected.items() if count}
    assert len(lines) == 1 + sum(expected.values())
    firsts = np.cumsum([0, *(row[5] for row in rows)])
    assert {position: drop.reason for position, drop in drops} == {
        int(firsts[i]): reason for i, reason in enumerate(reasons) if reason
    }
