"""Rotary positions of a sample: its model's own, computed for each sample alone.

M-RoPE models want four rows, [text, t, h, w]. Given three, transformers takes the text row for granted and tells packed
samples apart wrongly (a leak that was measured at 2.65 in logits). For a sample of text all four are 0, 1, 2, ...::

    tokens   H  i  <s> P  P  P  P  <e> ?        P: the four tokens of one picture, two rows of two
    text     0  1  2   3  4  5  6  7   8
    t        0  1  2   3  3  3  3  5   6
    h        0  1  2   3  3  4  4  5   6
    w        0  1  2   3  4  3  4  5   6

Padding removed before a model and restored after it, on tensors, as MindSpeed-RL's ``remove_padding.py`` does.

Three rows of 3, 2 and 3 tokens, aligned to a multiple of 2 ("." is padding, "-" is -100, P is the pad that aligns)::

    input_ids   a b c .        input_ids    a b c P d e f g h P       (1, 10)
                d e . .   ->   position_ids 0 1 2 3 0 1 0 1 2 3
                f g h .        seqlens      3 2 3                     tokens of each row
                               cu_seqlens   0 4 6 10                  where each row starts, its pads included

    restored, seq_len 4:  a b c .     seq_len 2, prompt lengths 1, 2, 2:  a b
                          d e . .                                         . .
                          f g h .                                         g .

A prompt of p tokens: what position p - 1 says is about the first token after it, so a row begins there, and its last
position, which speaks of no token, is left out. Positions run through the pads, and no label is ever made of a pad
(MindSpeed-RL writes 0 there, which is a token).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.spec import InputSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import sounds_in_order
from packtool.errors import DataError
from packtool.rows.sample import MediaKind

NUM_POSITION_ROWS = 4
TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "video": 2}
"""``mm_token_type_ids`` of a medium's placeholder tokens; text is 0."""


def sample_positions(sample: EncodedSample, spec: InputSpec) -> npt.NDArray[Any]:
    """Return a sample's positions, (4, L), rows [text, t, h, w]: int64, or float32 if an Omni model has fractions.

    Rows 1 to 3 of a sample with images or videos come from the model's ``get_rope_index``; otherwise all rows are 0, 1,
    2, ...

    Raises:
        DataError: for videos with and without a sound track in one sample, which Omni models do not support.
    """
    text_positions = np.arange(sample.length, dtype=np.int64)
    if not spec.has_mrope or (not sample.images and not sample.videos):
        return np.broadcast_to(text_positions, (NUM_POSITION_ROWS, sample.length))
    input_ids = torch.from_numpy(sample.input_ids.astype(np.int64)).unsqueeze(0)
    image_grids: list[tuple[int, ...]] = [image.grid for image in sample.images]
    video_grids: list[tuple[int, ...]] = [video.grid for video in sample.videos]
    if spec.family.videos_as_pictures:
        image_grids += [grid for video in sample.videos for grid in video.frame_grids]
        video_grids = []
    # Arguments by the model's names, such as image_grid_thw; None if the sample has no such medium.
    arguments: dict[str, Any] = {"input_ids": input_ids}
    for kind, (_, grid_name) in spec.family.visual_inputs.items():
        grids = image_grids if kind == "image" else video_grids
        arguments[grid_name] = torch.tensor(grids) if grids else None
    if spec.family.positions == "sound_seconds":
        arguments |= _omni_arguments(sample, input_ids, spec)
    else:
        token_types = torch.zeros_like(input_ids, dtype=torch.int32)
        for kind, token_type in TOKEN_TYPES.items():
            if kind in spec.family.visual_inputs:
                token_types += torch.eq(input_ids, spec.pad_ids[kind]).int() * token_type
        arguments["mm_token_type_ids"] = token_types
        arguments["second_per_grid_ts"] = torch.tensor([video.seconds_per_grid for video in sample.videos])
    position_ids, _ = spec.rope_index(**arguments)
    media_positions = position_ids[:, 0].numpy()  # (3, L)
    is_whole = (media_positions == media_positions.round()).all()
    dtype = np.dtype(np.int64) if is_whole else media_positions.dtype
    return np.concatenate([text_positions[None], media_positions]).astype(dtype)


def _omni_arguments(sample: EncodedSample, input_ids: torch.Tensor, spec: InputSpec) -> dict[str, Any]:
    """Return the arguments that only Omni models' ``get_rope_index`` has: lengths of sounds and sound tracks."""
    has_track = [video.audio is not None for video in sample.videos]
    if any(has_track) and not all(has_track):
        raise DataError(
            f"row {sample.row} of {sample.source} has videos with and without a sound track, whose positions an Omni "
            "model cannot tell",
            "Export without --use-audio-in-video, or leave that row out.",
        )
    num_frames = [sound.num_features for sound, _, _ in sounds_in_order(sample, spec.media_tokens)]
    return {
        "attention_mask": torch.ones_like(input_ids),
        "use_audio_in_video": any(has_track),
        "audio_seqlens": torch.tensor(num_frames) if num_frames else None,
        "second_per_grids": torch.tensor([video.seconds_per_grid for video in sample.videos]),
    }


PAD_ID = 0
"""The token that rows are padded with: it is in every vocabulary, and no medium's placeholder token."""


