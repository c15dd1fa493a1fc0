"""Text for pages: what others wrote can neither become HTML nor turn or hide what stands beside it."""

from __future__ import annotations

import html
import re

from packtool.visible import visible_line

# Behind these a long name may go on in the next line; the word itself is copied and searched without a gap.
_JOINT = re.compile(r"(?<=[^\s])([/_.,:=]|(?<=\w)-)(?=\w)")


def escape(text: str) -> str:
    """Plain text as HTML, for text and for attributes."""
    return html.escape(visible_line(text))


def breakable(text: str) -> str:
    """The same, kept from being torn: a word goes to the next line as a whole.

    Where it is longer than a line, it is broken behind ``/``, ``_`` and the like if it has any of them.
    """
    return " ".join(_word(word) for word in text.split(" "))


def _word(word: str) -> str:
    # Joints are looked for before escaping, which brings ampersands and semicolons of its own.
    parts = _JOINT.sub("\\1\n", visible_line(word)).split("\n")
    return f"<span class=word>{'<wbr>'.join(map(html.escape, parts))}</span>" if len(parts) > 1 else escape(word)
