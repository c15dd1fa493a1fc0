"""The column ``objects``: boxes, points and polygons in images, for the marks ``<bbox>`` and ``<ref-object>``.

ms-swift's format, in which the names fill the ``<ref-object>`` marks and the boxes the ``<bbox>`` marks, in order::

    {"ref": ["a dog"], "bbox": [[331.5, 761.4, 853.5, 1594.8]], "bbox_type": "real", "image_id": [0]}

or its format before version 3, in which name and box of object i fill the i-th mark of their kind::

    [{"caption": "a dog", "bbox": [[331, 761, 853, 1594], [12, 7]], "bbox_type": "real", "image": 0}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from packtool.config.data import BboxType
from packtool.constants import BOX_MARK, MEDIA_MARKS, NAME_MARK
from packtool.rows.forms.columns import Fields, RowProblem, finite, is_list, shown
from packtool.rows.sample import Objects, Region, Turn

_UNITS: dict[str, BboxType] = {unit: unit for unit in get_args(BboxType)}
_UNITS |= {"norm_1": "norm1", "norm_1000": "norm1000"}
JSON_KEY = '_2d"'
"""End of JSON keys with coordinates: ``"bbox_2d"``, ``"point_2d"``."""
ROUNDING = 1e-6
"""Tolerance for coordinates outside of an image because of rounding, as a fraction of its side."""
_MAX_COORDINATES: Mapping[BboxType, float] = {"norm1": 1, "norm1000": 1000}
_DEFAULT_UNIT: BboxType = "real"  # pixels


def objects_of(fields: Fields, turns: Sequence[Turn], num_images: int) -> Objects | None:
    """Read the columns ``objects`` and ``bbox_type`` of a row; None if they have no effect on its ``turns``.

    They have the names and boxes for the placeholders ``<ref-object>`` and ``<bbox>`` in the texts, of which the texts
    must have equally many, and the unit of coordinates. ``num_images`` is the number of images of the row.
    """
    value = fields.parsed("objects")
    row_unit = fields.get("bbox_type")
    if not value:
        if num_images or fields.has("objects"):  # else marks are plain text
            _check_num_marks(fields, turns, Objects())
        return _unit_of_json_boxes(row_unit, turns)
    if isinstance(value, Mapping):
        objects = _read_object(value, num_images, row_unit)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        objects = _read_object_list(value, turns, num_images)
    else:
        raise RowProblem("invalid_objects", f"'objects' is {shown(value)}, not an object or a list of objects")
    _check_num_marks(fields, turns, objects)
    is_empty = objects == Objects()
    return None if is_empty else objects


def _unit_of_json_boxes(row_unit: Any, turns: Sequence[Turn]) -> Objects | None:
    """Return the unit of boxes that are written as JSON in the texts; None if there are none or it is not given."""
    if not row_unit or not _has_text_with(JSON_KEY, turns):
        return None
    return Objects(unit=_unit(row_unit))


def corners_of(value: Any, label: str, unit: BboxType) -> tuple[float, ...]:
    """Read the corners of a region of an image: [x, y] is a point, [x1, y1, x2, y2] a box, a longer list a polygon.

    Args:
        value: the list in the row.
        label: the region in messages.
        unit: ``norm1`` allows coordinates from 0 to 1, ``norm1000`` to 1,000; ``real``, pixels, has no limit here.
    """
    if not is_list(value) or len(value) < 2 or len(value) % 2:
        raise RowProblem("invalid_objects", f"{label} is {shown(value)}, not a list with x and y of each corner")
    numbers = tuple(map(finite, value))
    if any(number is None for number in numbers):
        raise RowProblem("invalid_objects", f"{label} is {shown(value)}; all values must be numbers")
    corners = tuple(number for number in numbers if number is not None)
    is_box = len(corners) == 4
    if is_box and (corners[2] < corners[0] or corners[3] < corners[1]):
        detail = f"{label} is {shown(value)}; the second corner must be to the right of and below the first"
        raise RowProblem("invalid_objects", detail)
    limit = _MAX_COORDINATES.get(unit)
    is_too_large = limit is not None and max(corners) > limit * (1 + ROUNDING)
    if min(corners) < -ROUNDING or is_too_large:
        rule = f"coordinates with bbox_type {unit} must be 0 to {limit:g}" if limit else "coordinates must be 0 or more"
        raise RowProblem("box_outside", f"{label} is {shown(value)}; {rule}")
    return corners


def _read_object(value: Mapping[str, Any], num_images: int, row_unit: Any) -> Objects:
    """Read ms-swift's format, one object with lists; ``row_unit`` is the default of its ``bbox_type``."""
    unit = _unit(value.get("bbox_type") or row_unit)
    names = _list_of(value, "ref")
    boxes = _list_of(value, "bbox")
    image_ids = _list_of(value, "image_id")
    for number, name in enumerate(names):
        _check_name(name, f"'ref' {number} of 'objects'")
    for number, image_id in enumerate(image_ids):
        _check_image(image_id, f"'image_id' {number} of 'objects'", num_images)
    if not boxes:  # the texts contain boxes as JSON, in this unit and of these images
        return Objects(tuple(names), unit=unit, images=tuple(image_ids))
    regions = _regions_of_boxes(boxes, image_ids or [0] * len(boxes), unit or _DEFAULT_UNIT, num_images)
    return Objects(tuple(names), regions)


