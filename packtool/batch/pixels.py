"""Pictures become ``pixel_values``, through the model's own image processor at the cache's limits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor

from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.errors import DataError
from packtool.media.load import load_image


def load_pixels(samples: Sequence[EncodedSample], spec: InputSpec) -> tuple[Tensor, Tensor] | None:
    """Pixels of all pictures of some samples, in the order of their pads; None when there are none.

    Returns:
        pixel_values float32 (patches, patch_dim) and image_grid_thw int64 (pictures, 3).

    Raises:
        DataError: naming a picture that cannot be read, or whose size is no longer the one that was exported.
    """
    images = [(image, sample) for sample in samples for image in sample.images]
    if not images:
        return None
    assert spec.limits is not None, "a sample with pictures for a model without limits"
    pictures = [load_image(image.path, image.data) for image, _ in images]
    size = {"shortest_edge": spec.limits.min_pixels, "longest_edge": spec.limits.max_pixels}
    made = _image_processor(spec.model)(images=pictures, size=size, return_tensors="pt")
    grids: Tensor = made["image_grid_thw"]
    expected = torch.tensor([image.grid for image, _ in images])
    if not torch.equal(grids, expected):
        first = int((grids != expected).any(dim=1).nonzero()[0])
        raise _changed(*images[first], pictures[first].size, tuple(grids[first].tolist()))
    return made["pixel_values"], grids


def _changed(image: EncodedImage, sample: EncodedSample, size: tuple[int, int], grid: tuple[int, ...]) -> DataError:
    name = image.path if image.path is not None else f"a picture of {len(image.data or b'')} bytes"
    width, height = size
    return DataError(
        f"{name} (row {sample.row} of {sample.source}) has changed since the export: it was "
        f"{image.width}x{image.height} pixels in patches of {image.grid}, now it is {width}x{height} in {grid}",
        "Put the file back, or run packtool export again with --overwrite.",
    )


@lru_cache(maxsize=4)
def _image_processor(model: str) -> Any:
    auto: Any = AutoImageProcessor
    return auto.from_pretrained(model)
