"""Planned FLOPs of every family and of text models, in the forward pass, against those that torch counts."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from packtool.attention.register import set_attention
from packtool.batch.collate import collate_packs
from packtool.batch.media import _padded_patches, load_media
from packtool.batch.spec import InputSpec, auto_class
from packtool.config.data import EncodeSpec, MediaOptions
from packtool.config.model import LearningOptions
from packtool.encode.encoded import EncodedImage, EncodedSample, media_fields
from packtool.encode.encoder import Encoder
from packtool.encode.families import FAMILIES, MediaLimits, family_of, is_multimodal, media_encoding
from packtool.encode.families.processor import process_images
from packtool.encode.families.record import Medium
from packtool.encode.model_files import ModelFiles
from packtool.media.measure import load_image
from packtool.planning.cost import ALL_WEIGHTS, CostModel
from packtool.planning.layers import count_language
from packtool.planning.module_cost import ModuleCost
from packtool.planning.tower_layers import vision_modules
from packtool.rows.sample import Dropped, MediaRef, Sample, Turn
from packtool.stream.packs import SampleAmounts
from scripts._flop_counter import flop_counter
from tests.encode.other_families import model_of
from tests.small_texts import COUNTED_TYPES, NOT_COMPARED, TEXT_TYPES, small_text_config

NUM_TOKENS = 128
FROZEN = LearningOptions(train_type="full", freeze_llm=True)
IMAGE_FAMILIES = [
    name
    for family in FAMILIES
    if family.kinds == ("image",) or family.videos_as_pictures
    for name in family.model_types
]
NATIVE_FAMILIES = ["exaone4_5", "hyperclovax_vision_v2", "kimi_k25", "lighton_ocr", "minicpm_ocr", "minicpmv4_6"]
NATIVE_FAMILIES += ["mistral3", "pixtral", "video_llama_3", "glm4v", "glm4v_moe", "glm46v", "glm_ocr"]
PADDED_FAMILIES = ["gemma4"]
"""Their towers pad each picture to the same number of patches."""
# (height, width) in pixels, without incomplete tokens or attention windows at the edges, which are only estimated.
SIZES = ((56, 112), (224, 112), (56, 56))


def _split(counter: FlopCounterMode) -> tuple[int, int]:
    """The counted FLOPs of products with weights, and of attention."""
    flops = counter.get_flop_counts()["Global"]
    attention = sum(count for op, count in flops.items() if "attention" in str(op) or "bmm" in str(op))
    return sum(flops.values()) - attention, attention


@pytest.mark.parametrize("name", [*TEXT_TYPES, *COUNTED_TYPES])
def test_text_models(name: str) -> None:
    check_text_model(small_text_config(name))


@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_type_of_transformers_is_compared(name: str) -> None:
    """As a text model or as a family with pictures, unless packtool refuses to train it, or for another reason."""
    is_of_family = name.removesuffix("_text") in {each for family in FAMILIES for each in family.model_types}
    is_compared = name in (*TEXT_TYPES, *COUNTED_TYPES) or is_of_family
    if name in NOT_COMPARED:
        assert not is_compared
        return
    settings = AutoConfig.for_model(name).to_dict()
    is_refused = is_multimodal(settings) and not family_of(settings).kinds
    assert is_compared != is_refused


def test_the_documentation_says_which_types_are_compared() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert f"- {len(TEXT_TYPES) + len(COUNTED_TYPES)} types of text models" in page
    assert all(f"`{name}`" in page for name in NOT_COMPARED)


@pytest.mark.parametrize("name", [name for name, reason in NOT_COMPARED.items() if "without weights" in reason])
def test_types_that_cannot_run_without_weights(name: str) -> None:
    assert count_language(AutoConfig.for_model(name).to_dict()) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "use_double_wide_mlp": False},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
    ],
)
def test_gemma4(settings: dict[str, Any]) -> None:
    """With experts beside the MLP, and with values that are keys; by the names of transformers and of the hub."""
    sizes = small_text_config("gemma4_text").to_dict() | {"global_head_dim": 24} | settings
    del sizes["per_layer_config"]
    config = AutoConfig.for_model(**sizes)
    check_text_model(config)
    assert CostModel.of_config(sizes) == CostModel.of_config(config.to_dict())


def check_text_model(config: PreTrainedConfig) -> None:
    # torch does not count the grouped products that experts have otherwise.
    model: Any = auto_class(config).from_config(config, experts_implementation="eager").eval().requires_grad_(False)
    counts = []
    for num_tokens in (NUM_TOKENS, 2 * NUM_TOKENS):
        with torch.no_grad(), flop_counter() as counter:
            model(input_ids=torch.arange(2, 2 + num_tokens)[None] % 90, use_cache=False)
        counts.append(counter.get_total_flops())
    cost = CostModel.of_config(config.to_dict(), FROZEN)
    squares = np.array(2 * NUM_TOKENS**2)  # torch counts the square of causal attention, and of windows
    attention = float(cost.attention_of(squares, squares))
    linear = (cost.per_token + cost.per_target_token) * NUM_TOKENS
    counted_attention = (counts[1] - 2 * counts[0]) / 2  # what is not proportional to the length
    assert attention == pytest.approx(counted_attention, rel=0.02, abs=0.001 * counts[0])
    assert linear == pytest.approx(counts[0] - counted_attention, rel=0.02)


def _noise(height: int, width: int, seed: int = 0) -> bytes:
    """A PNG file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def _features(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The features of pictures in the text's width, or the keys and values of cross-attention to them."""
    if model.config.model_type == "llama4":
        return model.multi_modal_projector(model.get_image_features(**tensors).last_hidden_state)
    if model.config.model_type == "mllama":
        states = model.model.multi_modal_projector(model.model.vision_model(**tensors).last_hidden_state)
        cross_layers = [model.model.language_model.layers[i] for i in model.config.text_config.cross_attention_layers]
        attentions = [layer.cross_attn for layer in cross_layers]
        return torch.cat([each(states) for layer in attentions for each in (layer.k_proj, layer.v_proj)])
    return model.model.get_image_features(**tensors).pooler_output


@pytest.mark.parametrize("name", [*IMAGE_FAMILIES, "pixtral"])
def test_towers(name: str, drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory, processor = model_of(name, drawn_data, tmp_path_factory.getbasetemp() / "flops")
    files = ModelFiles.load(str(directory))
    encoding = media_encoding(files, MediaOptions())
    config = AutoConfig.from_pretrained(directory)
    model = auto_class(config).from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    inputs = family_of(files.config).processor_inputs
    images: list[EncodedImage] = []
    flops_of_all = np.zeros(2)  # of products with weights, and of attention
    for size in SIZES:
        data = _noise(*size)
        picture = load_image(None, data)
        image = encoding.measure("image", MediaRef(None, data))
        assert isinstance(image, EncodedImage)
        if inputs:
            _, outputs = process_images(processor, [[picture]])
        else:
            outputs = processor.image_processor(images=[picture], return_tensors="pt")
        names = inputs or ("pixel_values", "image_grid_thw")
        tensors = {key: torch.as_tensor(outputs[key]) for key in names if key in outputs}
        tensors["pixel_values"] = tensors["pixel_values"].float()  # bfloat16 from the processor of Llama 4
        with flop_counter() as counter:
            features = _features(model, tensors)
            forward = _split(counter)
            torch.cat([*features]).sum().backward()
        images.append(image)
        flops_of_all += forward
        planned = _planned(config, FROZEN, image)
        assert planned == pytest.approx(forward, rel=0.02), size
        assert _planned(config, ALL_WEIGHTS, image) == pytest.approx(_split(counter), rel=0.02), size
        # Older caches have no grids. Tokens give the number of tiles, except where padding of tiles has no tokens.
        legacy = sum(_planned(config, FROZEN, dataclasses.replace(image, grid=())))
        has_exact_tiles = name not in (
            *NATIVE_FAMILIES,
            *PADDED_FAMILIES,
            "llava_next",
            "llava_next_video",
            "llava_onevision",
        )
        assert legacy == pytest.approx(sum(planned)) if has_exact_tiles else legacy > 0
    assert _planned(config, FROZEN, *images) == pytest.approx(tuple(flops_of_all), rel=0.02)


def _planned(config: PreTrainedConfig, learning: LearningOptions, *media: Medium) -> tuple[float, float]:
    """The planned FLOPs of products with weights, and of attention, of the media of a sample in the towers."""
    nothing = np.zeros(0, np.int32)
    sample = EncodedSample(nothing, nothing, nothing, channel=None, source="rows", row=0, **media_fields(media))
    amounts = SampleAmounts.of([sample])
    tokens, squares = amounts.media_tokens, amounts.patch_squares

    def total() -> float:
        cost = CostModel.of_config(config.to_dict(), learning)
        return float(cost.towers(cost.padded_tokens(tokens, squares, amounts.picture_squares), squares)[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packtool.planning.layers.vision_modules", _without_attention)
        linear = total()
    return linear, total() - linear


VIDEO_FAMILIES = ["gemma4", "video_llama_3"]
"""Whose towers compute more patches than videos have tokens."""


def _videos(*sizes: tuple[int, int]) -> tuple[MediaRef, ...]:
    """Videos of three equal frames and another, each of a size (height, width): listed as pictures."""
    return tuple(
        MediaRef(None, None, tuple(MediaRef(None, _noise(*size, seed)) for seed in (0, 0, 0, 1))) for size in sizes
    )


@pytest.mark.parametrize("learning", [FROZEN, ALL_WEIGHTS])
@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_videos(
    name: str, learning: LearningOptions, drawn_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Alone, two in a row, and beside a picture; of VideoLLaMA 3, only projections of left out tokens are missing."""
    directory, _ = model_of(name, drawn_data, tmp_path_factory.getbasetemp() / "flops")
    spec = InputSpec.load(str(directory), MediaLimits())
    model: Any = auto_class(spec.config).from_config(spec.config, attn_implementation="sdpa")
    rows: list[tuple[str, Sequence[tuple[int, int]], tuple[MediaRef, ...]]]
    rows = [("<video>?", (), _videos(size)) for size in SIZES]
    rows += [("<video><video>?", (), _videos(*SIZES[:2])), ("<image><video>?", SIZES[:1], _videos(SIZES[1]))]
    num_left_out = 0  # tokens
    for question, sizes, videos in rows:
        (sample,) = _encoded(directory, (question, sizes), videos=videos)
        if name == "video_llama_3":
            num_left_out += sum(math.prod(video.grid) // 4 - video.num_tokens for video in sample.videos)
        inputs = load_media([sample], spec)
        with flop_counter() as counter:
            features = _features(model, {key: inputs[key] for key in spec.family.processor_inputs})
            if learning is ALL_WEIGHTS:
                torch.cat([*features]).sum().backward()
        linear, attention = _planned(spec.config, learning, *sample.media)
        counted_linear, counted_attention = _split(counter)
        assert attention == pytest.approx(counted_attention, rel=0.02), question
        if sizes and name == "video_llama_3":
            assert 0.9 * counted_linear < linear < 1.02 * counted_linear
        else:
            assert linear == pytest.approx(counted_linear, rel=0.02), question
    assert (num_left_out > 0) == (name == "video_llama_3")


def test_frames_of_gemma_4_beside_pictures(drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a micro-batch whose pictures have four times the patches, frames are padded to these: the documented bound."""
    directory, _ = model_of("gemma4", drawn_data, tmp_path_factory.getbasetemp() / "flops")
    spec = InputSpec.load(str(directory), MediaLimits())
    model: Any = auto_class(spec.config).from_config(spec.config, attn_implementation="sdpa")
    (sample,) = _encoded(directory, ("<video>?", ()), videos=_videos(SIZES[0]))
    inputs = load_media([sample], spec)
    num_frames, num_patches, width = inputs["pixel_values"].shape
    larger = {
        "pixel_values": torch.zeros(1, 4 * num_patches, width),
        "image_position_ids": torch.full((1, 4 * num_patches, 2), -1),
    }
    padded = _padded_patches([inputs, larger])[0]
    with torch.no_grad(), flop_counter() as counter:
        _features(model, {key: padded[key] for key in spec.family.processor_inputs})
    linear, attention = _planned(spec.config, FROZEN, *sample.media)
    assert sample.num_patches == num_frames * num_patches
    assert (4 * linear, 16 * attention) == pytest.approx(_split(counter), rel=0.02)


def _without_attention(config: dict[str, Any]) -> list[ModuleCost]:
    return [module for module in vision_modules(config) if module.kind != "attention"]


def _encoded(
    directory: Path, *rows: tuple[str, Sequence[tuple[int, int]]], videos: tuple[MediaRef, ...] = ()
) -> list[EncodedSample]:
    """Samples of questions with pictures of these sizes (height, width), each with the same videos."""
    encoder = Encoder(EncodeSpec(model=str(directory), max_length=10_000), ModelFiles.load(str(directory)))
    samples = []
    for number, (question, sizes) in enumerate(rows):
        pictures = tuple(MediaRef(None, _noise(*size)) for size in sizes)
        turns = Turn("user", question), Turn("assistant", "so")
        (encoded,) = encoder.encode([Sample(turns, pictures, "rows.jsonl", number, videos=videos)])
        assert not isinstance(encoded, Dropped), encoded
        samples += encoded
    return samples


ALIGNER = LearningOptions(train_type="full", freeze_llm=True, freeze_vit=True, freeze_aligner=False)


@pytest.mark.parametrize("learning", [FROZEN, ALIGNER, ALL_WEIGHTS], ids=["frozen", "aligner", "all"])
def test_cross_attention(learning: LearningOptions, drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Packs, as they are trained, of rows with one picture, with two pictures side by side, and without."""
    directory, _ = model_of("mllama", drawn_data, tmp_path_factory.getbasetemp() / "flops")
    spec = InputSpec.load(str(directory), MediaLimits())
    model = auto_class(spec.config).from_config(spec.config)
    set_attention(model, impl="sdpa")
    for name, weight in model.named_parameters():
        weight.requires_grad = learning is not ALIGNER or "multi_modal_projector" in name
    cost = CostModel.of_config(spec.config.to_dict(), learning)
    questions = [(f"<image>{'What is it? ' * 30}", [size]) for size in SIZES]
    questions += [(f"<image><image>{'Which one? ' * 30}", [*SIZES[:2]]), ("Why? " * 30, [])]
    samples = _encoded(directory, *questions)
    assert {image.grid[0] for sample in samples for image in sample.images} == {1, 2}  # tiles of pictures
    for pack in ([samples[0]], samples[1:3], samples[3:], samples):
        batch = collate_packs(pack, spec)
        with flop_counter() as counter:
            logits = model(**batch.model_inputs()).logits
            cross_attention = _cross_attention(counter)
            if learning is not FROZEN and logits.requires_grad:
                logits.sum().backward()
        lengths = np.array([sample.length for sample in pack])
        planned_cross = cost.cross_attention(lengths, np.array([sample.patch_squares for sample in pack])).sum()
        num_passes = 1.0 if learning is FROZEN else 3.5
        assert planned_cross / num_passes == pytest.approx(cross_attention, rel=0.02)
        tower, tower_attention = _planned(spec.config, learning, *[image for sample in pack for image in sample.images])
        linear = (cost.per_token + cost.per_target_token) * lengths.sum() + tower
        # torch counts the square of causal attention
        attention = 2 * cost.attention(lengths).sum() + planned_cross + tower_attention
        assert (linear, attention) == pytest.approx(_split(counter), rel=0.02)


def test_cross_attention_to_pictures_between_texts_is_an_upper_bound(
    drawn_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens attend to the last picture before them; the estimate is that they attend to all of their sample."""
    directory, _ = model_of("mllama", drawn_data, tmp_path_factory.getbasetemp() / "flops")
    spec = InputSpec.load(str(directory), MediaLimits())
    model = auto_class(spec.config).from_config(spec.config)
    set_attention(model, impl="sdpa")
    text = "What is it? " * 30
    (sample,) = _encoded(directory, (f"<image>{text}<image>{text}", [SIZES[0], SIZES[1]]))
    with torch.no_grad(), flop_counter() as counter:
        model(**collate_packs([sample], spec).model_inputs())
    cost = CostModel.of_config(spec.config.to_dict(), FROZEN)
    planned = cost.cross_attention(np.array(sample.length), np.array(sample.patch_squares))
    assert planned == pytest.approx(len(sample.images) * _cross_attention(counter), rel=0.02)


def _cross_attention(counter: FlopCounterMode) -> int:
    """The counted FLOPs of scores and values of cross-attention."""
    modules = {name: ops for name, ops in counter.get_flop_counts().items() if name.endswith(".cross_attn")}
    return sum(count for ops in modules.values() for op, count in ops.items() if "attention" in str(op))
