"""Samples share what they begin with wherever their media lie, and nothing of which the bytes differ."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch.prefix_tree import ROOT, MediaNumbers, Node, find_tree
from packtool.config.data import AccessOptions
from packtool.encode.encoded import EncodedImage, EncodedVideo
from packtool.encode.prefix_hashes import prefix_hashes
from packtool.rows.media_policy import policy_for_cache
from tests.batch.test_prefix_tree import SEES, picture, with_pictures

ANY = policy_for_cache(AccessOptions())
LARGE = 50_000
# Two of one size that differ in the middle alone, which is not looked at first.
HELD = {"a": b"1", "b": b"2", "large": bytes(LARGE), "deceives": bytes(LARGE // 2) + b"1" + bytes(LARGE // 2 - 1)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[EncodedImage]]:
    """Pictures by what they hold: each of two files, a link, and bytes."""
    folder = tmp_path_factory.mktemp("files")
    files_by_kind = {}
    for name, data in HELD.items():
        paths = [folder / f"{name}{end}" for end in ("", "-copy", "-link")]
        for path in paths[:2]:
            path.write_bytes(data)
        paths[2].symlink_to(paths[0])
        inline = dataclasses.replace(picture(name, 2), path=None, data=data)
        files_by_kind[name] = [*(picture(str(path), 2) for path in paths), inline]
    return files_by_kind


media_item = st.tuples(st.sampled_from(sorted(HELD)), st.integers(0, 3))


@settings(max_examples=100)
@given(
    rows=st.lists(st.lists(st.one_of(st.integers(1, 2), media_item), min_size=1, max_size=4), min_size=2, max_size=6)
)
def test_rows_share_media_with_equal_content(
    files: dict[str, list[EncodedImage]], rows: list[list[int | tuple[str, int]]]
) -> None:
    """As if all media that hold the same were one file; and hashes are equal wherever rows are, for planning."""
    samples, expected = (
        [
            with_pictures([word if isinstance(word, int) else files[word[0]][number_of(word)] for word in row])
            for row in rows
        ]
        for number_of in (lambda word: word[1], lambda _: 0)
    )
    assert find_tree(samples, SEES, min_shared=1) == find_tree(expected, SEES, min_shared=1)
    for sample_list in (samples, expected):
        sample_list[:] = [dataclasses.replace(one, borders=np.array([one.length], np.int32)) for one in sample_list]
    assert all((a == b).all() for a, b in zip(hashes(samples), hashes(expected), strict=True))


def hashes(samples: list) -> tuple:  # type: ignore[type-arg]
    counts, hashes = prefix_hashes(samples, SEES.media_tokens)
    return (counts, *hashes)


def test_media_with_different_token_counts_are_different(files: dict[str, list[EncodedImage]]) -> None:
    one, copy, *_ = files["a"]
    media_numbers = MediaNumbers(ANY)
    assert media_numbers(one) == media_numbers(copy) != media_numbers(dataclasses.replace(copy, num_tokens=3))


def test_videos_of_several_files_and_missing_files(files: dict[str, list[EncodedImage]]) -> None:
    def video(*frames: EncodedImage) -> EncodedVideo:
        pairs = tuple((frame.path, frame.data) for frame in frames)
        return EncodedVideo(None, None, pairs, 8, 8, 4, 2.0, (0, 2), (2, 2, 2), 1.0, 2)

    (one, copy, link, data), (other, *_) = files["a"], files["b"]
    media_numbers = MediaNumbers(ANY)
    assert media_numbers(video(one, other)) == media_numbers(video(copy, other)) == media_numbers(video(data, other))
    assert media_numbers(video(other, link)) != media_numbers(video(one, other))
    assert media_numbers(video(one)) not in (media_numbers(video(one, other)), media_numbers(one))
    missing_files = [picture(name, 2) for name in ("gone.png", "lost.png", "gone.png")]
    assert [media_numbers(each) for each in missing_files] == [
        media_numbers(missing_files[0]),
        media_numbers(missing_files[1]),
        media_numbers(missing_files[0]),
    ]
    assert media_numbers(missing_files[0]) != media_numbers(missing_files[1])


def test_media_that_cannot_be_equal_are_not_read(
    files: dict[str, list[EncodedImage]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str | None] = []
    monkeypatch.setattr("packtool.media.files.open_medium", lambda ref, *_: read.append(ref.path))
    monkeypatch.setattr("packtool.batch.prefix_tree.content_name", lambda path, _: read.append(path) or str(path))
    media_numbers = MediaNumbers(ANY)
    one, copy, *_ = files["a"]
    wider = [dataclasses.replace(one, width=size) for size in (8, 16, 24)]
    assert [media_numbers(each) for each in [*wider, *wider]] == [0, 1, 2, 0, 1, 2]
    assert not read
    assert media_numbers(dataclasses.replace(copy, width=8)) == 3
    assert sorted(map(str, read)) == sorted(map(str, (one.path, copy.path))), "names differ, so no more is read"


def test_copied_media_share_a_branch(files: dict[str, list[EncodedImage]]) -> None:
    rows = [with_pictures([5, each, 10 + index]) for index, each in enumerate(files["large"])]
    rows.append(with_pictures([5, files["deceives"][0], 3]))
    nodes = find_tree(rows, SEES, min_shared=4)
    assert nodes[0] == Node((0, 1, 2, 3), 0, 5, ROOT)
    assert nodes[-1] == Node((4,), 0, 6, ROOT)
    assert all(one.parent == 0 for one in nodes[1:-1])
    assert all(before.samples < after.samples for before, after in pairwise(nodes[1:]))
