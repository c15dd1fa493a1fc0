from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from packtool.media.files import MediaProblem
from packtool.media.measure import load_image, measure_image
from packtool.rows.sample import MediaRef


def write(path: Path, form: str, orientation: int | None) -> None:
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.new("RGB", (20, 10), "red").save(path, form, exif=exif)


@pytest.mark.smoke
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_measured_size_is_the_loaded_size(tmp_path: Path, form: str, orientation: int | None) -> None:
    path = tmp_path / "picture.any"  # the content decides, not the name
    write(path, form, orientation)
    loaded = load_image(str(path))
    assert measure_image(MediaRef(str(path))) == (loaded.height, loaded.width)
    data = path.read_bytes()
    assert measure_image(MediaRef(None, data)) == (loaded.height, loaded.width)


def test_png_orientation_after_the_pixels_is_read(tmp_path: Path) -> None:
    write(tmp_path / "before.png", "PNG", 6)
    data = (tmp_path / "before.png").read_bytes()
    at = data.index(b"eXIf") - 4
    size = int.from_bytes(data[at : at + 4], "big") + 12
    chunk, without_chunk = data[at : at + size], data[:at] + data[at + size :]
    end = without_chunk.index(b"IEND") - 4
    path = tmp_path / "behind.png"
    path.write_bytes(without_chunk[:end] + chunk + without_chunk[end:])
    loaded = load_image(str(path))
    assert (loaded.height, loaded.width) == (20, 10)
    assert measure_image(MediaRef(str(path))) == (20, 10)


def test_only_header_and_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((600, 400), 50).save(buffer, "JPEG")
    data = buffer.getvalue()
    path = tmp_path / "hollow.jpg"
    path.write_bytes(data[:2000] + b"\0" * (len(data) - 2002) + data[-2:])
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    assert measure_image(MediaRef(str(path))) == (400, 600)


@pytest.mark.parametrize("content", [b"", b"plain text", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"])
def test_files_that_are_not_images_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(MediaProblem, match=r"a\.png") as exc_info:
        measure_image(MediaRef(str(path)))
    assert exc_info.value.reason == "media_unreadable"


def test_decompression_bombs_are_refused_but_large_scans_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("1", (300, 300)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60_000)
    assert measure_image(MediaRef(str(tmp_path / "a.png"))) == (300, 300)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40_000)
    with pytest.raises(MediaProblem, match="exceeds limit"):
        measure_image(MediaRef(str(tmp_path / "a.png")))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MediaProblem, match=r"gone\.png") as exc_info:
        measure_image(MediaRef(str(tmp_path / "gone.png")))
    assert exc_info.value.reason == "media_missing"


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_truncated_image_is_reported(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    assert measure_image(MediaRef(str(path))) == (120, 160)
    assert measure_image(MediaRef(None, data + b"\0" * 20)) == (120, 160)
    for share in (0.3, 0.6, 0.9):
        with pytest.raises(MediaProblem, match=r"truncated|broken|unrecognized"):
            measure_image(MediaRef(None, data[: int(len(data) * share)]))
