"""Notations of boxes, points and polygons in a picture, and of the names of objects.

One box of 331.5,761.4 to 853.5,1594.8 in a picture of 1500 x 1800 pixels, which is resized to 1512 x 1792::

    Qwen2-VL      <|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>
    InternVL      <ref>a dog</ref><box>[[221, 423, 569, 886]]</box>
    Qwen2.5-VL    [334, 758, 860, 1588]                pixels of the resized picture
    Qwen3-VL      [221, 423, 569, 886]                 thousandths of its sides
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class BoxTokens(NamedTuple):
    """Control tokens around names and boxes.

    Args:
        name: opening and closing token of a name.
        box: opening and closing token of a box, a point or a polygon.
        is_list: a box is a list of lists of numbers, one for each box; otherwise the pairs of a single box.
    """

    name: tuple[str, str]
    box: tuple[str, str]
    is_list: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """The four tokens, in order."""
        return *self.name, *self.box

    @property
    def box_pattern(self) -> str:
        """Regular expression of the text between the tokens of a box."""
        return r"[\d\[\],.\s]*" if self.is_list else r"[\d(),.\s]*"


QWEN_TOKENS = BoxTokens(("<|object_ref_start|>", "<|object_ref_end|>"), ("<|box_start|>", "<|box_end|>"))
INTERNVL_TOKENS = BoxTokens(("<ref>", "</ref>"), ("<box>", "</box>"), is_list=True)


@dataclass(frozen=True)
class BoxForm:
    """The text of a box and of a name.

    Args:
        notation: between control ``tokens``, or ``lists`` of numbers, optionally within JSON.
        scale: numbers are ``thousandths`` of the picture's sides, or ``pixels`` of the resized picture.
        tokens: the family's box tokens, also where they are not written.
    """

    notation: Literal["tokens", "lists"]
    scale: Literal["thousandths", "pixels"]
    tokens: BoxTokens = QWEN_TOKENS

    def name(self, text: str) -> str:
        """Write a name."""
        return text.join(self.tokens.name) if self.notation == "tokens" else text

    def boxes(self, boxes: Sequence[Sequence[int]]) -> str:
        """Write the boxes of one mark.

        Args:
            boxes: x and y of each corner of each box, as they are written.
        """
        lists = [[*corners] for corners in boxes]
        if self.notation == "lists":
            return str(lists[0] if len(lists) == 1 else lists)
        if self.tokens.is_list:
            return str(lists).join(self.tokens.box)
        pairs = [zip(corners[::2], corners[1::2], strict=True) for corners in boxes]
        return "".join(",".join(f"({x},{y})" for x, y in box).join(self.tokens.box) for box in pairs)
