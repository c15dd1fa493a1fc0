"""Whatever a row holds, it becomes samples or one ``Dropped``, and the rows beside it stay what they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder, encode_samples
from packtool.errors import StorageError
from packtool.rows.read import samples_of, scan
from packtool.rows.sample import Dropped
from packtool.rows.source import SourceSpec
from tests.encode.conftest import encoder_for
from tests.encode.test_encoder import CHATML, CONTROL, QWEN_CONFIG
from tests.forked import forked_process
from tests.media.clips import write_clip

NASTY = st.sampled_from(
    [
        *("<image>", "<video>", "a.png", "gone.png", "a\0b", "data:image/png;base64,A", "<|im_end|>", "/proc/self/mem"),
        *("\ud800", "\U0001f600", "\U0010ffff", "[", "{}", '[{"role": "user", "content": "\\ud800"}]', ""),
    ]
)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), NASTY),
    st.sampled_from([10**400, -(10**400), 1e308, float("nan"), float("-inf")]),
)
KEYS = st.sampled_from(
    ["role", "from", "content", "value", "type", "text", "image", "url", "path", "bytes", "frames", "fps", "name"]
) | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def mostly_valid(usual: st.SearchStrategy[Any], share: int = 12) -> st.SearchStrategy[Any]:
    """What a row should hold, but for one in so many: of many mistakes, only the first would show."""
    return st.integers(1, share).flatmap(lambda draw: VALUES if draw == share else usual)


TEXTS = mostly_valid(st.text(max_size=8) | NASTY)
CALLS = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXTS, "arguments": VALUES})}))
MESSAGE = {
    "content": TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2),
}
USER = st.fixed_dictionaries({"role": mostly_valid(st.sampled_from(["user", "human"])), **MESSAGE})
OTHER = st.fixed_dictionaries(
    {"role": mostly_valid(st.sampled_from(["assistant", "user", "tool", "system", "function_call"])), **MESSAGE},
    optional={name: mostly_valid(usual, 3) for name, usual in (("tool_calls", CALLS), ("loss", st.booleans()))}
    | {"loss_scale": SCALARS, "reasoning_content": TEXTS},
)
MESSAGES = mostly_valid(st.tuples(USER, OTHER, OTHER).map(list))
FILES = mostly_valid(st.lists(st.sampled_from(["a.png", "a.png", "gone.png", "/proc/self/mem", "a\0b"]), max_size=2), 3)
MORE = dict.fromkeys(("images", "videos", "image_path"), FILES)
MORE |= dict.fromkeys(("tools", "system", "channel", "history", "objects"), VALUES)
FORMS = {
    "messages": {"messages": MESSAGES},
    "query": {"query": TEXTS, "response": TEXTS},
    "alpaca": {"instruction": TEXTS, "input": TEXTS, "output": TEXTS},
    "text": {"text": TEXTS},
}
ROWS = {name: mostly_valid(st.fixed_dictionaries(columns, optional=MORE)) for name, columns in FORMS.items()}
PLAIN = {
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "query": {"query": "q", "response": "a"},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "text": {"text": "abc"},
}


GOOD = json.dumps(PLAIN["messages"]).encode()


@pytest.fixture(params=[{"model_type": "llama"}, QWEN_CONFIG], ids=["text", "vision"])
def encoder(request: pytest.FixtureRequest, small_model: Any) -> Encoder:
    """For a model that reads text only, and for one that reads pictures."""
    return encoder_for(small_model(CHATML, [*CONTROL, "<|video_pad|>"], request.param), max_length=2000)


def encoded(encoder: Encoder, path: Path) -> list[list[EncodedSample] | Dropped]:
    scanned = scan(SourceSpec(str(path)))
    rows = list(samples_of(scanned.source, scanned.blocks, may_hold_secrets=False))
    return list(encode_samples(rows, encoder))


def check(encoder: Encoder, folder: Path, line: bytes, good: bytes = GOOD) -> None:
    """The row is one result, between two others that are kept."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join([good, line, good]))
    first_item, *between, last = encoded(encoder, path)
    assert isinstance(first_item, list)
    assert isinstance(last, list)
    assert len(between) == (1 if line.strip() else 0)
    for item in between:
        if isinstance(item, Dropped):
            assert (item.row, bool(item.reason)) == (1, True)
            item.detail.encode()
        for sample in item if isinstance(item, list) else ():
            assert 0 < sample.length <= 2000
            (sample.channel or "").encode()


