"""How families write boxes, points and polygons in a picture, and the names of what is there.

One box of 331.5,761.4 to 853.5,1594.8 in a picture of 1500 x 1800 pixels, which is resized to 1512 x 1792::

    Qwen2-VL      <|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>
    Qwen2.5-VL    [334, 758, 860, 1588]                pixels of the resized picture
    Qwen3-VL      [221, 423, 569, 886]                 thousandths of its sides
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

REF_TOKENS = ("<|object_ref_start|>", "<|object_ref_end|>")
"""Control tokens around a name."""
BOX_TOKENS = ("<|box_start|>", "<|box_end|>")
"""Control tokens around a box, a point or a polygon."""

Corners = Sequence[int]
"""x and y of each corner as they are written."""


@dataclass(frozen=True)
class BoxForm:
    """What stands in a text for a box and for a name.

    Args:
        spelling: between control ``tokens``, or as ``lists`` of numbers, which JSON may have around them.
        scale: the numbers are ``thousandths`` of the picture's sides, or ``pixels`` of the resized picture.
    """

    spelling: Literal["tokens", "lists"]
    scale: Literal["thousandths", "pixels"]

    def name(self, text: str) -> str:
        """What stands for a name."""
        return text.join(REF_TOKENS) if self.spelling == "tokens" else text

    def boxes(self, boxes: Sequence[Corners]) -> str:
        """What stands for one box, or for several at one mark."""
        if self.spelling == "tokens":
            return "".join(_pairs(corners).join(BOX_TOKENS) for corners in boxes)
        return str([*boxes[0]] if len(boxes) == 1 else [[*corners] for corners in boxes])


def _pairs(corners: Corners) -> str:
    return ",".join(f"({x},{y})" for x, y in zip(corners[::2], corners[1::2], strict=True))
