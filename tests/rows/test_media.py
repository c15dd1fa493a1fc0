"""Media of rows, in every way that rows name them, and their marks."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.constants import MEDIA_MARKS
from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.sample import MediaRef, Sample
from packtool.rows.source import Source

BYTES = bytes(range(256)) * 8
BASE64 = base64.b64encode(BYTES).decode()


def read(row: dict[str, Any], path: str = "/folder/rows.json", **source: Any) -> Sample:
    text = "".join(MEDIA_MARKS[key.rstrip("s")] for key in row)
    return to_sample({"messages": [{"role": "user", "content": text}], **row}, Source(path, **source), 0)


@pytest.mark.parametrize(
    ("image", "ref"),
    [
        ("a.png", MediaRef("/folder/a.png")),
        ("../a.png", MediaRef("/a.png")),
        ("/data/b.png", MediaRef("/data/b.png")),
        ("file:///data/b.png", MediaRef("/data/b.png")),
        ("s3://bucket/a.png", MediaRef("s3://bucket/a.png")),
        ("oss:/bucket/a.png", MediaRef("oss://bucket/a.png")),
        ("https://host/a.png?x=1", MediaRef("https://host/a.png?x=1")),
        ("data:image/png;base64," + BASE64, MediaRef(None, BYTES)),
        ("data:image/svg+xml,%3Csvg%3E", MediaRef(None, b"<svg>")),
        (BASE64, MediaRef(None, BYTES)),
        ({"path": "a.png"}, MediaRef("/folder/a.png")),
        ({"path": "a.png", "bytes": None}, MediaRef("/folder/a.png")),
        ({"path": "a.png", "bytes": BYTES}, MediaRef(None, BYTES)),
        ({"path": "a.png", "bytes": BASE64}, MediaRef(None, BYTES)),
        ({"bytes": list(BYTES)}, MediaRef(None, BYTES)),
        ({"url": "https://host/a.png"}, MediaRef("https://host/a.png")),
        ({"image": "a.png"}, MediaRef("/folder/a.png")),
        ({"data": BASE64, "format": "png"}, MediaRef(None, BYTES)),
        (BYTES, MediaRef(None, BYTES)),
        (list(BYTES), MediaRef(None, BYTES)),
    ],
)
def test_all_image_references_are_read(image: Any, ref: MediaRef) -> None:
    assert read({"images": [image]}).images == (ref,)
    assert read({"image": image}).images == (ref,)


def test_media_limits_of_a_row_are_read() -> None:
    """As Qwen's rows have them: in the object of a medium, or beside it in a part of a message."""
    limits = (("min_pixels", 4000), ("max_pixels", 90000.0))
    limits_of_row = {"min_pixels": 4000, "max_pixels": 90000}
    listed = read({"images": [{"image": "a.png", **limits_of_row}, {"path": "b.png", "max_pixels": None}]}).images
    assert [ref.limits for ref in listed] == [limits, ()]
    parts = [
        {"type": "image", "image": "a.png", **limits_of_row},
        {"type": "video", "video": "v.mp4", "fps": 1, "max_frames": 8},
    ]
    parts += [
        {"type": "image_url", "image_url": {"url": "c.png"}, "max_pixels": 5},
        {"type": "image", "image": "d.png"},
    ]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]}
    result = to_sample(row, Source("/folder/rows.json"), 0)
    assert [ref.limits for ref in result.images] == [limits, (("max_pixels", 5),), ()]
    assert result.videos[0].limits == (("fps", 1), ("max_frames", 8))
    fixed = "is not supported"
    for key, value, message in (
        ("max_pixels", -1, "a number of at least 1"),
        ("resized_height", 28, fixed),
        ("video_end", 2, fixed),
    ):
        with pytest.raises(RowProblem, match=message):
            read({"images": [{"image": "a.png", key: value}]})


def test_lists_given_as_text_are_parsed() -> None:
    two = to_sample({"text": "<image><image>", "images": '["a.png", "b.png"]'}, Source("/f/x.csv"), 0)
    assert [ref.path for ref in two.images] == ["/f/a.png", "/f/b.png"]
    assert to_sample({"text": "x", "images": ""}, Source("/f/x.csv"), 0).images == ()


