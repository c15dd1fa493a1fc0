"""Loading of samples' media as tower inputs: patches of images and videos, mel frames of audio.

They come from the model's own processors, at the limits of the cache. With a media cache pictures and videos take two
steps: decoding and resizing, done once for all epochs, and the processor's second half; the numbers are the same.

In families whose own transformers processor makes all inputs of pictures, each picture is a row of its own for the
processor: its number of tiles then does not depend on its neighbours. For several rows it returns what the model's
forward takes for a batch, in the order of the pictures, padded to the one with the most tiles where the family stacks
them; the model drops that padding itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoVideoProcessor
from transformers.image_processing_backends import TorchvisionBackend

from packtool.batch.media_cache import key_of
from packtool.batch.spec import InputSpec
from packtool.constants import CUT_PICTURE, TILE_VIDEO, UNCUT_PICTURE
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, media_fields
from packtool.encode.families.processor import load_processor, process_images, process_video
from packtool.encode.families.qwen_vl import Bounds, image_bounds, video_bounds
from packtool.encode.families.record import AudioLimits
from packtool.encode.media_spans import sounds_in_order, visual_media
from packtool.errors import ConfigError, MediaError
from packtool.media.audio import load_audio
from packtool.media.files import content_state
from packtool.media.measure import EXPORT_AGAIN, blank_image, load_image
from packtool.media.video import load_video
from packtool.rows.sample import MediaKind

_UNSCALED = {"do_rescale": False, "do_normalize": False}
"""Settings with which a processor resizes and cuts into patches, and does not change pixels."""
_RESIZED = {"do_resize": False, "return_tensors": "pt", "input_data_format": "channels_first"}
"""Settings for frames that have their final size."""
_ALL_FRAMES = {"do_sample_frames": False}
COMPRESSION_MASK = "video_compression_mask"
"""Input of VideoLLaMA 3: which features of videos have tokens; in batches with videos, of all media."""
_BLANK_SIDE = 32
_SIDES = (1024, 512, 256, 128, _BLANK_SIDE)


@lru_cache(maxsize=4)
def _processor(model: str) -> Any:
    processor = load_processor(model)
    skip_pixel_copies(processor.image_processor)
    return processor


Images = Sequence[tuple[EncodedImage, EncodedSample]]


def load_media(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Load the towers' inputs for some samples, as for ``load_pixels`` and ``load_sounds``, or ``load_processed``.

    A MediaError names a file that is unreadable, or has changed since the export.
    """
    if spec.family.processor_inputs:
        return load_processed(samples, spec)
    media = load_pixels(samples, spec)
    return media | load_sounds(samples, spec) if spec.has_audio else media


