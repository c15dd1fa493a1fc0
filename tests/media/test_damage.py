"""Files that were cut off: export leaves them out, or training can load them; and what training says of damage."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from packtool.errors import MediaError
from packtool.media import audio
from packtool.media.audio import load_audio, measure_audio
from packtool.media.files import MediaProblem
from packtool.media.measure import load_image, measure_image
from packtool.media.video import load_video, measure_video
from packtool.rows.sample import MediaRef
from tests.media.clips import write_clip, write_sound

RATE = 16000
PICTURES = ("jpg", "png", "bmp", "tif", "tiff-lzw", "gif", "webp", "webp-lossless", "jp2", "eps", "ppm", "ico", "tga")
VIDEOS = ("mp4", "faststart.mp4", "fragmented.mp4", "mov", "mkv", "avi")
SOUNDS = ("wav", "flac", "m4a", "faststart.m4a", "ogg", "mka", "mp3")
SETTINGS = {"faststart": {"movflags": "faststart"}, "fragmented": {"movflags": "frag_keyframe+empty_moov"}}


def picture_file(kind: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    picture, file = Image.fromarray(noise), io.BytesIO()
    kind, _, variant = kind.partition("-")
    form = {"jpg": "JPEG", "tif": "TIFF", "tiff": "TIFF", "jp2": "JPEG2000"}.get(kind, kind.upper())
    extra = {"lzw": {"compression": "tiff_lzw"}, "lossless": {"lossless": True}}.get(variant, {})
    if form == "JPEG":
        thumbnail = io.BytesIO()
        picture.resize((15, 10)).save(thumbnail, "JPEG")  # with an end mark of its own, in the middle of the file
        extra = {"comment": thumbnail.getvalue()}
    picture.save(file, form, **extra)
    return file.getvalue()


def container_file(source: Path, name: str, codecs: dict[str, str]) -> bytes:
    """A clip or sound in another container."""
    target = source.with_name(name)
    options = SETTINGS.get(name.partition(".")[0], {})
    with av.open(str(source)) as read, av.open(str(target), "w", options=options) as written:
        streams = {}
        for stream in read.streams:
            if stream.type in codecs:
                rate = 48000 if codecs[stream.type] == "libopus" else 44100
                output_stream = written.add_stream(codecs[stream.type], rate=rate, layout="mono")
                streams[stream.index] = (
                    output_stream,
                    av.AudioResampler(output_stream.codec_context.format, "mono", rate),
                )
            else:
                streams[stream.index] = written.add_stream_from_template(stream), None
        for packet in read.demux():
            output_stream, resampler = streams[packet.stream.index]
            if resampler is None:
                if packet.dts is not None:
                    packet.stream = output_stream
                    written.mux(packet)
                continue
            for frame in packet.decode():
                for part in resampler.resample(frame):
                    written.mux(output_stream.encode(part))
        for output_stream, resampler in streams.values():
            if resampler is not None:
                written.mux(output_stream.encode(None))
    return target.read_bytes()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A whole file of each kind."""
    folder = tmp_path_factory.mktemp("files")
    clip = write_clip(folder / "clip.mp4", num_frames=30, seconds_of_sound=1.2)
    sound = write_sound(folder / "sound.wav", 2.0)
    codec = {"flac": "flac", "mka": "flac", "ogg": "libopus", "mp3": "mp3"}
    result = {kind: picture_file(kind) for kind in PICTURES}
    result |= {kind: container_file(clip, f"{kind}" if "." in kind else f"plain.{kind}", {}) for kind in VIDEOS}
    for kind in SOUNDS:
        name = kind if "." in kind else f"plain.{kind}"
        codecs = {"audio": codec.get(kind, "aac")}
        result[kind] = sound.read_bytes() if kind == "wav" else container_file(sound, name, codecs)
    return result


def use_picture(data: bytes) -> None:
    size = measure_image(MediaRef(None, data))
    loaded = load_image(None, data)
    assert size == (loaded.height, loaded.width)


