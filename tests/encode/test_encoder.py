from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from packtool.encode import encoder as encoder_module
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.media_spans import expand_media
from packtool.errors import ConfigError, RowError
from packtool.rows.forms import to_sample
from packtool.rows.sample import Dropped
from packtool.rows.source import Source
from tests.encode.conftest import encoder_for

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
QWEN_CONFIG = {"model_type": "qwen3_vl", "vision_config": {}}


def encode(encoder: Encoder, *turns: str, images: list[str] | None = None) -> EncodedSample | Dropped:
    row = {"messages": conversation(*turns), **({"images": images} if images else {})}
    (result,) = encoder.encode([to_sample(row, Source("rows.jsonl", media_access="any"), 0)])
    if isinstance(result, list):
        (result,) = result
    return result


def conversation(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def encoded_sample(encoder: Encoder, *turns: str, images: list[str] | None = None) -> EncodedSample:
    result = encode(encoder, *turns, images=images)
    assert isinstance(result, EncodedSample), result
    return result


def texts_of_turns(encoder: Encoder, sample: EncodedSample) -> list[str]:
    tokenizer = encoder._chunk_tokenizer._tokenizer
    return [
        tokenizer.decode(sample.input_ids[start:end].tolist(), skip_special_tokens=False)
        for start, end in sample.turns.reshape(-1, 2)
    ]


def decoded(encoder: Encoder, sample: EncodedSample) -> str:
    return encoder._chunk_tokenizer._tokenizer.decode(sample.input_ids.tolist(), skip_special_tokens=False)


@pytest.fixture
def chatml(small_model: Any) -> Encoder:
    return encoder_for(small_model(CHATML, CONTROL))


@pytest.fixture
def vision(small_model: Any) -> Encoder:
    return encoder_for(small_model(CHATML, CONTROL, QWEN_CONFIG))


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.new("RGB", (8, 12)).save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": (
        "<|bos|>{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}",
        "<|eot|>",
        ["<|bos|>", "<|start|>", "<|stop|>", "<|eot|>"],
    ),
    "gemma": (
        "<bos>{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}",
        "<end>",
        ["<bos>", "<turn>", "<end>"],
    ),
    "mistral": (
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        "</s>",
        ["<s>", "</s>", "[INST]", "[/INST]"],
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", TEMPLATES)
def test_targets_are_the_answers_with_their_end(small_model: Any, name: str) -> None:
    template, end, control = TEMPLATES[name]
    encoder = encoder_for(small_model(template, control))
    sample = encoded_sample(encoder, "Hello?", "Fine.", "assistant\n?", "Good bye")
    assert texts_of_turns(encoder, sample) == [f"Fine.{end}", f"Good bye{end}"]
    is_target = np.zeros(sample.length, bool)
    for start, stop in sample.turns.reshape(-1, 2):
        is_target[start:stop] = True
    np.testing.assert_array_equal(sample.labels, np.where(is_target, sample.input_ids, -100))


def test_generation_prompt_is_no_target(small_model: Any) -> None:
    thinking = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    encoder = encoder_for(small_model(thinking, CONTROL))
    sample = encoded_sample(encoder, "a", "plain", "b", "<think>\nhm\n</think>\nso")
    assert texts_of_turns(encoder, sample) == ["plain<|im_end|>", "hm\n</think>\nso<|im_end|>"]


def test_turns_of_a_template_that_drops_earlier_thoughts(text_model: Any) -> None:
    encoder = encoder_for(text_model("text-qwen3"))
    sample = encoded_sample(
        encoder, "1+1?", "<think>\neasy\n</think>\n\n2", "2+2?", "<think>\nalso easy\n</think>\n\n4"
    )
    assert texts_of_turns(encoder, sample) == [
        "2<|im_end|>",
        "<think>\nalso easy\n</think>\n\n4<|im_end|>",
    ]
    assert "\neasy" not in decoded(encoder, sample)


def test_a_template_without_control_tokens_is_refused(small_model: Any) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ConfigError, match="control tokens"):
        encoder_for(small_model(plain, CONTROL))


NASTY = st.lists(
    st.sampled_from(
        [
            *CONTROL,
            "<image>",
            "<|im_",
            "start|>",
            "assistant\n",
            "\n",
            " ",
            "a",
            "你好",
            "\U0010fc00",
            "\U0010f800",
            "é",
        ]
    ),
    max_size=8,
).map("".join)


