from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.config.mixture import Amount, MixUnit, Recipe, SourceRecipe, parse_amount
from packtool.errors import ConfigError, DataError
from packtool.planning.epoch import EpochPlan, plan_mixture
from packtool.planning.mixture import Mixture, by_name, counts_of_steps, make_mixture, share_figures
from packtool.planning.options import PlanOptions

MAX = 512


def mixture_of(sizes: list[int], sources: list[SourceRecipe], seed: int = 0, **recipe: object) -> Mixture:
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    lengths = np.clip(rng.lognormal(4, 1, total), 2, MAX).astype(np.int32)
    lengths[:: max(total // 7, 1)] = 7  # some of one length
    return make_mixture(
        Recipe(sources=tuple(sources), **recipe),  # type: ignore[arg-type]
        np.concatenate(([0], np.cumsum(sizes))),
        lengths,
        lengths // 2,
        np.maximum(lengths // 3, 1),
        max_length=MAX,
        seed=seed,
    )


def sources_of(*amounts: str) -> list[SourceRecipe]:
    return [SourceRecipe(path=f"c{i}", amount=parse_amount(text)) for i, text in enumerate(amounts)]


def options(**changes: object) -> PlanOptions:
    return PlanOptions(max_length=MAX, packing_length=MAX, balance="none", **changes)  # type: ignore[arg-type]


def planned_epoch(mixture: Mixture, epoch: int = 0, **changes: object) -> EpochPlan:
    return plan_mixture(mixture, options(**changes), seed=mixture.seed, epoch=epoch)


@pytest.mark.parametrize(("text", "amount"), [("7", Amount(7, "samples")), ("20%", Amount(0.2, "epochs"))])
def test_amounts(text: str, amount: Amount) -> None:
    assert parse_amount(text) == amount
    assert parse_amount("2.5X") == Amount(2.5, "epochs")
    for invalid_amount in ("0", "0%", "1.5", "2y", ".5", "9" * 400, "9" * 20):
        with pytest.raises(ValueError, match="#"):
            parse_amount(invalid_amount)


def test_an_epoch_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="draws 99,999,999,999 samples of 30; at most 10,000,000"):
        mixture_of([30], sources_of("99999999999"))
    with pytest.raises(ConfigError, match="samples of 30; at most 10,000,000"):
        mixture_of([30], sources_of("99999999999x"))
    weights = [SourceRecipe(path="a", weight=1.0), SourceRecipe(path="b", weight=1e-300)]
    with pytest.raises(ConfigError, match="samples of 60; at most 10,000,000"):
        mixture_of([30, 30], weights, stop="all")


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    amounts=st.lists(st.sampled_from(["1", "17", "20%", "50%", "100%", "2.5x", "3x", "0.9x"]), min_size=4, max_size=4),
    seed=st.integers(0, 5),
)
def test_number_of_samples_of_an_epoch(sizes: list[int], amounts: list[str], seed: int) -> None:
    mixture = mixture_of(sizes, sources_of(*amounts[: len(sizes)]), seed)
    first_plan = planned_epoch(mixture)
    for epoch in (0, 1, 5):
        samples = mixture.draw(epoch)
        times = np.bincount(samples, minlength=sum(sizes))
        for start, size, count in zip(mixture.offsets, sizes, mixture.counts, strict=False):
            times_of_source = times[start : start + size]
            assert times_of_source.sum() == count
            # Everything comes as often as everything else, or once more.
            assert times_of_source.min() == count // size
            assert times_of_source.max() == -(-count // size)
        assert (mixture.lengths[samples] <= mixture.slots.lengths).all()
        assert (mixture.media_tokens[samples] <= mixture.slots.media_tokens).all()
        plan = planned_epoch(mixture, epoch)
        assert np.array_equal(np.sort(plan.packs.samples), np.sort(samples))
        assert plan.packs.num_packs == first_plan.packs.num_packs
        assert plan.packs.tokens_per_pack().max() <= MAX
        assert np.array_equal(plan.packs.lengths, mixture.lengths[plan.packs.samples])
    assert (
        planned_epoch(mixture_of(sizes, sources_of(*amounts[: len(sizes)]), seed)).fingerprint == first_plan.fingerprint
    )


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 90), min_size=2, max_size=3),
    amounts=st.lists(st.sampled_from(["7", "20%", "90%", "100%", "1.5x", "2x"]), min_size=6, max_size=6),
    share=st.floats(0, 1),
    resample=st.booleans(),
)
def test_epoch_counts_after_training_with_other_data(
    sizes: list[int], amounts: list[str], share: float, resample: bool
) -> None:
    """The amounts of a recipe change within an epoch; a source is taken as often as it says, in all."""
    num = len(sizes)
    before, after = (
        replace(mixture_of(sizes, sources_of(*source_amounts), 0), resample=resample)
        for source_amounts in (amounts[:num], amounts[num : 2 * num])
    )
    drawn_samples = before.draw(1)
    trained = np.bincount(drawn_samples[: round(share * len(drawn_samples))], minlength=sum(sizes))
    assert np.array_equal(before.epoch_counts(1, trained * 0), np.bincount(drawn_samples, minlength=sum(sizes)))
    num_missing = np.maximum(after.epoch_counts(1, trained) - trained, 0)
    for start, stop, count in zip(after.offsets, after.offsets[1:], after.counts, strict=False):
        source_slice = slice(start, stop)
        # More than it says only where a sample that all epochs have was not trained, and others were too often.
        min_missing = np.maximum(count // (stop - start) - trained[source_slice], 0).sum()
        assert num_missing[source_slice].sum() == max(count - trained[source_slice].sum(), min_missing)


def test_samples_are_drawn_equally_often_and_differ_by_epoch() -> None:
    mixture = mixture_of([400], sources_of("30%"))
    draws = [mixture.draw(epoch) for epoch in range(400)]
    often = np.bincount(np.concatenate(draws), minlength=400) / 400
    assert often.min() > 0.2  # four standard deviations of a share of 0.3 are 0.09
    assert often.max() < 0.4
    assert len({draw.tobytes() for draw in draws}) > 380
    repeated = replace(mixture, resample=False)
    assert np.array_equal(repeated.draw(0), repeated.draw(3))
    assert not np.array_equal(planned_epoch(repeated, 0).packs.samples, planned_epoch(repeated, 1).packs.samples)
    assert repeated.fingerprint != mixture.fingerprint


def test_loss_scales_are_part_of_the_fingerprint() -> None:
    half, double = sources_of("50%", "2x")
    plain = mixture_of([30, 20], [half, double])
    assert plain.fingerprint == "e28382bec2c17ec243e32bdfddb50205a1f48bdcb7e5e96a13b98538292d4360"  # as it always was
    scaled = [mixture_of([30, 20], [half, replace(double, loss_scale=scale)]) for scale in ("last_round", "all")]
    assert len({mixture.fingerprint for mixture in (plain, *scaled)}) == 3


def test_slots_are_little_larger_than_their_samples() -> None:
    mixture = mixture_of([4000, 3000], sources_of("35%", "1.3x"))
    waste = int(mixture.slots.lengths.sum()) / int(mixture.lengths[mixture.draw(2)].sum()) - 1
    assert 0 <= waste < 0.02


@pytest.mark.parametrize("unit", ["samples", "tokens", "target_tokens"])
@pytest.mark.parametrize("stop", ["first", "all"])
def test_weights(unit: MixUnit, stop: str) -> None:
    sources = [SourceRecipe(path=str(i), weight=weight) for i, weight in enumerate((3.0, 1.0, 1.0))]
    mixture = mixture_of([1000, 300, 2500], sources, unit=unit, stop=stop)
    copies = [count / len(own) for count, own in zip(mixture.counts, mixture.candidates, strict=True)]
    ends = min(copies) if stop == "all" else max(copies)
    assert ends == pytest.approx(1, abs=2e-3)  # the one that ends the epoch is used up
    plan = planned_epoch(mixture, 1)
    figures = share_figures(by_name(counts_of_steps(plan.packs, plan.steps, mixture).sum(axis=0), mixture))
    assert [each[f"share_of_{unit}"] for each in figures.values()] == pytest.approx([0.6, 0.2, 0.2], rel=0.01)


def test_temperature_flattens_sizes() -> None:
    sources = [SourceRecipe(path="a"), SourceRecipe(path="b")]
    counts = [mixture_of([1600, 100], sources, temperature=heat).counts for heat in (1.0, 2.0)]
    assert counts == [(1600, 100), (400, 100)]  # 16 to 1, and its root


def test_filters_by_length() -> None:
    sources = [SourceRecipe(path="a", min_length=20, max_length=100), SourceRecipe(path="b")]
    mixture = mixture_of([300, 50], sources)
    filtered_lengths = mixture.lengths[mixture.draw(0)[mixture.draw(0) < 300]]
    assert filtered_lengths.min() >= 20
    assert filtered_lengths.max() <= 100
    assert planned_epoch(mixture).summary.num_filtered == mixture.num_filtered == 300 - len(filtered_lengths)
    with pytest.raises(DataError, match="no samples remain of a"):
        mixture_of([300, 50], [replace(sources[0], min_length=MAX - 1, max_length=MAX - 1), sources[1]])


@settings(max_examples=30)
@given(
    sources=st.lists(
        st.builds(
            SourceRecipe,
            path=st.just("c"),
            amount=st.sampled_from([None, "30", "40%", "1.5x", "3x"]).map(lambda text: text and parse_amount(text)),
            min_length=st.sampled_from([None, 20]),
            max_length=st.sampled_from([None, 200]),
        ),
        min_size=1,
        max_size=3,
    ),
    epoch=st.integers(0, 2),
    packing=st.booleans(),
)
def test_parts_of_the_caches_add_up(sources: list[SourceRecipe], epoch: int, packing: bool) -> None:
    mixture = mixture_of([150] * len(sources), sources)
    summary = planned_epoch(mixture, epoch, packing=packing).summary
    assert summary.num_cached == 150 * len(sources)
    assert summary.num_distinct == len(np.unique(mixture.draw(epoch)))
    assert summary.num_samples == mixture.num_drawn
    assert summary.num_not_drawn == sum(map(len, mixture.candidates)) - summary.num_distinct >= 0
    assert summary.num_distinct + summary.num_filtered + summary.num_not_drawn == summary.num_cached


def test_same_epoch_on_other_ranks_and_rest_after_resuming() -> None:
    mixture = mixture_of([500, 200], sources_of("1.5x", "50%"))
    one, four = (planned_epoch(mixture, 1, world_size=size) for size in (1, 4))
    assert one.packs.fingerprint == four.packs.fingerprint
    for step in (0, 7, four.steps.num_steps - 1):
        remaining_samples = np.sort(four.packs_from(step).samples)
        trained = [
            pack
            for done in range(step)
            for rank in range(4)
            for micro in range(four.steps.num_micro_batches(done))
            for pack in four.samples(done, rank, micro)
        ]
        together = np.concatenate([remaining_samples, *trained])
        assert np.array_equal(np.sort(together), np.sort(mixture.draw(1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": False},
        {"packing": False, "group_by_length": True},
        {"packing": False, "dynamic_batch_tokens": 900},
        {"packing_algorithm": "sequential"},
        {"packing_algorithm": "binpacking"},
        {"shuffle": False},
        {"max_media_tokens_per_pack": 256},
        {"packing_window": 100},
    ],
)
def test_every_algorithm_packs_repeated_samples(changes: dict[str, object]) -> None:
    mixture = mixture_of([200, 90], sources_of("2.5x", "40%"))
    plans = [planned_epoch(mixture, epoch, **changes) for epoch in (0, 1)]
    assert plans[0].packs.num_packs == plans[1].packs.num_packs
    for epoch, plan in enumerate(plans):
        assert np.array_equal(np.sort(plan.packs.samples), np.sort(mixture.draw(epoch)))
        assert plan.steps.target_tokens_per_step.sum() == mixture.target_tokens[mixture.draw(epoch)].sum()
