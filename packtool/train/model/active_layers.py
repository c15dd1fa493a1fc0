"""Training of a few layers at a time: LISA (Pan et al. 2024, arXiv 2403.17919) and BAdam (Luo et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.train.model.loss import base_model


class ActiveLayers:
    """Layers of a language model that are trained while its other layers are frozen, and change every few steps.

    LISA draws them at random, and always trains embeddings, final norm and head too. BAdam trains one layer after the
    other, nothing else, and resets the optimizer between two. Both depend only on seed and step, so resumed runs repeat
    them.

    Args:
        model: bare, not yet wrapped.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._model: Any = base_model(model)
        self._layers: Any = getattr(self._model.get_decoder(), "layers", None)
        self._config = config
        self.resets_optimizer = config.badam_switch_interval is not None
        self._interval = config.badam_switch_interval or config.lisa_step_interval
        self._num_layers = len(self._layers) if isinstance(self._layers, nn.ModuleList) else 0
        if (config.lisa_activated_layers or 1) > self._num_layers:
            raise ConfigError(
                f"--lisa-activated-layers {config.lisa_activated_layers}: the language model has {self._num_layers} "
                "layers",
                "Give a smaller number.",
            )

    @classmethod
    def of(cls, model: nn.Module, config: TrainConfig) -> ActiveLayers | None:
        """Return the layers that the options select; None if all are trained at once."""
        selects = config.lisa_activated_layers is not None or config.badam_switch_interval is not None
        return cls(model, config) if selects else None

    def changes_at(self, step: int) -> bool:
        """Return whether other layers are trained from this step (0-based) on."""
        return step % self._interval == 0

    def indices(self, step: int) -> set[int]:
        """Return the indices of the layers that are trained in a step (0-based)."""
        turn, seed = step // self._interval, self._config.seed
        if self._config.lisa_activated_layers is not None:
            drawn = np.random.default_rng([seed, turn]).choice(
                self._num_layers, self._config.lisa_activated_layers, replace=False
            )
            return set(drawn.tolist())
        cycle, place = divmod(turn, self._num_layers)
        if self._config.badam_switch_mode == "random":
            return {int(np.random.default_rng([seed, cycle]).permutation(self._num_layers)[place])}
        return {place if self._config.badam_switch_mode == "ascending" else self._num_layers - 1 - place}

    @contextmanager
    def active(self, step: int) -> Iterator[None]:
        """Freeze all other weights inside ``with``. They then have no gradients, so the optimizer skips them."""
        indices = self.indices(step)
        active_ids = {id(each) for index in indices for each in self._layers[index].parameters()}
        frozen = self._model.parameters() if self.resets_optimizer else self._layers.parameters()
        parameters = [each for each in frozen if each.requires_grad and id(each) not in active_ids]
        for parameter in parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(True)
