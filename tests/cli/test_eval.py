"""``packtool eval`` from the command line to the file, and what it refuses before the model is loaded."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.errors import EXIT_DATA, EXIT_MISMATCH, EXIT_STORAGE, EXIT_USAGE
from tests.train.tiny import TinyWorld, export_rows, make_tiny_world

COLUMNS = [
    "sample",
    "source",
    "row",
    "part",
    "channel",
    "tokens",
    "target_tokens",
    "loss",
    "perplexity",
    "token_accuracy",
    "first_wrong",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """Rows in two channels and in none, split in two."""
    torch.set_num_threads(1)
    tiny = make_tiny_world(tmp_path_factory.mktemp("tiny"))
    rows = json.loads(Path(tiny.rows).read_text())
    for row_index, row in enumerate(rows):
        row["channel"] = ("colours", "shapes", None)[row_index % 3]
    Path(tiny.rows).write_text(json.dumps(rows))
    split = dataclasses.replace(tiny, cache=tiny.cache + "-split")
    export_rows(split, split.cache, split_dataset_ratio=0.3)
    return split


@pytest.fixture
def messages(tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with further words; (exit code, stdout, stderr, output file)."""

    def evaluated(*words: str, model: str = tiny.model, cache: str = tiny.cache) -> tuple[int, str, str, Path]:
        output = tmp_path / "out" / "evaluation.parquet"
        arguments = ["eval", "--model", model, "--cached-dataset", cache, "--output", str(output)]
        capsys.readouterr()
        code = run([*arguments, "--dataloader-num-workers", "0", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, output

    return evaluated


def test_evaluation_writes_a_line_per_sample_and_totals(messages: Any, tiny: TinyWorld) -> None:
    code, out, err, output = messages("--json", "--max_tokens_per_micro_batch", "200")
    assert code == 0, err
    totals = json.loads(out)
    reader = CacheReader.open([tiny.cache], "val")
    table = pq.read_table(output)
    columns, info = table.to_pydict(), json.loads(table.schema.metadata[b"packtool"])
    assert list(columns) == COLUMNS
    assert totals["split"] == info["split"] == "val"
    assert columns["sample"] == list(range(len(reader)))
    samples = [reader.sample(position) for position in range(len(reader))]
    assert columns["row"] == [sample.row for sample in samples]
    assert columns["source"] == [tiny.rows] * len(reader)
    assert columns["part"] == [None] * len(reader)
    assert columns["channel"] == [sample.channel for sample in samples]
    assert columns["tokens"] == reader.index.length.tolist()
    assert columns["target_tokens"] == reader.index.target_tokens.tolist()
    assert columns["perplexity"] == pytest.approx([math.exp(loss) for loss in columns["loss"]])
    for name, total in ((None, totals), *totals["channels"].items()):
        selected = [i for i in range(len(reader)) if name is None or columns["channel"][i] == name]
        targets = sum(columns["target_tokens"][i] for i in selected)
        losses = sum(columns["loss"][i] * columns["target_tokens"][i] for i in selected)
        assert (total["num_samples"], total["target_tokens"]) == (len(selected), targets)
        assert total["loss"] == pytest.approx(losses / targets)
    assert set(totals["channels"]) == {"colours", "shapes"}
    assert info["total"]["loss"] == totals["loss"]
    assert info["channels"]["shapes"]["loss"] == totals["channels"]["shapes"]["loss"]
    assert totals["output"] == str(output)
    assert os.listdir(output.parent) == [output.name]
    assert "of at most 200 tokens, 1 process" in err


def test_terminal_output(messages: Any) -> None:
    code, out, _, output = messages("--split", "train", "--limit", "9")
    assert code == 0
    for words in ("train split", "all", "colours", "shapes", "(no channel)", "perplexity", f"written: {output}"):
        assert words in out
    assert pq.read_metadata(output).num_rows == 9


def test_an_adapter_is_evaluated_with_its_base(messages: Any, tiny: TinyWorld, tmp_path: Path) -> None:
    base = AutoModelForImageTextToText.from_pretrained(tiny.model)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.9))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    losses = []
    for model in (tiny.model, str(tmp_path / "adapter"), str(tmp_path / "merged")):
        if model.endswith("merged"):
            shutil.copytree(tiny.model, model)
            adapted.merge_and_unload().save_pretrained(model)
        code, out, err, _ = messages("--json", model=model)
        assert code == 0, err
        losses.append(json.loads(out)["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3
    assert losses[1] == pytest.approx(losses[2], abs=1e-5)


def test_a_sample_over_the_limit_is_named(messages: Any, tiny: TinyWorld) -> None:
    lengths = CacheReader.open([tiny.cache], "val").index.length
    code, _, err, output = messages("--max-tokens-per-micro-batch", str(lengths.max() - 1))
    assert code == EXIT_USAGE
    assert f"--max-tokens-per-micro-batch {lengths.max() - 1} is a hard limit" in err
    assert f"sample {lengths.argmax()} ({tiny.rows}, row " in err
    assert f"Raise it to {lengths.max()}" in err
    assert not output.exists()
    assert messages("--max-tokens-per-micro-batch", str(lengths.max()))[0] == 0


def test_mismatches_are_refused_before_the_model_is_loaded(
    messages: Any, tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtool.train.evaluate.run._load_and_evaluate", None)
    other = shutil.copytree(tiny.model, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/nowhere"}))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "adapter_config.json").write_text("{}")
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "file").write_text("")
    for words, options, code, message in (
        ((), {"model": str(other)}, EXIT_MISMATCH, "chat template"),
        ((), {"model": str(tmp_path / "gone")}, EXIT_USAGE, "no such directory"),
        ((), {"model": str(tmp_path / "lost")}, EXIT_MISMATCH, "/nowhere"),
        ((), {"model": str(tmp_path / "odd")}, EXIT_MISMATCH, "does not name a base model"),
        ((), {"cache": str(tmp_path / "gone")}, EXIT_MISMATCH, "no finished cache"),
        (("--split", "val"), {"cache": tiny.cache.removesuffix("-split")}, EXIT_MISMATCH, "has no val split"),
        (("--split", "test"), {}, EXIT_USAGE, "none of train, val"),
        (("--output", "a.csv"), {}, EXIT_USAGE, "must end in .parquet"),
        (("--output", str(tmp_path / "folder.parquet")), {}, EXIT_USAGE, "is a directory"),
        (("--output", str(tmp_path / "file" / "a.parquet")), {}, EXIT_STORAGE, "file"),
        (("--cache-dir-size", "big"), {}, EXIT_USAGE, "--cache-dir-size"),
    ):
        exit_code, _, err, _ = messages(*words, **options)
        assert (exit_code, message in err) == (code, True), (words, options, err)


def test_an_unavailable_kernel_is_refused(messages: Any) -> None:
    code, _, err, output = messages("--attn-impl", "varlen", "--torch-dtype", "float32")
    assert code == EXIT_USAGE
    assert "--attn-impl varlen" in err
    assert not output.exists()


def test_a_missing_image_leaves_no_output_file(messages: Any, tiny: TinyWorld, tmp_path: Path) -> None:
    rows = shutil.copytree(Path(tiny.rows).parent, tmp_path / "rows")
    moved = dataclasses.replace(tiny, rows=str(rows / "train.json"), cache=str(tmp_path / "cache"))
    export_rows(moved, moved.cache)
    (rows / "pictures" / "0000.png").unlink()
    code, _, err, output = messages(cache=moved.cache)
    assert code == EXIT_DATA
    assert "0000.png" in err
    assert os.listdir(output.parent) == []


def test_processes_start_only_after_the_checks(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Started(Exception):
        pass

    def start(file: str, command: list[str], environ: dict[str, str]) -> None:
        raise Started(command)

    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setattr(os, "execvpe", start)
    code, _, err, _ = messages("--debug")
    assert code == 1
    assert "'--nproc-per-node', '2'" in err
    assert "'packtool', 'eval', '--model'" in err
    assert messages("--max-tokens-per-micro-batch", "3")[0] == EXIT_USAGE
