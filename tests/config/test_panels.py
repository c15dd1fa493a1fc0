"""``--help``: options under their headings, common ones first, each with a short text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from packtool.cli.main import _SETTINGS, app
from packtool.config.data import ExportConfig
from packtool.config.plan import PackConfig, PlanConfig
from packtool.config.settings import COMMON, LAST, PANELS, flag
from packtool.config.simulate import SimulateConfig
from packtool.config.train import TrainConfig

GROUP: Any = typer.main.get_command(app)


def panels_of(command: str) -> dict[str, list[str]]:
    """Names of the options of a command, by heading, in the order of ``--help``."""
    command_object = GROUP.commands[command]
    context = command_object.make_context(command, [], resilient_parsing=True)
    return {
        name: [record[0].split()[0].rstrip(",") for record in records]
        for name, records in command_object.panels(context).items()
    }


@pytest.mark.parametrize("command", GROUP.commands)
def test_headings_are_in_their_order(command: str) -> None:
    headings = list(panels_of(command))
    assert headings == sorted(headings, key=PANELS.index)
    assert headings[-1] == LAST
    first_heading = COMMON if hasattr(_SETTINGS[command], "COMMON_OPTIONS") else "Options"
    assert headings[0] == first_heading
    assert {COMMON, "Options"} & set(headings) == {first_heading}


@pytest.mark.parametrize(
    ("command", "first_options"),
    [
        ("train", ["--model", "--cached-dataset", "--dataset", "--output-dir", "--train-type"]),
        ("export", ["--model", "--dataset", "--output-dir", "--max-length"]),
        ("plan", ["--cached-dataset", "--lengths", "--packing", "--packing-length"]),
        ("eval", ["--model", "--cached-dataset", "--output"]),
        ("verify", ["--model", "--cached-dataset", "--packing-length"]),
        ("simulate", ["--cached-dataset", "--lengths", "--distribution", "--model"]),
    ],
)
def test_help_starts_with_common_options(command: str, first_options: list[str]) -> None:
    options = next(iter(panels_of(command).values()))
    assert options[: len(first_options)] == first_options
    assert len(options) <= (20 if command == "train" else 14)


@pytest.mark.parametrize("config", [TrainConfig, ExportConfig, PlanConfig, PackConfig, SimulateConfig])
def test_common_options_are_declared(config: Any) -> None:
    common = config.COMMON_OPTIONS
    assert set(common) <= {field.name for field in dataclasses.fields(config)}
    assert len(set(common)) == len(common)


@pytest.mark.parametrize(("command", "config"), [("export", ExportConfig), ("train", TrainConfig)])
def test_common_options_page_matches_the_help(command: str, config: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "common-options.md").read_text()
    table = page.split(f"## packtool {command}\n\n")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()]
    assert [name for cell in cells for name in re.findall(r"--[a-z-]*[a-z]", cell)] == list(
        map(flag, config.COMMON_OPTIONS)
    )


MAX_WORDS = 15


def test_help_texts_are_short() -> None:
    """Details belong into ``scripts/option_details.tsv``, from which ``docs/options.md`` is made."""
    texts = {
        f"{command} {flag(field.name)}": field.metadata["help"]
        for command, settings in _SETTINGS.items()
        for field in dataclasses.fields(settings)
    }
    for command, group in GROUP.commands.items():
        texts |= {f"{command} {option.opts[0]}": option.help for option in group.params if option.name.endswith("_")}
        texts[command] = group.help
    too_long = [f"{name}: {text}" for name, text in texts.items() if len(text.split()) > MAX_WORDS]
    assert not too_long


@pytest.mark.parametrize("command", GROUP.commands)
def test_help_texts_are_one_sentence(command: str) -> None:
    long_help_texts = [
        field.metadata["help"]
        for field in dataclasses.fields(_SETTINGS[command])
        if not re.fullmatch(r"[A-Z][^\n]*\.", field.metadata["help"]) or re.search(r"\. [A-Z]", field.metadata["help"])
    ]
    assert not long_help_texts
