"""Steps that are worth looking at are marked, and hardly any others."""

from __future__ import annotations

import numpy as np
import pytest

from packtool.train.loop.log import Outliers, is_far_above, outlier_warning


def test_outlier_is_six_robust_deviations_above_the_median() -> None:
    before = [2.0 + 0.1 * (index % 5 - 2) for index in range(50)]  # a median absolute deviation of 0.1
    assert is_far_above(2.0 + 6.1 * 0.14826, before, 0.01)
    assert not is_far_above(2.0 + 5.9 * 0.14826, before, 0.01)
    assert not is_far_above(2.0 + 6.1 * 0.14826, before, 0.2), "where numbers are expected to vary more"
    assert not is_far_above(1.0, before, 0.01), "below is good news"
    assert not is_far_above(9.0, before[:19], 0.01), "too few to tell"
    assert is_far_above(9.0, [*before, 9.0, 8.5], 0.01)
    assert not is_far_above(9.0, [*before, 9.0, 8.5, 9.5], 0.01), "one of many"


def curve(seed: int, num: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """A loss that falls and is noisy with heavy tails, and norms that begin large and vary by factors."""
    random, steps = np.random.default_rng(seed), np.arange(num)
    losses = 1.2 + 3 * np.exp(-steps / 60) + 0.5 / (1 + steps / 500) + 0.08 * random.standard_t(5, num)
    # Every twentieth line is of a source that is harder.
    losses[random.random(num) < 0.05] += 0.9
    return losses, np.exp(0.3 * random.standard_t(5, num)) * (1 + 5 * np.exp(-steps / 30))


def test_ordinary_curves_have_few_outliers() -> None:
    marked = 0
    for seed in range(5):
        outliers = Outliers()
        marked += sum(
            bool(outliers.add_line({"loss": loss, "grad_norm": norm})) for loss, norm in zip(*curve(seed), strict=True)
        )
    assert marked <= 15, "in ten thousand"


@pytest.mark.smoke
@pytest.mark.parametrize("at", [60, 1900])
def test_jump_is_an_outlier_and_a_new_level_only_briefly(at: int) -> None:
    losses, norms = curve(7)
    outliers, marked = Outliers(), []
    losses[at] += 6.0
    norms[at] *= 40
    losses[1000:] += 6.0
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        if outlier_names := outliers.add_line({"loss": loss, "grad_norm": norm}):
            marked.append((step, sorted(outlier_names)))
    assert (at, ["grad_norm", "loss"]) in marked
    assert 1 <= sum(1000 <= step < 1200 for step, names in marked if "loss" in names) <= 4


def test_nan_and_evaluations_are_no_outliers() -> None:
    outliers = Outliers()
    for _ in range(30):
        assert not outliers.add_line({"loss": 1.0, "grad_norm": 0.0})
        assert not outliers.add_line({"loss": float("nan"), "grad_norm": float("inf")})
        assert not outliers.add_line({"eval_loss": 50.0})
    assert outliers.add_line({"loss": 2.0}) == {"loss": 1.0}


def test_warning_names_the_command() -> None:
    warning = outlier_warning(1200, {"loss": 1.25}, {"loss": 9.0}, "'my run'")
    assert warning == (
        "step 1,200 is far above previous steps: loss 9 (median of previous lines: 1.25): "
        "packtool inspect 'my run' --step 1200 shows its samples"
    )
    assert "inspect" not in outlier_warning(3, {"grad_norm": 1.0}, {"grad_norm": 7.0}, None)
