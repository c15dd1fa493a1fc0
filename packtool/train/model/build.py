"""Build the model that a run trains: weights, adapter, sharding of experts, compiled layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import PreTrainedModel, set_seed

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.spec import InputSpec
from packtool.encode.model_files import place_of
from packtool.progress import Progress
from packtool.train.model.adapters import take_adapter
from packtool.train.model.compiled import compile_layers
from packtool.train.model.load import load_model, make_trainable
from packtool.train.model.memory import model_without_weights
from packtool.train.model.precision import SavedPrecision, load_masters, loaded_dtype, precision_lines
from packtool.train.model.quantize import quantization_line
from packtool.train.model.sharding import (
    expert_sharding,
)
from packtool.train.model.unloaded import unloaded_line, unloaded_tensors
from packtool.train.prepare.run import Run


@dataclass(frozen=True)
class BuiltModel:
    """A model that is ready to train, and what its checkpoints need.

    Args:
        model: bare, or inside a LoRA adapter.
        saved: the precision in which checkpoints keep its weights.
        unloaded: tensors of the base model that the loaded model does not have, and their files.
    """

    model: PreTrainedModel | PeftModel
    saved: SavedPrecision
    unloaded: dict[str, str]


def build_model(
    run: Run, spec: InputSpec, dtype: torch.dtype, parallel: SequenceParallel | None, progress: Progress
) -> BuiltModel:
    """Load the model that a run trains, add its adapter, and compile its layers if the run asks for it.

    Args:
        dtype: of the computation.
        parallel: ranks that share sequences with this one; None for nobody.
        progress: is told which weights are loaded and in which precision.
    """
    # Adapters are drawn at random: alike on every rank, and in every run with this seed.
    set_seed(run.config.seed)
    weights = run.resume_point.weights
    computed_in, is_adapter = dtype, run.config.train_type == "lora"
    dtype = loaded_dtype(dtype, spec.config, run.config)
    experts = None
    if run.config.shares_experts:
        shape = model_without_weights(run.config, spec.config, dtype)
        experts = expert_sharding(shape, run.config, run.world, computed_in)
    model = load_model(
        # Which an adapter names as its base.
        weights if weights is not None and not is_adapter else place_of(run.config.model),
        spec.config,
        dtype=dtype,
        packing=run.config.removes_padding,
        attn_impl=run.config.attn_impl,
        parallel=parallel,
        quantization=run.config,
        experts=experts,
    )
    saved = SavedPrecision.of(spec.config, model)
    unloaded = {} if is_adapter else unloaded_tensors(model, run.source.files.directory)
    trained = make_trainable(model, run.config)
    if weights is not None and isinstance(trained, PeftModel):
        take_adapter(trained, weights)
    elif weights is not None:
        load_masters(trained, weights)
    if weights is not None:
        progress.note(f"weights are those of {weights}; optimizer, schedule and data begin anew")
    lines = (
        *precision_lines(trained, computed_in, run.config, saved.dtype),
        *unloaded_line(unloaded, run.config.model),
    )
    for line in (*lines, *quantization_line(trained, spec.config.model_type, run.config)):
        progress.note(line)
    if run.config.torch_compile:
        compile_layers(trained, run.config.torch_compile_backend)
    return BuiltModel(trained, saved, unloaded)
