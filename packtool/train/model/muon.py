"""Muon for the matrices inside the model, AdamW for all other weights: ``--optim muon``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """torch's Muon and AdamW as one optimizer with one learning rate.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix (Jordan et al. 2024). Its updates are scaled
    to the size of AdamW's, so learning rates of AdamW fit (Liu et al. 2025, arXiv 2502.16982). Embeddings, the head and
    weights that are no matrices get AdamW, as in ms-swift and LLaMA-Factory. Weight decay applies to all weights.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        # These two optimizers, made for a placeholder weight, only supply settings and the computation of a step. The
        # groups and states of the real weights belong to the optimizer that is made here.
        muon = Muon([torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = AdamW([torch.zeros(1)], lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
        self._optimizers = {True: muon, False: adamw}  # by whether a group of weights "is_muon"
        weights_by_is_muon: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, weight in named_parameters:
            if weight.requires_grad:
                is_hidden_matrix = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
                weights_by_is_muon[is_hidden_matrix].append(weight)
        groups: list[dict[str, Any]] = []
        for is_muon, weights in weights_by_is_muon.items():
            if weights:
                groups.append({**self._optimizers[is_muon].defaults, "params": weights, "is_muon": is_muon})
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None, "the Trainer gives none"
        for is_muon, optimizer in self._optimizers.items():
            optimizer.param_groups = [group for group in self.param_groups if group["is_muon"] == is_muon]
            optimizer.state = self.state
            optimizer.step()
