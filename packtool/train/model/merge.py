"""``packtool merge``: merge an adapter into its base model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from packtool.batch.spec import model_config
from packtool.config.commands import MergeConfig
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.progress import Progress
from packtool.train.model.load import (
    add_unloaded_tensors,
    load_model,
    quiet_transformers,
    restore_float32_weights,
    unloaded_lines,
    unloaded_tensors,
)
from packtool.train.model.precision import SavedPrecision, checkpoint_dtype
from packtool.train.model.trainable import attach_adapter
from packtool.train.prepare.checkpoint import copy_processor, saving
from packtool.train.prepare.trained import TrainedModel, describe_non_adapter


@dataclass(frozen=True)
class MergeResult:
    """Result of merging an adapter: ``num_merged`` modules have changed weights, stored in ``dtype``."""

    output: str
    base_model: str
    adapter: str
    num_merged: int
    dtype: str


def merge_adapter(config: MergeConfig, progress: Progress) -> MergeResult:
    """Merge an adapter into its base model, and write the model with tokenizer, processor and settings.

    Each weight is summed in float32 and rounded once. Needs memory for the base model on the host, but no GPU.
    """
    trained = TrainedModel.find(config.adapter, config.base_model)
    if trained.adapter is None:
        raise ConfigError(f"--adapter {config.adapter} is not an adapter: {describe_non_adapter(config.adapter)}")
    output = config.output.rstrip("/")
    _check_is_empty(output)
    base_directory = ModelFiles.load(trained.base).directory

    with quiet_transformers():
        progress.note(f"base model: {trained.base}")
        base = _load_base(base_directory, config.torch_dtype)
        unloaded = unloaded_tensors(base.model, base_directory)  # which transformers does not load; copied unchanged
        merged, num_merged = _merge(base.model, trained.adapter)
        _convert_weights(merged, base.output_dtype, base.float32_names)

        with _new_directory(output) as directory:
            merged.save_pretrained(directory)
            add_unloaded_tensors(directory, unloaded)
            copy_processor(base_directory, directory)
            copy_processor(trained.adapter, directory)  # replaces the chat template by that of the training
        for line in unloaded_lines(unloaded, trained.base):
            progress.note(line)
    dtype_name = str(base.output_dtype).removeprefix("torch.")
    return MergeResult(output, trained.base, trained.adapter, num_merged, dtype_name)


class _BaseModel(NamedTuple):
    """A base model, and the precision to save it in, except the weights ``float32_names``, which stay in float32."""

    model: Any
    output_dtype: torch.dtype
    float32_names: Collection[str]


def _load_base(directory: str, torch_dtype: str) -> _BaseModel:
    """Load the base model in the precision of its checkpoint, and decide on that of the output (``--torch-dtype``)."""
    config = model_config(directory)
    # In the precision of the base model: the weights are rounded to that of the output after the merge.
    model = load_model(directory, config, dtype=checkpoint_dtype(config), packing=False)
    restore_float32_weights(model, directory)
    if torch_dtype == "auto":
        return _BaseModel(model, checkpoint_dtype(config), SavedPrecision.of(config, model).float32_names)
    return _BaseModel(model, getattr(torch, torch_dtype), float32_names=())


def _check_is_empty(output: str) -> None:
    """Raise a ConfigError unless a directory does not exist or is empty."""
    if os.path.exists(output) and (not os.path.isdir(output) or os.listdir(output)):
        raise ConfigError(f"--output {output} already exists and is not empty", "Give a new directory.")


@contextmanager
def _new_directory(path: str) -> Iterator[str]:
    """Yield a temporary directory, which becomes ``path`` at the end; errors of writing delete it (StorageError)."""
    incomplete = f"{path}.part"
    shutil.rmtree(incomplete, ignore_errors=True)
    with saving(incomplete, "Free some space, or give another --output; the adapter is unchanged."):
        yield incomplete
        os.replace(incomplete, path)


def _merge(model: Any, adapter: str) -> tuple[Any, int]:
    """Merge an adapter into a model, in place; return the model, and the number of modules with changed weights."""
    adapted: Any = attach_adapter(model, adapter)
    _untie(adapted.get_base_model())
    layers = [module for module in adapted.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:  # one at a time, because a layer is in float32 meanwhile
        _merge_layer(layer)
    return adapted.unload(), len(layers)


def _convert_weights(model: nn.Module, dtype: torch.dtype, kept_names: Collection[str]) -> None:
    """Convert all weights of a model except ``kept_names``, in place."""
    for name, parameter in model.named_parameters():
        if name not in kept_names:
            parameter.data = parameter.data.to(dtype)


def _untie(model: Any) -> None:
    """Give the head weights of its own if an adapter changes the head or the embeddings, which share their weights."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    embedding, head = (getattr(end, "base_layer", end) for end in ends)
    if [embedding, head] != ends and embedding.weight is head.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _merge_layer(layer: Any) -> None:
    """Add a layer's adapter to its weights in float32, and round the sum to the precision of each weight."""
    base: Any = layer.get_base_layer()
    dtypes = {name: parameter.dtype for name, parameter in base.named_parameters()}
    base.float()
    layer.merge()
    for name, parameter in base.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
