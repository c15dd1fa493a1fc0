"""Pictures of families whose own transformers processor makes what their model takes.

Each picture is a row of its own for the processor: how many tiles it has then never depends on its neighbours. What it
makes of several rows is what the model's forward takes of a batch, in the order of the pictures, padded to the one with
the most tiles where the family stacks them; the model drops that padding itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from packtool.batch.pixels import one_behind_other
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families.processor import load_processor, process_images, process_video
from packtool.errors import ConfigError, MediaError
from packtool.media.measure import EXPORT_AGAIN, blank_image, load_image
from packtool.media.video import load_video

_BLANK_SIDE = 32
_SIDES = (1024, 512, 256, 128, _BLANK_SIDE)
_processor = lru_cache(maxsize=4)(load_processor)


def load_processed(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """What the model takes of all pictures and videos of some samples, by its names (``Family.processor_inputs``).

    Returns:
        ``pixel_values``, whose shape is the family's own ((tiles, C, H, W), (pictures, tiles, C, H, W), ...), and what
        tells of them; nothing if there is no picture.

    Raises:
        MediaError: naming a file that cannot be read, or whose size is no longer the one that was exported.
    """
    runs = [list(run) for _, run in groupby(samples, key=lambda sample: bool(sample.videos))]
    found = [_frames(run, spec) if run[0].videos else [_pictures(run, spec)] for run in runs]
    media = [each for run in found for each in run if each]
    sides = {tuple(each["pixel_values"].shape[-2:]) for each in media}
    if len(sides) > 1 and any(sample.videos for sample in samples):
        raise ConfigError(
            f"{spec.model}: its processor makes pictures and frames of videos of unlike sizes, {sorted(sides)}, which "
            "one micro-batch cannot hold",
            "Give both the same size in the processor's settings, or train caches with pictures and with videos apart.",
        )
    return one_behind_other(media)


def _pictures(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """What the model takes of the pictures of some samples; nothing if there is none."""
    images = [(image, sample) for sample in samples for image in sample.images]
    if not images:
        return {}
    pictures = [load_image(image.path, image.data, spec.media_policy) for image, _ in images]
    counts, made = _looked_at(pictures, spec)
    for (image, sample), picture, count in zip(images, pictures, counts, strict=True):
        if (*picture.size, count) != (image.width, image.height, image.num_tokens):
            raise _changed(image, sample, f"{picture.size[0]}x{picture.size[1]} pixels in {count} tokens")
    return made


def _frames(samples: Sequence[EncodedSample], spec: InputSpec) -> list[dict[str, Tensor]]:
    """What the model takes of each video of some samples, in the form of pictures."""
    processor = _processor(spec.model)
    pad = str(processor.tokenizer.convert_ids_to_tokens(spec.pad_ids["video"]))
    found = []
    for video, sample in [(video, of) for of in samples for video in of.videos]:
        frames = load_video(
            *(video.path, video.data, video.frames, video.indices, spec.media_policy),
            (video.num_frames, video.height, video.width),
        )
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        processor_text, made = process_video(processor, pixels, video.num_frames, video.fps, video.indices)
        height, width = frames.shape[1:3]
        if (height, width, processor_text.count(pad)) != (video.height, video.width, video.num_tokens):
            raise _changed(video, sample, f"{width}x{height} pixels in {processor_text.count(pad)} tokens")
        found.append({name: made[name] for name in spec.family.processor_inputs if name in made})
    return found


def blank_picture_processed(spec: InputSpec) -> tuple[int, dict[str, Tensor]]:
    """The tokens of a small blank picture, and what the model takes of it, as for ``load_processed``."""
    (count,), made = _looked_at([blank_image(_BLANK_SIDE, _BLANK_SIDE)], spec)
    return count, made


def pictures_processed(spec: InputSpec, num_tokens: int, most: int) -> tuple[int, dict[str, Tensor]]:
    """About so many tokens of large blank pictures, and what the model takes of them, as for ``load_processed``.

    Args:
        most: tokens that there may be.

    Raises:
        ValueError: if the smallest picture has more.
    """
    for side in _SIDES:
        blank = blank_image(side, side)
        (count,), _ = _looked_at([blank], spec)
        if count <= min(num_tokens, most) or (side == _SIDES[-1] and count <= most):
            counts, made = _looked_at([blank] * max(min(round(num_tokens / count), most // count), 1), spec)
            return sum(counts), made
    raise ValueError(f"the smallest picture has more than {most} tokens")


def _looked_at(pictures: Sequence[Any], spec: InputSpec) -> tuple[list[int], dict[str, Tensor]]:
    """The placeholder tokens of each picture, and what the model takes of all."""
    processor = _processor(spec.model)
    texts, made = process_images(processor, [[picture] for picture in pictures])
    pad = str(processor.tokenizer.convert_ids_to_tokens(spec.pad_ids["image"]))
    inputs = {name: made[name] for name in spec.family.processor_inputs if name in made}
    return [text.count(pad) for (text,) in texts], inputs


def _changed(medium: EncodedImage | EncodedVideo, sample: EncodedSample, now: str) -> MediaError:
    kind = "picture" if isinstance(medium, EncodedImage) else "video"
    name = medium.path if medium.path is not None else f"a {kind} of {len(medium.data or b'')} bytes"
    return MediaError(
        f"{name} (row {sample.row} of {sample.source}) has changed since the export: it was "
        f"{medium.width}x{medium.height} pixels in {medium.num_tokens} tokens, now it is {now}",
        f"Put the file back, or {EXPORT_AGAIN}",
    )