def _regions_of_boxes(
    boxes: Sequence[Any], image_ids: Sequence[int], unit: BboxType, num_images: int
) -> tuple[tuple[Region, ...], ...]:
    """Return the regions of each mark, from the lists ``bbox`` and ``image_id``."""
    if len(image_ids) != len(boxes):
        detail = f"'objects' has {len(boxes)} bbox but {len(image_ids)} image_id; write one image_id for each bbox"
        raise RowProblem("invalid_objects", detail)
    return tuple(
        _regions_of_mark(box, f"'bbox' {number} of 'objects'", image_id, unit, num_images)
        for number, (box, image_id) in enumerate(zip(boxes, image_ids, strict=True))
    )


def _read_object_list(values: Sequence[Any], turns: Sequence[Turn], num_images: int) -> Objects:
    """Read ms-swift's format before version 3: a list with an object for each name and its box.

    If the turns have placeholders for names only, or for boxes only, the result has only these.
    """
    items = [_read_list_item(value, f"'objects' {number}", num_images) for number, value in enumerate(values)]
    names = tuple([name for name, _ in items if name is not None])
    regions_of_marks = tuple([regions for _, regions in items])
    has_name_marks = _has_text_with(NAME_MARK, turns)
    has_box_marks = _has_text_with(BOX_MARK, turns)
    if has_box_marks and not has_name_marks:
        return Objects(boxes=regions_of_marks)
    if has_name_marks and not has_box_marks:
        return Objects(names)
    return Objects(names, regions_of_marks)


def _read_list_item(value: Any, label: str, num_images: int) -> tuple[str | None, tuple[Region, ...]]:
    """Return the name, None if it has none, and the regions of an object in ms-swift's format before version 3."""
    if not isinstance(value, Mapping):
        raise RowProblem("invalid_objects", f"{label} is {shown(value)}, not an object with caption and bbox")
    image = value.get("image") or 0
    _check_image(image, f"'image' of {label}", num_images)
    caption = value.get("caption")
    if caption is not None:  # an object may be a box only
        _check_name(caption, f"'caption' of {label}")
    unit = _unit(value.get("bbox_type")) or _DEFAULT_UNIT
    return caption, _regions_of_mark(value.get("bbox"), f"'bbox' of {label}", image, unit, num_images)


def _has_text_with(part: str, turns: Sequence[Turn]) -> bool:
    return any(part in text for turn in turns for text in turn.texts)


def _regions_of_mark(value: Any, label: str, image: int, unit: BboxType, num_images: int) -> tuple[Region, ...]:
    """Read the region of one mark, or a list of regions."""
    _check_image(image, f"{label}: its image", num_images)
    has_several = is_list(value) and len(value) > 0 and all(map(is_list, value))
    boxes = value if has_several else [value]
    return tuple(Region(corners_of(box, label, unit), image, unit) for box in boxes)


def _check_num_marks(fields: Fields, turns: Sequence[Turn], objects: Objects) -> None:
    """Raise RowProblem unless the texts have as many marks as there are names and boxes in ``objects``."""
    if fields.is_disabled("objects"):
        return
    all_texts = "\n".join([text for turn in turns for text in turn.texts])
    for mark, count, content in ((NAME_MARK, len(objects.names), "names"), (BOX_MARK, len(objects.boxes), "boxes")):
        num_marks = all_texts.count(mark)
        if num_marks != count:
            remedy = f"if {mark} is plain text, or 'objects' means something else, pass --columns objects="
            detail = f"the texts have {num_marks} {mark} placeholders, but 'objects' has {count} {content}; {remedy}"
            raise RowProblem("object_marks", detail)


def _unit(value: Any) -> BboxType | None:
    if not value:
        return None
    if not isinstance(value, str) or value not in _UNITS:
        raise RowProblem("invalid_objects", f"bbox_type is {shown(value)}; it must be real, norm1 or norm1000")
    return _UNITS[value]


def _check_name(name: Any, label: str) -> None:
    if not isinstance(name, str):
        raise RowProblem("invalid_objects", f"{label} is {shown(name)}, not text")
    if any(mark in name for mark in MEDIA_MARKS.values()):
        raise RowProblem("invalid_objects", f"{label} is {shown(name)}, which contains a media placeholder")


def _check_image(image: Any, label: str, num_images: int) -> None:
    if type(image) is not int or image < 0:
        raise RowProblem("invalid_objects", f"{label} is {shown(image)}, not the number of an image, counted from 0")
    if image >= num_images:
        count = "no images" if not num_images else f"{num_images} image{'s' * (num_images > 1)}, counted from 0"
        raise RowProblem("object_image", f"{label} is image {shown(image)}, but the row has {count}")


def _list_of(objects: Mapping[str, Any], key: str) -> list[Any]:
    value = objects.get(key)
    if value is None:
        return []
    if not is_list(value):
        raise RowProblem("invalid_objects", f"{key!r} of 'objects' is {shown(value)}, not a list")
    return list(value)
