"""How long a planned epoch is expected to take."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache.reader import CacheReader, SplitIndex
from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.planning.cost import MODEL_PRESETS
from packtool.planning.epoch import EpochPlan, plan_epoch
from packtool.planning.towers import MediaShares
from packtool.simulate.hardware import HARDWARE_PRESETS
from packtool.train.prepare.costs import ExpectedTime, RunCosts, sample_costs, with_costs
from packtool.train.prepare.figures import assign_media, media_of_caches
from packtool.train.prepare.opening import plan_options
from tests.train.tiny import TinyWorld

WORLD_SIZE = 4
TIME = ExpectedTime(
    model=MODEL_PRESETS["8b"],
    hardware=HARDWARE_PRESETS["h100"],
    world_size=WORLD_SIZE,
    weight_bytes=16 * 10**9,
    gradient_bytes=32 * 10**9,
    trained_bytes=16 * 10**9,
)


def run_config(**settings: Any) -> TrainConfig:
    options: dict[str, Any] = {"packing_length": 256, "train_type": "full", "gradient_checkpointing": False}
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **options | settings)


def planned_schedule(tiny: TinyWorld, config: TrainConfig) -> tuple[EpochPlan, SplitIndex, MediaShares]:
    index = CacheReader.open((tiny.cache,)).index
    options = plan_options(config, max_length=256, world_size=WORLD_SIZE // config.sequence_parallel_ranks)
    options = with_costs(options, TIME.model, config, TIME.hardware)
    plan = plan_epoch(index.length, index.target_tokens, options, seed=0, media_tokens=index.media_tokens)
    media = media_of_caches(index, TIME.model)
    return plan, index, assign_media(media, TIME.model, plan, config.sequence_parallel_ranks)


def seconds(tiny: TinyWorld, time: ExpectedTime = TIME, **settings: Any) -> float:
    config = run_config(**settings)
    return float(time.step_seconds(config, *planned_schedule(tiny, config)).sum())


def test_short_packs_take_the_kernel_launch_time(tiny: TinyWorld) -> None:
    fast = dataclasses.replace(TIME, hardware=dataclasses.replace(TIME.hardware, peak_tflops=1e5))
    plan, index, shares = planned_schedule(tiny, config := run_config())
    launches = 36 * 150 * 5e-6
    # Gradients travel behind the backward pass, and these take longer.
    assert fast.step_seconds(config, plan, index, shares) == pytest.approx(
        launches + fast.exchange_seconds(config)[1] - 2 / 3 * launches
    )


def test_a_slow_device_takes_the_time_of_its_slowest_rank(tiny: TinyWorld) -> None:
    slow = dataclasses.replace(TIME.hardware, peak_tflops=0.5, matmul_share=1.0, attention_share=1.0)
    config = run_config(train_type="lora")
    time = dataclasses.replace(TIME, hardware=slow, gradient_bytes=0, model=MODEL_PRESETS["qwen2.5-0.5b"])
    plan, index, shares = planned_schedule(tiny, config)
    seconds = time.step_seconds(config, plan, index, shares)
    cost = RunCosts.of(config, time.model).with_recomputation
    packs = np.add.reduceat(sample_costs(cost, index, index.target_tokens)[plan.packs.samples], plan.packs.offsets[:-1])
    slowest = plan.steps.rank_costs(packs).max(axis=1) / slow.peak
    # Few tokens at a time are slower than that: 300 of each micro-batch, and 512 queries of each sample.
    assert np.all(seconds > slowest)
    assert np.all(seconds < slowest + 300 * cost.per_token / slow.peak + 512 * 256 * cost.per_square / slow.peak + 1e-3)


def test_recomputation_adds_time_and_sequence_parallelism_saves_it(tiny: TinyWorld) -> None:
    slow = dataclasses.replace(TIME, hardware=dataclasses.replace(TIME.hardware, peak_tflops=1.0))
    assert 1.2 < seconds(tiny, slow, gradient_checkpointing=True) / seconds(tiny, slow) < 1.4
    one_rank, shared = seconds(tiny, slow), seconds(tiny, slow, sequence_parallel_size=4)
    assert one_rank / 4 < shared


def test_gathering_weights_bounds_the_time_of_a_micro_batch(tiny: TinyWorld, tmp_path: Path) -> None:
    links = dataclasses.replace(TIME.hardware, intra_node_gb_per_s=10)
    slow = dataclasses.replace(TIME, hardware=links)
    each = {
        fsdp_option: slow.exchange_seconds(run_config(fsdp=(fsdp_option,)))[0]
        for fsdp_option in ("full_shard", "shard_grad_op")
    }
    gathered, reduced = (num_bytes * 3 / 4 / 8e9 for num_bytes in (TIME.weight_bytes, TIME.gradient_bytes))
    assert list(each.values()) == pytest.approx([2 * gathered + reduced, gathered + reduced])
    plan, _, _ = planned_schedule(tiny, run_config())
    assert seconds(tiny, slow, fsdp=("full_shard",)) >= plan.steps.num_steps * each["full_shard"]
    files = [tmp_path / f"ds_z3_{stage}.json" for stage in range(4)]  # names do not matter
    for stage, file in enumerate(files):
        file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    stages = [slow.exchange_seconds(run_config(deepspeed=f"zero{stage}")) for stage in range(4)]
    assert stages == [slow.exchange_seconds(run_config(deepspeed=str(file))) for file in files]
    assert [each > 0 for each, _, _ in stages] == [False, False, True, True]
    assert [last > 0 for _, last, _ in stages] == [True, True, False, False]
    assert [exposed > 0 for _, _, exposed in stages] == [False, True, True, False]


def test_one_process_has_no_communication_time(tiny: TinyWorld) -> None:
    communication = dataclasses.replace(TIME, world_size=1).exchange_seconds(run_config())
    assert communication == (0, 0, 0)


def test_an_image_is_encoded_by_one_rank(tiny: TinyWorld) -> None:
    """One picture of 160 tokens takes its rank what it takes; four of 40 are shared out."""
    peak = dataclasses.replace(TIME.hardware, peak_tflops=1e-4, matmul_share=1.0, attention_share=1.0)
    model = ModelFiles.load(tiny.model).config
    time = dataclasses.replace(TIME, model=model, hardware=peak, weight_bytes=0, gradient_bytes=0, trained_bytes=0)
    config = run_config(sequence_parallel_size=4)
    cost, seconds_by_shares, towers = RunCosts.of(config, model).with_recomputation, [], []
    for num_images in (1, 4):
        column = {name: np.zeros(1, np.int32) for name in ("num_videos", "num_audios", "audio_tokens", "channel")}
        column |= {"length": np.array([200]), "target_tokens": np.array([10]), "media_tokens": np.array([160])}
        squares = np.array([num_images * (4 * 160 // num_images) ** 2])
        counts = {"num_images": np.array([num_images]), "num_patches": np.array([4 * 160])}
        index = SplitIndex(**column, **counts, patch_squares=squares, channels=())
        options = dataclasses.replace(plan_options(config, max_length=256, world_size=1), balance="none")
        plan = plan_epoch(index.length, index.target_tokens, options, seed=0)
        shares = assign_media(media_of_caches(index, model), model, plan, 4)
        seconds_by_shares.append(float(time.step_seconds(config, plan, index, shares).sum()))
        towers.append(float(cost.towers(index.vision_tokens, squares)[0]))
    one, four = seconds_by_shares
    assert one - four == pytest.approx((towers[0] - towers[1] / 4) / peak.peak, rel=1e-6)
    assert one > 1.5 * four
