from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from packtool.errors import DataError
from packtool.rows.open_files import open_text
from packtool.rows.read import follow, scan
from packtool.rows.sample import Dropped
from packtool.rows.source import Compression, SourceSpec
from tests.rows.conftest import rows_of

CONTENTS = {
    "rows.jsonl": '{{"text": "{0}"}}\n{{"text": "{0} {0}"}}\n{{"text": "b {0}"}}\n',
    "rows.json": '[{{"text": "{0}"}}, {{"text": "{0} {0}"}}, {{"text": "b {0}"}}]',
    "rows.csv": "text,more\n{0},1\n{0} {0},2\nb {0},3\n",
    "rows.txt": "{0}\n{0} {0}\nb {0}\n",
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize(
    ("encoding", "text", "iconv_name"),
    [
        ("utf-16", "hello world", "UTF-16"),
        ("utf-16-le", "hello world", "UTF-16LE"),
        ("utf-16-be", "hello world", "UTF-16BE"),
        ("utf-32", "hello world", "UTF-32"),
        ("utf-32-le", "hello world", "UTF-32LE"),
        ("gb18030", "你好，世界", "GB18030"),
        ("cp1252", "déjà vu", "WINDOWS-1252"),
    ],
)
def test_other_encodings_are_reported_once(
    tmp_path: Path, name: str, encoding: str, text: str, iconv_name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(CONTENTS[name].format(text).encode(encoding))
    for look in (scan, follow):
        with pytest.raises(DataError) as exc_info:
            look(SourceSpec(str(path)))  # type: ignore[operator]
        assert f"iconv -f {iconv_name} -t UTF-8" in str(exc_info.value)
        assert name in exc_info.value.message


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("look", [scan, follow])
def test_a_file_that_is_refused_is_closed(
    tmp_path: Path, name: str, look: Callable[[SourceSpec], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_bytes(CONTENTS[name].format("hello world").encode("utf-16"))
    opened: list[BinaryIO] = []

    def remembered(path: str, compression: Compression | None) -> BinaryIO:
        opened.append(open_text(path, compression))
        return opened[-1]

    monkeypatch.setattr("packtool.rows.read.open_text", remembered)
    with pytest.raises(DataError, match="iconv"):
        look(SourceSpec(str(path)))
    assert opened
    assert all(file.closed for file in opened)


def test_compressed_file_with_another_encoding_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress('{"text": "a"}\n'.encode("utf-16")))
    with pytest.raises(DataError, match="UTF-16"):
        scan(SourceSpec(str(path)))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_rows_with_invalid_utf8_are_dropped(tmp_path: Path, name: str) -> None:
    rows = [
        b'{"text": "a\xff"}',
        *[b'{"text": "plain"}'] * 3,
        '{"text": "für 你"}'.encode(),
        b'{"text": "\xff\xfe\xfd"}',
    ]
    path = tmp_path / name
    path.write_bytes(b"\n".join(rows) if name == "rows.jsonl" else b"[" + b",".join(rows) + b"]")
    result = rows_of(scan(SourceSpec(str(path))))
    assert [row.reason if isinstance(row, Dropped) else row["text"] for _, row in result] == [
        *("invalid_text", "plain", "plain", "plain", "für 你", "invalid_text")
    ]
