"""Reduced models of six layers, of which the first recompute, and plans of their recomputation."""

from __future__ import annotations

import copy
from typing import Any

import torch

from packtool.attention.parallel.axes import Axes
from packtool.batch.spec import InputSpec, auto_class
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaLimits
from packtool.train.model.recompute import LayerPlan, plan_recomputation
from packtool.train.model.trace import trace_pass, traced_batch
from packtool.train.model.trainable import make_trainable, switchable_layers
from packtool.train.prepare.figures import RankTokens
from tests.batch.reduced import reduced_config

NUM_LAYERS = 6
LONGEST = {"qwen3": RankTokens(computed=400), "qwen3_vl": RankTokens(computed=400, vision=200)}
"""The longest micro-batch of each model."""


def deep_config(name: str) -> Any:
    """A reduced model of six layers."""
    config = reduced_config(name)
    config.get_text_config().num_hidden_layers = NUM_LAYERS
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[0]] * NUM_LAYERS
    return config


def run_config(**options: Any) -> TrainConfig:
    """Full training of all parts; an adapter has fewer kept activations."""
    defaults = {"train_type": "full", "freeze_vit": False, "freeze_aligner": False, "verify_packing": False}
    return TrainConfig(model="", cached_dataset=("",), output_dir="", packing_length=400, **defaults | options)


def plan_of(name: str, budget: float, **options: Any) -> LayerPlan:
    """The plan of a model for a device of this many bytes."""
    config = run_config(gradient_checkpointing="auto", **options)
    return plan_recomputation(
        config,
        Axes(),
        [LONGEST[name]],
        deep_config(name),
        dtype=torch.float32,
        world_size=1,
        budget=budget,
    )


def switched_model(config: Any, num_layers: int, *, in_towers: bool = False, **options: Any) -> Any:
    """A model with random weights whose first layers recompute; with options of training, such as adapters."""
    model: Any = auto_class(config).from_config(copy.deepcopy(config), attn_implementation="sdpa")
    model = make_trainable(model, run_config(gradient_checkpointing=True, **options))
    layers = switchable_layers(model)
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = in_towers
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index < num_layers
    return model


def traced_peak(name: str, tokens: RankTokens, num_layers: int, *, in_towers: bool = False, **options: Any) -> int:
    """The peak of a pass in which the first layers recompute."""
    config = deep_config(name)
    with torch.device("meta"):
        model = switched_model(config, num_layers, in_towers=in_towers, **options)
    return trace_pass(model, InputSpec("", config, MediaLimits()), tokens).peak


def real_pass(name: str, tokens: RankTokens | None = None) -> Any:
    """A micro-batch, by default the longest, with random pixels."""
    batch = traced_batch(InputSpec("", deep_config(name), MediaLimits()), tokens or LONGEST[name], Axes())
    torch.manual_seed(1)
    return batch.map(lambda tensor: torch.randn(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor)
