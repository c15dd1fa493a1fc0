"""``objects``: boxes, points and polygons in a row's pictures, for the marks ``<bbox>`` and ``<ref-object>``.

ms-swift's form, in which names and boxes belong to their own marks, in order::

    {"ref": ["a dog"], "bbox": [[331.5, 761.4, 853.5, 1594.8]], "bbox_type": "real", "image_id": [0]}

or its form before version 3, in which both belong to the marks with the object's number::

    [{"caption": "a dog", "bbox": [[331, 761, 853, 1594], [12, 7]], "bbox_type": "real", "image": 0}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packtool.config.data import BboxType
from packtool.constants import BOX_MARK, MEDIA_MARKS, NAME_MARK
from packtool.rows.forms.columns import Fields, RowProblem, finite, is_list, shown
from packtool.rows.sample import Objects, Region, Turn

_UNITS: Mapping[str, BboxType] = {
    "real": "real",
    "norm1": "norm1",
    "norm1000": "norm1000",
    "norm_1": "norm1",
    "norm_1000": "norm1000",
}
JSON_KEY = '_2d"'
"""End of a JSON key of coordinates: ``"bbox_2d"``, ``"point_2d"``."""
ROUNDING = 1e-6
"""Fraction of a side by which rounded floats (0.1 + 0.2 > 0.3) may leave a picture without effect."""
_MAX_COORDINATES: Mapping[BboxType, float] = {"norm1": 1, "norm1000": 1000}


def objects_of(fields: Fields, turns: Sequence[Turn], num_images: int) -> Objects | None:
    """Return the objects of the marks in a row's turns; None without marks and without a unit for boxes in texts."""
    value, row_unit = fields.parsed("objects"), fields.get("bbox_type")
    if not value:
        if (num_images or fields.has("objects")) and any(
            BOX_MARK in turn.content or NAME_MARK in turn.content or turn.extra for turn in turns
        ):
            _check_count(fields, turns, Objects())
        has_boxes = row_unit and any(JSON_KEY in text for turn in turns for text in turn.texts)
        return Objects(unit=_unit(row_unit)) if has_boxes else None
    if isinstance(value, Mapping):
        objects = _by_marks(value, num_images, row_unit)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        objects = _by_objects(value, turns, num_images)
    else:
        raise RowProblem("invalid_objects", f"'objects' is {shown(value)}, neither an object nor a list of them")
    _check_count(fields, turns, objects)
    return objects if objects != Objects() else None


def corners_of(value: Any, who: str, unit: BboxType) -> tuple[float, ...]:
    """Return the coordinates of a box, a point or a polygon; raise RowProblem if they are outside of any picture.

    Args:
        who: the region, for problems.
    """
    if not is_list(value) or len(value) < 2 or len(value) % 2:
        raise RowProblem("invalid_objects", f"{who} is {shown(value)}, not x and y of one or more corners")
    numbers = tuple(map(finite, value))
    if any(number is None for number in numbers):
        raise RowProblem("invalid_objects", f"{who} is {shown(value)}, which are not all numbers")
    corners = tuple(number for number in numbers if number is not None)
    if len(corners) == 4 and (corners[2] < corners[0] or corners[3] < corners[1]):
        detail = f"{who} is {shown(value)}: the second corner must not be left of the first, or above it"
        raise RowProblem("invalid_objects", detail)
    limit = _MAX_COORDINATES.get(unit)
    if min(corners) < -ROUNDING or (limit is not None and max(corners) > limit * (1 + ROUNDING)):
        rule = f"coordinates of bbox_type {unit} are 0 to {limit:g}" if limit else "no coordinate is less than 0"
        raise RowProblem("box_outside", f"{who} is {shown(value)}: {rule}")
    return corners


