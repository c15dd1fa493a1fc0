"""What packs make of the batch, in words and numbers that a person can check."""

from __future__ import annotations

import numpy as np
import pytest

from packtool.planning.epoch import plan_epoch
from packtool.planning.options import PlanOptions
from packtool.planning.summary import PlanSummary, batch_sentence, fixed_batch_clause, learning_rate_advice


def summary_of(**options: int) -> PlanSummary:
    """960 samples of 10 tokens, 4 of them targets, in packs of 90."""
    lengths, targets = np.full(960, 10, np.int32), np.full(960, 4, np.int32)
    options_of_plan = PlanOptions(max_length=10, packing_length=90, balance="none", **options)
    return plan_epoch(lengths, targets, options_of_plan, seed=0).summary


def test_batch_sentence_compares_packed_and_unpacked_batches() -> None:
    summary = summary_of(world_size=4, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    # 107 packs in 14 steps.
    assert summary.samples_per_step == pytest.approx(960 / 14)
    assert summary.targets_per_sample == 4
    assert summary.batch_growth == pytest.approx(960 / 14 / 8)
    assert batch_sentence(summary) == (
        "a step has 68.6 samples and 274 target tokens on average; without packing (batch size x accumulation x ranks: "
        "1 x 2 x 4) it has 8 and 32: --samples-per-step 8 keeps that batch"
    )
    assert "target tokens" not in batch_sentence(summary, knows_targets=False)


def test_learning_rate_advice_depends_on_the_optimizer() -> None:
    adam, sgd = "4.0 with Adam (square root: Malladi", "16.0 with SGD (linear: Goyal"
    assert adam in learning_rate_advice(16, "adamw_torch_fused")
    assert sgd not in learning_rate_advice(16, "adamw_torch_fused")
    assert sgd in learning_rate_advice(16, "sgd")
    assert adam not in learning_rate_advice(16, "sgd")
    for optim in ("adafactor", "lion", ""):
        assert adam in learning_rate_advice(16, optim) or sgd in learning_rate_advice(16, optim)
    assert adam in learning_rate_advice(16)
    assert sgd in learning_rate_advice(16)


def test_clause_about_samples_per_step() -> None:
    lengths = np.array([10] * 30 + [90] * 2, np.int32)
    options = PlanOptions(max_length=90, packing_length=90, samples_per_step=8, world_size=2, shuffle=False)
    plan = plan_epoch(lengths, lengths, options, seed=0)
    assert plan.summary.batch_growth == 1
    assert fixed_batch_clause(plan.summary, plan.steps) == (
        "each has the 8 samples that it has without packing (--samples-per-step), in 1 to 2 micro-batches a rank"
    )
