"""Losses where a model's head would make logits: at targets only, some at a time, inside the model's own forward.

Logits are the largest tensor of a step (T x vocabulary, in float32 for the loss). Here the head is asked for those of a
few hundred targets, their cross-entropies are kept, and the logits made again in the backward pass: memory follows the
target tokens times the hidden size. Because it happens inside the forward, whatever wraps the model (DDP, FSDP, peft)
sees a head like any other.

    hidden (B, T, D) -> targets (N, D) -> chunks of about 2**26 logits -> losses (N,)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packtool.batch.batch import Batch
from packtool.constants import IGNORE_INDEX

CHUNK_LOGITS = 2**26
"""Logits made at a time: 256 MiB in float32."""

# What some models do to logits behind the head; losses must not go through that.
_BEHIND_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap")


@dataclass(frozen=True, eq=False)
class TargetLosses:
    """Losses of the N targets of a micro-batch, in the order of its tokens.

    Args:
        losses: float32 (N,), cross-entropies, with a graph.
        hits: bool (N,), whether the most likely token is the label.
        positions: int64 (N,), where in the flattened (B, T) micro-batch the targets are predicted.
        nothing: float32 scalar, 0, with a graph through all of the model: for a micro-batch without targets.
    """

    losses: Tensor
    hits: Tensor
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
        self._labels: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None
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
        self._labels, self._found = batch.labels, None
        try:
            returned = model(**batch.model_inputs()).logits
        finally:
            self._labels = None
        seen, self._found = self._found, None
        if seen is None or returned.shape[::2] != (1, 1):
            raise RuntimeError(f"the head of {type(model).__name__} is not what makes its logits")
        # As they were returned: FSDP waits for gradients at what a module returns.
        positions, hits = seen
        losses = returned.flatten()
        if len(positions):
            return TargetLosses(losses, hits, positions, losses.new_zeros(()))
        return TargetLosses(losses[:0], hits, positions, losses.sum())

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._labels is None:
            return self._forward_of_head(hidden)
        labels = self._labels.flatten()
        positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        rows = hidden.flatten(0, 1)
        if len(positions):
            losses, hits = self._chunked(rows[positions], labels[positions])
        else:
            # Every parameter takes part in every backward pass, or ranks would wait for each other.
            losses = self._forward_of_head(rows[:1]).float().sum(-1) * 0.0
            hits = labels.new_zeros(0, dtype=torch.bool)
        self._found = positions, hits
        return losses[None, :, None].clone()

    def _chunked(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropies and hits of rows (N, D)."""
        head: Any = getattr(self._forward_of_head, "__self__", None)
        vocabulary = int(getattr(head, "out_features", 0)) or int(head.weight.shape[0])
        size = max(self._chunk_logits // vocabulary, 1)
        hits: dict[int, Tensor] = {}

        def losses_of(chunk: Tensor, wanted: Tensor, number: int) -> Tensor:
            logits = self._forward_of_head(chunk).float()
            if number not in hits:  # not again when the backward pass makes the logits again
                hits[number] = logits.detach().argmax(-1) == wanted
            return F.cross_entropy(logits, wanted, reduction="none")

        parts: list[tuple[Tensor, ...]] = [torch.split(tensor, size) for tensor in (hidden, labels)]
        chunks = list(zip(*parts, range(len(parts[0])), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            losses = [losses_of(*chunk) for chunk in chunks]
        else:
            losses = [checkpoint(losses_of, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat(losses), torch.cat([hits[number] for number in range(len(chunks))])


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
