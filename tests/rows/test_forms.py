"""Each form's example, and what each says about rows that it cannot read."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool import constants
from packtool.errors import DataError
from packtool.rows.forms import FORMS, RowProblem, detect, to_sample
from packtool.rows.forms.columns import NAMES
from packtool.rows.sample import Sample, Turn
from packtool.rows.source import Source


def read(row: dict[str, Any], **source: Any) -> Sample:
    return to_sample(row, Source("/folder/rows.json", **source), 3)


def problem_of(row: dict[str, Any], **source: Any) -> RowProblem:
    with pytest.raises(RowProblem) as exc_info:
        read(row, **source)
    return exc_info.value


def text(sample: Sample) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in sample.turns]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


Q, A = ("user", "q"), ("assistant", "a")


def test_plain_row_is_parsed() -> None:
    row = {
        "messages": [{"role": "system", "content": "s"}, user("q"), assistant("a")],
        "channel": "chat",
        "answer": 1,
    }
    sample = read(row)
    assert text(sample) == [("system", "s"), Q, A]
    assert (sample.source, sample.row, sample.channel) == ("/folder/rows.json", 3, "chat")
    assert not sample.is_text


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [Q, A]),
        ({"conversation": [{"from": "User", "value": "q"}, {"from": "bot", "value": "a"}]}, [Q, A]),
        ({"messages": [{"role": "developer", "content": "s"}, user("q")]}, [("system", "s"), Q]),
        (
            {"conversation": [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}]},
            [Q, A, ("user", "r"), ("assistant", "b")],
        ),
        (
            {
                "conversation": [
                    {"system": "s", "input": "q", "output": "a"},
                    {"system": "", "input": "r", "output": "b"},
                ]
            },
            [("system", "s"), Q, A, ("user", "r"), ("assistant", "b")],
        ),
        ({"conversation": [{"user": "q", "assistant": "a"}], "system": "s"}, [("system", "s"), Q, A]),
        ({"messages": json.dumps([user("q"), assistant("a")])}, [Q, A]),
        ({"messages": "[{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]"}, [Q, A]),
        ({"messages": [json.dumps(user("q")), assistant("a")]}, [Q, A]),
        ({"instruction": "q", "input": "", "output": "a"}, [Q, A]),
        ({"instruction": "q", "input": "i", "output": "a", "text": "all"}, [("user", "q\ni"), A]),
        ({"instruction": "", "input": "q", "output": "a"}, [Q, A]),
        ({"instruction": "q", "response": "a", "context": "c"}, [Q, A]),
        (
            {"instruction": "q", "input": None, "output": "a", "history": [["h", "b"]], "system": "s"},
            [("system", "s"), ("user", "h"), ("assistant", "b"), Q, A],
        ),
        ({"query": "q", "response": "a", "answer": "other"}, [Q, A]),
        ({"query": "q", "response": "a", "history": "[['h', 'b']]"}, [("user", "h"), ("assistant", "b"), Q, A]),
        ({"prompt": "q", "completion": "a"}, [Q, A]),
        ({"question": "q", "answer": "a", "id": 1}, [Q, A]),
        ({"problem": "q", "solution": "a"}, [Q, A]),
        ({"input": "q", "output": "a"}, [Q, A]),
        ({"Question": "q", "Answer": "a", "System": "s"}, [("system", "s"), Q, A]),
        ({"prompt": "q", "text": "a"}, [Q, A]),
        ({"question": "q", "answers": ["a", "b"]}, [Q, A]),
        ({"question": "q", "answer": 5}, [Q, ("assistant", "5")]),
        ({"prompt": [user("q")], "completion": [assistant("a")]}, [Q, A]),
        ({"text": "a"}, [A]),
        ({"content": "a", "url": "u"}, [A]),
        ({"messages": [assistant("a")]}, [A]),
        ({"messages": [user("q"), assistant(""), user("")]}, [Q, ("assistant", ""), ("user", "")]),
        ({"messages": [user("q"), assistant("a"), assistant("b")], "tools": None}, [Q, A, ("assistant", "b")]),
    ],
)
def test_forms(row: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    assert text(read(row)) == turns


@pytest.mark.parametrize("role", ["tool", "observation", "tool_response", "function-result", "function", "Tool_Result"])
def test_column_names_of_tool_answers(role: str) -> None:
    sample = read({"messages": [user("q"), {"role": role, "content": {"found": "é"}}, {"role": role, "content": "t"}]})
    assert text(sample)[1:] == [("tool", '{"found": "é"}'), ("tool", "t")]


def test_pretraining_texts_are_parsed() -> None:
    for row in ({"text": "a"}, {"messages": [assistant("a")]}):
        assert read(row, system="s").is_text
    assert not read({"messages": [user("q")]}).is_text


def test_textual_calls_become_tool_calls() -> None:
    call = {"name": "search", "arguments": {"for": "x"}}
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "wait"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "function_call", "value": json.dumps([call, call])},
            {"from": "observation", "value": "found"},
            {"from": "tool_call", "value": json.dumps(call), "loss": False},
        ],
        "tools": json.dumps([{"name": "search"}]),
    }
    sample = read(row)
    function = {"type": "function", "function": call}
    assert text(sample) == [Q, ("assistant", "wait"), ("tool", "found"), ("assistant", "")]
    assert sample.turns[1].extra == {"tool_calls": [function] * 3}
    assert (sample.turns[3].extra, sample.turns[3].loss) == ({"tool_calls": [function]}, False)
    assert sample.tools == ({"name": "search"},)


def test_openai_tool_calls_are_unchanged() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    row = {
        "messages": [
            user("q"),
            assistant(None, tool_calls=calls),
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "t"},
            assistant("a", reasoning_content="r"),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        ]
    }
    turns = read(row).turns
    assert turns[1] == Turn("assistant", "", {"tool_calls": calls})
    assert turns[2].extra == {"tool_call_id": "1", "name": "f"}
    assert turns[3].extra == {"reasoning_content": "r"}
    assert turns[4].extra["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_openai_content_lists_are_parsed() -> None:
    parts = [
        {"type": "text", "text": "see "},
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        {"type": "image_url", "image_url": "data:image/png;base64,aGk="},
        {"type": "video", "video": ["f1.png", "f2.png"], "fps": 2},
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "image", "image": "b.png"},
        " end",
    ]
    sample = read({"messages": [user(parts), assistant([{"type": "text", "text": "a"}])]})
    assert text(sample) == [("user", "see <image><image><video><audio><image> end"), A]
    assert [(ref.path, ref.data) for ref in sample.images] == [
        ("https://host/a.png", None),
        (None, b"hi"),
        ("/folder/b.png", None),
    ]
    assert [frame.path for frame in sample.videos[0].frames] == ["/folder/f1.png", "/folder/f2.png"]
    assert sample.videos[0].fps == 2.0
    assert sample.audios[0].data == b"hi"
    assert sample.num_marks_added == 0


def test_content_list_placeholders_use_the_media_of_the_row() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "q"}, {"type": "image", "text": None}]
    sample = read({"messages": [user(parts)], "images": ["a.png", "b.png"]})
    assert text(sample) == [("user", "<image>q<image>")]
    assert [ref.path for ref in sample.images] == ["/folder/a.png", "/folder/b.png"]
    assert problem_of({"messages": [user(parts)]}).reason == "image_marks"
    assert problem_of({"messages": [user(parts)], "images": ["a.png"]}).reason == "image_marks"
    both = {"messages": [user([{"type": "image", "image": "a.png"}])], "images": ["a.png"]}
    assert "order is unknown" in problem_of(both).detail


def test_anthropic_blocks_are_parsed() -> None:
    row = {
        "system": "s",
        "messages": [
            user(
                [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                    {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
                    {"type": "text", "text": "q"},
                ]
            ),
            assistant(
                [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ]
            ),
            user(
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "two"},
                    {"type": "text", "text": "go on"},
                ]
            ),
        ],
    }
    sample = read(row)
    assert text(sample) == [
        ("system", "s"),
        ("user", "<image><image>q"),
        A,
        ("tool", "one"),
        ("tool", "two"),
        ("user", "go on"),
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert sample.turns[2].extra == {"tool_calls": [call], "reasoning_content": "hm"}
    assert sample.turns[3].extra == {"tool_call_id": "t1"}
    assert [ref.data or ref.path for ref in sample.images] == [b"hi", "https://host/a.png"]


def test_tool_calls_beside_tool_results_are_kept() -> None:
    parts = [{"type": "tool_result", "tool_use_id": "t1", "content": "one"}, {"type": "tool_use", "name": "f"}]
    sample = read({"messages": [user("q"), assistant(parts), user("q2"), assistant("a")]})
    assert [turn.role for turn in sample.turns] == ["user", "tool", "assistant", "user", "assistant"]
    assert sample.turns[2].extra["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_system_prompt_of_the_row_takes_precedence() -> None:
    plain = {"messages": [user("q")]}
    assert text(read({**plain, "system": "row"}, system="option"))[0] == ("system", "row")
    assert text(read({**plain, "system_prompt": "row"}, system="option"))[0] == ("system", "row")
    assert text(read({**plain, "system": ""}, system="option"))[0] == ("system", "option")
    own_row = {"messages": [{"role": "system", "content": "own"}, user("q")], "system": "row"}
    assert text(read(own_row, system="option"))[0] == ("system", "own")
    assert text(read(plain)) == [Q]


def test_loss_flags_of_messages_apply() -> None:
    row = {
        "messages": [
            user("q"),
            assistant("a", loss=True),
            assistant("b", loss=0),
            assistant("c", loss_scale=0.5),
            assistant("d", weight=0),
            assistant("e"),
        ]
    }
    turns = read(row).turns[1:]
    assert [(turn.loss, turn.loss_scale) for turn in turns] == [
        (True, None),
        (False, None),
        (None, 0.5),
        (False, None),
        (None, None),
    ]
    for bad in ({"loss": 2}, {"loss": "x"}, {"loss_scale": -1}, {"loss_scale": True}, {"loss_scale": float("nan")}):
        assert problem_of({"messages": [user("q"), assistant("a", **bad)]}).reason == "invalid_row"


def test_loss_scale_of_the_dataset_applies() -> None:
    assert read({"messages": [user("q")]}, loss_scale="last_round").loss_scale == "last_round"


def test_custom_columns_and_tags_are_read() -> None:
    row = {"title": "q", "body": "a", "kind": 4}
    sample = read(row, form="query", columns=(("channel", "kind"), ("query", "title"), ("response", "body")))
    assert (text(sample), sample.channel) == ([Q, A], "4")
    tags = (("role_tag", "who"), ("content_tag", "says"), ("user_tag", "Me"), ("assistant_tag", "It"))
    tagged_turns = [{"who": "Me", "says": "q"}, {"who": "It", "says": "a"}]
    assert text(read({"messages": tagged_turns}, tags=tags)) == [Q, A]


def test_preference_rows_train_the_chosen_response() -> None:
    row = {"messages": [user("q"), assistant("a")], "rejected_response": "b", "margin": 1}
    assert text(read(row)) == [Q, A]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"words": "x", "id": 1}, "unknown_form"),
        ({"messages": []}, "empty_conversation"),
        ({"messages": ""}, "empty_conversation"),
        ({"messages": 5}, "empty_conversation"),
        ({"messages": "text"}, "invalid_row"),
        ({"messages": [{"role": "system", "content": "s"}]}, "empty_conversation"),
        ({"messages": ["text"]}, "invalid_row"),
        ({"messages": [None]}, "invalid_row"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "unknown_role"),
        ({"messages": [{"role": None, "content": "x"}]}, "unknown_role"),
        ({"messages": [{"content": "x"}]}, "unknown_role"),
        ({"messages": [user(None)]}, "invalid_content"),
        ({"messages": [{"role": "user"}]}, "invalid_content"),
        ({"messages": [user([1])]}, "invalid_content"),
        ({"messages": [user({"a": 1})]}, "invalid_content"),
        ({"messages": [user(True)]}, "invalid_content"),
        ({"messages": [user([{"type": "document"}])]}, "invalid_content"),
        ({"messages": [user([{"type": "text", "text": None}])]}, "invalid_content"),
        ({"messages": [user("q")], "system": 5}, "invalid_content"),
        ({"messages": [assistant("a"), user("q")]}, "role_order"),
        ({"messages": [{"role": "system", "content": "s"}, assistant("a")]}, "role_order"),
        ({"messages": [{"role": "tool", "content": "t"}, user("q")]}, "role_order"),
        ({"messages": [user("q"), {"role": "function_call", "content": "f(x)"}]}, "invalid_tool_call"),
        ({"messages": [user("q"), {"role": "function_call", "content": "[1]"}]}, "invalid_tool_call"),
        ({"messages": [user("q"), assistant("", tool_calls=5)]}, "invalid_tool_call"),
        ({"messages": [user("q")], "tools": "x"}, "invalid_row"),
        ({"messages": [user("q")], "tools": {"a": 1}}, "invalid_row"),
        ({"messages": [user("<image>")], "images": [""]}, "invalid_media"),
        ({"messages": [user("<image><image>")], "images": ["a"]}, "image_marks"),
        ({"messages": [user("<video><video>")], "videos": ["a"]}, "video_marks"),
        ({"messages": [user("<audio><audio>")], "audios": ["a"]}, "audio_marks"),
        (
            {"messages": [user("<ref-object><bbox>")], "objects": {"ref": ["x"], "bbox": [[1, 2]]}},
            "object_image",
        ),
        ({"query": "q", "response": None, "id": 1}, "unknown_form"),
        ({"text": "  "}, "empty_text"),
        ({"text": {"a": 1}}, "invalid_content"),
    ],
)
def test_unusable_rows_are_dropped(row: dict[str, Any], reason: str) -> None:
    assert problem_of(row).reason == reason


def test_rows_of_another_form_than_their_file_are_dropped() -> None:
    query = {"form": "query", "columns": (("query", "question"), ("response", "answer"))}
    assert problem_of({"question": None, "answer": "a"}, **query).reason == "null_field"
    assert "answer is null" in problem_of({"question": "q", "answer": None}, **query).detail
    problem = problem_of({"messages": []}, **query)
    assert (problem.reason, problem.detail) == ("unknown_form", "the row has no question; its keys are: messages")
    assert problem_of({"question": "q", "answer": "a", "history": ["h"]}, **query).reason == "invalid_row"


def test_box_placeholders_without_objects_are_text() -> None:
    assert text(read({"messages": [user("<bbox>")]})) == [("user", "<bbox>")]


@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        ([{"messages": None, "text": "t"}, {"messages": []}], ("messages", (("messages", "messages"),))),
        ([{"messages": None, "text": "t"}], ("text", (("text", "text"),))),
        ([{"Conversations": []}], ("messages", (("messages", "Conversations"),))),
        (
            [{"instruction": "i", "output": "o"}],
            ("alpaca", (("instruction", "instruction"), ("output", "output"))),
        ),
        (
            [{"problem": "p", "Image": "i"}, {"answer": 1}],
            ("query", (("images", "Image"), ("query", "problem"), ("response", "answer"))),
        ),
    ],
)
def test_form_is_detected_from_the_first_rows(rows: list[dict[str, Any]], layout: tuple[str, Any]) -> None:
    assert detect(rows, (), None, "f") == layout


@pytest.mark.parametrize(
    "named", [(("query", "title"), ("response", "body")), (("title", "query"), ("body", "response"))]
)
def test_column_mappings_work_in_both_directions(named: tuple[tuple[str, str], ...]) -> None:
    rows = [{"title": "q", "body": "a", "text": "t"}]
    assert detect(rows, named, None, "f") == ("query", (("query", "title"), ("response", "body")))


def test_a_reversed_mapping_of_a_missing_column_is_refused() -> None:
    row = {"query": "q", "response": "r"}
    with pytest.raises(DataError, match="--columns query=foo: the rows has no column 'foo'"):
        detect([row], (("foo", "query"),), None, "the rows")


def test_first_available_column_of_several_for_a_name_is_read() -> None:
    named = (("text", "chapter"), ("text", "text"))
    for rows, expected in (([{"chapter": "a", "text": "b"}], "chapter"), ([{"text": "b"}], "text")):
        assert detect(rows, named, None, "rows.json") == ("text", (("text", expected),))
    with pytest.raises(DataError, match="has no column 'chapter'"):
        detect([{"body": "a"}], named, None, "rows.json")


def test_a_missing_column_is_no_error_if_another_one_for_its_name_is_given_in_reverse_order() -> None:
    named = (("title", "query"), ("query", "absent"))
    row = {"title": "q", "response": "r"}
    assert detect([row], named, None, "rows.json") == ("query", (("query", "title"), ("response", "response")))


@pytest.mark.parametrize(
    ("row", "named", "message"),
    [
        ({"words": 1, "id": 2}, (), "no known form; their keys are: id, words\nKnown forms:\n  - mess"),
        (
            {"problem": 1, "solution": 2, "answer": 3},
            (),
            "several columns could be the resp.*: answer, solution\n.*response=answer",
        ),
        ({"title": 1, "body": 2}, (("query", "titel"),), "no column 'titel'.*did you mean 'title'"),
        ({"title": 1}, (("qurey", "title"),), "unknown column name 'qurey'; did you mean 'query'"),
        ({"response": 1}, (), "no known form"),
    ],
)
def test_unrecognized_forms_are_refused(row: dict[str, Any], named: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        detect([row], named, None, "rows.json")


WORDS = st.sampled_from(
    [
        "",
        "q",
        "user",
        "assistant",
        "human",
        "tool",
        "function_call",
        "image",
        "text",
        "tool_use",
        "tool_result",
        "[1",
        "{}",
    ]
)
KEYS = st.sampled_from(
    [
        *("role", "from", "content", "value", "type", "text", "image", "image_url", "url", "video", "frames", "fps"),
        *("input_audio", "data", "source", "bytes", "path", "tool_calls", "function", "name", "arguments", "human"),
        *("assistant", "system", "loss", "loss_scale", "weight", "thinking", "input", "tool_use_id", "function_call"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | WORDS | st.integers(-1, 300) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "function_call", "human"])
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES, "content": VALUES},
    optional={"tool_calls": VALUES, "loss": VALUES, "loss_scale": VALUES, "function_call": VALUES, "weight": VALUES},
)
COLUMNS = [*NAMES, "conversations", "image", "video", "audio", "prompt", "answer"]
ANY_ROWS = st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=5) | st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, max_size=4)},
    optional=dict.fromkeys(("images", "videos", "audios", "tools", "system", "objects", "channel"), VALUES),
)


@given(ANY_ROWS, st.sampled_from([None, *FORMS]))
@settings(max_examples=200)
def test_any_row_is_parsed_or_dropped(row: dict[str, Any], form: str | None) -> None:
    try:
        sample = read(row, form=form)
    except RowProblem:
        return
    assert all(isinstance(turn.content, str) and turn.role in constants.ROLES for turn in sample.turns)
    pickle.dumps(sample)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("q")]},
        {"query": "q"},
        {"prompt": "q", "response": None},
        {"instruction": "q", "output": ""},
        {"messages": [user("q")], "weights": [1, 1, 0.5]},
    ],
)
def test_responses_replace_a_missing_answer(row: dict[str, Any]) -> None:
    answer = {"content": "b", "reasoning_content": "r"}
    loop = [assistant("", tool_calls=[{"function": {"name": "f", "arguments": {}}}]), {"role": "tool", "content": "t"}]
    sample = read(row | {"responses": ["a", {"role": "assistant", **answer}, [*loop, assistant("c")]]})
    assert text(sample) == [Q]
    assert [[(turn.role, turn.content) for turn in each.turns] for each in sample.responses] == [
        [A],
        [("assistant", "b")],
        [("assistant", ""), ("tool", "t"), ("assistant", "c")],
    ]
    assert sample.responses[1].turns[0].extra == {"reasoning_content": "r"}
    assert [each.weight for each in sample.responses] == ([1, 1, 0.5] if "weights" in row else [1, 1, 1])


def test_zero_weight_responses_and_those_beside_an_answer_are_ignored() -> None:
    named = read({"query": "q", "all": '["a", "b"]', "score": "[0, 2]"}, form="query", columns=RENAMED)
    assert [(each.turns[0].content, each.weight) for each in named.responses] == [("b", 2.0)]
    for row in ({"messages": [user("q"), assistant("a")]}, {"query": "q", "answer": "a"}):
        assert read(row | {"responses": ["b", "c"]}).responses == ()
        assert text(read(row | {"responses": ["b", "c"]})) == [Q, A]


RENAMED = (("query", "query"), ("responses", "all"), ("response_weights", "score"))


@pytest.mark.parametrize(
    ("responses", "reason", "detail"),
    [
        ({"responses": "a"}, "invalid_row", "text, but not JSON"),
        ({"responses": {"a": 1}}, "invalid_row", "not a list of answers"),
        ({"responses": []}, "invalid_row", "not a list of answers"),
        ({"responses": [None]}, "invalid_content", "response 0"),
        ({"responses": [[user("q")]]}, "role_order", "response 0"),
        ({"responses": [[assistant("a"), user("q")]]}, "role_order", "response 0"),
        ({"responses": ["a", [{"type": "image", "image": "x.png"}]]}, "invalid_media", "response 1"),
        ({"responses": ["a", "b"], "weights": [1]}, "invalid_row", "not a list with a weight for each of 2 responses"),
        ({"responses": ["a", "b"], "weights": [1, -1]}, "invalid_row", "from 0 to 10,000"),
        ({"responses": ["a"], "weights": ["x"]}, "invalid_row", "has the weight 'x'"),
        ({"responses": ["a", "b"], "response_weights": [0, 0]}, "invalid_row", "all responses have the weight 0"),
    ],
)
def test_invalid_responses_are_refused(responses: dict[str, Any], reason: str, detail: str) -> None:
    problem = problem_of({"messages": [user("q")]} | responses)
    assert problem.reason == reason
    assert detail in problem.detail


@pytest.mark.parametrize(
    ("message", "loss", "scale"),
    [
        ({"content": "a", "train": False}, False, None),
        ({"content": "a", "loss_weight": 0.5}, True, 0.5),
        ({"content": [{"type": "text", "value": "a"}], "loss_weight": 0.0}, False, None),
        ({"content": [{"type": "text", "content": "a", "train": True}]}, True, None),
        ({"content": [{"type": "text", "text": "a", "weight": 0}]}, False, None),
    ],
)
def test_training_flags_of_axolotl_and_llama_factory(
    message: dict[str, Any], loss: bool | None, scale: float | None
) -> None:
    turn = read({"messages": [user("q"), {"role": "assistant", **message}]}).turns[-1]
    assert (turn.content, turn.loss, turn.loss_scale) == ("a", loss, scale)


@pytest.mark.parametrize(
    ("message", "detail"),
    [
        ({"content": "ab", "train_detail": [{"begin_offset": 0, "end_offset": 0}]}, "has train_detail"),
        ({"content": [{"type": "text", "text": "a", "train": False}, {"type": "text", "text": "b"}]}, "only a part"),
        ({"content": [{"type": "text", "text": "a", "train": "no"}]}, "with train 'no'"),
        ({"content": "a", "loss_weight": -1}, "loss_weight -1"),
    ],
)
def test_flags_that_split_a_message_are_refused(message: dict[str, Any], detail: str) -> None:
    problem = problem_of({"messages": [user("q"), {"role": "assistant", **message}]})
    assert problem.reason == "invalid_row"
    assert detail in problem.detail


def test_parts_of_llama_factory_v1() -> None:
    call = '{"name": "f", "arguments": {"x": 1}}'
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "tool_call", "value": call}]
    picture = [{"type": "image_url", "value": "/folder/a.png"}, {"type": "text", "value": "q"}]
    sample = read({"messages": [user(picture), assistant(parts)]}, media_access="any")
    assert [ref.path for ref in sample.images] == ["/folder/a.png"]
    assert text(sample) == [("user", "<image>q"), ("assistant", "")]
    assert sample.turns[-1].extra == {
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        "reasoning_content": "hm",
    }
