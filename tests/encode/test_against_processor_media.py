"""Videos and sounds: every token and grid equals the real processor's, which is given the decoded files."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from packtool.encode.encoded import EncodedSample
from packtool.media.audio import load_audio, measure_audio
from packtool.media.measure import load_image
from packtool.media.video import load_video, measure_video
from packtool.rows.sample import Dropped, MediaRef, Sample, Turn
from tests.encode.test_against_processor import cached_encoder, processor_of
from tests.media.clips import write_clip

MARKS = {"<image>": "image", "<video>": "video", "<audio>": "audio"}


def rows(data: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]


def sample_of(row: dict[str, Any], root: Path) -> Sample:
    refs = {kind: tuple(MediaRef(str(root / path)) for path in row.get(f"{kind}s") or ()) for kind in MARKS.values()}
    turns = tuple(Turn(message["role"], message["content"]) for message in row["messages"])
    return Sample(turns, refs["image"], "rows.jsonl", 0, videos=refs["video"], audios=refs["audio"])


def with_content_lists(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = []
    for message in row["messages"]:
        parts: list[dict[str, str]] = [{"type": "text", "text": message["content"]}]
        for mark, kind in MARKS.items():
            split = []
            for part in parts:
                for i, text in enumerate(part["text"].split(mark) if part["type"] == "text" else [None]):
                    split += [{"type": kind}] if i else []
                    split += [part] if text is None else [{"type": "text", "text": text}] if text else []
            parts = split
        messages.append({"role": message["role"], "content": parts})
    return messages


@cache
def frames_of(path: Path) -> tuple[torch.Tensor, Any]:
    """All frames of a file, and what the processor wants to know of it."""
    from transformers.video_utils import VideoMetadata

    size = measure_video(MediaRef(str(path)))
    frames = load_video(str(path), None, (), range(size.num_frames))
    metadata = VideoMetadata(
        total_num_frames=len(frames),
        fps=size.fps,
        width=size.width,
        height=size.height,
        duration=len(frames) / size.fps,
    )
    return torch.from_numpy(frames).permute(0, 3, 1, 2), metadata


def sound_of(path: str) -> np.ndarray:
    return load_audio(path, None, 16000, measure_audio(MediaRef(path), 16000))


def processed(processor: Any, row: dict[str, Any], root: Path, **settings: Any) -> Any:
    text = processor.apply_chat_template(with_content_lists(row), tokenize=False)
    processor_inputs: dict[str, Any] = dict(settings)
    if row.get("images"):
        processor_inputs["images"] = [load_image(str(root / path)) for path in row["images"]]
    if row.get("videos"):
        videos = [frames_of(root / path) for path in row["videos"]]
        processor_inputs |= {
            "videos": [frames for frames, _ in videos],
            "video_metadata": [about for _, about in videos],
        }
        processor_inputs |= {"do_sample_frames": True, "return_metadata": True}
        processor_inputs.setdefault("fps", 2)
    if row.get("audios"):
        processor_inputs["audio"] = [sound_of(str(root / path)) for path in row["audios"]]
    return processor(text=[text], return_tensors="pt", **processor_inputs)


def check(sample: EncodedSample, inputs: Any) -> None:
    np.testing.assert_array_equal(sample.input_ids, inputs["input_ids"][0])
    if sample.videos:
        assert [video.grid for video in sample.videos] == [tuple(grid) for grid in inputs["video_grid_thw"].tolist()]
        for name in ("second_per_grid_ts", "video_second_per_grid"):
            if name in inputs:
                assert [video.seconds_per_grid for video in sample.videos] == pytest.approx(inputs[name].tolist())
        if "video_metadata" in inputs:
            for video, about in zip(sample.videos, inputs["video_metadata"], strict=True):
                assert list(video.indices) == [int(i) for i in about.frames_indices]
    if "feature_attention_mask" in inputs:
        sounds = [*sample.audios, *(video.audio for video in sample.videos if video.audio is not None)]
        assert [sound.num_features for sound in sounds] == inputs["feature_attention_mask"].sum(-1).tolist()


def encoded(directory: Path, row: dict[str, Any], root: Path, **spec: Any) -> EncodedSample:
    (result,) = cached_encoder(directory, **spec).encode([sample_of(row, root)])
    assert isinstance(result, list), result
    return result[0]


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
def test_two_clips_of_a_video(drawn_data: Path, tmp_path: Path, family: str) -> None:
    from transformers.video_utils import VideoMetadata

    directory, path = drawn_data / "tokenizers" / family, write_clip(tmp_path / "a.mp4", num_frames=300)
    row = {"messages": [{"role": "user", "content": "<video><video>?"}, {"role": "assistant", "content": "!"}]}
    clips = [(1.0, 3.02), (8.5, None)]
    refs = tuple(MediaRef(str(path), clip=clip) for clip in clips)
    sample = dataclasses.replace(sample_of(row, tmp_path), videos=refs)
    (result,) = cached_encoder(directory).encode([sample])
    assert isinstance(result, list), result
    frame_indices = [np.linspace(25, 75, 4).round().astype(int), np.linspace(213, 299, 6).round().astype(int)]
    assert [video.indices for video in result[0].videos] == [tuple(numbers.tolist()) for numbers in frame_indices]
    frames, about = frames_of(path)
    num_frames = [51, 87]
    metadata = [
        VideoMetadata(total_num_frames=count, fps=about.fps, frames_indices=numbers, height=64, width=96)
        for count, numbers in zip(num_frames, frame_indices, strict=True)
    ]
    processor, pixels = processor_of(directory), [frames[numbers] for numbers in frame_indices]
    text = processor.apply_chat_template(with_content_lists(row | {"videos": clips}), tokenize=False)
    settings = {"do_sample_frames": False, "return_metadata": True, "return_tensors": "pt"}
    check(result[0], processor(text=[text], videos=pixels, video_metadata=metadata, **settings))
    assert [video.num_frames for video in result[0].videos] == num_frames
    for video, processor_frames in zip(result[0].videos, pixels, strict=True):
        loaded = torch.from_numpy(load_video(video.path, None, (), video.indices)).permute(0, 3, 1, 2)
        assert torch.equal(loaded, processor_frames)


def test_sound_is_not_interleaved_with_clips(drawn_data: Path, tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", num_frames=60, seconds_of_sound=2.4)
    row = {"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "!"}]}
    sample = dataclasses.replace(sample_of(row, tmp_path), videos=(MediaRef(str(path), clip=(0.5, 2.0)),))
    directory = drawn_data / "tokenizers" / "qwen2.5-omni"
    (interleaved,) = cached_encoder(directory, use_audio_in_video=True).encode([sample])
    assert isinstance(interleaved, Dropped)
    assert interleaved.reason == "media_unsupported"
    assert "cut it into a file of its own" in interleaved.detail
    (result,) = cached_encoder(directory).encode([sample])
    assert isinstance(result, list), result


@pytest.mark.parametrize("clip", [(12.0, None), (11.97, None)])
def test_clip_outside_the_video_drops_its_row(drawn_data: Path, tmp_path: Path, clip: Any) -> None:
    path = write_clip(tmp_path / "a.mp4", num_frames=300)
    row = {"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "!"}]}
    sample = dataclasses.replace(sample_of(row, tmp_path), videos=(MediaRef(str(path), clip=clip),))
    (result,) = cached_encoder(drawn_data / "tokenizers" / "qwen3-vl").encode([sample])
    assert isinstance(result, Dropped)
    assert result.reason == "media_size"
    assert f"a.mp4: the clip from {clip[0]:g}" in result.detail


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl", "qwen2.5-omni", "qwen3-omni"])
@pytest.mark.parametrize("name", ["mm_llamafactory_mllm_video_demo", "mm_qwen3vl_demo"])
def test_videos(data: Path, family: str, name: str) -> None:
    directory = data / "tokenizers" / family
    done = 0
    for row in rows(data, name):
        if row.get("videos") and (family == "qwen3-vl" or name != "mm_qwen3vl_demo"):
            check(encoded(directory, row, data), processed(processor_of(directory), row, data))
            done += 1
    assert done or name == "mm_qwen3vl_demo"


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["qwen2.5-omni", "qwen3-omni"])
@pytest.mark.parametrize("name", ["mm_llamafactory_mllm_audio_demo", "mm_llamafactory_mllm_video_audio_demo"])
def test_sounds(data: Path, family: str, name: str) -> None:
    directory = data / "tokenizers" / family
    for row in rows(data, name):
        check(encoded(directory, row, data), processed(processor_of(directory), row, data))


@pytest.mark.parametrize("family", ["qwen2.5-omni", "qwen3-omni"])
@pytest.mark.parametrize(
    ("frames", "seconds", "fps"), [(50, 2.0, 2.0), (120, 4.8, 2.0), (75, 7.0, 0.9), (50, 0.5, 4.0)]
)
def test_sound_track_is_interleaved(
    drawn_data: Path, tmp_path: Path, family: str, frames: int, seconds: float, fps: float
) -> None:
    directory, processor = drawn_data / "tokenizers" / family, processor_of(drawn_data / "tokenizers" / family)
    write_clip(tmp_path / "a.mp4", num_frames=frames, seconds_of_sound=seconds)
    row = {
        "messages": [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "That."}],
        "videos": ["a.mp4"],
    }
    sample = encoded(directory, row, tmp_path, use_audio_in_video=True, fps=fps)
    track = sample.videos[0].audio
    assert track is not None
    assert sample.audios == ()
    sound = load_audio(str(tmp_path / "a.mp4"), None, 16000, track.num_samples)
    inputs = processed(
        processor, row, tmp_path, fps=fps, audio=[sound], audio_from_video_indices=[0], load_audio_from_video=True
    )
    check(sample, inputs)
    plain = encoded(directory, row, tmp_path, fps=fps)
    assert plain.videos[0].audio is None
    assert plain.length < sample.length


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_5"])
def test_related_models_encode_videos_like_their_family(drawn_data: Path, tmp_path: Path, model_type: str) -> None:
    like = drawn_data / "tokenizers" / ("qwen3-vl" if model_type == "qwen3_5" else "qwen2.5-vl")
    for path in like.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": {}}))
    row = rows(drawn_data, "mm_llamafactory_mllm_video_demo")[0]
    sample, other = encoded(tmp_path, row, drawn_data), encoded(like, row, drawn_data)
    np.testing.assert_array_equal(sample.input_ids, other.input_ids)
    assert sample.videos == other.videos


def test_user_limits_apply_to_videos(data: Path) -> None:
    row = rows(data, "mm_llamafactory_mllm_video_demo")[0]
    for family, factor in (("qwen2.5-vl", 28), ("qwen3-vl", 32)):
        directory = data / "tokenizers" / family
        unlimited = encoded(directory, row, data).videos[0]
        small = encoded(directory, row, data, video_max_pixels=20 * factor**2).videos[0]
        assert small.grid[0] == unlimited.grid[0]
        assert small.num_tokens // small.grid[0] <= 20 * (2 if family == "qwen3-vl" else 1) < unlimited.num_tokens
        slow = encoded(directory, row, data, fps=1.0).videos[0]
        assert slow.grid[0] < unlimited.grid[0]
        short_video = encoded(directory, row, data, fps_max_frames=6).videos[0]
        assert len(short_video.indices) == 6
        total = encoded(directory, row, data, video_total_pixels=60 * factor**2 * 4).videos[0]
        assert total.num_tokens < unlimited.num_tokens


def frames_in(folder: Path, count: int) -> tuple[MediaRef, ...]:
    """Pictures of 96x64 pixels, each of one color."""
    for i in range(count):
        Image.new("RGB", (96, 64), (20 * i, 0, 0)).save(folder / f"{i}.png")
    return tuple(MediaRef(str(folder / f"{i}.png")) for i in range(count))


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
@pytest.mark.parametrize("seconds", [(0.0, 1.5), (0.0, 0.5, 1.0, 1.5), (3.0, 3.25, 60.0, 61.1, 3600.0)], ids=len)
def test_frames_with_their_own_times(data: Path, tmp_path: Path, family: str, seconds: tuple[float, ...]) -> None:
    """As the processor does with metadata that have these times."""
    from transformers.video_utils import VideoMetadata

    directory = data / "tokenizers" / family
    frames, times = frames_in(tmp_path, len(seconds)), tuple(round(time * 1000) for time in seconds)
    row = {"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "!"}]}
    ref = MediaRef(None, frames=frames, milliseconds=times)
    (result,) = cached_encoder(directory).encode([dataclasses.replace(sample_of(row, tmp_path), videos=(ref,))])
    assert isinstance(result, list), result
    (video,) = result[0].videos
    # The last frame is shown as long as the others on average.
    length = (seconds[-1] - seconds[0]) * len(seconds) / (len(seconds) - 1)
    metadata = VideoMetadata(
        total_num_frames=round(length * 1000), fps=1000, frames_indices=np.array(times), height=64, width=96
    )
    pixels = torch.from_numpy(load_video(None, None, video.frames, video.indices)).permute(0, 3, 1, 2)
    assert len(pixels) == len(seconds)
    processor = processor_of(directory)
    text = processor.apply_chat_template(with_content_lists(row), tokenize=False)
    settings = {"do_sample_frames": False, "return_metadata": True, "return_tensors": "pt"}
    outputs = processor(text=[text], videos=[pixels], video_metadata=[metadata], **settings)
    check(result[0], outputs)
    if family == "qwen2.5-vl":
        rate = (len(seconds) - 1) / (seconds[-1] - seconds[0])
        assert video.seconds_per_grid == pytest.approx(2 / rate, rel=1e-3)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
def test_times_of_a_constant_rate_are_a_rate(drawn_data: Path, tmp_path: Path, family: str) -> None:
    directory, frames = drawn_data / "tokenizers" / family, frames_in(tmp_path, 6)
    row = {"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "!"}]}
    refs = (
        MediaRef(None, frames=frames, fps=4.0),
        MediaRef(None, frames=frames, milliseconds=tuple(range(0, 1500, 250))),
    )
    samples = [dataclasses.replace(sample_of(row, tmp_path), videos=(ref,)) for ref in refs]
    ((by_rate,), (by_times,)) = cached_encoder(directory).encode(samples)  # type: ignore[misc]
    np.testing.assert_array_equal(by_rate.input_ids, by_times.input_ids)
    assert by_rate.videos[0].seconds_per_grid == by_times.videos[0].seconds_per_grid
