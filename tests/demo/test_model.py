"""The made-up model loads like a real Qwen3-VL, and its processor encodes the world's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from packtool.demo.dataset import BACKDROP_COLOURS, SHAPE_COLOURS, make_rows
from packtool.demo.model import CONTROL_TOKENS, PLAIN_ADDED_TOKENS, make_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(str(path), 7)
    return path


@pytest.fixture(scope="module")
def processor(directory: Path) -> Any:
    return AutoProcessor.from_pretrained(directory)


def test_demo_model_has_a_few_million_parameters(tmp_path: Path) -> None:
    claimed = make_model(str(tmp_path), 7)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert isinstance(model, Qwen3VLForConditionalGeneration)
    assert claimed == sum(parameter.numel() for parameter in model.parameters())
    assert 2_000_000 < claimed < 6_000_000


def test_same_seed_gives_the_same_bytes_and_keeps_the_torch_seed(directory: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    make_model(str(tmp_path / "again"), 7)
    make_model(str(tmp_path / "other"), 8)
    assert torch.equal(torch.random.get_rng_state(), before)
    names = sorted(path.name for path in directory.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        contents = (directory / name).read_bytes()
        assert contents == (tmp_path / "again" / name).read_bytes(), name
        assert (contents == (tmp_path / "other" / name).read_bytes()) == (name != "model.safetensors"), name


def test_control_tokens_equal_those_of_qwen(directory: Path, processor: Any) -> None:
    assert isinstance(processor, Qwen3VLProcessor)
    tokenizer = processor.tokenizer
    ids = tokenizer.convert_tokens_to_ids([*CONTROL_TOKENS, *PLAIN_ADDED_TOKENS])
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    config = json.loads((directory / "config.json").read_text())
    assert len(tokenizer) == ids[-1] + 1 <= config["text_config"]["vocab_size"]
    assert config["image_token_id"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    "text", ["Tell me, 12345 …\r\n\t  twice!", "Grün, 绿色, зелёный 🟢", "user\nassistant's <image>"]
)
def test_any_text_survives_the_tokenizer(text: str, processor: Any) -> None:
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert processor.tokenizer.decode(ids) == text


def test_colours_are_single_tokens(processor: Any) -> None:
    for colour in (*SHAPE_COLOURS, *BACKDROP_COLOURS):
        assert len(processor.tokenizer.tokenize(colour)) == 1, colour
        assert len(processor.tokenizer.tokenize(f" {colour}")) == 1, colour


def test_template_has_the_format_of_qwen(processor: Any) -> None:
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour?"}]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "And now?"},
    ]
    rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nLook.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What colour?<|im_end|>\n"
        "<|im_start|>assistant\nred<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.smoke
def test_rows_become_valid_model_inputs(directory: Path, processor: Any, tmp_path: Path) -> None:
    world = make_rows(str(tmp_path), 40, 1)
    model = AutoModelForImageTextToText.from_pretrained(directory)
    rows = json.loads(world.held_out.read_text())
    row = max(rows, key=lambda row: len(row["images"]))
    messages = [
        {
            "role": turn["role"],
            "content": [{"type": "image"}] * turn["content"].count("<image>")
            + [{"type": "text", "text": turn["content"].replace("<image>", "")}],
        }
        for turn in row["messages"]
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    pictures = [Image.open(tmp_path / image) for image in row["images"]]
    inputs = processor(text=[text], images=pictures, return_tensors="pt")
    num_pads = int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert num_pads == int(inputs["image_grid_thw"].prod(1).sum()) // 4
    assert 4 <= num_pads <= 12 * len(pictures)
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape[:2] == inputs["input_ids"].shape
    assert torch.isfinite(logits).all()
