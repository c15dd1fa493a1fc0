"""Exports that drop every row: the message shows one of them and says what mends the commonest reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packtool.cache.manifest import ExportSummary
from packtool.cli.main import run
from packtool.errors import DataError

Export = Callable[..., ExportSummary]

_ASKS = {"role": "user", "content": "?"}
_LEFT = [{"role": "system", "content": "a"}, _ASKS, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("row", "settings", "reason", "detail", "remedy"),
    [
        ('{"messages": [], "messages": []}', {}, "duplicate_keys", "'messages' occurs twice", "each key"),
        ({"messages": [_ASKS, {"role": "assistant", "content": "\ud83d"}]}, {}, "invalid_text", "surrogate", "UTF-8"),
        ({"messages": [_ASKS, {"role": "assistant", "content": math.nan}]}, {}, "invalid_content",
         "number nan", "not text"),
        ({"messages": [_ASKS, {"role": "assistant", "content": "b" * 99}]}, {"max_row_bytes": 90}, "over_max_row_bytes",
         "90 bytes", "--max-row-bytes"),
        ({"messages": [_ASKS, {"role": "assistant", "content": "b"}], "images": ["/etc/passwd"]}, {},
         "media_not_allowed", "/etc/passwd", "--media-root"),
        ({"messages": [{"role": "user", "content": "<image><image>"}, _LEFT[2]], "images": ["1.png"]}, {},
         "image_marks", "2 <image> placeholders", "columns"),
        ({"messages": [_LEFT[2], _ASKS]}, {}, "role_order", "begins with", "user"),
    ],
)  # fmt: skip
def test_an_empty_export_shows_a_row_and_the_remedy(
    run_export: Export, tmp_path: Path, dry_run: bool, row: Any, settings: Any, reason: str, detail: str, remedy: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text((row if isinstance(row, str) else json.dumps(row)) + "\n")
    with pytest.raises(DataError) as exc_info:
        run_export(dataset=(str(file),), dry_run=dry_run, **settings)
    assert exc_info.value.message.startswith(f"none of 1 rows was kept: 1 {reason}\nFirst dropped row: {file}, row 0: ")
    assert detail in exc_info.value.message
    assert remedy in str(exc_info.value.remedy)


def test_a_template_that_leaves_turns_out_is_named(run_export: Export, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endif %}{% endfor %}"
    )
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"messages": _LEFT}) + "\n")
    with pytest.raises(DataError, match=r"turn_left_out\nFirst dropped row: .*turn 0(.|\n)*--chat-template"):
        run_export(dataset=(str(file),), chat_template=str(template))


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_export_prints_remedies(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: list[str]
) -> None:
    lost = {"messages": [{"role": "user", "content": "<image>?"}, _LEFT[2]], "images": []}
    kept_row = {"messages": [_ASKS, _LEFT[2]]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (kept_row, lost)))
    words = ["--model", str(model), "--dataset", str(tmp_path / "rows.jsonl"), "--max-length", "200"]
    assert run(["export", *words, "--output-dir", str(tmp_path / "cache"), "--dry-run", *as_json]) == 0
    printed = capsys.readouterr().err
    assert "warning: 1 of 2 rows (50%) were dropped\nimage_marks [R054] (1): " in printed
    assert "pass --columns images=." in printed
