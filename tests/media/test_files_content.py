"""Media have one name exactly where they hold the same, wherever they lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool.config.data import AccessOptions
from packtool.media.files import content_digest, content_name
from packtool.rows.media_policy import MediaPolicy, policy_for_cache

ANY = policy_for_cache(AccessOptions())
SMALL, LARGE = 16384, 100_000  # the first is hashed whole
PLACES = ("file", "copy", "link", "relative", "bytes")


def placed(folder: Path, place: str, data: bytes) -> tuple[str | None, bytes | None]:
    """A medium that holds these bytes: its path or its data."""
    if place == "bytes":
        return None, data
    num_files = len(list(folder.iterdir()))
    path = folder / f"{num_files}.png"
    path.write_bytes(data)
    if place == "link":
        (folder / f"{num_files}-link").symlink_to(path)
        path = folder / f"{num_files}-link"
    return os.path.relpath(path) if place == "relative" else str(path), None


contents = st.tuples(st.sampled_from([1, 9, SMALL - 1, SMALL, SMALL + 1, LARGE]), st.sampled_from([None, 0, 0.5, 1]))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(media=st.lists(st.tuples(contents, st.sampled_from(PLACES)), min_size=2, max_size=5))
def test_equal_content_gives_equal_names(tmp_path: Path, media: list[tuple[tuple[int, float | None], str]]) -> None:
    """Bytes differ in number, or in one of them: nowhere, the first, the middle one or the last."""
    contents, named, digested = [], [], []
    for (size, changed), place in media:
        data = bytearray(size)
        if changed is not None:
            data[int(changed * (size - 1))] = 1
        path, inline = placed(tmp_path, place, bytes(data))
        contents.append(bytes(data))
        named.append(content_name(path, inline))
        digested.append(content_digest(path, inline, ANY))
    for one in range(len(contents)):
        for other in range(one):
            is_same = contents[one] == contents[other]
            assert (digested[one] == digested[other]) == is_same
            # Of what is not hashed whole, the middle is not looked at.
            if is_same or len(contents[one]) <= SMALL or len(contents[one]) != len(contents[other]):
                assert (named[one] == named[other]) == is_same


def test_large_files_differing_in_the_middle_have_different_digests(tmp_path: Path) -> None:
    one, other = bytearray(LARGE), bytearray(LARGE)
    other[LARGE // 2] = 1
    first_file, second_file = (placed(tmp_path, "file", bytes(data)) for data in (one, other))
    assert content_name(*first_file) == content_name(*second_file) == content_name(None, bytes(one))
    assert content_digest(*first_file, ANY) != content_digest(*second_file, ANY)
    for end in (0, -1):
        other = bytearray(LARGE)
        other[end] = 1
        assert content_name(*placed(tmp_path, "file", bytes(other))) != content_name(*first_file)


def test_changed_file_has_another_name(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"12")
    before, digest = content_name(str(path), None), content_digest(str(path), None, ANY)
    state = path.stat()
    path.write_bytes(b"13")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a copy that keeps times
    assert content_name(str(path), None) != before
    assert content_digest(str(path), None, ANY) != digest
    path.write_bytes(b"12")
    assert content_name(str(path), None) == before


@pytest.mark.parametrize(
    "path", ["https://a.example/b.png", "s3://bucket/b.png", "gone.png", "\0", "\ud800", "pipe", "."]
)
def test_unreadable_files_are_identified_by_address(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert content_name(path, None) == f"at {path}"
    assert content_digest(path, None, ANY) is None
    assert content_name(path, b"12") == content_name(None, b"12")


def test_forbidden_files_are_not_compared(tmp_path: Path) -> None:
    path, _ = placed(tmp_path, "file", b"12")
    assert content_digest(path, None, MediaPolicy(roots=(str(tmp_path / "other"),))) is None
    assert content_digest(path, None, MediaPolicy(roots=(str(tmp_path),))) is not None
