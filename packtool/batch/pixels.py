"""Pictures and videos become patches, through the model's own processors at the cache's limits.

With a media cache they do so in two steps, of which the first, decoding and resizing, is done once for all epochs. The
second one is the processor's too, and so are the numbers that come out.

Pictures and frames as a processor resizes them, before it makes numbers of them: what a media cache keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoVideoProcessor

from packtool.batch.media_cache import key_of
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import MediaKind
from packtool.encode.families.qwen_vl import Bounds, image_bounds, video_bounds
from packtool.errors import MediaError
from packtool.media.content import content_state
from packtool.media.measure import EXPORT_AGAIN, load_image
from packtool.media.video import load_video

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
    policy, is_image = spec.media_policy, isinstance(medium, EncodedImage)
    indices = () if isinstance(medium, EncodedImage) else medium.indices
    if isinstance(medium, EncodedVideo) and medium.frames:
        known = [content_state(*medium.frames[number], policy, is_image=True) for number in indices]
        indices = ()
    else:
        known = [content_state(medium.path, medium.data, policy, is_image=is_image)]
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


_ALL_FRAMES = {"do_sample_frames": False}
_UNCAPPED = {"cap_pixels_per_frame": False}
"""Setting of processors that are given bounds: those that the export counted by, and no others."""
_AS_TENSORS = {"input_data_format": "channels_first"}


def load_pixels(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Patches of all pictures and videos of some samples, by the model's names, in order of placeholder tokens.

    Returns:
        patches float32 (patches, patch_dim) and grids int64 (media, 3) of pictures and of videos, by the names that
        the family's record has for them; what there is none of is left out.

    Raises:
        MediaError: naming a file that cannot be read, or whose size is no longer the one that was exported.
    """
    if not spec.family.videos_as_pictures:
        return _of_samples(samples, spec)
    runs = [list(run) for _, run in groupby(samples, key=lambda sample: bool(sample.videos))]
    return one_behind_other([_of_samples(run, spec) for run in runs])


