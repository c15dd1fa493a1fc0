"""The few lengths of compiled micro-batches: whatever decides how full one can be, the fullest one fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from packtool.launch.world import World
from packtool.train.prepare.run import Run
from tests.train.tiny import TinyWorld


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 32),
        ({"per_device_train_batch_size": 4}, 128),
        ({"packing": False, "dynamic_batch_tokens": 700}, 96),
        ({"schedule": "skrull", "bucket_size": "2K"}, 256),
    ],
)
def test_compiled_lengths_are_eighths_of_a_full_micro_batch(
    settings: dict[str, Any], expected: int, tiny: TinyWorld
) -> None:
    run = Run.of(tiny.config("unused", torch_compile=True, **settings), World())
    assert run.length_multiple == expected
    assert len(list(run.length_lines())) == 1


def test_compiled_lengths_of_shared_sequences_are_shorter(tiny: TinyWorld) -> None:
    run = Run.of(tiny.config("unused", torch_compile=True, per_device_train_batch_size=4), World())
    world = dataclasses.replace(run.world, sequence_parallel_size=2, size=2)
    shared = dataclasses.replace(run, world=world, source=dataclasses.replace(run.source, world=world))
    assert shared.length_multiple == 64


def test_lengths_are_not_padded_without_compilation(tiny: TinyWorld) -> None:
    run = Run.of(tiny.config("unused"), World())
    assert run.length_multiple == 1
    assert not list(run.length_lines())
