from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool import storage
from packtool.errors import DataError
from packtool.rows import text_files
from packtool.rows.read import follow, scan
from packtool.rows.sample import Dropped
from packtool.rows.source import SourceSpec
from tests.rows.conftest import rows_of, write_rows


def rows_in(path: Path) -> list[tuple[int, Any]]:
    return rows_of(scan(SourceSpec(str(path))))


ROWS = st.lists(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.text(max_size=20) | st.integers(),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
        max_size=3,
    ).map(lambda row: {**row, "text": "t"}),
    max_size=30,
)


@pytest.mark.smoke
@given(ROWS, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 40), st.integers(1, 9), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_any_block_split_gives_the_same_rows(
    tmp_path: Path, rows: list[Any], indent: int | None, ascii_only: bool, chunk: int, block_rows: int, bom: bool
) -> None:
    mark = b"\xef\xbb\xbf" if bom else b""
    array = tmp_path / "rows.json"
    array.write_bytes(mark + json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass"))
    jsonl = tmp_path / "rows.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=True) + "\r\n" * (1 + i % 2) for i, row in enumerate(rows))
    jsonl.write_bytes(mark + text.rstrip("\r\n").encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "CHUNK_BYTES", chunk)
        patch.setattr(text_files, "BLOCK_ROWS", block_rows)
        try:
            result = rows_in(array)
        except DataError:
            assert not ascii_only  # a lone surrogate is no UTF-8
        else:
            assert result == list(enumerate(rows))
        assert [row for _, row in rows_in(jsonl)] == rows
        # Every second row is followed by a blank line, and rows are numbered by their lines.
        assert [row_number for row_number, _ in rows_in(jsonl)] == [i + i // 2 for i in range(len(rows))]


def test_broken_line_drops_only_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": 1}\n{"text": \n\n[1]\n{"text": 4}\n')
    result = rows_in(path)
    assert [row_number for row_number, _ in result] == [0, 1, 3, 4]
    assert result[0][1] == {"text": 1}
    assert result[3][1] == {"text": 4}
    broken, no_object = result[1][1], result[2][1]
    assert isinstance(broken, Dropped)
    assert (broken.row, broken.reason) == (1, "invalid_json")
    assert isinstance(no_object, Dropped)
    assert no_object.reason == "invalid_row"


def test_jsonl_files_named_json_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": 1}\n{"text": 2}\n')
    assert [row for _, row in rows_in(path)] == [{"text": 1}, {"text": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, {"a": }]', "row 1"),
        ('[{"a": 1} {"a": 2}]', "row 1"),
        ('[{"a": 1}, {"a": 2}', "near byte 19: the file ends inside"),
        ("", "one array"),
        ('"text"', "one array"),
    ],
)
def test_broken_array_reports_the_position(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        scan(SourceSpec(str(path)))


def test_unsupported_files_are_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "gone.json", "no such file"), (tmp_path, "directory")):
        with pytest.raises(DataError, match=message):
            scan(SourceSpec(str(path)))
    (tmp_path / "rows.xlsx").touch()
    with pytest.raises(DataError, match=r"unknown file format\nSupported are .json, .*, each also with .gz or .zst"):
        scan(SourceSpec(str(tmp_path / "rows.xlsx")))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["query", "response", "query"])
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(DataError, match="has two columns 'query'"):
        scan(SourceSpec(str(path)))


def test_form_is_detected_after_broken_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("broken\n" * 64 * 5 + '{"title": "a", "body": "b", "answer": "c"}\n')
    spec = SourceSpec(str(path), columns=(("query", "title"), ("response", "body")))
    source, blocks = follow(spec)
    scanned = scan(spec)
    assert source == scanned.source
    assert dict(source.columns) == {"query": "title", "response": "body"}
    assert list(blocks) == list(scanned.blocks)


def test_empty_sources_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "a.jsonl").write_text("\n \n")
    assert rows_in(tmp_path / "a.json") == []
    assert rows_in(tmp_path / "a.jsonl") == []


def test_arrays_are_streamed(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000}]})
    with path.open("w") as file:
        file.write("[")
        file.write(",\n".join([row] * 12_000))
        file.write("]")
    assert path.stat().st_size > 120e6
    program = (
        "import sys, resource; from packtool.rows.read import scan;"
        "from packtool.rows.source import SourceSpec;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; source = scan(SourceSpec(sys.argv[1]));"
        "print(source.num_rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    num_rows, kilobytes = map(int, done.stdout.split())
    assert num_rows == 12_000
    assert kilobytes < 80_000


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "txt"])
def test_a_small_file_is_opened_once_to_be_scanned_and_once_to_be_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / f"rows.{kind}", kind, [{"text": "<image> a"}, {"text": "b"}])
    opens: list[str] = []
    real = storage.open_read
    monkeypatch.setattr(storage, "open_read", lambda path, *args: opens.append(path) or real(path, *args))
    result = scan(SourceSpec(str(tmp_path / f"rows.{kind}")))
    assert result.source.form == "text"
    assert len(opens) == 1
    opens.clear()
    assert [row["text"] for _, row in rows_of(result)] == ["<image> a", "b"]
    assert len(opens) == 1
    for path in tmp_path.iterdir():
        path.write_text(path.read_text() + " \n")
    with pytest.raises(DataError, match="has changed since it was scanned"):
        rows_of(result)


def test_equal_files_are_distinguished_by_name(tmp_path: Path) -> None:
    """The form of files with equal keys is detected once; problems are reported for each file."""
    for name, text in (("a", '{"q": 1}'), ("b", '{"q": 1}'), ("c", '{"text": "t"}'), ("d", '{"text": null, "q": 1}')):
        (tmp_path / f"{name}.jsonl").write_text(text + "\n")
    for name in "abd":
        with pytest.raises(DataError, match=rf"{name}\.jsonl: the rows have no known form"):
            scan(SourceSpec(str(tmp_path / f"{name}.jsonl")))
    assert scan(SourceSpec(str(tmp_path / "c.jsonl"))).source.form == "text"
