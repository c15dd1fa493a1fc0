from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from packtool.errors import MediaError
from packtool.media import video as videos
from packtool.media.container import open_container
from packtool.media.files import MediaProblem
from packtool.media.video import load_video, measure_video
from packtool.rows.sample import MediaRef

NUM_FRAMES, SIZE = 120, (32, 48)
# Container, codec, its options, milliseconds of the first frame, whether the others are unevenly spaced.
VIDEOS: dict[str, tuple[str, str, dict[str, str], int, bool]] = {
    "mpeg4, B-frames": ("mp4", "mpeg4", {"g": "20", "bf": "2", "sc_threshold": "1000000000"}, 0, False),
    "H.264, uneven": ("mp4", "libx264", {"g": "33", "x264-params": "scenecut=0:bframes=3"}, 5000, True),
    "H.264, open groups": ("mov", "libx264", {"g": "30", "x264-params": "scenecut=0:open-gop=1:bframes=3"}, 0, False),
    "H.264, cut by its edit list": ("mp4", "libx264", {"g": "25", "x264-params": "scenecut=0"}, -400, False),
    "H.264, Matroska": ("matroska", "libx264", {"g": "40", "x264-params": "scenecut=0:bframes=2"}, 0, True),
    "VP9": ("webm", "libvpx-vp9", {"g": "30", "deadline": "realtime", "cpu-used": "8"}, 0, True),
    "fragments": ("mp4", "libx264", {"g": "30", "x264-params": "scenecut=0"}, 0, False),
    "one keyframe": ("mp4", "libx264", {"g": "1000", "x264-params": "scenecut=0:bframes=3:b-adapt=0"}, 0, False),
}
# Those whose frames only decoding from the beginning tells.
ALL_DECODED: dict[str, tuple[str, str, dict[str, str], int, bool]] = {
    "without times": ("avi", "mpeg4", {"g": "20", "bf": "2"}, 0, False),
    "stream": ("mpegts", "libx264", {"g": "30"}, 0, False),
    "refreshed in columns": ("mp4", "libx264", {"g": "30", "intra-refresh": "1"}, 0, False),
    "packets without frames": ("webm", "libvpx", {"g": "30", "deadline": "realtime"}, 0, False),
}


@cache
def video(name: str, size: tuple[int, int] = SIZE) -> bytes:
    form, codec, options, start, is_uneven = (VIDEOS | ALL_DECODED)[name]
    numbers, file = np.random.default_rng(0), io.BytesIO()
    with av.open(
        file, "w", format=form, options={"movflags": "frag_keyframe"} if name == "fragments" else {}
    ) as container:
        stream = container.add_stream(codec, rate=25, options={"preset": "ultrafast", **options})
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        time = start
        for frame_index in range(NUM_FRAMES):
            picture = np.full((*size, 3), frame_index * 7 % 256, np.uint8)
            picture[: frame_index % size[0], : frame_index % size[1]] = numbers.integers(256)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            time += int(numbers.integers(10, 90)) if is_uneven else 40
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


@cache
def decoded(data: bytes) -> list[npt.NDArray[np.uint8]]:
    """All frames, one after the other."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def frame_counter(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return the number of frames that came out of decoders that began at keyframes."""
    num_frames, decode = [0], videos._KeyframeDecoder._decode

    def counting(*arguments: Any) -> Iterator[tuple[int, Any]]:
        for item in decode(*arguments):
            num_frames[0] += 1
            yield item

    monkeypatch.setattr(videos._KeyframeDecoder, "_decode", counting)
    return lambda: num_frames[0]


@pytest.mark.smoke
@settings(max_examples=80)
@given(st.sampled_from([*VIDEOS, *ALL_DECODED]), st.sets(st.integers(0, NUM_FRAMES - 12), min_size=1, max_size=5))
def test_seeking_gives_the_frames_of_sequential_decoding(name: str, numbers: set[int]) -> None:
    data, indices = video(name), sorted(numbers)
    loaded = load_video(None, data, (), indices)
    assert np.array_equal(loaded, np.stack([decoded(data)[frame_index] for frame_index in indices]))


