"""Pictures and frames as a processor resizes them, before it makes numbers of them: what a media cache keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from packtool.batch.media_cache import key_of
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import MediaKind
from packtool.media.content import content_state

UNSCALED = {"do_rescale": False, "do_normalize": False}
"""Settings with which a processor resizes and cuts into patches, and leaves the pixels what they are."""


def resized(
    medium: EncodedImage | EncodedVideo,
    sample: EncodedSample,
    spec: InputSpec,
    processor: Any,
    decoded: Callable[[], Mapping[str, Tensor]],
) -> Tensor:
    """The frames of a medium, one of a picture, at the size that the export counted, uint8 (T, 3, H, W).

    Args:
        processor: of its kind.
        decoded: gives its patches and its grid with the settings ``UNSCALED``.

    Raises:
        MediaError: from ``decoded``, where they are not kept.
    """
    cache = spec.media_cache
    assert cache is not None, "asked where there is one"
    key = _key(medium, spec, processor)
    kept = cache.read(key, is_read_again=sample.is_read_again)
    if kept is not None:
        return torch.from_numpy(kept)
    family = spec.family
    patches = decoded()[(family.image_inputs if isinstance(medium, EncodedImage) else family.video_inputs)[0]]
    frames = _frames(patches, medium, processor)
    # Nobody may have changed it between the two looks.
    if key is not None and key == _key(medium, spec, processor):
        cache.keep(key, frames.numpy(), is_read_again=sample.is_read_again)
    return frames


def _key(medium: EncodedImage | EncodedVideo, spec: InputSpec, processor: Any) -> str | None:
    """All that its pixels depend on; None where nothing tells of its content."""
    rights, is_image = spec.media_rights, isinstance(medium, EncodedImage)
    indices = () if isinstance(medium, EncodedImage) else medium.indices
    if isinstance(medium, EncodedVideo) and medium.frames:
        known = [content_state(*medium.frames[number], rights, is_image=True) for number in indices]
        indices = ()
    else:
        known = [content_state(medium.path, medium.data, rights, is_image=is_image)]
    if None in known:
        return None
    made_by = type(processor).__name__, str(processor.resample), processor.patch_size
    return key_of(_kind(medium), *made_by, known, indices, medium.grid)


def _kind(medium: EncodedImage | EncodedVideo) -> MediaKind:
    return "image" if isinstance(medium, EncodedImage) else "video"


def _frames(patches: Tensor, medium: EncodedImage | EncodedVideo, processor: Any) -> Tensor:
    """Frames (T, 3, H, W) put together from patches (T / t * H / p * W / p, 3 * t * p * p), which go token by token."""
    side, merge, num = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    times, rows, columns = medium.grid
    tokens = patches.to(torch.uint8).view(times, rows // merge, columns // merge, merge, merge, 3, num, side, side)
    frames = tokens.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(times * num, 3, rows * side, columns * side)
    # A picture fills its patches with copies.
    return frames[:1].contiguous() if isinstance(medium, EncodedImage) else frames
