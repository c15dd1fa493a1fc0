"""Small video and sound files made on the spot."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np


def write_clip(
    path: Path, *, num_frames: int = 50, size: tuple[int, int] = (64, 96), fps: int = 25, seconds_of_sound: float = 0.0
) -> Path:
    """A clip whose frames differ, perhaps with a sound track; the container is the path's suffix."""
    height, width = size
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=fps)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        sound = container.add_stream("aac", rate=48000, layout="mono") if seconds_of_sound else None
        for i in range(num_frames):
            picture = np.full((height, width, 3), (i * 5) % 256, np.uint8)
            picture[: height // 2, : width // 2] = (255 - i) % 256
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode(None))
        if sound is not None:
            wave = np.sin(np.arange(int(48000 * seconds_of_sound)) * 0.05).astype(np.float32)[None]
            for start in range(0, wave.shape[1], 1024):
                frame = av.AudioFrame.from_ndarray(wave[:, start : start + 1024].copy(), format="fltp", layout="mono")
                frame.sample_rate = 48000
                container.mux(sound.encode(frame))
            container.mux(sound.encode(None))
    return path


def write_sound(path: Path, seconds: float, rate: int = 44100) -> Path:
    """A mono wave file."""
    import wave

    samples = (np.sin(np.arange(int(rate * seconds)) * 0.05) * 20000).astype(np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path
