"""Options of packing from the command line to the packer."""

from __future__ import annotations

from typing import Any

import pytest

from packtool.config.packing import PackOptions
from packtool.config.settings import part_of, resolve
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.planning.options import SkrullOptions
from packtool.stream.packs import StreamOptions
from packtool.train.prepare.checkpoint import BatchShape
from packtool.train.prepare.opening import plan_options

TRAIN = {"model": "m", "cached_dataset": ("c",), "output_dir": "o", "packing": "true"}

SKRULL = {"schedule": "skrull", "bucket_size": "8K"}
STEPS = {"samples_per_step": "64"}


def test_packing_options_reach_the_packer() -> None:
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
    options = plan_options(config, max_length=1024, world_size=1)
    stream = part_of(StreamOptions, config, packing_length=4096, num_epochs=1)
    for packer in (options, stream):
        assert part_of(PackOptions, packer) == PackOptions(
            packing_algorithm="sequential",
            packing_num_proc=3,
            packing_window=5000,
            packing_batch_size=500,
            look_ahead=7,
            max_samples_per_pack=9,
            max_media_tokens_per_pack=2048,
            shuffle=False,
        )
    assert (options.max_length, options.packing_length) == (1024, 4096)
    plain = plan_options(resolve(TrainConfig, TRAIN), max_length=1024, world_size=1)
    assert plain.packing_length == 1024
    assert part_of(PackOptions, plain) == PackOptions()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packing_algorithm": "worst_fit"}, ("worst_fit", "best_fit", "sequential")),
        ({"packing_algorithm": "binpacking", "max_samples_per_pack": "3"}, ("binpacking", "--max-samples-per-pack")),
        ({"packing_algorithm": "binpacking", "max_media_tokens_per_pack": "3"}, ("--max-media-tokens-per-pack",)),
        ({"packing_algorithm": "first_fit"}, ("first_fit", "best_fit")),
        ({"packing_window": "0"}, ("--packing-window",)),
        ({"look_ahead": "-1"}, ("--look-ahead",)),
        ({"bucket_size": "8192"}, ("--bucket-size requires --schedule skrull",)),
        ({"schedule": "skrull"}, ("--schedule skrull requires --bucket-size",)),
        ({**SKRULL, "bucket_size": "8.5K"}, ("--bucket-size 8.5K: give a number",)),
        ({**SKRULL, "bucket_size": "0"}, ("--bucket-size 0: give a number",)),
        ({**SKRULL, "balance": "window"}, ("--schedule skrull does its own balancing", "--balance window")),
        ({**SKRULL, "packing": "false", "group_by_length": "true"}, ("--group-by-length", "--schedule skrull")),
        ({**SKRULL, "packing": "false", "dynamic_batch_tokens": "99"}, ("--dynamic-batch-tokens and --schedule",)),
        (
            {**SKRULL, "cached_dataset": (), "dataset": ("d",), "streaming": "true", "max_steps": "9"},
            ("--schedule skrull requires a cache",),
        ),
        ({**STEPS, "packing": "false"}, ("--samples-per-step 64 requires packing", "--packing false")),
        ({**STEPS, "gradient_accumulation_steps": "2"}, ("remove --gradient-accumulation-steps 2",)),
        ({**STEPS, "per_device_train_batch_size": "4"}, ("remove --per-device-train-batch-size 4",)),
        ({**STEPS, "balance": "window"}, ("--samples-per-step 64 does its own balancing", "--balance window")),
        ({**STEPS, **SKRULL}, ("--samples-per-step 64 and --schedule skrull",)),
        ({**STEPS, "dynamic_batch_tokens": "99"}, ("--dynamic-batch-tokens requires --packing false",)),
        ({**STEPS, "packing_algorithm": "sequential"}, ("remove --packing-algorithm sequential",)),
        ({**STEPS, "packing_window": "9"}, ("remove --packing-window",)),
        ({**STEPS, "plan": "p"}, ("--plan already contains packs", "--samples-per-step")),
        ({"samples_per_step": "0"}, ("--samples-per-step",)),
        (
            {**STEPS, "cached_dataset": (), "dataset": ("d",), "streaming": "true", "max_steps": "9"},
            ("--samples-per-step requires a cache",),
        ),
    ],
)
def test_invalid_settings_are_reported(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as exc_info:
        resolve(TrainConfig, {**TRAIN, **options})
    for word in words:
        assert word in str(exc_info.value)


def test_skrull_options_reach_the_planner() -> None:
    config = resolve(TrainConfig, {**TRAIN, **SKRULL, "packing": "false", "sequence_parallel_size": "4"})
    assert config.removes_padding
    options = plan_options(config, max_length=1024, world_size=1)
    assert options.skrull == SkrullOptions(bucket_size=8192, sequence_parallel_size=4, alignment=8)
    assert plan_options(resolve(TrainConfig, TRAIN), max_length=1024, world_size=1).skrull is None
    auto = resolve(TrainConfig, {**TRAIN, **SKRULL, "bucket_size": "auto"})
    with pytest.raises(ConfigError, match="--bucket-size auto is decided by packtool train"):
        plan_options(auto, max_length=1024, world_size=1)


def test_packs_per_step_must_fit_the_ranks() -> None:
    config = resolve(TrainConfig, {**TRAIN, "packs_per_step": "12", "per_device_train_batch_size": "2"})
    assert [BatchShape.of(config, ranks).gradient_accumulation_steps for ranks in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ConfigError, match=r"--packs-per-step 12 .* 4 data-parallel ranks .* micro-batches of 2"):
        BatchShape.of(config, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": "2"}, "remove --gradient-accumulation-steps 2"),
        ({"samples_per_step": "8"}, "both set the size of a step"),
        ({"balance": "window"}, "use within-step or none"),
        ({"packing": "false", "dynamic_batch_tokens": "4096"}, "counts packs"),
    ],
)
def test_packs_per_step_refuses_other_sizes_of_steps(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(TrainConfig, {**TRAIN, "packs_per_step": "8", **options})
