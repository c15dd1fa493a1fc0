"""Text that others wrote (rows, file names, manifests, errors that quote them) made safe to show.

A terminal obeys control characters: they set its title, its clipboard and its colours, hide what follows or clear the
screen. Characters that turn the direction of writing make a line read as what it is not, on a page as well. Whatever
goes to either passes here first, and shows such characters by their numbers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable

# C0 but tab and newline, DEL and C1; marks, embeddings, overrides and isolates of direction; separators of lines and
# paragraphs; annotations, the byte order mark and tags, which nothing shows; halves of surrogate pairs, which no
# encoding has.
_UNSEEN = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufff9-\ufffb\ufeff"
    "\U000e0000-\U000e007f\ud800-\udfff"
)
_IN_LINES = re.compile(f"[{_UNSEEN}]")
_ON_A_LINE = re.compile(f"[{_UNSEEN}\\t\\n]")
_STYLES = {"dim": 2, "green": 32, "cyan": 36}
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def visible(text: str) -> str:
    """The text with every character that would act instead of being seen as an escape; newlines and tabs stay."""
    return _IN_LINES.sub(_escape, text)


def visible_line(text: str) -> str:
    """The text like ``visible``, newlines and tabs escaped too: a name or a table's cell must stay on its line."""
    return _ON_A_LINE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    character = found.group()
    if character in _SHORT:
        return _SHORT[character]
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def show(text: str = "", *, error: bool = False) -> None:
    """Print lines on stdout, or on stderr, as ``visible`` has them."""
    print(visible(text), file=sys.stderr if error else sys.stdout, flush=True)


def show_json(value: object) -> None:
    """Print one JSON document on stdout: plain ASCII, with escapes of JSON's own for all else."""
    print(json.dumps(value).replace("\x7f", "\\u007f"), flush=True)


def show_styled(parts: Iterable[tuple[str, str]]) -> None:
    """Print texts one behind the other on stdout.

    Args:
        parts: (text, how it looks: ``dim``, ``green`` or ``cyan``; "" for as it is).
    """
    styled = (f"\x1b[{_STYLES[look]}m{visible(text)}\x1b[0m" if look else visible(text) for text, look in parts)
    print("".join(styled), flush=True)
