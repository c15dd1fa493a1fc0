"""Tensors of a base model that its transformers class does not load, such as multi-token prediction (MTP) layers.

``config.json`` declares these layers and inference servers read them, but the class skips their tensors
(``_keys_to_ignore_on_load_unexpected``), so ``save_pretrained`` would write a model without them. Every saved model
gets them from the base model, unchanged.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

_MAX_SHOWN_NAMES = 3


def unloaded_tensors(model: PreTrainedModel, directory: str) -> dict[str, str]:
    """Return the tensors of a checkpoint that ``from_pretrained`` does not load, with the file of each.

    Args:
        model: of the checkpoint's class, on any device, without adapters or wrappers.
        directory: of the checkpoint.
    """
    names = _names_in_model(model, directory)
    return {name: path for name, path in tensor_files(directory).items() if names[name] is None}


def restore_long_tensors(model: PreTrainedModel, directory: str) -> None:
    """Restore weights that a 16-bit checkpoint stores in float32 and that loading has rounded."""
    weights, files = model.state_dict(), tensor_files(directory)
    names = _names_in_model(model, directory, converts=False)
    for path in sorted({path for path in files.values() if path.endswith(".safetensors")}):
        with safe_open(path, "pt") as file:
            for name, tensor in _header(path).items():
                in_model = names.get(name)
                if tensor["dtype"] == "F32" and in_model and weights[in_model].dtype in (torch.bfloat16, torch.float16):
                    model.get_parameter_or_buffer(in_model).data = file.get_tensor(name)


def _names_in_model(model: PreTrainedModel, directory: str, *, converts: bool = True) -> dict[str, str | None]:
    """Return the weight that each tensor of a checkpoint becomes, or a part of; None for tensors that are not loaded.

    Args:
        converts: include weights that are converted from tensors, and not only renamed.
    """
    weights = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter) and converts]

    def name_in_model(name: str) -> str | None:
        # In the order of from_pretrained: by the class's rules, then by the prefix alone.
        rules: tuple[tuple[list[WeightRenaming], list[WeightConverter]], ...] = ((renamings, converters), ([], []))
        renamed = (rename_source_key(name, *each, model.base_model_prefix, weights)[0] for each in rules)
        return next((each for each in renamed if each in weights), None)

    return {name: name_in_model(name) for name in tensor_files(directory)}


def unloaded_line(unloaded: Mapping[str, str], base: str) -> Iterator[str]:
    """Name the tensors that saved models keep from their base model, if there are any."""
    if unloaded:
        names = ", ".join(sorted(unloaded)[:_MAX_SHOWN_NAMES]) + (", ..." if len(unloaded) > _MAX_SHOWN_NAMES else "")
        yield f"saved models keep {len(unloaded):,} tensors of {base} that transformers does not load: {names}"


def add_unloaded(output: str, unloaded: Mapping[str, str]) -> None:
    """Add tensors to a saved model as further shards, and rewrite its index.

    Tensors that the model already has stay unchanged. Reads at most one shard of the base model at a time.

    Args:
        output: directory of the saved model; unchanged if it has no safetensors.
        unloaded: names of tensors, and the file of each.
    """
    saved = tensor_files(output)
    names_by_file = defaultdict[str, list[str]](list)
    for name, path in unloaded.items():
        if name not in saved:
            names_by_file[path].append(name)
    if not saved or not names_by_file:
        return
    shards = sorted(set(saved.values()))
    num_shards = len(shards) + len(names_by_file)
    paths = [os.path.join(output, f"model-{n:05d}-of-{num_shards:05d}.safetensors") for n in range(1, num_shards + 1)]
    for shard, path in zip(shards, paths, strict=False):
        os.replace(shard, path)
    for (source, names), path in zip(names_by_file.items(), paths[len(shards) :], strict=True):
        _copy_tensors(source, names, path)
    _write_index(output, paths)


def tensor_files(directory: str) -> dict[str, str]:
    """Return the file of each tensor of a model by the tensor's name; empty if transformers would find none."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        path = os.path.join(directory, single)
        if os.path.isfile(path):
            names = _header(path) if single == SAFE_WEIGHTS_NAME else load_state_dict(path, map_location="meta")
            return dict.fromkeys(names, path)
        path = os.path.join(directory, index)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                files: dict[str, str] = json.load(file)["weight_map"]
            return {name: os.path.join(directory, shard) for name, shard in files.items()}
    return {}


def _copy_tensors(source: str, names: list[str], path: str) -> None:
    if source.endswith(".safetensors"):
        with safe_open(source, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in names}
    else:
        state = load_state_dict(source)
        tensors = {name: state[name].contiguous() for name in names}
    save_file(tensors, path, {"format": "pt"})


def _write_index(output: str, shards: list[str]) -> None:
    headers = {os.path.basename(path): _header(path) for path in shards}
    tensors = [tensor for header in headers.values() for tensor in header.values()]
    metadata = {
        "total_parameters": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "total_size": sum(end - begin for begin, end in (tensor["data_offsets"] for tensor in tensors)),
    }
    weight_map = {name: shard for shard, header in headers.items() for name in header}
    with open(os.path.join(output, SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as file:
        json.dump({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, file, indent=2)
        file.write("\n")


def _header(path: str) -> dict[str, Any]:
    """Return type, shape and offsets of each tensor in a safetensors file, by name."""
    with open(path, "rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header
