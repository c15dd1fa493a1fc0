"""Boxes, points and polygons of a sample, read back from its text, to be drawn on its pictures.

What is shown is what the model is told: the tokens are decoded, and the numbers in them are taken as the model's family
means them. So a box that was scaled wrongly, by whoever made the rows, is drawn where it does not belong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packtool.encode.boxes import written_size
from packtool.encode.encoded import EncodedImage
from packtool.encode.families import ImageLimits
from packtool.encode.families.boxes import INTERNVL_TOKENS, QWEN_TOKENS, BoxForm, BoxTokens

PICTURE = "\ufffc"
"""Stands in a sample's text for each of its pictures."""
_NUMBER = r"-?\d{1,6}(?:\.\d+)?"
_LIST = rf"\[\s*{_NUMBER}(?:\s*,\s*{_NUMBER})+\s*\]"


def _between(tokens: BoxTokens, group: str) -> str:
    """What stands between the tokens of a box; its name may come before it."""
    (name, name_end), (box, box_end) = ([*map(re.escape, pair)] for pair in (tokens.name, tokens.box))
    named = rf"{name}(?P<{group}_name>(?:(?!{name_end}).){{0,1000}}){name_end}\s*"
    return rf"(?:{named})?{box}(?P<{group}>{tokens.between}){box_end}"


_FOUND = re.compile(
    rf"{_between(QWEN_TOKENS, 'pairs')}|{_between(INTERNVL_TOKENS, 'lists')}"
    # JSON says what its numbers are, and one list in it may hold several.
    rf'|"\w+_2d"\s*:\s*(?P<json>{_LIST}|\[\s*{_LIST}(?:\s*,\s*{_LIST})*\s*\])'
    # A list of numbers in other text is a box from four numbers on; a point stands behind a quote, a word or "=".
    rf"|(?P<list>{_LIST})",
    re.DOTALL,
)
_STRING = r'"(?:label|text_content)"\s*:\s*(?P<label>"(?:[^"\\]|\\.){0,1000}")'
_LABEL, _LABEL_BEFORE = re.compile(rf"\s*,\s*{_STRING}"), re.compile(rf"{_STRING}\s*,\s*$")
_LONGEST_LABEL = 1100
_NUMBERS = re.compile(_NUMBER)
_TOKENS = re.compile("|".join(map(re.escape, (*QWEN_TOKENS.name, *INTERNVL_TOKENS.name))))


@dataclass(frozen=True)
class ShownRegion:
    """A box, a point or a polygon as it is drawn.

    Args:
        name: what the text calls it, or "".
        corners: (x, y) of each corner, as shares of the picture's sides.
        image: number of the picture among the sample's.
        is_certain: whether it can be on no other picture.
    """

    name: str
    corners: tuple[tuple[float, float], ...]
    image: int
    is_certain: bool

    @property
    def is_inside(self) -> bool:
        """Whether all of it is in the picture."""
        return all(0 <= share <= 1 for corner in self.corners for share in corner)

    def told(self, width: int, height: int) -> str:
        """What it is and where, in pixels of a picture of this size."""
        kind = {1: "point", 2: "box"}.get(len(self.corners), "polygon")
        places = " ".join(f"{x * width:.0f},{y * height:.0f}" for x, y in self.corners)
        outside = "" if self.is_inside else ", outside of it"
        sure = "" if self.is_certain else ", if it is on this one"
        return f"{self.name + ', ' if self.name else ''}{kind} {places} of picture {self.image}{outside}{sure}"


class _Read(NamedTuple):
    """Numbers in a text, and what they may be called."""

    start: int
    name: str
    numbers: tuple[float, ...]
    is_said: bool


def regions_of(
    text: str, images: Sequence[EncodedImage], form: BoxForm | None, limits: ImageLimits | None, is_whole: bool
) -> list[ShownRegion]:
    """What a sample's text says of places in its pictures.

    Where the text cannot tell which of several pictures is meant, a place is on each that comes before it.

    Args:
        text: of the whole sample, with ``PICTURE`` for each picture.
        form: of the model's family.
        limits: of the model on pictures.
        is_whole: whether truncation took nothing, a picture perhaps.
    """
    if form is None or not images:
        return []
    found: list[ShownRegion] = []
    for read in _read(text):
        before = text.count(PICTURE, 0, read.start) or len(images)
        for number, image in enumerate(images[:before]):
            size = written_size(form, image, limits)
            corners = tuple(
                (x / size[0], y / size[1]) for x, y in zip(read.numbers[::2], read.numbers[1::2], strict=True)
            )
            region = ShownRegion(read.name, corners, number, is_whole and len(images) == 1)
            if read.is_said or (region.is_inside and _is_ordered(read.numbers)):
                found.append(region)
    return found


def _read(text: str) -> Iterator[_Read]:
    for match in _FOUND.finditer(text):
        several = match["json"] or match["lists"]
        shown = several or match["pairs"] or match["list"] or ""
        is_said, name = match["list"] is None, match["pairs_name"] or match["lists_name"] or ""
        if not name and is_said:
            before = text[max(match.start() - _LONGEST_LABEL, 0) : match.start()]
            label = _LABEL.match(text, match.end()) or _LABEL_BEFORE.search(before)
            name = _plain(label["label"]) if label else ""
        for each in re.findall(r"\[[^\[\]]*\]", shown) if several else [shown]:
            numbers = tuple(map(float, _NUMBERS.findall(each)))
            if len(numbers) % 2 == 0 and (is_said or len(numbers) > 2 or _is_attached(text, match.start())):
                yield _Read(match.start(), _TOKENS.sub("", name).strip(), numbers, is_said)


def _plain(label: str) -> str:
    try:
        return str(json.loads(label, strict=False))
    except ValueError:
        return label[1:-1]


def _is_attached(text: str, start: int) -> bool:
    """Whether a list stands right behind a quote, a word or "=", as coordinates may, and other pairs rarely do."""
    before = text[max(start - 1, 0) : start]
    return before.isalnum() or before in tuple("'\"=")


def _is_ordered(numbers: Sequence[float]) -> bool:
    return len(numbers) != 4 or (numbers[0] <= numbers[2] and numbers[1] <= numbers[3])
