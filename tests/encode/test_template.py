from __future__ import annotations

from typing import Any

import pytest

from packtool.encode import template as template_module
from packtool.encode.template import ChatTemplate, TemplateFailure

MESSAGES = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(10**9) %}a{% endfor %}",
        "{% for i in range(900) %}{% for j in range(900) %}{% endfor %}{% endfor %}",
        "{% macro f(i) %}{% for j in range(900) %}{% endfor %}{{ f(i) }}{% endmacro %}{{ f(0) }}",
        "{% for i in range(900) %}" + "a" * 900 + "{% endfor %}",
        "{{ messages[0].content * 10**10 }}",
        "{{ 10**10 * messages[0].content }}",
        "{{ (messages|length) ** (10**10) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(900) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(900) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(900) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(900) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = y %}{% endfor %}",
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}",
        "{% macro f(i) %}{% if i %}{{ f(i - 1) }}{{ f(i - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for c in messages[0].content * 900 %}{% for c in messages[0].content * 900 %}{% endfor %}{% endfor %}",
    ],
)
def test_endless_template_is_stopped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "_MAX_ROUNDS", 10_000)
    monkeypatch.setattr(template_module, "_MAX_CHARS", 100_000)
    template = ChatTemplate(text, {})
    for _ in range(2):
        with pytest.raises(TemplateFailure):
            template.render(MESSAGES)


def test_loop_limit_applies_per_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "_MAX_ROUNDS", 10)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    for _ in range(20):
        assert template.render(MESSAGES) == "xy"


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}", "1False22True2"),
        ("{% for k, v in messages[0].items() %}{{ k }}{% endfor %}", "rolecontent"),
        ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{% else %}no{% endfor %}", "1"),
        ("{% for m in nothing %}a{% else %}no{% endfor %}", "no"),
        ("{% for r in messages|map(attribute='role') %}{{ r }}{{ loop.revindex }}{% endfor %}", "user2assistant1"),
        ("{% for m in messages recursive %}{{ m.role[0] }}{% endfor %}", "ua"),
        (
            "{% set x = 'a' ~ 'b' %}{% set y %}{{ x }}c{% endset %}{% set z | upper %}{{ y }}{% endset %}{{ z }}",
            "ABC",
        ),
        (
            "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ varargs }}{% endmacro %}{{ f(1) }}{{ f(3, 4, 5) }}",
            "12()34(5,)",
        ),
        ("{{ '-' * 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ 1.5 * 2 }}", "---683.0"),
    ],
)
def test_ordinary_loops_are_unchanged(text: str, rendered: str) -> None:
    assert ChatTemplate(text, {}).render(MESSAGES) == rendered


def test_endless_template_drops_only_that_row(small_model: Any) -> None:
    from tests.encode.conftest import encoder_for
    from tests.encode.test_encoder import CHATML, CONTROL, encode

    loop = "{% if 'loop' in messages[0].content %}{% for i in range(10**9) %}{% endfor %}{% endif %}"
    encoder = encoder_for(small_model(loop + CHATML, CONTROL))
    dropped = encode(encoder, "loop", "a")
    assert getattr(dropped, "reason", "") == "template_refused"
    assert not hasattr(encode(encoder, "q", "a"), "reason")
