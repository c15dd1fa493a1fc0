from __future__ import annotations

import pytest

from packtool.cli.arguments import Kind, rewrite

KINDS: dict[str, Kind] = {
    "--packing": "flag",
    "--json": "flag",
    "--max-length": "single",
    "--dataset": "list",
    "--set": "list",
}


@pytest.mark.parametrize(
    ("given", "expected"),
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
        ("--un_known x", "--un-known x"),
        ("--packing maybe", "--packing maybe"),
    ],
)
def test_rewrite(given: str, expected: str) -> None:
    assert rewrite(given.split(), KINDS) == expected.split()


def test_values_keep_their_underscores_and_spaces() -> None:
    given = ["--dataset", "my file_1.json", "--set", "training.max_steps=3"]
    assert rewrite(given, KINDS) == given