SLOW = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("form", FORMS)
@SLOW
@given(data=st.data())
def test_json_values_never_end_a_run(data: st.DataObject, form: str, encoder: Encoder, tmp_path: Path) -> None:
    if not (tmp_path / "a.png").exists():
        Image.new("RGB", (8, 12)).save(tmp_path / "a.png")
    row, ascii_only = data.draw(ROWS[form]), data.draw(st.booleans())
    line = json.dumps(row, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    check(encoder, tmp_path, line, json.dumps(PLAIN[form]).encode())


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": 10**400}]},
        {"messages": [{"role": "assistant", "content": "a", "loss_scale": 10**400}]},
        *[
            {"messages": [{"role": "user", "content": "<image>"}], "images": [path]}
            for path in ("/proc/self/mem", "/dev/zero", "a\0b", "/\0", "", "x" * 10_000, {"path": {"path": 1}})
        ],
        {"messages": [{"role": "user", "content": "<video>"}], "videos": [{"frames": ["a"], "fps": 10**400}]},
        {"messages": '[{"role": "user", "content": "\\ud800"}]'},
        {"messages": "[{'\\ud800': 'user'}]"},
    ],
    ids=str,
)
def test_rows_that_once_ended_runs_are_dropped(row: Any, encoder: Encoder, tmp_path: Path) -> None:
    check(encoder, tmp_path, json.dumps(row).encode())


@SLOW
@given(line=st.binary(max_size=60).map(lambda data: data.replace(b"\n", b" ")), inside=st.booleans())
@example(line=b"\xed\xa0\x80", inside=True)
@example(line=b"\\ud800", inside=True)
def test_arbitrary_bytes_never_end_a_run(line: bytes, inside: bool, encoder: Encoder, tmp_path: Path) -> None:
    check(encoder, tmp_path, GOOD.replace(b'"q"', b'"' + line + b'"') if inside else b"." + line)


@pytest.mark.parametrize("depth", [5, 20, 300, 500, 985, 5000])
def test_deep_nesting_never_ends_a_run(depth: int, encoder: Encoder, tmp_path: Path) -> None:
    lists, path = "[" * depth + '"\\ud83d\\ude00"' + "]" * depth, '{"path": ' * depth + '"a.png"' + "}" * depth
    for line in (
        f'{{"messages": [{{"role": "user", "content": "<image>"}}], "images": [{path}]}}',
        f'{{"messages": [{{"role": "user", "content": {lists}}}]}}',
        f'{{"messages": [{{"role": "tool", "content": {lists}}}]}}',
        f'{{"text": "a", "tools": {lists}}}',
        f'{{"query": "a", "response": "b", "tools": {lists}, "history": {json.dumps(lists)}}}',
    ):
        check(encoder, tmp_path, line.encode())


def test_nan_and_infinity_are_not_trained(encoder: Encoder, tmp_path: Path) -> None:
    def calls(value: str) -> str:
        call = f'{{"function": {{"name": "f", "arguments": {{"x": {value}}}}}}}'
        assistant_turn = f'{{"role": "assistant", "content": "", "tool_calls": [{call}]}}'
        return f'{{"messages": [{{"role": "user", "content": "q"}}, {assistant_turn}]}}'

    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        turns = [f'{{"role": "user", "content": {value}}}', f'{{"role": "tool", "content": {{"a": {value}}}}}']
        lines = [f'{{"messages": [{{"role": "user", "content": "q"}}, {turns[i]}, {{}}]}}' for i in range(2)]
        lines = [line.replace("{}", '{"role": "assistant", "content": "a"}') for line in lines]
        (tmp_path / "rows.jsonl").write_text("\n".join([*lines, calls(value)]))
        items = encoded(encoder, tmp_path / "rows.jsonl")
        assert [item.reason if isinstance(item, Dropped) else item for item in items] == ["invalid_content"] * 3


NUMBERS = st.one_of(
    st.integers(1, 5000),
    *(st.integers(-max_exponent, max_exponent).map(lambda exponent: 10.0**exponent) for max_exponent in (14, 300)),
    st.sampled_from([0, -1, 0.3, 2**31, 2**32, 10**12, 2**53, 2**63, 2**64, 10**400]),
)
SMALL = st.integers(0, 3) | NUMBERS
PIXELS = dict.fromkeys(("min_pixels", "max_pixels"), NUMBERS)
TIMES = dict.fromkeys(("fps", "min_frames", "max_frames", "total_pixels", "video_start", "video_end"), NUMBERS) | PIXELS
MARKS = {"picture": "<image>", "video": "<video>", "frames": "<video>", "boxes": "<image><bbox>"}
BOX = {"bbox": st.tuples(st.tuples(SMALL, SMALL, NUMBERS, NUMBERS)), "bbox_type": st.sampled_from(["real", "norm1000"])}
COLUMNS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "picture": {"images": st.tuples(st.fixed_dictionaries({"image": st.just("a.png")}, optional=PIXELS))},
    "video": {"videos": st.tuples(st.fixed_dictionaries({"video": st.just("a.mp4")}, optional=TIMES))},
    "frames": {"videos": st.tuples(st.fixed_dictionaries({"frames": st.just(["a.png"] * 5)}, optional=TIMES))},
    "boxes": {
        "images": st.just(["a.png"]),
        "objects": st.fixed_dictionaries(BOX, optional={"image_id": st.tuples(SMALL)}),
    },
    "weights": {"responses": st.just(["a", "b"]), "response_weights": st.tuples(SMALL, SMALL)},
    "tokens": {"input_ids": st.tuples(*[st.integers(1, 200)] * 3) | st.tuples(SMALL)},
}
LISTS = ("seq_lengths", "cu_seqlens", "position_ids", "attention_mask", "labels", "loss_scale")


