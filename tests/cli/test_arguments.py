from __future__ import annotations

import re

import pytest

from packtool.cli.main import is_debug_requested
from packtool.cli.options import ArgumentKind, rewrite_arguments
from packtool.errors import ConfigError

KINDS: dict[str, ArgumentKind] = {
    "--packing": "flag",
    "--json": "switch",
    "--max-length": "single",
    "--dataset": "list",
    "--set": "list",
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--max_length 10", "--max-length 10"),
        ("--max_length=10", "--max-length=10"),
        ("--packing", "--packing"),
        ("--packing true", "--packing"),
        ("--packing false", "--no-packing"),
        ("--packing=False", "--no-packing"),
        ("--packing --json", "--packing --json"),
        ("--dataset a b c --json", "--dataset a --dataset b --dataset c --json"),
        ("--dataset a --dataset b_c", "--dataset a --dataset b_c"),
        ("--dataset=a b", "--dataset a --dataset b"),
        ("--max-length -1", "--max-length -1"),
        ("--max_length --json", "--max-length --json"),
        ("--dataset", "--dataset"),
        ("--help", "--help"),
        ("--no_packing -x --", "--no-packing -x --"),
        ("--json yes --packing", "--json --packing"),
        ("--json no --packing=on", "--packing"),
        ("--json=0", ""),
    ],
)
def test_rewrite(arguments: str, expected: str) -> None:
    assert rewrite_arguments(arguments.split(), KINDS, None, refuse) == expected.split()


def refuse(name: str, value: str | None) -> str:
    return f"{name} with {value} is unknown"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--packing maybe", "--packing: 'maybe' is neither true nor false"),
        ("--packing=maybe --json", "--packing: 'maybe' is neither true nor false"),
        ("--json 2", "--json: '2' is neither true nor false"),
        ("a.jsonl --json", "unexpected value 'a.jsonl'"),
        ("--max-length 9 10", "unexpected value '10'"),
        ("--un_known x y --json", "--un-known with x y is unknown"),
    ],
)
def test_unexpected_arguments_are_reported(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        rewrite_arguments(arguments.split(), KINDS, None, refuse)


def test_values_keep_their_underscores_and_spaces() -> None:
    arguments = ["--dataset", "my file_1.json", "--set", "training.max_steps=3"]
    assert rewrite_arguments(arguments, KINDS, None, refuse) == arguments


@pytest.mark.parametrize(
    ("arguments", "is_requested"),
    [
        ("", False),
        ("train --debug", True),
        ("train --debug --json", True),
        ("train --debug no --json", False),
        ("train --debug=off", False),
        ("train --debug=yes", True),
        ("train --model debug", False),
    ],
)
def test_debug_accepts_yes_no_on_off(arguments: str, is_requested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_debug_requested(arguments.split()) is is_requested
    monkeypatch.setenv("PACKTOOL_LOG_LEVEL", "debug")
    assert is_debug_requested(arguments.split())
