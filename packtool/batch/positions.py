"""Rotary positions of a sample: its model's own, computed for each sample alone.

M-RoPE models want four rows, [text, t, h, w]. Given three, transformers takes the text row for granted and tells packed
samples apart wrongly (a leak that was measured at 2.65 in logits). For a sample of text all four are 0, 1, 2, ...::

    tokens   H  i  <s> P  P  P  P  <e> ?        P: the four tokens of one picture, two rows of two
    text     0  1  2   3  4  5  6  7   8
    t        0  1  2   3  3  3  3  5   6
    h        0  1  2   3  3  4  4  5   6
    w        0  1  2   3  4  3  4  5   6

Values that a model computes for a packed sequence are put back into padded rows (``restore_padding``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.spec import InputSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample, EncodedVideo
from packtool.encode.media_spans import sounds_in_order, visual_media
from packtool.errors import DataError
from packtool.rows.sample import MediaKind

NUM_POSITION_ROWS = 4
TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "video": 2}
"""``mm_token_type_ids`` of a medium's placeholder tokens; text is 0."""


def sample_positions(sample: EncodedSample, spec: InputSpec) -> npt.NDArray[Any]:
    """Return a sample's positions, (4, L), rows [text, t, h, w]: int64, or float32 if an Omni model has fractions."""
    text_positions = np.arange(sample.length, dtype=np.int64)
    if not spec.has_mrope or (not sample.images and not sample.videos):
        return np.broadcast_to(text_positions, (NUM_POSITION_ROWS, sample.length))
    positions = np.concatenate([text_positions[None], _model_positions(sample, spec)])
    has_fractions = (positions != positions.round()).any()
    return positions.astype(np.float32 if has_fractions else np.int64)


def _model_positions(sample: EncodedSample, spec: InputSpec) -> npt.NDArray[Any]:
    """Return a sample's positions from the model's ``get_rope_index``, (3, L), rows [t, h, w]."""
    input_ids = torch.from_numpy(sample.input_ids.astype(np.int64)).unsqueeze(0)
    arguments = _grid_arguments(sample, spec)
    is_omni = spec.family.positions == "sound_seconds"
    if is_omni:
        arguments |= _omni_arguments(sample, input_ids, spec)
    else:
        arguments["mm_token_type_ids"] = _token_types(input_ids, spec)
        arguments["second_per_grid_ts"] = torch.tensor([video.seconds_per_grid for video in sample.videos])
    position_ids, _ = spec.meta_model.get_rope_index(input_ids=input_ids, **arguments)  # (3, 1, L)
    positions: npt.NDArray[Any] = position_ids[:, 0].numpy()
    return positions


def _grid_arguments(sample: EncodedSample, spec: InputSpec) -> dict[str, Any]:
    """Return sizes of images and videos as arguments of ``get_rope_index``: int64 (media, 3), None without media."""
    image_grids = [image.grid for image in sample.images]
    video_grids = [video.grid for video in sample.videos]
    if spec.family.videos_as_pictures:
        image_grids, video_grids = [], []
        for medium in visual_media(sample, spec.media_tokens):
            image_grids += medium.frame_grids if isinstance(medium, EncodedVideo) else [medium.grid]
    grids: dict[MediaKind, list[tuple[int, ...]]] = {"image": image_grids, "video": video_grids}
    arguments: dict[str, Any] = {}
    for kind, (_, grid_name) in spec.family.visual_inputs.items():
        arguments[grid_name] = torch.tensor(grids[kind]) if grids[kind] else None
    return arguments


def _token_types(input_ids: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    """Return the type of each token, int32 (1, L): that of the medium it is a placeholder for, or 0 for text."""
    token_types = torch.zeros_like(input_ids, dtype=torch.int32)
    for kind, token_type in TOKEN_TYPES.items():
        if kind in spec.family.visual_inputs:
            is_placeholder = torch.eq(input_ids, spec.pad_ids[kind]).int()
            token_types += is_placeholder * token_type
    return token_types


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


def restore_padding(
    values: Tensor,
    seqlens: Tensor,
    cu_seqlens: Tensor,
    seq_len: int,
    prompt_length: Tensor | None = None,
    *,
    fill: float = 0,
) -> Tensor:
    """Put a model's values of a packed sequence back into one row per document, padded on the right.

    Args:
        values: (1, T, ...), one for each packed token; gradients flow through.
        seqlens: int (B,), tokens of each document, without the padding that follows it in ``values``.
        cu_seqlens: int (B + 1,), starts of the documents in ``values``, padding included.
        seq_len: length L of the restored rows.
        prompt_length: int (B,) or (B, 1), tokens of each document's prompt, at least 1. A row then has only the values
            that predict the tokens after the prompt, which begin at the prompt's last token.
        fill: value of the padding.

    Returns:
        (B, L, ...) in the precision of ``values``.

    Raises:
        ValueError: if ``values`` has several rows, a prompt is empty or longer than its row, or a row is longer than
            ``seq_len``.
    """
    if values.shape[0] != 1:
        raise ValueError(f"expected the values of one packed sequence, (1, T, ...), not {tuple(values.shape)}")
    row_lengths = seqlens.long()  # (B,)
    row_starts = cu_seqlens[:-1].long()  # (B,), packed position of each row's first value
    if prompt_length is not None:
        prompt_lengths = prompt_length.reshape(-1)
        _check_prompts(prompt_lengths, row_lengths)
        row_lengths = (row_lengths - prompt_lengths).clamp(min=0)  # 0 for an empty document, whose prompt has length 1
        row_starts = row_starts + prompt_lengths - 1
    max_length = int(row_lengths.max()) if len(row_lengths) else 0
    if max_length > seq_len:
        raise ValueError(f"seq_len {seq_len} is too short for a row of {max_length}")
    if values.shape[1] == 0:
        return values.new_full((len(row_lengths), seq_len, *values.shape[2:]), fill)
    return _gather_rows(values[0], row_starts, row_lengths, seq_len, fill)


def _gather_rows(values: Tensor, starts: Tensor, lengths: Tensor, seq_len: int, fill: float) -> Tensor:
    """Gather values (T, ...) into rows (B, L, ...) of ``seq_len``, padded with ``fill``.

    Each row gets the ``lengths`` values from the position ``starts`` on; both are (B,).
    """
    column = torch.arange(seq_len, device=values.device)
    is_padding = column >= lengths[:, None]  # (B, L)
    index = (starts[:, None] + column).masked_fill(is_padding, 0)  # (B, L); padding takes any value
    rows = values[index]  # (B, L, ...)
    broadcast_shape = [*is_padding.shape, *[1] * (rows.ndim - 2)]
    return rows.masked_fill(is_padding.view(broadcast_shape), fill)


def _check_prompts(prompt_lengths: Tensor, row_lengths: Tensor) -> None:
    is_empty = prompt_lengths < 1
    is_too_long = prompt_lengths > row_lengths.clamp(min=1)
    if bool((is_empty | is_too_long).any()):
        raise ValueError("a prompt has at least one token, and no more than its row")


def align_sample(sample: EncodedSample, align_to: int) -> EncodedSample:
    """Append padding tokens, without labels, so that the sample's length is a multiple of ``align_to``."""
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
