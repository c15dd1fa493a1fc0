"""Things made of tensors that go to a device together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

M = TypeVar("M", bound="Movable")


class Movable(ABC):
    """Something made of tensors; whoever moves batches (DataLoader, accelerate, Lightning) looks for these names."""

    @abstractmethod
    def map(self: M, function: Callable[[Tensor], Tensor]) -> M:
        """This thing again, every tensor, of any shape, replaced by the function's answer."""

    def to(self: M, device: torch.device | str, *, non_blocking: bool = False) -> M:
        """This thing on another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self: M) -> M:
        """This thing in page-locked memory."""
        return self.map(lambda tensor: tensor.pin_memory())
