"""Training of a few layers at a time: LISA (Pan et al. 2024, arXiv 2403.17919)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from packtool.errors import ConfigError
from packtool.train.model.loss import base_model


class ActiveLayers:
    """Random layers of a language model, drawn anew every few steps, which are trained while the others are frozen.

    Embeddings, final norm and head are always trained. A draw depends only on seed and step, so resumed runs repeat it.

    Args:
        model: bare, not yet wrapped.
        num_active: number of layers trained at a time.
        interval: steps between two draws.
    """

    def __init__(self, model: nn.Module, num_active: int, interval: int, seed: int) -> None:
        bare: Any = base_model(model)
        self._layers: Any = getattr(bare.get_decoder(), "layers", None)
        num_layers = len(self._layers) if isinstance(self._layers, nn.ModuleList) else 0
        if num_active > num_layers:
            raise ConfigError(
                f"--lisa-activated-layers {num_active}: the language model has {num_layers} layers",
                "Give a smaller number.",
            )
        self._num_active, self._interval, self._seed = num_active, interval, seed

    def indices(self, step: int) -> set[int]:
        """Return the indices of the layers that are trained in a step (0-based)."""
        random = np.random.default_rng([self._seed, step // self._interval])
        return set(random.choice(len(self._layers), self._num_active, replace=False).tolist())

    @contextmanager
    def active(self, step: int) -> Iterator[None]:
        """Freeze the other layers inside ``with``. They then have no gradients, so the optimizer skips them."""
        indices = self.indices(step)
        frozen = [layer for index, layer in enumerate(self._layers) if index not in indices]
        parameters = [each for layer in frozen for each in layer.parameters() if each.requires_grad]
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
