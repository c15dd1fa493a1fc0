"""``packtool check``: which rows an export would drop, at which lines, and whether there are too many."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packtool.cli.main import run
from packtool.config.codes import reason_codes
from packtool.errors import EXIT_DATA, EXIT_OK, EXIT_USAGE
from tests.cli.narrow_model import make_narrow_model


def row(question: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "4"}]
    return json.dumps({"messages": turns})


# A blank line, and two rows that cannot be used.
LINES = [row("2 + 2?"), "", '{"messages": [}', row("1 + 3?"), '{"messages": []}', row("5 - 1?")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("check") / "model"
    make_narrow_model(path)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    (tmp_path / "rows.jsonl").write_text("\n".join(LINES))
    return tmp_path


def check(model: str, words: str) -> int:
    return run(["check", *words.split(), "--model", model, "--max-length", "512"])


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.smoke
def test_dropped_rows_have_their_lines(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(model, "rows.jsonl --json") == EXIT_DATA
    result = figures(capsys)
    assert not result["passed"]
    assert (result["num_rows"], result["num_samples"], result["num_dropped"]) == (5, 3, 2)
    places = [(each["reason"], each["line"], each["row"]) for each in result["dropped_rows"]]
    assert places == [("invalid_json", 3, 2), ("empty_conversation", 5, 4)]
    for reason, line, _ in places:
        assert LINES[line - 1].startswith('{"messages": ['), reason
    assert {path.name for path in folder.iterdir()} == {"rows.jsonl"}  # no cache


@pytest.mark.parametrize(
    ("threshold", "code"), [("0", EXIT_DATA), ("1", EXIT_DATA), ("2", EXIT_OK), ("39.9%", EXIT_DATA), ("40%", EXIT_OK)]
)
def test_thresholds_decide_the_exit(
    threshold: str, code: int, folder: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(model, f"rows.jsonl --max-dropped {threshold}") == code
    output = capsys.readouterr()
    assert output.out.startswith(f"# packtool check: {'failed' if code else 'passed'}\n")
    assert ("[D009]" in output.err) == bool(code)


@pytest.mark.parametrize("threshold", ["-1", "1.5", "many", "%"])
def test_invalid_thresholds_are_refused(
    threshold: str, folder: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(model, f"rows.jsonl --max-dropped={threshold}") == EXIT_USAGE
    assert "give a number of rows, or a percentage such as 1%" in capsys.readouterr().err


def test_a_check_counts_what_an_export_drops(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"export --dataset rows.jsonl --model {model} --max-length 512 --output-dir cache --json"
    assert run(words.split()) == EXIT_OK
    exported = figures(capsys)
    assert check(model, "rows.jsonl --json") == EXIT_DATA
    checked = figures(capsys)
    same = ("num_rows", "num_samples", "dropped", "tokens", "target_tokens", "length")
    assert {name: checked[name] for name in same} == {name: exported[name] for name in same}
    lines = (folder / "cache" / "dropped.jsonl").read_text().splitlines()
    assert [{**json.loads(line), "line": json.loads(line)["row"] + 1} for line in lines] == checked["dropped_rows"]


def test_markdown_has_codes_and_remedies(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text('{"messages": [{"role": "<b>|`x`", "content": "a"}]}')
    assert check(model, "rows.jsonl --markdown summary.md") == EXIT_DATA
    text = (folder / "summary.md").read_text()
    assert text == capsys.readouterr().out
    code = reason_codes()["unknown_role"]
    (line,) = [line for line in text.splitlines() if code.code in line]
    assert line.startswith(f"| {code.code} | unknown_role | 1 | rows.jsonl:1: ")
    assert "\\<b\\>\\|\\`x\\`" in line
    assert len(re.split(r"(?<!\\)\|", line)) == 7


def test_annotations_of_github_name_lines(
    folder: Path, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert check(model, "rows.jsonl") == EXIT_DATA
    annotations = [line for line in capsys.readouterr().err.splitlines() if line.startswith("::")]
    assert [line.partition("::")[2].partition("::")[0] for line in annotations] == [
        "error file=rows.jsonl,line=3,title=R038 invalid_json",
        "error file=rows.jsonl,line=5,title=R021 empty_conversation",
    ]
    assert check(model, "rows.jsonl --max-dropped 50%") == EXIT_OK
    assert "::warning file=rows.jsonl,line=3," in capsys.readouterr().err
    assert check(model, "rows.jsonl --no-github") == EXIT_DATA
    assert "::" not in capsys.readouterr().err


def test_annotations_cannot_be_forged_by_rows(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a,b%0A.jsonl"
    (folder / name).write_text(json.dumps({"messages": [{"role": "x\n::error::forged", "content": "a"}]}))
    assert check(model, f"{name} --github") == EXIT_DATA
    (annotation,) = [line for line in capsys.readouterr().err.splitlines() if "::" in line]
    assert annotation.startswith("::error file=a%2Cb%250A.jsonl,line=1,title=")


def test_files_without_lines_give_the_row(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [[{"role": "user", "content": "2 + 2?"}, {"role": role, "content": "4"}] for role in ("assistant", "x")]
    pq.write_table(pa.table({"messages": messages}), folder / "rows.parquet")
    (folder / "rows.json").write_text(f"[{row('2 + 2?')},\n{LINES[4]}]")
    assert check(model, "rows.parquet rows.json --json --github --gitlab quality.json") == EXIT_DATA
    output = capsys.readouterr()
    places = [(each["source"], each["row"], each["line"]) for each in json.loads(output.out)["dropped_rows"]]
    assert places == [("rows.parquet", 1, None), ("rows.json", 1, None)]
    assert "::error file=rows.json,title=R021 empty_conversation::row 1: " in output.err
    issues = json.loads((folder / "quality.json").read_text())
    assert [issue["location"] for issue in issues] == [
        {"path": "rows.parquet", "lines": {"begin": 1}},
        {"path": "rows.json", "lines": {"begin": 1}},
    ]
    assert issues[1]["description"].startswith("empty_conversation: row 1: ")
    assert len({issue["fingerprint"] for issue in issues}) == 2


def test_lines_in_a_json_file_are_lines(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").rename(folder / "rows.json")
    assert check(model, "rows.json --json") == EXIT_DATA
    assert [each["line"] for each in figures(capsys)["dropped_rows"]] == [3, 5]


def test_a_file_without_usable_rows_is_reported(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text(LINES[4])
    assert check(model, "rows.jsonl --json") == EXIT_DATA
    assert figures(capsys)["dropped"] == {"empty_conversation": 1}
    assert check(model, "rows.jsonl --max-dropped 100%") == EXIT_OK


def test_several_processes_give_the_same_result(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rows.jsonl").write_text("\n".join(LINES * 120))
    results = []
    for num_processes in (1, 2):
        assert check(model, f"rows.jsonl --json --dataset-num-proc {num_processes}") == EXIT_DATA
        results.append(figures(capsys))
        del results[-1]["seconds"]
    assert results[0] == results[1]
    assert len(results[0]["dropped_rows"]) == results[0]["num_dropped"] == 240


def test_real_rows_pass(realdata: Path, model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = realdata / "text_gsm8k_test.jsonl"
    assert run(["check", str(rows), "--model", model, "--max-length", "4096", "--json"]) == EXIT_OK
    result = figures(capsys)
    assert (result["num_rows"], result["num_dropped"]) == (len(rows.read_text().splitlines()), 0)
