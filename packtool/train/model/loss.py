"""Losses of a training step, independent of how its samples are grouped into micro-batches.

For a step with N target tokens over all micro-batches and ranks, every micro-batch contributes

    loss = world_size / N * sum over its targets of -w log p(target)

Gradients add up over micro-batches and are *averaged* over ranks, so the gradient is that of the mean over all N
targets. The plan contains N, so ranks need no communication. w is 1, or the target's loss scale, which does not change
N (as in ms-swift); with ``--enable-dft-loss``, times p without its gradient. With ``--loss-reduction sample``, N is the
number of samples, and w divides each sample's losses by its number of targets.

Logits are the largest tensor of a step (T x vocabulary, float32 for the loss). Where a model allows it, ``HeadLoss``
therefore computes the losses in the model's head, a few hundred targets at a time, and recomputes the logits in the
backward pass, so that memory grows with target tokens times hidden size. Because this happens inside the model's own
forward, wrappers (DDP, FSDP, peft) see an ordinary head.

    hidden (B, T, D) -> targets (N, D) -> chunks of about 2**26 logits -> losses (N,)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packtool.batch.batch import Batch
from packtool.constants import CHUNK_LOGITS, IGNORE_INDEX
from packtool.errors import ConfigError

# Settings with which models change the logits after the head; losses in the head would miss the change.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap")
_RECORDED = "router_logits"  # transformers' name of recorded router outputs

_ROWS_AT_ONCE = 1024
"""Positions whose logits are converted to float32 at a time, if no gradients are needed."""


def base_model(model: Any) -> Any:
    """Return the transformers model inside an adapter, or the model itself if it has none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True, eq=False)
class TargetLosses:
    """Losses of the N targets of a micro-batch, in the order of its tokens.

    Args:
        losses: float32 (N,), cross-entropies in nats, differentiable.
        correct: bool (N,), whether the most likely token is the label.
        positions: int64 (N,), of the targets in the flattened (B, T) micro-batch.
        weights: float32 (N,), or None if all are 1.
        entropies: float32 (N,), of the most likely tokens in nats; None unless requested.
        divergences: float32 (N,), from a reference model's predictions in nats, differentiable; None unless requested.
        penalty: float32 scalar, part of the weighted sum beside the losses; None without one.
        zero: float32 scalar 0; without targets it depends on the whole model, so that all ranks run a backward pass.
    """

    losses: Tensor
    correct: Tensor
    positions: Tensor
    weights: Tensor | None
    zero: Tensor
    entropies: Tensor | None = None
    divergences: Tensor | None = None
    penalty: Tensor | None = None

    @classmethod
    def without_targets(cls, batch: Batch, zero: Tensor) -> TargetLosses:
        """Return the losses, (0,), of a micro-batch without targets."""
        empty = zero.new_zeros(0)
        return cls(empty, empty.bool(), batch.target_positions, _target_weights(batch), zero, empty, empty)

    def with_divergences(self, factor: float) -> TargetLosses:
        """Return these losses weighted by probability, and a weighted sum that includes factor * divergences (ASFT)."""
        assert self.divergences is not None, "not requested"
        weighted = self.divergences if self.weights is None else self.divergences * self.weights
        return replace(self.weighted_by_probability(), penalty=factor * weighted.sum())

    def weighted_by_probability(self) -> TargetLosses:
        """Return these losses with each weight times the target's probability, a constant (DFT, arXiv 2508.05629)."""
        return self._weighted_by(torch.exp(-self.losses.detach()))

    def weighted_by_entropy(self, divisor: float, alpha: float) -> TargetLosses:
        """Return these losses with each weight times (entropy / divisor) ** alpha (entropy-adaptive fine-tuning)."""
        assert self.entropies is not None, "not requested"
        return self._weighted_by((self.entropies / divisor) ** alpha)

    def _weighted_by(self, factors: Tensor) -> TargetLosses:
        return replace(self, weights=factors if self.weights is None else self.weights * factors)

    def weighted_sum(self) -> Tensor:
        """Return the weighted sum of the losses, a differentiable scalar."""
        losses = self.losses if self.weights is None else self.losses * self.weights
        return losses.sum() + (self.zero if self.penalty is None else self.zero + self.penalty)


