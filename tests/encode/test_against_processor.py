"""Every token equals the real processor's."""

from __future__ import annotations

import io
import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from packtool.batch.media import load_media
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.media.measure import load_image
from packtool.rows.forms import to_sample
from packtool.rows.sample import Dropped, MediaRef, Sample, Turn
from packtool.rows.source import Source
from tests.encode.conftest import encoder_for

IMAGE_SETS = ("mm_mathvision_a", "mm_xtuner_coco_zh", "mm_llamafactory_mllm_demo", "mm_qwen3vl_demo")


def image_rows(data: Path, name: str) -> list[tuple[int, dict[str, Any]]]:
    lines = (data / f"{name}.jsonl").read_text().splitlines()
    return [(i, row) for i, row in enumerate(map(json.loads, lines)) if row.get("images") and not row.get("videos")]


def encode_rows(encoder: Encoder, source: Path, rows: list[tuple[int, dict[str, Any]]]) -> list[EncodedSample]:
    encoded_rows = encoder.encode([to_sample(row, Source(str(source)), i) for i, row in rows])
    assert not any(isinstance(item, Dropped) for item in encoded_rows)
    return [sample for pieces in encoded_rows for sample in pieces]  # type: ignore[union-attr]


@cache
def processor_of(directory: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(directory)


@cache
def tokenizer_of(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@cache
def cached_encoder(directory: Path, **spec: Any) -> Encoder:
    """Reading a real vocabulary takes longer than encoding some rows with it."""
    return encoder_for(directory, **spec)


def with_content_lists(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages with list contents, as transformers wants pictures."""
    messages = []
    for message in row["messages"]:
        parts: list[dict[str, Any]] = []
        for i, text in enumerate(message["content"].split("<image>")):
            parts += [{"type": "image"}] if i else []
            parts += [{"type": "text", "text": text}] if text else []
        messages.append({"role": message["role"], "content": parts})
    return messages


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl"])
@pytest.mark.parametrize("name", IMAGE_SETS)
def test_image_rows_equal_the_processor(data: Path, family: str, name: str) -> None:
    directory = data / "tokenizers" / family
    processor = processor_of(directory)
    source = data / f"{name}.jsonl"
    rows = image_rows(data, name)
    samples = encode_rows(cached_encoder(directory), source, rows)
    assert len(samples) == len(rows) > 2
    for (_, row), sample in zip(rows, samples, strict=True):
        text = processor.apply_chat_template(with_content_lists(row), tokenize=False)
        sizes = [[image.height, image.width] for image in sample.images]
        counts = processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
        for count in counts:
            text = text.replace("<|image_pad|>", "<|placeholder|>" * count, 1)
        expected = processor.tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"))["input_ids"]
        np.testing.assert_array_equal(sample.input_ids, expected)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-vl"])
def test_real_pixels_have_the_measured_grid_and_ids(data: Path, family: str) -> None:
    directory = data / "tokenizers" / family
    processor = processor_of(directory)
    source = data / "mm_mathvision_a.jsonl"
    by_size = sorted(
        encode_rows(cached_encoder(directory), source, image_rows(data, source.stem)),
        key=lambda sample: sample.images[0].height * sample.images[0].width,
    )
    rows = dict(image_rows(data, source.stem))
    narrow = max(by_size, key=lambda sample: sample.images[0].width / sample.images[0].height)
    step = 1 + len(by_size) // 16
    for sample in [*by_size[:10], *by_size[10:-step:step], narrow]:
        text = processor.apply_chat_template(with_content_lists(rows[sample.row]), tokenize=False)
        pictures = [load_image(image.path) for image in sample.images]
        expected = processor(text=[text], images=pictures, return_tensors="np")
        np.testing.assert_array_equal(sample.input_ids, expected["input_ids"][0])
        assert [image.grid for image in sample.images] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen2.5-omni", "qwen3-vl", "qwen3-omni"])
def test_tiny_and_narrow_images_match_the_processor(drawn_data: Path, family: str) -> None:
    encoder = cached_encoder(drawn_data / "tokenizers" / family)
    spec = InputSpec.load(encoder.spec.model, encoder.limits)
    process = processor_of(Path(encoder.spec.model)).image_processor
    thin = [(long, short) for long in (30, 200, 201) for short in (1, 3)]
    for size in [*product(range(1, 5), repeat=2), *thin, *((width, height) for height, width in thin)]:
        Image.effect_noise(size, 50).convert("RGB").save(file := io.BytesIO(), "PNG")
        ref = MediaRef(None, file.getvalue())
        row = Sample((Turn("user", "<image>?"), Turn("assistant", "!")), (ref,), "rows.jsonl", 0)
        (result,) = encoder.encode([row])
        if isinstance(result, Dropped):
            assert max(size) > 200 * min(size)
            continue
        expected = process(images=[load_image(None, ref.data)], return_tensors="pt")
        assert result[0].images[0].grid == tuple(expected["image_grid_thw"][0].tolist())
        assert torch.equal(load_media(result, spec)["pixel_values"], expected["pixel_values"])


@pytest.mark.smoke
@pytest.mark.parametrize("template", ["text-qwen2_5", "text-qwen3", "text-qwen3_instruct_2507"])
@pytest.mark.parametrize("name", ["text_gsm8k_test", "tool_glaive_en", "tool_reasoning_50"])
def test_text_rows_equal_the_processor(data: Path, text_model: Any, template: str, name: str) -> None:
    directory = text_model(template)
    tokenizer = tokenizer_of(directory)
    lines = (data / f"{name}.jsonl").read_text().splitlines()[:120]
    rows = list(enumerate(map(json.loads, lines)))
    for (_, row), sample in zip(rows, encode_rows(cached_encoder(directory), data / name, rows), strict=True):
        messages = [{key: value for key, value in m.items() if value is not None} for m in row["messages"]]
        messages = [{"content": "", **message} for message in messages]
        text = tokenizer.apply_chat_template(messages, tools=row.get("tools") or None, tokenize=False)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        np.testing.assert_array_equal(sample.input_ids, expected)
