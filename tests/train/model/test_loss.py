"""A step's losses are divided in one place: whatever is left of the step, gradients are those of its mean."""

from __future__ import annotations

import pytest
import torch

from packtool.train.model.loss import StepMean, TargetLosses, top_k_entropy


def gradient(mean: StepMean, weight: torch.nn.Parameter, losses: list[float]) -> torch.Tensor:
    """Of a step of one micro-batch for each loss, on one rank of ``mean.world_size``."""
    weight.grad = None
    for loss in losses:
        mean.contribution(weight * loss).backward()
    assert weight.grad is not None
    return weight.grad


def test_contributions_add_up_to_the_mean_of_the_step() -> None:
    weight = torch.nn.Parameter(torch.tensor(1.0))
    ranks = [[3.0, 5.0], [1.0, 7.0]]
    gradients = [gradient(StepMean(8, 2), weight, losses) for losses in ranks]
    assert torch.stack(gradients).mean() == 2.0
    total = torch.stack([StepMean(8, 2).sum_over_ranks(rank) for rank in gradients]).mean()
    assert float(total) / 8 == 2.0


def test_removed_units_leave_the_mean_of_the_others() -> None:
    weight = torch.nn.Parameter(torch.tensor(1.0))
    planned = StepMean(8)
    gradient(planned, weight, [4.0, 6.0])
    assert planned.remove_units(3, [weight]) == 5
    torch.testing.assert_close(weight.grad, torch.tensor(2.0))


def test_step_without_units_has_zero_loss() -> None:
    weight = torch.nn.Parameter(torch.tensor(1.0))
    assert gradient(StepMean(0), weight, [0.0]) == 0
    assert StepMean(3).remove_units(3, [weight]) == 0
    assert weight.grad == 0


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 0.0, 2.0])])
def test_dynamic_fine_tuning_weights_losses_by_constant_probabilities(weights: torch.Tensor | None) -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels = torch.tensor([2, 0, 6])
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    targets = TargetLosses(losses, labels == 0, torch.arange(3), weights, torch.zeros(()))
    (gradient_of_sum,) = torch.autograd.grad(targets.weighted_by_probability().weighted_sum(), logits)
    # p(y) times the gradient of cross-entropy, which is p - onehot(y).
    p = torch.softmax(logits.detach(), dim=1)
    expected = (p - torch.nn.functional.one_hot(labels, 7)) * p[torch.arange(3), labels, None]
    expected *= 1.0 if weights is None else weights[:, None]
    torch.testing.assert_close(gradient_of_sum, expected)


def test_entropies_of_likely_tokens_weight_the_losses() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    top = logits.topk(20).values.softmax(-1)
    entropies = torch.distributions.Categorical(top).entropy()
    torch.testing.assert_close(top_k_entropy(logits, 20), entropies)
    assert torch.equal(top_k_entropy(logits[:, :7], 20), top_k_entropy(logits[:, :7], 7))
    losses = torch.rand(5, requires_grad=True)
    targets = TargetLosses(losses, losses > 0, torch.arange(5), torch.full((5,), 2.0), torch.zeros(()), entropies)
    weighted = targets.weighted_by_entropy(3.0, 0.5)
    torch.testing.assert_close(weighted.weighted_sum(), (2 * losses * (entropies / 3.0) ** 0.5).sum())
