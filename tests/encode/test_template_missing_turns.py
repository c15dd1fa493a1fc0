"""Turns that a template would leave out without a word."""

from __future__ import annotations

from typing import Any

import pytest

from packtool.encode.encoder import Encoder
from packtool.rows.forms import to_sample
from packtool.rows.sample import Dropped
from packtool.rows.source import Source
from tests.encode.conftest import encoder_for
from tests.encode.test_encoder import CHATML, CONTROL

# Knows of one system prompt, before all else, as many do; tools' answers only where it is told of tools.
FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content | trim }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or (m.role == 'tool' and tools) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def result(encoder: Encoder, *turns: tuple[str, str], **more: Any) -> str:
    row = {"messages": [{"role": role, "content": text} for role, text in turns], **more}
    (result,) = encoder.encode([to_sample(row, Source("rows.jsonl"), 0)])
    return f"{result.reason}: {result.detail}" if isinstance(result, Dropped) else "kept"


S, U, A = ("system", "s"), ("user", "q"), ("assistant", "a")


@pytest.mark.parametrize(
    ("turns", "turn_index"),
    [
        ((S, ("system", "t"), U, A), 1),
        ((S, S, U, A), 1),
        ((U, A, S, U, A), 2),
        ((U, A, ("tool", "a"), A), 2),
        ((S, U, A, ("system", "user"), U, A), 3),
    ],
)
def test_turn_missing_from_the_template_output_drops_its_row(small_model: Any, turns: Any, turn_index: int) -> None:
    encoder = encoder_for(small_model(FIRST_ONLY, CONTROL))
    for _ in range(2):
        outcome = result(encoder, *turns)
        assert outcome == f"turn_left_out: the chat template leaves out turn {turn_index} (role {turns[turn_index][0]})"
    assert result(encoder, S, U, A) == result(encoder, U, A, U, A) == "kept"
    assert result(encoder, U, A, ("system", " "), U, A) == "kept"
    assert result(encoder, U, A, ("tool", "r"), A, tools=[{"name": "f"}]) == "kept"


def test_template_that_renders_a_role_keeps_its_turns(small_model: Any) -> None:
    encoder = encoder_for(small_model(CHATML, CONTROL))
    assert result(encoder, S, U, A, ("system", "t"), U, A) == "kept"
    assert result(encoder, U, A, ("tool", "t"), A) == "kept"
