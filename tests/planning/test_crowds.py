from __future__ import annotations

import numpy as np
import pytest

from packtool.planning.crowds import relieve_crowds
from packtool.planning.mixture import Slots
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import PackPlan, build_plan

_CAPACITY = 1000
_NUM_COMMON, _NUM_RARE = 200, 12


def options(**changes: object) -> PlanOptions:
    return PlanOptions(max_length=_CAPACITY, packing_length=_CAPACITY, **changes)  # type: ignore[arg-type]


def crowded_packs(rare_length: int, common_length: int) -> tuple[PackPlan, Slots]:
    """A pack of twelve slots of a rare source, and forty of five slots of a common one, with 50 media tokens."""
    lengths = np.repeat([rare_length, common_length], [_NUM_RARE, _NUM_COMMON]).astype(np.int32)
    media = np.repeat([5, 10], [_NUM_RARE, _NUM_COMMON]).astype(np.int32)
    sources = np.repeat([1, 0], [_NUM_RARE, _NUM_COMMON]).astype(np.int32)
    sizes = np.array([_NUM_RARE, *[5] * 40])
    packs = build_plan(np.arange(len(lengths)), sizes, lengths, _CAPACITY)
    return packs, Slots(lengths, media, sources)


def rare_counts(packs: PackPlan, slots: Slots) -> np.ndarray:
    return packs.sums_per_pack(slots.sources[packs.samples] == 1)


def check_same_slots_within_capacity(packs: PackPlan, slots: Slots) -> None:
    assert np.array_equal(np.sort(packs.samples), np.arange(len(slots.lengths)))
    assert np.array_equal(packs.lengths, slots.lengths[packs.samples])
    assert packs.num_packs == 41
    assert packs.tokens_per_pack().max() <= _CAPACITY


@pytest.mark.parametrize(
    ("rare_length", "common_length"),
    [
        (60, 195),  # three rare slots for a common one
        (60, 180),  # into free space
        (20, 200),  # three rare slots for a much longer common one
    ],
)
def test_a_crowd_is_spread_over_other_packs(rare_length: int, common_length: int) -> None:
    packs, slots = crowded_packs(rare_length, common_length)
    relieved = relieve_crowds(packs, slots, options())
    check_same_slots_within_capacity(relieved, slots)
    assert rare_counts(packs, slots).max() == 12
    assert rare_counts(relieved, slots).max() <= 6
    common = slots.sources[relieved.samples] == 0
    assert relieved.sums_per_pack(common)[1:].min() >= 4
    unchanged = [pack for pack in range(41) if np.array_equal(relieved.pack(pack), packs.pack(pack))]
    assert len(unchanged) >= 34


def test_media_tokens_stay_within_their_limit() -> None:
    packs, slots = crowded_packs(40, 180)
    relieved = relieve_crowds(packs, slots, options(max_media_tokens_per_pack=60))
    check_same_slots_within_capacity(relieved, slots)
    assert rare_counts(relieved, slots).max() <= 6
    assert relieved.sums_per_pack(slots.media_tokens[relieved.samples]).max() == 60


def test_full_packs_exchange_one_sample_for_one() -> None:
    sources = np.repeat([1, 0], [7, 280]).astype(np.int32)
    slots = Slots(np.full(287, 40, np.int32), np.zeros(287, np.int32), sources)
    packs = build_plan(np.arange(287), np.full(41, 7), slots.lengths, _CAPACITY)
    relieved = relieve_crowds(packs, slots, options(max_samples_per_pack=7))
    check_same_slots_within_capacity(relieved, slots)
    assert np.array_equal(relieved.offsets, packs.offsets)
    assert rare_counts(relieved, slots).max() == 6


def test_full_budgets_prevent_exchanges() -> None:
    packs, slots = crowded_packs(82, 180)
    assert relieve_crowds(packs, slots, options()) is not packs
    assert relieve_crowds(packs, slots, options(max_media_tokens_per_pack=50)) is packs


def test_packs_without_crowds_or_exchanges_do_not_change() -> None:
    packs, slots = crowded_packs(82, 200)  # of 16 free tokens; two rare slots are shorter than a common one by 36
    assert relieve_crowds(packs, slots, options()) is packs
    even = build_plan(np.random.default_rng(0).permutation(212), np.full(53, 4), slots.lengths, _CAPACITY)
    assert relieve_crowds(even, slots, options()) is even
