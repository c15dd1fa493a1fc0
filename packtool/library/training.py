"""Functions for custom training loops: a model that keeps packed samples apart, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.support import refuse_unsupported
from packtool.batch.tower_inputs import Movable
from packtool.config.model import AttnImpl
from packtool.constants import IGNORE_INDEX
from packtool.errors import ConfigError
from packtool.train.model.load import route_attention
from packtool.train.model.loss import StepMean

P = TypeVar("P", bound=PreTrainedModel)


@dataclass(frozen=True, eq=False)
class Targets(Movable):
    """Inputs of a micro-batch's loss besides the logits: ``batch["targets"]``.

    Args:
        labels: int64 (B, T), what each position is to predict, -100 where nothing.
        weights: float32 (B, T), of each label, or None when all weigh 1.
        positions: int64 (P,), where some row has a label; logits are needed there only.
        num_targets: labels in this micro-batch.
        num_items: what the step's loss is divided by, over all ranks and micro-batches: target tokens, or samples with
            ``loss_reduction="sample"``.
        world_size: ranks, over which the trainer averages gradients.
        step: 0-based number of the optimizer step.
        ends_step: whether this is the rank's last micro-batch of the step: the optimizer's turn.
    """

    labels: Tensor
    weights: Tensor | None
    positions: Tensor
    num_targets: int
    num_items: int
    world_size: int
    step: int
    ends_step: bool

    def map(self, function: Callable[[Tensor], Tensor]) -> Targets:
        """See ``Movable``."""
        weights = None if self.weights is None else function(self.weights)
        return replace(self, labels=function(self.labels), weights=weights, positions=function(self.positions))


def loss(outputs: Any, batch: dict[str, Any]) -> Tensor:
    """Contribution of a micro-batch to the mean loss over all target tokens of its step; differentiable.

        packtool.loss(model(**batch), batch).backward()

    Gradients of the micro-batches of a step add up, and are *averaged* over ranks, as DDP and FSDP do: the sum is the
    gradient of the mean over all targets of all ranks, however samples were grouped. Nothing is asked of other ranks,
    because the plan knows how many targets the step has. Do not divide it again by micro-batches.

    Args:
        outputs: of the model, or its logits: (1, T, vocabulary), or (1, P, vocabulary) where the model makes logits
            only at ``logits_to_keep``.
        batch: that the model was called with.

    Returns:
        a 0-d tensor; added up over a step's micro-batches, and averaged over ranks, it is the step's loss.
    """
    targets: Targets = batch["targets"]
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return _mean(targets, logits, targets.world_size)


def prepare_model(model: P, *, packing: bool = True, attn_impl: AttnImpl = "auto") -> P:
    """Make a loaded model keep the samples of a pack apart, and know the loss of its micro-batches.

        model = packtool.prepare_model(transformers.AutoModelForCausalLM.from_pretrained("model"))

    Its text goes through packed attention, its recurrent layers start anew with every sample, and its towers run once a
    micro-batch. Trainers that hand ``num_items_in_batch`` to the model, as transformers' does, find the micro-batch's
    part of the step's mean in ``outputs.loss``; other loops call ``packtool.loss``. Inputs that do not come from
    ``Batches`` are refused, for nothing in them would say where a sample ends.

    Args:
        model: of transformers, not yet wrapped: before peft, DDP, FSDP and ``torch.compile``. It may be moved later.
        packing: False for batches with padding, whose attention stays the model's own.
        attn_impl: kernel, as ``--attn-impl``.

    Returns:
        the same model.

    Raises:
        ConfigError: for a kernel that is not there, or a model that is wrapped already.
        UnsupportedModelError: for a model whose packed samples could not be kept apart.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"prepare_model takes a model of transformers itself, and this is a {type(model).__name__}",
            "Call it on the loaded model, and wrap what it returns: peft, DDP, FSDP and torch.compile come later.",
        )
    if packing:
        refuse_unsupported(model.config)
    route_attention(model, packing=packing, attn_impl=attn_impl)
    untyped = cast(Any, model)
    # Some classes set it to False, and the Trainer would not pass num_items_in_batch.
    untyped.accepts_loss_kwargs = True
    if getattr(untyped.loss_function, "func", None) is not _model_loss:
        untyped.loss_function = partial(_model_loss, untyped.loss_function)
    return model


def _model_loss(
    own: Callable[..., Tensor],
    logits: Tensor,
    labels: Tensor,
    *args: Any,
    targets: Targets | None = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the loss inside a prepared model: ``own`` for other inputs, None if the loop calls ``packtool.loss``.

    By transformers' convention, a caller that passes ``num_items_in_batch`` also multiplies by the number of ranks.
    """
    if targets is None:
        return own(logits, labels, *args, num_items_in_batch=num_items_in_batch, **kwargs)
    return None if num_items_in_batch is None else _mean(targets, logits, 1)


def _mean(targets: Targets, logits: Tensor, world_size: int) -> Tensor:
    """Return the part of the mean over its step, times ``world_size``, from logits at all or at some positions."""
    labels, weights = targets.labels, targets.weights
    if logits.shape[:2] != labels.shape:
        labels, weights = labels[:, targets.positions], None if weights is None else weights[:, targets.positions]
    if logits.shape[:2] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not belong to labels {tuple(targets.labels.shape)}")
    rows = logits.float().flatten(0, 1)
    if targets.num_targets == 0:
        total = rows.sum() * 0.0  # 0 with a graph
    else:
        reduction = "sum" if weights is None else "none"
        losses = F.cross_entropy(rows, labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
        total = losses if weights is None else (losses * weights.flatten()).sum()
    return StepMean(targets.num_items, world_size).contribution(total)
