"""Boxes, points and polygons of a row's ``objects``, and names, written into its texts as the model's family has them.

A coordinate goes from the picture as its header says that it is (after the EXIF orientation) to the picture as the
processor resizes it, or to thousandths; numbers are those of ms-swift: ``round(x / width * written_width)``.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from packtool.config.data import BboxType, BoxOptions
from packtool.constants import BOX_MARK, NAME_MARK
from packtool.encode.encoded import EncodedImage
from packtool.encode.families import FAMILIES, ImageLimits, MediaKind, Medium, family_of
from packtool.encode.families.boxes import QWEN_TOKENS, BoxForm, BoxTokens
from packtool.encode.model_files import ModelFiles
from packtool.encode.template import CannotRender
from packtool.errors import ConfigError
from packtool.media.opening import MediaProblem
from packtool.rows.forms.columns import RowProblem, finite
from packtool.rows.forms.objects import JSON_KEY, ROUNDING, corners_of
from packtool.rows.sample import Dropped, MediaRef, Objects, Region, Sample, Turn

# A name that is a text of JSON is written as one.
_MARKS = re.compile(rf'(?P<json>[:\[,]\s*"){NAME_MARK}(?=")|{NAME_MARK}|{BOX_MARK}')
_KEYS = re.compile(rf'"\w+{JSON_KEY}\s*:\s*(?=[^\s<])')  # behind the key of a box of objects stands its mark
_JSON = json.JSONDecoder()


def box_form_of(config: Mapping[str, Any], bbox_format: str | None, norm_bbox: str | None) -> BoxForm | None:
    """How boxes are written for a model with this ``config.json``, and with these options; None if nobody knows."""
    form = family_of(config).boxes
    if form is None:
        return None
    if bbox_format is not None:
        form = replace(form, notation="tokens" if bbox_format == "legacy" else "lists")
    if norm_bbox is not None:
        form = replace(form, scale="thousandths" if norm_bbox == "norm1000" else "pixels")
    return form


def written_size(form: BoxForm, image: EncodedImage, limits: ImageLimits | None) -> tuple[int, int]:
    """What the width and the height of a picture are in written coordinates."""
    if form.scale == "thousandths":
        return 1000, 1000
    assert limits is not None, "families that write pixels have grids"
    return image.grid[2] * limits.patch_size, image.grid[1] * limits.patch_size


@dataclass(frozen=True)
class BoxWriter:
    """Writes boxes and names into the texts of samples.

    Args:
        form: of the model's family; None refuses all.
        unit: of coordinates in JSON, for rows that do not say it (``--bbox-type``).
        limits: of the model on pictures.
        control: tokens that the model's tokenizer knows.
        model_type: of the model, for messages.
        measure: looks at a picture.
    """

    form: BoxForm | None
    unit: BboxType | None
    limits: ImageLimits | None
    control: frozenset[str]
    model_type: str
    measure: Callable[[MediaKind, MediaRef], Medium]

    @classmethod
    def of(
        cls,
        files: ModelFiles,
        options: BoxOptions,
        limits: ImageLimits | None,
        control: frozenset[str],
        measure: Callable[[MediaKind, MediaRef], Medium],
    ) -> BoxWriter:
        """The one for a model, with these options.

        Raises:
            ConfigError: for pixels of resized pictures, of a model whose own processor resizes them.
        """
        form = box_form_of(files.config, options.bbox_format, options.norm_bbox)
        if form is not None and form.scale == "pixels" and limits is None:
            raise ConfigError(
                f"--norm-bbox none: how the processor of {files.model_type} models resizes a picture is not known",
                "Leave it out: such models are told thousandths of a picture's sides.",
            )
        return cls(form, options.bbox_type, limits, control, files.model_type, measure)

    def ready(self, sample: Sample) -> Sample | Dropped:
        """The sample with its boxes and names in its texts, or why it is dropped.

        What the texts themselves spell between the control tokens of boxes and names is taken as these tokens, where
        all of it is well-formed, and the row has pictures.
        """
        if sample.objects is None and not (sample.images and self._may_have_boxes(sample)):
            return sample
        try:
            return self._written(sample)
        except (MediaProblem, RowProblem) as problem:
            return Dropped(sample.source, sample.row, problem.reason, problem.detail)

    def _may_have_boxes(self, sample: Sample) -> bool:
        joined = "\n".join([text for turn in sample.turns for text in turn.texts])
        return any(token in joined for token in self._tokens.all) or (self.unit is not None and JSON_KEY in joined)

    @property
    def _tokens(self) -> BoxTokens:
        return QWEN_TOKENS if self.form is None else self.form.tokens

    def _written(self, sample: Sample) -> Sample:
        """The sample with what it has of boxes and names in its texts.

        Raises:
            RowProblem: if a box lies outside its picture, or the model's family has no form for it.
        """
        objects = sample.objects or Objects()
        if objects.unit is None:
            objects = replace(objects, unit=self.unit)
        form = None
        has_json = objects.unit is not None and any(map(_KEYS.search, _texts(sample)))
        if objects.names or objects.boxes or has_json:
            form = self._known_form()
            sample = _Writing(self, form, sample, objects).written()
        tokens = self._tokens
        is_spelled = not any(_is_broken(text, tokens) for text in _texts(sample))
        if form is not None and form.notation == "tokens" and not is_spelled:
            told = ", ".join(tokens.all)
            raise CannotRender("invalid_objects", f"the row's texts or names spell some of {told} where none belongs")
        return replace(sample, objects=None, control=self.control & {*tokens.all} if is_spelled else frozenset())

    def _known_form(self) -> BoxForm:
        if self.form is None:
            known = ", ".join(name for family in FAMILIES if family.boxes is not None for name in family.model_types)
            detail = f"how {self.model_type} models write boxes is not known; it is of {known}"
            raise CannotRender("objects_unsupported", detail)
        missing = [token for token in self.form.tokens.all if token not in self.control]
        if self.form.notation == "tokens" and missing:
            raise CannotRender("objects_unsupported", f"the model's tokenizer has no {', '.join(missing)}")
        return self.form


class _Writing:
    """Writes the texts of one sample in their order: each mark takes what comes next."""

    def __init__(self, writer: BoxWriter, form: BoxForm, sample: Sample, objects: Objects) -> None:
        self._form, self._sample, self._limits = form, sample, writer.limits
        self._images: Any = [writer.measure("image", ref) for ref in sample.images]
        self._unit = objects.unit
        self._names, self._boxes = iter(objects.names), iter(objects.boxes)
        self._places = deque(objects.images)
        self._says_places = bool(objects.images)

    def written(self) -> Sample:
        turns = tuple(map(self._turn, self._sample.turns))
        responses = self._sample.responses
        responses = tuple(replace(each, turns=tuple(map(self._turn, each.turns))) for each in responses)
        if self._places:
            detail = f"'image_id' of 'objects' names {len(self._places)} pictures more than the texts have boxes"
            raise CannotRender("object_marks", detail)
        return replace(self._sample, turns=turns, responses=responses)

    def _turn(self, turn: Turn) -> Turn:
        return turn.with_texts(lambda text: _MARKS.sub(self._at_mark, self._rescaled(text, turn.role)))

    def _at_mark(self, mark: re.Match[str]) -> str:
        if mark[0] != BOX_MARK:
            name, opening = self._form.name(next(self._names)), mark["json"] or ""
            return opening + (json.dumps(name, ensure_ascii=False)[1:-1] if opening else name)
        return self._form.boxes(list(map(self._numbers, next(self._boxes))))

    def _rescaled(self, text: str, role: str) -> str:
        """The text with the coordinates of its JSON as they are written; what a question shows as a form stays."""
        if self._unit is None:
            return text
        pieces, start = [], 0
        for key in _KEYS.finditer(text):
            if key.end() < start:
                continue
            found = self._json(text, key, role)
            if found is not None:
                value, stop = found
                boxes = value if _is_nested(value) else [value]
                numbers = [self._numbers(self._box(each, key[0])) for each in boxes]
                pieces += [text[start : key.end()], str(numbers if _is_nested(value) else numbers[0])]
                start = stop
        return "".join((*pieces, text[start:]))

    def _json(self, text: str, key: re.Match[str], role: str) -> tuple[Any, int] | None:
        """The value of a key and where it ends; None for null, and for what is no coordinates and no answer either."""
        try:
            value, stop = _JSON.raw_decode(text, key.end())
        except (ValueError, RecursionError) as error:
            if role != "assistant":
                return None
            raise CannotRender("invalid_objects", f"what follows {key[0].strip()} is no JSON: {error}") from error
        flat = list(chain.from_iterable(value)) if _is_nested(value) else value
        is_list = isinstance(flat, list) and all(finite(number) is not None for number in flat)
        return None if value is None or (role != "assistant" and not is_list) else (value, stop)

    def _box(self, value: Any, key: str) -> Region:
        """A box of JSON."""
        assert self._unit is not None, "it is known what the numbers are"
        corners = corners_of(value, key.strip(" :"), self._unit)
        if self._says_places:
            if not self._places:
                raise CannotRender("object_marks", "the texts have more boxes than 'image_id' of 'objects' pictures")
            return Region(corners, self._places.popleft(), self._unit)
        if len(self._images) == 1:
            return Region(corners, 0, self._unit)
        detail = f"the row has {len(self._images)} pictures, and nothing says on which of them {value} lies"
        raise CannotRender("object_image", detail + "; 'image_id' in 'objects' would")

    def _numbers(self, box: Region) -> list[int]:
        """The coordinates of a box as they are written."""
        image = self._images[box.image]
        true = {"real": (image.width, image.height), "norm1": (1, 1), "norm1000": (1000, 1000)}[box.unit]
        sizes = list(zip(true, written_size(self._form, image, self._limits), strict=True))
        found = []
        for i, value in enumerate(box.corners):
            size, written = sizes[i % 2]
            if value > size * (1 + ROUNDING):
                shown = ", ".join(f"{each:g}" for each in box.corners)
                detail = f"[{shown}] is not inside picture {box.image} of {image.width}x{image.height} pixels"
                raise CannotRender("box_outside", detail)
            found.append(round(value / size * written))
        return found


def _is_broken(text: str, tokens: BoxTokens) -> bool:
    """Whether some tokens of boxes and names stand in a text where none belongs."""
    control = re.compile("|".join(map(re.escape, tokens.all)))
    if control.search(text) is None:
        return False
    name, box = ([*map(re.escape, pair)] for pair in (tokens.name, tokens.box))
    inside = rf"((?!{control.pattern}).)*".join(name), tokens.box_pattern.join(box)
    return control.search(re.sub("|".join(inside), "", text, flags=re.DOTALL)) is not None


def _texts(sample: Sample) -> Iterator[str]:
    said = (turn for response in sample.responses for turn in response.turns)
    return (text for turn in chain(sample.turns, said) for text in turn.texts)


def _is_nested(value: Any) -> bool:
    """Whether a list of JSON holds boxes, and is not one."""
    return bool(value) and all(isinstance(each, list) for each in value)
