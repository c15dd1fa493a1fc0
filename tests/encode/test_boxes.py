"""Boxes as each family writes them: the numbers of ms-swift, from the true size of the picture to the resized one."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tokenizers import AddedToken, Tokenizer

from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.families import FAMILIES
from packtool.encode.families.qwen_vl import smart_resize
from packtool.encode.families.record import QWEN_TOKENS
from packtool.rows.forms import to_sample
from packtool.rows.sample import Dropped
from packtool.rows.source import Source
from tests.cache.conftest import model as model
from tests.encode.conftest import encoder_for

Encoders = Callable[..., Encoder]
FACTOR, LEAST, MOST = 32, 1024, 65536  # of the model of these tests
WITH_BOXES = [family.model_types[0] for family in FAMILIES if family.boxes is not None]
VISION = [name for name in WITH_BOXES if name.startswith("qwen") and "omni" not in name]
REF_TOKENS, BOX_TOKENS = QWEN_TOKENS.name, QWEN_TOKENS.box


@pytest.fixture(scope="module")
def encoder_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """Makes encoders for models of a type, whose tokenizer has the tokens of boxes."""

    @cache
    def make(model_type: str, has_tokens: bool = True, max_length: int = 1_000_000, **spec: Any) -> Encoder:
        folder = tmp_path_factory.mktemp("model") / model_type
        shutil.copytree(model, folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": {}}))
        if has_tokens:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokens = [AddedToken(token, special=True, normalized=False) for token in (*REF_TOKENS, *BOX_TOKENS)]
            tokenizer.add_special_tokens(tokens)
            tokenizer.save(str(folder / "tokenizer.json"))
        return encoder_for(folder, max_length=max_length, **spec)

    return make


def picture(width: int, height: int, orientation: int = 1) -> dict[str, str]:
    """A file whose stored pixels have this size, which a reader turns as its EXIF data say."""
    data, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height)).save(data, "JPEG", exif=exif)
    return {"bytes": base64.b64encode(data.getvalue()).decode()}


def row(objects: Any, answer: str, *pictures: Any, question: str = "q", **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(pictures), "objects": objects, **more}


def encoded(encoder: Encoder, row: dict[str, Any]) -> list[EncodedSample] | Dropped:
    (result,) = encoder.encode([to_sample(row, Source("rows.json", form="messages"), 0)])
    return result


def target_text(encoder: Encoder, row: dict[str, Any]) -> str:
    """The trained text, without the token that ends it."""
    result = encoded(encoder, row)
    assert isinstance(result, list), result
    return "".join(text_of(encoder, sample.labels[sample.labels >= 0].tolist()) for sample in result)


def text_of(encoder: Encoder, ids: list[int]) -> str:
    return encoder._tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")


def problem_of(encoder: Encoder, row: dict[str, Any]) -> Dropped:
    result = encoded(encoder, row)
    assert isinstance(result, Dropped)
    return result


def swift_box(corners: list[float], true: tuple[int, int], written: tuple[int, int]) -> list[int]:
    """What ms-swift 4.6 makes of a box (``Template.normalize_bbox``), in other words."""
    return [round(corners[i] / true[i % 2] * written[i % 2]) for i in range(len(corners))]


def resized(width: int, height: int) -> tuple[int, int]:
    """As transformers' processor has it, which ``test_families`` compares this function with."""
    high, wide = smart_resize(height, width, FACTOR, LEAST, MOST)
    return wide, high


