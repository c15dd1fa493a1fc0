"""``packtool train``."""

from __future__ import annotations

from packtool.config import TrainConfig


def run_train(config: TrainConfig, as_json: bool) -> None:
    """Start under torchrun if the environment asks for it, else train and print the summary."""
    raise NotImplementedError