def test_clips_of_a_video() -> None:
    named = [{"video": "a.mp4", "video_start": 1, "video_end": 2.5}, {"path": "a.mp4", "video_start": 2}, "a.mp4"]
    rows: list[dict[str, Any]] = [
        {"text": "x", "videos": named},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "video", "video": "a.mp4", "fps": 1, "video_start": 1, "video_end": 2.5},
                        {"type": "video_url", "video_url": {"url": "a.mp4"}, "video_start": 2, "video_end": None},
                        {"type": "video", "video": {"path": "a.mp4", "video_end": None}},
                    ],
                },
                {"role": "assistant", "content": "!"},
            ]
        },
    ]
    for row in rows:
        videos = to_sample(row, Source("/folder/rows.jsonl"), 0).videos
        assert [(ref.path, ref.clip) for ref in videos] == [
            ("/folder/a.mp4", (1.0, 2.5)),
            ("/folder/a.mp4", (2.0, None)),
            ("/folder/a.mp4", None),
        ]


def test_videos_and_their_frames() -> None:
    frames = (MediaRef("/folder/1.png"), MediaRef(None, b"hi"))
    assert read({"videos": ["a.mp4"]}).videos == (MediaRef("/folder/a.mp4"),)
    assert read({"videos": [["1.png", {"bytes": b"hi"}]]}).videos == (MediaRef(None, frames=frames),)
    named = {"frames": ["1.png", {"bytes": b"hi"}], "fps": 2}
    assert read({"videos": [named]}).videos == (MediaRef(None, frames=frames, fps=2.0),)
    assert read({"video": {"video": ["1.png"]}}).videos == (MediaRef(None, frames=frames[:1]),)


def test_times_of_frames() -> None:
    timed = (MediaRef(None, frames=(MediaRef("/folder/1.png"), MediaRef("/folder/2.png")), milliseconds=(250, 1500)),)
    frames = ["1.png", "2.png"]
    part = {"type": "video", "video": frames, "seconds": [0.25, 1.5]}
    # As packtool's own caches store it.
    stored = {"frames": frames, "fps": 1000.0, "indices": [250, 1500], "tokens": 8, "grid": [1, 4, 8]}
    for row in (
        {"videos": [{"frames": frames, "seconds": [0.25, 1.5]}]},
        {"videos": [{"video": frames, "seconds": [0.25, 1.5]}]},
        {"videos": [stored]},
    ):
        assert read(row).videos == timed, row
    row = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": "!"}]}
    assert to_sample(row, Source("/folder/rows.json"), 0).videos == timed
    # The length of a file, not the times of frames.
    assert read({"videos": [{"video": "a.mp4", "seconds": 12.5}]}).videos == (MediaRef("/folder/a.mp4"),)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ([0], "video 0 has 1 times as seconds for 2 listed frames"),
        (3, "3 as seconds for 2 listed frames"),
        ([], "0 times"),
        ([1, 0.5], "0.5 after 1 in seconds; they must ascend"),
        ([1, 1], "must ascend"),
        ([-1, 0], "-1 in seconds; they must be numbers from 0"),
        ([0, float("nan")], "nan in seconds"),
        ([0, float("inf")], "inf in seconds"),
        ([0, 10**400], "in seconds; they must be numbers"),
        ([0, "1"], "'1' in seconds"),
        ([True, 2], "True in seconds"),
        ([0, 2e6], r"from 0 to 1,000,000"),
    ],
    ids=str,
)
def test_invalid_times_of_frames(seconds: Any, message: str) -> None:
    with pytest.raises(RowProblem, match=message) as exc_info:
        read({"videos": [{"frames": ["1.png", "2.png"], "seconds": seconds}]})
    assert exc_info.value.reason == "invalid_seconds"


def test_times_contradict_a_rate_and_a_file() -> None:
    with pytest.raises(RowProblem, match="both fps and seconds"):
        read({"videos": [{"frames": ["1.png", "2.png"], "seconds": [0, 1], "fps": 2}]})
    with pytest.raises(RowProblem, match="2 times as seconds for 0 listed frames"):
        read({"videos": [{"video": "a.mp4", "seconds": [0, 1]}]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": [None]}, "image 0 is None"),
        ({"images": [["a.png"]]}, "image 0 is"),
        ({"images": ["a.png", 5]}, "image 1 is 5"),
        ({"images": 5}, "'images' is a int"),
        ({"images": [{}]}, "no bytes, path or URL"),
        ({"images": [{"bytes": "no base64!"}]}, "not valid base64"),
        ({"images": [{"bytes": 5}]}, "a int as 'bytes'"),
        ({"images": ["data:image/png;base64"]}, "without a comma"),
        ({"images": ["gopher://host/a.png"]}, "unknown scheme gopher://"),
        ({"videos": [[]]}, "video 0 is"),
        ({"videos": [{"frames": ["a"], "fps": 0}]}, "0 as fps"),
        ({"videos": [{"video": "a.mp4", "video_start": "x"}]}, "'x' as video_start, not a number of seconds"),
        ({"videos": [{"video": "a.mp4", "video_end": -1}]}, "-1 as video_end, not a number of seconds"),
        ({"videos": [{"video": "a.mp4", "video_start": 3, "video_end": 3}]}, "video 0 has a clip from 3 s to 3 s"),
        ({"videos": [{"video": "a.mp4", "video_end": 0}]}, "has a clip from 0 s to 0 s"),
        ({"videos": [{"frames": ["a"], "video_start": 3}]}, "video 0 is a list of frames and has video_start"),
        ({"audios": [{"array": [0.5, 0.25], "sampling_rate": 16000}]}, "its keys are: array, sampling_rate"),
    ],
)
def test_invalid_media_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowProblem, match=message) as exc_info:
        read(row)
    assert exc_info.value.reason == "invalid_media"


