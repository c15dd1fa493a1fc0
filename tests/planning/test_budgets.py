"""Several budgets a pack: never over any of them, and close to the one that binds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from packtool.config.packing import PackOptions
from packtool.errors import ConfigError, DataError
from packtool.planning.pack_plan import PackPlan
from packtool.planning.packing import pack
from tests.planning.test_packing import check, lognormal_lengths, sample_sets

CAPACITY = 10240


def with_media(num: int, *, median: float, sigma: float, text: float) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Lengths, and media tokens that are half to nearly all of them, at most half a pack; a part is text alone."""
    lengths = lognormal_lengths(num, median=median, sigma=sigma)
    share = np.where(np.arange(num) % 100 < 100 * text, 0, 0.5 + 0.45 * (np.arange(num) * 7919 % 1009) / 1009)
    return lengths, np.minimum(lengths * share, CAPACITY // 2).astype(np.int32)


def over_bound(plan: PackPlan, media: npt.NDArray[Any], options: PackOptions) -> float:
    """Packs over what the scarcest budget needs if samples could be cut."""
    needs = [plan.lower_bound, -(-plan.num_samples // (options.max_samples_per_pack or plan.num_samples))]
    if options.max_media_tokens_per_pack is not None:
        needs.append(-(-int(media.sum(dtype=np.int64)) // options.max_media_tokens_per_pack))
    return plan.num_packs / max(needs) - 1


@pytest.mark.parametrize(
    ("median", "sigma", "text", "limits", "over"),
    [
        # Tokens are scarce, and media, too: then pictures must be spread over the packs.
        (1500, 1.0, 0.5, {"max_media_tokens_per_pack": 5120}, 0.003),
        (4300, 0.7, 0.5, {"max_media_tokens_per_pack": 5120}, 0.006),
        # Media are scarce.
        (1500, 1.0, 0.0, {"max_media_tokens_per_pack": 5120}, 0.012),
        (1500, 1.0, 0.0, {"max_media_tokens_per_pack": 5120, "max_samples_per_pack": 8}, 0.02),
        (1500, 1.0, 0.5, {"max_media_tokens_per_pack": 5120, "max_samples_per_pack": 8}, 0.02),
        # Places: at 4 a pack, 8.2 % are lost to samples that fill a pack alone.
        (1500, 1.0, 0.5, {"max_samples_per_pack": 4}, 0.09),
        (1500, 1.0, 0.5, {"max_samples_per_pack": 8}, 0.015),
        (1500, 1.0, 0.5, {"max_samples_per_pack": 16}, 0.002),
    ],
)
def test_fill_is_high(median: float, sigma: float, text: float, limits: dict[str, int], over: float) -> None:
    lengths, media = with_media(30_000, median=median, sigma=sigma, text=text)
    options = PackOptions(**limits)  # type: ignore[arg-type]
    plan = pack(lengths, CAPACITY, options, seed=0, media_tokens=media)
    check(plan, lengths)
    assert np.diff(plan.offsets).max() <= limits.get("max_samples_per_pack", CAPACITY)
    assert plan.sums_per_pack(media[plan.samples]).max() <= limits.get("max_media_tokens_per_pack", CAPACITY)
    assert over_bound(plan, media, options) <= over


def test_packs_full_in_both_budgets_are_recovered() -> None:
    # Cut from packs that were full: nobody can do with fewer.
    bits = np.asarray(np.random.PCG64(0).random_raw(36_000))
    uniform = (bits >> np.uint64(11)).astype(np.float64).reshape(4000, 9) / 2**53
    cuts = np.sort(1 + (uniform[:, :4] * (CAPACITY - 1)).astype(np.int64), axis=1)
    lengths = np.diff(cuts, axis=1, prepend=0, append=CAPACITY)
    media = lengths * (0.3 + 0.4 * uniform[:, 4:])
    media = np.floor(media * (CAPACITY // 2) / media.sum(axis=1, keepdims=True)).clip(max=lengths)
    fits = lengths > 0
    options = PackOptions(max_media_tokens_per_pack=CAPACITY // 2)
    plan = pack(lengths[fits], CAPACITY, options, seed=0, media_tokens=media[fits].astype(np.int64))
    check(plan, lengths[fits])
    assert plan.lower_bound == 4000
    assert plan.num_packs <= 1.02 * 4000


def test_epochs_differ_in_packs_but_not_in_their_number() -> None:
    lengths, media = with_media(5000, median=1500, sigma=1.0, text=0.3)
    options = PackOptions(max_media_tokens_per_pack=5120, max_samples_per_pack=9)
    plans = [pack(lengths, CAPACITY, options, seed=1, epoch=epoch, media_tokens=media) for epoch in range(4)]
    assert len({plan.num_packs for plan in plans}) == 1
    for plan in plans[1:]:
        check(plan, lengths)
        crowded = {samples for samples in sample_sets(plan) if len(samples) > 1}
        assert len(crowded & sample_sets(plans[0])) < 0.3 * len(crowded)


def test_limits_above_all_packs_have_no_effect() -> None:
    lengths, media = with_media(3000, median=1500, sigma=1.0, text=0.3)
    free = pack(lengths, CAPACITY, seed=1)
    options = PackOptions(max_media_tokens_per_pack=CAPACITY, max_samples_per_pack=CAPACITY)
    assert pack(lengths, CAPACITY, options, seed=1, media_tokens=media).fingerprint == free.fingerprint
    options = PackOptions(max_media_tokens_per_pack=1)
    assert pack(lengths, CAPACITY, options, seed=1, media_tokens=0 * media).fingerprint == free.fingerprint


@pytest.mark.parametrize("algorithm", ["best_fit", "sequential"])
def test_a_sample_over_the_budget_is_an_error(algorithm: Any) -> None:
    options = PackOptions(packing_algorithm=algorithm, max_media_tokens_per_pack=20)
    with pytest.raises(DataError, match=r"2 of 3 samples have more media tokens than a pack may hold, 20") as error:
        pack([50, 60, 70], 100, options, seed=0, media_tokens=np.array([20, 21, 40]))
    assert error.value.remedy is not None
    assert "--max-media-tokens-per-pack to 40" in error.value.remedy
    with pytest.raises(ConfigError, match="media tokens of the samples are unknown"):
        pack([50], 100, options, seed=0)
