"""The loss: summed over targets, divided by what the plan knows the whole step to hold.

For a step with N target tokens over all micro-batches and ranks, every micro-batch contributes

    loss = world_size / N * sum over its targets of -w log p(target)

and gradients add up over micro-batches and are *averaged* over ranks: the gradient is that of the mean over all N
targets, however samples were grouped. N comes from the plan, so nobody has to ask anybody. w is 1, or the target's loss
scale, by which N does not change (as in ms-swift). With ``--loss-reduction sample`` N is the number of samples, and w
divides each sample's losses by its targets.

Target losses are made here or, where a model's head allows it, in ``head_loss``; ``StepMean`` is the one place that
divides.

Losses where a model's head would make logits: at targets only, some at a time, inside the model's own forward.

Logits are the largest tensor of a step (T x vocabulary, in float32 for the loss). Here the head is asked for those of a
few hundred targets, their cross-entropies are kept, and the logits made again in the backward pass: memory follows the
target tokens times the hidden size. Because it happens inside the forward, whatever wraps the model (DDP, FSDP, peft)
sees a head like any other.

    hidden (B, T, D) -> targets (N, D) -> chunks of about 2**26 logits -> losses (N,)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packtool.batch.batch import Batch
from packtool.constants import CHUNK_LOGITS, IGNORE_INDEX

# What some models do to logits behind the head; losses must not go through that.
_BEHIND_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap")


@dataclass(frozen=True, eq=False)
class TargetLosses:
    """Losses of the N targets of a micro-batch, in the order of its tokens.

    Args:
        losses: float32 (N,), cross-entropies, with a graph.
        correct: bool (N,), whether the most likely token is the label.
        positions: int64 (N,), where in the flattened (B, T) micro-batch the targets are predicted.
        nothing: float32 scalar, 0, with a graph through all of the model: for a micro-batch without targets.
    """

    losses: Tensor
    correct: Tensor
    positions: Tensor
    nothing: Tensor

    def sum(self, weights: Tensor | None) -> Tensor:
        """Their weighted sum, a scalar with a graph; ``weights`` float32 (B, T)."""
        losses = self.losses if weights is None else self.losses * weights.flatten()[self.positions]
        return losses.sum() + self.nothing


class HeadLoss:
    """Stands in for a model's head while ``losses`` runs; at all other times the head is what it was.

    Args:
        model: bare, or inside an adapter; not yet wrapped for several processes.
        chunk_logits: logits that are made at a time; by default ``CHUNK_LOGITS``.
    """

    def __init__(self, model: nn.Module, chunk_logits: int | None = None) -> None:
        head: Any = head_of(model)
        assert head is not None, "see applies_to"
        self._forward_of_head: Callable[[Tensor], Tensor] = head.forward
        self._chunk_logits = chunk_logits or CHUNK_LOGITS
        self._targets: tuple[Tensor, Tensor] | None = None
        self._found: Tensor | None = None
        head.forward = self._forward

    @staticmethod
    def applies_to(model: nn.Module) -> bool:
        """Whether nothing stands between a model's head and its logits, as far as its configuration tells."""
        config: Any = getattr(model, "config", None)
        texts = [config, getattr(config, "text_config", None)]
        treated = any(getattr(text, name, None) not in (None, 1, 1.0) for text in texts for name in _BEHIND_THE_HEAD)
        return head_of(model) is not None and not treated

    def losses(self, model: nn.Module, batch: Batch) -> TargetLosses:
        """Run a model, perhaps wrapped by now, on a micro-batch.

        Raises:
            RuntimeError: if the model does something to what its head returns.
        """
        positions = batch.target_positions
        self._targets, self._found = (positions, batch.labels.flatten()[positions]), None
        try:
            returned = model(**batch.model_inputs()).logits
        finally:
            self._targets = None
        correct, self._found = self._found, None
        if correct is None or returned.shape[::2] != (1, 1):
            raise RuntimeError(f"the head of {type(model).__name__} is not what makes its logits")
        # As they were returned: FSDP waits for gradients at what a module returns.
        losses = returned.flatten()
        if len(positions):
            return TargetLosses(losses, correct, positions, losses.new_zeros(()))
        return TargetLosses(losses[:0], correct, positions, losses.sum())

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._targets is None:
            return self._forward_of_head(hidden)
        positions, labels = self._targets
        rows = hidden.flatten(0, 1)
        if len(positions):
            losses, correct = self._chunked(rows.index_select(0, positions), labels)
        else:
            # Every parameter takes part in every backward pass, or ranks would wait for each other.
            losses = self._forward_of_head(rows[:1]).float().sum(-1) * 0.0
            correct = labels.new_zeros(0, dtype=torch.bool)
        self._found = correct
        return losses[None, :, None].clone()

    def _chunked(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropies of rows (N, D) in nats, float32 (N,), and whether the most likely token is the label."""
        head: Any = getattr(self._forward_of_head, "__self__", None)
        vocabulary = int(getattr(head, "out_features", 0)) or int(head.weight.shape[0])
        size = max(self._chunk_logits // vocabulary, 1)
        correct: dict[int, Tensor] = {}

        def losses_of(chunk: Tensor, wanted: Tensor, number: int) -> Tensor:
            logits = self._forward_of_head(chunk).float()
            if number not in correct:  # not again when the backward pass makes the logits again
                correct[number] = logits.detach().argmax(-1) == wanted
            return F.cross_entropy(logits, wanted, reduction="none")

        parts: list[tuple[Tensor, ...]] = [torch.split(tensor, size) for tensor in (hidden, labels)]
        chunks = list(zip(*parts, range(len(parts[0])), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            losses = [losses_of(*chunk) for chunk in chunks]
        else:
            losses = [checkpoint(losses_of, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(losses), torch.cat([correct[number] for number in range(len(chunks))])


@contextmanager
def losses_of_head(model: nn.Module) -> Iterator[HeadLoss | None]:
    """The Trainer's, if the model is being trained; else one that is gone afterwards; None where there can be none."""
    head: Any = head_of(model)
    theirs = getattr(getattr(head, "forward", None), "__self__", None)
    if isinstance(theirs, HeadLoss) or not HeadLoss.applies_to(model):
        yield theirs if isinstance(theirs, HeadLoss) else None
        return
    before = vars(head).get("forward")
    try:
        yield HeadLoss(model)
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def head_of(model: nn.Module) -> nn.Module | None:
    """The module that makes logits, None if a model does not say which."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return head if isinstance(head, nn.Module) else None


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