@pytest.mark.parametrize("fps", [1e-300, 9e-7, 1e7, 1e300])
def test_invalid_frame_rates_are_refused(fps: float) -> None:
    for videos, reason in (
        ([{"frames": ["a"], "fps": fps}], "invalid_media"),
        ([{"video": "a.mp4", "fps": fps}], "media_limits"),
    ):
        with pytest.raises(RowProblem, match=r"as fps; it must be a number from 1e-06 to 1,000,000") as exc_info:
            read({"videos": videos})
        assert exc_info.value.reason == reason


def test_media_root_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.png").touch()
    path, root = str(tmp_path / "rows.jsonl"), str(tmp_path / "root")
    row = {"images": ["a.png", "b.png", "/c.png", "s3://bucket/d.png"]}
    row["messages"] = [{"role": "user", "content": "q"}]
    paths = [ref.path for ref in to_sample(row, Source(path, media_root=root), 0).images]
    assert paths == [f"{root}/a.png", f"{tmp_path}/b.png", "/c.png", "s3://bucket/d.png"]
    remote = to_sample(row, Source(path, media_root="s3://bucket/root"), 0).images
    assert [ref.path for ref in remote[:2]] == ["s3://bucket/root/a.png", "s3://bucket/root/b.png"]


def test_remote_rows_resolve_media_paths() -> None:
    assert read({"images": ["pictures/a.png"]}, "s3://bucket/data/rows.jsonl").images[0].path == (
        "s3://bucket/data/pictures/a.png"
    )
    assert read({"images": ["a.png"]}, "rows.jsonl").images[0].path == str(Path("a.png").absolute())


TEXTS = st.lists(st.sampled_from(["<image>", "<video>", "<audio>", "word "]), max_size=5).map("".join)


@given(st.lists(TEXTS, min_size=1, max_size=4), *[st.integers(0, 4)] * 3)
def test_placeholder_count_must_match_the_media(texts: list[str], images: int, videos: int, audios: int) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    media = {"image": images, "video": videos, "audio": audios}
    row = {"messages": messages, **{f"{kind}s": [f"{i}" for i in range(count)] for kind, count in media.items()}}
    marks = {kind: sum(text.count(mark) for text in texts) for kind, mark in MEDIA_MARKS.items()}
    too_many = [kind for kind, count in media.items() if count < marks[kind]]
    if too_many:
        with pytest.raises(RowProblem) as exc_info:
            to_sample(row, Source("rows.json"), 0)
        assert exc_info.value.reason in [f"{kind}_marks" for kind in too_many]
        return
    sample = to_sample(row, Source("rows.json"), 0)
    assert {"image": len(sample.images), "video": len(sample.videos), "audio": len(sample.audios)} == media
    for kind, count in media.items():
        assert sum(turn.content.count(MEDIA_MARKS[kind]) for turn in sample.turns) == count
    added = {kind: count - marks[kind] for kind, count in media.items() if count}
    assert sample.num_marks_added == sum(added.values())
    prefix = "".join(MEDIA_MARKS[kind] * added.get(kind, 0) for kind in ("video", "audio", "image"))
    assert [turn.content for turn in sample.turns] == [prefix + texts[0], *texts[1:]]


def test_missing_marks_go_to_the_first_user_and_to_texts() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "user", "content": "r"}]
    sample = to_sample({"messages": messages, "images": ["a", "b"]}, Source("rows.json"), 0)
    assert [turn.content for turn in sample.turns] == ["s", "<image><image>q", "r"]
    text = to_sample({"text": "t", "images": ["a"]}, Source("rows.json"), 0)
    assert (text.turns[0].content, text.num_marks_added) == ("<image>t", 1)