def _target_weights(batch: Batch) -> Tensor | None:
    """Return the weights of a micro-batch's targets, float32 (N,); None if all are 1."""
    return None if batch.loss_weights is None else batch.loss_weights.flatten()[batch.target_positions]


class LossFunction:
    """Function that computes the target losses of micro-batches: in the model's head if possible, else from its logits.

    The model is bare, or inside an adapter; not yet wrapped for several processes.
    """

    def __init__(self, model: nn.Module) -> None:
        installed = getattr(getattr(head_of(model), "forward", None), "__self__", None)
        self.head_loss = installed if isinstance(installed, HeadLoss) else None
        self._is_new = self.head_loss is None and HeadLoss.applies_to(model)
        if self._is_new:
            self.head_loss = HeadLoss(model)
        self._label_logits_only = takes_logits_to_keep(model)

    def __call__(
        self, model: nn.Module, batch: Batch, entropy_top_k: int = 0, reference: ReferenceModel | None = None
    ) -> TargetLosses:
        """Run the model, which may be wrapped, on a micro-batch, and return the losses of its targets.

        With ``entropy_top_k``, also return the entropies of that many most likely tokens; with a reference model, which
        ``HeadLoss`` alone supports, the divergences from its predictions.
        """
        if self.head_loss is not None:
            return self.head_loss.losses(model, batch, entropy_top_k, reference)
        return target_losses(model, batch, label_logits_only=self._label_logits_only, entropy_top_k=entropy_top_k)

    @classmethod
    @contextmanager
    def temporary(cls, model: nn.Module) -> Iterator[LossFunction]:
        """Yield the loss function of a model; restore the model's head afterwards."""
        loss = cls(model)
        try:
            yield loss
        finally:
            if loss.head_loss is not None and loss._is_new:
                loss.head_loss.remove()


