"""Packing: nothing lost, nothing doubled, nothing over-long, as full as promised, the same for ever."""

from __future__ import annotations

import bisect
import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.config.packing import PackOptions
from packtool.errors import ConfigError, DataError
from packtool.planning.best_fit import min_packs
from packtool.planning.pack_plan import PackPlan
from packtool.planning.packing import pack, pack_singletons

PACKERS = (pack, pack_singletons)
Packer = Callable[..., PackPlan]

ALGORITHMS: tuple[dict[str, Any], ...] = (
    {"packing_algorithm": "best_fit"},
    {"packing_algorithm": "binpacking", "packing_batch_size": 30},
    {"packing_algorithm": "sequential", "look_ahead": 0},
    {"packing_algorithm": "sequential", "look_ahead": 8},
    {"packing_algorithm": "best_fit", "packing_window": 25},
    {"packing_algorithm": "sequential", "packing_window": 25},
    {"packing_algorithm": "best_fit", "shuffle": False},
    {"packing_algorithm": "binpacking", "packing_batch_size": 30, "shuffle": False},
)


def lognormal_lengths(num: int, *, median: float, sigma: float) -> npt.NDArray[np.int32]:
    """Lognormal lengths clipped to 16 ... 10240; from raw bits, so that every version of numpy draws the same."""
    bits = np.asarray(np.random.PCG64(0).random_raw(2 * num))
    uniform = (bits >> np.uint64(11)).astype(np.float64) / 2**53
    normal = np.sqrt(-2 * np.log1p(-uniform[:num])) * np.cos(2 * np.pi * uniform[num:])
    return np.clip(median * np.exp(sigma * normal), 16, 10240).astype(np.int32)


def next_fit(lengths: npt.NDArray[np.int32], capacity: int) -> int:
    """Packs that next-fit makes: whatever does not fit in the current pack opens a new one."""
    num_packs, room = 0, 0
    for length in lengths.tolist():
        if length > room:
            num_packs += 1
            room = capacity
        room -= length
    return num_packs


def check(plan: PackPlan, lengths: npt.ArrayLike) -> None:
    """What holds for every plan."""
    given_lengths = np.asarray(lengths, dtype=np.int64)
    assert plan.samples.dtype == plan.offsets.dtype == np.int64
    assert plan.lengths.dtype == np.int32
    assert np.array_equal(np.sort(plan.samples), np.arange(len(given_lengths)))
    assert np.array_equal(given_lengths[plan.samples], plan.lengths)
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == len(given_lengths)
    assert (plan.offsets[1:] > plan.offsets[:-1]).all()
    assert (plan.tokens_per_pack() <= plan.capacity).all()
    assert plan.num_tokens == given_lengths.sum()


def sample_sets(plan: PackPlan) -> set[frozenset[int]]:
    return {frozenset(plan.pack(index).tolist()) for index in range(plan.num_packs)}


def repeated_packs(lengths: npt.NDArray[np.integer[Any]], capacity: int) -> float:
    """Share of the packs of several samples that the next epoch has again."""
    first_plan, second_plan = (pack(lengths, capacity, seed=1, epoch=epoch) for epoch in (0, 1))
    crowded = {pack for pack in sample_sets(first_plan) if len(pack) > 1}
    return len(crowded & sample_sets(second_plan)) / len(crowded)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.one_of(st.integers(1, 60), st.sampled_from([1024, 1025, 1_048_576])))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=100))
    return lengths, capacity


@given(problem=problems(), seed=st.integers(0, 3), epoch=st.integers(0, 3))
def test_each_sample_once_and_no_pack_over_capacity(problem: tuple[list[int], int], seed: int, epoch: int) -> None:
    lengths, capacity = problem
    for packer in PACKERS:
        plan = packer(lengths, capacity, seed=seed, epoch=epoch)
        check(plan, lengths)
        same_plan = packer(lengths, capacity, seed=seed, epoch=epoch)
        assert same_plan.fingerprint == plan.fingerprint
        assert np.array_equal(same_plan.samples, plan.samples)


