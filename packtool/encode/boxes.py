"""Write a row's ``objects`` (boxes, points, polygons and names) into its texts, in the notation of the model.

Coordinates are converted from pixels of the picture (after the EXIF orientation) to pixels of the picture as the
processor resizes it, or to thousandths of its sides, as in ms-swift: ``round(x / width * written_width)``.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from packtool.config.data import BoxOptions
from packtool.constants import BOX_MARK, NAME_MARK
from packtool.encode.encoded import EncodedImage
from packtool.encode.families import FAMILIES, ImageLimits, family_of
from packtool.encode.families.record import QWEN_TOKENS, BoxForm, BoxTokens, Medium
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.media.files import MediaProblem
from packtool.rows.forms.columns import RowProblem, finite
from packtool.rows.forms.objects import JSON_KEY, ROUNDING, corners_of
from packtool.rows.sample import Dropped, MediaKind, MediaRef, Objects, Region, Sample, Turn

# A name inside a JSON string is written as JSON.
_MARKS = re.compile(rf'(?P<json>[:\[,]\s*"){NAME_MARK}(?=")|{NAME_MARK}|{BOX_MARK}')
_BOX_KEY = re.compile(rf'"\w+{JSON_KEY}\s*:\s*(?=[^\s<])')  # the key of a box of ``objects`` is followed by its mark
_JSON = json.JSONDecoder()


def box_form_of(config: Mapping[str, Any], bbox_format: str | None, norm_bbox: str | None) -> BoxForm | None:
    """Return the notation of boxes for a model with this ``config.json`` and these options; None if it is unknown."""
    form = family_of(config).boxes
    if form is None:
        return None
    if bbox_format is not None:
        form = replace(form, notation="tokens" if bbox_format == "legacy" else "lists")
    if norm_bbox is not None:
        form = replace(form, scale="thousandths" if norm_bbox == "norm1000" else "pixels")
    return form


def written_size(form: BoxForm, image: EncodedImage, limits: ImageLimits | None) -> tuple[int, int]:
    """Return the width and height of a picture in the units in which its coordinates are written."""
    if form.scale == "thousandths":
        return 1000, 1000
    assert limits is not None, "families that write pixels have grids"
    return image.grid[2] * limits.patch_size, image.grid[1] * limits.patch_size


class BoxWriter:
    """Writes boxes and names into the texts of samples.

    Args:
        options: the notation of boxes, and the unit of coordinates in JSON for rows without one (``--bbox-type``).
        limits: the model's limits on pictures; None if its own processor resizes them.
        control_tokens: all control tokens of the model's tokenizer.
        measure: measures a picture, for the size in which coordinates are written.
    """

    def __init__(
        self,
        files: ModelFiles,
        options: BoxOptions,
        limits: ImageLimits | None,
        control_tokens: frozenset[str],
        measure: Callable[[MediaKind, MediaRef], Medium],
    ) -> None:
        self._model_type = files.model_type
        self._box_form = box_form_of(files.config, options.bbox_format, options.norm_bbox)
        if self._box_form is not None and self._box_form.scale == "pixels" and limits is None:
            raise ConfigError(
                f"--norm-bbox none: packtool does not know how the processor of {files.model_type} models resizes "
                "pictures",
                "Leave out --norm-bbox: coordinates are then thousandths of a picture's sides.",
            )
        # The tokens by which rows with boxes are recognized, also for a model without a notation of boxes.
        self._box_tokens = QWEN_TOKENS if self._box_form is None else self._box_form.tokens
        self._default_json_unit = options.bbox_type
        self._control_tokens = control_tokens
        self._limits = limits
        self._measure = measure

    def write(self, sample: Sample) -> Sample | Dropped:
        """Write a sample's boxes and their names into its texts, or return the reason why the sample is dropped.

        Box tokens in a row's own texts become control tokens only if they form complete boxes and names.
        """
        if sample.objects is None and not self._may_have_boxes(sample):  # nearly all rows
            return sample
        objects = sample.objects or Objects()
        json_unit = objects.unit or self._default_json_unit  # of coordinates in texts that are JSON
        objects = replace(objects, unit=json_unit)
        has_json_boxes = json_unit is not None and any(_BOX_KEY.search(text) for text in _texts(sample))
        must_write = objects.names or objects.boxes or has_json_boxes
        try:
            if must_write:
                sample, is_well_formed = self._fill(sample, objects)
            else:
                is_well_formed = self._is_well_formed(sample)
        except (MediaProblem, RowProblem) as problem:
            return Dropped(sample.source, sample.row, problem.reason, problem.detail)

        control_tokens: frozenset[str] = frozenset()  # those whose text is encoded as a control token
        if is_well_formed:
            control_tokens = self._control_tokens.intersection(self._box_tokens.all)
        return replace(sample, objects=None, control=control_tokens)

    def _fill(self, sample: Sample, objects: Objects) -> tuple[Sample, bool]:
        """Write boxes and names into a sample's texts; return it, and whether all control tokens are well-formed."""
        form = self._known_form()
        images: Any = [self._measure("image", ref) for ref in sample.images]
        sample = _SampleWriter(form, self._limits, images, objects).fill(sample)
        is_well_formed = self._is_well_formed(sample)
        if form.notation == "tokens" and not is_well_formed:
            tokens = ", ".join(self._box_tokens.all)
            detail = f"the row's texts or names contain some of {tokens} outside boxes and names"
            raise RowProblem("invalid_objects", detail)
        return sample, is_well_formed

    def _is_well_formed(self, sample: Sample) -> bool:
        """Return whether the control tokens of boxes and names in a sample's texts form complete boxes and names."""
        return not any(_is_broken(text, self._box_tokens) for text in _texts(sample))

    def _may_have_boxes(self, sample: Sample) -> bool:
        """Return whether the texts of a row with pictures contain control tokens or JSON keys of boxes."""
        if not sample.images:
            return False
        text = "\n".join([text for turn in sample.turns for text in turn.texts])
        has_tokens = any(token in text for token in self._box_tokens.all)
        return has_tokens or (self._default_json_unit is not None and JSON_KEY in text)

    def _known_form(self) -> BoxForm:
        """Return the model's notation of boxes; raise RowProblem if it has none, or lacks the tokens for it."""
        if self._box_form is None:
            known = ", ".join(name for family in FAMILIES if family.boxes is not None for name in family.model_types)
            detail = f"packtool does not know how {self._model_type} models write boxes; it supports {known}"
            raise RowProblem("objects_unsupported", detail)
        missing = [token for token in self._box_form.tokens.all if token not in self._control_tokens]
        if self._box_form.notation == "tokens" and missing:
            raise RowProblem("objects_unsupported", f"the model's tokenizer lacks {', '.join(missing)}")
        return self._box_form


