"""The loss: summed over targets, divided by what the plan knows the whole step to hold.

For a step with N target tokens over all micro-batches and ranks, every micro-batch contributes

    loss = world_size / N * sum over its targets of -w log p(target)

and gradients add up over micro-batches and are *averaged* over ranks: the gradient is that of the mean over all N
targets, however samples were grouped. N comes from the plan, so nobody has to ask anybody. w is 1, or the target's loss
scale, by which N does not change (as in ms-swift).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packtool.batch.batch import Batch
from packtool.constants import IGNORE_INDEX


def sum_of_losses(model: nn.Module, batch: Batch, *, label_logits_only: bool) -> Tensor:
    """Sum of the cross-entropies of a micro-batch's targets; float32, with a graph.

    Args:
        model: anything whose forward takes ``batch.model_inputs()``; may be wrapped.
        label_logits_only: the model takes ``logits_to_keep`` (see ``takes_logits_to_keep``): logits are then made only
            where some row has a label, for they are the largest tensor of a step (T x vocabulary).

    Returns:
        a scalar; exactly 0 for a micro-batch without targets, but with a graph through all of the model.
    """
    kept = label_positions(batch) if label_logits_only else None
    logits, labels = target_logits(model, batch, label_logits_only=label_logits_only)
    if batch.num_target_tokens == 0:
        return logits.float().sum() * 0.0
    flat, flat_labels = logits.float().flatten(0, 1), labels.flatten()
    if batch.loss_weights is None:
        return F.cross_entropy(flat, flat_labels, ignore_index=IGNORE_INDEX, reduction="sum")
    weights = batch.loss_weights if kept is None else batch.loss_weights[:, kept]
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
    kept = (batch.labels != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
    return kept if len(kept) else torch.zeros(1, dtype=torch.int64, device=batch.labels.device)


def takes_logits_to_keep(model: nn.Module) -> bool:
    """Whether the forward of a model (bare, or inside an adapter) can make logits at chosen positions only."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