def numeric_rows(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    """Rows whose form is right, and any of whose numbers may be anything."""
    if kind == "tokens":
        return st.fixed_dictionaries(COLUMNS[kind], optional=dict.fromkeys(LISTS, st.tuples(*[SMALL] * 3)))
    user_turn, answer = {"role": "user", "content": MARKS.get(kind, "q")}, {"role": "assistant", "content": "a"}
    answered = st.just([user_turn, answer])
    if kind == "weights":
        answered = SMALL.map(lambda weight: [user_turn, {**answer, "loss_scale": weight}]) | st.just([user_turn])
    return st.fixed_dictionaries({"messages": answered, **COLUMNS[kind]})


def check_numbers(encoders: list[Encoder], folder: Path) -> None:
    """In a process of its own: no number in a row costs a gigabyte, or is unforeseen."""
    import resource

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, resource.RLIM_INFINITY))

    @settings(max_examples=80, database=None, deadline=None)
    @given(data=st.data(), encoder=st.sampled_from(encoders))
    def check_one(kind: str, data: st.DataObject, encoder: Encoder) -> None:
        good = {"input_ids": [1, 2]} if kind == "tokens" else PLAIN["messages"]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, [good, data.draw(numeric_rows(kind)), good])))
        first_item, row, last = encoded(encoder, folder / "rows.jsonl")
        assert isinstance(first_item, list)
        assert isinstance(last, list)
        if isinstance(row, Dropped):
            assert row.reason != "unexpected", row
            assert len(row.detail) < 400, row
        else:
            assert all(sample.length <= 2000 for sample in row)

    for kind in COLUMNS:
        check_one(kind)


def test_large_numbers_cost_no_memory(small_model: Any, tmp_path: Path) -> None:
    Image.new("RGB", (8, 12)).save(tmp_path / "a.png")
    write_clip(tmp_path / "a.mp4", size=(16, 16))
    encoders = []
    for config, strategy in ((QWEN_CONFIG, "delete"), ({**QWEN_CONFIG, "model_type": "qwen2_5_vl"}, "left")):
        model = small_model(CHATML, [*CONTROL, "<|video_pad|>"], config)
        settings = {"truncation_strategy": strategy, "media_overflow": "drop" if strategy == "delete" else "trim"}
        encoders.append(encoder_for(model, max_length=2000, **settings))
    with forked_process(check_numbers, encoders, tmp_path, output_path=tmp_path / "output.txt") as process:
        process.join()
        assert process.exitcode == 0, (tmp_path / "output.txt").read_text()


def test_tokenizer_error_drops_its_row(encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoder._chunk_tokenizer.encode

    def breaks(chunks: Any) -> Any:
        assert not any("odd" in chunk.text for chunk in chunks)
        return encode(chunks)

    monkeypatch.setattr(encoder._chunk_tokenizer, "encode", breaks)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([GOOD, GOOD.replace(b'"q"', b'"odd"'), GOOD]))
    first_item, second_item, third = encoded(encoder, tmp_path / "rows.jsonl")
    assert isinstance(first_item, list)
    assert isinstance(third, list)
    assert isinstance(second_item, Dropped)
    assert (second_item.row, second_item.reason) == (1, "unexpected")
    assert second_item.detail.startswith("AssertionError at encode/")


def test_pipes_are_refused(encoder: Encoder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    row = {"messages": [{"role": "user", "content": "<image>"}], "images": ["pipe.png"]}
    check(encoder, tmp_path, json.dumps(row).encode())  # and does not wait
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(StorageError, match="is a pipe"):
        scan(SourceSpec(str(tmp_path / "pipe.jsonl")))


def test_placeholders_without_media_follow_the_model(small_model: Any, tmp_path: Path) -> None:
    message_row = json.loads(GOOD.replace(b'"q"', b'"<image> or <audio>?"'))
    (tmp_path / "rows.jsonl").write_text(json.dumps(message_row))
    model = small_model(CHATML, CONTROL, QWEN_CONFIG)
    (result,) = encoded(encoder_for(model), tmp_path / "rows.jsonl")
    assert isinstance(result, list)
    (tmp_path / "rows.jsonl").write_text(json.dumps(message_row) + "\n" + json.dumps({**message_row, "file": None}))
    for dropped in encoded(encoder_for(model), tmp_path / "rows.jsonl"):
        assert isinstance(dropped, Dropped)
        assert dropped.reason == "image_marks"
        assert "--columns images=" in dropped.detail
    text = encoded(encoder_for(small_model(CHATML, CONTROL)), tmp_path / "rows.jsonl")
    assert all(isinstance(row, list) for row in text)
