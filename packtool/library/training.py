"""Functions for custom training loops: preparing a model for packed samples, and the loss."""

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
        labels: int64 (B, T), the token to predict at each position; -100 for none.
        weights: float32 (B, T), of each label; None if all are 1.
        positions: int64 (P,), positions with a label in at least one row; only these need logits.
        num_targets: number of labels in this micro-batch.
        num_items: divisor of the step's loss: number of target tokens over all ranks and micro-batches, or of samples
            with ``loss_reduction="sample"``.
        world_size: number of ranks, over which the trainer averages gradients.
        step: 0-based number of the optimizer step.
        ends_step: whether this is the rank's last micro-batch of the step, after which the optimizer runs.
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
    """Return a micro-batch's contribution to the mean loss over all target tokens of its step; differentiable.

        packtool.loss(model(**batch), batch).backward()

    Gradients of the micro-batches of a step add up, and DDP and FSDP *average* them over ranks. The result is the
    gradient of the mean over all targets of all ranks, independent of the grouping of samples. This needs no
    communication, because the plan contains the number of targets of the step. Do not divide the loss again by the
    number of micro-batches.

    Args:
        outputs: the model's outputs, or its logits: (1, T, vocabulary), or (1, P, vocabulary) if the model computes
            logits only at the P positions ``logits_to_keep``.
        batch: the arguments of the model.

    Returns:
        a 0-d tensor: the micro-batch's sum of losses x number of ranks / number of targets of the step. Added up over
        a step's micro-batches and averaged over ranks, it is the step's loss.
    """
    targets: Targets = batch["targets"]
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return _contribution(targets, logits, targets.world_size)


def prepare_model(model: P, *, packing: bool = True, attn_impl: AttnImpl = "auto") -> P:
    """Make a loaded model keep the samples of a pack apart and compute the loss of its micro-batches.

        model = packtool.prepare_model(transformers.AutoModelForCausalLM.from_pretrained("model"))

    Its text uses packed attention, its recurrent layers restart at every sample, and its media towers run once per
    micro-batch. Trainers that pass ``num_items_in_batch`` to the model, as transformers' does, get the micro-batch's
    contribution to the step's mean in ``outputs.loss``; other loops call ``packtool.loss``. Inputs that do not come
    from ``Batches`` raise an error, because they do not say where samples end.

    Args:
        model: of transformers, before it is wrapped by peft, DDP, FSDP or ``torch.compile``. It may be moved later.
        packing: False for batches with padding, for which the model keeps its own attention.
        attn_impl: kernel, as ``--attn-impl``.

    Returns:
        the same model.

    Raises:
        ConfigError: for a kernel that is not available, or a model that is already wrapped.
        UnsupportedModelError: for a model whose packed samples cannot be kept apart.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"prepare_model needs an unwrapped model of transformers, but this is a {type(model).__name__}",
            "Call prepare_model on the loaded model, and apply peft, DDP, FSDP or torch.compile afterwards.",
        )
    if packing:
        refuse_unsupported(model.config)
    route_attention(model, packing=packing, attn_impl=attn_impl)
    untyped_model = cast(Any, model)
    # Some classes set it to False, and the Trainer would not pass num_items_in_batch.
    untyped_model.accepts_loss_kwargs = True
    loss_function = untyped_model.loss_function
    was_prepared_before = isinstance(loss_function, partial) and loss_function.func is _model_loss
    if not was_prepared_before:
        untyped_model.loss_function = partial(_model_loss, loss_function)
    return model


def _model_loss(
    original: Callable[..., Tensor],
    logits: Tensor,
    labels: Tensor,
    *args: Any,
    targets: Targets | None = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Compute ``outputs.loss`` of a prepared model; None without ``num_items_in_batch``, for use of ``packtool.loss``.

    By transformers' convention, a caller that passes ``num_items_in_batch`` multiplies the loss by the number of ranks.
    Inputs that do not come from ``Batches`` get the model's own loss, ``original``.
    """
    if targets is None:
        return original(logits, labels, *args, num_items_in_batch=num_items_in_batch, **kwargs)
    return None if num_items_in_batch is None else _contribution(targets, logits, world_size=1)


def _contribution(targets: Targets, logits: Tensor, world_size: int) -> Tensor:
    """Return a micro-batch's part of the mean loss of its step, times ``world_size``, by which trainers divide; 0-d."""
    total = _loss_sum(targets, logits)
    return StepMean(targets.num_items, world_size).contribution(total)


def _loss_sum(targets: Targets, logits: Tensor) -> Tensor:
    """Return the weighted sum of the cross-entropy losses of a micro-batch's target tokens, 0-d.

    Args:
        targets: labels (B, T), shifted so that each position has the id of the next token, or -100 for no target; and
            weights (B, T), or None if all weigh 1.
        logits: (B, T, vocabulary), or only at the P ``targets.positions``, (B, P, vocabulary).
    """
    labels, weights = targets.labels, targets.weights
    has_all_positions = logits.shape[:2] == labels.shape
    if not has_all_positions:  # then they must be only at the targets
        labels = labels[:, targets.positions]
        if weights is not None:
            weights = weights[:, targets.positions]
    if logits.shape[:2] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} do not belong to labels {tuple(targets.labels.shape)}")

    flat_logits = logits.float().flatten(0, 1)
    flat_labels = labels.flatten()
    if targets.num_targets == 0:
        return flat_logits.sum() * 0.0  # 0, but differentiable: all ranks need a backward pass
    if weights is None:
        return F.cross_entropy(flat_logits, flat_labels, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(flat_logits, flat_labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (losses * weights.flatten()).sum()
