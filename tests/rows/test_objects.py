"""``objects`` in all their forms, and what is said about those that cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.rows.forms import RowProblem
from packtool.rows.sample import Objects, Region
from tests.rows.test_forms import assistant, problem_of, read, user

DOG = (331.5, 761.4, 853.5, 1594.8)


def row(objects: Any, answer: str = "<ref-object><bbox>", **more: Any) -> dict[str, Any]:
    return {"messages": [user("<image>q"), assistant(answer)], "images": ["a.png"], "objects": objects, **more}


@pytest.mark.parametrize(
    ("objects_column", "answer", "objects"),
    [
        ({"ref": ["dog"], "bbox": [DOG]}, "<ref-object><bbox>", Objects(("dog",), ((Region(DOG),),))),
        ({"ref": [], "bbox": [[615, 226]]}, "click('<bbox>')", Objects((), ((Region((615, 226)),),))),
        ({"ref": None, "bbox": [[1, 2, 3, 4, 5, 6]]}, "<bbox>", Objects((), ((Region((1, 2, 3, 4, 5, 6)),),))),
        (
            {"ref": ["a", "b"], "bbox": [[[1, 2], [3, 4, 5, 6]]], "bbox_type": "norm1000", "image_id": [0]},
            "<ref-object> and <ref-object>: <bbox>",
            Objects(("a", "b"), ((Region((1, 2), 0, "norm1000"), Region((3, 4, 5, 6), 0, "norm1000")),)),
        ),
        # As ms-swift had them before version 3: one object may have a mark for its name, its boxes, or both.
        (
            [{"caption": "guy", "bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], "bbox_type": "real", "image": 0}],
            "<bbox>",
            Objects((), ((Region((1, 2, 3, 4)), Region((5, 6, 7, 8))),)),
        ),
        (
            [{"caption": "guy", "bbox": [0.1, 0.2, 0.3, 1], "bbox_type": "norm_1", "image": None}],
            "<bbox> is <ref-object>",
            Objects(("guy",), ((Region((0.1, 0.2, 0.3, 1), 0, "norm1"),),)),
        ),
        ({"bbox_type": "real"}, '{"bbox_2d": [1, 2, 3, 4]}', Objects(unit="real")),
        ({}, "no marks", None),
        ({"ref": [], "bbox": []}, "no marks", None),
    ],
)
def test_all_object_formats_are_read(objects_column: Any, answer: str, objects: Objects | None) -> None:
    assert read(row(objects_column, answer)).objects == objects
    assert read(row(json.dumps(objects_column), answer)).objects == objects


def test_placeholders_in_thoughts_and_calls_are_read() -> None:
    call = {"role": "tool_call", "content": json.dumps({"name": "click", "arguments": {"at": "<bbox>"}})}
    turns = [user("<image><ref-object>?"), assistant("<bbox>", reasoning_content="<bbox>"), call]
    boxes = [[coordinate, coordinate] for coordinate in range(3)]
    sample = read({"messages": turns, "images": ["a.png"], "objects": {"ref": ["x"], "bbox": boxes}})
    assert sample.objects is not None
    assert [texts for turn in sample.turns for texts in turn.texts if "<bbox>" in texts] == ["<bbox>"] * 3
    assert problem_of(
        {"messages": turns, "images": ["a.png"], "objects": {"ref": ["x"], "bbox": boxes[:2]}}
    ).detail.startswith("the texts have 3 <bbox> placeholders, but 'objects' has 2 boxes")


def test_objects_follow_the_json_declaration() -> None:
    json_row = {"messages": [user("<image>q"), assistant('[{"point_2d": [1, 2]}]')], "images": ["a.png"]}
    assert read(json_row | {"bbox_type": "norm1000"}).objects == Objects(unit="norm1000")
    assert read(json_row).objects is None
    assert problem_of(json_row | {"bbox_type": "xyxy"}).reason == "invalid_objects"
    # A column of this name that is about something else says nothing.
    plain = {"messages": [user("q"), assistant("a")], "bbox_type": "xyxy"}
    assert read(plain).objects is None


@pytest.mark.parametrize(
    ("objects_column", "answer", "reason"),
    [
        (None, "<bbox>", "object_marks"),
        ({"ref": ["x"]}, "<bbox>", "object_marks"),
        ({"bbox": [[1, 2]]}, "nothing", "object_marks"),
        ({"ref": ["x"], "bbox": [[1, 2]]}, "<bbox><ref-object><bbox>", "object_marks"),
        ([{"caption": "x", "bbox": [1, 2]}], "nothing", "object_marks"),
        ({"bbox": [[1, 2, 162, 185]], "categories": [1]}, "a detection set's own", "object_marks"),
        ({"bbox": [[3, 2, 1, 4]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[1, 4, 3, 2]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[1, 2, 3]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [5]}, "<bbox>", "invalid_objects"),
        ({"bbox": ["1, 2"]}, "<bbox>", "invalid_objects"),
        ({"bbox": [["1", "2"]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[True, False]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[float("nan"), 2]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[1, float("inf")]]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[10**400, 1]]}, "<bbox>", "invalid_objects"),
        ({"bbox": {"x": 1}}, "<bbox>", "invalid_objects"),
        ({"ref": [5], "bbox": []}, "<ref-object>", "invalid_objects"),
        ({"ref": ["<image>"]}, "<ref-object>", "invalid_objects"),
        ({"bbox": [[1, 2]], "bbox_type": "xyxy"}, "<bbox>", "invalid_objects"),
        ({"bbox": [[1, 2]], "image_id": [0, 0]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[1, 2]], "image_id": ["0"]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[1, 2]], "image_id": [-1]}, "<bbox>", "invalid_objects"),
        ({"bbox": [[1, 2]], "image_id": [1]}, "<bbox>", "object_image"),
        ([{"caption": "x", "bbox": [1, 2], "image": 1}], "<bbox>", "object_image"),
        ({"bbox": [[-0.001, 2]]}, "<bbox>", "box_outside"),
        ({"bbox": [[0.5, 1.01]], "bbox_type": "norm1"}, "<bbox>", "box_outside"),
        ({"bbox": [[1, 1001]], "bbox_type": "norm1000"}, "<bbox>", "box_outside"),
        ([5], "<bbox>", "invalid_objects"),
        (5, "<bbox>", "invalid_objects"),
        ("no JSON", "<bbox>", "invalid_row"),
    ],
)
def test_invalid_objects_are_refused(objects_column: Any, answer: str, reason: str) -> None:
    problem = problem_of(row(objects_column, answer))
    assert problem.reason == reason
    assert problem.detail
    if reason == "object_marks":
        # What is no grounding stays what it was, once the user says so.
        assert read(row(objects_column, answer), columns=(("objects", ""),)).objects is None


def test_box_without_images_is_refused() -> None:
    problem = problem_of({"messages": [user("<bbox>")], "objects": {"bbox": [[1, 2]]}})
    assert (problem.reason, problem.detail[-29:]) == ("object_image", " 0, but the row has no images")


SCALARS = st.none() | st.booleans() | st.integers(-3, 2000) | st.floats() | st.sampled_from(["real", "x", "<image>"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
KEYS = ("ref", "bbox", "bbox_type", "image_id", "caption", "image")
GIVEN = st.one_of(VALUES, *(st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, VALUES)) for _ in range(2)))


@settings(max_examples=60)
@given(GIVEN | st.lists(GIVEN, max_size=2), st.sampled_from(["<bbox>", "<ref-object><bbox>", ""]))
def test_any_objects_value_is_read_or_refused(objects_column: Any, answer: str) -> None:
    try:
        objects = read(row(objects_column, answer)).objects or Objects()
    except RowProblem as problem:
        reason = problem.reason
    else:
        assert (len(objects.names), len(objects.boxes)) == (answer.count("<ref-object>"), answer.count("<bbox>"))
        assert all(coordinate > -1e-5 for boxes in objects.boxes for box in boxes for coordinate in box.corners)
        return
    assert reason in ("invalid_objects", "object_marks", "object_image", "box_outside", "invalid_row")
