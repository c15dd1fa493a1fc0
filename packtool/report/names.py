"""One name for one thing in every JSON document: ``num_`` before what is counted, as the library's own fields have it.

Tokens are the exception, as in log lines: ``tokens``, ``target_tokens``, ``media_tokens``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "rows": "num_rows",
    "samples": "num_samples",
    "kept": "num_samples",
    "kept_by_split": "num_samples_by_split",
    "sequences": "num_samples",
    "exact_samples": "num_exact_samples",
    "left_out": "filtered",
    "packs": "num_packs",
    "capacity": "packing_length",
    "shards": "num_shards",
    "files": "num_files",
    "missing_shards": "num_missing_shards",
    "micro_batches": "num_micro_batches",
    "empty_micro_batches": "num_empty_micro_batches",
    "processes": "num_processes",
    "num_tokens": "tokens",
}
# What a split of a cache counts as rows are its samples.
_OF_A_SPLIT = {"rows": "num_samples"}
# By name of what they belong to: a split, a channel. Their own names are the user's.
_FURTHER = {"splits": _OF_A_SPLIT, "channels": {}, "sources": {}}


def named(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures under the names that they have in all JSON; lists keep theirs, for they are no counts."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if name in _FURTHER and isinstance(value, Mapping):
            value = {key: _renamed(item, _NAMES | _FURTHER[name]) for key, item in value.items()}
        found |= _renamed({name: value}, _NAMES)
    return found


def _renamed(figures: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name if isinstance(value, list) else names.get(name, name): value for name, value in figures.items()}
