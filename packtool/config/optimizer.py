"""How weights are moved: optimizer, learning rates and their schedule. Names and meanings are ms-swift's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packtool.config.panels import Panel
from packtool.config.settings import not_together, option

_PANEL: Panel = "Optimizer"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How weights are moved."""

    learning_rate: float | None = option(
        None, "Peak learning rate; by default 1e-4 with lora and 1e-5 with full.", panel=_PANEL, minimum=0.0
    )
    vit_lr: float | None = option(
        None, "Peak learning rate of the vision tower; by default --learning-rate.", panel=_PANEL, minimum=0.0
    )
    aligner_lr: float | None = option(
        None, "Peak learning rate of the aligner; by default --learning-rate.", panel=_PANEL, minimum=0.0
    )
    optim: str = option(
        "adamw_torch_fused", "Optimizer, by transformers' names: adamw_torch, adafactor, sgd, ...", panel=_PANEL
    )
    adam_beta1: float = option(0.9, "Adam's decay of the mean gradient.", panel=_PANEL, minimum=0.0, maximum=1.0)
    adam_beta2: float = option(
        0.999, "Adam's decay of the mean squared gradient.", panel=_PANEL, minimum=0.0, maximum=1.0
    )
    adam_epsilon: float = option(1e-8, "Adam's constant under the fraction.", panel=_PANEL, minimum=0.0)
    weight_decay: float = option(0.1, "AdamW's weight decay.", panel=_PANEL, minimum=0.0)
    warmup_ratio: float = option(
        0.05, "Share of the steps in which the learning rate rises.", panel=_PANEL, minimum=0.0, maximum=1.0
    )
    warmup_steps: int | None = option(
        None, "Steps in which the learning rate rises, instead of --warmup-ratio.", panel=_PANEL, minimum=0
    )
    lr_scheduler_type: str = option("cosine", "Schedule of the learning rate, by transformers' names.", panel=_PANEL)
    lr_scheduler_kwargs: Mapping[str, Any] = option(
        {},
        "What the schedule wants to know beside that, as JSON: '{\"min_lr\": 1e-6}' for cosine_with_min_lr.",
        panel=_PANEL,
    )
    max_grad_norm: float = option(
        1.0, "Gradient norm above which gradients are scaled down.", panel=_PANEL, minimum=0.0
    )
    router_aux_loss_coef: float = option(
        0.0,
        "Weight of the loss that balances the experts of a mixture, over the tokens of samples; 0 leaves it out.",
        panel=_PANEL,
        minimum=0.0,
    )
    neftune_noise_alpha: float | None = option(
        None,
        "Noise on the embeddings of training, NEFTune's alpha; each sample of a pack has the noise of its own length.",
        panel=_PANEL,
        minimum=0.0,
    )

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps of a run of ``num_steps`` in which the learning rate rises."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil(num_steps * self.warmup_ratio)


def router_problems(options: OptimizerOptions, others: Mapping[str, bool]) -> list[str]:
    """Options that do not go with ``--router-aux-loss-coef``.

    Args:
        others: options, as they are given, and whether they are.
    """
    if not options.router_aux_loss_coef:
        return []
    return not_together(f"--router-aux-loss-coef {options.router_aux_loss_coef:g}", others)
