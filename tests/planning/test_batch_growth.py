"""What packs make of the batch, in words and numbers that a person can check."""

from __future__ import annotations

import numpy as np
import pytest

from packtool.planning.epoch import plan_epoch
from packtool.planning.options import PlanOptions
from packtool.planning.summary import BatchGrowth, own_steps_line


def growth(**options: int) -> BatchGrowth:
    """960 samples of 10 tokens, 4 of them targets, in packs of 90."""
    lengths, targets = np.full(960, 10, np.int32), np.full(960, 4, np.int32)
    plan = plan_epoch(
        lengths, targets, PlanOptions(max_length=10, packing_length=90, balance="none", **options), seed=0
    )
    return BatchGrowth.of(plan.summary)


def test_the_batch_of_packs_beside_that_of_the_same_options() -> None:
    found = growth(world_size=4, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    # 107 packs in 14 steps.
    assert found.num_samples == pytest.approx(960 / 14)
    assert found.num_targets == pytest.approx(4 * 960 / 14)
    assert (found.num_plain, found.num_plain_targets) == (8, 32)
    assert found.factor == pytest.approx(960 / 14 / 8)
    assert found.sentence("1 x 2 x 4") == (
        "a step holds 68.6 samples and 274 target tokens on average, unpacked (batch size x accumulation x ranks: "
        "1 x 2 x 4) 8 and 32"
    )
    assert "target tokens" not in found.sentence("1 x 2 x 4", knows_targets=False)


def test_the_rule_of_the_optimizer() -> None:
    found = BatchGrowth(64.0, 640.0, 4, 40.0)
    adam, sgd = "4.0 times with Adam (square root: Malladi", "16.0 times with SGD (linear: Goyal"
    assert adam in found.advice("adamw_torch_fused")
    assert sgd not in found.advice("adamw_torch_fused")
    assert sgd in found.advice("sgd")
    assert adam not in found.advice("sgd")
    assert adam in found.advice("adafactor") or sgd in found.advice("lion")
    assert adam in found.advice()
    assert sgd in found.advice()


def test_no_advice_where_the_batch_is_what_it_was() -> None:
    assert not BatchGrowth(4.2, 42.0, 4, 40.0).is_large
    assert BatchGrowth(6.0, 60.0, 4, 40.0).is_large


def test_kept_steps_say_so() -> None:
    lengths = np.array([10] * 30 + [90] * 2, np.int32)
    options = PlanOptions(max_length=90, packing_length=90, samples_per_step=8, world_size=2, shuffle=False)
    plan = plan_epoch(lengths, lengths, options, seed=0)
    assert BatchGrowth.of(plan.summary).factor == 1
    assert own_steps_line(plan.summary, plan.steps) == (
        "each has the 8 samples that it has unpacked (--samples-per-step), in 1 to 2 micro-batches a rank"
    )
