"""Models and data sets of ModelScope, through its own package and that one's cache on this machine."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeVar

from packtool import storage
from packtool.config.export import ExportConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.rows.file_formats import format_of
from packtool.rows.hub import hub_id

C = TypeVar("C", ExportConfig, TrainConfig)

# What encoding reads of a model.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


def with_local_copies(config: C) -> C:
    """The same settings, with ids of ModelScope replaced by their copies here where ``--use-hf false`` asks for it.

    Raises:
        ConfigError: if the package is not installed, or ModelScope does not give what is named.
    """
    if config.use_hf is not False:
        return config
    changes: dict[str, Any] = {}
    if not os.path.isdir(config.model):
        small = {"allow_patterns": _SMALL_FILES} if isinstance(config, ExportConfig) else {}
        changes["model"] = _copy("--model", "snapshot_download", config.model, **small)
    for name in ("dataset", "val_dataset"):
        option = "--" + name.replace("_", "-")
        changes[name] = tuple(_set_of_rows(option, given, config) for given in getattr(config, name))
    return dataclasses.replace(config, **changes)


def _set_of_rows(option: str, given: str, config: ExportConfig | TrainConfig) -> str:
    name, mark, number = given.partition("#")
    is_local = storage.is_remote(name) or storage.exists(name) or format_of(name) is not None
    if is_local or hub_id(name) is None or (config.dataset_info and name.count("/") != 1):
        return given
    if ":" in name:
        raise ConfigError(
            f"{option} {given}: of ModelScope's sets all files are read, and no single subset or split",
            "Leave out what follows the colon, or give the files.",
        )
    return copy_of_rows(option, name) + mark + number


def copy_of_rows(option: str, name: str) -> str:
    """Folder on this machine with a copy of a set of rows of ModelScope.

    Args:
        option: that named the set, for messages.
        name: its id.

    Raises:
        ConfigError: if the package is not installed, or ModelScope does not give the set.
    """
    return _copy(option, "dataset_snapshot_download", name)


def _copy(option: str, function: str, name: str, **settings: Any) -> str:
    try:
        from modelscope.hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{option} {name}: ModelScope is asked for it (--use-hf false, or ms_hub_url in --dataset-info), and the "
            "package modelscope is not installed",
            "pip install modelscope, or leave out --use-hf (and USE_HF) to ask the Hugging Face hub.",
        ) from error
    try:
        return str(getattr(snapshot_download, function)(name, **settings))
    except Exception as error:  # of the hub and of the network
        raise ConfigError(
            f"{option} {name}: no such directory here, and ModelScope does not give it: {error}",
            "Give a local directory, or check the name and the connection.",
        ) from error