@pytest.mark.parametrize("name", VIDEOS)
def test_seekable_videos_decode_at_most_one_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = frame_counter(monkeypatch)
    with open_container(MediaRef(None, video(name))) as container:
        assert [n for n, _ in videos.needed_frames(container, container.streams.video[0], [2, 95])] == [2, 95]
    group = int(VIDEOS[name][2]["g"])
    # A frame that leads a keyframe of an open group is decoded from the keyframe before.
    assert 3 < count() <= 3 + min(group + 16, 93)


def test_decoding_stops_after_the_last_needed_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    count = frame_counter(monkeypatch)  # keyframes are the frames 0, 30, 60 and 90
    with open_container(MediaRef(None, video("fragments"))) as container:
        assert [n for n, _ in videos.needed_frames(container, container.streams.video[0], [2, 50, 64])] == [2, 50, 64]
    assert count() == 3 + 21 + 5


def test_unreferenced_frames_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    count = frame_counter(monkeypatch)  # of each four frames, two are such
    with open_container(MediaRef(None, video("one keyframe"))) as container:
        assert [n for n, _ in videos.needed_frames(container, container.streams.video[0], [50, 100])] == [50, 100]
    near = 2 * 32
    assert near < count() < near + (100 - near) // 2 + 8


def test_packets_with_parameter_sets_are_not_skipped() -> None:
    picture, parameters = b"\x00\x02\x01\x80", b"\x00\x02\x68\x80"  # a slice and a picture parameter set
    assert videos._is_unreferenced(picture, 2)
    assert not videos._is_unreferenced(parameters + picture, 2)


@pytest.mark.parametrize("name", ALL_DECODED)
def test_videos_without_frame_numbers_are_errors(name: str) -> None:
    with open_container(MediaRef(None, video(name))) as container, pytest.raises(videos.FrameNumbersUnknown):
        list(videos.needed_frames(container, container.streams.video[0], [2, 95]))


@settings(max_examples=40)
@given(
    st.sampled_from(["H.264, Matroska", "VP9", "packets without frames"]), st.floats(0.3, 1.0), st.binary(max_size=9)
)
@example("VP9", 0.9676561806765711, b"\x01")  # several threads return 117 frames, one thread fails
def test_frame_count_equals_that_of_a_decoder(name: str, share: float, damage: bytes) -> None:
    """For intact, truncated and corrupted files; frames lost to corruption are reported when they are loaded.

    The decoder has one thread, as in training: with several, FFmpeg returns frames even for damaged packets of VP9.
    """
    contents, size = video(name), video(name).index(b"\x18S\x80g") + 4
    # A segment of unknown size, as in a live stream.
    contents = contents[:size] + b"\x01" + b"\xff" * 7 + contents[size + 8 :]
    data, middle = contents[: round(len(contents) * share)], round(len(contents) * share / 2)
    data = data[:middle] + damage + data[middle + len(damage) :]
    expected = decoded_frames(data)
    try:
        result = measure_video(MediaRef(None, data)).num_frames
    except MediaProblem:
        assert not expected
        return
    if expected is not None and len(expected) == result:
        for frame, loaded in zip(expected, load_video(None, data, (), range(result)), strict=True):
            # Damage may change the size of a frame, which is scaled then.
            assert frame.shape != loaded.shape or np.array_equal(frame, loaded)
    else:
        assert damage
        with pytest.raises(MediaError):
            load_video(None, data, (), range(result))


def test_counting_decodes_few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    count, name = frame_counter(monkeypatch), "H.264, Matroska"
    with open_container(MediaRef(None, video(name))) as container:
        assert videos.count_frames(container, container.streams.video[0]) == NUM_FRAMES
    assert count() <= 32 + int(VIDEOS[name][2]["g"])


