"""Printing of text that others wrote (rows, file names, manifests, quoted errors) with control characters escaped.

A terminal obeys control characters: they set its title, clipboard and colours, hide text or clear the screen.
Characters that change the direction of writing make a line read as something else, also on a page.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable

# C0 except tab and newline, DEL and C1; marks, embeddings, overrides and isolates of direction; line and paragraph
# separators; invisible annotations, byte order mark and tags; surrogates, which cannot be encoded.
_CONTROLS = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufff9-\ufffb\ufeff"
    "\U000e0000-\U000e007f\ud800-\udfff"
)
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINE = re.compile(f"[{_CONTROLS}\\t\\n]")
_STYLES = {"dim": 2, "red": 31, "green": 32, "cyan": 36}
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def escape_text(text: str) -> str:
    """The text with control characters escaped, except newlines and tabs."""
    return _IN_TEXT.sub(_escape, text)


def escape_line(text: str) -> str:
    """The text with control characters, newlines and tabs escaped, for names and cells that must stay on one line."""
    return _IN_LINE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    if character in _SHORT:
        return _SHORT[character]
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def show(text: str = "", *, error: bool = False) -> None:
    """Print escaped lines on stdout, or on stderr."""
    print(escape_text(text), file=sys.stderr if error else sys.stdout, flush=True)


def show_json(value: object) -> None:
    """Print one JSON document on stdout, in ASCII."""
    print(json.dumps(value).replace("\x7f", "\\u007f"), flush=True)


def show_styled(parts: Iterable[tuple[str, str]]) -> None:
    """Print escaped texts without separators on stdout; ``parts``: (text, style: ``dim``, ``red``, ... or "")."""
    styled = (
        f"\x1b[{_STYLES[style]}m{escape_text(text)}\x1b[0m" if style else escape_text(text) for text, style in parts
    )
    print("".join(styled), flush=True)
