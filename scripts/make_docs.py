"""Writes the generated parts of docs/: options.md from the declarations of the options, from-other-tools.md from the
table of other tools' names, and the pictures.

usage: python scripts/make_docs.py [--check]      with --check nothing is written, and a stale file is an error
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from _draw_docs import pictures

from packtool.cli.main import app
from packtool.config.peers import EVERY_COMMAND, peer_names

DOCS = Path(__file__).parent.parent / "docs"
_INTRODUCTION = """# Options

Every option of every command, as `packtool COMMAND --help` shows it. Options may be written with dashes or underscores.
A boolean stands alone or with `true` or `false`, a list takes several values or is repeated. Everything can also stand
in a YAML file (`--config FILE`) or in `--set key=value`.

<!-- Made by scripts/make_docs.py from the declarations; do not edit. -->
"""


def options_page() -> str:
    """All options of all commands under the headings of ``--help``."""
    group: Any = typer.main.get_command(app)
    parts = [_INTRODUCTION]
    for name, command in group.commands.items():
        if name == "sft":
            continue
        parts.append(f"## packtool {name}\n\n{command.help}\n")
        context = command.make_context(name, [], resilient_parsing=True)
        for panel, records in command.panels(context).items():
            parts.append(f"### {panel} ({name})\n\n| option | meaning |\n|---|---|")
            parts += [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in records]
            parts.append("")
    return "\n".join(parts)


_STRANGERS = """# From other tools

What became of the options, YAML keys and environment variables of other tools. A command that meets one of them says
the same; names without an effect are accepted, and those that are not done here are accepted where they say no.

<!-- Made by scripts/make_docs.py from packtool/config/peers.tsv; do not edit. -->
"""
_WORDS = {
    "same": "the same",
    "renamed": "another name",
    "set": "`--set training.NAME=VALUE`",
    "unneeded": "no effect",
    "unsupported": "not done",
}


def strangers_page() -> str:
    """The table of names, a heading for each tool."""
    grouped: dict[str, dict[tuple[str, str, str, str], list[str]]] = {}
    for entry in peer_names():
        tool = f"{entry.tool}, environment" if entry.is_variable else entry.tool
        line = (entry.status, entry.command, entry.here, entry.why)
        grouped.setdefault(tool, {}).setdefault(line, []).append(entry.name)
    parts = [_STRANGERS]
    for tool, lines in grouped.items():
        parts.append(f"## {tool}\n\n| names | here | |\n|---|---|---|")
        for (status, command, here, why), names in lines.items():
            told = f"`{here}`" if status == "renamed" else _WORDS[status]
            told += f" ({command})" if command != EVERY_COMMAND else ""
            parts.append(f"| {' '.join(f'`{name}`' for name in names)} | {_cell(told)} | {_cell(why)} |")
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def generated() -> dict[Path, str]:
    """Every generated file's path and content."""
    pages = {DOCS / "options.md": options_page(), DOCS / "from-other-tools.md": strangers_page()}
    return {**pages, **{DOCS / "images" / f"{k}.svg": v for k, v in pictures().items()}}


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
