"""Writes what is made from the code: options.md, api.md, tables of other tools' names, pictures, types of options.

usage: python scripts/make_docs.py [--check]      with --check nothing is written, and a stale file is an error
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_args

import typer
from _api_docs import api_page, option_types
from _draw_docs import pictures

from packtool.cli.main import app
from packtool.config.codes import codes
from packtool.config.commands import SchemaName
from packtool.config.compat_names import EVERY_COMMAND, CompatName, Status, compat_names, in_our_unit
from packtool.config.schema import schema_text
from packtool.encode.families import FAMILIES, OTHER, REFUSED, TEXT, Family
from packtool.encode.families.processor import ProcessorFamily

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = DOCS.parent / "examples"
_INTRODUCTION = """# Options

This page is a reference of every option of every command, with more detail than `packtool COMMAND --help`. Start with
[the options you will use](common-options.md).

- Option names may be written with dashes or underscores.
- A boolean stands alone or takes `true` or `false`.
- A list takes several values, or the option is repeated.
- Options can also be set in a YAML file (`--config FILE`) or with `--set key=value`.

In this page, a row is one conversation in your data files, a sample is a tokenized row, and a cache is the directory of
samples that `packtool export` writes. A pack is one sequence of several samples, a rank is one training process, and a
micro-batch is one forward and backward pass of a rank. A step is an optimizer step. The [glossary](glossary.md) has all
terms.

<!-- Made by scripts/make_docs.py from the declarations; do not edit. -->
"""


DETAILS = Path(__file__).with_name("option_details.tsv")


def option_details() -> dict[tuple[str, str], str]:
    """Return the sentences of ``option_details.tsv`` by command and option; those of export are import's too."""
    group: Any = typer.main.get_command(app)
    details: dict[tuple[str, str], str] = {}
    for line in DETAILS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            option, commands, text = line.split("\t")
            named = group.commands if commands == "*" else commands.split()
            for command in [*named, *(["import"] if "export" in named else [])]:
                details.setdefault((command, option), text)
    return details


def options_page() -> str:
    """All options of all commands under the headings of ``--help``, with their details."""
    group: Any = typer.main.get_command(app)
    parts, details = [_INTRODUCTION], option_details()
    for name, command in group.commands.items():
        if name == "sft":
            continue
        parts.append(f"## packtool {name}\n\n{command.help}\n")
        context = command.make_context(name, [], resilient_parsing=True)
        for panel, records in command.panels(context).items():
            parts.append(f"### {panel} ({name})\n\n| option | meaning |\n|---|---|")
            for names, text in records:
                more = details.get((name, re.split(r"[ ,]", names)[0]), "")
                parts.append(f"| `{_cell(names)}` | {_cell(f'{text} {more}'.strip())} |")
            parts.append("")
    return "\n".join(parts)


