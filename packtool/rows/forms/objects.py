"""``objects``: boxes, points and polygons in a row's pictures, for the marks ``<bbox>`` and ``<ref-object>``.

As ms-swift has it, names and boxes each go to their own marks, in order::

    {"ref": ["a dog"], "bbox": [[331.5, 761.4, 853.5, 1594.8]], "bbox_type": "real", "image_id": [0]}

or, as it had it before version 3, both of an object to the marks with its number::

    [{"caption": "a dog", "bbox": [[331, 761, 853, 1594], [12, 7]], "bbox_type": "real", "image": 0}]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packtool.config.data import BboxType
from packtool.constants import BOX_MARK, MEDIA_MARKS, NAME_MARK
from packtool.rows.forms.columns import Fields, RowProblem, finite, shown
from packtool.rows.sample import Objects, Region, Turn

_UNITS: Mapping[str, BboxType] = {
    "real": "real",
    "norm1": "norm1",
    "norm_1": "norm1",
    "norm1000": "norm1000",
    "norm_1000": "norm1000",
}
JSON_KEY = '_2d"'
"""The end of a key of JSON with coordinates: ``"bbox_2d"``, ``"point_2d"``."""
ROUNDING = 1e-6
"""Share of a side by which rounded floats (0.1 + 0.2 > 0.3) may leave a picture; what is written is the same."""
_LARGEST: Mapping[BboxType, float] = {"norm1": 1, "norm1000": 1000}


def objects_of(fields: Fields, turns: Sequence[Turn], num_images: int) -> Objects | None:
    """What the marks in a row's turns stand for; None if it has neither marks nor a unit for what its texts say.

    Raises:
        RowProblem: if ``objects`` cannot be read, do not go with the marks, or lie on a picture that the row lacks.
    """
    given, stated = fields.parsed("objects"), fields.get("bbox_type")
    if not given:
        if (num_images or fields.has("objects")) and any(
            BOX_MARK in turn.content or NAME_MARK in turn.content or turn.extra for turn in turns
        ):
            _check_count(fields, turns, Objects())
        says = stated and any(JSON_KEY in text for turn in turns for text in turn.texts)
        return Objects(unit=_unit(stated)) if says else None
    if isinstance(given, Mapping):
        found = _by_marks(given, num_images, stated)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = _by_objects(given, turns, num_images)
    else:
        raise RowProblem("invalid_objects", f"'objects' is {shown(given)}, neither an object nor a list of them")
    _check_count(fields, turns, found)
    return found if found != Objects() else None


def corners_of(value: Any, who: str, unit: BboxType) -> tuple[float, ...]:
    """The coordinates of a box, a point or a polygon.

    Args:
        who: it is, for problems.

    Raises:
        RowProblem: if they are none, or none that a picture can have.
    """
    if not _is_list(value) or len(value) < 2 or len(value) % 2:
        raise RowProblem("invalid_objects", f"{who} is {shown(value)}, not x and y of one or more corners")
    numbers = tuple(map(finite, value))
    if any(number is None for number in numbers):
        raise RowProblem("invalid_objects", f"{who} is {shown(value)}, which are not all numbers")
    corners = tuple(number for number in numbers if number is not None)
    if len(corners) == 4 and (corners[2] < corners[0] or corners[3] < corners[1]):
        detail = f"{who} is {shown(value)}: the second corner must not be left of the first, or above it"
        raise RowProblem("invalid_objects", detail)
    most = _LARGEST.get(unit)
    if min(corners) < -ROUNDING or (most is not None and max(corners) > most * (1 + ROUNDING)):
        told = "no coordinate is less than 0" if most is None else f"coordinates of bbox_type {unit} are 0 to {most:g}"
        raise RowProblem("box_outside", f"{who} is {shown(value)}: {told}")
    return corners


def _by_marks(given: Mapping[str, Any], num_images: int, stated: Any) -> Objects:
    unit = _unit(given.get("bbox_type") or stated)
    names, values, ids = (_listed(given, key) for key in ("ref", "bbox", "image_id"))
    for number, name in enumerate(names):
        _check_name(name, f"'ref' {number} of 'objects'")
    for number, image in enumerate(ids):
        _check_image(image, f"'image_id' {number} of 'objects'", num_images)
    if not values:
        # What the texts say as JSON is of this unit, and on these pictures.
        return Objects(tuple(names), unit=unit, images=tuple(ids))
    if ids and len(ids) != len(values):
        raise RowProblem("invalid_objects", f"'objects' has {len(values)} bbox and {len(ids)} image_id: give one each")
    boxes = [
        tuple(_boxes(value, f"'bbox' {number} of 'objects'", image, unit or "real", num_images))
        for number, (value, image) in enumerate(zip(values, ids or [0] * len(values), strict=True))
    ]
    return Objects(tuple(names), tuple(boxes))


def _by_objects(given: Sequence[Any], turns: Sequence[Turn], num_images: int) -> Objects:
    """Objects as ms-swift had them before version 3: texts may have marks for one of their two parts only."""
    names, boxes = list[str](), list[tuple[Region, ...]]()
    for number, each in enumerate(given):
        who = f"'objects' {number}"
        if not isinstance(each, Mapping):
            raise RowProblem("invalid_objects", f"{who} is {shown(each)}, not an object with caption and bbox")
        image = each.get("image") or 0
        _check_image(image, f"'image' of {who}", num_images)
        if each.get("caption") is not None:
            names.append(each["caption"])
            _check_name(each["caption"], f"'caption' of {who}")
        unit = _unit(each.get("bbox_type")) or "real"
        boxes.append(tuple(_boxes(each.get("bbox"), f"'bbox' of {who}", image, unit, num_images)))
    marks = {mark for mark in (NAME_MARK, BOX_MARK) for turn in turns for text in turn.texts if mark in text}
    return Objects(
        tuple(names) if NAME_MARK in marks or not marks else (), tuple(boxes) if BOX_MARK in marks or not marks else ()
    )


def _boxes(value: Any, who: str, image: int, unit: BboxType, num_images: int) -> Iterator[Region]:
    _check_image(image, f"{who}: its picture", num_images)
    several = _is_list(value) and len(value) > 0 and all(map(_is_list, value))
    for each in value if several else [value]:
        yield Region(corners_of(each, who, unit), image, unit)


def _check_count(fields: Fields, turns: Sequence[Turn], found: Objects) -> None:
    """Hold the marks in the turns against what there is for them.

    Raises:
        RowProblem: if they are not as many.
    """
    if fields.is_left_out("objects"):
        return
    joined = "\n".join([text for turn in turns for text in turn.texts])
    for mark, count, what in ((NAME_MARK, len(found.names), "names"), (BOX_MARK, len(found.boxes), "boxes")):
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


def _listed(given: Mapping[str, Any], key: str) -> list[Any]:
    value = given.get(key)
    if value is None:
        return []
    if not _is_list(value):
        raise RowProblem("invalid_objects", f"{key!r} of 'objects' is {shown(value)}, not a list")
    return list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
