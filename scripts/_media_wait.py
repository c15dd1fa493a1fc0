"""Rows whose media take long to load: photographs of three megapixels, and long videos of which few frames are seen."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
from PIL import Image

_FPS = 25


def make_media_rows(folder: Path, num_pictures: int, num_videos: int, *, scale: int) -> Path:
    """A file of rows, one for each picture and each video, which are made here.

    Args:
        scale: pictures are 16 * scale pixels high, videos 4 * scale, and scale / 2 seconds long.
    """
    folder.mkdir(parents=True)
    random, rows = np.random.default_rng(0), []
    for number in range(num_pictures):
        rough = random.integers(0, 256, (scale, 4 * scale // 3, 3), np.uint8)
        picture = Image.fromarray(rough).resize((16 * (4 * scale // 3), 16 * scale), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.jpg", quality=90)
        rows.append(_row("image", folder / f"{number}.jpg"))
    for number in range(num_videos):
        _make_video(folder / f"{number}.mp4", 4 * scale, scale * _FPS // 2, seed=number)
        rows.append(_row("video", folder / f"{number}.mp4"))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _row(kind: str, path: Path) -> dict[str, object]:
    question = {"role": "user", "content": f"<{kind}>What is to be seen?"}
    return {"messages": [question, {"role": "assistant", "content": "Noise."}], f"{kind}s": [str(path)]}


def _make_video(path: Path, height: int, num_frames: int, seed: int) -> None:
    """H.264 of moving noise with a keyframe every four seconds."""
    width = height * 3 // 2 // 2 * 2
    noise = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), np.uint8)
    large = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=_FPS, options={"preset": "ultrafast", "g": str(4 * _FPS)})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(num_frames):
            moved = np.ascontiguousarray(np.roll(large, 3 * number, axis=1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
        container.mux(stream.encode(None))
