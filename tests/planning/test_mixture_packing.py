from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packtool.config.mixture import Amount, MixUnit, Recipe, SourceRecipe
from packtool.errors import DataError
from packtool.planning.epoch import EpochPlan, plan_mixture
from packtool.planning.mixture import Mixture, make_mixture
from packtool.planning.mixture_packing import order_mixture_packs, pack_mixture
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import PackPlan, select_packs
from packtool.planning.packing import pack

_CAPACITY = 2048
_WINDOW = 100
_FEW = 4
"""Samples that a window may have more or less of a source of which a tenth is less than that."""


def mixture_of(lengths: list[np.ndarray], unit: MixUnit = "samples", media: np.ndarray | None = None) -> Mixture:
    """Every sample of every source once."""
    sizes = [len(source_lengths) for source_lengths in lengths]
    together = np.clip(np.concatenate(lengths), 1, _CAPACITY).astype(np.int32)
    sources = tuple(SourceRecipe(path=f"s{i}", amount=Amount(size, "samples")) for i, size in enumerate(sizes))
    mixture = make_mixture(
        Recipe(sources=sources),
        np.concatenate(([0], np.cumsum(sizes))),
        together,
        np.zeros_like(together) if media is None else media,
        np.maximum(together // 3, 1),
        max_length=_CAPACITY,
        seed=0,
    )
    return dataclasses.replace(mixture, unit=unit)


def options(**changes: object) -> PlanOptions:
    return PlanOptions(max_length=_CAPACITY, packing_length=_CAPACITY, balance="none", **changes)  # type: ignore[arg-type]


def amounts_of_windows(packs: PackPlan, mixture: Mixture, packs_per_step: int) -> np.ndarray:
    """What every 100 steps have of each source, less what they should have: all that they have in the whole's shares.

    Returns:
        (windows, S), and (windows, S) what they should have.
    """
    source_of, amounts, num_sources = (
        mixture.source_of(packs.samples),
        mixture.amounts(packs.samples),
        len(mixture.counts),
    )
    sums_by_source = np.stack(
        [packs.sums_per_pack(np.where(source_of == source, amounts, 0)) for source in range(num_sources)], 1
    )
    num_steps = packs.num_packs // packs_per_step
    steps = sums_by_source[: num_steps * packs_per_step].reshape(num_steps, packs_per_step, -1).sum(axis=1)
    until = np.concatenate((np.zeros((1, num_sources)), steps.cumsum(axis=0)))
    windows = until[_WINDOW:] - until[:-_WINDOW]
    due = windows.sum(axis=1, keepdims=True) * sums_by_source.sum(axis=0) / sums_by_source.sum()
    return np.stack((windows - due, due))


def excess(packs: PackPlan, mixture: Mixture, packs_per_step: int) -> float:
    """The most that a source is off in any window, over what it may be: a tenth, or a few of its longest samples."""
    off, due = amounts_of_windows(packs, mixture, packs_per_step)
    source_of, amounts = mixture.source_of(packs.samples), mixture.amounts(packs.samples)
    longest = np.array([amounts[source_of == source].max() for source in range(len(mixture.counts))])
    return float((np.abs(off) / np.maximum(due / 10, _FEW * longest)).max())


def drawn_lengths(rng: np.random.Generator, packs_per_step: int, num_sources: int) -> list[np.ndarray]:
    """Lengths of sources, disjoint or not, long, short or all alike, which fill 1.3 to 2.5 windows."""
    medians = np.exp(rng.uniform(np.log(_CAPACITY / 120), np.log(_CAPACITY / 3), num_sources))
    kinds = rng.choice(["lognormal", "uniform", "narrow", "equal"], num_sources)
    weights = 2 ** rng.uniform(0, 5, num_sources)
    num_tokens = _WINDOW * rng.uniform(1.3, 2.5) * packs_per_step * _CAPACITY
    sizes = np.maximum(weights * num_tokens / (weights * medians).sum(), 3).astype(int)
    result = []
    for kind, median, size in zip(kinds, medians, sizes, strict=True):
        if kind == "lognormal":
            result.append(rng.lognormal(np.log(median), rng.uniform(0.3, 1), size))
        elif kind == "equal" and median < _CAPACITY / 16:
            result.append(np.full(size, median))
        else:
            width = 0.15 if kind == "narrow" else 0.7
            result.append(median * rng.uniform(1 - width, 1 + width, size))
    return result


@settings(max_examples=12)
@example(seed=6, packs_per_step=4, num_sources=6, unit="tokens")  # a pack with eight samples of a rare source
@given(
    seed=st.integers(0, 10**6),
    packs_per_step=st.sampled_from([4, 8]),
    num_sources=st.integers(2, 6),
    unit=st.sampled_from(["samples", "tokens"]),
)
def test_every_window_of_100_steps_has_each_source_within_a_tenth_or_a_few_samples(
    seed: int, packs_per_step: int, num_sources: int, unit: MixUnit
) -> None:
    mixture = mixture_of(drawn_lengths(np.random.default_rng(seed), packs_per_step, num_sources), unit)
    plan = plan_mixture(mixture, options(world_size=packs_per_step), seed=seed)
    assert np.array_equal(np.sort(plan.packs.samples), np.arange(mixture.num_drawn))
    assert plan.packs.tokens_per_pack().max() <= _CAPACITY
    plain = pack(mixture.lengths, _CAPACITY, seed=seed)
    assert plan.packs.num_packs <= plain.num_packs * 1.005 + 2
    assert excess(plan.packs, mixture, packs_per_step) <= 1


def mixture_with_short_samples(num: int = 12_000) -> Mixture:
    """A seventh of the samples are of 25 tokens; the others have 250 to 1,000."""
    rng = np.random.default_rng(0)
    return mixture_of([np.full(num // 7, 25), rng.integers(250, 1001, num - num // 7)])


def packed_one_by_one(mixture: Mixture) -> PackPlan:
    """The mixture's packs in an even order, but as they are without items."""
    packs = pack(mixture.lengths, _CAPACITY, seed=0)
    source_of, amounts = mixture.source_of(packs.samples), mixture.amounts(packs.samples)
    return select_packs(packs, order_mixture_packs(packs, source_of, amounts, seed=0, epoch=0))


def test_short_samples_are_spread_over_packs() -> None:
    mixture = mixture_with_short_samples()
    even, plain = plan_mixture(mixture, options(), seed=0).packs, packed_one_by_one(mixture)
    for packs_per_step in (1, 2, 4):
        assert excess(even, mixture, packs_per_step) < 0.6
        assert excess(plain, mixture, packs_per_step) > 2  # no order would do
    assert even.sums_per_pack(mixture.source_of(even.samples) == 0).max() <= 8
    assert plain.sums_per_pack(mixture.source_of(plain.samples) == 0).max() > 80


def test_epochs_have_equally_many_and_different_packs() -> None:
    mixture = mixture_with_short_samples(3000)
    plans = [plan_mixture(mixture, options(), seed=3, epoch=epoch) for epoch in (0, 0, 1, 2)]
    assert len({plan.packs.num_packs for plan in plans}) == 1
    assert plans[0].fingerprint == plans[1].fingerprint
    together = [pairs_sharing_a_pack(plan) for plan in plans]
    assert together[0] == together[1]
    assert len(together[0] & together[2]) < 0.1 * len(together[0])
    assert len(together[2] & together[3]) < 0.1 * len(together[2])


def pairs_sharing_a_pack(plan: EpochPlan) -> set[tuple[int, int]]:
    """Pairs of samples that share a pack."""
    result = set()
    for pack_index in range(plan.packs.num_packs):
        samples = np.sort(plan.packs.pack(pack_index)).tolist()
        result |= {(one, other) for place, one in enumerate(samples) for other in samples[place + 1 :]}
    return result


@pytest.mark.parametrize(
    "changes",
    [
        {"max_media_tokens_per_pack": 500},
        {"max_samples_per_pack": 7},
        {"max_media_tokens_per_pack": 500, "max_samples_per_pack": 7},
        {"packing_algorithm": "binpacking"},
        {"packing_window": 300},
    ],
)
def test_every_algorithm_keeps_all_budgets(changes: dict[str, object]) -> None:
    rng = np.random.default_rng(1)
    lengths = [np.full(100, 60), rng.integers(300, 1500, 300), rng.lognormal(5.5, 0.8, 300)]
    all_lengths = np.clip(np.concatenate(lengths), 1, _CAPACITY).astype(np.int32)
    media = np.where(rng.random(len(all_lengths)) < 0.4, all_lengths // 3, 0).astype(np.int32)
    mixture = mixture_of(lengths, media=np.minimum(media, 500))
    pack_options = options(**changes)
    plans = [plan_mixture(mixture, pack_options, seed=0, epoch=epoch).packs for epoch in (0, 1)]
    plain = pack(mixture.lengths, _CAPACITY, pack_options, seed=0, media_tokens=mixture.media_tokens)
    assert plans[0].num_packs == plans[1].num_packs <= plain.num_packs * 1.005 + 2
    for packs in plans:
        assert np.array_equal(np.sort(packs.samples), np.arange(mixture.num_drawn))
        assert packs.tokens_per_pack().max() <= _CAPACITY
        max_media_tokens = pack_options.max_media_tokens_per_pack
        assert (
            max_media_tokens is None
            or packs.sums_per_pack(mixture.media_tokens[packs.samples]).max() <= max_media_tokens
        )
        assert np.diff(packs.offsets).max() <= (pack_options.max_samples_per_pack or _CAPACITY)


def test_samples_fit_their_slots() -> None:
    """What a place draws in later epochs may be shorter than the place, never longer, whoever changes places."""
    rng = np.random.default_rng(2)
    mixture = mixture_of([rng.integers(20, 60, 900), rng.integers(200, 900, 900)])
    mixture = dataclasses.replace(mixture, counts=(300, 700))
    plans = [plan_mixture(mixture, options(), seed=0, epoch=epoch).packs for epoch in range(3)]
    assert len({packs.num_packs for packs in plans}) == 1
    for epoch, packs in enumerate(plans):
        assert np.array_equal(np.sort(packs.samples), np.sort(mixture.draw(epoch)))
        assert packs.tokens_per_pack().max() <= _CAPACITY


def test_slots_are_not_joined_if_that_needs_many_packs() -> None:
    """Two samples fill a pack, and none of them has room for a short one beside it."""
    mixture = mixture_of([np.full(40, 30), np.full(1000, _CAPACITY // 2)])
    packs, slot_samples = pack_mixture(mixture.slots, options(), seed=0, epoch=0)
    plain = pack(mixture.slots.lengths, _CAPACITY, seed=0)
    assert packs.num_packs <= plain.num_packs * 1.005 + 2
    assert np.array_equal(np.sort(slot_samples), np.arange(mixture.num_drawn))


def test_tiny_capacities_and_overlong_samples() -> None:
    mixture = mixture_of([np.array([1, 2, 3, 5, 5]), np.array([1, 1, 4])])
    small = dataclasses.replace(options(), packing_length=5)
    packs, _ = pack_mixture(mixture.slots, small, seed=0, epoch=0)
    assert packs.num_samples == 8
    assert packs.tokens_per_pack().max() <= 5
    with pytest.raises(DataError, match="2 of 8 samples are longer than a pack of 4 tokens"):
        pack_mixture(mixture.slots, dataclasses.replace(small, packing_length=4), seed=0, epoch=0)


def test_samples_as_long_as_a_pack_are_alone() -> None:
    mixture = mixture_of([np.full(7, _CAPACITY), np.full(5, _CAPACITY - 1)])
    packs, slot_samples = pack_mixture(mixture.slots, options(), seed=0, epoch=0)
    assert packs.num_packs == 12
    assert np.array_equal(slot_samples, np.arange(12))


def test_a_single_source_is_packed_one_by_one() -> None:
    mixture = mixture_of([np.random.default_rng(0).integers(20, 900, 500)])
    plan = plan_mixture(mixture, options(), seed=0)
    assert plan.packs.num_packs == pack(mixture.lengths, _CAPACITY, seed=0).num_packs
