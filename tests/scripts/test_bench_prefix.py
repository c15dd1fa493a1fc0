"""The benchmark of shared prefixes: all ways train the same rows to the same loss, one of them on fewer tokens."""

from __future__ import annotations

import re

import pytest

from tests.scripts.loading import load_script


def test_quick_run(capsys: pytest.CaptureFixture[str]) -> None:
    load_script("bench_prefix").main(["--quick"])
    out = capsys.readouterr().out
    pattern = r"^(prefixes once|packed whole|padded) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+ +[\d.]+"
    rows = re.findall(pattern, out, re.MULTILINE)
    assert [name for name, *_ in rows] == ["prefixes once", "packed whole", "padded"] * 4
    tokens, patches, flops, saved_shares = (
        [int(row[place].replace(",", "")) for row in rows] for place in (1, 2, 3, 4)
    )
    assert tokens[0] == tokens[1] <= tokens[2]
    assert patches[0] == patches[1] == patches[2]
    assert tokens[3] < 0.5 * tokens[4]
    assert patches[3] * 4 == patches[4] == patches[5]
    assert flops[3] < 0.5 * flops[4]
    assert saved_shares[3] < 0.5 * saved_shares[4]
    assert tokens[6] < 0.8 * tokens[7]
    assert tokens[9] < 0.6 * tokens[10]
    assert patches[9] * 3 == patches[10] == patches[11]
    trained = re.findall(r"^(?:a sample each|expanded): .* of which (\d+) are trained$", out, re.MULTILINE)
    assert int(trained[1]) > 2 * int(trained[0])
    differences = re.findall(r"^sums of losses differ by (.*)$", out, re.MULTILINE)
    assert len(differences) == 4
    assert all(float(difference) < 1e-5 for difference in differences)
    compared = re.findall(r"^(\w+) +--share-prefix auto .*: auto ÷ false \d", out, re.MULTILINE)
    assert compared == ["prepared", "trained", "both", "prepared", "prepared"]
