"""Random models of real sizes and random samples for ``bench_gpu.py``; needs torch and transformers alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from packtool.batch.batch import Batch, PackedBatch, PaddedBatch, target_positions
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.constants import IGNORE_INDEX
from packtool.encode.families import MediaLimits

VOCABULARY = 151936
NUM_CONTROL = 4
"""The last ids of a vocabulary: begin and end of a picture, its pad, a video's pad. Random text takes the others."""


@dataclass(frozen=True)
class Size:
    """Widths of the text tower and the vision tower of a Qwen3-VL.

    Args:
        recompute: activations in the backward pass, unless told otherwise.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    recompute: bool

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, heads of K and V, and their size."""
        return self.text["num_attention_heads"], self.text["num_key_value_heads"], self.text["head_dim"]


def _text(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: tuple[int, int, int],
    *,
    tied: bool,
    vocabulary: int = VOCABULARY,
) -> dict[str, Any]:
    """``heads``: of Q, of K and V, and the size of one."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "tie_word_embeddings": tied,
    }


def _vision(hidden: int, intermediate: int, layers: int, heads: int, deepstack: list[int]) -> dict[str, Any]:
    """``deepstack``: layers whose output goes to the text tower's first ones, too."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "depth": layers, "num_heads": heads}
    return {**sizes, "deepstack_visual_indexes": deepstack}


_SMALL_VISION = _vision(1024, 4096, 24, 16, [5, 11, 17])
_LARGE_VISION = _vision(1152, 4304, 27, 16, [8, 16, 24])
SIZES = {
    "tiny": Size(
        _text(64, 128, 2, (4, 2, 16), tied=True, vocabulary=1024), _vision(32, 64, 2, 2, [0]), recompute=False
    ),
    "1b": Size(_text(2048, 6144, 28, (16, 8, 128), tied=True), _SMALL_VISION, recompute=False),
    "4b": Size(_text(2560, 9728, 36, (32, 8, 128), tied=True), _SMALL_VISION, recompute=True),
    "8b": Size(_text(4096, 12288, 36, (32, 8, 128), tied=False), _LARGE_VISION, recompute=True),
}
"""Sizes by name: the text towers of Qwen3-VL-2B, 4B and 8B (1.7, 4.0 and 8.2 billion weights) with their towers."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A text, perhaps with one picture before it; L tokens.

    Args:
        input_ids: int64 (L,).
        labels: int64 (L,), shifted already.
        positions: int64 (4, L), [text, t, h, w].
        pixels: (patches, patch_dim), or None.
        grid: int64 (1, 3) of the picture, or None.
        num_media_tokens: pads of the picture.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    pixels: Tensor | None
    grid: Tensor | None
    num_media_tokens: int

    @property
    def length(self) -> int:
        """The number of the sample's tokens."""
        return len(self.input_ids)


_CONTROL = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")


def text_config(size: Size) -> Qwen3Config:
    """A text model's configuration."""
    return Qwen3Config(**size.text, max_position_embeddings=65536, rope_parameters=_rope())