EDITED: dict[str, tuple[str, str, dict[str, str]]] = {
    "H.264": ("mp4", "libx264", {"g": "15", "x264-params": "scenecut=0:bframes=3"}),
    "H.264, open groups": ("mp4", "libx264", {"g": "15", "x264-params": "scenecut=0:bframes=3:open-gop=1"}),
    "H.264, Matroska": ("matroska", "libx264", {"g": "15", "x264-params": "scenecut=0:bframes=3"}),
    "HEVC": ("mp4", "libx265", {"x265-params": "keyint=15:scenecut=0:log-level=none:open-gop=0"}),
    "HEVC, open groups": ("mp4", "libx265", {"x265-params": "keyint=15:min-keyint=15:scenecut=0:log-level=none"}),
    "HEVC, Matroska": ("matroska", "libx265", {"x265-params": "keyint=15:scenecut=0:log-level=none"}),
    "MPEG-4": ("mp4", "mpeg4", {"g": "15", "bf": "2"}),
    "MPEG-2": ("mov", "mpeg2video", {"g": "15", "bf": "2"}),
    "VP9": ("mp4", "libvpx-vp9", {"g": "15", "deadline": "realtime", "cpu-used": "8"}),
    "VP9, WebM": ("webm", "libvpx-vp9", {"g": "15", "deadline": "good", "cpu-used": "5", "lag-in-frames": "16"}),
    "MJPEG": ("mov", "mjpeg", {}),
}
NUM_EDITED = 60


def edited(name: str, packets: Collection[int], keyframes: set[int] | None) -> bytes:
    """Packets of a clip in a file of their own.

    Args:
        packets: those that are kept.
        keyframes: packets that are marked as keyframes; None leaves the marks.
    """
    file = io.BytesIO()
    with av.open(io.BytesIO(clip(name))) as read, av.open(file, "w", format=EDITED[name][0]) as written:
        stream = written.add_stream_from_template(read.streams.video[0], opaque=True)
        for packet_index, packet in enumerate(packet for packet in read.demux(video=0) if packet.size):
            if packet_index in packets:
                packet.is_keyframe = packet.is_keyframe if keyframes is None else packet_index in keyframes
                packet.stream = stream
                try:
                    written.mux(packet)
                except av.ArgumentError:  # FFmpeg writes no Matroska file that begins without a decoding time
                    reject()
    return file.getvalue()


@cache
def clip(name: str) -> bytes:
    form, codec, options = EDITED[name]
    noise, file = np.random.default_rng(0), io.BytesIO()
    picture = np.zeros((64, 96, 3), np.uint8)
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=25, options={"preset": "ultrafast", **options})
        stream.height, stream.width = picture.shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for _ in range(NUM_EDITED):
            picture = np.roll(picture, 3, 1)
            picture[:, :3] = noise.integers(0, 256, (64, 3, 3))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def with_edit_list(data: bytes, skipped_seconds: float, share: float) -> bytes:
    """An mp4 or mov file that shows a share of what follows a time, as trimming programs write it."""
    if (at := data.find(b"elst")) < 0:
        return data
    with av.open(io.BytesIO(data)) as container:
        ticks = round(skipped_seconds / container.streams.video[0].time_base)
    duration, start = struct.unpack_from(">Ii", data, at + 12)
    return data[: at + 12] + struct.pack(">Ii", round(duration * share), start + ticks) + data[at + 20 :]


def rotated_video(data: bytes, degrees: float) -> bytes:
    """An mp4 or mov file whose track is turned by its matrix."""
    cosine, sine = (round(function(math.radians(degrees)) * 65536) for function in (math.cos, math.sin))
    plain = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    at = data.find(plain, data.find(b"tkhd"))
    return data[:at] + struct.pack(">9i", cosine, sine, 0, -sine, cosine, 0, 0, 0, 1 << 30) + data[at + 36 :]


def decoded_frames(data: bytes) -> list[npt.NDArray[np.uint8]] | None:
    """All frames as FFmpeg decodes and packtool turns them; None where FFmpeg fails."""
    try:
        with av.open(io.BytesIO(data)) as container:
            container.streams.video[0].codec_context.thread_count = 1
            frames = list(container.decode(video=0))
            return [np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)) for frame in frames]
    except av.FFmpegError:
        return None