def load_pixels(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Load patches, float32 (patches, patch_dim), and grids, int64 (media, 3), of all images and videos in token order.

    Returned by the names in the family's record.
    """
    runs = _runs(samples, spec) if spec.family.videos_as_pictures else [samples]
    return _concatenated([_patches(run, spec) for run in runs])


def _runs(samples: Sequence[EncodedSample], spec: InputSpec) -> list[list[EncodedSample]]:
    """Group consecutive samples into runs that all have videos or all have none; samples with both kinds are split."""
    single_kinds = [single_kind for sample in samples for single_kind in _split_by_kind(sample, spec)]
    return [list(run) for _, run in groupby(single_kinds, key=lambda sample: bool(sample.videos))]


def _concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the parts' tensors by name, ignoring empty parts; a single part is not copied."""
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return dict(parts[0]) if parts else {}
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _patches(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Load the patches and grids of samples' images and videos, by the names in the family's record."""
    inputs: dict[str, Tensor] = {}
    images = [(image, sample) for sample in samples for image in sample.images]
    if images:
        inputs |= _image_patches(images, spec)
    if any(sample.videos for sample in samples):
        inputs |= _patches_of_videos(samples, spec)
    return inputs


def _patches_of_videos(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Load the patches and grids of samples' videos, at least one."""
    videos = [(video, sample) for sample in samples for video in sample.videos]
    # One at a time: a processor would stack videos of one size, and each video has its own bounds.
    inputs_of_videos = [_video_patches(video, sample, spec) for video, sample in videos]
    inputs = {name: torch.cat([each[name] for each in inputs_of_videos]) for name in spec.family.video_inputs}
    if not spec.family.videos_as_pictures:
        return inputs
    # The model takes each time step of a video as an image, under the names of the inputs of images.
    video_pixels_name, _ = spec.family.video_inputs
    image_pixels_name, image_grids_name = spec.family.image_inputs
    step_grids = [grid for video, _ in videos for grid in video.frame_grids]
    return {image_pixels_name: inputs[video_pixels_name], image_grids_name: torch.tensor(step_grids)}


def _image_patches(images: Images, spec: InputSpec) -> dict[str, Tensor]:
    if spec.media_cache is None:
        return _decoded_images(images, spec)
    processor = _load(AutoImageProcessor, spec.model)
    pictures: list[Tensor] = []  # uint8 (3, H, W) each
    for image, sample in images:
        decode = partial(_decoded_images, [(image, sample)], spec, **_UNSCALED)
        frames = _resized(image, sample, spec, processor, decode)  # (1, 3, H, W)
        pictures.append(frames[0])
    outputs = processor(images=pictures, **_RESIZED)
    return {name: outputs[name] for name in spec.family.image_inputs}


def _decoded_images(images: Images, spec: InputSpec, **settings: bool) -> dict[str, Tensor]:
    """Read and decode images; return their patches and grids, made with these settings of the processor."""
    limits = spec.limits.image
    assert limits is not None, "a sample with pictures for a model without limits"
    pictures = [load_image(image.path, image.data, spec.media_policy) for image, _ in images]
    if spec.family.keeps_bounds:
        bounds = [(limits.min_pixels, limits.max_pixels)] * len(images)
    else:
        bounds = [image_bounds(image.height, image.width, image.grid, limits) for image, _ in images]
    process = partial(_load(AutoImageProcessor, spec.model), return_tensors="pt", **settings)
    patches, grids = _process_within_bounds(pictures, bounds, process, spec.family.image_inputs)
    for (image, sample), picture, grid in zip(images, pictures, grids.tolist(), strict=True):
        if (image.width, image.height) != picture.size or image.grid != tuple(grid):
            size = f"{picture.width}x{picture.height} pixels in {tuple(grid)}"
            raise _changed(image, sample, f"patches of {image.grid}", size)
    return dict(zip(spec.family.image_inputs, (patches, grids), strict=True))


def _process_within_bounds(
    pictures: Sequence[Any], bounds: Sequence[Bounds], process: Callable[..., Any], names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Return patches and grids of images in their order; images with equal pixel bounds are processed in one call."""
    pixels_name, grids_name = names
    numbers_by_bounds: dict[Bounds, list[int]] = {}
    for number, bounds_of_picture in enumerate(bounds):
        numbers_by_bounds.setdefault(bounds_of_picture, []).append(number)
    groups = []
    for (min_pixels, max_pixels), numbers in numbers_by_bounds.items():
        size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}  # the processor's names for these bounds
        outputs = process(images=[pictures[number] for number in numbers], size=size)
        groups.append((outputs[pixels_name], outputs[grids_name]))
    return groups[0] if len(groups) == 1 else _join_in_order(groups, list(chain(*numbers_by_bounds.values())))


def _join_in_order(groups: Sequence[tuple[Tensor, Tensor]], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Join patches and grids of groups of images; the result is in the order of the images' ``numbers``."""
    patches: list[Tensor] = []  # of each image
    for group_patches, group_grids in groups:
        num_patches = group_grids.prod(dim=1).tolist()  # t * h * w of each image
        patches += torch.split(group_patches, num_patches)
    grids = torch.cat([group_grids for _, group_grids in groups])
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    return torch.cat([patches[index] for index in order]), grids[order]


def _video_patches(video: EncodedVideo, sample: EncodedSample, spec: InputSpec) -> dict[str, Tensor]:
    if spec.media_cache is None:
        return _decoded_video(video, sample, spec)
    processor = _load(AutoVideoProcessor, spec.model)
    frames = _resized(video, sample, spec, processor, partial(_decoded_video, video, sample, spec, **_UNSCALED))
    return processor(videos=[frames], **_RESIZED, **_ALL_FRAMES)


def _decoded_video(video: EncodedVideo, sample: EncodedSample, spec: InputSpec, **settings: Any) -> dict[str, Tensor]:
    """Read and decode a video; return its patches and grid, made with these settings of the processor."""
    frames = _load_frames(video, spec)
    if not spec.family.keeps_bounds:
        assert spec.limits.video is not None, "a sample with videos for a model without limits"
        shortest, longest = video_bounds(video.height, video.width, len(frames), video.grid, spec.limits.video)
        # The bounds that the export counted with, and no others.
        settings |= {"size": {"shortest_edge": shortest, "longest_edge": longest}, "cap_pixels_per_frame": False}
    process, pixels = _load(AutoVideoProcessor, spec.model), torch.from_numpy(frames).permute(0, 3, 1, 2)
    made: dict[str, Tensor] = process(videos=[pixels], return_tensors="pt", **_ALL_FRAMES, **settings)
    grid = tuple(made[spec.family.video_inputs[1]][0].tolist())
    height, width = frames.shape[1:3]
    if (height, width, grid) != (video.height, video.width, video.grid):
        raise _changed(video, sample, f"patches of {video.grid}", f"{width}x{height} pixels in {grid}")
    return made


def _load_frames(video: EncodedVideo, spec: InputSpec) -> npt.NDArray[np.uint8]:
    """Frames (T, H, W, 3)."""
    shape = (video.num_frames, video.height, video.width)
    return load_video(video.path, video.data, video.frames, video.indices, spec.media_policy, shape)


def _resized(
    medium: EncodedImage | EncodedVideo,
    sample: EncodedSample,
    spec: InputSpec,
    processor: Any,
    decode: Callable[[], Mapping[str, Tensor]],
) -> Tensor:
    """Return a medium's frames at its exported size, uint8 (T, 3, H, W), T = 1 for an image, using the media cache.

    Args:
        processor: transformers' processor for this kind of media.
        decode: reads and decodes the medium; returns its patches, with pixel values 0 to 255, and grid.
    """
    cache = spec.media_cache
    assert cache is not None, "the caller checked that there is a media cache"
    key = _cache_key(medium, spec, processor)  # None if the medium cannot be cached
    cached_frames = cache.read(key, is_read_again=sample.is_read_again)
    if cached_frames is not None:
        return torch.from_numpy(cached_frames)
    is_image = isinstance(medium, EncodedImage)
    pixels_name, _grids_name = spec.family.image_inputs if is_image else spec.family.video_inputs
    patches = decode()[pixels_name]
    frames = _frames_of_patches(patches, medium, processor)
    # If the file changed while it was decoded, its key has changed too, and the frames are not stored.
    if key is not None and key == _cache_key(medium, spec, processor):
        cache.store(key, frames.numpy(), is_read_again=sample.is_read_again)
    return frames


def _cache_key(medium: EncodedImage | EncodedVideo, spec: InputSpec, processor: Any) -> str | None:
    """Return the cache key of everything that determines a medium's pixels; None if its content is unidentifiable."""
    policy = spec.media_policy
    is_image = isinstance(medium, EncodedImage)
    indices: Sequence[int] = ()  # of the frames that are read from a video file
    if isinstance(medium, EncodedVideo) and medium.frames:  # listed as image files
        states = [content_state(*frame, policy, is_image=True) for frame in medium.frames]
    else:
        states = [content_state(medium.path, medium.data, policy, is_image=is_image)]
        if isinstance(medium, EncodedVideo):
            indices = medium.indices
    if None in states:
        return None
    kind: MediaKind = "image" if is_image else "video"
    made_by = type(processor).__name__, str(processor.resample), processor.patch_size
    return key_of(kind, *made_by, states, indices, medium.grid)


def _frames_of_patches(patches: Tensor, medium: EncodedImage | EncodedVideo, processor: Any) -> Tensor:
    """Restore frames (T, 3, H, W) from patches (T / t * H / p * W / p, 3 * t * p * p) in token order."""
    side = processor.patch_size
    merge = processor.merge_size  # a token has merge x merge patches
    num_frames = processor.temporal_patch_size  # of a patch
    times, rows, columns = medium.grid
    token_rows, token_columns = rows // merge, columns // merge
    pixels = patches.to(torch.uint8)
    tokens = pixels.view(times, token_rows, token_columns, merge, merge, 3, num_frames, side, side)
    # To (time, frame of a patch, color, token row, patch row, pixel row, token column, patch column, pixel column).
    frames = tokens.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(times * num_frames, 3, rows * side, columns * side)
    # A picture's patches have copies of it as further frames.
    return frames[:1].contiguous() if isinstance(medium, EncodedImage) else frames


def load_processed(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Load the inputs of images and videos for a family whose own transformers processor makes them.

    Return the tensors of ``Family.processor_inputs`` by name, in shapes of the family's own, such as (tiles, C, H, W);
    empty without images and videos.
    """
    if "batch_num_images" in spec.family.processor_inputs:
        return _processed_tiles(samples, spec)
    inputs: list[dict[str, Tensor]] = []  # one for each video, and one for all images between two videos
    for run in _runs(samples, spec):
        if run[0].videos:  # then every sample of the run has videos, and none has images
            inputs += [_processed_video(video, sample, spec) for sample in run for video in sample.videos]
        else:
            inputs.append(_processed_images(_images(run), spec))
    inputs = [each for each in inputs if each]
    if any("target_sizes" in each for each in inputs):  # patches in one long row (1, C, patch side, N)
        pixels = torch.cat([each["pixel_values"] for each in inputs], dim=-1)
        return {"pixel_values": pixels, "target_sizes": torch.cat([each["target_sizes"] for each in inputs])}
    if spec.family.videos_as_pictures and "pixel_attention_mask" in spec.family.processor_inputs:
        inputs = list(map(_without_missing_tiles, inputs))
    if any(COMPRESSION_MASK in each for each in inputs):
        inputs = [{COMPRESSION_MASK: _full_mask(each)} | each for each in inputs]
    inputs = _padded_patches(inputs)
    _check_sizes([each["pixel_values"] for each in inputs], spec)
    return _concatenated(inputs)


def _full_mask(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the compression mask of pictures: all of their features have tokens."""
    num_features = int((inputs["image_grid_thw"].prod(1) // inputs["image_merge_sizes"] ** 2).sum())
    return torch.ones(num_features, dtype=torch.bool)


def _without_missing_tiles(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs (tiles, 1, ...) from (rows, tiles, ...), where zeros fill up rows with fewer tiles."""
    is_tile = inputs["pixel_values"].flatten(2).any(2)  # normalized pixels are never all 0
    return {name: tensor[is_tile].unsqueeze(1) for name, tensor in inputs.items()}


def _processed_tiles(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Load inputs of LLaVA-OneVision: a picture that is alone in its row is cut into tiles, others and frames are not.

    With media that are not cut, ``pixel_values`` has the tiles (N, C, H, W) of all media in order, ``image_sizes`` the
    sizes of cut pictures, and ``tiles``, int64 (media, 2), the number of tiles of each medium and its form, such as
    ``CUT_PICTURE``.
    """
    media: list[tuple[EncodedImage | EncodedVideo, EncodedSample]] = []
    for sample in samples:
        media += [(medium, sample) for medium in visual_media(sample, spec.media_tokens)]
    if not any(isinstance(medium, EncodedVideo) or medium.is_uncut for medium, _ in media):
        return _processed_images(_images(samples), spec)
    tiles: list[Tensor] = []  # (n, C, H, W) of each medium
    forms: list[int] = []
    sizes = [torch.zeros(0, 2, dtype=torch.int64)]
    for medium, sample in media:
        if isinstance(medium, EncodedVideo):
            form, inputs = TILE_VIDEO, _processed_video(medium, sample, spec)
        else:
            form = UNCUT_PICTURE if medium.is_uncut else CUT_PICTURE
            # The processor cuts a picture that is alone.
            inputs = _processed_images([(medium, sample)], spec, num_copies=2 if medium.is_uncut else 1)
            sizes += [] if medium.is_uncut else [inputs["image_sizes"]]
        tiles.append(inputs["pixel_values"][0])
        forms.append(form)
    _check_sizes(tiles, spec)
    form_of_media = [(len(each), form) for each, form in zip(tiles, forms, strict=True)]
    return {"pixel_values": torch.cat(tiles), "image_sizes": torch.cat(sizes), "tiles": torch.tensor(form_of_media)}


def _images(samples: Sequence[EncodedSample]) -> Images:
    return [(image, sample) for sample in samples for image in sample.images]


def _check_sizes(pixels: Sequence[Tensor], spec: InputSpec) -> None:
    """Raise ConfigError if complete pictures (..., C, H, W) differ in size; patches are of pictures of any size."""
    sizes = {tuple(each.shape[-2:]) for each in pixels if each.ndim > 3}
    if len(sizes) > 1:
        raise ConfigError(
            f"{spec.model}: its processor makes pictures and frames of videos of unlike sizes, {sorted(sizes)}, which "
            "one micro-batch cannot hold",
            "Give both the same size in the processor's settings, or train caches with pictures and with videos apart.",
        )


def _split_by_kind(sample: EncodedSample, spec: InputSpec) -> list[EncodedSample]:
    """Split a sample with pictures and videos into one sample for each medium, in the order of their tokens."""
    if not (sample.images and sample.videos):
        return [sample]
    media = visual_media(sample, spec.media_tokens)
    return [dataclasses.replace(sample, **media_fields([medium])) for medium in media]


def _padded_patches(inputs: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Pad patches (pictures, N, D), and their positions by -1, to the most patches N; leave other inputs unchanged."""
    if not all("image_position_ids" in each for each in inputs):
        return list(inputs)
    max_patches = max((each["pixel_values"].shape[1] for each in inputs), default=0)
    return [
        {
            name: F.pad(tensor, (0, 0, 0, max_patches - tensor.shape[1]), value=0 if name == "pixel_values" else -1)
            for name, tensor in each.items()
        }
        for each in inputs
    ]


def _processed_images(images: Images, spec: InputSpec, num_copies: int = 1) -> dict[str, Tensor]:
    if not images:
        return {}
    pictures = [load_image(image.path, image.data, spec.media_policy) for image, _ in images]
    counts, made = _process(pictures, spec, num_copies)
    for (image, sample), picture, count in zip(images, pictures, counts, strict=True):
        if (*picture.size, count) != (image.width, image.height, image.num_tokens):
            size = f"{picture.size[0]}x{picture.size[1]} pixels in {count} tokens"
            raise _changed(image, sample, f"{image.num_tokens} tokens", size)
    return made


def _processed_video(video: EncodedVideo, sample: EncodedSample, spec: InputSpec) -> dict[str, Tensor]:
    """Return the inputs of one video, which this family treats as images, by the names of those of images."""
    processor = _processor(spec.model)
    frames = _load_frames(video, spec)
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
    text, outputs = process_video(processor, pixels, video.num_frames, video.fps, video.indices)
    height, width = frames.shape[1:3]
    count = text.count(str(processor.tokenizer.convert_ids_to_tokens(spec.pad_ids["video"])))
    if (height, width, count) != (video.height, video.width, video.num_tokens):
        raise _changed(video, sample, f"{video.num_tokens} tokens", f"{width}x{height} pixels in {count} tokens")
    input_names = spec.family.processor_inputs
    names = dict(zip(spec.family.video_outputs or input_names, input_names, strict=False))
    names[COMPRESSION_MASK] = COMPRESSION_MASK
    return {names[each]: tensor for each, tensor in outputs.items() if each in names}


def _process(pictures: Sequence[Any], spec: InputSpec, num_copies: int = 1) -> tuple[list[int], dict[str, Tensor]]:
    """The number of placeholder tokens of each picture, and the model's inputs for all: rows of equal pictures."""
    processor = _processor(spec.model)
    texts, made = process_images(processor, [[picture] * num_copies for picture in pictures])
    pad = str(processor.tokenizer.convert_ids_to_tokens(spec.pad_ids["image"]))
    inputs = {name: made[name] for name in spec.family.processor_inputs if name in made}
    return [row[0].count(pad) for row in texts], inputs


def _changed(medium: EncodedImage | EncodedVideo, sample: EncodedSample, before: str, now: str) -> MediaError:
    kind = "picture" if isinstance(medium, EncodedImage) else "video"
    name = medium.path if medium.path is not None else f"a {kind} of {len(medium.data or b'')} bytes"
    return MediaError(
        f"{name} (row {sample.row} of {sample.source}) has changed since the export: it was "
        f"{medium.width}x{medium.height} pixels in {before}, now it is {now}",
        f"Put the file back, or {EXPORT_AGAIN}",
    )


def load_sounds(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """Load mel frames of all sounds of some samples, sound tracks included, in the order of their placeholder tokens.

    Return ``input_features`` float32 (sounds, bins, frames) and ``feature_attention_mask`` int64 (sounds, frames), 0 on
    padding; empty if there is no sound.
    """
    features_of_sounds: list[Tensor] = []  # float32 (bins, frames) each
    for sample in samples:
        for sound, path, data in sounds_in_order(sample, spec.media_tokens):
            features_of_sounds.append(_mel_frames(sound, path, data, sample, spec))
    if not features_of_sounds:
        return {}
    max_frames = max(features.shape[1] for features in features_of_sounds)
    num_bins = features_of_sounds[0].shape[0]
    input_features = torch.zeros(len(features_of_sounds), num_bins, max_frames)
    mask = torch.zeros(len(features_of_sounds), max_frames, dtype=torch.int64)
    for i, features in enumerate(features_of_sounds):
        num_frames = features.shape[1]
        input_features[i, :, :num_frames] = features
        mask[i, :num_frames] = 1
    return {"input_features": input_features, "feature_attention_mask": mask}


def _mel_frames(
    sound: EncodedAudio, path: str | None, data: bytes | None, sample: EncodedSample, spec: InputSpec
) -> Tensor:
    """Load one sound, or the sound track in a video's file; return its mel frames, float32 (bins, frames)."""
    limits = spec.limits.audio
    assert limits is not None, "a sample with sound for a model without limits"
    waveform = load_audio(path, data, limits.sampling_rate, sound.num_samples, spec.media_policy)
    extractor = _load(AutoFeatureExtractor, spec.model)
    settings = _padding_settings(extractor, len(waveform), limits)
    settings |= {"return_attention_mask": True, "return_tensors": "pt"}
    outputs = extractor(waveform, sampling_rate=limits.sampling_rate, **settings)
    num_frames = int(outputs["attention_mask"].sum())
    if num_frames != sound.num_features:
        raise MediaError(
            f"{path or 'an embedded sound'} (row {sample.row} of {sample.source}) has changed since the export: "
            f"it had {sound.num_features} mel frames, now it has {num_frames}",
            f"Put the file back, or {EXPORT_AGAIN}",
        )
    return outputs["input_features"][0, :, :num_frames]


def _padding_settings(extractor: Any, num_samples: int, limits: AudioLimits) -> dict[str, Any]:
    """Return the settings with which a feature extractor pads a sound of ``num_samples`` samples of the waveform."""
    if limits.max_features is None:
        return {"padding": True, "truncation": False}
    # The processor would pad to five minutes. Pad by a second instead, which gives the same frames of the sound.
    num_frames = -(-num_samples // extractor.hop_length)  # rounded up
    max_length = min(num_frames * extractor.hop_length + limits.sampling_rate, extractor.n_samples)
    return {"padding": "max_length", "max_length": max_length, "truncation": True}


@lru_cache(maxsize=12)
def _load(auto_class: Any, model: str) -> Any:
    processor = auto_class.from_pretrained(model)
    skip_pixel_copies(processor)
    return processor


def skip_pixel_copies(image_processor: Any) -> None:
    """Make a processor resize RGB pictures in Pillow's pixel order (H, W, 3); its outputs stay bit-identical.

    transformers copies each picture to (3, H, W) first. For photos, this copy takes longer than all other steps of the
    processor together, and torchvision resizes the copy more slowly. Processors that prepare pictures in another way
    are left alone.
    """
    if getattr(type(image_processor), "process_image", None) is not TorchvisionBackend.process_image:
        return
    process_original, resize_original = image_processor.process_image, image_processor.resize

    def process_image(image: Any, *args: Any, **settings: Any) -> Tensor:
        if isinstance(image, Image.Image) and image.mode == "RGB" and settings.get("device") is None:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return process_original(image, *args, **settings)

    def resize(*args: Any, **settings: Any) -> Any:
        resized = resize_original(*args, **settings)  # of Mllama, a picture and its tiles' arrangement
        # The steps after resizing are faster on (3, H, W).
        return resized.contiguous() if isinstance(resized, Tensor) else resized

    image_processor.process_image, image_processor.resize = process_image, resize


def blank_picture(kind: MediaKind, spec: InputSpec) -> dict[str, Tensor]:
    """The smallest picture or video, of one token, as for ``load_pixels``."""
    side = int(spec.config.vision_config.spatial_merge_size)
    pixels, grid = spec.family.visual_inputs[kind]
    return {pixels: torch.zeros(side * side, spec.patch_dim), grid: torch.tensor([(1, side, side)])}


def silence(spec: InputSpec) -> dict[str, Tensor]:
    """The shortest sound, of one token, as for ``load_sounds``."""
    frames = spec.family.mel_frames
    mask = torch.ones(1, frames, dtype=torch.int64)
    return {"input_features": torch.zeros(1, spec.num_mel_bins, frames), "feature_attention_mask": mask}


def blank_processed(spec: InputSpec) -> tuple[int, dict[str, Tensor]]:
    """The number of tokens of a small blank picture, and its inputs as for ``load_processed``."""
    (count,), made = _process([blank_image(_BLANK_SIDE, _BLANK_SIDE)], spec)
    return count, made


def large_processed(spec: InputSpec, num_tokens: int, max_tokens: int) -> tuple[int, dict[str, Tensor]]:
    """Make blank pictures, as large as possible, of about ``num_tokens`` tokens together, and at most ``max_tokens``.

    Return the number of their tokens, and their inputs as for ``load_processed``.
    """
    num_left = num_wanted = min(num_tokens, max_tokens)
    blanks: list[Image.Image] = []
    for side in _SIDES:  # the largest first
        blank = blank_image(2 * side // 3, side)  # the shape of most photos
        (blank_tokens,), _ = _process([blank], spec)
        num_blanks, num_left = divmod(num_left, blank_tokens)
        blanks += [blank] * num_blanks
    smallest, smallest_tokens = blank, blank_tokens
    num_with_another = num_wanted - num_left + smallest_tokens
    is_closer = num_with_another - num_wanted <= num_left
    if (is_closer or not blanks) and num_with_another <= max_tokens:
        blanks.append(smallest)
    if not blanks:
        raise ValueError(f"the smallest picture has more than {max_tokens} tokens")
    counts, inputs = _process(blanks, spec)
    return sum(counts), inputs
