"""Regions that a sample's text describes: points, boxes and polygons, in the coordinates of the model's family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packtool.encode.boxes import written_size
from packtool.encode.encoded import EncodedImage
from packtool.encode.families import ImageLimits
from packtool.encode.families.record import INTERNVL_TOKENS, QWEN_TOKENS, BoxForm, BoxTokens

Corner = tuple[float, float]
PICTURE = "\ufffc"
"""Placeholder of an image in a sample's text."""
_NUMBER = r"-?\d{1,6}(?:\.\d+)?"
_LIST = rf"\[\s*{_NUMBER}(?:\s*,\s*{_NUMBER})+\s*\]"


def _box_pattern(tokens: BoxTokens, group: str) -> str:
    """Return a pattern of a box between tokens, optionally after its name; groups ``group`` and ``group_name``."""
    (name, name_end), (box, box_end) = ([*map(re.escape, pair)] for pair in (tokens.name, tokens.box))
    named = rf"{name}(?P<{group}_name>(?:(?!{name_end}).){{0,1000}}){name_end}\s*"
    return rf"(?:{named})?{box}(?P<{group}>{tokens.box_pattern}){box_end}"


_REGION = re.compile(
    rf"{_box_pattern(QWEN_TOKENS, 'pairs')}|{_box_pattern(INTERNVL_TOKENS, 'lists')}"
    # JSON names its numbers, and one list may hold several boxes.
    rf'|"\w+_2d"\s*:\s*(?P<json>{_LIST}|\[\s*{_LIST}(?:\s*,\s*{_LIST})*\s*\])'
    # In other text a list of four or more numbers is a box; a point must follow a quote, a word or "=".
    rf"|(?P<list>{_LIST})",
    re.DOTALL,
)
_STRING = r'"(?:label|text_content)"\s*:\s*(?P<label>"(?:[^"\\]|\\.){0,1000}")'
_LABEL_AFTER, _LABEL_BEFORE = re.compile(rf"\s*,\s*{_STRING}"), re.compile(rf"{_STRING}\s*,\s*$")
_MAX_LABEL_LENGTH = 1100
_NUMBER_PATTERN = re.compile(_NUMBER)
_NAME_TOKENS = re.compile("|".join(map(re.escape, (*QWEN_TOKENS.name, *INTERNVL_TOKENS.name))))


@dataclass(frozen=True)
class ShownRegion:
    """A point, box or polygon to draw on an image.

    Args:
        corners: (x, y) of each corner, as fractions of the image's width and height.
        image: number of the image in the sample.
        is_certain: the sample has no other image that the text could mean.
    """

    name: str
    corners: tuple[Corner, ...]
    image: int
    is_certain: bool

    @property
    def is_inside(self) -> bool:
        return all(0 <= coordinate <= 1 for corner in self.corners for coordinate in corner)

    def description(self, width: int, height: int) -> str:
        """Return name, kind and corners as text, in pixels of an image of this size."""
        kind = {1: "point", 2: "box"}.get(len(self.corners), "polygon")
        corners = " ".join(f"{x * width:.0f},{y * height:.0f}" for x, y in self.corners)
        outside = "" if self.is_inside else ", outside the image"
        doubt = "" if self.is_certain else ", unless it belongs to another image"
        return f"{self.name + ', ' if self.name else ''}{kind} {corners} of image {self.image}{outside}{doubt}"


def regions_of(
    text: str, images: Sequence[EncodedImage], form: BoxForm | None, limits: ImageLimits | None, is_complete: bool
) -> list[ShownRegion]:
    """Find the points, boxes and polygons that a sample's text describes, with the image of each.

    A region may belong to any image before it in the text, or to all if none is before it: it is returned for each.

    Args:
        text: text of the sample, with ``PICTURE`` in place of each image.
        form: notation of boxes in the model's family; None if it has none.
        limits: on the size of images, for notations in pixels of the resized image.
        is_complete: False if the sample was truncated, so that images may be missing.
    """
    if form is None or not images:
        return []
    is_only_image = is_complete and len(images) == 1
    regions: list[ShownRegion] = []
    for text_region in _read_regions(text):
        num_images_before = text.count(PICTURE, 0, text_region.start)
        candidates = images[:num_images_before] if num_images_before else images
        for number, image in enumerate(candidates):
            width, height = written_size(form, image, limits)  # the unit of the coordinates in the text
            fractions = tuple((x / width, y / height) for x, y in text_region.corners)
            region = ShownRegion(text_region.name, fractions, image=number, is_certain=is_only_image)
            # Numbers without special tokens or JSON around them may be something else than a region.
            is_plausible = region.is_inside and _is_ordered(text_region.corners)
            if text_region.is_marked or is_plausible:
                regions.append(region)
    return regions


def _is_ordered(corners: Sequence[Corner]) -> bool:
    """Return False for a box (two corners) that does not begin with its upper left corner."""
    if len(corners) != 2:
        return True
    (left, top), (right, bottom) = corners
    return left <= right and top <= bottom


class _TextRegion(NamedTuple):
    """A region as written at ``start`` in a text; ``is_marked``: special tokens or JSON show that it is a region."""

    start: int
    name: str
    corners: list[Corner]
    is_marked: bool


def _read_regions(text: str) -> Iterator[_TextRegion]:
    """Yield the regions in a text, in order."""
    for match in _REGION.finditer(text):
        is_marked = match["list"] is None
        name = _region_name(text, match)
        for box in _boxes(match):
            coordinates = [float(number) for number in _NUMBER_PATTERN.findall(box)]
            if len(coordinates) % 2 != 0:
                continue
            if len(coordinates) == 2 and not is_marked and not _is_attached(text, match.start()):
                continue  # two numbers that are not a point
            corners = list(zip(coordinates[::2], coordinates[1::2], strict=True))
            yield _TextRegion(match.start(), name, corners, is_marked)


def _boxes(match: re.Match[str]) -> list[str]:
    """Return the texts of the coordinates in a match; JSON and InternVL's tokens may contain several boxes."""
    several_boxes = match["json"] or match["lists"]
    if several_boxes:
        return re.findall(r"\[[^\[\]]*\]", several_boxes)
    return [match["pairs"] or match["list"] or ""]


def _is_attached(text: str, start: int) -> bool:
    """Return whether a quote, a letter or "=" is before a position, as often before the coordinates of a point."""
    previous = text[max(start - 1, 0) : start]
    return previous.isalnum() or previous in ("'", '"', "=")


def _region_name(text: str, match: re.Match[str]) -> str:
    """Return the name of a region in special tokens or JSON, or ""."""
    name = match["pairs_name"] or match["lists_name"]
    is_plain_list = match["list"] is not None
    if not name and not is_plain_list:
        name = _json_label(text, match)
    return _NAME_TOKENS.sub("", name or "").strip()


def _json_label(text: str, match: re.Match[str]) -> str:
    """Return the label in the JSON after or before a region, or ""."""
    before = text[max(match.start() - _MAX_LABEL_LENGTH, 0) : match.start()]
    label = _LABEL_AFTER.match(text, match.end()) or _LABEL_BEFORE.search(before)
    if label is None:
        return ""
    try:
        return str(json.loads(label["label"], strict=False))
    except ValueError:  # not valid JSON
        return label["label"][1:-1]