@pytest.mark.smoke
@given(
    problem=problems(),
    options=st.sampled_from(ALGORITHMS),
    max_samples=st.none() | st.integers(1, 6),
    max_media=st.none() | st.floats(0.2, 1),
    seed=st.integers(0, 3),
)
def test_every_algorithm_keeps_its_guarantees(
    problem: tuple[list[int], int],
    options: dict[str, Any],
    max_samples: int | None,
    max_media: float | None,
    seed: int,
) -> None:
    lengths, capacity = problem
    media = (np.arange(len(lengths)) * 7 % 11 * np.array(lengths, dtype=np.int64) // 10).clip(max=lengths)
    limits: dict[str, Any] = {}
    if options["packing_algorithm"] != "binpacking":
        limits["max_samples_per_pack"] = max_samples
    if options["packing_algorithm"] in ("best_fit", "sequential") and max_media is not None:
        limits["max_media_tokens_per_pack"] = max(1, int(max_media * capacity), int(media.max(initial=1)))
    pack_options = PackOptions(**options, **limits)
    plans = [pack(lengths, capacity, pack_options, seed=seed, epoch=epoch, media_tokens=media) for epoch in (0, 1, 1)]
    for plan in plans:
        check(plan, lengths)
        assert np.diff(plan.offsets).max(initial=0) <= (limits.get("max_samples_per_pack") or len(lengths))
        max_media_tokens = limits.get("max_media_tokens_per_pack") or media.sum()
        assert plan.sums_per_pack(media[plan.samples]).max(initial=0) <= max_media_tokens
    assert len({plan.num_packs for plan in plans}) == 1
    assert plans[1].fingerprint == plans[2].fingerprint
    if not pack_options.shuffle:
        assert plans[0].fingerprint == plans[1].fingerprint
        assert (np.diff(plans[0].samples[plans[0].offsets[:-1]]) > 0).all()


@given(problem=problems(), seed=st.integers(0, 3))
def test_no_more_packs_than_best_fit_decreasing(problem: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = problem
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        tightest = bisect.bisect_left(free, length)
        room = free.pop(tightest) if tightest < len(free) else capacity
        bisect.insort(free, room - length)
    plans = [pack(lengths, capacity, seed=seed, epoch=epoch) for epoch in range(3)]
    assert plans[0].num_packs <= len(free)
    assert len({plan.num_packs for plan in plans}) == 1


@given(
    capacity=st.integers(2, 200),
    cuts=st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=60),
)
def test_worst_case_bound(capacity: int, cuts: list[list[float]]) -> None:
    # Full packs, cut to pieces: nobody can do with fewer, and best-fit decreasing needs at most 11/9 of them + 4.
    lengths: list[int] = []
    for parts in cuts:
        edges = sorted({0, capacity, *(round(edge * capacity) for edge in parts)})
        lengths += [right - start for start, right in itertools.pairwise(edges)]
    plan = pack(lengths, capacity, seed=0)
    assert plan.lower_bound == len(cuts)
    assert len(cuts) <= plan.num_packs <= 11 / 9 * len(cuts) + 4


@pytest.mark.parametrize(
    "options", [{}, *ALGORITHMS, {"max_samples_per_pack": 3}, {"max_media_tokens_per_pack": 1 << 19}], ids=str
)
@pytest.mark.parametrize("capacity", [1, 1024, 1025, 10240, 1_048_576])
@pytest.mark.parametrize(
    "lengths_of",
    [
        pytest.param(lambda capacity: [], id="none"),
        pytest.param(lambda capacity: [1], id="one, short"),
        pytest.param(lambda capacity: [capacity], id="one, full"),
        pytest.param(lambda capacity: [max(1, capacity // 3)] * 1000, id="all equal"),
        pytest.param(lambda capacity: [capacity // 2 + 1] * 1000, id="just over half"),
        pytest.param(lambda capacity: [capacity] * 1000, id="all full"),
        pytest.param(lambda capacity: [1] * 1000, id="all of one token"),
        pytest.param(lambda capacity: np.arange(3000) % capacity + 1, id="all different"),
    ],
)
def test_edge_cases(options: dict[str, Any], capacity: int, lengths_of: Callable[[int], npt.ArrayLike]) -> None:
    lengths = np.asarray(lengths_of(capacity), dtype=np.int64)
    if not options:
        check(pack_singletons(lengths, capacity, seed=1), lengths)
    plan = pack(lengths, capacity, PackOptions(**options), seed=1, media_tokens=lengths // 3)
    check(plan, lengths)


def test_packs_in_the_order_of_the_cache() -> None:
    plan = pack([5, 3, 5, 5, 5, 3], 10, PackOptions(shuffle=False), seed=0)
    assert [plan.pack(index).tolist() for index in range(3)] == [[0, 2], [1, 5], [3, 4]]


def test_options_out_of_range() -> None:
    invalid_options = PackOptions(
        packing_window=0,
        packing_num_proc=0,
        packing_batch_size=0,
        look_ahead=-1,
        max_samples_per_pack=0,
        max_media_tokens_per_pack=0,
    )
    with pytest.raises(ConfigError) as error:
        pack([1], 8, invalid_options, seed=0)
    for name in ("window 0", "num-proc", "batch-size", "look-ahead", "samples-per-pack", "media-tokens-per-pack"):
        assert name.split(" ")[0] in error.value.message
    for algorithm, limit in (
        ("binpacking", {"max_samples_per_pack": 3}),
        ("binpacking", {"max_media_tokens_per_pack": 3}),
    ):
        with pytest.raises(ConfigError, match=f"{algorithm} does not support --max"):
            pack([1], 8, PackOptions(packing_algorithm=algorithm, **limit), seed=0)  # type: ignore[arg-type]


def test_packs_of_equal_samples() -> None:
    assert pack([5] * 100, 10, seed=0).num_packs == 50
    assert pack([5] * 101, 10, seed=0).num_packs == 51
    assert pack([5] * 100, 9, seed=0).num_packs == 100
    assert pack([1] * 2048, 1025, seed=0).num_packs == 2


def test_empty_input_gives_no_packs() -> None:
    for packer in PACKERS:
        plan = packer([], 8, seed=0)
        assert (plan.num_packs, plan.num_tokens, plan.lower_bound, plan.fill) == (0, 0, 0, 1.0)
        assert len(plan.tokens_per_pack()) == len(plan.sum_squares_per_pack()) == 0


def test_figures() -> None:
    plan = pack([6, 4, 7, 3, 5], 10, seed=0)
    assert plan.num_packs == 3
    assert plan.lower_bound == 3
    assert plan.fill == pytest.approx(25 / 30)
    assert sorted(plan.tokens_per_pack().tolist()) == [5, 10, 10]
    assert sorted(plan.sum_squares_per_pack().tolist()) == [25, 52, 58]
    for index in range(3):
        assert plan.pack(index).tolist() == plan.samples[plan.offsets[index] : plan.offsets[index + 1]].tolist()
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            plan.pack(outside)


def test_squares_do_not_overflow() -> None:
    assert pack([1_048_576], 1_048_576, seed=0).sum_squares_per_pack().tolist() == [1_048_576**2]


@pytest.mark.parametrize("packer", PACKERS)
def test_other_seed_or_epoch_other_order_same_fill(packer: Packer) -> None:
    lengths = lognormal_lengths(3000, median=1500, sigma=1.0)
    plans = [packer(lengths, 10240, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0), (2, 1))]
    for plan in plans[1:]:
        assert plan.num_packs == plans[0].num_packs
        assert np.mean(plan.samples == plans[0].samples) < 0.01
    assert len({plan.fingerprint for plan in plans}) == 4


@pytest.mark.parametrize(("num", "share"), [(300, 0.35), (3000, 0.2), (20_000, 0.15), (150_000, 0.1)])
def test_epochs_have_different_packs(num: int, share: float) -> None:
    # With few samples most lengths occur once, and only the order of placing can bring others together.
    lengths = lognormal_lengths(num, median=1500, sigma=1.0)
    assert repeated_packs(lengths, 10240) < share


def test_equal_samples_are_mixed() -> None:
    # All alike: a pack must not simply be a run of neighbours in the cache.
    plan = pack([1] * 10_000, 100, seed=0)
    spread = np.array([np.ptp(plan.pack(index)) for index in range(plan.num_packs)])
    assert spread.min() > 5000


def test_order_of_packs_is_not_sorted() -> None:
    plan = pack(lognormal_lengths(20_000, median=1500, sigma=1.0), 10240, seed=0)
    longest = plan.lengths[plan.offsets[:-1]].astype(np.float64)
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.05


def test_plans_are_pinned() -> None:
    # A resumed run, perhaps with another numpy, must find the plan that it left.
    few_lengths, many_lengths = ((np.arange(num) * 37) % 97 + 1 for num in (80, 5000))
    assert pack(few_lengths, 128, seed=42, epoch=1).fingerprint.startswith("3b237827b1be794ec763e15656949db7")
    assert pack(many_lengths, 128, seed=42, epoch=1).fingerprint.startswith("6f61a5511104432f357f3a00a144c1db")
    assert pack_singletons(few_lengths, 128, seed=42, epoch=1).fingerprint.startswith(
        "9d27be94b52134ebdc3a7a7a8d3ac34c"
    )


def test_fingerprint_depends_on_every_field() -> None:
    plan = pack([6, 4, 7, 3, 5], 10, seed=0)
    others = [
        PackPlan(plan.samples[::-1], plan.offsets, plan.lengths, plan.capacity),
        PackPlan(plan.samples, plan.offsets + 1, plan.lengths, plan.capacity),
        PackPlan(plan.samples, plan.offsets, plan.lengths + 1, plan.capacity),
        PackPlan(plan.samples, plan.offsets, plan.lengths, 11),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 5


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.int64, np.uint64])
def test_type_of_the_lengths_does_not_matter(dtype: npt.DTypeLike) -> None:
    lengths = lognormal_lengths(500, median=1500, sigma=1.0)
    expected = pack(lengths.tolist(), 10240, seed=3).fingerprint
    assert pack(lengths.astype(dtype), 10240, seed=3).fingerprint == expected


@pytest.mark.parametrize("packer", PACKERS)
def test_errors_state_count_and_remedy(packer: Packer) -> None:
    with pytest.raises(
        DataError, match=r"2 of 4 samples are longer than a pack of 10 tokens; the longest has 12"
    ) as over:
        packer([11, 3, 12, 10], 10, seed=0)
    assert over.value.remedy == "Raise --packing-length to 12, or leave them out with --max-length 10."
    with pytest.raises(DataError, match=r"2 of 3 samples have no tokens \(the smallest length is -4\)"):
        packer([0, -4, 5], 10, seed=0)
    with pytest.raises(DataError, match="float64"):
        packer([1.5], 10, seed=0)
    with pytest.raises(DataError, match="shape"):
        packer([[1, 2]], 10, seed=0)
    for capacity in (0, -1, 2**31):
        with pytest.raises(ConfigError, match=str(capacity)):
            packer([1], capacity, seed=0)
    with pytest.raises(ConfigError):
        packer([1], 10, seed=-1)


def test_fill_on_short_data() -> None:
    lengths = lognormal_lengths(393_230, median=1500, sigma=1.0)
    plan = pack(lengths, 10240, seed=0)
    check(plan, lengths)
    assert plan.num_packs <= 1.0001 * plan.lower_bound
    assert plan.num_packs < next_fit(lengths, 10240)


def test_fill_on_long_data() -> None:
    lengths = lognormal_lengths(393_230, median=4300, sigma=0.7)
    plan = pack(lengths, 10240, seed=0)
    check(plan, lengths)
    # Best-fit decreasing ends 0.26 to 0.28 % over the bound; 0.09 % cannot be avoided, for short ones are few.
    distinct, counts = np.unique(lengths, return_counts=True)
    needed = min_packs(distinct[::-1].astype(np.int64), counts[::-1], 10240)
    assert needed > 1.0008 * plan.lower_bound
    assert plan.num_packs <= 1.0002 * needed
    assert next_fit(lengths, 10240) > 1.25 * plan.num_packs


@pytest.mark.parametrize(("num", "median", "sigma"), [(3000, 4300, 0.7), (3000, 2500, 0.5), (50_000, 4300, 0.7)])
def test_small_data_is_packed(num: int, median: float, sigma: float) -> None:
    lengths = lognormal_lengths(num, median=median, sigma=sigma)
    plan = pack(lengths, 10240, seed=0)
    distinct, counts = np.unique(lengths, return_counts=True)
    assert plan.num_packs <= 2 + 1.0005 * min_packs(distinct[::-1].astype(np.int64), counts[::-1], 10240)
    assert repeated_packs(lengths, 10240) < 0.2


def test_memory_is_bounded() -> None:
    lengths = lognormal_lengths(1_000_000, median=1500, sigma=1.0)
    tracemalloc.start()
    try:
        pack(lengths, 10240, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50 * len(lengths)


def test_real_lengths(realdata: Path) -> None:
    for path in sorted((realdata / "lengths").glob("*.json")):
        lengths = np.array(json.loads(path.read_text()))
        for capacity in (16384, 131072):
            short_lengths = lengths[lengths <= capacity]
            plan = pack(short_lengths, capacity, seed=0)
            check(plan, short_lengths)
            assert plan.num_packs <= 1.005 * plan.lower_bound, (path.name, capacity)
            assert repeated_packs(short_lengths, capacity) < 0.2, (path.name, capacity)