def use_video(data: bytes) -> None:
    num_frames = measure_video(MediaRef(None, data)).num_frames
    assert len(load_video(None, data, (), sorted({0, num_frames // 2, num_frames - 1}))) >= 1


def use_sound(data: bytes) -> None:
    num_samples = measure_audio(MediaRef(None, data), RATE)
    assert len(load_audio(None, data, RATE, num_samples)) == num_samples


USE: dict[str, Callable[[bytes], None]] = {
    **dict.fromkeys(PICTURES, use_picture),
    **dict.fromkeys(VIDEOS, use_video),
    **dict.fromkeys(SOUNDS, use_sound),
}


@pytest.mark.parametrize("kind", USE)
def test_intact_files_are_used(files: dict[str, bytes], kind: str) -> None:
    if kind == "eps":  # a program, which training would have to run
        with pytest.raises(MediaProblem, match="programs, not pictures"):
            use_picture(files[kind])
        with pytest.raises(MediaError, match="programs, not pictures"):
            load_image(None, files[kind])
    else:
        USE[kind](files[kind])


@settings(max_examples=150)
@given(st.sampled_from(sorted(USE)), st.floats(0, 1), st.integers(0, 40), st.booleans())
def test_truncated_file_is_dropped_or_trainable(
    files: dict[str, bytes], kind: str, share: float, back: int, near_the_end: bool
) -> None:
    data = files[kind]
    truncated = data[: len(data) - 1 - back] if near_the_end else data[: int(share * len(data))]
    with suppress(MediaProblem):  # which export raises; training raises MediaError
        USE[kind](truncated)


CUT = [("bmp", 0.9), ("tif", 0.9), ("jp2", 0.9), ("jpg", 0.9), ("png", 0.9), ("flac", 0.9), ("flac", 0.99)]
CUT += [("faststart.mp4", 0.97), ("faststart.m4a", 0.97)]


@pytest.mark.parametrize(("kind", "share"), CUT)
def test_truncated_files_are_detected_at_export(files: dict[str, bytes], kind: str, share: float) -> None:
    with pytest.raises(MediaProblem, match=r"truncated|cut off|Invalid data|broken") as exc_info:
        USE[kind](files[kind][: int(share * len(files[kind]))])
    assert exc_info.value.reason == "media_unreadable"


@settings(max_examples=120)
@given(st.sampled_from((*VIDEOS, *SOUNDS)), st.floats(0, 1))
def test_truncation_is_detected_if_the_file_declares_its_length(
    files: dict[str, bytes], kind: str, share: float
) -> None:
    data = files[kind]
    truncated = data[: round(share * (len(data) - 257))]  # 256 bytes may be those of a tag behind an mp3
    # Nothing says that more follows an Ogg page or a fragment.
    is_between = any(
        data[len(truncated) - k :][:12][4 * (kind != "ogg") :][:4] in (b"OggS", b"moof", b"mfra") for k in range(8)
    )
    if truncated and not is_between:
        with pytest.raises(MediaProblem):
            USE[kind](truncated)


def test_sounds_that_declare_their_length_are_not_decoded(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio, "_decode_mono", lambda *_: pytest.fail("decoded"))
    for kind in ("wav", "flac", "m4a", "faststart.m4a", "ogg"):
        assert abs(measure_audio(MediaRef(None, files[kind]), RATE) / RATE - 2) < 0.03


def test_files_without_declared_length_or_with_trailing_tags(files: dict[str, bytes]) -> None:
    live = files["wav"][:4] + b"\xff" * 4 + files["wav"][8:]
    for data in (live, files["mp3"] + b"TAG" + b"x" * 125, files["m4a"] + b"TAG" + b"x" * 125, files["ogg"] + b"tag"):
        use_sound(data)
    use_sound(live[:-40_000])
    frame = files["mp3"].index(b"\xff\xfb")
    without = files["mp3"].replace(b"Xing", b"none").replace(b"Info", b"none")
    use_sound(without[: frame + 10_000])


@settings(max_examples=30)
@given(st.floats(0, 1.5), st.floats(0.3, 1))
def test_edit_lists_of_sounds(files: dict[str, bytes], skipped_seconds: float, share: float) -> None:
    at = files["m4a"].index(b"elst") + 12
    duration, start = struct.unpack_from(">Ii", files["m4a"], at)
    edit = struct.pack(">Ii", round(duration * share), start + round(skipped_seconds * 44100))
    use_sound(files["m4a"][:at] + edit + files["m4a"][at + 8 :])


def test_large_truncated_images_are_not_decoded(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    for kind in ("bmp", "tif", "webp", "jp2", "png", "jpg"):
        assert measure_image(MediaRef(None, files[kind])) == (40, 60)


def test_a_flac_that_declares_ten_hours(files: dict[str, bytes]) -> None:
    data = bytearray(files["flac"])
    hours = 10 * 3600 * 44100
    # 36 bits of STREAMINFO behind sizes, rate, channels and depth (RFC 9639, 8.2).
    data[21] = data[21] & 0xF0 | hours >> 32
    data[22:26] = (hours & 0xFFFFFFFF).to_bytes(4, "big")
    with pytest.raises(MediaProblem, match=r"declares 36000\.00 s"):
        measure_audio(MediaRef(None, bytes(data)), RATE)


@pytest.mark.parametrize("kind", ["ffconcat", "hls"])
def test_playlists_open_nothing(files: dict[str, bytes], kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "secret.avi").write_bytes(files["avi"])
    lists = {
        "ffconcat": "ffconcat version 1.0\nfile secret.avi\n",
        "hls": f"#EXTM3U\n#EXTINF:5,\nfile://{tmp_path}/secret.avi\n#EXT-X-ENDLIST\n",
    }
    monkeypatch.chdir(tmp_path)
    path = tmp_path / {"ffconcat": "a.mp4", "hls": "a.m3u8"}[kind]
    path.write_text(lists[kind])
    with pytest.raises(MediaProblem, match=r"a\.\w+: "):
        measure_video(MediaRef(str(path)))


def test_training_distinguishes_damaged_from_changed_files(files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    path.write_bytes(files["flac"])
    with pytest.raises(MediaError, match=r"a\.flac is damaged, or has changed since"):
        load_audio(str(path), None, RATE, 3 * RATE)
    with pytest.raises(MediaError, match=r"is damaged: .* and now there is more"):
        load_audio(None, files["flac"], RATE, RATE)
    with pytest.raises(MediaError, match="no frame 99"):
        load_video(None, files["mp4"], (), [0, 99])
    with pytest.raises(MediaError, match="checked only its header and its end"):
        load_image(None, files["bmp"][:500])
