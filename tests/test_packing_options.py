"""Options of packing from the command line to the packer."""

from __future__ import annotations

from typing import Any

import pytest

from packtool.config import TrainConfig
from packtool.errors import ConfigError
from packtool.plan.packing import PackOptions
from packtool.settings import resolve
from packtool.train.planner import plan_options

TRAIN = {"model": "m", "cached_dataset": ("c",), "output_dir": "o", "packing": "true"}


def test_all_reach_the_packer() -> None:
    config = resolve(
        TrainConfig,
        {
            **TRAIN,
            "packing_length": "4096",
            "packing_algorithm": "sequential",
            "packing_num_proc": "3",
            "packing_window": "5000",
            "packing_batch_size": "500",
            "look_ahead": "7",
            "max_samples_per_pack": "9",
            "max_media_tokens_per_pack": "2048",
            "shuffle": "false",
        },
    )
    options = plan_options(config, packing=True, max_length=1024, world_size=1).pack_options
    assert options == PackOptions(
        capacity=4096,
        algorithm="sequential",
        num_proc=3,
        window=5000,
        batch_size=500,
        look_ahead=7,
        max_samples=9,
        max_media_tokens=2048,
        shuffle=False,
    )
    plain = plan_options(resolve(TrainConfig, TRAIN), packing=True, max_length=1024, world_size=1).pack_options
    assert plain == PackOptions(capacity=1024)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"packing_algorithm": "worst_fit"}, ("worst_fit", "best_fit", "sequential")),
        ({"packing_algorithm": "binpacking", "max_samples_per_pack": "3"}, ("binpacking", "--max-samples-per-pack")),
        (
            {"packing_algorithm": "first_fit", "max_media_tokens_per_pack": "3"},
            ("first_fit", "--max-media-tokens-per-pack"),
        ),
        ({"packing_window": "0"}, ("--packing-window",)),
        ({"look_ahead": "-1"}, ("--look-ahead",)),
    ],
)
def test_mistakes(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(TrainConfig, {**TRAIN, **given})
    for word in words:
        assert word in str(caught.value)