def vision_config(size: Size) -> Qwen3VLConfig:
    """A model's configuration with a vision tower beside the text model."""
    text = {**size.text, "max_position_embeddings": 65536}
    half = size.text["head_dim"] // 2
    sections = [half - 2 * (half * 20 // 64), half * 20 // 64, half * 20 // 64]
    return Qwen3VLConfig(
        text_config=text | {"rope_parameters": _rope() | {"mrope_section": sections, "mrope_interleaved": True}},
        vision_config=size.vision | {"out_hidden_size": size.text["hidden_size"]},
        **dict(zip(_CONTROL, range(size.text["vocab_size"] - NUM_CONTROL, size.text["vocab_size"]), strict=True)),
        tie_word_embeddings=size.text["tie_word_embeddings"],
    )


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5e6}


def make_model(config: Qwen3Config | Qwen3VLConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights, drawn where they stay; transformers' own SDPA attention."""
    auto: Any = Qwen3VLForConditionalGeneration if isinstance(config, Qwen3VLConfig) else Qwen3ForCausalLM
    torch.manual_seed(0)
    # A configuration of its own: what attention is set later stays there, and other models are made of the same.
    with torch.device(device):
        return auto._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="sdpa")


def checkpoint_activations(model: Any) -> None:
    """Recompute them in the backward pass."""
    settings = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.23
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def mixed_lengths(num_tokens: int, seed: int = 0, least: int = 32) -> list[int]:
    """Lengths as of conversations (lognormal, median 500) that add up to ``num_tokens``, none above half of it."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    left = num_tokens
    while left:
        drawn = int(torch.randn((), generator=generator).mul(0.9).exp() * 500)
        length = min(max(drawn, least), max(num_tokens // 2, least))
        # The rest becomes one more sample, or a part of the last one where it is too short for that.
        length = left if left - length < least else length
        lengths.append(length)
        left -= length
    return lengths


def make_samples(lengths: Sequence[int], config: Any, device: torch.device, *, picture_side: int = 0) -> list[Sample]:
    """Random samples, the second half of each is what it learns; in every other one a picture where there is room.

    Args:
        picture_side: patches along a side of the pictures; 0 for none.
    """
    generator = torch.Generator().manual_seed(1)
    return [
        _make_sample(length, config, device, generator, picture_side if number % 2 == 0 else 0)
        for number, length in enumerate(lengths)
    ]


def _make_sample(length: int, config: Any, device: torch.device, generator: torch.Generator, side: int) -> Sample:
    first_control = config.get_text_config().vocab_size - NUM_CONTROL
    ids = torch.randint(0, first_control, (length,), generator=generator)
    positions = torch.arange(length).repeat(4, 1)
    pixels = grid = None
    num_pads = (side // 2) ** 2
    has_picture = side > 0 and length >= num_pads + 8
    if has_picture:
        vision = config.vision_config
        ids[0], ids[num_pads + 1] = config.vision_start_token_id, config.vision_end_token_id
        ids[1 : num_pads + 1] = config.image_token_id
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(side * side, patch, generator=generator)
        grid = torch.tensor([[1, side, side]])
        positions[1:] = _picture_positions(length, side // 2)
    labels = torch.full((length,), IGNORE_INDEX)
    labels[length // 2 : -1] = ids[length // 2 + 1 :]
    labels[labels >= first_control] = IGNORE_INDEX
    ids, labels, positions = (tensor.to(device) for tensor in (ids, labels, positions))
    pixels, grid = (None if tensor is None else tensor.to(device) for tensor in (pixels, grid))
    return Sample(ids, labels, positions, pixels, grid, num_pads if has_picture else 0)


def _picture_positions(length: int, side: int) -> Tensor:
    """int64 (3, length): one token, a picture of side x side tokens, then text from one beyond its largest on."""
    inside = torch.stack(
        torch.meshgrid(torch.zeros(1, dtype=torch.int64), torch.arange(side), torch.arange(side), indexing="ij")
    )
    picture = inside.reshape(3, -1) + 1
    text = torch.arange(length - picture.shape[1] - 1) + side + 1
    return torch.cat([torch.zeros(3, 1, dtype=torch.int64), picture, text.repeat(3, 1)], dim=1)


def pack(samples: Sequence[Sample], config: PreTrainedConfig) -> PackedBatch:
    """All samples in one row, for a model of this configuration."""
    sees = hasattr(config, "vision_config")
    common = _common(samples)
    ids = torch.cat([sample.input_ids for sample in samples])[None]
    on_host = {name: tensor.cpu() for name, tensor in common["media"].items()}
    made = tower_inputs(InputSpec("", config, MediaLimits()), on_host, ids.cpu())
    common["towers"] = {name: inputs.map(lambda tensor: tensor.to(ids.device)) for name, inputs in made.items()}
    lengths = tuple(sample.length for sample in samples)
    positions = torch.cat([sample.positions for sample in samples], dim=1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(samples[0].input_ids.device, torch.int32)
    labels = torch.cat([sample.labels for sample in samples])[None]
    return PackedBatch(
        input_ids=ids,
        labels=labels,
        target_positions=target_positions(labels),
        position_ids=positions[:, None] if sees else positions[:1],
        cu_seqlens=bounds,
        lengths=lengths,
        **common,
    )


def pad(samples: Sequence[Sample], *, sees: bool) -> PaddedBatch:
    """A sample in each row, padded on the right."""
    longest = max(sample.length for sample in samples)

    def rows(name: str, fill: int) -> Tensor:
        found = [getattr(sample, name) for sample in samples]
        return torch.stack([F.pad(tensor, (0, longest - tensor.shape[-1]), value=fill) for tensor in found])

    ids = rows("input_ids", 0)
    kept = torch.tensor([sample.length for sample in samples], device=ids.device)
    positions = rows("positions", 0).transpose(0, 1)
    labels = rows("labels", IGNORE_INDEX)
    return PaddedBatch(
        input_ids=ids,
        labels=labels,
        target_positions=target_positions(labels),
        position_ids=positions if sees else positions[0],
        attention_mask=(torch.arange(longest, device=ids.device) < kept[:, None]).long(),
        **_common(samples),
    )


def pad_in_batches(samples: Sequence[Sample], num_rows: int, *, sees: bool, grouped: bool) -> list[Batch]:
    """Micro-batches of so many rows, of samples of like length if ``grouped``."""
    ordered = sorted(samples, key=lambda sample: sample.length) if grouped else list(samples)
    return [pad(ordered[start : start + num_rows], sees=sees) for start in range(0, len(ordered), num_rows)]


def _common(samples: Sequence[Sample]) -> dict[str, Any]:
    pictures = [sample for sample in samples if sample.pixels is not None]
    media = {}
    if pictures:
        media["pixel_values"] = torch.cat([sample.pixels for sample in pictures if sample.pixels is not None])
        media["image_grid_thw"] = torch.cat([sample.grid for sample in pictures if sample.grid is not None])
    return {
        "media": media,
        "loss_weights": None,
        "channels": (None,) * len(samples),
        "num_samples": len(samples),
        "towers": {},
    }
