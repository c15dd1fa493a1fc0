"""Places that are read back from texts: those that were written, and no others."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.encode.encoded import EncodedImage
from packtool.encode.families import ImageLimits
from packtool.encode.families.record import INTERNVL_TOKENS, BoxForm
from packtool.report.regions import PICTURE, ShownRegion, regions_of

LIMITS = ImageLimits(1, 1 << 30, 16, 2, 2)
IMAGE = EncodedImage("a.png", None, 480, 640, (1, 32, 40), 320)  # shown to the model as 640x512
TOKENS, LISTS = (BoxForm(notation, "thousandths") for notation in ("tokens", "lists"))
PIXELS = BoxForm("lists", "pixels")
INTERNVL = BoxForm("tokens", "thousandths", INTERNVL_TOKENS)


def regions_in(text: str, form: BoxForm | None = LISTS, num_images: int = 1, **more: bool) -> list[ShownRegion]:
    return regions_of(text, [IMAGE] * num_images, form, LIMITS, **{"is_complete": True, **more})


def test_each_notation_of_regions() -> None:
    box = ((0.1, 0.2), (0.5, 0.25))
    dog = ShownRegion("a dog", box, 0, True)
    assert regions_in(PICTURE + TOKENS.name("a dog") + TOKENS.boxes([[100, 200, 500, 250]]), TOKENS) == [dog]
    assert regions_in(PICTURE + INTERNVL.name("a dog") + INTERNVL.boxes([[100, 200, 500, 250]]), INTERNVL) == [dog]
    question = PICTURE + f"Where is {INTERNVL.name('it')}?" + INTERNVL.name("a dog")
    assert regions_in(question + INTERNVL.boxes([[100, 200, 500, 250]]), INTERNVL) == [dog]
    two = [[100, 200, 500, 250], [1, 2, 3, 4]]
    assert len(regions_in(PICTURE + INTERNVL.boxes(two), INTERNVL)) == 2
    for text in (
        '{"bbox_2d": [100, 200, 500, 250], "label": "a dog"}',
        '{"label": "a dog",\n "bbox_2d": [100,200,500,250]}',
        '{"bbox_2d": [[100, 200, 500, 250]], "label": "a d\\u006fg"}',
        f'{{"bbox_2d": {TOKENS.boxes([[100, 200, 500, 250]])}, "label": "{TOKENS.name("a dog")}"}}',
    ):
        assert regions_in(text) == [dog], text
    assert regions_in('{"bbox_2d": [64, 128, 320, 128], "label": "a dog"}', PIXELS) == [
        ShownRegion("a dog", ((0.1, 0.25), (0.5, 0.25)), 0, True)
    ]
    assert [region.corners for region in regions_in("a dog[100, 200, 500, 250] click('[100, 200]')")] == [box, box[:1]]
    assert dog.description(640, 480) == "a dog, box 64,96 320,120 of image 0"


@pytest.mark.parametrize(
    "text",
    [
        "the answer is [1, 2], or [3], or [1, 2, 3] as of [2019, 2020, 2021, 2022]",
        "x = [4, 3, 2, 1]; [100, 200, 500, 1250]",
        'answer as {"bbox_2d": [x1, y1, x2, y2]}',
        "<|box_start|>nothing<|box_end|>",
    ],
)
def test_other_numbers_are_not_parsed_as_regions(text: str) -> None:
    assert regions_in(text) == []
    assert regions_in('{"bbox_2d": [1, 2, 3, 4]}', None) == regions_in('{"bbox_2d": [1, 2, 3, 4]}', num_images=0) == []


def test_regions_outside_the_image_are_reported() -> None:
    """Pixels in the text of a model that uses thousandths: JSON marks them as coordinates."""
    (region,) = regions_in('{"bbox_2d": [300, 200, 1200, 900]}')
    assert not region.is_inside
    assert region.description(640, 480).endswith("of image 0, outside the image")


def test_regions_are_listed_for_each_possible_image() -> None:
    text = f'{PICTURE}{PICTURE} {{"point_2d": [1, 2]}} {PICTURE} "[3, 4]"'
    regions = regions_in(text, num_images=3)
    assert [(region.image, len(region.corners)) for region in regions] == [(0, 1), (1, 1), (0, 1), (1, 1), (2, 1)]
    assert {region.is_certain for region in regions} == {False}
    assert not regions_in(PICTURE + '"[3, 4]"', is_complete=False)[0].is_certain


NAMES = st.text(st.characters(exclude_characters="\ufffc", exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers(0, 500)


@settings(max_examples=30)
@given(st.lists(st.tuples(NAMES, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=5), st.booleans())
def test_written_regions_are_parsed(answer_boxes: list[tuple[str, int, int, int, int]], has_tokens: bool) -> None:
    boxes = [(name, [x, y, x + width, y + height]) for name, x, y, width, height in answer_boxes]
    if has_tokens:
        text = " ".join(TOKENS.name(name) + TOKENS.boxes([box]) for name, box in boxes)
    else:
        text = json.dumps([{"bbox_2d": box, "label": name} for name, box in boxes], ensure_ascii=False)
    expected = [(name.strip(), ((x / 1000, y / 1000), (p / 1000, q / 1000))) for name, (x, y, p, q) in boxes]
    assert [(region.name, region.corners) for region in regions_in(PICTURE + text)] == expected
