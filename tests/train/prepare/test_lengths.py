"""The few lengths of compiled micro-batches: whatever decides how full one can be, the fullest one fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from packtool.launch.world import World
from packtool.train.prepare.cached import prepare_cached
from packtool.train.prepare.heaviest import length_lines, length_step
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
def test_eighths_of_the_fullest(settings: dict[str, Any], expected: int, tiny: TinyWorld) -> None:
    run = prepare_cached(tiny.config("unused", torch_compile=True, **settings), World())
    assert length_step(run) == expected
    assert len(list(length_lines(run))) == 1


def test_shared_rows_are_shorter(tiny: TinyWorld) -> None:
    run = prepare_cached(tiny.config("unused", torch_compile=True, per_device_train_batch_size=4), World())
    shared = dataclasses.replace(run, world=dataclasses.replace(run.world, sequence_parallel_size=2, size=2))
    assert length_step(shared) == 64


def test_nothing_is_padded_otherwise(tiny: TinyWorld) -> None:
    run = prepare_cached(tiny.config("unused"), World())
    assert length_step(run) == 1
    assert not list(length_lines(run))