@given(st.lists(NASTY, min_size=2, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_control_tokens_in_row_text_stay_text(chatml: Encoder, turns: list[str]) -> None:
    sample = encoded_sample(chatml, *turns)
    roles = ["user", "assistant"]
    rendered = "".join(f"<|im_start|>{roles[i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(turns))
    assert decoded(chatml, sample) == rendered
    ids = chatml._vocabulary.ids
    counts = {token: int((sample.input_ids == i).sum()) for token, i in ids.items()}
    assert counts == {**dict.fromkeys(CONTROL, 0), "<|im_start|>": len(turns), "<|im_end|>": len(turns)}
    assert texts_of_turns(chatml, sample) == [f"{text}<|im_end|>" for text in turns[1::2]]


@given(st.lists(NASTY, min_size=2, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_placeholder_text_does_not_shift_images(vision: Encoder, picture: str, turns: list[str]) -> None:
    assume(not any("<image>" in text for text in turns))
    sample = encoded_sample(vision, turns[0] + "<image>", *turns[1:], images=[picture])
    ids = vision._vocabulary.ids
    opening, pad, closing = ids["<|vision_start|>"], ids["<|image_pad|>"], ids["<|vision_end|>"]
    (at,) = np.flatnonzero(sample.input_ids == opening)
    num = sample.images[0].num_tokens
    assert num == 3 * 2
    np.testing.assert_array_equal(sample.input_ids[at + 1 : at + 1 + num], pad)
    assert sample.input_ids[at + 1 + num] == closing
    assert int((sample.input_ids == pad).sum()) == num


def test_leading_blanks_of_answers_are_targets(qwen3_vl: Encoder) -> None:
    for answer in ("\n\nSo.", "\nSo.", "  So.", "", "So."):
        sample = encoded_sample(qwen3_vl, "Why?", answer)
        (text,) = texts_of_turns(qwen3_vl, sample)
        # A blank may have merged with the header's newline into one token; then that token is the answer's.
        assert text.lstrip("\n") == f"{answer}<|im_end|>".lstrip("\n")
        assert len(text) >= len(f"{answer}<|im_end|>")


def test_image_limits_of_a_row_apply(vision: Encoder, tmp_path: Path) -> None:
    """The same file in two sizes: what was measured is remembered for the limits that it was measured at."""
    Image.new("RGB", (600, 400)).save(tmp_path / "a.png")
    path = str(tmp_path / "a.png")
    plain = encoded_sample(vision, "<image>?", "!", images=[path])
    small = encoded_sample(vision, "<image>?", "!", images=[{"image": path, "max_pixels": 800}])  # type: ignore[list-item]
    repeated = encoded_sample(vision, "<image>?", "!", images=[path])
    assert small.num_media_tokens < plain.num_media_tokens == repeated.num_media_tokens
    dropped = encode(
        vision,
        "<image>?",
        "!",
        images=[{"image": path, "min_pixels": 9, "max_pixels": 5}],  # type: ignore[list-item]
    )
    assert isinstance(dropped, Dropped)
    assert "at least 9 and at most 5 pixels" in dropped.detail


def test_unusable_images_drop_their_row(vision: Encoder, chatml: Encoder, picture: str, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").touch()
    Image.new("RGB", (500, 2)).save(tmp_path / "thin.png")
    for name, reason in {
        "gone.png": "media_missing",
        "text.png": "media_unreadable",
        "empty.png": "media_unreadable",
        "thin.png": "media_size",
    }.items():
        dropped = encode(vision, "<image>?", "!", images=[str(tmp_path / name)])
        assert isinstance(dropped, Dropped)
        assert dropped.reason == reason
        assert name in dropped.detail
    dropped = encode(chatml, "<image>?", "!", images=[picture])
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "media_unsupported"


def test_a_row_without_targets_is_dropped(chatml: Encoder) -> None:
    dropped = encode(chatml, "only a question")
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "no_target_tokens"


@pytest.mark.parametrize("strategy", ["delete", "left", "raise"])
def test_overlong_rows_are_truncated_or_dropped(small_model: Any, strategy: str) -> None:
    encoder = encoder_for(small_model(CHATML, CONTROL), max_length=30, truncation_strategy=strategy)
    if strategy == "raise":
        with pytest.raises(RowError, match=r"rows\.jsonl, row 0: over_max_length"):
            encode(encoder, "q" * 40, "answer")
        return
    result = encode(encoder, "q" * 40, "answer")
    if strategy == "delete":
        assert isinstance(result, Dropped)
        assert result.reason == "over_max_length"
        return
    untruncated = encoded_sample(encoder_for(Path(encoder.spec.model)), "q" * 40, "answer")
    assert isinstance(result, EncodedSample)
    np.testing.assert_array_equal(result.input_ids, untruncated.input_ids[-30:])
    assert result.num_truncated == untruncated.length - 30
    assert texts_of_turns(encoder, result) == ["answer<|im_end|>"]


@given(
    st.lists(st.integers(0, 20), min_size=2, max_size=6),
    st.integers(2, 120),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_left_truncation(
    small_model: Any, picture: str, sizes: list[int], limit: int, with_picture: list[bool]
) -> None:
    directory = small_model(CHATML, CONTROL, QWEN_CONFIG)
    turns = [("<image>" if mark else "") + "x" * size for size, mark in zip(sizes, with_picture, strict=False)]
    images = [picture] * "".join(turns).count("<image>")
    untruncated = encoded_sample(encoder_for(directory), *turns, images=images)
    result = encode(encoder_for(directory, max_length=limit, truncation_strategy="left"), *turns, images=images)
    num_protected = 8 * len(images)
    if isinstance(result, Dropped):
        assert untruncated.length > limit
        assert result.reason == ("media_over_limit" if num_protected >= limit else "no_target_tokens")
        return
    assert result.length == min(limit, untruncated.length)
    assert result.images == untruncated.images
    protected = np.zeros(untruncated.length, bool)
    for at in np.flatnonzero(untruncated.input_ids == encoder_for(directory)._vocabulary.ids["<|vision_start|>"]):
        protected[at : at + 8] = True
    room = max(limit, untruncated.length) - num_protected if untruncated.length <= limit else limit - num_protected
    keep = protected.copy()
    keep[np.flatnonzero(~protected)[max(0, int((~protected).sum()) - room) :]] = True
    np.testing.assert_array_equal(result.input_ids, untruncated.input_ids[keep])
    expected = untruncated.labels[keep]
    expected[0] = -100
    np.testing.assert_array_equal(result.labels, expected)
    inside = np.zeros(result.length, bool)
    for start, end in result.turns.reshape(-1, 2):
        inside[start:end] = True
    np.testing.assert_array_equal(inside & ~protected[keep], result.labels != -100)


@given(
    max_length=st.integers(2, 80),
    pixels=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    settings_=st.sampled_from([("delete", "drop"), ("left", "trim"), ("right", "trim"), ("delete", "trim")]),
    is_text=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_unwritten_media_tokens_are_counted(
    small_model: Any, picture: str, max_length: int, pixels: list[int], settings_: tuple[str, str], is_text: bool
) -> None:
    """Results equal those of writing all of them, whatever the row's own limits make of its pictures."""
    strategy, overflow = settings_
    model = small_model(CHATML, CONTROL, QWEN_CONFIG)
    encoder = encoder_for(model, max_length=max_length, truncation_strategy=strategy, media_overflow=overflow)
    text = "<image>a" * len(pixels)
    row: dict[str, Any] = {"images": [{"image": picture, "min_pixels": num_pixels} for num_pixels in pixels]}
    row |= {"text": text} if is_text else {"messages": conversation(text, "b")}
    sample = to_sample(row, Source("rows.jsonl", media_access="any"), 0)
    (result,) = encoder.encode([sample])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "expand_media", lambda *layout: expand_media(*layout[:3], 10_000))
        (expected,) = encoder.encode([sample])
    if isinstance(expected, Dropped):
        assert result == expected
    else:
        assert isinstance(result, list)
        assert result[0].num_truncated == expected[0].num_truncated
        assert result[0].images == expected[0].images
        np.testing.assert_array_equal(result[0].input_ids, expected[0].input_ids)
        np.testing.assert_array_equal(result[0].labels, expected[0].labels)


def test_image_longer_than_a_sample_is_counted_but_not_written(small_model: Any, picture: str) -> None:
    row = {"messages": conversation("<image>a", "b"), "images": [{"image": picture, "min_pixels": 10**13}]}
    sample = to_sample(row, Source("rows.jsonl", media_access="any"), 0)
    model = small_model(CHATML, CONTROL, QWEN_CONFIG)
    (dropped,) = encoder_for(model, max_length=50).encode([sample])
    assert dropped == Dropped(
        "rows.jsonl", 0, "media_over_limit", "its media have 625000856510 tokens, so no text fits into --max-length 50"
    )
    with pytest.raises(RowError, match=r"6250008565\d\d tokens, and --max-length allows 50"):
        encoder_for(model, max_length=50, truncation_strategy="raise").encode([sample])
    (trimmed,) = encoder_for(model, max_length=50, media_overflow="trim").encode([sample])
    assert isinstance(trimmed, list)
    assert trimmed[0].num_truncated == 2**31 - 1  # the most that a cache can hold
