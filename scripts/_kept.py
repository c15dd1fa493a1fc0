"""What autograd keeps of a forward pass, for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps for the backward pass: each storage once, and no weights.

    Args:
        model: whose weights are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._see, lambda tensor: tensor)
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._storages: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages that were kept so far."""
        return sum(self._storages.values())

    def _see(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            # What is kept stays alive: no other storage comes to lie there.
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor
