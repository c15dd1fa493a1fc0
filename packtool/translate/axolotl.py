"""Translation of axolotl's keys that the tables cannot translate: rows, sharding and sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from packtool.translate.names import Translation, is_true, split_list

# Keys of a data set with names of columns, and packtool's names of these columns.
_COLUMNS = {
    "field_messages": "messages",
    "field": "text",
    "text_column": "text",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_tools": "tools",
}


def translate_axolotl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate keys in ``values``, and remove them, or replace their values by some that the tables translate."""
    for plugin in split_list(values.pop("plugins", None) or []):
        translation.translate_key("plugins", plugin)
    for name in ("datasets", "pretraining_dataset", "test_datasets"):
        _axolotl_datasets(translation, name, values.pop(name, None))
    for name in ("qat", "model_config"):
        if isinstance(values.get(name), dict):
            translation.translate_object(name, values.pop(name))
    _axolotl_sizes(translation, values)
    _axolotl_fsdp(translation, values)
    _axolotl_embeddings(translation, values)


def _axolotl_sizes(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``batch_size``, the samples per step of a process, and processes that divide each matrix."""

    def size(name: str) -> int:
        return int(translation.number(name, values.get(name), 1)) or 1

    if values.get("batch_size") is not None and not values.get("gradient_accumulation_steps"):
        accumulation_steps = max(1, size("batch_size") // size("micro_batch_size"))
        translation.set("gradient_accumulation_steps", accumulation_steps, "batch_size / micro_batch_size")
    values.pop("batch_size", None)
    if size("tensor_parallel_size") > 1:  # the same batches as with processes that divide sequences
        values["tensor_parallel_size"] = size("tensor_parallel_size") * size("context_parallel_size")
        values.pop("context_parallel_size", None)


def _axolotl_fsdp(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``fsdp_config`` into the options of ``--fsdp``, which expert parallelism does not need."""
    config = values.get("fsdp_config")
    num_expert_ranks = translation.number("expert_parallel_size", values.get("expert_parallel_size"), 1)
    if not isinstance(config, dict) or num_expert_ranks >= 2:
        return
    del values["fsdp_config"]
    shard = "full_shard" if is_true(config.get("reshard_after_forward", True)) else "shard_grad_op"
    options = split_list(values.get("fsdp") or [shard])
    if is_true(config.get("offload_params")) or is_true(config.get("fsdp_offload_params")):
        options.append("offload")
    if config:
        values["fsdp"] = options


def _axolotl_embeddings(translation: Translation, values: dict[str, Any]) -> None:
    """Refuse embeddings that would grow: those of a local model whose number of rows is no multiple of 32."""
    name = "resize_token_embeddings_to_32x"
    config = translation.source.model_config
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    if is_true(values.get(name)) and isinstance(size, int) and size % 32:
        del values[name]
        translation.refuse(name, f"it adds {-size % 32} rows to the embeddings, packtool adds none; remove it")


def _axolotl_datasets(translation: Translation, name: str, value: Any) -> None:
    """Translate key ``datasets`` or similar: a path, or a list of objects with ``path``, ``type`` and column names."""
    entries = [{"path": value}] if isinstance(value, str) else value or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        translation.refuse(name, "expected a list of objects with path and type")
        return
    paths = []
    for entry in entries:
        paths += _dataset_arguments(translation, name, entry)
        translation.translate_object("datasets", entry)
    if paths:
        translation.set("val_dataset" if name == "test_datasets" else "dataset", paths, name)
    renamed_columns = _renamed_columns(entries)
    if renamed_columns:
        translation.set("columns", renamed_columns, f"{name}, field_*")


def _renamed_columns(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return values of ``--columns``, such as ``text=body``, for the columns of data sets that are renamed.

    A column is listed if any data set has an unusual name for it, and then with all of its names.
    """
    names_by_column: dict[str, set[str]] = {}
    for entry in entries:
        for key in _COLUMNS.keys() & entry.keys():
            column = _COLUMNS[key]
            names_by_column.setdefault(column, set()).add(entry[key] or column)
    pairs = []
    for column, names in sorted(names_by_column.items()):
        is_renamed = bool(names - {column, "conversations"})
        if is_renamed:
            pairs += [f"{column}={each}" for each in sorted(names)]
    return pairs


def _dataset_arguments(translation: Translation, name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the values of ``--dataset`` for an entry: files, or a hub id with subset, split and number of rows."""
    path, split = str(entry.get("path", "")), str(entry.get("split") or "")
    match = re.fullmatch(r"(\w*)(?:\[:(\d+%?)\])?", split)
    if match is None:
        translation.refuse(f"{name}, split: {split}", "only the first rows can be selected, as in train[:20%]")
        return []
    amount = f"#first{match[2]}" if match[2] else ""
    files = [file for file in split_list(entry.get("data_files") or []) if os.path.exists(file)]
    if files:
        return [f"{file}{amount}" for file in files]
    is_local = os.path.exists(path) or path.endswith((".json", ".jsonl", ".parquet", ".csv", ".txt"))
    selection = "" if is_local else f":{entry.get('name') or ''}:{match[1]}".rstrip(":")
    return [f"{path}{selection}{amount}"]
