"""Packs in tar files: read whole, or refused, whatever the bytes are."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool.errors import DataError, PacktoolError
from packtool.rows.open_files import close_readers
from packtool.rows.read import scan
from packtool.rows.sample import Dropped
from packtool.rows.source import SourceSpec
from tests.rows.conftest import rows_of


def tar(path: Path, members: Mapping[str, bytes]) -> Path:
    """A tar file of these members."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def pack(pack_index: int, **columns: Any) -> dict[str, bytes]:
    """One pack with a picture, as members."""
    row = {"input_ids": [1, 2, pack_index], "images": [{"path": "p.png", "file": "image0.png"}], **columns}
    return {
        f"folder.d/{pack_index:09d}.json": json.dumps(row).encode(),
        f"folder.d/{pack_index:09d}.image0.png": b"picture",
    }


def read(path: Path) -> list[tuple[int, Any]]:
    close_readers()
    return rows_of(scan(SourceSpec(str(path), formatting="tokens")))


def test_packs_come_in_order_with_the_bytes_of_their_files(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for pack_index in range(150):
        members |= pack(pack_index)
    rows = read(tar(tmp_path / "packs.tar", members))
    assert [row_number for row_number, _ in rows] == list(range(150))
    assert [row["input_ids"][2] for _, row in rows] == list(range(150))
    assert all(row["images"] == [{"path": "p.png", "bytes": b"picture"}] for _, row in rows)


def test_broken_pack_drops_only_itself(tmp_path: Path) -> None:
    files = [{"file": "image0.png", "frames": [{"file": "gone.png"}]}]
    members = {
        "0.image0.png": b"a picture alone",
        "1.json": b"{",
        "2.json": b"[]",
        "3.json": json.dumps({"input_ids": [1, 2], "videos": files}).encode(),
        "3.image0.png": b"video",
        **pack(4, videos=None, audios=["a.wav"]),
    }
    rows = [row for _, row in read(tar(tmp_path / "packs.tar", members))]
    reasons = [row.reason for row in rows if isinstance(row, Dropped)]
    assert reasons == ["unknown_form", "invalid_json", "invalid_row", "media_missing"]
    assert rows[4]["images"][0]["bytes"] == b"picture"


def test_links_and_compressed_files_are_not_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "packs.tar", "w") as archive:
        for name, kind in (
            ("0.json", tarfile.SYMTYPE),
            ("1.json", tarfile.LNKTYPE),
            ("2.json", tarfile.GNUTYPE_SPARSE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/hostname"
            archive.addfile(member)
    assert read(tmp_path / "packs.tar") == []
    tar(tmp_path / "packs.tar", pack(0)).rename(tmp_path / "packs.tar.gz")
    with pytest.raises(DataError, match="compressed tar files are not supported"):
        read(tmp_path / "packs.tar.gz")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 6000), st.integers(0, 255), st.booleans())
def test_damaged_files_are_refused_or_read(tmp_path: Path, at: int, byte: int, is_cut: bool) -> None:
    """Nothing but an error of packtool ends the reading; a file that is cut off is never read in part."""
    data = bytearray(tar(tmp_path / "whole.tar", {**pack(0), **pack(1)}).read_bytes())
    if is_cut:
        del data[at:]
    else:
        data[at] = byte
    (tmp_path / "packs.tar").write_bytes(data)
    try:
        rows = read(tmp_path / "packs.tar")
    except PacktoolError:
        return
    assert len(rows) == 2 if is_cut else len(rows) <= 4
