"""The generated parts of the library's documentation: docs/api.md from its docstrings, and the types of its options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import packtool
from packtool.cache.manifest import ExportSummary
from packtool.config.commands import EvalConfig, VerifyConfig
from packtool.config.data import ExportConfig
from packtool.config.plan import PlanConfig
from packtool.config.settings import unit_of, value_type
from packtool.config.train import TrainConfig
from packtool.encode.encoded import EncodedSample
from packtool.library.batches import OPTIONS
from packtool.library.planned import COMMAND_ONLY, PlannedStep
from packtool.train.evaluate.run import EvalResult
from packtool.train.verify.run import VerifyReport

_INTRODUCTION = """# The library

This page is a reference of the Python API, which you get with `import packtool`. [Any trainer](any-trainer.md) shows
how to use it.

- **Stability.** These names and signatures change only with a new version, and the changelog lists the changes. Other
  parts of the package may change at any time.
- **Options.** Keyword arguments called `options` are the options of the command line, with underscores instead of
  dashes. [Options](options.md) describes them. Environment variables set them too, as on the command line.
- **Import time.** Large packages such as torch are imported when they are first needed.

<!-- Made by scripts/make_docs.py from the docstrings; do not edit. -->
"""
_ORDER = ("export", "Cache", "plan", "Plan", "Batches", "prepare_model", "loss", "Targets", "verify", "evaluate")
_MADE = {"Plan"}  # by functions, and not by their names
_WIDTH = 116
_RETURNED = (EncodedSample, PlannedStep, ExportSummary, VerifyReport, EvalResult)
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")


def api_page() -> str:
    """Every public function and class, with its signature and docstring."""
    assert {*_ORDER, "errors"} == set(packtool.__all__)
    parts = [_INTRODUCTION]
    for name in _ORDER:
        parts += [f"## {name}\n", *_thing(name, getattr(packtool, name))]
    parts.append("## What is returned\n\nA new version may add fields to these classes, but does not remove any.\n")
    for found in _RETURNED:
        parts += [f"### {found.__name__}\n", markdown(inspect.getdoc(found) or "")]
    parts.append("## Errors\n\nThese classes are in `packtool.errors`. The command line ends with their exit codes.\n")
    tree = (inspect.getdoc(packtool.errors) or "").split("\n\n")
    parts.append(f"```text\n{textwrap.dedent(tree[1])}\n```\n")
    return "\n".join(parts)


def _thing(name: str, found: Any) -> Iterator[str]:
    if name not in _MADE:
        yield f"```python\n{signature(name, found)}\n```\n"
    yield markdown(inspect.getdoc(found) or "")
    if not inspect.isclass(found):
        return
    for member, value in public_members(found):
        shown = signature(member, value)
        yield f"#### `{shown}`\n" if len(shown) < _WIDTH else f"#### `{member}`\n\n```python\n{shown}\n```\n"
        yield markdown(inspect.getdoc(value) or "")


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties of a class, and the operators that it documents, in the order of the code."""
    for name, value in vars(cls).items():
        is_operator = name in ("__len__", "__getitem__", "__iter__") and value.__doc__
        is_member = inspect.isfunction(value) or hasattr(value, "__get__")
        if is_member and (is_operator or not name.startswith("_")) and not (value.__doc__ or "").startswith("See ``"):
            yield name, value


def signature(name: str, found: Any) -> str:
    """``name(parameters) -> result`` without ``self``, on several lines if it is long; of a property its type."""
    if isinstance(found, (property, functools.cached_property)):
        getter = found.fget if isinstance(found, property) else found.func
        return f"{name}: {inspect.signature(getter).return_annotation}"
    shown = inspect.signature(found)
    parts = []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in shown.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars.get(parameter.kind, '')}{parameter.name}: {parameter.annotation}{default}")
    result = "" if inspect.isclass(found) else f" -> {shown.return_annotation}"
    line = f"{name}({', '.join(parts)}){result}"
    return line if len(line) < _WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def markdown(docstring: str) -> str:
    """A docstring in this project's form as Markdown: indented lines are code, arguments a list."""
    text = re.sub(r"``([^`]+)``", r"`\1`", docstring)
    lines: list[str] = []
    section, block = "", False
    for line in text.splitlines():
        if block and line and not line.startswith("    "):
            lines.append(_closed(lines))
            block = False
        if found := _SECTION.match(line):
            section = found[1]
            lines.append(f"**{section}**\n")
        elif section and line.startswith("    "):
            lines.append(_item(line[4:], section))
        elif line.startswith("    ") or (block and not line):
            lines += [] if block else ["```python"]
            block = True
            lines.append(line[4:])
        else:
            lines.append(line)
    lines += [_closed(lines)] if block else []
    return "\n".join(lines).strip() + "\n"


def _closed(lines: list[str]) -> str:
    while not lines[-1]:
        lines.pop()
    return "```\n"


def _item(line: str, section: str) -> str:
    """A line of a section: a name with what is said of it, or more of that."""
    if line.startswith("    "):
        return f"  {line[4:]}"
    names, colon, said = line.partition(":")
    if section != "Returns" and colon and re.fullmatch(r"[\w, ]+", names):
        return f"- `{names}`:{said}"
    return f"- {line}" if section != "Returns" or not line else line


def option_types() -> str:
    """The source of ``packtool/library/options.pyi``."""
    parts = [
        _typed(name, cls, only)
        for name, cls, only in (
            ("ExportKeywords", ExportConfig, None),
            ("PlanKeywords", PlanConfig, _names(PlanConfig) - {*COMMAND_ONLY, "cached_dataset"}),
            ("BatchKeywords", TrainConfig, OPTIONS),
            ("VerifyKeywords", VerifyConfig, None),
            ("EvalKeywords", EvalConfig, None),
        )
    ]
    return "\n".join([_HEAD, *parts])


_HEAD = '''"""Types of the options that the library's functions take.

Made by scripts/make_docs.py from the declarations in config/; do not edit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Text = str | os.PathLike[str]
Texts = Text | Sequence[Text]
Values = Mapping[str, Any] | str
'''


def _names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _typed(name: str, cls: type, only: Collection[str] | None) -> str:
    lines = [f"class {name}(TypedDict, total=False):", f'    """See ``{cls.__module__}.{cls.__name__}``."""', ""]
    for field in dataclasses.fields(cls):
        if only is None or field.name in only:
            lines.append(f"    {field.name}: {_type(field, cls)} | None")
    return "\n".join(lines) + "\n"


def _type(field: dataclasses.Field[Any], cls: type) -> str:
    hint = value_type(field, cls)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        choices = ", ".join(f'"{choice}"' for choice in typing.get_args(hint))
        return f"Literal[{choices}]"
    if origin is tuple:
        return "Texts"
    if origin is Mapping:
        return "Values"
    plain = {str: "Text", bool: "bool", int: "int", float: "float"}[hint]
    return f"{plain} | str" if unit_of(field, cls) is not None else plain
