"""Losses and gradients that are no numbers are found; ``test_no_sync`` shows that nobody waits for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from packtool.train.loop.watch import StepNumbers

CPU = torch.device("cpu")


def numbers_of(losses: list[Tensor], norm: Tensor | float, *, is_scaled: bool = False) -> StepNumbers:
    numbers = StepNumbers()
    numbers.begin()
    for loss in losses:
        numbers.see_loss(loss)
    numbers.see_norm(norm, is_scaled=is_scaled)
    return numbers


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_that_is_none_is_found_anywhere(bad: float) -> None:
    good = torch.tensor(1.0, dtype=torch.bfloat16)
    assert numbers_of([good, good], 1.0).bad(CPU) == 0
    assert numbers_of([good], torch.tensor([1.0])).bad(CPU) == 0
    assert numbers_of([], 1.0).bad(CPU) == 0
    found = numbers_of([good, torch.tensor(bad)], 1.0)
    assert (found.bad(CPU), found.bad_micro_batches()) == (1, [1])
    for norm in (bad, torch.tensor(bad)):
        found = numbers_of([good], norm)
        assert (found.bad(CPU), found.bad_micro_batches()) == (1, [])
        assert numbers_of([good], norm, is_scaled=True).bad(CPU) == 0