class RemovedPadding(NamedTuple):
    """B rows laid end to end, T tokens with the pads that align them; in the order of MindSpeed-RL's function.

    Args:
        input_ids: (1, T), in the precision they came in.
        position_ids: int64 (1, T), from 0 on in every row.
        labels: (1, T), -100 on pads.
        seqlens: int32 (B,), tokens of each row without any padding.
        cu_seqlens: int32 (B + 1,), starts of the rows, pads included, and T at the end.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    seqlens: Tensor
    cu_seqlens: Tensor


def alignment_for(*, tensor_parallel_size: int = 1, sequence_parallel_size: int = 1, zigzag: bool = False) -> int:
    """Number that every row's length must be a multiple of, so that both axes of ranks can split it.

    Args:
        tensor_parallel_size: ranks that share each layer's matrices.
        sequence_parallel_size: ranks that share each row's tokens; Megatron calls them context parallel.
        zigzag: those hold two chunks of each row (Megatron's way), one from either end.
    """
    return tensor_parallel_size * sequence_parallel_size * (2 if zigzag else 1)


def remove_padding(input_ids: Tensor, labels: Tensor, attention_mask: Tensor, *, align_to: int = 1) -> RemovedPadding:
    """Lay the rows of a padded batch end to end in one sequence.

    Args:
        input_ids: int (B, L).
        labels: int (B, L), at the same positions; shift them before if a loss is computed from them.
        attention_mask: (B, L), 1 on tokens and 0 on padding, on either side of the tokens.
        align_to: every row is padded to a multiple of it: see ``alignment_for``.

    Raises:
        ValueError: if the shapes differ.
    """
    if not input_ids.shape == labels.shape == attention_mask.shape or input_ids.ndim != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (input_ids, labels, attention_mask))
        raise ValueError(f"input_ids, labels and attention_mask must have one shape (B, L), not {shapes}")
    is_token = attention_mask.bool()
    seqlens = is_token.sum(dim=1)
    aligned_lengths = (seqlens + align_to - 1) // align_to * align_to
    cu_seqlens = torch.cat([aligned_lengths.new_zeros(1), aligned_lengths.cumsum(0)])
    num_packed = int(cu_seqlens[-1])
    # Position in the sequence of each token, from its position in its row.
    index_in_row = is_token.cumsum(dim=1) - 1
    packed_index = (cu_seqlens[:-1, None] + index_in_row)[is_token]
    packed_ids = input_ids.new_full((num_packed,), PAD_ID)
    packed_ids[packed_index] = input_ids[is_token]
    packed_labels = labels.new_full((num_packed,), IGNORE_INDEX)
    packed_labels[packed_index] = labels[is_token]
    row_starts = torch.repeat_interleave(cu_seqlens[:-1], aligned_lengths, output_size=num_packed)
    position_ids = torch.arange(num_packed, device=input_ids.device) - row_starts
    return RemovedPadding(packed_ids[None], position_ids[None], packed_labels[None], seqlens.int(), cu_seqlens.int())


def restore_padding(
    values: Tensor,
    seqlens: Tensor,
    cu_seqlens: Tensor,
    seq_len: int,
    prompt_length: Tensor | None = None,
    *,
    fill: float = 0,
) -> Tensor:
    """Put a model's values of a packed sequence back into rows: the inverse of ``remove_padding``, padded on the right.

    Args:
        values: (1, T, ...), one for each packed position; gradients flow through.
        seqlens: int (B,), tokens of each row.
        cu_seqlens: int (B + 1,), starts of the rows in ``values``: those with pads, not sums of ``seqlens``.
        seq_len: length L of the restored rows.
        prompt_length: p, int (B,) or (B, 1), at least 1. Rows then hold only the values that predict the seqlens - p
            tokens after the prompt: those of positions p - 1 to seqlens - 2.
        fill: value of the padding.

    Returns:
        (B, L, ...) in the precision of ``values``.

    Raises:
        ValueError: if ``values`` has several rows, a row has no such prompt, or is longer than ``seq_len``.
    """
    if values.shape[0] != 1:
        raise ValueError(f"expected the values of one packed sequence, (1, T, ...), not {tuple(values.shape)}")
    lengths, starts = seqlens.long(), cu_seqlens[:-1].long()
    if prompt_length is not None:
        prompt_length = prompt_length.reshape(-1)
        if bool(((prompt_length < 1) | (prompt_length > lengths.clamp(min=1))).any()):
            raise ValueError("a prompt has at least one token, and no more than its row")
        lengths = (lengths - prompt_length).clamp(min=0)
        starts = starts + prompt_length - 1
    max_length = int(lengths.max()) if len(lengths) else 0
    if max_length > seq_len:
        raise ValueError(f"seq_len {seq_len} is too short for a row of {max_length}")
    if values.shape[1] == 0:
        return values.new_full((len(lengths), seq_len, *values.shape[2:]), fill)
    column = torch.arange(seq_len, device=values.device)
    is_padding = column >= lengths[:, None]  # (B, L)
    packed_index = (starts[:, None] + column).masked_fill(is_padding, 0)
    num_value_axes = values.ndim - 2
    is_padding = is_padding.view(*is_padding.shape, *[1] * num_value_axes)
    return values[0][packed_index].masked_fill(is_padding, fill)


def align_sample(sample: EncodedSample, align_to: int) -> EncodedSample:
    """A sample with pads behind it, as ``remove_padding`` has its rows: collation gives positions to these too.

    Args:
        align_to: its length becomes a multiple of it.
    """
    num_pads = -sample.length % align_to
    if not num_pads:
        return sample
    scale = sample.loss_scale
    return dataclasses.replace(
        sample,
        input_ids=np.append(sample.input_ids, np.full(num_pads, PAD_ID, np.int32)),
        labels=np.append(sample.labels, np.full(num_pads, IGNORE_INDEX, np.int32)),
        loss_scale=None if scale is None else np.append(scale, np.zeros(num_pads, np.float32)),
    )
