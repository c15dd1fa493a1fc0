"""Rotary positions of a sample: its model's own, computed for each sample alone.

M-RoPE models want four rows, [text, t, h, w]. Given three, transformers takes the text row for granted and tells packed
samples apart wrongly (a leak that was measured at 2.65 in logits). For a sample of text all four are 0, 1, 2, ...::

    tokens   H  i  <s> P  P  P  P  <e> ?        P: the four tokens of one picture, two rows of two
    text     0  1  2   3  4  5  6  7   8
    t        0  1  2   3  3  3  3  5   6
    h        0  1  2   3  3  4  4  5   6
    w        0  1  2   3  4  3  4  5   6
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaKind
from packtool.encode.placed_media import sounds_in_order
from packtool.errors import DataError

NUM_POSITION_ROWS = 4
TOKEN_TYPES: dict[MediaKind, int] = {"image": 1, "video": 2}
"""``mm_token_type_ids`` of a medium's placeholder tokens; text is 0."""


def sample_positions(sample: EncodedSample, spec: InputSpec) -> npt.NDArray[Any]:
    """Rows [text, t, h, w] of one sample, (4, L): int64, or float32 where an Omni model's seconds are fractions.

    Rows 1 to 3 of a sample with pictures or videos come from the model's ``get_rope_index``.

    Raises:
        DataError: for videos with and without a sound track in one sample, which Omni models cannot place.
    """
    text = np.arange(sample.length, dtype=np.int64)
    if not spec.has_mrope or (not sample.images and not sample.videos):
        return np.broadcast_to(text, (NUM_POSITION_ROWS, sample.length))
    input_ids = torch.from_numpy(sample.input_ids.astype(np.int64)).unsqueeze(0)
    own: dict[MediaKind, list[tuple[int, ...]]] = {"image": [image.grid for image in sample.images]}
    if spec.family.videos_as_pictures:
        own["image"] += [grid for video in sample.videos for grid in video.frame_grids]
    else:
        own["video"] = [video.grid for video in sample.videos]
    inputs = spec.family.visual_inputs
    grids = {places: torch.tensor(own[kind]) if own[kind] else None for kind, (_, places) in inputs.items()}
    find = spec.rope_index
    if spec.family.positions == "sound_seconds":
        rope, _ = find(input_ids=input_ids, **grids, **_omni_settings(sample, input_ids, spec))
    else:
        pads = [(spec.pad_ids[kind], number) for kind, number in TOKEN_TYPES.items() if kind in inputs]
        types = sum(torch.eq(input_ids, pad).int() * number for pad, number in pads)
        seconds = torch.tensor([video.seconds_per_grid for video in sample.videos])
        rope, _ = find(input_ids=input_ids, mm_token_type_ids=types, second_per_grid_ts=seconds, **grids)
    rows = rope[:, 0].numpy()
    if np.issubdtype(rows.dtype, np.floating) and (rows == rows.round()).all():
        rows = rows.astype(np.int64)
    return np.concatenate([text[None], rows]).astype(rows.dtype)


def _omni_settings(sample: EncodedSample, input_ids: torch.Tensor, spec: InputSpec) -> dict[str, Any]:
    with_track = [video.audio is not None for video in sample.videos]
    if any(with_track) and not all(with_track):
        raise DataError(
            f"row {sample.row} of {sample.source} has videos with and without a sound track, whose positions an Omni "
            "model cannot tell",
            "Export without --use-audio-in-video, or leave that row out.",
        )
    sounds = [sound.num_features for sound, _, _ in sounds_in_order(sample, spec.media_tokens)]
    return {
        "attention_mask": torch.ones_like(input_ids),
        "use_audio_in_video": any(with_track),
        "audio_seqlens": torch.tensor(sounds) if sounds else None,
        "second_per_grids": torch.tensor([video.seconds_per_grid for video in sample.videos]),
    }
