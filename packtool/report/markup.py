"""Pages drawn by templates: what others wrote can neither become HTML nor turn or hide what stands beside it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from packtool import __version__
from packtool.visible import visible_line

# Behind these a long name may go on in the next line; the word itself is copied and searched without a gap.
_JOINT = re.compile(r"(?<=[^\s])([/_.,:=]|(?<=\w)-)(?=\w)")


def render(template: str, **values: Any) -> str:
    """A template of ``templates/`` with these values; every text among them is shown as text, whatever it holds."""
    return _environment().get_template(template).render(version=__version__, **values)


def framed(page: str, title: str) -> str:
    """A whole page inside of another document, such as a notebook, with a frame of its own."""
    return render("framed.html", page=escape(page), title=title)


def breakable(text: str) -> Markup:
    """Text whose words go to the next line as a whole.

    Where one is longer than a line, it is broken behind ``/``, ``_`` and the like if it has any of them.
    """
    return Markup(" ").join(_word(word) for word in text.split(" "))


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 pack``, ``1,000 packs``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("packtool.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"breakable": breakable, "plural": plural}
    return environment


def _shown(value: Any) -> Any:
    """What an expression of a template puts out, before it is escaped."""
    return visible_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _word(word: str) -> Markup:
    # Joints are looked for before escaping, which brings ampersands and semicolons of its own.
    parts = _JOINT.sub("\\1\n", visible_line(word)).split("\n")
    if len(parts) == 1:
        return escape(parts[0])
    return Markup("<span class=word>{}</span>").format(Markup("<wbr>").join(parts))
