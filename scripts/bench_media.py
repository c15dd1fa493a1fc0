#!/usr/bin/env python3
"""Measure how fast pictures and frames of a long video are loaded, as ratios in the same run.

Pictures are decoded, resized to at most 1,024 tokens and cut into patches as in a data worker. The baseline is
transformers' ``load_image`` and its Qwen3-VL processor. The patches are compared.

Training decodes from the nearest keyframe before each frame. The baseline decodes the whole video up to the last
frame. Both take 64 evenly spaced frames from an hour of synthetic video at 25 frames per second, and the frames are
compared. There is a keyframe every two seconds, or every ten seconds (x264's default maximum). The video is stored as
mp4, which lists its keyframes, and as Matroska, which is scanned once to find them. Times are CPU seconds of all
threads, which depend less on other work on the machine.

    python scripts/bench_media.py [--what pictures videos] [--minutes 60] [--take 64] [--size 256] [--repeat 5]
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessor, image_utils

from packtool.batch.media import skip_pixel_copies
from packtool.media import video
from packtool.media.measure import load_image
from packtool.media.video import all_frames, needed_frames
from packtool.rows.sample import MediaRef

_FPS = 25
_PIXELS_PER_TIME = 8_000_000
"""Pixels of the pictures that are loaded between two readings of the clock."""
_PICTURES = (
    (4032, 3024, "JPEG"),
    (1920, 1080, "JPEG"),
    (1920, 1080, "PNG"),
    (1280, 960, "JPEG"),
    (640, 480, "JPEG"),
    (448, 336, "JPEG"),
    (64, 64, "PNG"),
)
"""(width, height, format) of pictures."""


def main(words: list[str] | None = None) -> None:
    """Compare both methods on every file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("pictures", "videos"), default=("pictures", "videos"))
    parser.add_argument("--minutes", type=int, default=60, help="length of the video")
    parser.add_argument("--take", type=int, default=64, help="number of frames to load")
    parser.add_argument("--size", type=int, default=256, help="height and width of a frame in pixels")
    parser.add_argument("--repeat", type=int, default=5, help="number of measurements")
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # as in a data worker
    if "pictures" in options.what:
        for width, height, form in _PICTURES:
            _compare_pictures(width, height, form, options.repeat)
    if "videos" not in options.what:
        return
    num_frames = options.minutes * 60 * _FPS
    numbers = np.linspace(0, num_frames - 1, options.take).round().astype(int).tolist()
    print(f"{options.minutes} minutes, {num_frames:,} frames, of which {options.take} are taken")
    with tempfile.TemporaryDirectory() as folder:
        for form in ("mp4", "mkv"):
            for group in (2 * _FPS, 10 * _FPS):
                path = Path(folder) / f"{group}.{form}"
                _make(path, options.minutes, options.size, group)
                _compare(path, numbers, group, options.repeat)


def _compare_pictures(width: int, height: int, form: str, repeat: int) -> None:
    """Compare both ways on a picture of smooth noise, whose JPEG is as large as that of a photo."""
    noise = np.random.default_rng(0).integers(0, 256, (-(-height // 4), -(-width // 4), 3), np.uint8)
    picture = Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)
    picture.save(file := io.BytesIO(), form, **({"quality": 90} if form == "JPEG" else {"compress_level": 1}))
    data = file.getvalue()
    sizes = {"patch_size": 16, "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 1024 * 32 * 32}}
    unchanged, processor = (Qwen2VLImageProcessor(**sizes) for _ in range(2))
    skip_pixel_copies(processor)
    num_calls = max(1, _PIXELS_PER_TIME // (width * height))  # short times are not measured exactly
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeat + 1):
        patches = {}
        for is_fast in (True, False):
            begin = time.process_time()
            for _ in range(num_calls):
                loaded = load_image(None, data) if is_fast else image_utils.load_image(Image.open(io.BytesIO(data)))
                made = (processor if is_fast else unchanged)(images=[loaded], return_tensors="pt")
            patches[is_fast] = made["pixel_values"]
            times[is_fast].append((time.process_time() - begin) / num_calls)
        assert torch.equal(patches[True], patches[False])
    after_warm_up = zip(times[False][1:], times[True][1:], strict=True)
    ratios = sorted(slow / fast for slow, fast in after_warm_up)
    print(
        f"{form} {width}x{height}: {statistics.median(ratios):.2f} times as fast as transformers "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}; {1000 * statistics.median(times[True]):.2f} ms)"
    )


def _make(path: Path, minutes: int, size: int, group: int) -> None:
    """Write H.264 video of moving noise with a keyframe every ``group`` frames: one minute, repeated."""
    noise = np.random.default_rng(0).integers(0, 256, (2 * size, 2 * size, 3), np.uint8)
    settings = {"preset": "veryfast", "g": str(group), "keyint_min": str(group), "sc_threshold": "0"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=_FPS, options=settings)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        packets = []
        for number in range(60 * _FPS):
            at = number % size
            picture = np.ascontiguousarray(noise[at : at + size, at : at + size])
            packets += stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24"))
        packets += stream.encode(None)
        written = [(bytes(packet), packet.pts, packet.dts, packet.is_keyframe, packet.time_base) for packet in packets]
        for minute in range(minutes):
            for data, shown, read, is_key, unit in written:
                packet = av.Packet(data)
                later = round(minute * 60 / unit)
                packet.stream, packet.time_base, packet.is_keyframe = stream, unit, is_key
                packet.pts, packet.dts = shown + later, read + later
                container.mux(packet)


def _compare(path: Path, numbers: list[int], group: int, repeat: int) -> None:
    ref, ratios, seconds = MediaRef(str(path)), [], []
    for _ in range(repeat):
        fast, found = _timed(ref, numbers, needed_frames)
        slow, expected = _timed(ref, numbers, all_frames)
        assert np.array_equal(found, expected)
        ratios.append(slow / fast)
        seconds.append(fast)
    told = f"{statistics.median(ratios):.1f} times as fast as decoding everything ({statistics.median(seconds):.2f} s)"
    print(f"{path.suffix[1:]}, a keyframe every {group // _FPS} s: {told}")


def _timed(ref: MediaRef, numbers: list[int], way: Callable[..., Any]) -> tuple[float, Any]:
    begin = time.process_time()
    found, _ = video._decode_frames(ref, numbers, way, None)
    return time.process_time() - begin, found


if __name__ == "__main__":
    main()
