"""Noise on the embeddings of training: NEFTune, for samples that share a sequence.

Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning": uniform noise of at most
alpha / sqrt(L d), with L tokens of a sample and d of width. L is here the sample's own, not the pack's or the padded
row's, so that a sample has the noise that it would have alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from packtool.batch.batch import Batch, PackedBatch, PaddedBatch, ShardedBatch, TreeBatch


class EmbeddingNoise:
    """Adds noise to what a model's embeddings return while it trains on ``batch``.

    Args:
        model: bare, or inside an adapter; not yet wrapped for several processes.
        alpha: NEFTune's.

    Attributes:
        batch: what the model is run on; None for no noise.
    """

    def __init__(self, model: nn.Module, alpha: float) -> None:
        inner: Any = model
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        self.alpha = alpha
        self.batch: Batch | None = None
        inner.get_input_embeddings().register_forward_hook(self._add)

    def _add(self, module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
        if self.batch is None or not module.training or embedded.shape[:2] != self.batch.input_ids.shape:
            return embedded
        lengths = sample_lengths(self.batch).to(embedded.device)
        most = self.alpha / (lengths * embedded.shape[-1]).sqrt()
        noise = torch.empty_like(embedded).uniform_(-1.0, 1.0)
        return embedded + noise * most[..., None].to(embedded.dtype)


def sample_lengths(batch: Batch) -> Tensor:
    """Tokens of the sample that each position belongs to, float32 (B, T)."""
    if isinstance(batch, PaddedBatch):
        return batch.attention_mask.sum(1, keepdim=True).clamp(min=1).float().expand(batch.input_ids.shape)
    assert isinstance(batch, (PackedBatch, ShardedBatch))
    assert not isinstance(batch, TreeBatch), "a shared prefix is of no one length"
    positions = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
    lengths = torch.tensor([*batch.lengths, 1], device=positions.device, dtype=torch.float32)
    return lengths[batch.documents_of(positions).clamp(max=len(batch.lengths))].view(batch.input_ids.shape)
