"""Segments: texts tokenized one by one, without a chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.rows.forms import to_sample
from packtool.rows.source import Source
from tests.encode.conftest import ModelMaker, encoder_for

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CONTROL = ["<|im_start|>", "<|im_end|>", "<end>"]


def encoded(model: ModelMaker, row: dict[str, Any], loss_scale: str = "default", **source: Any) -> tuple[str, str]:
    """Return all tokens and the targets of a row, as text."""
    encoder: Encoder = encoder_for(model(TEMPLATE, CONTROL, {"model_type": "llama"}), loss_scale=loss_scale)
    encoder._end_of_text = "<end>"
    (result,) = encoder.encode([to_sample(row, Source("rows.jsonl", **source), 0)])
    assert isinstance(result, list)
    (sample,) = result
    assert isinstance(sample, EncodedSample)
    targets = sample.labels[sample.labels >= 0]
    return tuple(
        encoder._tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in (sample.input_ids, targets)
    )


SEGMENTS = [(False, "<|im_start|>one"), (True, "two<|im_end|>"), (False, ""), (True, "<|im_end|>"), (False, "3")]
ROW = {"segments": [{"label": label, "text": text} for label, text in SEGMENTS]}


def test_segments_with_label_true_are_targets(small_model: ModelMaker) -> None:
    text, targets = encoded(small_model, ROW)
    assert text == "<|im_start|>onetwo<|im_end|><|im_end|>3"
    assert targets == "two<|im_end|><|im_end|>"


def test_loss_scale_of_segments(small_model: ModelMaker) -> None:
    assert encoded(small_model, ROW, "all")[1] == "<|im_start|>onetwo<|im_end|><|im_end|>3"
    assert encoded(small_model, ROW, "last_round")[1] == "<|im_end|>"


def test_prompt_format_ends_with_the_end_of_text(small_model: ModelMaker) -> None:
    row = {"instruction": "a <|im_end|>", "output": " b"}
    assert encoded(small_model, row, prompt_format=("Q: {instruction}\nA:",)) == (
        "Q: a <|im_end|>\nA: b<end>",
        " b<end>",
    )


@pytest.mark.parametrize("has_start", [True, False])
def test_texts_begin_like_those_of_the_tokenizer(small_model: ModelMaker, has_start: bool) -> None:
    folder = small_model(TEMPLATE, ["<s>", "</s>", *CONTROL])
    settings = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if has_start:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
        tokenizer.save(str(folder / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(folder)
    assert reference("a")["input_ids"][:-1] == [256] * has_start
    encoder = encoder_for(folder)
    rows: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"instruction": "a", "output": "b"}, ("Q: {instruction}\nA:",), "Q: a\nA:b"),
        ({"instruction": "a", "output": "b"}, ("<s>{instruction}",), "ab" if has_start else "<s>ab"),
        ({"text": "<s>ab"}, (), "?ab"),  # a control token in a row is text
    ]
    for row, prompt_format, text in rows:
        (result,) = encoder.encode([to_sample(row, Source("rows.jsonl", prompt_format=prompt_format), 0)])
        assert isinstance(result, list)
        assert isinstance(sample := result[0], EncodedSample)
        expected = reference(text)["input_ids"]
        if text == "?ab":
            expected[has_start : has_start + 1] = reference.convert_tokens_to_ids(list("<s>"))
        assert sample.input_ids.tolist() == [*expected, 257]
    (result,) = encoder.encode([to_sample(ROW, Source("rows.jsonl"), 0)])
    assert isinstance(result, list)
    assert isinstance(sample := result[0], EncodedSample)
    assert sample.input_ids[0] != 256  # segments are written as they are
