"""What packing makes of the batch: how many samples a step holds, and what that asks of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from packtool.plan.steps import StepPlan
from packtool.plan.summary import PlanSummary

_WORTH_ADVICE = 1.25
"""Growth of the batch from which the learning rate is worth a line: by a rule, 12 % higher."""


@dataclass(frozen=True)
class BatchGrowth:
    """Samples and target tokens of a mean step, and of a full step of unpacked training with the same options.

    Args:
        num_samples, num_targets: of packs.
        num_plain: batch size times accumulation times ranks.
        num_plain_targets: labels that carry loss of so many samples.
    """

    num_samples: float
    num_targets: float
    num_plain: int
    num_plain_targets: float

    @classmethod
    def of(cls, summary: PlanSummary) -> BatchGrowth:
        """The growth in a plan."""
        per_sample = summary.num_target_tokens / summary.num_samples
        num_samples, plain = summary.num_samples / summary.num_steps, summary.samples_per_plain_step
        return cls(num_samples, num_samples * per_sample, plain, plain * per_sample)

    @property
    def factor(self) -> float:
        """Times that the batch is as large as without packing."""
        return self.num_samples / self.num_plain

    @property
    def is_large(self) -> bool:
        """Whether there is something to say of the learning rate."""
        return self.factor >= _WORTH_ADVICE

    def sentence(self, product: str, *, knows_targets: bool = True) -> str:
        """Both batches.

        Args:
            product: batch size, accumulation and ranks, as in ``1 x 2 x 8``.
            knows_targets: not where lengths are all that is known.
        """
        packed = f"{self.num_samples:,.1f} samples", f"{self.num_targets:,.0f} target tokens"
        plain = f"{self.num_plain:,}", f"{self.num_plain_targets:,.0f}"
        num = 2 if knows_targets else 1
        return (
            f"a step holds {' and '.join(packed[:num])} on average, unpacked (batch size x accumulation x ranks: "
            f"{product}) {' and '.join(plain[:num])}"
        )

    def advice(self, optim: str = "") -> str:
        """How a learning rate that was tuned for the unpacked batch is scaled.

        Adam: with the square root of the growth (Malladi, Lyu, Panigrahi, Arora 2022, "On the SDEs and Scaling Rules
        for Adaptive Gradient Algorithms", arXiv:2205.10287). SGD: in proportion (Goyal et al. 2017, "Accurate, Large
        Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677). Both hold up to some size of the batch only.

        Args:
            optim: by transformers' name; both rules where it is neither, or not known.
        """
        adam = f"{math.sqrt(self.factor):.1f} times with Adam (square root: Malladi et al. 2022)"
        sgd = f"{self.factor:.1f} times with SGD (linear: Goyal et al. 2017)"
        is_adam, is_sgd = "adam" in optim, optim == "sgd"
        rules = [rule for rule, other in ((adam, is_sgd), (sgd, is_adam)) if not other]
        return f"{self.factor:.1f} times the batch: a learning rate tuned unpacked rises up to {', '.join(rules)}"


def own_steps_line(summary: PlanSummary, steps: StepPlan) -> str:
    """What ``--samples-per-step`` makes of the steps, as the end of a sentence."""
    each = np.diff(steps.step_offsets) // steps.world_size
    fewest, most = int(each.min()), int(each.max())
    number = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    return (
        f"each has the {summary.samples_per_plain_step:,} samples that it has unpacked (--samples-per-step), in "
        f"{number} micro-batch{'es' if most > 1 else ''} a rank"
    )
