"""Models of other families: every token equals that of their own processors, made here from their own classes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtool.encode.encoded import EncodedSample
from packtool.encode.families.processor import special_tokens, split_processor_text
from packtool.errors import ConfigError
from packtool.rows.sample import Dropped, MediaRef, Sample, Turn
from tests.encode.conftest import encoder_for
from tests.encode.other_families import model_of, tokens_of
from tests.encode.test_prepared import prepared, values

FAMILIES = ("internvl", "llava_onevision", "gemma3", "llava_next", "idefics3")


@pytest.fixture(scope="module", params=FAMILIES)
def family_processor(request: Any, drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """(family, directory, processor)."""
    directory, processor = model_of(request.param, drawn_data, tmp_path_factory.mktemp(request.param))
    return request.param, directory, processor


def pictures(data: Path) -> list[str]:
    names = sorted((data / "raw" / "math-v" / "images").glob("*.jpg"))
    return [str(name) for name in names[:: len(names) // 7]]


def row(turns: list[tuple[str, str]], images: list[str]) -> Sample:
    return Sample(
        tuple(Turn(role, text) for role, text in turns), tuple(MediaRef(path) for path in images), "rows.jsonl", 0
    )


def expected(processor: Any, turns: list[tuple[str, str]], images: list[str]) -> list[int]:
    ids: list[int] = tokens_of(processor, row(turns, images))["input_ids"][0]
    return ids


def encoded(directory: Path, turns: list[tuple[str, str]], images: list[str]) -> EncodedSample | Dropped:
    (result,) = cached_encoder(directory).encode([row(turns, images)])
    return result[0] if isinstance(result, list) else result


@cache
def cached_encoder(directory: Path) -> Any:
    return encoder_for(directory)


def test_every_token_equals_that_of_the_processor(
    family_processor: tuple[str, Path, Any], data: Path, tmp_path: Path
) -> None:
    _family, directory, processor = family_processor
    files = pictures(data)
    assert len(files) > 5
    for size in ((2, 3), (200, 3)):
        Image.new("RGB", size).save(tmp_path / f"{size}.png")
        files.append(str(tmp_path / f"{size}.png"))
    for index, path in enumerate(files):
        turns = [("user", "<image>What\n\nis it?" if index % 2 else "See <image> here."), ("assistant", "A <b>.")]
        sample = encoded(directory, turns, [path])
        assert isinstance(sample, EncodedSample), sample
        np.testing.assert_array_equal(sample.input_ids, expected(processor, turns, [path]))
        pad = np.bincount(sample.input_ids).argmax()
        assert sample.images[0].num_tokens == int((sample.input_ids == pad).sum()) > 3
    text = [("user", "No picture."), ("assistant", "Right.")]
    sample = encoded(directory, text, [])
    assert isinstance(sample, EncodedSample)
    np.testing.assert_array_equal(sample.input_ids, expected(processor, text, []))
    two = [("user", "<image> or <image>?"), ("assistant", "Both.")]
    sample = encoded(directory, two, files[:2])
    assert isinstance(sample, EncodedSample)
    np.testing.assert_array_equal(sample.input_ids, expected(processor, two, files[:2]))


def test_each_size_is_processed_once(
    family_processor: tuple[str, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_for(family_processor[1])
    sizes: list[tuple[int, int]] = []

    def record_size(height: int, width: int) -> Image.Image:
        sizes.append((height, width))
        return Image.new("RGB", (width, height))

    monkeypatch.setattr("packtool.media.measure.blank_image", record_size)
    for number, width in enumerate((61, 62, 62)):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (width, 70)).save(path)
        (result,) = encoder.encode([row([("user", "<image>"), ("assistant", "!")], [str(path)])])
        assert isinstance(result, list)
    assert sizes == [(70, 61), (70, 62)]


def test_packed_tokenized_rows_have_cut_and_uncut_pictures(tmp_path: Path, drawn_data: Path) -> None:
    """LLaVA-OneVision cuts a picture into tiles if it is the only one of its sample."""
    directory, _ = model_of("llava_onevision", drawn_data, tmp_path)
    for size in ((112, 112), (56, 112)):
        Image.new("RGB", size).save(tmp_path / f"{size[0]}.png")
    large, small = str(tmp_path / "112.png"), str(tmp_path / "56.png")
    answer = ("assistant", "It is.")
    groups = [[large], [small, large], [], [small]]
    rows = [row([("user", "<image>" * len(group) + "What?"), answer], group) for group in groups]
    encoder = encoder_for(directory)
    expected = [sample for result in encoder.encode(rows) for sample in result]
    images = tuple(image for sample in rows for image in sample.images)
    pack = replace(prepared(rows[0], expected), images=images)
    (result,) = encoder.encode([pack])
    assert isinstance(result, list), result
    assert list(map(values, result)) == list(map(values, expected))
    assert [[image.is_uncut for image in sample.images] for sample in result] == [[False], [True, True], [], [False]]


def test_error_for_an_uncut_picture_drops_its_row(
    tmp_path: Path, drawn_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder: Any = encoder_for(model_of("llava_onevision", drawn_data, tmp_path)[0])
    process = encoder._media._process

    def refuse_two(sizes: list[tuple[int, int]]) -> Any:
        if len(sizes) == 2:
            raise RuntimeError("no two pictures")
        return process(sizes)

    monkeypatch.setattr(encoder._media, "_process", refuse_two)
    path = str(tmp_path / "a.png")
    Image.new("RGB", (11, 7)).save(path)
    (dropped,) = encoder.encode([row([("user", "<image><image>"), ("assistant", "!")], [path] * 2)])
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.detail) == ("media_size", f"{path}: the processor refuses 11x7: no two pictures")


def test_image_exceeding_processor_memory_drops_its_row(
    family_processor: tuple[str, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow raises MemoryError for pictures of 90 million pixels in a row, which headers may declare."""

    def refuse(height: int, width: int) -> Any:
        raise MemoryError

    cached_encoder(family_processor[1])  # asks the processor about pictures, too
    monkeypatch.setattr("packtool.media.measure.blank_image", refuse)
    Image.new("RGB", (11, 7)).save(tmp_path / "a.png")
    dropped = encoded(family_processor[1], [("user", "<image>?"), ("assistant", "!")], [str(tmp_path / "a.png")])
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.detail) == (
        "media_size",
        f"{tmp_path / 'a.png'}: the processor refuses 11x7: MemoryError",
    )


