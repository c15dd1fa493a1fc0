"""Options of sequence parallelism that contradict each other are told; what they come to."""

from __future__ import annotations

from typing import Any

import pytest

from packtool.cli.main import run
from packtool.config.packing import ParallelOptions, parallel_problems


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
def test_what_goes_together(options: dict[str, Any], size: int) -> None:
    given = ParallelOptions(**options)
    assert given.sequence_parallel_ranks == size
    assert parallel_problems(given) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sequence_parallel_size": 4, "ulysses_size": 3}, "is not what --ulysses-size 3 come to"),
        ({"sequence_parallel_size": 8, "ulysses_size": 2, "ring_size": 2}, "--ulysses-size 2 and --ring-size 2 come"),
        ({"sequence_parallel_type": "ring"}, "goes with --sequence-parallel-size"),
        ({"sequence_parallel_type": "ring", "ulysses_size": 2}, "there is no ring"),
        ({"sequence_parallel_type": "allgather", "sequence_parallel_size": 2, "ulysses_size": 2}, "there is no ring"),
        ({"sequence_parallel_type": "ulysses", "sequence_parallel_size": 4, "ulysses_size": 2}, "has no ring"),
        ({"sequence_parallel_type": "ulysses", "ring_size": 2}, "has no ring"),
    ],
)
def test_what_does_not(options: dict[str, Any], told: str) -> None:
    (problem,) = parallel_problems(ParallelOptions(**options))
    assert told in problem


def test_rows_with_padding_and_kernels_without_blocks() -> None:
    shared = ParallelOptions(sequence_parallel_size=2)
    assert "--packing false" in parallel_problems(shared, removes_padding=False)[0]
    assert "--attn-impl flex" in parallel_problems(shared, attn_impl="flex")[0]
    assert parallel_problems(ParallelOptions(), removes_padding=False, attn_impl="flex") == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train", "--output-dir", "o", "--packing", "false"], "--packing false"),
        (["train", "--output-dir", "o", "--packing", "--attn-impl", "flash_attention_2"], "--attn-impl flash"),
        (["train", "--output-dir", "o", "--packing", "--on-bad-media", "skip"], "--on-bad-media skip"),
        (["eval", "--output", "e.parquet", "--attn-impl", "flex"], "--attn-impl flex"),
        (["verify", "--sequence-parallel-type", "ulysses", "--ring-size", "2"], "has no ring"),
        (["plan", "--world-size", "3"], "no multiple of the 2 processes"),
    ],
)
def test_the_commands_tell_before_anything_is_read(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if arguments[0] == "plan" else ["--model", "nowhere"]
    assert run([*arguments, *model, "--cached-dataset", "nowhere", "--sequence-parallel-size", "2"]) == 2
    assert told in capsys.readouterr().err
