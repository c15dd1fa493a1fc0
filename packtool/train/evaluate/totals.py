"""What an evaluation found out about each sample, and totals of it: numpy only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
