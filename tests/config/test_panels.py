"""The headings of ``--help``: every option under a declared one, what is needed first at the top."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer

from packtool.cli.main import app
from packtool.config.plan import PlanConfig
from packtool.config.settings import FIRST, LAST, PANELS
from packtool.config.simulate import SimulateConfig
from packtool.config.train import TrainConfig

GROUP: Any = typer.main.get_command(app)


def panels_of(command: str) -> dict[str, list[str]]:
    """Names of the options of a command, by heading, in the order of ``--help``."""
    found = GROUP.commands[command]
    context = found.make_context(command, [], resilient_parsing=True)
    return {name: [record[0].split()[0] for record in records] for name, records in found.panels(context).items()}


@pytest.mark.parametrize("command", GROUP.commands)
def test_headings_stand_in_their_order(command: str) -> None:
    shown = list(panels_of(command))
    assert shown == sorted(shown, key=PANELS.index)
    assert (shown[0], shown[-1]) == (FIRST, LAST)


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("train", ["--model", "--cached-dataset", "--dataset", "--output-dir", "--packing"]),
        ("export", ["--model", "--dataset", "--output-dir", "--max-length"]),
        ("plan", ["--cached-dataset", "--lengths", "--packing", "--packing-length"]),
        ("eval", ["--model", "--cached-dataset", "--output"]),
        ("verify", ["--model", "--cached-dataset", "--packing-length"]),
        ("simulate", ["--cached-dataset", "--lengths", "--distribution", "--model"]),
    ],
)
def test_help_opens_with_what_one_needs_first(command: str, first: list[str]) -> None:
    assert panels_of(command)[FIRST][: len(first)] == first
    assert len(panels_of(command)[FIRST]) <= 14


@pytest.mark.parametrize("config", [TrainConfig, PlanConfig, SimulateConfig])
def test_what_is_needed_first_is_declared(config: type) -> None:
    needed = config.NEEDED_FIRST  # type: ignore[attr-defined]
    assert set(needed) <= {field.name for field in dataclasses.fields(config)}
    assert len(set(needed)) == len(needed)
