"""The loss: summed over targets, divided by what the plan knows the whole step to hold.

For a step with N target tokens over all micro-batches and ranks, every micro-batch contributes

    loss = world_size / N * sum over its targets of -w log p(target)

and gradients add up over micro-batches and are *averaged* over ranks: the gradient is that of the mean over all N
targets, however samples were grouped. N comes from the plan, so nobody has to ask anybody. w is 1, or the target's loss
scale, by which N does not change (as in ms-swift). With ``--loss-reduction sample`` N is the number of samples, and w
divides each sample's losses by its targets.

Target losses are made here or, where a model's head allows it, in ``head_loss``; ``StepMean`` is the one place that
divides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packtool.batch.batch import Batch
from packtool.constants import IGNORE_INDEX
from packtool.train.model.head_loss import TargetLosses


@dataclass(frozen=True)
class StepMean:
    """The mean over a whole optimizer step, of which each micro-batch knows its own sum of losses only.

    Args:
        num_units: N, target tokens (or samples) of the step over all ranks; none at all counts as 1.
        world_size: ranks, over which gradients are averaged.
    """

    num_units: int
    world_size: int = 1

    @property
    def _factor(self) -> float:
        return self.world_size / max(self.num_units, 1)

    def contribution(self, sum_of_losses: Tensor) -> Tensor:
        """What a micro-batch differentiates, 0-d: its sum of losses, times world_size / N."""
        return sum_of_losses * self._factor

    def sum_over_ranks(self, contributions: Tensor) -> Tensor:
        """The sum of losses behind a rank's contributions, 0-d, times the ranks: its mean is the step's sum."""
        return contributions / self._factor * self.world_size

    def without(self, num_missing: int) -> StepMean:
        """The mean over the units that are left where some could not be loaded."""
        return replace(self, num_units=self.num_units - num_missing)

    def mend_gradients(self, parameters: Iterable[nn.Parameter], left: StepMean) -> None:
        """Turn gradients of this mean into those of the mean over what is left; none left leaves them, all zero."""
        if left.num_units in (self.num_units, 0):
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.num_units / left.num_units)


def mean_loss(sum_of_losses: float, num_units: int) -> float:
    """The mean over the units of some steps, for a log line; nan where these had none."""
    return sum_of_losses / num_units if num_units else math.nan


def sum_of_losses(model: nn.Module, batch: Batch, *, label_logits_only: bool) -> Tensor:
    """Weighted sum of a micro-batch's target losses, float32, 0-d, with a graph; see ``target_losses``."""
    return target_losses(model, batch, label_logits_only=label_logits_only).sum(batch.loss_weights)


def target_losses(model: nn.Module, batch: Batch, *, label_logits_only: bool) -> TargetLosses:
    """Cross-entropies of a micro-batch's targets from the model's own logits.

    Args:
        model: anything whose forward takes ``batch.model_inputs()``; may be wrapped.
        label_logits_only: the model takes ``logits_to_keep`` (see ``takes_logits_to_keep``): logits are then made only
            where some row has a label, for they are the largest tensor of a step (T x vocabulary).

    Returns:
        the losses; their sum is exactly 0 for a micro-batch without targets, but with a graph through all of the model.
    """
    logits, labels = target_logits(model, batch, label_logits_only=label_logits_only)
    rows, wanted, positions = logits.float().flatten(0, 1), labels.flatten(), batch.target_positions
    if not len(positions):
        return TargetLosses(rows.new_zeros(0), wanted.new_zeros(0, dtype=torch.bool), positions, rows.sum() * 0.0)
    losses = F.cross_entropy(rows, wanted, ignore_index=IGNORE_INDEX, reduction="none")
    correct = rows.detach().argmax(-1) == wanted
    if len(losses) != len(positions):
        targets = (wanted != IGNORE_INDEX).nonzero().squeeze(1)
        losses, correct = losses[targets], correct[targets]
    return TargetLosses(losses, correct, positions, losses.new_zeros(()))


def summed_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None, *, num_targets: int) -> Tensor:
    """Sum of the weighted cross-entropies, float32, 0-d.

    Args:
        logits: (B, P, vocabulary).
        labels: int64 (B, P), -100 where nothing is predicted.
        weights: float32 (B, P), or None when all weigh 1.
        num_targets: labels that are not -100, as the host knows them; without any, the loss is 0 with a graph.
    """
    if num_targets == 0:
        return logits.float().sum() * 0.0
    flat, flat_labels = logits.float().flatten(0, 1), labels.flatten()
    if weights is None:
        return F.cross_entropy(flat, flat_labels, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(flat, flat_labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * weights.flatten()).sum()


def target_logits(model: nn.Module, batch: Batch, *, label_logits_only: bool) -> tuple[Tensor, Tensor]:
    """Logits (B, P, vocabulary) and labels (B, P) at the P positions that have a label in some row, or at all T."""
    inputs: dict[str, Any] = batch.model_inputs()
    labels = batch.labels
    if label_logits_only:
        kept = label_positions(batch)
        inputs["logits_to_keep"] = kept
        labels = labels[:, kept]
    return model(**inputs).logits, labels


def label_positions(batch: Batch) -> Tensor:
    """int64 (P,), the positions that have a label in some row; the first one if there is no label at all."""
    if len(batch.labels) == 1:
        kept = batch.target_positions  # known without asking the device
    else:
        kept = (batch.labels != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
    return kept if len(kept) else torch.zeros(1, dtype=torch.int64, device=batch.labels.device)


def takes_logits_to_keep(model: nn.Module) -> bool:
    """Whether the forward of a model (bare, or inside an adapter) can make logits at chosen positions only."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
