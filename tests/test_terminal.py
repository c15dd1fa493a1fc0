from __future__ import annotations

import io
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from packtool.report.tables import TerminalProgress, print_table
from packtool.terminal import escape_line, escape_text, show, show_json, show_styled

# Text with far more controls than chance would give it.
HOSTILE = "\x1b]52;c;cm0gLXJm\x07 \x1b]0;title\x07\x1b[2J\x1b[8m\x9b31m\r\x00\x7f\u202e\u2066\u2028\ud800\U000e0041"
TEXT = st.text(st.one_of(st.sampled_from(HOSTILE + "\n\t[/]ab é"), st.characters()), max_size=40)
BIDI = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def control_characters(text: str, allowed: str = "\n\t") -> list[str]:
    """Characters that a terminal obeys, or that turn or hide text."""
    return [c for c in text if c not in allowed and (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI)]


@given(TEXT)
def test_no_control_characters_remain(text: str) -> None:
    assert control_characters(escape_text(text)) == []
    assert control_characters(escape_line(text), allowed="") == []
    assert escape_text(escape_text(text)) == escape_text(text)
    escape_line(text).encode()  # no half of a surrogate pair is left


def test_plain_text_is_unchanged() -> None:
    plain = "naïve 中文 עברית 👩\u200d👩\u200d👧 a\tb\n<script> \\x1b [bold]"
    assert escape_text(plain) == plain
    assert escape_text("\x1b[2J\r\u202e\U000e0041") == r"\x1b[2J\r\u202e\U000e0041"
    assert escape_line("a\tb\n") == r"a\tb\n"


@given(text=TEXT)
def test_every_printer_escapes_controls(text: str) -> None:
    output = io.StringIO()
    console = Console(file=output, width=200)
    progress = TerminalProgress(console)
    progress.start(text, 3)
    progress._last -= 100  # as if the last line was long ago
    progress.advance(1, speed=text, rows=3)
    progress.note(text)
    progress.finish()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", output)
        patch.setattr("sys.stderr", output)
        show(text)
        show(text, error=True)
        print_table(text, [(text, text), ("[/b]", "[red]")])
        show_styled([(text, ""), (text, "")])
        before = output.tell()
        show_json({"text": text, text: [text]})
    out = output.getvalue()
    assert control_characters(out) == []
    assert "[/b]" in out, "what rows hold is no markup"
    assert json.loads(out[before:])["text"] == text
    assert out[before:].isascii()


def test_progress_bar_escapes_foreign_controls() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True)
    with TerminalProgress(console) as progress:
        progress.start("\x1b]0;title\x07[/x]", 2)
        progress.advance(1, name="\x1b[8mhidden[/x]")
    assert "\x1b]" not in output.getvalue()
    assert "\x1b[8m" not in output.getvalue()
    assert r"\x1b]0;title\x07[/x]" in output.getvalue()


def test_styles_surround_the_shown_text(capsys: pytest.CaptureFixture[str]) -> None:
    show_styled([("a\x1b[8m", "green"), ("b", "")])
    assert capsys.readouterr().out == "\x1b[32ma\\x1b[8m\x1b[0mb\n"