def _by_marks(value: Mapping[str, Any], num_images: int, row_unit: Any) -> Objects:
    unit = _unit(value.get("bbox_type") or row_unit)
    names, values, ids = (_list_of(value, key) for key in ("ref", "bbox", "image_id"))
    for number, name in enumerate(names):
        _check_name(name, f"'ref' {number} of 'objects'")
    for number, image in enumerate(ids):
        _check_image(image, f"'image_id' {number} of 'objects'", num_images)
    if not values:
        # Unit and pictures of the boxes that are JSON in the texts.
        return Objects(tuple(names), unit=unit, images=tuple(ids))
    if ids and len(ids) != len(values):
        raise RowProblem("invalid_objects", f"'objects' has {len(values)} bbox and {len(ids)} image_id: give one each")
    boxes = [
        _regions(value, f"'bbox' {number} of 'objects'", image, unit or "real", num_images)
        for number, (value, image) in enumerate(zip(values, ids or [0] * len(values), strict=True))
    ]
    return Objects(tuple(names), tuple(boxes))


def _by_objects(values: Sequence[Any], turns: Sequence[Turn], num_images: int) -> Objects:
    """Read ms-swift's form before version 3: texts may have marks for names only, or for boxes only."""
    names, boxes = list[str](), list[tuple[Region, ...]]()
    for number, each in enumerate(values):
        who = f"'objects' {number}"
        if not isinstance(each, Mapping):
            raise RowProblem("invalid_objects", f"{who} is {shown(each)}, not an object with caption and bbox")
        image = each.get("image") or 0
        _check_image(image, f"'image' of {who}", num_images)
        if each.get("caption") is not None:
            names.append(each["caption"])
            _check_name(each["caption"], f"'caption' of {who}")
        unit = _unit(each.get("bbox_type")) or "real"
        boxes.append(_regions(each.get("bbox"), f"'bbox' of {who}", image, unit, num_images))
    marks = {mark for mark in (NAME_MARK, BOX_MARK) for turn in turns for text in turn.texts if mark in text}
    if marks:
        names, boxes = names if NAME_MARK in marks else [], boxes if BOX_MARK in marks else []
    return Objects(tuple(names), tuple(boxes))


def _regions(value: Any, who: str, image: int, unit: BboxType, num_images: int) -> tuple[Region, ...]:
    _check_image(image, f"{who}: its picture", num_images)
    several = is_list(value) and len(value) > 0 and all(map(is_list, value))
    return tuple(Region(corners_of(each, who, unit), image, unit) for each in (value if several else [value]))


def _check_count(fields: Fields, turns: Sequence[Turn], objects: Objects) -> None:
    """Raise RowProblem unless the turns have as many marks as there are names and boxes."""
    if fields.is_disabled("objects"):
        return
    joined = "\n".join([text for turn in turns for text in turn.texts])
    for mark, count, what in ((NAME_MARK, len(objects.names), "names"), (BOX_MARK, len(objects.boxes), "boxes")):
        num_marks = joined.count(mark)
        if num_marks != count:
            remedy = f"if {mark} is plain text here, or 'objects' another matter, --columns objects= says so"
            detail = f"the texts have {num_marks} {mark} marks, and 'objects' has {count} {what} for them; {remedy}"
            raise RowProblem("object_marks", detail)


def _unit(value: Any) -> BboxType | None:
    if not value:
        return None
    if not isinstance(value, str) or value not in _UNITS:
        raise RowProblem("invalid_objects", f"bbox_type is {shown(value)}; known are real, norm1 and norm1000")
    return _UNITS[value]


def _check_name(name: Any, who: str) -> None:
    if not isinstance(name, str):
        raise RowProblem("invalid_objects", f"{who} is {shown(name)}, not text")
    if any(mark in name for mark in MEDIA_MARKS.values()):
        raise RowProblem("invalid_objects", f"{who} is {shown(name)}, which has a medium's mark in it")


def _check_image(image: Any, who: str, num_images: int) -> None:
    if type(image) is not int or image < 0:
        raise RowProblem("invalid_objects", f"{who} is {shown(image)}, not the number of a picture, from 0 on")
    if image >= num_images:
        have = "no picture" if not num_images else f"{num_images} picture{'s' * (num_images > 1)}, numbered from 0 on"
        raise RowProblem("object_image", f"{who} is picture {shown(image)}, and the row has {have}")


def _list_of(objects: Mapping[str, Any], key: str) -> list[Any]:
    value = objects.get(key)
    if value is None:
        return []
    if not is_list(value):
        raise RowProblem("invalid_objects", f"{key!r} of 'objects' is {shown(value)}, not a list")
    return list(value)
