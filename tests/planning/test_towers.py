"""Who looks at which picture, and what that makes of a plan."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packtool.planning.cost import CostModel
from packtool.planning.epoch import plan_epoch
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import PackPlan
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import StepAssignment, StepPlan
from packtool.planning.summary import device_costs
from packtool.planning.towers import TowerWork, assign_heaviest_first


@given(st.lists(st.integers(1, 1000), max_size=40), st.lists(st.integers(0, 500), min_size=1, max_size=8))
def test_media_are_assigned_evenly(weights: list[int], loads: list[int]) -> None:
    owners = assign_heaviest_first(weights, loads)
    sums = np.bincount(owners, weights, len(loads)) + loads if weights else np.array(loads)
    for owner, weight in zip(owners.tolist(), weights, strict=True):
        # A rank was the lightest when it got the lightest of its things, and the others have only grown since.
        assert sums[owner] - weight <= sums.min() or weight > min(np.array(weights)[owners == owner])
    assert assign_heaviest_first(weights, loads).tolist() == owners.tolist()


def test_assignment_considers_earlier_loads() -> None:
    assert assign_heaviest_first([50, 100], [0, 0]).tolist() == [1, 0]
    assert assign_heaviest_first([50, 100], [0, 120]).tolist() == [0, 0]


def test_device_costs_include_the_images_of_the_device() -> None:
    lengths = np.array([8, 4, 4, 2])
    singles = PackPlan(np.arange(4), np.arange(5), lengths.astype(np.int32), 8)
    places = np.array([SHARDED, 1, 0, SHARDED])
    assignment = StepAssignment(np.arange(4), np.array([2, 0, 1, 1]), np.array([4]), places)
    steps = StepPlan.of(singles, lengths, assignment, world_size=2)
    towers = TowerWork(np.array([60, 20, 10, 30]), np.array([3, 1, 1, 1]))
    # Rank 1 has a picture of its own, so rank 0 takes two of the first sample's three; a single one goes to one rank.
    assert device_costs(steps, places, lengths + towers.flops * 1.0, 2, towers).tolist() == [[44, 48, 45, 1]]


def test_packs_are_assigned_by_language_model_and_tower_together() -> None:
    lengths = np.full(64, 100, np.int32)
    flops = np.zeros(64, np.int64)
    flops[::16] = 300  # one sample in sixteen has a picture as heavy as three texts
    towers = TowerWork(flops, (flops > 0).astype(np.int64))
    options = PlanOptions(
        max_length=100,
        packing_length=100,
        world_size=4,
        gradient_accumulation_steps=16,
        balance="within-step",
        cost=CostModel(per_token=1, per_square=0),
    )
    blind, seeing = (
        plan_epoch(lengths, lengths, options, seed=0),
        plan_epoch(lengths, lengths, options, seed=0, towers=towers),
    )
    assert blind.packs.fingerprint == seeing.packs.fingerprint
    assert blind.steps.fingerprint != seeing.steps.fingerprint
    assert seeing.summary.balance is not None
    assert seeing.summary.balance.mean == 1.0
    assert seeing.summary.balance.steps_before.mean() > 1.0
    assert seeing.summary.balance.flops == 64 * 100 + 4 * 300
