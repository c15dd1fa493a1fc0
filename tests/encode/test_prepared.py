"""Tokens that another tool has made become what encoding their rows gives, whatever media they have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtool.cache.export import export
from packtool.cache.reader import CacheReader
from packtool.config.data import EncodeSpec, ExportConfig, ImportConfig
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.progress import SilentProgress
from packtool.rows.sample import Dropped, MediaRef, PreparedTokens, Sample, Turn
from tests.media.clips import write_clip, write_sound


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MediaRef]:
    """A picture, a video with a sound track, and a sound."""
    folder = tmp_path_factory.mktemp("media")
    Image.new("RGB", (90, 60)).save(folder / "a.png")
    write_clip(folder / "b.mp4", num_frames=100, seconds_of_sound=4)
    write_sound(folder / "c.wav", 1.5)
    names = {"image": "a.png", "video": "b.mp4", "audio": "c.wav"}
    return {kind: MediaRef(str(folder / name)) for kind, name in names.items()}


def row_of(media: dict[str, MediaRef], kinds: tuple[str, ...]) -> Sample:
    """A conversation with media of some kinds in its two questions, one after the other and apart."""
    marks = "".join(f"<{kind}>" for kind in kinds)
    refs: dict[str, Any] = {f"{kind}s": (media[kind],) * 3 for kind in kinds}
    turns = (
        *(Turn("user", f"{marks}{marks}What is it?"), Turn("assistant", "A thing.")),
        *(Turn("user", f"And {marks}?"), Turn("assistant", "The same thing again.")),
    )
    return Sample(**{"turns": turns, "images": (), "source": "rows.jsonl", "row": 0, **refs})


def prepared(sample: Sample, encoded_samples: list[EncodedSample]) -> Sample:
    """The row as a tool would leave it that had made these samples of it, and packed them."""
    ids = np.concatenate([each.input_ids for each in encoded_samples]).astype(np.int64)
    labels = np.concatenate([each.labels for each in encoded_samples])
    starts = np.cumsum([0, *(each.length for each in encoded_samples[:-1])])
    refs = {name: getattr(sample, name) * len(encoded_samples) for name in ("images", "videos", "audios")}
    return replace(sample, turns=(), tokens=PreparedTokens(ids, labels != IGNORE_INDEX, None, starts), **refs)


def values(sample: EncodedSample) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(sample).items()}


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3-vl", ("image", "video")),
        ("qwen2.5-vl", ("video", "image")),
        ("qwen2.5-omni", ("video", "audio", "image")),
        ("qwen3-omni", ("audio", "video")),
    ],
)
def test_pretokenized_media_equal_their_rows(
    drawn_data: Path, media: dict[str, MediaRef], family: str, kinds: tuple[str, ...]
) -> None:
    directory = str(drawn_data / "tokenizers" / family)
    files = ModelFiles.load(directory)
    spec_options: dict[str, Any] = {"model": directory, "max_pixels": 20_000, "min_pixels": 3200}
    spec_options |= {"video_max_pixels": 6000, "video_min_pixels": 3200}
    if "omni" in family:
        spec_options["use_audio_in_video"] = True
    encoder = Encoder(EncodeSpec(max_length=100_000, **spec_options), files)
    sample = row_of(media, kinds)
    (encoded_samples,) = encoder.encode([sample])
    assert isinstance(encoded_samples, list)
    (pretokenized,) = encoder.encode([prepared(sample, encoded_samples)])
    assert isinstance(pretokenized, list)
    assert [values(each) for each in pretokenized] == [values(each) for each in encoded_samples]
    (packed,) = encoder.encode([prepared(sample, [*encoded_samples, *encoded_samples])])
    assert isinstance(packed, list)
    assert [values(each) for each in packed] == [values(each) for each in encoded_samples] * 2

    length = encoded_samples[0].length
    for strategy, limit in (("left", length - 5), ("right", length - 7), ("left", 3 * length // 5)):
        spec = EncodeSpec(max_length=limit, truncation_strategy=strategy, media_overflow="trim", **spec_options)  # type: ignore[arg-type]
        short = Encoder(spec, files)
        (truncated,), (cut_tokens,) = short.encode([sample]), short.encode([prepared(sample, encoded_samples)])
        assert isinstance(truncated, list)
        assert isinstance(cut_tokens, list)
        assert [values(each) for each in cut_tokens] == [values(each) for each in truncated]

    other = {**spec_options, "max_pixels": 3400, "video_max_pixels": 3400}
    if kinds == ("audio", "video"):
        other["fps"] = 1.0
    (dropped,) = Encoder(EncodeSpec(max_length=100_000, **other), files).encode([prepared(sample, encoded_samples)])
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "media_tokens"
    assert "give the limits on media that the rows were prepared with" in dropped.detail


def test_a_medium_across_two_samples_of_a_pack_is_dropped(drawn_data: Path, media: dict[str, MediaRef]) -> None:
    directory = str(drawn_data / "tokenizers" / "qwen3-vl")
    encoder = Encoder(EncodeSpec(model=directory, max_length=100_000), ModelFiles.load(directory))
    sample = row_of(media, ("image",))
    (encoded_samples,) = encoder.encode([sample])
    assert isinstance(encoded_samples, list)
    prepared_sample = prepared(sample, encoded_samples)
    assert prepared_sample.tokens is not None
    inside = int(np.flatnonzero(encoded_samples[0].input_ids == encoder.media_tokens.pads["image"])[1])
    tokens = replace(prepared_sample.tokens, starts=np.array([0, inside]))
    (dropped,) = encoder.encode([replace(prepared_sample, tokens=tokens)])
    assert isinstance(dropped, Dropped)
    assert "begins in one of them" in dropped.detail


def test_frames_with_times_are_imported_unchanged(drawn_data: Path, tmp_path: Path) -> None:
    for i in range(3):
        Image.new("RGB", (96, 64), (40 * i, 0, 0)).save(tmp_path / f"{i}.png")
    video = {"frames": [f"{i}.png" for i in range(3)], "seconds": [0.5, 2, 60.25]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"query": "<video>?", "response": "!", "videos": [video]}) + "\n")
    settings: dict[str, Any] = {"model": str(drawn_data / "tokenizers" / "qwen3-vl"), "max_length": 500}
    settings["media_access"] = "local"
    exported, imported = (str(tmp_path / name) for name in ("exported", "imported"))
    export(ExportConfig(dataset=(str(rows),), output_dir=exported, **settings), SilentProgress())
    export(ImportConfig(dataset=(f"{exported}/train",), output_dir=imported, **settings), SilentProgress())
    first, second = (CacheReader.open([cache]).sample(0) for cache in (exported, imported))
    np.testing.assert_array_equal(first.input_ids, second.input_ids)
    assert first.videos == second.videos
    assert first.videos[0].indices == (500, 2000, 60250)