def test_processor_families_warn_of_speed_and_refuse_foreign_limits(family_processor: tuple[str, Path, Any]) -> None:
    family, directory, _ = family_processor
    assert "slower" in cached_encoder(directory).warnings[0]
    with pytest.raises(ConfigError, match=rf"--max-pixels \(MAX_PIXELS\) .* {family} model"):
        encoder_for(directory, max_pixels=1000)
    with pytest.raises(ConfigError, match="2 settings are wrong"):
        encoder_for(directory, fps=1.0, image_max_token_num=5)


def test_videos_are_dropped_with_a_reason(family_processor: tuple[str, Path, Any], tmp_path: Path) -> None:
    family, directory, _ = family_processor
    sample = Sample(
        (Turn("user", "<video>?"), Turn("assistant", "!")),
        (),
        "rows.jsonl",
        0,
        videos=(MediaRef(str(tmp_path / "a.mp4")),),
    )
    (dropped,) = cached_encoder(directory).encode([sample])
    assert isinstance(dropped, Dropped)
    reasons = {
        "gemma3": "does not support videos",
        "llava_next": "does not support videos",
        "idefics3": "does not support videos",
    }
    reasons |= {"llava_onevision": "no such file", "internvl": "no such file"}
    assert dropped.reason == ("media_missing" if "no such" in reasons[family] else "media_unsupported")
    assert reasons[family] in dropped.detail


def test_model_without_processor_is_reported(tmp_path: Path, drawn_data: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).symlink_to(drawn_data / "tokenizers" / "qwen3-vl" / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model", "vision_config": {}}))
    with pytest.raises(ConfigError, match=r"'no_such_model'|cannot count its pictures"):
        encoder_for(tmp_path)


def test_processor_text_is_split_into_text_and_token_counts() -> None:
    class Tokenizer:
        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
        image_token = "<x>"

    class Processor:
        image_token = "<b>"
        tokenizer = Tokenizer()

    special = special_tokens(Processor())
    assert split_processor_text("\n\n<b><x><x><x>\n", special) == ["\n\n", ("<b>", 1), ("<x>", 3), "\n"]
    assert split_processor_text("", special) == []