_MEANING: dict[Status, str] = {
    "same": "the same name",
    "renamed": "",
    "set": "`--set training.NAME=VALUE`",
    "unneeded": "accepted, no effect",
    "unsupported": "not supported",
}
_TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(?=\n## |\Z)", re.DOTALL)


def with_tables(page: str) -> str:
    """A page with the table of a tool's names behind each mark that asks for one."""
    return _TABLE.sub(lambda mark: f"{mark[1]}\n{_table_of(mark[2])}", page)


def _table_of(tool: str) -> str:
    lines = [f"| {tool} | packtool | note |", "|---|---|---|"]
    for is_variable in (False, True):
        groups: dict[tuple[str, str, str, str], list[CompatName]] = {}
        for entry in compat_names():
            if entry.tool == tool and entry.is_variable == is_variable:
                groups.setdefault((entry.status, entry.options, entry.reason, entry.command), []).append(entry)
        for (status, here, why, command), entries in groups.items():
            names = " ".join(f"`{entry.name}`" for entry in entries)
            where = "" if command == EVERY_COMMAND else f" ({command})"
            found = _MEANING[status] or f"`{in_our_unit(here, None)}`"  # type: ignore[index]
            lines.append(f"| {names}{where} | {found} | {_cell(why)} |")
    return "\n".join(lines) + "\n"


_CODE_GROUPS = {
    "R": "Dropped rows",
    "D": "Data",
    "O": "Options",
    "M": "Models",
    "C": "Caches",
    "P": "Plans",
    "T": "Training",
    "S": "Storage",
    "E": "Exit codes",
}
_CODES = re.compile(r"(<!-- codes -->\n).*", re.DOTALL)


def with_codes(page: str) -> str:
    """A page with the tables of all codes behind the mark that asks for them."""
    parts = []
    for letter, title in _CODE_GROUPS.items():
        parts += [f"\n## {title}\n", "| code | meaning | example | remedy |", "|---|---|---|---|"]
        for code in codes().values():
            if code.code.startswith(letter):
                name = f"`{code.code}` `{code.name}`"
                parts.append(f"| {name} | {_cell(code.meaning)} | {_literal(code.example)} | {_cell(code.remedy)} |")
    return _CODES.sub(lambda mark: mark[1] + "\n".join(parts) + "\n", page)


def _literal(text: str) -> str:
    return f"`{_cell(text)}`"


_EXAMPLE = re.compile(r"(<!-- example: (\S+) -->\n)(?:\n```python\n.*?\n```\n)?", re.DOTALL)


def with_examples(page: str) -> str:
    """A page with a file of examples/ behind each mark that asks for one."""
    return _EXAMPLE.sub(lambda mark: f"{mark[1]}\n```python\n{(EXAMPLES / mark[2]).read_text()}```\n", page)


_MODELS = re.compile(r"(<!-- (models(?: that are refused| without videos)?) -->\n).*?(?=\n\n[^|])", re.DOTALL)


def with_models(page: str) -> str:
    """A page with the tables of families behind the marks that ask for them."""
    tables = {
        "models": _models(),
        "models that are refused": _refused_models(),
        "models without videos": _models_without_videos(),
    }
    return _MODELS.sub(lambda mark: f"{mark[1]}\n{tables[mark[2]]}", page)


def _models() -> str:
    heads = "models", "`model_type`", "export", "packed training", "sequence parallelism", "videos", "sounds", "boxes"
    rows = [heads, ["---"] * len(heads), *map(_model_cells, (*FAMILIES, TEXT, OTHER))]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows)


def _refused_models() -> str:
    rows = [f"| {' '.join(f'`{name}`' for name in family.model_types)} | {family.refused} |" for family in REFUSED]
    return "\n".join(["| `model_type` | why it is not trained |", "| --- | --- |", *rows])


def _models_without_videos() -> str:
    """The families that a processor encodes for, by the reason why rows with videos are left out."""
    titles: dict[str, list[str]] = {}
    for family in FAMILIES:
        if family.no_videos:
            titles.setdefault(family.no_videos, []).append(family.title)
    rows = [f"| {', '.join(named)} | {reason} |" for reason, named in titles.items()]
    return "\n".join(["| models | why rows with videos are dropped |", "| --- | --- |", *rows])


def _model_cells(family: Family) -> list[str]:
    boxes = "" if family.boxes is None else f"{family.boxes.notation}, in {family.boxes.scale}"
    export = "by header" if family.kinds else ""
    return [
        family.title,
        " ".join(f"`{name}`" for name in family.model_types) or "others",
        "by its processor" if family.encoding is ProcessorFamily else export,
        f"refused: {family.refused}" if family.refused else "yes",
        "" if family.refused or family.unshared else "yes",
        *("yes" if kind in family.kinds else "" for kind in ("video", "audio")),
        boxes,
    ]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def generated() -> dict[Path, str]:
    """Every generated file's path and content."""
    found = {DOCS / "images" / f"{name}.svg": svg for name, svg in pictures().items()}
    found |= {DOCS / f"schema-{name}.json": schema_text(name) for name in get_args(SchemaName)}
    found |= {page: with_tables(page.read_text()) for page in DOCS.glob("from-*.md")}
    found[DOCS / "any-trainer.md"] = with_examples((DOCS / "any-trainer.md").read_text())
    found[DOCS / "codes.md"] = with_codes((DOCS / "codes.md").read_text())
    found[DOCS / "media-models.md"] = with_models((DOCS / "media-models.md").read_text())
    found[DOCS.parent / "packtool" / "library" / "options.pyi"] = option_types()
    return {DOCS / "options.md": options_page(), DOCS / "api.md": api_page(), **found}


def main() -> None:
    """Write the files, or tell which are stale."""
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        sys.exit(f"stale, run scripts/make_docs.py: {', '.join(map(str, stale))}" if stale else 0)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(generated()[path])
        print(f"written: {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
