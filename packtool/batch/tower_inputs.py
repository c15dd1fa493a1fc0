"""Inputs that a tower would otherwise compute on the device from the sizes of its media.

A tower of transformers turns sizes into boundaries, positions and windows by code that reads them back from the device
(``.tolist()``, ``repeat_interleave``, ``nonzero``), and each time the host has to wait for the device. The towers also
take these results as keyword arguments [read in vision_utils of 5.17 and 5.23], so transformers' functions run here, on
the host, in the dataloader's workers.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from packtool.batch.micro_batch import Tower
from packtool.batch.spec import InputSpec

VIDEO_INPUTS = ("tiles", "video_compression_mask")
"""Inputs (``batch.media``) with which a hook makes the features of videos, since the model's own forward cannot."""

M = TypeVar("M", bound="Movable")


class Movable(ABC):
    """An object made of tensors, with the methods that DataLoader, accelerate and Lightning move batches by."""

    @abstractmethod
    def map(self: M, function: Callable[[Tensor], Tensor]) -> M:
        """The same object with every tensor, of any shape, replaced by the function's result."""

    def to(self: M, device: torch.device | str, *, non_blocking: bool = False) -> M:
        """The same object on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: M) -> M:
        """The same object in page-locked memory."""
        return self.map(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True, eq=False)
class TowerInputs(Movable):
    """Keyword arguments of a tower's forward other than media, and the positions of its features in the micro-batch.

    Args:
        arguments: by the names of transformers' helpers; tensors go to the device, integers stay.
        positions: for each kind of medium, int64 (N,): the flattened positions of its N placeholder tokens, ascending.
    """

    arguments: Mapping[str, Tensor | int]
    positions: Mapping[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> TowerInputs:
        tensors = {name: function(value) for name, value in self.arguments.items() if isinstance(value, Tensor)}
        positions = {kind: function(value) for kind, value in self.positions.items()}
        return TowerInputs({**self.arguments, **tensors}, positions)


def tower_inputs(
    spec: InputSpec, media: Mapping[str, Tensor], input_ids: Tensor, *, exchanges_features: bool = False
) -> dict[Tower, TowerInputs]:
    """Prepare inputs of the towers (encoders of media) that they would otherwise compute on the GPU.

    Args:
        media: pixels, grids and mel frames, by the names of the model's arguments.
        input_ids: int64 (B, T); placeholder tokens stand where the features of media are inserted.
        exchanges_features: True if ranks share the sequence, and send each other the features of its media.

    Returns:
        Inputs for each tower that has media; nothing where the model's own forward needs no help.
    """
    if not media:
        return {}
    uses_own_forward = bool(spec.family.processor_inputs)  # to encode the media and insert their features
    needs_hook = exchanges_features or any(name in media for name in VIDEO_INPUTS)  # packtool does it instead
    if uses_own_forward and not needs_hook:
        return {}
    positions = _placeholder_positions(spec, input_ids)
    if uses_own_forward:
        return {"vision": TowerInputs(arguments={}, positions=positions)}

    inputs: dict[Tower, TowerInputs] = {}
    grids = [media[grid_name] for _, grid_name in spec.family.visual_inputs.values() if grid_name in media]
    if grids:
        visual_positions = {kind: kind_positions for kind, kind_positions in positions.items() if kind != "audio"}
        inputs["vision"] = TowerInputs(_vision_arguments(spec, torch.cat(grids)), visual_positions)
    frame_mask = media.get("feature_attention_mask")  # (sounds, mel frames), 0 on padding
    if frame_mask is not None:
        inputs["sound"] = TowerInputs(_sound_arguments(spec, frame_mask), {"audio": positions["audio"]})
    return inputs


def _placeholder_positions(spec: InputSpec, input_ids: Tensor) -> dict[str, Tensor]:
    """Return the flattened positions of each kind's placeholder tokens, int64 (n,), ascending."""
    flat_ids = input_ids.flatten()
    positions: dict[str, Tensor] = {}
    for kind, pad_id in spec.pad_ids.items():
        if spec.family.taken_as(kind) == kind:  # a family that takes videos as images has no positions of videos
            positions[kind] = (flat_ids == pad_id).nonzero().squeeze(1)
    return positions


