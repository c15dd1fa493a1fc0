"""The loss of a training step, independent of how its samples are grouped into micro-batches.

For a step with N target tokens over all micro-batches and ranks, every micro-batch contributes

    loss = world_size / N * sum over its targets of -w log p(target)

Gradients add up over micro-batches and are *averaged* over ranks, so the gradient is that of the mean over all N
targets. The plan knows N, so no rank asks another. w is 1, or the target's loss scale, which does not change N (as in
ms-swift). With ``--loss-reduction sample``, N is the number of samples, and w divides each sample's losses by its
number of targets.

Logits are the largest tensor of a step (T x vocabulary, float32 for the loss). Where a model allows it, ``HeadLoss``
therefore computes the losses in place of the model's head: a few hundred targets at a time, with the logits computed
again in the backward pass, so that memory grows with target tokens times hidden size. Because this happens inside the
model's own forward, wrappers (DDP, FSDP, peft) see a head like any other.

    hidden (B, T, D) -> targets (N, D) -> chunks of about 2**26 logits -> losses (N,)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packtool.batch.batch import Batch
from packtool.constants import CHUNK_LOGITS, IGNORE_INDEX
from packtool.train.model.towers import base_model

# Settings of models that change logits after the head; losses computed in the head would miss the change.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap")

_ROWS_AT_ONCE = 1024
"""Positions whose logits become float32 together where no gradients are needed."""


@dataclass(frozen=True, eq=False)
class TargetLosses:
    """Losses of the N targets of a micro-batch, in the order of its tokens.

    Args:
        losses: float32 (N,), cross-entropies in nats, with a graph.
        correct: bool (N,), whether the most likely token is the label.
        positions: int64 (N,), where in the flattened (B, T) micro-batch the targets are predicted.
        weights: float32 (N,), or None when all weigh 1.
        zero: float32 scalar, 0, with a graph through the whole model: for a micro-batch without targets.
    """

    losses: Tensor
    correct: Tensor
    positions: Tensor
    weights: Tensor | None
    zero: Tensor

    def weighted_sum(self) -> Tensor:
        """Return the weighted sum of the losses, a scalar with a graph."""
        losses = self.losses if self.weights is None else self.losses * self.weights
        return losses.sum() + self.zero


class LossFunction:
    """Computes the target losses of micro-batches: in the model's head where possible, else from its logits.

    Args:
        model: bare, or inside an adapter; not yet wrapped for several processes.
    """

    def __init__(self, model: nn.Module) -> None:
        installed = getattr(getattr(head_of(model), "forward", None), "__self__", None)
        self.head_loss = installed if isinstance(installed, HeadLoss) else None
        self._is_new = self.head_loss is None and HeadLoss.applies_to(model)
        if self._is_new:
            self.head_loss = HeadLoss(model)
        self._label_logits_only = takes_logits_to_keep(model)

    def __call__(self, model: nn.Module, batch: Batch) -> TargetLosses:
        """Run the model, perhaps wrapped by now, on a micro-batch."""
        if self.head_loss is not None:
            return self.head_loss.losses(model, batch)
        return target_losses(model, batch, label_logits_only=self._label_logits_only)

    @classmethod
    @contextmanager
    def temporary(cls, model: nn.Module) -> Iterator[LossFunction]:
        """Yield the loss function of a model, and leave the model's head as it was."""
        loss = cls(model)
        try:
            yield loss
        finally:
            if loss.head_loss is not None and loss._is_new:
                loss.head_loss.remove()


