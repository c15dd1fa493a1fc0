"""NaN and infinite losses and gradient norms are found; ``test_no_sync`` shows that the host does not wait for it."""

from __future__ import annotations

import pytest
import torch

from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.loop.watch import StepWatch, StopSignals, has_nan_or_inf

CPU = torch.device("cpu")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_detected_in_losses_and_norm(bad: float) -> None:
    good = torch.tensor(1.0, dtype=torch.bfloat16)
    assert has_nan_or_inf([good, good], 1.0, CPU) == 0
    assert has_nan_or_inf([good], torch.tensor([1.0]), CPU) == 0
    assert has_nan_or_inf([], 1.0, CPU) == 0
    assert has_nan_or_inf([good, torch.tensor(bad)], 1.0, CPU) == 1
    assert has_nan_or_inf([good], bad, CPU) == 1
    assert has_nan_or_inf([good], torch.tensor(bad), CPU) == 1


@pytest.mark.parametrize("is_scaled", [True, False])
def test_norm_with_loss_scaling_may_be_infinite(is_scaled: bool) -> None:
    watch = StepWatch(StopSignals(), lambda: lambda _: [], on_nan="go-on", world=World(), progress=SilentProgress())
    watch.record_loss(torch.tensor(1.0))
    watch.record_norm(float("inf"), is_scaled=is_scaled)
    watch.before_update(0, torch.nn.Linear(1, 1), CPU)
    assert watch.check_last_step() != is_scaled
