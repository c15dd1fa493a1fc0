"""How well a model predicts the targets of a micro-batch: of each token, then of each sample.

packed       loss of each token  (1, T)     only where a label is, in pieces: logits are the largest tensor there is
restored     one row a sample    (S, R)     from the token before its first target on: ``restore_padding``
summed       one number a sample (S,)

What an evaluation found out about each sample, and totals of it: numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig, PreTrainedModel

from packtool.attention.recurrent import recurrent_layers, release_recurrent_layers
from packtool.attention.register import ATTENTION_NAME, set_attention, set_text_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.batch import Batch
from packtool.batch.positions import restore_padding
from packtool.constants import IGNORE_INDEX
from packtool.errors import UnsupportedModelError
from packtool.train.model.loss import HeadLoss, label_positions, losses_of_head, takes_logits_to_keep, target_logits

SCORES = ("sum of losses", "target tokens", "correct ones", "first wrong position or -1")
"""Columns of what ``sample_scores`` returns."""

_TARGETS_AT_ONCE = 1024
"""Positions whose logits are turned into float32 together, where logits are all made at once."""

_CELLS_AT_ONCE = 1 << 22
"""Entries of the restored rows that are summed together, so that one long sample does not make many wide rows."""


@dataclass(frozen=True, eq=False)
class SamplePlaces:
    """Where S samples lie in a packed sequence, and where their targets begin.

    Args:
        seqlens: int64 (S,), tokens of each sample, without padding.
        cu_seqlens: int64 (S + 1,), where each begins, padding included.
        prompts: int64 (S,), tokens before the first target; all tokens where there is none.
    """

    seqlens: Tensor
    cu_seqlens: Tensor
    prompts: Tensor

    def __getitem__(self, some: slice) -> SamplePlaces:
        ends = slice(some.start, None if some.stop is None else some.stop + 1)
        return SamplePlaces(self.seqlens[some], self.cu_seqlens[ends], self.prompts[some])

    def to(self, device: torch.device) -> SamplePlaces:
        """These places with their tensors on another device."""
        return SamplePlaces(self.seqlens.to(device), self.cu_seqlens.to(device), self.prompts.to(device))


class Scorer:
    """A model that scores the tokens of micro-batches; ``evaluating`` makes it.

    Args:
        model: bare, or with adapters.
        head_loss: what makes losses in the model's head; None for a model whose head does not allow it.
    """

    def __init__(self, model: nn.Module, head_loss: HeadLoss | None) -> None:
        self._model, self._head_loss = model, head_loss
        self._label_logits_only = takes_logits_to_keep(model)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Score a micro-batch's first sequence: each position's loss, and whether its label is the most likely token.

        Returns:
            float32 (1, T) in nats and bool (1, T); 0 and False where there is no label.
        """
        num_tokens, device = batch.labels.shape[1], batch.labels.device
        losses, correct = (
            torch.zeros(num_tokens, device=device),
            torch.zeros(num_tokens, dtype=torch.bool, device=device),
        )
        if self._head_loss is not None:
            found = self._head_loss.losses(self._model, batch)
            losses[found.positions], correct[found.positions] = found.losses, found.correct
            return losses[None], correct[None]
        logits, labels = target_logits(self._model, batch, label_logits_only=self._label_logits_only)
        kept = label_positions(batch) if self._label_logits_only else torch.arange(num_tokens, device=device)
        for start in range(0, len(kept), _TARGETS_AT_ONCE):
            some = slice(start, start + _TARGETS_AT_ONCE)
            piece, wanted = logits[0, some], labels[0, some]
            losses[kept[some]] = F.cross_entropy(piece.float(), wanted, ignore_index=IGNORE_INDEX, reduction="none")
            correct[kept[some]] = piece.argmax(-1) == wanted
        return losses[None], correct[None]


