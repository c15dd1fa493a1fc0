"""Models of a few thousand parameters of every family, and samples for them; made in milliseconds."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm4vConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
)

from packtool.attention.register import ATTENTION_NAME, register_kernels, text_attention
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.encode.families import ImageLimits, MediaLimits
from packtool.encode.families.qwen_vl import image_grid

VOCAB = 96
IMAGE_PAD, VISION_START, VISION_END = 90, 91, 92
FIRST_CONTROL = 90
TEXT_MODELS = ("qwen2", "qwen2_sliding", "qwen3")
VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
LIKE_VISION_MODELS = ("glm4v",)
"""That most tests of ``VISION_MODELS`` do without: nothing of theirs is another."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_IDS: dict[str, Any] = {
    "image_token_id": IMAGE_PAD,
    "video_token_id": 93,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def reduced_config(name: str) -> PreTrainedConfig:
    """One of ``TEXT_MODELS``, ``VISION_MODELS`` or ``LIKE_VISION_MODELS``."""
    if name == "qwen2":
        return Qwen2Config(**_TEXT)
    if name == "qwen2_sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        return Qwen2Config(**_TEXT, **sliding)
    if name == "qwen3":
        return Qwen3Config(**_TEXT, head_dim=16)
    if name == "glm4v":
        rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
        vision |= {"patch_size": 8, "image_size": 32}
        marks = {"image_start_token_id": VISION_START, "image_end_token_id": VISION_END}
        text = _TEXT | {"rope_parameters": rope}
        return Glm4vConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_PAD, video_token_id=93, **marks)
    if name == "qwen3_vl":
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 8,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        }
        text = _TEXT | {"head_dim": 16, "rope_parameters": rope}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **_IDS)
    text = _TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 8}
    if name == "qwen2_5_vl":
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_IDS)
    return Qwen2VLConfig(text_config=text, vision_config=vision | {"embed_dim": 32, "hidden_size": 64}, **_IDS)


def reduced_model(name: str, *, packed: bool = True, seed: int = 0) -> PreTrainedModel:
    """A model in float32 with weights large enough that every token matters to every later one."""
    register_kernels()
    config = reduced_config(name)
    auto = AutoModelForCausalLM if name in TEXT_MODELS else AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = auto.from_config(config, attn_implementation=text_attention(config, ATTENTION_NAME) if packed else "sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model.eval()


def reduced_limits(config: PreTrainedConfig) -> ImageLimits | None:
    """Pictures of 1 to 16 tokens for a reduced vision model."""
    if not hasattr(config, "vision_config"):
        return None
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    return ImageLimits(side**2, 16 * side**2, vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)


def reduced_spec(name: str, model_directory: str = "") -> InputSpec:
    """What collation knows of ``reduced_model(name)``."""
    config = reduced_config(name)
    return InputSpec(model_directory, config, MediaLimits(reduced_limits(config)))


def make_picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_sample(
    num_tokens: int, pictures: tuple[tuple[int, int], ...] = (), *, seed: int, limits: ImageLimits | None = None
) -> EncodedSample:
    """A sample of ``num_tokens`` random text tokens with pictures (width, height) woven in; the last half is target."""
    random = np.random.default_rng(seed)
    text = random.integers(2, FIRST_CONTROL, num_tokens).astype(np.int32)
    is_target = np.arange(num_tokens) >= num_tokens // 2
    ids, labels, images = list(text[:1]), [-100], []
    for index, (width, height) in enumerate(pictures):
        assert limits is not None
        grid = image_grid(height, width, limits)
        num_pads = grid[1] * grid[2] // limits.merge_size**2
        ids += [VISION_START, *[IMAGE_PAD] * num_pads, VISION_END]
        labels += [-100] * (num_pads + 2)
        data = make_picture(width, height, seed=1000 * seed + index)
        images.append(EncodedImage(None, data, height, width, grid, num_pads))
    ids += list(text[1:])
    labels += [int(token) if target else -100 for token, target in zip(text[1:], is_target[1:], strict=True)]
    start = next((i for i, label in enumerate(labels) if label != -100), len(labels))
    return EncodedSample(
        np.array(ids, np.int32),
        np.array(labels, np.int32),
        np.array([start, len(labels)], np.int32),
        tuple(images),
        None,
        "reduced.jsonl",
        seed,
    )


def mixed_samples(name: str) -> list[EncodedSample]:
    """Samples of text, of one picture and of two, where the model sees; of text alone where it does not."""
    limits = reduced_limits(reduced_config(name))
    if limits is None:
        return [make_sample(length, seed=length) for length in (9, 1, 17, 4, 12)]
    return [
        make_sample(7, ((40, 32),), seed=1, limits=limits),
        make_sample(11, seed=2),
        make_sample(9, ((20, 60), (64, 33)), seed=3, limits=limits),
        make_sample(2, seed=4),
        make_sample(6, ((16, 16),), seed=5, limits=limits),
    ]


def continued_sample(start: EncodedSample, end: EncodedSample) -> EncodedSample:
    """A sample that begins as ``start`` and ends as ``end``."""
    return dataclasses.replace(
        end,
        input_ids=np.concatenate([start.input_ids, end.input_ids]),
        labels=np.concatenate([start.labels, end.labels]),
        turns=np.concatenate([start.turns, start.length + end.turns]).astype(np.int32),
        images=start.images + end.images,
    )


def samples_with_prefixes(name: str) -> list[EncodedSample]:
    """``prefix_samples`` of a model of this file."""
    return prefix_samples(reduced_limits(reduced_config(name)))


def prefix_samples(limits: ImageLimits | None) -> list[EncodedSample]:
    """Samples of which most begin like others, at two levels, with pictures in prefixes and behind them.

    Their order is not that of the tree, one of them ends where others go on, and two have two answers to one prompt.
    """
    first_pictures, second_pictures = (((40, 32),), ((16, 16),)) if limits is not None else ((), ())
    trunk = make_sample(9, first_pictures, seed=1, limits=limits)
    branch = continued_sample(trunk, make_sample(6, second_pictures, seed=2, limits=limits))
    prompt = continued_sample(branch, untrained(make_sample(5, seed=3)))
    answers = [all_trained(make_sample(length, seed=40 + length)) for length in (3, 5, 1)]
    other = make_sample(8, first_pictures, seed=5, limits=limits)
    samples = [
        continued_sample(prompt, answers[0]),
        other,
        continued_sample(trunk, make_sample(7, seed=6)),
        continued_sample(prompt, answers[1]),
    ]
    samples += [
        continued_sample(trunk, make_sample(6, second_pictures, seed=7, limits=limits)),
        continued_sample(other, answers[2]),
        prompt,
    ]
    return [dataclasses.replace(sample, row=index) for index, sample in enumerate(samples)]


def untrained(sample: EncodedSample) -> EncodedSample:
    """A sample without targets."""
    return dataclasses.replace(sample, labels=np.full_like(sample.labels, -100), turns=np.zeros(0, np.int32))


def all_trained(sample: EncodedSample) -> EncodedSample:
    """A sample of text of which every token is a target."""
    return dataclasses.replace(sample, labels=sample.input_ids, turns=np.array([0, sample.length], np.int32))


def save_image_processor(name: str, directory: str) -> None:
    """Write the settings of an image processor whose own limits are *not* the ones of ``reduced_limits``."""
    from transformers import Qwen2VLImageProcessor

    vision = reduced_config(name).vision_config
    Qwen2VLImageProcessor(patch_size=vision.patch_size, merge_size=vision.spatial_merge_size).save_pretrained(directory)