class HeadLoss:
    """Replaces the forward of a model's head while ``losses`` runs; otherwise the head works as usual.

    Args:
        model: bare, or inside an adapter; not yet wrapped for several processes.
        chunk_logits: logits computed at a time; by default ``CHUNK_LOGITS``.
    """

    def __init__(self, model: nn.Module, chunk_logits: int | None = None) -> None:
        head: Any = head_of(model)
        assert head is not None, "applies_to is False"
        self._head = head
        self._previous_forward = vars(head).get("forward")
        self._head_forward = head.forward
        self._chunk_logits = chunk_logits or CHUNK_LOGITS
        self._targets: tuple[Tensor, Tensor] | None = None
        self._correct: Tensor | None = None
        head.forward = self._forward

    def remove(self) -> None:
        """Give the head back its own forward."""
        if self._previous_forward is None:
            del self._head.forward
        else:
            self._head.forward = self._previous_forward

    @staticmethod
    def applies_to(model: nn.Module) -> bool:
        """Return whether a model's logits are what its head returns, as far as its configuration tells."""
        config: Any = getattr(model, "config", None)
        texts = [config, getattr(config, "text_config", None)]
        changes = any(getattr(text, name, None) not in (None, 1, 1.0) for text in texts for name in _LOGIT_CHANGES)
        return head_of(model) is not None and not changes

    def losses(self, model: nn.Module, batch: Batch) -> TargetLosses:
        """Run the model, perhaps wrapped by now, on a micro-batch.

        Raises:
            RuntimeError: if the model changes what its head returns.
        """
        positions, weights = batch.target_positions, batch.loss_weights
        self._targets, self._correct = (positions, batch.labels.flatten()[positions]), None
        try:
            returned = model(**batch.model_inputs()).logits
        finally:
            self._targets = None
        correct, self._correct = self._correct, None
        if correct is None or returned.shape[::2] != (1, 1):
            raise RuntimeError(f"the head of {type(model).__name__} is not what makes its logits")
        # Keep the returned tensor in the graph: FSDP waits for gradients at what a module returns.
        losses = returned.flatten()
        weights = None if weights is None else weights.flatten()[positions]
        if len(positions):
            return TargetLosses(losses, correct, positions, weights, losses.new_zeros(()))
        return TargetLosses(losses[:0], correct, positions, weights, losses.sum())

    def _forward(self, hidden: Tensor) -> Tensor:
        """Return losses (1, N, 1) in place of logits while ``losses`` runs."""
        if self._targets is None:
            return self._head_forward(hidden)
        positions, labels = self._targets
        rows = hidden.flatten(0, 1)
        if len(positions):
            losses, self._correct = self._chunked(rows.index_select(0, positions), labels)
        else:
            # Every parameter must take part in every backward pass, or ranks would wait for each other.
            losses = self._head_forward(rows[:1]).float().sum(-1) * 0.0
            self._correct = labels.new_zeros(0, dtype=torch.bool)
        return losses[None, :, None].clone()

    def _chunked(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return cross-entropies of rows (N, D), float32 (N,), and whether each label is the most likely token."""
        head: Any = getattr(self._head_forward, "__self__", None)
        vocabulary = int(getattr(head, "out_features", 0)) or int(head.weight.shape[0])
        size = max(self._chunk_logits // vocabulary, 1)
        correct: dict[int, Tensor] = {}

        def chunk_losses(rows: Tensor, targets: Tensor, number: int) -> Tensor:
            logits = self._head_forward(rows).float()
            if number not in correct:  # skipped when the backward pass computes the logits again
                correct[number] = logits.detach().argmax(-1) == targets
            return F.cross_entropy(logits, targets, reduction="none")

        chunks = list(enumerate(zip(torch.split(hidden, size), torch.split(labels, size), strict=True)))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            losses = [chunk_losses(*chunk, number) for number, chunk in chunks]
        else:
            losses = [checkpoint(chunk_losses, *chunk, number, use_reentrant=False) for number, chunk in chunks]
        return torch.cat(losses), torch.cat([correct[number] for number, _ in chunks])


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the module that computes logits, None if the model does not name it."""
    inner = base_model(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return head if isinstance(head, nn.Module) else None


@dataclass(frozen=True)
class StepMean:
    """The mean over an optimizer step, computed from the sums of its micro-batches.

    Args:
        num_units: N, target tokens (or samples) of the step over all ranks; 0 counts as 1.
        world_size: ranks, over which gradients are averaged.
    """

    num_units: int
    world_size: int = 1

    @property
    def _factor(self) -> float:
        return self.world_size / max(self.num_units, 1)

    def contribution(self, loss_sum: Tensor) -> Tensor:
        """Return what a micro-batch differentiates, 0-d: its sum of losses, times world_size / N."""
        return loss_sum * self._factor

    def sum_over_ranks(self, contributions: Tensor) -> Tensor:
        """Return a rank's sum of losses times the number of ranks, 0-d: its mean over ranks is the step's sum."""
        return contributions / self._factor * self.world_size

    def remove_units(self, num_missing: int, parameters: Iterable[nn.Parameter]) -> int:
        """Rescale gradients of this mean to the mean without some units; return the number of units left."""
        num_left = self.num_units - num_missing
        if num_missing and num_left:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.num_units / num_left)
        return num_left


def sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return the weighted sum of a micro-batch's target losses, 0-d with a graph, computed as in training."""
    with LossFunction.temporary(model) as loss_function:
        return loss_function(model, batch).weighted_sum()


def target_losses(model: nn.Module, batch: Batch, *, label_logits_only: bool) -> TargetLosses:
    """Compute the losses of a micro-batch's targets from the model's own logits.

    Args:
        model: takes ``batch.model_inputs()``; may be wrapped.
        label_logits_only: compute logits only where a row has a label; the model must take ``logits_to_keep``.

    Returns:
        the losses; their sum is exactly 0 for a micro-batch without targets, but has a graph through the whole model.
    """
    inputs, labels = batch.model_inputs(), batch.labels
    if label_logits_only:
        kept = label_positions(batch)
        inputs["logits_to_keep"], labels = kept, labels[:, kept]
    logits, labels, positions = model(**inputs).logits.flatten(0, 1), labels.flatten(), batch.target_positions
    weights = None if batch.loss_weights is None else batch.loss_weights.flatten()[positions]
    if not len(positions):
        zero = logits.float().sum() * 0.0
        return TargetLosses(zero.new_zeros(0), labels.new_zeros(0, dtype=torch.bool), positions, weights, zero)
    size = len(logits) if torch.is_grad_enabled() else _ROWS_AT_ONCE
    pieces = list(zip(torch.split(logits, size), torch.split(labels, size), strict=True))
    losses = torch.cat(
        [
            F.cross_entropy(rows.float(), targets, ignore_index=IGNORE_INDEX, reduction="none")
            for rows, targets in pieces
        ]
    )
    correct = torch.cat([rows.detach().argmax(-1) == targets for rows, targets in pieces])
    if len(losses) != len(positions):
        is_target = labels != IGNORE_INDEX
        losses, correct = losses[is_target], correct[is_target]
    return TargetLosses(losses, correct, positions, weights, losses.new_zeros(()))


def label_positions(batch: Batch) -> Tensor:
    """Return int64 (P,), the positions with a label in some row; the first position if there is no label at all."""
    if len(batch.labels) == 1:
        positions = batch.target_positions  # known without waiting for the device
    else:
        positions = (batch.labels != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
    return positions if len(positions) else torch.zeros(1, dtype=torch.int64, device=batch.labels.device)


def takes_logits_to_keep(model: nn.Module) -> bool:
    """Return whether a model (bare, or inside an adapter) can compute logits at chosen positions only."""
    return "logits_to_keep" in inspect.signature(base_model(model).forward).parameters