def one_behind_other(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a tower takes of some media, and of others behind them, and so on; nothing of those that have none.

    The tensors have the shapes that ``load_pixels`` or ``load_processed`` says.
    """
    there = [media for media in found if media]
    if len(there) < 2:  # as they are: most micro-batches, which need no copy
        return dict(there[0]) if there else {}
    return {name: torch.cat([media[name] for media in there]) for name in there[0]}


def _of_samples(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    images = [(image, sample) for sample in samples for image in sample.images]
    videos = [(video, sample) for sample in samples for video in sample.videos]
    return (_pictures(images, spec) if images else {}) | (_videos(videos, spec) if videos else {})


def _pictures(images: Sequence[tuple[EncodedImage, EncodedSample]], spec: InputSpec) -> dict[str, Tensor]:
    if spec.media_cache is None:
        return _decoded_pictures(images, spec)
    processor = _image_processor(spec.model)
    frames = [
        resized(
            *(image, sample, spec, processor),
            partial(_decoded_pictures, [(image, sample)], spec, **UNSCALED),
        )
        for image, sample in images
    ]
    made = processor(images=[frame[0] for frame in frames], do_resize=False, return_tensors="pt", **_AS_TENSORS)
    return {name: made[name] for name in spec.family.visual_inputs["image"]}


def _decoded_pictures(
    images: Sequence[tuple[EncodedImage, EncodedSample]], spec: InputSpec, **settings: bool
) -> dict[str, Tensor]:
    """Patches and grids of pictures, read and decoded.

    Args:
        settings: of the processor.
    """
    assert spec.limits.image is not None, "a sample with pictures for a model without limits"
    pictures = [load_image(image.path, image.data, spec.media_policy) for image, _ in images]
    pixels, places = spec.family.visual_inputs["image"]
    own = spec.limits.image
    bounds = (
        [(own.min_pixels, own.max_pixels)] * len(images)
        if spec.family.keeps_bounds
        else [image_bounds(image.height, image.width, image.grid, own) for image, _ in images]
    )
    process = partial(_image_processor(spec.model), return_tensors="pt", **settings)
    patches, grids = _of_bounds(pictures, bounds, process, pixels, places)
    for (image, sample), picture, grid in zip(images, pictures, grids.tolist(), strict=True):
        if (image.width, image.height) != picture.size or image.grid != tuple(grid):
            raise _changed(image, sample, f"{picture.width}x{picture.height} pixels in {tuple(grid)}")
    return {pixels: patches, places: grids}


def _of_bounds(
    pictures: Sequence[Any], bounds: Sequence[Bounds], process: Callable[..., Any], pixels: str, places: str
) -> tuple[Tensor, Tensor]:
    """Patches and grids of pictures, in their order: those of the same bounds are made at once."""
    patches: list[Tensor | None] = [None] * len(pictures)
    grids: list[Tensor | None] = [None] * len(pictures)
    for each in dict.fromkeys(bounds):
        own = [number for number, of in enumerate(bounds) if of == each]
        size = dict(zip(("shortest_edge", "longest_edge"), each, strict=True))
        made = process(images=[pictures[number] for number in own], size=size)
        if len(own) == len(pictures):
            return made[pixels], made[places]
        parts = made[pixels].split(made[places].prod(dim=1).tolist())
        for number, part, grid in zip(own, parts, made[places], strict=True):
            patches[number], grids[number] = part, grid
    return torch.cat([part for part in patches if part is not None]), torch.stack([g for g in grids if g is not None])


def _videos(videos: Sequence[tuple[EncodedVideo, EncodedSample]], spec: InputSpec) -> dict[str, Tensor]:
    # One at a time: a processor would stack videos of one size, and each has bounds of its own.
    made = [_video(video, sample, spec) for video, sample in videos]
    pixels, grids = (torch.cat([each[name] for each in made]) for name in spec.family.video_inputs)
    if spec.family.videos_as_pictures:
        grids = torch.tensor([grid for video, _ in videos for grid in video.frame_grids])
        return dict(zip(spec.family.image_inputs, (pixels, grids), strict=True))
    return dict(zip(spec.family.video_inputs, (pixels, grids), strict=True))


def _video(video: EncodedVideo, sample: EncodedSample, spec: InputSpec) -> dict[str, Tensor]:
    if spec.media_cache is None:
        return _decoded_video(video, sample, spec)
    processor = _video_processor(spec.model)
    frames = resized(video, sample, spec, processor, partial(_decoded_video, video, sample, spec, **UNSCALED))
    made: dict[str, Tensor] = processor(
        videos=[frames], do_resize=False, return_tensors="pt", **_AS_TENSORS, **_ALL_FRAMES
    )
    return made


def _decoded_video(video: EncodedVideo, sample: EncodedSample, spec: InputSpec, **settings: Any) -> dict[str, Tensor]:
    """Patches and grid of a video, read and decoded; as ``_decoded_pictures``."""
    frames = load_video(
        *(video.path, video.data, video.frames, video.indices, spec.media_policy),
        (video.num_frames, video.height, video.width),
    )
    if not spec.family.keeps_bounds:
        assert spec.limits.video is not None, "a sample with videos for a model without limits"
        least, most = video_bounds(video.height, video.width, len(frames), video.grid, spec.limits.video)
        settings |= {"size": {"shortest_edge": least, "longest_edge": most}, **_UNCAPPED}
    made: dict[str, Tensor] = _video_processor(spec.model)(
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        return_tensors="pt",
        **_ALL_FRAMES,
        **settings,
    )
    grid = tuple(made[spec.family.video_inputs[1]][0].tolist())
    height, width = frames.shape[1:3]
    if (height, width, grid) != (video.height, video.width, video.grid):
        raise _changed(video, sample, f"{width}x{height} pixels in {grid}")
    return made


def _changed(medium: EncodedImage | EncodedVideo, sample: EncodedSample, now: str) -> MediaError:
    kind = "picture" if isinstance(medium, EncodedImage) else "video"
    name = medium.path if medium.path is not None else f"a {kind} of {len(medium.data or b'')} bytes"
    return MediaError(
        f"{name} (row {sample.row} of {sample.source}) has changed since the export: it was "
        f"{medium.width}x{medium.height} pixels in patches of {medium.grid}, now it is {now}",
        f"Put the file back, or {EXPORT_AGAIN}",
    )


@lru_cache(maxsize=4)
def _image_processor(model: str) -> Any:
    auto: Any = AutoImageProcessor
    return auto.from_pretrained(model)


@lru_cache(maxsize=4)
def _video_processor(model: str) -> Any:
    auto: Any = AutoVideoProcessor
    return auto.from_pretrained(model)