def _vision_arguments(spec: InputSpec, grids: Tensor) -> dict[str, Tensor | int]:
    """Return arguments of the vision tower that depend only on the sizes of its images and videos.

    ``grids``, int64 (media, 3), has the time steps, rows and columns of patches of each medium, images first. The
    arguments are boundaries of media, positions of patches, and where the tower has them, interpolation and windows.
    """
    tower: Any = spec.meta_model.visual
    merge_size: int = tower.spatial_merge_size
    cu_seqlens = get_vision_cu_seqlens(grids)
    arguments: dict[str, Tensor | int] = {
        "position_ids": get_vision_position_ids(grids, merge_size),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": _max_length(cu_seqlens),
    }
    has_learned_positions = hasattr(tower, "num_grid_per_side")  # resampled to each picture's size
    if has_learned_positions:
        arguments["interp_indices"], arguments["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge_size,
        )
    has_windowed_attention = hasattr(tower, "window_size")
    if has_windowed_attention:
        window_index, cu_window_seqlens = get_vision_window_index(
            grids, spatial_merge_size=merge_size, window_size=tower.window_size, patch_size=tower.patch_size
        )
        arguments["window_index"] = window_index
        arguments["cu_window_seqlens"] = cu_window_seqlens
        arguments["max_window_seqlen"] = _max_length(cu_window_seqlens)
    return arguments


def _sound_arguments(spec: InputSpec, frame_mask: Tensor) -> dict[str, Tensor | int]:
    """Return arguments of the audio tower, which computes sounds in chunks of mel frames.

    ``frame_mask`` is int64 (sounds, frames), 0 on padding. The names are those of the tower's arguments, except
    "frames": the index of each chunk's frames in the flattened mask, int64 (chunks, frames per chunk).
    """
    tower: Any = spec.meta_model.audio_tower
    # The functions of transformers in the module that defines the tower.
    helpers: Any = sys.modules[type(tower).__module__]
    frame_counts = frame_mask.sum(dim=1)  # (sounds,)
    frame_index, chunk_lengths = _chunk_frames(frame_mask, helpers, tower.n_window)
    arguments: dict[str, Tensor | int] = {
        "chunk_lengths": chunk_lengths,
        "feature_lens": frame_counts,
        "frames": frame_index,
    }
    if spec.family.is_qwen3:
        arguments["valid_indices"] = helpers.get_valid_indices(chunk_lengths, tower.n_window)
        cu_seqlens = helpers.get_audio_cu_seqlens(chunk_lengths, frame_counts, tower.n_window_infer, tower.n_window)
    else:
        arguments["valid_indices"] = helpers.get_valid_indices(chunk_lengths)
        arguments["pool_indices"] = helpers.get_pool_indices(frame_counts)
        cu_seqlens = helpers.get_audio_cu_seqlens(chunk_lengths)
    arguments["cu_seqlens"] = cu_seqlens
    arguments["max_seqlen"] = _max_length(cu_seqlens)
    return arguments


def _chunk_frames(mask: Tensor, helpers: Any, window: int) -> tuple[Tensor, Tensor]:
    """Divide the frames of sounds into chunks by the function of transformers' module ``helpers``.

    Return the index in the flattened mask of each chunk's frames, int64 (chunks, frames per chunk), ``mask.numel()``
    for padding; and the length of each chunk, (chunks,).
    """
    frame_index = mask.flatten().nonzero().squeeze(1)  # of the mel frames of all sounds, one after the other
    # The helper divides features (1, frames) into chunks and pads these with 0. Here, the features are the numbers of
    # the frames, from 1, so that 0 stands for padding.
    frame_numbers = torch.arange(1, len(frame_index) + 1)
    chunks, chunk_lengths = helpers.chunk_and_pad_features(frame_numbers[None], mask.sum(dim=1), window)
    padding_index = torch.tensor([mask.numel()])
    index_of_number = torch.cat([padding_index, frame_index])
    return index_of_number[chunks[:, 0]], chunk_lengths


def _max_length(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max())