class HeadLoss:
    """Computation of losses in the forward of a model's head.

    It replaces that forward, but outside of ``losses`` the head returns logits as usual.

    Args:
        model: bare, or inside an adapter; not yet wrapped for several processes.
        chunk_logits: maximum number of logits computed at a time; by default ``CHUNK_LOGITS``.
    """

    def __init__(self, model: nn.Module, chunk_logits: int | None = None) -> None:
        head: Any = head_of(model)
        assert head is not None, "applies_to is False"
        self._head = head
        self._previous_forward = vars(head).get("forward")
        self._head_forward = head.forward
        self._chunk_logits = chunk_logits or CHUNK_LOGITS
        self._head_pass: _HeadPass | None = None  # inside ``losses``
        head.forward = self._losses_or_logits

    def remove(self) -> None:
        """Restore the head's own forward."""
        if self._previous_forward is None:
            del self._head.forward
        else:
            self._head.forward = self._previous_forward

    @staticmethod
    def applies_to(model: nn.Module) -> bool:
        """Return whether the model has a head, and by its configuration does not change what the head returns."""
        config: Any = getattr(model, "config", None)
        texts = [config, getattr(config, "text_config", None)]
        changes = any(getattr(text, name, None) not in (None, 1, 1.0) for text in texts for name in _LOGIT_CHANGES)
        return head_of(model) is not None and not changes

    def losses(
        self, model: nn.Module, batch: Batch, entropy_top_k: int = 0, reference: ReferenceModel | None = None
    ) -> TargetLosses:
        """Run the model, which may be wrapped, on a micro-batch, and return the losses of its N targets.

        Arguments are those of ``LossFunction``. Raise if the model does not return the output of its head as logits.
        """
        head_pass = _HeadPass(self._head_forward, batch, self._chunk_size, entropy_top_k, reference)
        # The head returns losses in place of logits, (1, N, columns): FSDP waits for the gradient of what it returns.
        head_output = self._run_with(head_pass, model, batch)
        if not len(batch.target_positions):
            return TargetLosses.without_targets(batch, zero=head_output.sum())

        losses = head_output[0, :, 0]
        divergences = None if reference is None else head_output[0, :, 1]
        assert head_pass.correct is not None, "the pass has run"
        return TargetLosses(
            losses=losses,
            correct=head_pass.correct,
            positions=batch.target_positions,
            weights=_target_weights(batch),
            zero=losses.new_zeros(()),
            entropies=head_pass.entropies,
            divergences=divergences,
        )

    def _run_with(self, head_pass: _HeadPass, model: nn.Module, batch: Batch) -> Tensor:
        """Run a model whose head is replaced by ``head_pass``; return the output of that."""
        self._head_pass = head_pass  # which ``_losses_or_logits`` calls
        try:
            output: Tensor = model(**batch.model_inputs()).logits
        finally:
            self._head_pass = None
        if head_pass.correct is None or output.shape[0] != 1 or output.shape[2] != head_pass.num_columns:
            raise RuntimeError(f"{type(model).__name__} does not return the output of its head as logits")
        return output

    @property
    def _chunk_size(self) -> int:
        """Number of targets whose logits are computed at a time."""
        vocabulary_size = int(getattr(self._head, "out_features", 0)) or int(self._head.weight.shape[0])
        return max(self._chunk_logits // vocabulary_size, 1)

    def _losses_or_logits(self, hidden: Tensor) -> Tensor:
        """Replace the head's forward: inside ``losses``, return losses, otherwise logits as the head does."""
        return self._head_forward(hidden) if self._head_pass is None else self._head_pass.losses(hidden)


class _HeadPass:
    """Computation of the losses of a micro-batch's N targets in a forward pass of the head.

    Attributes:
        num_columns: results of a target: its loss and, with a reference model, the divergence from its prediction.
        correct: bool (N,), whether the most likely token is the label; None before the pass.
        entropies: float32 (N,), of the ``entropy_top_k`` most likely tokens; None before the pass, and with 0.
    """

    def __init__(
        self,
        head_forward: Callable[[Tensor], Tensor],
        batch: Batch,
        chunk_size: int,
        entropy_top_k: int,
        reference: ReferenceModel | None,
    ) -> None:
        """Prepare the pass; runs the reference model if there is one. ``chunk_size`` is a number of targets."""
        self.num_columns = 1 if reference is None else 2
        self.correct: Tensor | None = None
        self.entropies: Tensor | None = None

        self._head_forward = head_forward
        self._chunk_size = chunk_size
        self._entropy_top_k = entropy_top_k
        self._positions = batch.target_positions  # (N,) in the flattened micro-batch
        self._labels = batch.labels.flatten()[self._positions]  # (N,)
        self._reference = reference
        self._reference_hidden: Tensor | None = None  # (N, D)
        if reference is not None:
            self._reference_hidden = reference.target_hidden(batch)
        self._correct_by_chunk: dict[int, Tensor] = {}
        self._entropies_by_chunk: dict[int, Tensor] = {}

    def losses(self, hidden: Tensor) -> Tensor:
        """Compute the losses of all targets, a chunk of targets at a time, from the input of the head.

        ``hidden`` are the hidden states (B, T, D). Sets ``correct``, and ``entropies`` if requested. Returns (1, N,
        columns), with as many dimensions as logits have. Without targets, the result has one target of zeros.
        """
        hidden = hidden.flatten(0, 1)  # (B * T, D)
        if not len(self._positions):
            self.correct = self._labels.new_zeros(0, dtype=torch.bool)
            return self._zero_loss(hidden)

        chunks = self._chunks(hidden.index_select(0, self._positions))
        compute: Any = self._chunk_losses
        if len(chunks) > 1 and torch.is_grad_enabled():
            # The backward pass recomputes the logits of each chunk. For a single chunk this would save no memory.
            compute = partial(checkpoint, self._chunk_losses, use_reentrant=False)
        losses_by_chunk = [compute(number, *chunk) for number, chunk in enumerate(chunks)]

        # ``_chunk_losses`` has recorded these.
        self.correct = torch.cat(list(self._correct_by_chunk.values()))
        if self._entropy_top_k:
            self.entropies = torch.cat(list(self._entropies_by_chunk.values()))
        losses = torch.cat(losses_by_chunk)  # (N, columns)
        return losses.unsqueeze(0).clone()  # for FSDP, a new tensor instead of a view

    def _zero_loss(self, hidden: Tensor) -> Tensor:
        """Return zeros, (1, 1, columns), for a micro-batch without targets."""
        # With a gradient for every parameter, because other ranks would wait for it.
        zero = self._head_forward(hidden[:1]).float().sum(-1) * 0.0
        return zero[None, :, None].repeat(1, 1, self.num_columns)

    def _chunks(self, hidden: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return chunks of the targets: hidden states, labels, and hidden states of the reference model or None."""
        hidden_chunks = torch.split(hidden, self._chunk_size)
        reference_chunks: Any = [None] * len(hidden_chunks)
        if self._reference_hidden is not None:
            reference_chunks = torch.split(self._reference_hidden, self._chunk_size)
        return list(zip(hidden_chunks, torch.split(self._labels, self._chunk_size), reference_chunks, strict=True))

    def _chunk_losses(self, number: int, hidden: Tensor, labels: Tensor, reference_hidden: Tensor | None) -> Tensor:
        """Return (C, columns) for the C targets of chunk ``number``, and record which predictions are correct."""
        logits = self._head_forward(hidden).float()
        if number not in self._correct_by_chunk:  # not again when the backward pass recomputes the logits
            self._correct_by_chunk[number] = logits.detach().argmax(-1) == labels
            if self._entropy_top_k:
                self._entropies_by_chunk[number] = top_k_entropy(logits.detach(), self._entropy_top_k)
        losses = [F.cross_entropy(logits, labels, reduction="none")]
        if self._reference is not None and reference_hidden is not None:
            losses.append(divergence(self._reference.logits(reference_hidden), logits))
        return torch.stack(losses, dim=-1)


def divergence(expected_logits: Tensor, logits: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergences KL(expected || predicted) in nats, float32 (N,), of logits (N, V)."""
    expected = expected_logits.float().softmax(-1)
    return F.kl_div(logits.float().log_softmax(-1), expected, reduction="none").sum(-1)


class ReferenceModel:
    """Frozen copy of a bare model without ``HeadLoss``, whose predictions the trained model should stay close to."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = copy.deepcopy(model).to(device).eval().requires_grad_(False)
        head: Any = head_of(self._model)
        if not HeadLoss.applies_to(model):
            raise ConfigError(
                f"--asft-alpha: {type(model).__name__} changes its logits after the head, which is not supported",
                "Leave it out.",
            )
        self._head_forward = head.forward
        head.forward = lambda hidden: hidden

    @torch.no_grad()
    def target_hidden(self, batch: Batch) -> Tensor:
        """Return the hidden states (N, D) before the head at the targets of a micro-batch."""
        hidden: Tensor = self._model(**batch.model_inputs()).logits
        return hidden.flatten(0, 1).index_select(0, batch.target_positions)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (N, V) of hidden states (N, D)."""
        logits: Tensor = self._head_forward(hidden)
        return logits


def top_k_entropy(logits: Tensor, k: int) -> Tensor:
    """Return the entropies of the k most likely tokens alone, in nats, float32 (N,), of logits (N, V)."""
    log_probabilities = logits.topk(min(k, logits.shape[-1])).values.float().log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the module that computes logits; None if the model does not name it."""
    inner = base_model(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    return head if isinstance(head, nn.Module) else None


@dataclass(frozen=True)
class StepMean:
    """Conversion between sums of losses over micro-batches and the mean loss of their optimizer step.

    Args:
        num_units: N, number of target tokens (or samples) of the step over all ranks; 0 counts as 1.
        world_size: number of ranks, over which gradients are averaged.
    """

    num_units: int
    world_size: int = 1

    @property
    def _factor(self) -> float:
        return self.world_size / max(self.num_units, 1)

    def contribution(self, loss_sum: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean, to differentiate: its sum of losses times world_size / N, 0-d."""
        return loss_sum * self._factor

    def sum_over_ranks(self, contributions: Tensor) -> Tensor:
        """Return a rank's sum of losses times world_size, 0-d: averaged over ranks, it is the step's sum."""
        return contributions / self._factor * self.world_size

    def remove_units(self, num_missing: int, parameters: Iterable[nn.Parameter]) -> int:
        """Rescale gradients of this mean to those of the mean without ``num_missing`` units; return the remaining N."""
        num_left = self.num_units - num_missing
        if num_missing and num_left:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.num_units / num_left)
        return num_left


def sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return the weighted sum of a micro-batch's target losses, 0-d and differentiable, computed as in training."""
    with LossFunction.temporary(model) as loss_function:
        return loss_function(model, batch).weighted_sum()


def target_losses(model: nn.Module, batch: Batch, *, label_logits_only: bool, entropy_top_k: int = 0) -> TargetLosses:
    """Compute the losses of a micro-batch's targets from the logits of the model, which may be wrapped.

    Targets are the positions with a label. With ``label_logits_only``, compute logits only at positions with a label in
    at least one row; the model must accept ``logits_to_keep``. With ``entropy_top_k``, also return the entropies of
    that many most likely tokens.
    """
    inputs = batch.model_inputs()
    labels = batch.labels  # (B, T)
    if label_logits_only:
        kept_positions = label_positions(batch)
        inputs["logits_to_keep"] = kept_positions
        labels = labels[:, kept_positions]
    labels = labels.flatten()  # (P,)
    logits = model(**inputs).logits.flatten(0, 1)  # (P, vocabulary)

    num_targets = len(batch.target_positions)
    if num_targets == 0:
        return TargetLosses.without_targets(batch, zero=logits.float().sum() * 0.0)

    losses, correct = _label_losses(logits, labels)  # (P,) each
    is_target = labels != IGNORE_INDEX
    if num_targets < len(losses):  # only then, because indexing by a mask waits for the device
        losses, correct = losses[is_target], correct[is_target]
    entropies = top_k_entropy(logits.detach()[is_target], entropy_top_k) if entropy_top_k else None
    return TargetLosses(
        losses=losses,
        correct=correct,
        positions=batch.target_positions,
        weights=_target_weights(batch),
        zero=losses.new_zeros(()),
        entropies=entropies,
    )


def _label_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses of labels, float32 (P,), and whether each is the most likely token, of logits (P, vocabulary)."""
    # Without gradients, chunks save memory: float32 logits of a chunk are freed before those of the next one.
    chunk_size = len(logits) if torch.is_grad_enabled() else _ROWS_AT_ONCE
    chunks = zip(torch.split(logits, chunk_size), torch.split(labels, chunk_size), strict=True)
    losses, correct = [], []
    for chunk_logits, chunk_labels in chunks:
        chunk_losses = F.cross_entropy(chunk_logits.float(), chunk_labels, ignore_index=IGNORE_INDEX, reduction="none")
        losses.append(chunk_losses)
        correct.append(chunk_logits.detach().argmax(-1) == chunk_labels)
    return torch.cat(losses), torch.cat(correct)


def label_positions(batch: Batch) -> Tensor:
    """Return the positions with a label in at least one row, int64 (P,); the first position if there is no label."""
    if len(batch.labels) == 1:
        positions = batch.target_positions  # known without waiting for the device
    else:
        positions = (batch.labels != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
    return positions if len(positions) else torch.zeros(1, dtype=torch.int64, device=batch.labels.device)


def takes_logits_to_keep(model: nn.Module) -> bool:
    """Return whether a model, bare or inside an adapter, can compute logits at selected positions only."""
    return "logits_to_keep" in inspect.signature(base_model(model).forward).parameters


class RouterBalance:
    """Load-balancing loss of a mixture of experts, added to the gradients of its routers inside ``added_to_gradients``.

    For a layer with E experts, k of which are chosen for each token, the loss is E * sum over experts e of f_e * P_e:
    f_e is how often e is chosen per token, and P_e the mean probability that the router gives to e (Fedus et al. 2021,
    arXiv 2101.03961, equations 4 to 6; an evenly balanced router has k). Layers are averaged. Each micro-batch is
    weighted by its share of the step's tokens, without padding and fillers:

        loss of the step = mean over target tokens  +  coefficient * sum over micro-batches of tokens / step's * balance

    As in Megatron-LM, the loss is computed at the router, and its gradient is added to that of the router's own output.
    Nothing leaves a layer, so layers may be recomputed, sharded (FSDP) and wrapped (DDP).

    The model is bare or inside an adapter, not yet wrapped; one without routers is a ConfigError.
    """

    def __init__(self, model: nn.Module, coefficient: float) -> None:
        self._coefficient = coefficient
        self._tokens: Tensor | None = None  # of the micro-batch inside ``added_to_gradients``
        self._world_size = 1
        self._layer_weight = torch.zeros(())  # factor of each layer's loss in this micro-batch
        self._layer_losses: list[Tensor] = []  # of the step so far, weighted

        self._num_layers = 0
        for router, logits_index in _routers_of(model):
            self._num_layers += 1
            # A deep copy of the model also copies a partial and its ``self``, but it would share a closure.
            router.register_forward_hook(partial(self._after_router, logits_index))
        if not self._num_layers:
            raise ConfigError(
                f"--router-aux-loss-coef {coefficient:g}: {type(base_model(model)).__name__} has no routers of experts",
                "Leave it out: it is only for mixtures of experts.",
            )

    @contextmanager
    def added_to_gradients(self, batch: Batch, step_tokens: int, world_size: int) -> Iterator[None]:
        """Add the loss of a micro-batch inside ``with``, which must enclose its forward and backward pass.

        ``step_tokens`` are those of all samples of the step, on all ranks.
        """
        self._tokens = batch.is_token.flatten()
        self._layer_weight = self._tokens.sum() / max(step_tokens, 1) / self._num_layers
        self._world_size = world_size
        try:
            yield
        finally:
            self._tokens = None

    def take_step_loss(self) -> Tensor:
        """Return this rank's part of the step's load-balancing loss, float32, 0-d, and reset it for the next step."""
        losses, self._layer_losses = self._layer_losses, []
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def _after_router(self, logits_index: int, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Attach the gradient of the load-balancing loss to the weights of the chosen experts in a router's output."""
        others = [index for index in range(len(output)) if index != logits_index]
        weights = next(index for index in others if output[index].is_floating_point())
        if self._tokens is None or not torch.is_grad_enabled() or not output[weights].requires_grad:
            return output
        experts = next(output[index] for index in others if not output[index].is_floating_point())
        balance = load_balance(output[logits_index].flatten(0, -2), experts.flatten(0, -2), self._tokens)
        return (*output[:weights], _WithBalance.apply(output[weights], balance, self), *output[weights + 1 :])

    def backward_of(self, balance: Tensor) -> Tensor:
        """Record a layer's loss, and return its gradient, 0-d; runs once per layer, even if layers are recomputed."""
        self._layer_losses.append(balance.detach() * self._layer_weight)
        return self._coefficient * self._world_size * self._layer_weight


def _routers_of(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield each router of a model, and the index of the logits in the tuple that it returns."""
    logits_index_by_class = _logits_index_by_router_class(model)
    for module in model.modules():
        for router_class, logits_index in logits_index_by_class.items():
            if isinstance(module, router_class):
                yield module, logits_index


def _logits_index_by_router_class(model: nn.Module) -> dict[type[nn.Module], int]:
    """Return the classes of a model's routers, which transformers' models declare, and the logits' index in outputs."""
    logits_index_by_class = {}
    for module in model.modules():
        recorded: Any = (getattr(module, "_can_record_outputs", None) or {}).get(_RECORDED)
        recorders = recorded if isinstance(recorded, list) else [recorded]
        for recorder in recorders:
            if hasattr(recorder, "target_class"):
                logits_index_by_class[recorder.target_class] = recorder.index
    return logits_index_by_class


def load_balance(logits: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
    """Return E * sum of f_e * P_e of one layer, float32, 0-d.

    ``logits`` are (T, E), ``experts`` int64 (T, k), and ``tokens`` bool (T,): which positions count.
    """
    counted = tokens.float()
    num_tokens = counted.sum().clamp(min=1)
    probabilities = (logits.float().softmax(-1) * counted[:, None]).sum(0) / num_tokens
    counts = counted.new_zeros(logits.shape[-1])
    counts.index_add_(0, experts.flatten(), counted[:, None].expand(experts.shape).flatten())
    return (probabilities * counts).sum() / num_tokens * logits.shape[-1]


class _WithBalance(torch.autograd.Function):
    """Identity function of a router's output, which gives the load-balancing loss its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, balance: Tensor, owner: RouterBalance) -> Tensor:
        ctx.save_for_backward(balance)
        ctx.owner = owner
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (balance,) = ctx.saved_tensors
        return gradients[0], ctx.owner.backward_of(balance), None