def sample_scores(places: SamplePlaces, labels: Tensor, losses: Tensor, correct: Tensor) -> Tensor:
    """What a ``Scorer`` found, sample by sample.

    Args:
        places: of S samples in a sequence of T tokens.
        labels: int64 (1, T), shifted.
        losses: float32 (1, T).
        correct: bool (1, T).

    Returns:
        float64 (S, 4): see ``SCORES``.
    """
    widths = places.seqlens - places.prompts
    width = int(widths.max()) if len(widths) else 0
    num_at_once = max(1, _CELLS_AT_ONCE // max(width, 1))
    found = [torch.zeros(0, 4, dtype=torch.float64, device=losses.device)]
    for start in range(0, len(widths), num_at_once):
        some = places[start : start + num_at_once]
        where = some.seqlens, some.cu_seqlens, width, some.prompts
        is_target = restore_padding(labels != IGNORE_INDEX, *where)
        is_wrong = is_target & ~restore_padding(correct, *where)
        num_targets, num_wrong = is_target.sum(1), is_wrong.sum(1)
        # The column of the first True; its token comes after the prompt.
        wrong = (is_wrong.cumsum(1) == 0).sum(1) + some.prompts
        sums = restore_padding(losses, *where).double().sum(1)
        wrong = torch.where(num_wrong > 0, wrong, -1)
        found.append(torch.stack([sums, *(n.double() for n in (num_targets, num_targets - num_wrong, wrong))], dim=1))
    return torch.cat(found)


def can_be_packed(config: PreTrainedConfig) -> bool:
    """Whether samples of this model can share a forward pass; if not, they must be evaluated one by one."""
    try:
        refuse_unsupported(config)
    except UnsupportedModelError:
        return False
    return True


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose forward would wait for the other ranks."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def is_packed(model: nn.Module) -> bool:
    """Whether a model's attention is packtool's already."""
    return str(_attention_of(transformers_model(model))).startswith(ATTENTION_NAME)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The model without the adapters around it."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


@contextmanager
def evaluating(model: nn.Module, *, packed: bool) -> Iterator[Scorer]:
    """Inside, a model has neither dropout nor gradients and can score; afterwards it is as it was, each of its modules.

    Args:
        model: bare, or with adapters.
        packed: keep packed samples apart; a model that is trained on padded rows has transformers' own attention.
    """
    modes = [(module, module.training) for module in model.modules()]
    inner = transformers_model(model)
    name = _attention_of(inner)
    was_isolated = any("forward" in vars(layer) for layer in recurrent_layers(inner))
    switch = packed and not is_packed(model)
    if switch:
        set_attention(inner)
    model.eval()
    try:
        # Not inference mode: what a model remembers of a forward pass must be fit for the next training step.
        with torch.no_grad(), losses_of_head(model) as head_loss:
            yield Scorer(model, head_loss)
    finally:
        for module, was_training in modes:
            module.training = was_training
        if switch:
            set_text_attention(inner, str(name))
            if not was_isolated:
                release_recurrent_layers(inner)


def _attention_of(model: PreTrainedModel) -> str | None:
    text: Any = model.config.get_text_config()
    name: str | None = text._attn_implementation
    return name


IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Total:
    """Figures of several samples, weighted by target tokens.

    Args:
        samples: how many.
        target_tokens: theirs.
        loss: mean over all target tokens, in nats; nan where there are none.
        perplexity: exp(loss).
        token_accuracy: share of the target tokens that are the most likely ones.
        exact_samples: samples whose targets are all the most likely ones.
    """

    samples: int
    target_tokens: int
    loss: float
    perplexity: float
    token_accuracy: float
    exact_samples: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One entry for each of N samples, in the caches' order; arrays of shape (N,).

    Args:
        tokens: int64, of the sample.
        target_tokens: int64, labels that something comes before.
        loss_sum: float64, sum of the targets' cross-entropies in nats; loss scales do not weigh here.
        num_correct: int64, targets that are the most likely token, given all true tokens before.
        first_wrong: int64, position in the sample's tokens of the first target that is not; -1 if there is none.
        source: int64, position in ``sources``.
        row: int64, row there.
        parts: int64 (N, 4), which part of its row it is, the numbers of ``RowPart``; 0 for a whole row.
        channel: int64, position in ``channels``, or -1.
        sources, channels: names.
    """

    tokens: IntArray
    target_tokens: IntArray
    loss_sum: FloatArray
    num_correct: IntArray
    first_wrong: IntArray
    source: IntArray
    row: IntArray
    parts: IntArray
    channel: IntArray
    sources: tuple[str, ...]
    channels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def loss(self) -> FloatArray:
        """Mean over the sample's target tokens, in nats; nan where there are none."""
        return _ratio(self.loss_sum, self.target_tokens)

    @property
    def perplexity(self) -> FloatArray:
        """The exponential of the mean loss in nats."""
        with np.errstate(over="ignore"):
            return np.exp(self.loss)

    @property
    def token_accuracy(self) -> FloatArray:
        """Share of the sample's target tokens that are the most likely ones; nan where there are none."""
        return _ratio(self.num_correct, self.target_tokens)

    @property
    def total(self) -> Total:
        """Totals over all samples."""
        return self._total_of(np.ones(len(self), np.bool_))

    @property
    def channel_totals(self) -> dict[str | None, Total]:
        """Totals of each channel that has samples here, in the caches' order; None, for those without, is last."""
        names: list[str | None] = [*self.channels, None]
        codes = [*range(len(self.channels)), -1]
        found = {name: self.channel == code for name, code in zip(names, codes, strict=True)}
        return {name: self._total_of(chosen) for name, chosen in found.items() if chosen.any()}

    def metrics(self, prefix: str = "eval_") -> dict[str, float]:
        """Figures for a log line: of all samples, and the loss of each named channel as ``eval_loss/NAME``."""
        total = self.total
        names = ("loss", "perplexity", "token_accuracy", "target_tokens", "samples")
        figures: dict[str, float] = {prefix + name: getattr(total, name) for name in names}
        named = {name: channel for name, channel in self.channel_totals.items() if name is not None}
        return figures | {f"{prefix}loss/{name}": channel.loss for name, channel in named.items()}

    def _total_of(self, chosen: npt.NDArray[np.bool_]) -> Total:
        targets, correct = int(self.target_tokens[chosen].sum()), int(self.num_correct[chosen].sum())
        loss = float(self.loss_sum[chosen].sum()) / targets if targets else math.nan
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(loss))
        is_exact = (self.num_correct == self.target_tokens) & (self.target_tokens > 0)
        return Total(
            samples=int(chosen.sum()),
            target_tokens=targets,
            loss=loss,
            perplexity=perplexity,
            token_accuracy=correct / targets if targets else math.nan,
            exact_samples=int(is_exact[chosen].sum()),
        )


def _ratio(sums: npt.NDArray[np.generic], counts: IntArray) -> FloatArray:
    """(N,): nan where there is nothing to divide by."""
    found: FloatArray = np.full(len(counts), np.nan)
    np.divide(sums, counts, out=found, where=counts > 0)
    return found
