"""Rows without a chat template: segments with labels, and questions in a prompt format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.errors import ConfigError
from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.forms.segments import PROMPT_FORMATS
from packtool.rows.sample import Sample
from packtool.rows.source import Source
from packtool.rows.sources import DatasetInfo


def read(row: dict[str, Any], *prompt_format: str) -> Sample:
    return to_sample(row, Source("/folder/rows.json", prompt_format=prompt_format), 0)


def texts(sample: Sample) -> list[tuple[str, str]]:
    assert sample.is_text
    return [(turn.role, turn.content) for turn in sample.turns]


@given(st.lists(st.tuples(st.booleans(), st.text()), min_size=1))
def test_segments_keep_texts_and_labels(segments: list[tuple[bool, str]]) -> None:
    row = {"segments": [{"label": label, "text": text} for label, text in segments]}
    if not any(label for label, _ in segments):
        with pytest.raises(RowProblem, match="no segment has the label true"):
            read(row)
        return
    sample = read(row)
    assert [(role == "assistant", text) for role, text in texts(sample)] == segments
    assert not sample.ends_text


@pytest.mark.parametrize("segment", [{"text": "a"}, {"label": True}, {"label": 2, "text": "a"}, "a"])
def test_invalid_segment_is_named(segment: Any) -> None:
    with pytest.raises(RowProblem, match=r"segment 1 is .*label true or false"):
        read({"segments": [{"label": True, "text": "a"}, segment]})


def test_segments_as_json_text() -> None:
    assert texts(read({"segments": '[{"label": true, "text": "a"}]'})) == [("assistant", "a")]


def test_prompt_formats_of_axolotl() -> None:
    row = {"instruction": "Add {input}.", "input": "1, 2", "output": "3"}
    sample = read(row, *PROMPT_FORMATS["alpaca:chat"])
    (_, prompt), answer = texts(sample)
    assert prompt.startswith("SYSTEM: Below is an instruction that describes a task, paired with an input")
    assert prompt.endswith("\nUSER: Add {input}.\n1, 2\nASSISTANT:")
    assert answer == ("assistant", "3")
    assert sample.ends_text
    (_, prompt), _ = texts(read({**row, "input": ""}, *PROMPT_FORMATS["alpaca"]))
    assert prompt.endswith("completes the request.\n\n### Instruction:\nAdd {input}.\n\n### Response:\n")


def test_prompt_format_leaves_conversations_to_the_template() -> None:
    plain = PROMPT_FORMATS["plain"]
    assert texts(read({"prompt": "The sky", "completion": " is"}, *plain)) == [
        ("user", "The sky"),
        ("assistant", " is"),
    ]
    messages = {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
    }
    assert not read(messages, *plain).is_text
    with pytest.raises(RowProblem, match="has a history"):
        read({"query": "q", "response": "a", "history": [["q", "a"]]}, *plain)


def test_only_control_tokens_of_the_format_keep_their_meaning() -> None:
    row = {"instruction": "a </s>", "output": "b"}
    assert read(row, "<|user|>{instruction}[/INST]").control == {"<|user|>", "[/INST]"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"prompt_format": "alpaka"}, "must contain {instruction} or be one of alpaca"),
        ({"prompt_format_without_input": "{instruction}"}, "prompt_format_without_input without prompt_format"),
        ({"prompt_format": 1}, "prompt_format is 1, not text"),
        ({"prompt_format": ["alpaca"]}, r"prompt_format is \['alpaca'\], not text"),
    ],
)
def test_invalid_prompt_format_is_refused(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({"a": {"file_name": "a.json", **entry}}))
    with pytest.raises(ConfigError, match=message):
        DatasetInfo(str(path)).get("a")
