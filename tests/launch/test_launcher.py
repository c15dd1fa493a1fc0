"""How a command begins: alone, as one of several processes, or by starting them."""

from __future__ import annotations

import os

import pytest

from packtool.errors import ConfigError
from packtool.launch.processes import begins_run, launch_ranks
from packtool.launch.world import World

ARGUMENTS = ("eval", "--model", "m")


@pytest.fixture
def launch_commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that this process would have become."""
    commands: list[list[str]] = []

    def note(path: str, command: list[str], environ: dict[str, str]) -> None:
        commands.append(command)
        raise SystemExit

    monkeypatch.setattr(os, "execvpe", note)
    for name in ("NPROC_PER_NODE", "NNODES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return commands


@pytest.mark.smoke
@pytest.mark.parametrize(
    "surroundings",
    [
        {},
        {"NPROC_PER_NODE": "1"},
        {"NPROC_PER_NODE": ""},
        {"NNODES": "1", "NODE_RANK": "0", "MASTER_PORT": "29501"},
        {"NPROC_PER_NODE": "2", "LOCAL_RANK": "0"},
        {"NPROC_PER_NODE": "2", "TORCHELASTIC_RUN_ID": "x"},
    ],
)
def test_one_process_is_enough(
    surroundings: dict[str, str], launch_commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    prepared: list[World] = []
    assert launch_ranks(ARGUMENTS, 1, prepared.append) == World(0, 1, 1)
    assert (launch_commands, prepared) == ([], [])


@pytest.mark.parametrize("even_one", [False, True])
def test_several_processes_are_started_after_the_checks(
    launch_commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, even_one: bool
) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "1" if even_one else "4")
    prepared: list[World] = []
    with pytest.raises(SystemExit):
        launch_ranks(ARGUMENTS, 1 if even_one else 2, prepared.append, torchrun="always" if even_one else "auto")
    assert prepared == [World(0, 1, 1) if even_one else World(0, 4, 2)]
    assert launch_commands[0][-5:] == ["--module", "packtool", *ARGUMENTS][-5:]


def test_no_process_is_started_if_a_check_fails(
    launch_commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "3")

    def refuse(world: World) -> None:
        raise ConfigError("does not fit")

    with pytest.raises(ConfigError, match="does not fit"):
        launch_ranks(ARGUMENTS, 1, refuse)
    with pytest.raises(ConfigError, match="cannot be divided into groups of 2"):
        launch_ranks(ARGUMENTS, 2, refuse)
    assert launch_ranks(ARGUMENTS, 3, refuse, torchrun="never") == World(0, 3, 3)
    assert not launch_commands


def test_a_launched_process_has_its_rank(launch_commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "NPROC_PER_NODE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert launch_ranks(ARGUMENTS, 1, pytest.fail) == World(1, 2)
    assert not launch_commands


@pytest.mark.parametrize(
    ("surroundings", "expected"),
    [
        ({}, True),
        ({"NPROC_PER_NODE": "8"}, True),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "first"}, True),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"}, False),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, False),
    ],
)
def test_one_command_starts_a_run(
    surroundings: dict[str, str], expected: bool, launch_commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    assert begins_run() == expected
