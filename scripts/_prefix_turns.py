"""Conversations that think, for the benchmark of shared prefixes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = "tool_reasoning_50.jsonl"

TEMPLATE = """\
{%- set ns = namespace(asked=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro said(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}
{%- for part in content -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.asked -%}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- said(message.content) -}}
{%- for call in message.tool_calls or [] -%}{{- '<tool_call>' + call | tojson + '</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
"""Leaves out what was thought before the last question, as Qwen3-VL-Thinking's does."""


def thinking_rows(realdata: Path, count: int, pictures: Sequence[str]) -> list[dict[str, Any]]:
    """Real conversations of several questions, calls of tools and thoughts.

    Args:
        pictures: that the first question of each is about, in turn; none for rows of text.
    """
    rows = [json.loads(line) for line in (realdata / ROWS).read_text().splitlines()]
    several = [row for row in rows if sum(message["role"] == "user" for message in row["messages"]) > 1][:count]
    return [_about(row, pictures[i % len(pictures)]) if pictures else row for i, row in enumerate(several)]


def small_thinking_rows(count: int, pictures: Sequence[str]) -> list[dict[str, Any]]:
    """Conversations of three questions; see ``thinking_rows``."""
    rows = []
    for number in range(count):
        messages = []
        for turn in range(3):
            messages.append({"role": "user", "content": f"{number + turn} and {turn}, and how many in all? " * 2})
            answer = {"content": str(number + 2 * turn), "reasoning_content": f"{number} and {turn} and {turn}. " * 2}
            messages.append({"role": "assistant", **answer})
        rows.append({"messages": messages})
    return [_about(row, pictures[i % len(pictures)]) if pictures else row for i, row in enumerate(rows)]


def _about(row: dict[str, Any], picture: str) -> dict[str, Any]:
    messages = [dict(message) for message in row["messages"]]
    first = next(message for message in messages if message["role"] == "user")
    first["content"] = f"<image>{first['content']}"
    return row | {"messages": messages, "images": [picture]}