class _SampleWriter:
    """Writes the texts of one sample, in order: each mark is replaced by the next name or box."""

    def __init__(self, form: BoxForm, limits: ImageLimits | None, images: list[EncodedImage], objects: Objects) -> None:
        self._form, self._limits, self._images = form, limits, images
        self._unit = objects.unit
        self._names, self._boxes = iter(objects.names), iter(objects.boxes)
        self._image_numbers = deque(objects.images)
        self._has_image_numbers = bool(objects.images)

    def fill(self, sample: Sample) -> Sample:
        """Return the sample with its boxes and names in its texts; raise RowProblem if they do not match."""
        turns = tuple(map(self._fill_turn, sample.turns))
        responses = tuple(replace(each, turns=tuple(map(self._fill_turn, each.turns))) for each in sample.responses)
        if self._image_numbers:
            detail = f"'image_id' of 'objects' has {len(self._image_numbers)} entries more than the texts have boxes"
            raise RowProblem("object_marks", detail)
        return replace(sample, turns=turns, responses=responses)

    def _fill_turn(self, turn: Turn) -> Turn:
        return turn.map_texts(lambda text: _MARKS.sub(self._text_at_mark, self._rescale_json(text, turn.role)))

    def _text_at_mark(self, mark: re.Match[str]) -> str:
        if mark[0] != BOX_MARK:
            name, json_opening = self._form.name(next(self._names)), mark["json"]
            return json_opening + json.dumps(name, ensure_ascii=False)[1:-1] if json_opening else name
        return self._form.boxes(list(map(self._numbers, next(self._boxes))))

    def _rescale_json(self, text: str, role: str) -> str:
        """Convert the coordinates in a text's JSON; examples of the notation in a question stay."""
        if self._unit is None:
            return text
        pieces, start = [], 0
        for key in _BOX_KEY.finditer(text):
            if key.end() < start:
                continue
            parsed = self._parse_json(text, key, role)
            if parsed is not None:
                value, stop = parsed
                is_nested = _is_nested(value)
                boxes = value if is_nested else [value]
                numbers = [self._numbers(self._box(box, key[0])) for box in boxes]
                pieces += [text[start : key.end()], str(numbers if is_nested else numbers[0])]
                start = stop
        return "".join((*pieces, text[start:]))

    def _parse_json(self, text: str, key: re.Match[str], role: str) -> tuple[Any, int] | None:
        """Parse the JSON after a key: return its value and end; None for null, or an example without coordinates."""
        try:
            value, stop = _JSON.raw_decode(text, key.end())
        except (ValueError, RecursionError) as error:
            if role != "assistant":
                return None
            raise RowProblem("invalid_objects", f"the value of {key[0].strip()} is not JSON: {error}") from error
        flat = list(chain.from_iterable(value)) if _is_nested(value) else value
        has_coordinates = isinstance(flat, list) and all(finite(number) is not None for number in flat)
        if value is None or (role != "assistant" and not has_coordinates):
            return None
        return value, stop

    def _box(self, value: Any, key: str) -> Region:
        """Return the region that a box in JSON describes; its picture is given by ``image_id``, or is the only one."""
        assert self._unit is not None, "the unit of the numbers is known"
        corners = corners_of(value, key.strip(" :"), self._unit)
        if self._has_image_numbers:
            if not self._image_numbers:
                raise RowProblem("object_marks", "the texts have more boxes than 'image_id' of 'objects' has entries")
            return Region(corners, self._image_numbers.popleft(), self._unit)
        if len(self._images) == 1:
            return Region(corners, 0, self._unit)
        detail = f"the row has {len(self._images)} pictures, and it is not known which of them has the box {value}"
        raise RowProblem("object_image", f"{detail}: give 'image_id' in 'objects'")

    def _numbers(self, box: Region) -> list[int]:
        """Return the coordinates of a region as they are written, x and y of each corner; RowProblem if outside."""
        image = self._images[box.image]
        row_size = {"real": (image.width, image.height), "norm1": (1, 1), "norm1000": (1000, 1000)}[box.unit]
        sizes = list(zip(row_size, written_size(self._form, image, self._limits), strict=True))
        numbers = []
        for i, value in enumerate(box.corners):
            size, written = sizes[i % 2]
            if value > size * (1 + ROUNDING):
                shown = ", ".join(f"{each:g}" for each in box.corners)
                detail = f"[{shown}] is outside picture {box.image}, which has {image.width}x{image.height} pixels"
                raise RowProblem("box_outside", detail)
            numbers.append(round(value / size * written))
        return numbers


def _is_broken(text: str, tokens: BoxTokens) -> bool:
    """Return whether a text has tokens of boxes or names outside well-formed boxes and names."""
    control = re.compile("|".join(map(re.escape, tokens.all)))
    if control.search(text) is None:
        return False
    name, box = ([*map(re.escape, pair)] for pair in (tokens.name, tokens.box))
    well_formed = rf"((?!{control.pattern}).)*".join(name), tokens.box_pattern.join(box)
    return control.search(re.sub("|".join(well_formed), "", text, flags=re.DOTALL)) is not None


def _texts(sample: Sample) -> Iterator[str]:
    answers = (turn for response in sample.responses for turn in response.turns)
    return (text for turn in chain(sample.turns, answers) for text in turn.texts)


def _is_nested(value: Any) -> bool:
    return bool(value) and all(isinstance(each, list) for each in value)
