"""Whether activations are computed again in the backward pass: decided by the model's size where nobody has said."""

from __future__ import annotations

import dataclasses

from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.simulate.model_sizes import ModelSizes

MOST_PARAMETERS = 100_000_000
"""Models up to here are for trying things out: what they keep of a step fits anywhere."""
CHUNK_LOGITS = 2**26
"""Logits made at a time, 256 MiB in float32; where a micro-batch has more, backward makes them again."""


def with_recomputing(config: TrainConfig) -> TrainConfig:
    """The settings with ``--gradient-checkpointing`` decided.

    Recomputing costs about a third more time and saves nearly all of the activations, without which a model of billions
    of parameters does not fit: running out of memory in the middle of a run is the worse of the two surprises.
    """
    if config.gradient_checkpointing is not None:
        return config
    try:
        num_parameters = ModelSizes.of_config(ModelFiles.load(config.model).config).num_parameters
    except (KeyError, TypeError, ValueError):  # a configuration of unknown form, which need not be small
        num_parameters = MOST_PARAMETERS + 1
    return dataclasses.replace(config, gradient_checkpointing=num_parameters > MOST_PARAMETERS)


def recomputing_lines(asked: TrainConfig, decided: TrainConfig) -> list[str]:
    """What is to be said where it was decided for the user."""
    if asked.gradient_checkpointing is not None or not decided.gradient_checkpointing:
        return []
    return [
        "activations are computed again in the backward pass, which saves memory and takes about a third more time: "
        "--gradient-checkpointing false keeps them"
    ]
