"""Options of sequence parallelism: conflicts are reported, and sizes are derived."""

from __future__ import annotations

from typing import Any

import pytest

from packtool.cli.main import run
from packtool.config.commands import EvalConfig
from packtool.config.packing import ParallelOptions
from packtool.config.train import TrainConfig


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 1),
        ({"sequence_parallel_size": 4}, 4),
        ({"ulysses_size": 2}, 2),
        ({"ulysses_size": 2, "ring_size": 4}, 8),
        ({"sequence_parallel_size": 8, "ring_size": 2, "sequence_parallel_type": "ring"}, 8),
        ({"sequence_parallel_size": 8, "ulysses_size": 8, "sequence_parallel_type": "ulysses"}, 8),
        ({"ulysses_size": 2, "ring_size": 2, "sequence_parallel_type": "allgather"}, 4),
    ],
)
def test_valid_sizes_of_sequence_parallelism(options: dict[str, Any], size: int) -> None:
    parallel = ParallelOptions(**options)
    assert parallel.sequence_parallel_ranks == size
    assert parallel.problems() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel_size": 4, "ulysses_size": 3}, "does not match --ulysses-size 3"),
        (
            {"sequence_parallel_size": 8, "ulysses_size": 2, "ring_size": 2},
            "does not match --ulysses-size 2 and --ring-size 2",
        ),
        ({"sequence_parallel_type": "ring"}, "requires --sequence-parallel-size"),
        ({"sequence_parallel_type": "ring", "ulysses_size": 2}, "there is no ring"),
        ({"sequence_parallel_type": "allgather", "sequence_parallel_size": 2, "ulysses_size": 2}, "there is no ring"),
        ({"sequence_parallel_type": "ulysses", "sequence_parallel_size": 4, "ulysses_size": 2}, "has no ring"),
        ({"sequence_parallel_type": "ulysses", "ring_size": 2}, "has no ring"),
    ],
)
def test_contradictory_sizes_of_sequence_parallelism(options: dict[str, Any], message: str) -> None:
    (problem,) = ParallelOptions(**options).problems()
    assert message in problem


def test_padding_and_other_kernels_exclude_sequence_parallelism() -> None:
    padded = TrainConfig(packing=False, cached_dataset=("c",), sequence_parallel_size=2)
    assert "--packing false" in padded.problems()[0]
    flex = EvalConfig(model="m", cached_dataset=("c",), output="o.parquet", attn_impl="flex", sequence_parallel_size=2)
    assert "--attn-impl flex" in flex.problems()[0]
    assert TrainConfig(cached_dataset=("c",), packing=False, attn_impl="flex").problems() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--output-dir", "o", "--packing", "false"], "--packing false"),
        (["train", "--output-dir", "o", "--packing", "--attn-impl", "flash_attention_2"], "--attn-impl flash"),
        (["train", "--output-dir", "o", "--packing", "--on-bad-media", "skip"], "--on-bad-media skip"),
        (["eval", "--output", "e.parquet", "--attn-impl", "flex"], "--attn-impl flex"),
        (["verify", "--sequence-parallel-type", "ulysses", "--ring-size", "2"], "has no ring"),
        (["plan", "--world-size", "3"], "not a multiple of the 2 ranks"),
    ],
)
def test_commands_report_conflicts_before_reading_files(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if arguments[0] == "plan" else ["--model", "nowhere"]
    assert run([*arguments, *model, "--cached-dataset", "nowhere", "--sequence-parallel-size", "2"]) == 2
    assert message in capsys.readouterr().err
