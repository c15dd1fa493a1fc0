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
        """Divide the trained parameters among both optimizers; ``betas`` and ``eps`` are those of AdamW."""
        # Both are made for a placeholder weight: ``step`` gives them the real weights.
        self._muon: Optimizer = Muon(
            [torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw: Optimizer = AdamW([torch.zeros(1)], lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)

        hidden_matrices: list[nn.Parameter] = []
        other_weights: list[nn.Parameter] = []
        for name, weight in named_parameters:
            if not weight.requires_grad:
                continue
            if _is_hidden_matrix(name, weight):
                hidden_matrices.append(weight)
            else:
                other_weights.append(weight)
        groups: list[dict[str, Any]] = []
        if hidden_matrices:
            groups.append({**self._muon.defaults, "params": hidden_matrices, "is_muon": True})
        if other_weights:
            groups.append({**self._adamw.defaults, "params": other_weights, "is_muon": False})
        super().__init__(groups, defaults={})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None, "the Trainer gives none"
        for optimizer, is_muon in ((self._muon, True), (self._adamw, False)):
            optimizer.param_groups = [group for group in self.param_groups if group["is_muon"] == is_muon]
            optimizer.state = self.state
            optimizer.step()


def _is_hidden_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and "embed" not in name and "lm_head" not in name
