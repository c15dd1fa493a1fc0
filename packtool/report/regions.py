"""Regions that a sample's text describes: points, boxes and polygons, to be drawn on its images.

Their numbers are interpreted as the model's family defines them, so a box that was scaled wrongly in the rows is drawn
in the wrong place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packtool.encode.boxes import written_size
from packtool.encode.encoded import EncodedImage
from packtool.encode.families import ImageLimits
from packtool.encode.families.record import INTERNVL_TOKENS, QWEN_TOKENS, BoxForm, BoxTokens

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
        name: label in the text, or "".
        corners: (x, y) of each corner, as fractions of the image's width and height.
        image: number of the image in the sample.
        is_certain: True if the sample has no other image that the text could mean.
    """

    name: str
    corners: tuple[tuple[float, float], ...]
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
    """Return the points, boxes and polygons that a sample's text describes, with the image of each.

    The text does not say which image a region belongs to, so it is returned for each image before it in the text, or
    for all images if none is before it.

    Args:
        text: text of the sample, with ``PICTURE`` in place of each image.
        form: the notation of boxes in the model's family; None if the family has none.
        limits: size limits of images, which determine the size that coordinates refer to.
        is_complete: False if the sample was truncated, so that images may be missing.
    """
    if form is None or not images:
        return []
    regions: list[ShownRegion] = []
    is_only_image = is_complete and len(images) == 1
    for start, name, corners, is_marked in _read_regions(text):
        # A list of numbers without special tokens or JSON around it may be something else than a region: it is one if
        # it is inside the image and, as a box (two corners), begins with the upper left corner.
        is_ordered = len(corners) != 2 or all(first <= second for first, second in zip(*corners, strict=True))
        num_images_before = text.count(PICTURE, 0, start)
        candidates = images[:num_images_before] if num_images_before else images
        for number, image in enumerate(candidates):
            width, height = written_size(form, image, limits)  # that coordinates refer to
            fractions = tuple((x / width, y / height) for x, y in corners)
            region = ShownRegion(name, fractions, image=number, is_certain=is_only_image)
            if is_marked or (region.is_inside and is_ordered):
                regions.append(region)
    return regions


def _read_regions(text: str) -> Iterator[tuple[int, str, list[tuple[float, float]], bool]]:
    """Yield the regions that a text describes, in order: position in the text, name, corners as written, is_marked.

    ``is_marked`` is True if special tokens or JSON mark the numbers as a region; False for a plain list of numbers.
    """
    # One group of the pattern matches: ``pairs`` (Qwen's tokens), ``lists`` (InternVL's), ``json`` or a plain ``list``.
    for match in _REGION.finditer(text):
        is_marked = match["list"] is None
        # Coordinates of a point often follow a quote, a letter or "="; other pairs of numbers rarely do.
        previous = text[max(match.start() - 1, 0) : match.start()]
        is_attached = previous.isalnum() or previous in ("'", '"', "=")
        label = match["pairs_name"] or match["lists_name"]
        if not label and is_marked:
            label = _json_label(text, match)
        name = _NAME_TOKENS.sub("", label or "").strip()
        boxes = [match["pairs"] or match["list"] or ""]
        if bracketed_boxes := match["json"] or match["lists"]:  # one or several boxes
            boxes = re.findall(r"\[[^\[\]]*\]", bracketed_boxes)
        for box in boxes:
            coordinates = [float(number) for number in _NUMBER_PATTERN.findall(box)]
            is_point = len(coordinates) == 2
            if len(coordinates) % 2 == 0 and (is_marked or is_attached or not is_point):
                yield match.start(), name, list(zip(coordinates[::2], coordinates[1::2], strict=True)), is_marked


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
