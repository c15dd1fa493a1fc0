#!/usr/bin/env python3
"""Measure how fast frames of a long video are loaded, as ratios in the same run.

Training decodes from the nearest keyframe before each frame. The baseline decodes the whole video up to the last
frame. Both take 64 evenly spaced frames from an hour of synthetic video at 25 frames per second, and the frames are
compared. There is a keyframe every two seconds, or every ten seconds (x264's default maximum). The video is stored as
mp4, which lists its keyframes, and as Matroska, which is scanned once to find them. Times are CPU seconds of all
threads, which depend less on other work on the machine.

    python scripts/bench_media.py [--minutes 60] [--take 64] [--size 256] [--repeat 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np

from packtool.media import video
from packtool.media.video import all_frames, needed_frames
from packtool.rows.sample import MediaRef

_FPS = 25


def main(words: list[str] | None = None) -> None:
    """Compare both methods on every file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60, help="length of the video")
    parser.add_argument("--take", type=int, default=64, help="number of frames to load")
    parser.add_argument("--size", type=int, default=256, help="height and width of a frame in pixels")
    parser.add_argument("--repeat", type=int, default=3, help="number of measurements")
    options = parser.parse_args(words)
    num_frames = options.minutes * 60 * _FPS
    numbers = np.linspace(0, num_frames - 1, options.take).round().astype(int).tolist()
    print(f"{options.minutes} minutes, {num_frames:,} frames, of which {options.take} are taken")
    with tempfile.TemporaryDirectory() as folder:
        for form in ("mp4", "mkv"):
            for group in (2 * _FPS, 10 * _FPS):
                path = Path(folder) / f"{group}.{form}"
                _make(path, options.minutes, options.size, group)
                _compare(path, numbers, group, options.repeat)


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
