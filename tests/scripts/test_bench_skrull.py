"""The benchmark of Skrull on paper runs, and its variants of the algorithm are what they are called."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from packtool.planning.skrull import SHARDED
from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_skrull")


def test_full_benchmark_runs(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--steps", "2", "--json", str(tmp_path / "found.json")])
    out = capsys.readouterr().out
    for part in ("3.76x", "7.54x", "ablation", "out of memory", "departs from the paper", "intra_node_gb_per_s"):
        assert part in out
    results = json.loads((tmp_path / "found.json").read_text())
    assert len(results["settings"]) == 6
    for row in results["settings"]:
        assert row["skrull"] >= row["sorted"] * 0.99
        assert row["skrull"] > 1
    assert [row["data"] for row in results["group_sizes"]][:2] == ["long tail", "wikipedia"]
    for row in results["group_sizes"]:
        assert row["single"] == row["uneven"], "in an uneven step, the slowest group has a single sequence"
    full = {name: steps for name, _, steps in results["ablation"]}
    assert full["Skrull"] == full["Skrull as printed"] == full["round robin"] == 0
    assert full["round robin, no roll-back"] > 0


@pytest.mark.parametrize("in_turn", [False, True])
def test_published_algorithm_respects_its_buckets(bench: ModuleType, in_turn: bool) -> None:
    options = bench.ABLATION.options(2, 0)
    sequences = bench.ABLATION.sequences(options)
    batches, lengths = bench.as_printed(sequences, options, in_turn=in_turn), sequences.lengths
    placed = np.concatenate([batch.samples for batch in batches])
    assert sorted(placed.tolist()) == list(range(2 * options.sequences_per_step))
    for batch in batches:
        tokens, sharded = lengths[batch.samples].astype(np.int64), batch.placement == SHARDED
        local = np.bincount(batch.placement[~sharded], tokens[~sharded], options.sequence_parallel_size)
        padded = -(-tokens[sharded] // options.skrull.alignment) * options.skrull.alignment
        assert local.max() + padded.sum() / options.sequence_parallel_size <= options.bucket_size
