"""Prefixes have the same hash where everything that the model sees of them is the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.constants import IGNORE_INDEX
from packtool.encode import prefix_hashes as module
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.media_spans import MediaTokens, media_spans
from packtool.encode.prefix_hashes import by_address, changed_files, prefix_hashes

PADS = {"image": 90, "video": 91, "audio": 92}
SEES, SOUNDS = 80, 81
TOKENS = MediaTokens(PADS, SEES, SOUNDS)  # type: ignore[arg-type]


def image(num_tokens: int = 2, **changes: Any) -> EncodedImage:
    return dataclasses.replace(EncodedImage("a.png", None, 8, 8, (1, 2, 4), num_tokens), **changes)


def video(num_tokens: int = 2, **changes: Any) -> EncodedVideo:
    encoded_video = EncodedVideo("a.mp4", None, (), 8, 8, 4, 2.0, (0, 2), (2, 2, 2), 1.0, num_tokens)
    return dataclasses.replace(encoded_video, **changes)


def sample(ids: list[int], turns: tuple[int, ...] = (), **changes: Any) -> EncodedSample:
    tokens = np.array(ids, np.int32)
    encoded_sample = EncodedSample(tokens, np.full_like(tokens, -100), np.array(turns, np.int32), (), None, "s", 0)
    return dataclasses.replace(encoded_sample, **changes)


def prefixes(encoded_sample: EncodedSample, **options: Any) -> dict[int, int]:
    counts, hashes = prefix_hashes([encoded_sample], TOKENS, **options)
    assert counts.tolist() == [len(hashes.lengths)]
    assert hashes.lengths.dtype == np.int32
    assert hashes.hashes.dtype == np.uint64
    return dict(zip(hashes.lengths.tolist(), hashes.hashes.tolist(), strict=True))


PICTURE = [1, SEES, 90, 90, 82]


def test_prefixes_end_after_media_and_at_turns() -> None:
    encoded_sample = sample([*PICTURE, 2, 3, 4, 5, 6, 7], (7, 9), images=(image(),))
    assert list(prefixes(encoded_sample)) == [5, 7, 9]
    assert list(prefixes(encoded_sample, longer_than=5)) == [7, 9]
    assert prefixes(encoded_sample, longer_than=5)[7] == prefixes(encoded_sample)[7]
    assert list(prefixes(sample([*PICTURE, 2], (3, 4, 6), images=(image(),)))) == [5, 6], "and not inside of one"
    assert not prefixes(sample([1, 2, 3]))
    assert list(prefixes(sample([1, 2, 3], (1, 3)))) == [1, 3]


def test_prefix_ends_after_a_long_system_prompt_not_after_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MIN_PROMPT", 4)
    end = 9
    prompt, question = [1, 2, 3, end], [5, 6, end, 7]
    hashes = prefixes(sample([*prompt, *question, 8, 8, end, 5, end, 7, 8, end], (8, 11, 14, 16)))
    assert list(hashes) == [4, 8, 11, 14, 16]
    assert prefixes(sample([*prompt, 5, 5, end, 7, 4, end], (8, 10)))[4] == hashes[4]
    assert list(prefixes(sample([*prompt[1:], *question, 8, end], (7, 9)))) == [7, 9], "too short"
    assert list(prefixes(sample([1, 1, *question, 8, end], (6, 8)))) == [6, 8], "none"
    assert list(prefixes(sample([*prompt, *question, end, 8, end], (8, 11)))) == [8, 11], "cut, and does not end"
    pictured = [1, end, *PICTURE, end, *question, 8, end]
    assert list(prefixes(sample(pictured, (12, 14), images=(image(),)))) == [7, 8, 12, 14]
    assert list(prefixes(sample([1, 2, SEES, 90, end, 90, 82, *question, 8, end], (11, 13), images=(image(),)))) == [
        7,
        11,
        13,
    ]


def test_prefix_hash_depends_only_on_preceding_tokens() -> None:
    base_hashes = prefixes(sample([*PICTURE, 2, 3], (6, 7), images=(image(),)))
    assert prefixes(sample([*PICTURE, 9, 3, 4], (6, 8), images=(image(),)))[5] == base_hashes[5]
    assert prefixes(sample(PICTURE, images=(image(),), channel="other")) == {5: base_hashes[5]}
    for other in (
        sample([7, *PICTURE[1:], 2, 3], images=(image(),)),
        sample([*PICTURE[:-1], 83, 2, 3], images=(image(),)),
        sample(PICTURE, images=(image(path="b.png"),)),
        sample(PICTURE, images=(image(path=None, data=b"x"),)),
        sample(PICTURE, images=(image(grid=(1, 4, 2)),)),
        sample([1, SEES, 91, 91, 82], videos=(video(),)),
    ):
        assert prefixes(other)[5] != base_hashes[5]


def test_media_hashes_depend_on_bytes_not_paths() -> None:
    samples = [sample(PICTURE, images=(image(path=None, data=data),)) for data in (b"12", b"12", b"13")]
    one, same, other = (prefixes(each)[5] for each in samples)
    assert one == same != other
    frames = [((None, b"1"), ("b", None)), ((None, b"1"), ("b", None)), ((None, b"2"), ("b", None))]
    ids = [SEES, 91, 91, 82]
    one, same, other = (prefixes(sample(ids, videos=(video(path=None, frames=each),)))[4] for each in frames)
    assert one == same != other


def test_a_video_ends_with_its_sound_track() -> None:
    track = EncodedAudio(None, None, 100, 8, 3)
    ids = [1, SEES, SOUNDS, 91, 91, 92, 92, 91, 92, 83, 82, 5, SOUNDS, 92, 83, 6]
    sound = EncodedAudio("a.wav", None, 50, 4, 1)
    encoded_sample = sample(ids, videos=(video(3, audio=track),), audios=(sound,))
    placed = media_spans(encoded_sample, TOKENS)
    assert [(each.start, each.stop) for each in placed] == [(3, 9), (13, 14)]
    assert list(prefixes(encoded_sample)) == [10, 15]
    longer = dataclasses.replace(track, num_samples=101)
    assert (
        prefixes(dataclasses.replace(encoded_sample, videos=(video(3, audio=longer),)))[10]
        != prefixes(encoded_sample)[10]
    )
    assert (
        prefixes(dataclasses.replace(encoded_sample, audios=(dataclasses.replace(sound, path="b"),)))[10]
        == prefixes(encoded_sample)[10]
    )


def test_each_prefix_has_its_media_tokens() -> None:
    track = EncodedAudio(None, None, 100, 8, 3)
    sound = EncodedAudio("a.wav", None, 50, 4, 1)
    ids = [*PICTURE, SEES, SOUNDS, 91, 91, 92, 92, 92, 83, 82, 5, SOUNDS, 92, 83, 6]
    full_sample = sample(ids, (4, 15, 19), images=(image(),), videos=(video(audio=track),), audios=(sound,))
    _, hashes = prefix_hashes([full_sample], TOKENS)
    assert hashes.lengths.tolist() == [5, 13, 15, 18, 19]
    assert hashes.media_tokens.tolist() == [2, 7, 7, 8, 8]
    assert hashes.audio_tokens.tolist() == [0, 3, 3, 4, 4]
    assert hashes.patch_squares.tolist() == [64, 64 + 32, 96, 96, 96]
    assert hashes.target_tokens.tolist() == np.cumsum(full_sample.labels != IGNORE_INDEX)[hashes.lengths - 1].tolist()
    last = (hashes.media_tokens[-1], hashes.audio_tokens[-1], hashes.patch_squares[-1])
    assert last == (full_sample.num_media_tokens, full_sample.num_audio_tokens, full_sample.patch_squares)


def test_missing_media_end_the_prefixes() -> None:
    encoded_sample = sample(PICTURE, (4, 5), images=(image(),))
    counts, hashes = prefix_hashes([encoded_sample, sample([1, 2], (1, 2))], MediaTokens({}))
    assert counts.tolist() == [0, 2]
    assert hashes.lengths.tolist() == [1, 2]


rows = st.lists(st.integers(1, 2), min_size=1, max_size=6)


@settings(max_examples=200)
@given(one=rows, other=rows, data=st.data())
def test_hashes_are_equal_iff_prefixes_are(one: list[int], other: list[int], data: st.DataObject) -> None:
    all_hashes = []
    for ids in (one, other):
        ends = sorted(data.draw(st.sets(st.integers(1, len(ids)))))
        all_hashes.append(prefixes(sample(ids, borders=np.array(ends, np.int32))))
        assert list(all_hashes[-1]) == ends
    for end, value in all_hashes[0].items():
        if end in all_hashes[1]:
            assert (all_hashes[1][end] == value) == (one[:end] == other[:end])


KINDS, ENDS = ("image", "video", "frames", "audio"), (4, 8, 12, 16)
"""Of the media of ``media_files``, and behind their last tokens."""


def media_files(folder: Path) -> tuple[EncodedSample, dict[str, list[Path]]]:
    """A sample with a picture, a video, one of two pictures and a sound, and their files by kind."""
    names = {"image": ["a.png"], "video": ["a.mp4"], "frames": ["0.png", "1.png"], "audio": ["a.wav"]}
    files = {kind: [folder / name for name in each] for kind, each in names.items()}
    for file_index, file in enumerate(file for each in files.values() for file in each):
        file.write_bytes(bytes([file_index]) * (40_000 if file_index % 2 else 300))
    clip = video(path=str(files["video"][0]))
    frames = video(path=None, frames=tuple((str(file), None) for file in files["frames"]))
    sound = EncodedAudio(str(files["audio"][0]), None, 10, 4, 2)
    ids = [*PICTURE, *(SEES, 91, 91, 82) * 2, SOUNDS, 92, 92, 83, 4, 5]
    picture = image(path=str(files["image"][0]))
    return sample(ids, images=(picture,), videos=(clip, frames), audios=(sound,), channel="c"), files


@settings(max_examples=60)
@given(st.data())
def test_replaced_file_is_detected(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """By its first, middle or last bytes or its size, whichever medium it is of."""
    encoded_sample, files = media_files(tmp_path_factory.mktemp("files"))
    min_length = data.draw(st.integers(0, encoded_sample.length))
    hashes = prefixes(encoded_sample, longer_than=min_length)
    assert changed_files(encoded_sample, TOKENS, hashes) == []
    kind = data.draw(st.sampled_from(sorted(files)))
    file = data.draw(st.sampled_from(files[kind]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.sampled_from([0, len(content) - 1, None]))
    content = content + b"x" if place is None else content[:place] + b"x" + content[place + 1 :]
    file.unlink()
    assert str(file) not in changed_files(encoded_sample, TOKENS, hashes), "which loading it tells"
    file.write_bytes(content)
    changed = changed_files(encoded_sample, TOKENS, hashes)
    assert not changed or {str(each) for each in files[kind]} <= set(changed)
    assert bool(changed) == any(end > dict(zip(KINDS, ENDS, strict=True))[kind] for end in hashes)
    if min_length < ENDS[0]:
        assert changed == [str(each) for each in files[kind]]


SEGMENTS: dict[str, tuple[list[int], str]] = {
    "text": ([4, 5, 6], ""),
    "picture": (PICTURE, "images"),
    "bare picture": ([90, 90], "images"),
    "video": ([SEES, 91, 91, 82], "videos"),
    "sound": ([SOUNDS, 92, 92, 83], "audios"),
}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(SEGMENTS)), min_size=1, max_size=8), st.integers(0, 20), st.data())
def test_unchanged_files_are_never_reported(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], longer_than: int, data: st.DataObject
) -> None:
    """Whatever media, turns and borders come next to each other, and whichever prefixes are kept."""
    file = str(tmp_path_factory.getbasetemp() / "medium")
    Path(file).write_bytes(b"medium")
    media_by_field = {
        "images": image(path=file),
        "videos": video(path=file),
        "audios": EncodedAudio(file, None, 10, 4, 2),
        "": None,
    }
    ids = [token for kind in kinds for token in SEGMENTS[kind][0]]
    media: dict[str, Any] = {
        name: tuple(media_by_field[name] for kind in kinds if SEGMENTS[kind][1] == name)
        for name in media_by_field
        if name
    }
    ends = st.lists(st.integers(0, len(ids)), max_size=6).map(sorted)
    turns, borders = (tuple(data.draw(ends)) for _ in range(2))
    encoded_sample = sample(ids, turns[: len(turns) // 2 * 2], borders=np.array(borders, np.int32), **media)
    assert changed_files(encoded_sample, TOKENS, prefixes(encoded_sample, longer_than=longer_than)) == []


@pytest.mark.parametrize("options", [{"medium_key": by_address}, {"_HASH_SEED": b"'c'"}])
def test_hashes_of_older_caches_are_not_reported_as_changes(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_sample, _ = media_files(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_HASH_SEED", options.pop("_HASH_SEED", module._HASH_SEED))
        hashes = prefixes(encoded_sample, **options)
    assert hashes != prefixes(encoded_sample)
    assert changed_files(encoded_sample, TOKENS, hashes) == []