SHARES = st.floats(0, 1)
CORNERS = st.one_of(
    st.tuples(SHARES, SHARES),
    st.tuples(SHARES, SHARES, SHARES, SHARES).map(lambda c: (min(c[::2]), min(c[1::2]), max(c[::2]), max(c[1::2]))),
    st.lists(SHARES, min_size=6, max_size=12).map(lambda c: tuple(c[: len(c) // 2 * 2])),
)


@settings(max_examples=40)
@given(
    model_type=st.sampled_from(VISION),
    stored=st.tuples(st.integers(2, 400), st.integers(2, 400)),
    orientation=st.integers(1, 8),
    shares=st.lists(CORNERS, min_size=1, max_size=3),
    unit=st.sampled_from(["real", "norm1", "norm1000"]),
    is_json=st.booleans(),
)
def test_box_coordinates_refer_to_the_resized_image(
    encoder_of: Encoders,
    model_type: str,
    stored: tuple[int, int],
    orientation: int,
    shares: list[tuple[float, ...]],
    unit: str,
    is_json: bool,
) -> None:
    medium = picture(*stored, orientation)
    shown_size = ImageOps.exif_transpose(Image.open(io.BytesIO(base64.b64decode(medium["bytes"])))).size
    units = {"real": shown_size, "norm1": (1, 1), "norm1000": (1000, 1000)}[unit]
    boxes = [[share * units[i % 2] for i, share in enumerate(corners)] for corners in shares]
    if is_json:
        boxes_row = row({"bbox_type": unit}, json.dumps([{"bbox_2d": box, "label": "x"} for box in boxes]), medium)
    else:
        boxes_row = row({"bbox": boxes, "bbox_type": unit}, " ".join(["<bbox>"] * len(boxes)), medium)
    written = resized(*shown_size) if model_type == "qwen2_5_vl" else (1000, 1000)
    expected = [swift_box(box, units, written) for box in boxes]
    text = target_text(encoder_of(model_type), boxes_row)
    if is_json:
        assert text == json.dumps([{"bbox_2d": box, "label": "x"} for box in expected])
    elif model_type == "qwen2_vl":
        pairs = [",".join(f"({x},{y})" for x, y in zip(box[::2], box[1::2], strict=True)) for box in expected]
        assert text == " ".join(f"<|box_start|>{pair}<|box_end|>" for pair in pairs)
    else:
        assert text == " ".join(map(str, expected))


# ms-swift's documentation (Customization/Custom-dataset): what its grounding format becomes for Qwen2-VL, of a picture
# of the size that its numbers come from.
DOCUMENTED = [
    (
        {"ref": ["a dog", "a woman"], "bbox": [[331.5, 761.4, 853.5, 1594.8], [676.5, 685.8, 1099.5, 1427.4]]},
        ("Describe the image.", "<ref-object><bbox> and <ref-object><bbox> are playing on the beach"),
        (1500, 1800),
        "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|> and "
        "<|object_ref_start|>a woman<|object_ref_end|><|box_start|>(451,381),(733,793)<|box_end|> are playing "
        "on the beach",
    ),
    (
        {"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]]},
        ("Find the <ref-object> in the image", "<bbox><bbox>"),
        (900, 800),
        "<|box_start|>(101,201),(150,266)<|box_end|><|box_start|>(401,601),(550,666)<|box_end|>",
    ),
    (
        {"ref": [], "bbox": [[615, 226]]},
        ("Help me open Google Chrome", "Action: click(start_box='<bbox>')"),
        (2500, 2000),
        "Action: click(start_box='<|box_start|>(246,113)<|box_end|>')",
    ),
]


@pytest.mark.parametrize(("objects", "turns", "size", "expected"), DOCUMENTED)
def test_documented_ms_swift_rows_are_converted(
    objects: Any, turns: tuple[str, str], size: tuple[int, int], expected: str, encoder_of: Encoders
) -> None:
    boxes_row = row(objects, turns[1], picture(*size), question=turns[0])
    encoder = encoder_of("qwen2_vl")
    assert target_text(encoder, boxes_row) == expected
    # Rows that spell the tokens themselves, as the same page has them, become the same tokens.
    question = turns[0].replace("<ref-object>", "sheep".join(REF_TOKENS))
    spelled = encoded(encoder, row(None, expected, boxes_row["images"][0], question=question))
    written = encoded(encoder, boxes_row)
    assert isinstance(spelled, list)
    assert isinstance(written, list)
    assert spelled[0].input_ids.tolist() == written[0].input_ids.tolist()
    controls = [text for token in written[0].input_ids.tolist() if (text := text_of(encoder, [token])) in BOX_TOKENS]
    assert len(controls) == 2 * len(objects["bbox"])
    # Both spellings and both scales, on any family.
    legacy = encoder_of("qwen3_vl", bbox_format="legacy")
    assert target_text(legacy, boxes_row) == expected
    pixels = target_text(encoder_of("qwen2_vl", bbox_format="new", norm_bbox="none"), boxes_row)
    assert pixels == target_text(encoder_of("qwen2_5_vl"), boxes_row)


def test_box_lists_are_json(encoder_of: Encoders) -> None:
    """The example for Qwen's own form, and several boxes at one mark; a name in a text of JSON is written as one."""
    answer = '[\n\t{"bbox_2d": <bbox>, "label": "<ref-object>"},\n\t{"bbox_2d": <bbox>, "label": "<ref-object>"}\n]'
    names = ["sheep", 'a "black" \\ sheep', "sheep\nand lamb"]
    boxes = [[90.9, 160.8, 135, 212.8], [[360.9, 480.8, 495, 532.8], [1, 2]]]
    encoder = encoder_of("qwen3_vl")
    text = target_text(
        encoder, row({"ref": names, "bbox": boxes}, answer, picture(900, 800), question="the <ref-object>?")
    )
    labels = json.loads(text)
    assert labels == [
        {"bbox_2d": [101, 201, 150, 266], "label": names[1]},
        {"bbox_2d": [[401, 601, 550, 666], [1, 2]], "label": names[2]},
    ]


def test_numbers_without_a_unit_are_unchanged(encoder_of: Encoders) -> None:
    medium = picture(640, 480)
    answer = '```json\n[{"bbox_2d": [30.5, 40,300, 200], "label": "[1, 2]"}, {"point_2d":[9,9]}]\n```'
    for model_type in VISION:
        assert target_text(encoder_of(model_type), row(None, answer, medium)) == answer
    plain = encoder_of("qwen3_vl", bbox_type="real")
    expected = '```json\n[{"bbox_2d": [48, 83, 469, 417], "label": "[1, 2]"}, {"point_2d":[14, 19]}]\n```'
    assert target_text(plain, row(None, answer, medium)) == expected
    thousandths = answer.replace("30.5, 40,300", "30, 40, 300").replace("[9,9]", "[9, 9]")
    assert target_text(plain, row(None, answer, medium, bbox_type="norm1000")) == thousandths
    # Boxes of marks are of the row's unit whatever the option says, and are not rescaled twice.
    both = row({"bbox": [[320, 240]]}, '{"point_2d": <bbox>}', medium)
    assert target_text(plain, both) == '{"point_2d": [500, 500]}'
    # A form that a question shows is no box; one that it names is.
    question_row = row(
        None, "none", medium, question='as {"bbox_2d": [x1, y1, x2, y2]}: {"bbox_2d": [320, 240, 640, 480]}'
    )
    result = encoded(plain, question_row)
    assert isinstance(result, list)
    prompt_text = text_of(plain, result[0].input_ids.tolist())
    assert 'as {"bbox_2d": [x1, y1, x2, y2]}: {"bbox_2d": [500, 500, 1000, 1000]}' in prompt_text


def test_boxes_on_several_images(encoder_of: Encoders) -> None:
    pictures = picture(200, 100), picture(100, 400)
    boxes, ids = [[100, 100], [100, 100], [100, 100]], [0, 1, 0]
    boxes_row = row({"bbox": boxes, "image_id": ids}, "<bbox><bbox><bbox>", *pictures)
    assert target_text(encoder_of("qwen3_vl"), boxes_row) == "[500, 1000][1000, 250][500, 1000]"
    in_json = '{"point_2d": [[100, 100], [100, 100]]}'
    stated = row({"bbox_type": "real", "image_id": [1, 0]}, in_json, *pictures)
    assert target_text(encoder_of("qwen3_vl"), stated) == '{"point_2d": [[1000, 250], [500, 1000]]}'
    for objects in ({"bbox_type": "real", "image_id": [0]}, {"bbox_type": "real", "image_id": [0, 0, 0]}):
        assert problem_of(encoder_of("qwen3_vl"), row(objects, in_json, *pictures)).reason == "object_marks"
    unknown = problem_of(encoder_of("qwen3_vl"), row({"bbox_type": "real"}, in_json, *pictures))
    assert (unknown.reason, "image_id" in unknown.detail) == ("object_image", True)


def test_responses_and_thoughts_have_boxes(encoder_of: Encoders) -> None:
    turns = [
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "<bbox>"},
        {"role": "user", "content": "and <bbox>?"},
    ]
    boxes_row = {
        "messages": turns,
        "images": [picture(100, 100)],
        "responses": ["<bbox>", "none", "<bbox>"],
        "objects": {"bbox": [[coordinate, coordinate] for coordinate in (1, 2, 3, 4)]},
    }
    result = encoded(encoder_of("qwen3_vl"), boxes_row)
    assert isinstance(result, list)
    texts = [text_of(encoder_of("qwen3_vl"), sample.input_ids.tolist()) for sample in result]
    assert [re.findall(r"\[\d+, \d+\]", text) for text in texts] == [
        ["[10, 10]", "[20, 20]", "[30, 30]"],
        ["[10, 10]", "[20, 20]"],
        ["[10, 10]", "[20, 20]", "[40, 40]"],
    ]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_boxes(side: str, encoder_of: Encoders) -> None:
    """What is left of a sample is what stood there in the whole one."""
    boxes_row = row({"bbox": [[100, 50, 400, 300]] * 9, "ref": ["x"] * 9}, "<ref-object><bbox>" * 9, picture(640, 480))
    for model_type in VISION:
        full_samples, truncated_samples = (
            encoded(encoder_of(model_type, max_length=length, truncation_strategy=side), boxes_row)
            for length in (10_000, 150)
        )
        assert isinstance(full_samples, list)
        assert isinstance(truncated_samples, list)
        ids, remaining_ids = full_samples[0].input_ids.tolist(), truncated_samples[0].input_ids.tolist()
        assert len(remaining_ids) == 150
        end_ids = remaining_ids[-60:] if side == "left" else remaining_ids[-30:]
        assert end_ids == (ids[-60:] if side == "left" else ids[120:150])


def test_invalid_boxes_drop_their_row(encoder_of: Encoders, model: Path) -> None:
    medium = picture(640, 480, 6)  # a reader sees 480x640
    encoder = encoder_of("qwen2_vl")
    assert target_text(encoder, row({"bbox": [[480, 640]]}, "<bbox>", medium)) == "<|box_start|>(1000,1000)<|box_end|>"
    # What adding floats leaves is not outside.
    added = [0.1 + 0.2 - 0.3 - 1e-16, 0.0, 380.1 + 99.9, 640.0000000000001]
    assert target_text(encoder, row({"bbox": [added]}, "<bbox>", medium)) == "<|box_start|>(0,0),(1000,1000)<|box_end|>"
    outside = problem_of(encoder, row({"bbox": [[0, 0, 481, 640]]}, "<bbox>", medium))
    assert outside.reason == "box_outside"
    assert outside.detail == "[0, 0, 481, 640] is outside picture 0, which has 480x640 pixels"
    boxes_row = row(None, "yes", medium, question='is {"bbox_2d": [0, 0, 481, 640]} a cat?', bbox_type="real")
    assert problem_of(encoder, boxes_row).reason == "box_outside"
    assert target_text(encoder, row(None, '{"bbox_2d": null}', medium, bbox_type="real")) == '{"bbox_2d": null}'
    for answer in (
        '{"bbox_2d": "1, 2"}',
        '{"bbox_2d": [1, 2, 3]}',
        '{"bbox_2d": ["1", 2]}',
        '{"bbox_2d": [3, 3, 1, 1]}',
        '{"bbox_2d": [1, 2',
    ):
        assert problem_of(encoder, row(None, answer, medium, bbox_type="real")).reason == "invalid_objects"
    missing_row = problem_of(encoder, row({"bbox": [[1, 2]]}, "<bbox>", "gone.png"))
    assert missing_row.reason == "media_missing"
    # Tokens of boxes that nothing closes are text, as all control tokens are that a row spells; not beside real ones.
    broken = row(None, "a <|box_end|>", medium)
    assert target_text(encoder, broken) == "a <|box_end|>"
    assert problem_of(encoder, row({"bbox": [[1, 2]]}, "<bbox><|box_end|>", medium)).reason == "invalid_objects"
    named = row({"ref": ["a <|box_end|>"]}, "<ref-object>", medium)
    assert problem_of(encoder, named).reason == "invalid_objects"
    assert target_text(encoder_of("qwen3_vl"), named) == "a <|box_end|>"
    # Names need no picture.
    assert target_text(encoder, row({"ref": ["x"]}, "<ref-object>")) == "x".join(REF_TOKENS)
    missing = problem_of(encoder_of("qwen2_vl", has_tokens=False), row({"bbox": [[1, 2]]}, "<bbox>", medium))
    assert missing.detail == "the model's tokenizer lacks " + ", ".join((*REF_TOKENS, *BOX_TOKENS))


def test_families_without_box_format_are_reported(encoder_of: Encoders, monkeypatch: pytest.MonkeyPatch) -> None:

    encoder = encoder_of("qwen3_5")
    monkeypatch.setattr(encoder._boxes, "_box_form", None)
    monkeypatch.setattr(encoder._boxes, "_model_type", "seer")
    problem = problem_of(encoder, row({"bbox": [[1, 2]]}, "<bbox>", picture(9, 9)))
    assert problem.reason == "objects_unsupported"
    assert problem.detail.startswith(
        "packtool does not know how seer models write boxes; it supports qwen2_vl, qwen2_5_vl, qwen3_vl"
    )
    assert all(name in problem.detail for name in WITH_BOXES)
    assert target_text(encoder, row(None, "no boxes", picture(9, 9))) == "no boxes"


def test_boxes_of_a_measured_image(qwen3_vl: Encoder, data: Path) -> None:
    path = data / "raw" / "qwen3-vl" / "qwen-vl-finetune" / "demo" / "images" / "10095.png"
    width, height = Image.open(path).size
    box = [width / 3, height / 7, width / 2, float(height)]
    answer = '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'
    sample = to_sample(
        row({"ref": ["最高的柱子"], "bbox": [box]}, answer, str(path)),
        Source("rows.json", form="messages", media_root=str(data)),
        0,
    )
    (result,) = qwen3_vl.encode([sample])
    assert isinstance(result, list)
    text = text_of(qwen3_vl, result[0].labels[result[0].labels >= 0].tolist())
    assert json.loads(text) == [{"bbox_2d": [333, 143, 500, 1000], "label": "最高的柱子"}]
