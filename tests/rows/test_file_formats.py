"""Every kind of file, plain and compressed, gives the rows that were written."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool.errors import DataError
from packtool.rows import text_files
from packtool.rows.forms import to_sample
from packtool.rows.open_files import TextReader, close_readers, opened
from packtool.rows.read import read_block, scan
from packtool.rows.readers import ParquetReader
from packtool.rows.sample import Dropped
from packtool.rows.source import SourceSpec
from tests.rows.conftest import COMPRESSIONS, KINDS, compress, rows_of, write_rows

ROWS = [{"text": f'line {i} "é", 你好\u2028 {"x" * (i % 7)}', "channel": str(i % 3)} for i in range(333)]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_rows(tmp_path: Path, kind: str, compression: str) -> None:
    path = tmp_path / f"rows.{kind}"
    write_rows(path, kind, ROWS)
    path = compress(path, compression)
    result = scan(SourceSpec(str(path)))
    expected = [{"text": row["text"]} for row in ROWS] if kind == "txt" else ROWS
    assert rows_of(result) == list(enumerate(expected))
    assert result.source.form == "text"
    assert to_sample(expected[5], result.source, 5).turns[0].content == ROWS[5]["text"]
    # Any order of blocks, as several workers take them.
    blocks = list(result.blocks)[::-1]
    assert [row_number for block in blocks for row_number, _ in read_block(result.source, block)][
        : blocks[0].num_rows
    ] == list(range(blocks[0].first_row, len(ROWS)))
    assert result.digest == scan(SourceSpec(str(path))).digest
    close_readers()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream.arrow"])
def test_nested_rows_of_tables_lose_their_nulls(tmp_path: Path, kind: str) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "q"}], "images": [{"bytes": b"png", "path": None}], "tools": None},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"a": 1, "b": None}]}], "tools": "[]"},
    ]
    write_rows(tmp_path / f"rows.{kind}", kind, rows)
    result = scan(SourceSpec(str(tmp_path / f"rows.{kind}")))
    (_, first_row), (_, second_row) = rows_of(result)
    assert first_row == {"messages": [{"role": "user", "content": "q"}], "images": [{"bytes": b"png"}], "tools": None}
    assert second_row["messages"] == [{"role": "assistant", "tool_calls": [{"a": 1}]}]
    assert to_sample(first_row, result.source, 0).images[0].data == b"png"


def test_saved_datasets_keep_their_images_undecoded(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    (tmp_path / "x.png").write_bytes(b"taken in by datasets")
    pictures = [{"bytes": b"no picture", "path": None}, {"bytes": None, "path": str(tmp_path / "x.png")}]
    data = {"text": ["a", "b"], "image": pictures}
    datasets.Dataset.from_dict(data, features=features).save_to_disk(str(tmp_path / "saved"))
    result = scan(SourceSpec(str(tmp_path / "saved" / "data-00000-of-00001.arrow")))
    samples = [to_sample(row, result.source, row_number) for row_number, row in rows_of(result)]
    assert [(ref.data, ref.path) for sample in samples for ref in sample.images] == [
        (b"no picture", None),
        (b"taken in by datasets", None),
    ]


def test_table_reader_continues_at_its_position(tmp_path: Path) -> None:
    table = pa.table({"text": [str(i) for i in range(5000)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=1000)
    source = scan(SourceSpec(str(tmp_path / "rows.parquet"))).source
    reader = ParquetReader(source)

    def rows(start: int, stop: int) -> list[str]:
        return [row for batch in reader.read(start, stop) for row in batch.column("text").to_pylist()]

    for start, stop in ((0, 64), (64, 128), (3990, 4010), (10, 20), (4999, 5000), (0, 5000)):
        assert rows(start, stop) == [str(i) for i in range(start, stop)]
    with pytest.raises(DataError, match="ends at row 5000"):
        rows(4990, 5010)
    assert rows(7, 8) == ["7"]
    reader.close()


FIELDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=8)


@given(st.lists(st.tuples(FIELDS, FIELDS), max_size=25), st.integers(1, 30), st.integers(1, 6), st.sampled_from("ct"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
def test_any_csv_is_parsed_correctly(
    tmp_path: Path, cells: list[tuple[str, str]], chunk: int, block_rows: int, kind: str
) -> None:
    kind = {"c": "csv", "t": "tsv"}[kind]
    rows = [{"text": a, "channel": b} for a, b in cells] or [{"text": "", "channel": ""}]
    path = tmp_path / f"rows.{kind}"
    write_rows(path, kind, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "CHUNK_BYTES", chunk)
        patch.setattr(text_files, "BLOCK_ROWS", block_rows)
        result = scan(SourceSpec(str(path)))
    assert rows_of(result) == list(enumerate(rows))


def test_broken_csv_record_drops_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b'\xef\xbb\xbfquestion, answer\n\nq1,a1\nq2,a2,more\nq3\nq4,"a\n4"\nq5\nq\xff6,a6\nq\r7,a7\n"q""8"x,a8\n"q9,a9'
    )
    rows = rows_of(scan(SourceSpec(str(path))))
    assert [row_number for row_number, _ in rows] == list(range(9))
    good_rows = {row_number: row for row_number, row in rows if not isinstance(row, Dropped)}
    dropped = {row_number: row.reason for row_number, row in rows if isinstance(row, Dropped)}
    assert dropped == {**dict.fromkeys((1, 2, 4, 6, 8), "invalid_csv"), 5: "invalid_text"}
    assert good_rows == {
        0: {"question": "q1", "answer": "a1"},
        3: {"question": "q4", "answer": "a\n4"},
        7: {"question": 'q"8x', "answer": "a8"},
    }


def test_unclosed_quote_is_abandoned_early(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + '"open\n' + "closed\n" * 500)
    rows = rows_of(scan(SourceSpec(str(path), max_row_bytes=1000)))
    assert isinstance(rows[0][1], Dropped)
    assert [row for _, row in rows[1:]] == [{"text": "closed"}] * 500


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,text\n1,2\n", "names 'text' twice"),
        ("a.csv", b"te\xffxt\n1\n", "not UTF-8"),
        ("a.parquet", b"PAR1 no", "cannot be read as a parquet file"),
        ("a.parquet", b"", "cannot be read as a parquet file"),
        ("a.arrow", b"nonsense", "cannot be read as an Arrow file"),
        ("a.arrow", b"", "cannot be read as an Arrow file"),
        ("a.jsonl.gz", b"not compressed", "cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(b'{"text": 1}\n' * 99, mtime=0)[:-9], "cannot be decompressed: Truncated"),
        ("a.parquet.zst", b"nonsense", "cannot be decompressed"),
        ("a.json", b'{\n "data": []}', "the file is one JSON object"),
    ],
)
def test_broken_files_are_errors(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as exc_info:
        scan(SourceSpec(str(tmp_path / name)))
    assert str(tmp_path / name) in str(exc_info.value)


@pytest.mark.parametrize("kind", ["csv", "txt", "jsonl", "parquet", "arrow", "json"])
def test_files_without_rows_give_no_rows(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind in ("parquet", "arrow"):
        table = pa.table({"text": pa.array([], pa.string())})
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
    else:
        path.write_text({"csv": "text\n", "json": "[]"}.get(kind, "\n"))
    result = scan(SourceSpec(str(path)))
    assert (result.num_rows, list(result.blocks), result.source.form) == (0, [], "text" if kind == "txt" else None)


def test_a_file_that_changes_between_scan_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 100)
    result = scan(SourceSpec(str(path)))
    path.write_text('{"text": "b"}\n' * 90)
    with pytest.raises(DataError, match="has changed since it was scanned: it had 1400 bytes and now has 1260"):
        rows_of(result)
    path.unlink()
    with pytest.raises(DataError, match="was deleted after its scan"):
        rows_of(result)


def test_readers_are_per_thread(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "jsonl", ROWS)
    path = compress(tmp_path / "rows.jsonl", ".gz")
    result = scan(SourceSpec(str(path)))
    rows_by_thread: list[Any] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: rows_by_thread.append(rows_of(result)))
        thread.start()
        thread.join()
    assert rows_by_thread[0] == rows_by_thread[1] == rows_of(result)
    assert opened(result.source, TextReader) is not None  # the one that reading made
    close_readers()


def test_compressed_rows_are_decompressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packtool.rows import open_files as module

    write_rows(tmp_path / "rows.jsonl", "jsonl", ROWS)
    path = compress(tmp_path / "rows.jsonl", ".zst")
    result = scan(SourceSpec(str(path)))
    opens: list[str] = []
    real = module.open_text
    monkeypatch.setattr(module, "open_text", lambda *args: opens.append(args[0]) or real(*args))
    blocks = list(result.blocks)
    for block in [*blocks[1::2], blocks[0]]:
        list(read_block(result.source, block))
    assert len(opens) == 2  # the second for going back
    close_readers()


@pytest.mark.parametrize("name", ["rows.csv.gz", "rows.txt", "rows.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.removesuffix(".gz")
    if name == "rows.parquet":
        with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
            for _ in range(30):
                writer.write_table(pa.table({"text": ["x" * 10_000 + str(i) for i in range(400)]}), row_group_size=400)
    else:
        with path.open("w") as file:
            file.write("text\n")
            for i in range(12_000):
                file.write(f"{'x' * 10_000}{i}\n")
        path = compress(path, ".gz") if name.endswith(".gz") else path
    program = (
        "import sys, resource\n"
        "from packtool.rows.read import scan\nfrom packtool.rows.source import SourceSpec\n"
        "from packtool.rows.read import read_block\nimport pyarrow, pyarrow.parquet, packtool.rows.readers\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = scan(SourceSpec(sys.argv[1]))\n"
        "rows = sum(1 for block in found.blocks for _ in read_block(found.source, block))\n"
        "print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    num_rows, kilobytes = map(int, done.stdout.split())
    assert num_rows == 12_000 + (name == "rows.txt")
    assert kilobytes < 90_000


def test_rows_are_the_same_in_every_kind(data: Path, tmp_path: Path) -> None:
    for file in sorted(data.glob("*.jsonl")):
        result = scan(SourceSpec(str(file)))
        rows = rows_of(result)
        assert [row for _, row in rows] == [json.loads(line) for line in file.read_text().splitlines()]
        samples = [to_sample(row, result.source, row_number) for row_number, row in rows]
        assert result.source.form == "messages"
        assert all(sample.turns and not sample.num_marks_added for sample in samples)
        for sample in samples:
            for ref in (*sample.images, *sample.videos, *sample.audios):
                assert ref.path is not None
                assert Path(ref.path).is_file()
        texts = [{"text": json.dumps(row, ensure_ascii=False)} for _, row in rows[:500]]
        for kind in ("csv", "parquet"):
            write_rows(tmp_path / f"rows.{kind}", kind, texts)
            result = scan(SourceSpec(str(compress(tmp_path / f"rows.{kind}", ".zst"))))
            assert [row for _, row in rows_of(result)] == texts