@settings(max_examples=100)
@given(st.data())
def test_edited_videos_have_the_frames_of_a_decoder(data_object: st.DataObject) -> None:
    """Cut within groups, wrongly marked keyframes, edit lists and any angle, together."""
    name = data_object.draw(st.sampled_from(sorted(EDITED)))
    start = data_object.draw(st.integers(0, 20))
    packets = range(
        start, data_object.draw(st.sampled_from([start + 1, start + 2]) | st.integers(start + 3, NUM_EDITED))
    )
    marks = data_object.draw(st.sampled_from(["true", "all", "first", "some"]))
    marked = (
        data_object.draw(st.sets(st.integers(packets.start, packets.stop - 1), max_size=6))
        if marks == "some"
        else set()
    )
    keyframes = {"true": None, "all": set(packets), "first": {packets.start}, "some": {packets.start, *marked}}[marks]
    data = edited(name, packets, keyframes)
    if EDITED[name][0] in ("mp4", "mov"):
        data = with_edit_list(
            data, *data_object.draw(st.tuples(st.sampled_from([0, 0.1, 0.5, 0.9]), st.floats(0.5, 1)))
        )
        data = rotated_video(data, data_object.draw(st.sampled_from([0, 0, 30, 44, 46, 90, 135, 180, 250, 271, -40])))
    expected = decoded_frames(data)
    try:
        size = measure_video(MediaRef(None, data))
    except MediaProblem:
        assert not expected
        return
    assert expected is not None
    assert (size.num_frames, size.height, size.width) == (len(expected), *expected[0].shape[:2])
    count = size.num_frames
    indices = sorted({0, count - 1, *data_object.draw(st.sets(st.integers(0, count - 1), max_size=4))})
    indices = indices[data_object.draw(st.integers(0, 1)) :] or indices  # clips do not begin at 0
    loaded = load_video(None, data, (), indices, shape=(count, size.height, size.width))
    assert np.array_equal(loaded, np.stack([expected[frame_index] for frame_index in indices]))


@settings(max_examples=30)
@given(st.sampled_from(sorted(EDITED)), st.integers(1, 40), st.integers(1, 15))
def test_packets_missing_in_the_middle_are_an_error_or_not_counted(name: str, start: int, num_missing: int) -> None:
    data = edited(name, {*range(NUM_EDITED)} - {*range(start, start + num_missing)}, None)
    count = measure_video(MediaRef(None, data)).num_frames
    expected = decoded_frames(data)
    if expected is not None and len(expected) == count:
        assert np.array_equal(load_video(None, data, (), range(count)), np.stack(expected))
    else:
        with pytest.raises(MediaError, match=r"no frame|Invalid data"):
            load_video(None, data, (), range(count))


def test_real_videos(realdata: Path) -> None:
    paths = [*(realdata / "raw/qwen3-vl/qwen-vl-finetune/demo/videos").glob("*.mp4")]
    paths += [realdata / "raw/llama-factory/data/mllm_demo_data" / name for name in ("1.mp4", "2.avi")]
    assert len(paths) == 4
    for path in paths:
        data = path.read_bytes()
        with av.open(io.BytesIO(data)) as container:
            frames = list(container.decode(video=0))
        indices = [5, len(frames) // 3, len(frames) * 3 // 4, len(frames) - 1]
        loaded = load_video(str(path), None, (), indices)
        assert all(np.array_equal(loaded[i], frames[n].to_ndarray(format="rgb24")) for i, n in enumerate(indices))


def test_repeated_frame_is_returned_twice() -> None:
    data, numbers = video("H.264, uneven"), [3, 3, 50, 90, 90]
    assert np.array_equal(
        load_video(None, data, (), numbers), np.stack([decoded(data)[frame_index] for frame_index in numbers])
    )


def test_frames_of_another_size_are_scaled_to_the_first() -> None:
    """A transport stream goes on as another one does."""
    data = video("stream") + video("stream", (64, 80))
    size = measure_video(MediaRef(None, data))
    assert (size.num_frames, size.height, size.width) == (2 * NUM_FRAMES, *SIZE)
    shape = (2 * NUM_FRAMES, *SIZE)
    for indices in ([5, 100, 130], [130, 200]):
        loaded = load_video(None, data, (), indices, shape=shape)
        assert all(np.array_equal(loaded[i], decoded(data)[n]) for i, n in enumerate(indices) if n < NUM_FRAMES)
        later = decoded(data)[130][::2, :, :].mean(), loaded[indices.index(130)].mean()
        assert abs(later[0] - later[1]) < 8
    # Whose file has another size than was measured sees that.
    assert load_video(None, data, (), [5, 130], shape=(2 * NUM_FRAMES, 64, 80)).shape[1:3] == SIZE


@pytest.mark.parametrize("name", ["H.264, uneven", "H.264, Matroska"])
def test_missing_frame_is_an_error(name: str) -> None:
    with pytest.raises(MediaError, match="no frame 900"):
        load_video(None, video(name), (), [0, 50, 900])
