"""How families write boxes, points and polygons in a picture, and the names of what is there.

One box of 331.5,761.4 to 853.5,1594.8 in a picture of 1500 x 1800 pixels, which is resized to 1512 x 1792::

    Qwen2-VL      <|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>
    InternVL      <ref>a dog</ref><box>[[221, 423, 569, 886]]</box>
    Qwen2.5-VL    [334, 758, 860, 1588]                pixels of the resized picture
    Qwen3-VL      [221, 423, 569, 886]                 thousandths of its sides
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Corners = Sequence[int]
"""x and y of each corner as they are written."""


@dataclass(frozen=True)
class BoxTokens:
    """Control tokens of names and boxes.

    Args:
        name: around a name.
        box: around a box, a point or a polygon.
        is_list: between the latter stands a list of lists of numbers, for one box or several; else pairs of one.
    """

    name: tuple[str, str]
    box: tuple[str, str]
    is_list: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """The four of them, in order."""
        return *self.name, *self.box

    @property
    def between(self) -> str:
        """What may stand between the tokens of a box, as a regular expression."""
        return r"[\d\[\],.\s]*" if self.is_list else r"[\d(),.\s]*"


QWEN_TOKENS = BoxTokens(("<|object_ref_start|>", "<|object_ref_end|>"), ("<|box_start|>", "<|box_end|>"))
INTERNVL_TOKENS = BoxTokens(("<ref>", "</ref>"), ("<box>", "</box>"), is_list=True)


@dataclass(frozen=True)
class BoxForm:
    """What stands in a text for a box and for a name.

    Args:
        spelling: between control ``tokens``, or as ``lists`` of numbers, which JSON may have around them.
        scale: the numbers are ``thousandths`` of the picture's sides, or ``pixels`` of the resized picture.
        tokens: that the family has for them, written or not.
    """

    spelling: Literal["tokens", "lists"]
    scale: Literal["thousandths", "pixels"]
    tokens: BoxTokens = QWEN_TOKENS

    def name(self, text: str) -> str:
        """What stands for a name."""
        return text.join(self.tokens.name) if self.spelling == "tokens" else text

    def boxes(self, boxes: Sequence[Corners]) -> str:
        """What stands for one box, or for several at one mark."""
        lists = [[*corners] for corners in boxes]
        if self.spelling == "lists":
            return str(lists[0] if len(lists) == 1 else lists)
        if self.tokens.is_list:
            return str(lists).join(self.tokens.box)
        return "".join(_pairs(corners).join(self.tokens.box) for corners in boxes)


def _pairs(corners: Corners) -> str:
    return ",".join(f"({x},{y})" for x, y in zip(corners[::2], corners[1::2], strict=True))
