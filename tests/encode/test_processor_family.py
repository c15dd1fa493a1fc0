"""Models of other families: every token equals that of their own processors, made here from their own classes."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.encode.encoded import EncodedSample
from packtool.encode.families.processor import _special_tokens, _split
from packtool.errors import ConfigError
from packtool.media.load import load_image
from packtool.rows.sample import Dropped, MediaRef, Sample, Turn
from scripts._reduced_model import cut_tokenizer
from tests.encode.conftest import encoder_for

FAMILIES = ("internvl", "llava_onevision", "gemma3", "llava_next", "idefics3")

_TEMPLATE = (
    "{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{mark}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


def make_processor(family: str, tokenizer_folder: Path) -> Any:
    import transformers as t

    def tokenizer(**tokens: str) -> Any:
        made: Any = t.AutoTokenizer.from_pretrained(tokenizer_folder)
        made.add_special_tokens(
            {"additional_special_tokens": list(tokens.values())}, replace_extra_special_tokens=False
        )
        return t.PreTrainedTokenizerFast(
            tokenizer_object=made.backend_tokenizer,
            extra_special_tokens=tokens,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )

    if family == "internvl":
        names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        images = t.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=6)
        return t.InternVLProcessor(
            images, tokenizer(**names, video_token="<video>"), t.InternVLVideoProcessor(), image_seq_length=4
        )
    if family == "llava_onevision":
        images = t.LlavaOnevisionImageProcessor(
            size={"height": 56, "width": 56}, image_grid_pinpoints=[[56, 56], [56, 112], [112, 56], [112, 112]]
        )
        return t.LlavaOnevisionProcessor(
            images,
            tokenizer(image_token="<image>", video_token="<video>"),
            t.LlavaOnevisionVideoProcessor(),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
        )
    if family == "gemma3":
        names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        return t.Gemma3Processor(t.Gemma3ImageProcessor(), tokenizer(**names), image_seq_length=9)
    if family == "llava_next":
        images = t.LlavaNextImageProcessor(
            size={"shortest_edge": 56},
            crop_size={"height": 56, "width": 56},
            image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        )
        return t.LlavaNextProcessor(
            images, tokenizer(image_token="<image>"), patch_size=14, vision_feature_select_strategy="default"
        )
    names = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global": "<global-img>"}
    rows = {f"r{i}{j}": f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)}
    images = t.Idefics3ImageProcessor(size={"longest_edge": 224}, max_image_size={"longest_edge": 56})
    made = tokenizer(**names, **rows, end_of_utterance_token="<end_of_utterance>")
    return t.Idefics3Processor(images, made, image_seq_len=4)


@cache
def model_of(family: str, realdata: Path, folder: Path) -> tuple[Path, Any]:
    """A directory as these models publish it, and its processor as transformers loads it."""
    from transformers import AutoProcessor

    target = folder / family
    source = folder / "tokenizer"
    if not source.exists():
        # The first merges of a real tokenizer: its whole vocabulary would be read several times for each family.
        shutil.copytree(realdata / "tokenizers" / "qwen3-vl", source)
        for path in (source, *source.iterdir()):
            path.chmod(0o755)
        cut_tokenizer(source)
        settings = json.loads((source / "tokenizer_config.json").read_text())
        settings.pop("processor_class", None)
        (source / "tokenizer_config.json").write_text(json.dumps(settings))
        (source / "preprocessor_config.json").unlink()
        (source / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    processor = make_processor(family, source)
    mark = "<start_of_image>" if family == "gemma3" else processor.image_token
    mark += "\\n" if family == "internvl" else ""
    processor.chat_template = _TEMPLATE.format(mark=mark.replace("\\n", "\n"))
    processor.save_pretrained(target)
    (target / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}, "text_config": {}}))
    return target, AutoProcessor.from_pretrained(target)


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: Any, realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """(family, directory, processor)."""
    directory, processor = model_of(request.param, realdata, tmp_path_factory.mktemp(request.param))
    return request.param, directory, processor


def pictures(realdata: Path) -> list[str]:
    names = sorted((realdata / "raw" / "math-v" / "images").glob("*.jpg"))[::40]
    return [str(name) for name in names]


def expected(processor: Any, turns: list[tuple[str, str]], images: list[str]) -> list[int]:
    messages = []
    for role, text in turns:
        parts: list[dict[str, str]] = []
        for i, piece in enumerate(text.split("<image>")):
            parts += [{"type": "image"}] if i else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": role, "content": parts})
    rendered = processor.apply_chat_template(messages, tokenize=False)
    loaded = [[load_image(path) for path in images]] if images else None
    ids: list[int] = processor(text=[rendered], images=loaded, add_special_tokens=False)["input_ids"][0]
    return ids


def encoded(directory: Path, turns: list[tuple[str, str]], images: list[str]) -> EncodedSample | Dropped:
    (found,) = cached_encoder(directory).encode(
        [
            Sample(
                tuple(Turn(role, text) for role, text in turns),
                tuple(MediaRef(path) for path in images),
                "rows.jsonl",
                0,
            )
        ]
    )
    return found[0] if isinstance(found, list) else found


@cache
def cached_encoder(directory: Path) -> Any:
    return encoder_for(directory)


def test_every_token_is_the_processors(made: tuple[str, Path, Any], realdata: Path) -> None:
    family, directory, processor = made
    files = pictures(realdata)
    assert len(files) > 5
    for number, path in enumerate(files):
        turns = [("user", "<image>What\n\nis it?" if number % 2 else "See <image> here."), ("assistant", "A <b>.")]
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
    if family == "llava_onevision":
        assert isinstance(sample, Dropped)
        assert sample.reason == "media_unsupported"
    else:
        assert isinstance(sample, EncodedSample)
        np.testing.assert_array_equal(sample.input_ids, expected(processor, two, files[:2]))


def test_it_says_that_it_is_slower_and_refuses_foreign_limits(made: tuple[str, Path, Any]) -> None:
    family, directory, _ = made
    assert "slower" in cached_encoder(directory).remarks[0]
    with pytest.raises(ConfigError, match=rf"--max-pixels \(MAX_PIXELS\) .* a {family} model"):
        encoder_for(directory, max_pixels=1000)
    with pytest.raises(ConfigError, match="2 settings are wrong"):
        encoder_for(directory, fps=1.0, image_max_token_num=5)


def test_videos_are_left_out_by_name(made: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, directory, _ = made
    sample = Sample(
        (Turn("user", "<video>?"), Turn("assistant", "!")),
        (),
        "rows.jsonl",
        0,
        videos=(MediaRef(str(tmp_path / "a.mp4")),),
    )
    (dropped,) = cached_encoder(directory).encode([sample])
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "media_unsupported"


def test_a_model_without_a_processor_is_told_of(tmp_path: Path, realdata: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).symlink_to(realdata / "tokenizers" / "qwen3-vl" / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model", "vision_config": {}}))
    with pytest.raises(ConfigError, match=r"'no_such_model'|takes no pictures"):
        encoder_for(tmp_path)


def test_a_spelling_is_cut_into_text_and_counted_tokens() -> None:
    class Tokenizer:
        added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
        image_token = "<x>"

    class Processor:
        image_token = "<b>"
        tokenizer = Tokenizer()

    special = _special_tokens(Processor())
    assert _split("\n\n<b><x><x><x>\n", special) == ["\n\n", ("<b>", 1), ("<x>", 3), "\n"]
    assert _split("", special) == []
