"""Datasets and models of the Hugging Face hub and of ModelScope.

ms-swift names the datasets of its registry by their ModelScope ids. ``modelscope_names.tsv`` lists their Hugging Face
ids.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib import resources
from typing import Any, TypeVar

from packtool import storage
from packtool.config.data import ExportConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, DataError
from packtool.rows.source import format_of

HUB_PREFIX = "hf::"
_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w. /-]*){0,2}")
_ID_WITH_PREFIX = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?::[\w. /-]*){0,2}")


def hub_id(name: str) -> str | None:
    """Return the hub id in a name such as ``owner/set:subset:split`` or ``hf::set``; None if it cannot be one."""
    if name.startswith(HUB_PREFIX):
        name = name.removeprefix(HUB_PREFIX)
        return name if _ID_WITH_PREFIX.fullmatch(name) else None
    return name if _ID.fullmatch(name) and not name.startswith(".") else None


def hub_files(name: str, subset: str | None = None, split: str | None = None, folder: str | None = None) -> list[str]:
    """Load a Hugging Face dataset, downloading it if necessary, and return the Arrow files of its local copy.

    Args:
        name: hub id, perhaps with ``:subset`` and ``:split``, which take precedence over the arguments; or a folder
            with a copy of the dataset.
        split: ``train`` by default.
        folder: sub-directory of the dataset to read.

    Raises:
        DataError: if the dataset cannot be loaded, for whatever reason.
    """
    import datasets  # here, because it takes a second and most exports do not need it

    parts = [name] if os.path.isdir(name) else name.split(":")
    dataset_id, subset_in_name, split_in_name, *_ = (*parts, "", "")
    subset = subset_in_name or subset
    split = split_in_name or split or "train"
    try:
        dataset = datasets.load_dataset(dataset_id, subset, split=split, data_dir=folder)
    except Exception as error:  # of the hub, the network, or the code that reads the dataset
        in_folder = f", folder {folder}" if folder else ""
        selection = f"{dataset_id} (subset {subset or 'default'}, split {split}{in_folder})"
        raise _cannot_load_error(name, dataset_id, selection, error) from error
    files = [file["filename"] for file in dataset.cache_files]
    if not files:
        message = f"--dataset {name}: the datasets package stores this dataset without files"
        raise DataError(message, "Save it with save_to_disk, and pass that folder.")
    return files


def _cannot_load_error(name: str, dataset_id: str, selection: str, error: Exception) -> DataError:
    """Return the error for a name that is neither a file nor a dataset of the hub."""
    first_line = str(error).strip().partition("\n")[0]
    return DataError(
        f"--dataset {name}: there is no such file, and the Hugging Face dataset {selection} cannot be loaded: "
        f"{type(error).__name__}: {first_line}",
        "Check the path or id; id:subset:split selects a subset and a split. Without a network, HF_HUB_OFFLINE=1 "
        f"uses datasets downloaded before.{modelscope_remedy(dataset_id)}",
    )


C = TypeVar("C", ExportConfig, TrainConfig)

# Files of a model that export needs.
_MODEL_FILES_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "*.txt", "*.model"]


def with_local_copies(config: C) -> C:
    """Download the model and the datasets of a configuration from ModelScope, if ``--use-hf false`` is set.

    Returns:
        The configuration with ModelScope ids replaced by the local folders of the downloads; paths are unchanged.
    """
    if config.use_hf is not False:
        return config
    is_export = isinstance(config, ExportConfig)
    changes: dict[str, Any] = {}
    if not os.path.isdir(config.model):
        patterns = {"allow_patterns": _MODEL_FILES_WITHOUT_WEIGHTS} if is_export else {}
        changes["model"] = download("--model", "snapshot_download", config.model, **patterns)
    dataset_fields = ["dataset", "val_dataset"]
    if is_export:
        dataset_fields.append("check_against")
    for name in dataset_fields:
        option = f"--{name.replace('_', '-')}"
        changes[name] = tuple(_downloaded_dataset(option, argument, config) for argument in getattr(config, name))
    return replace(config, **changes)


def _downloaded_dataset(option: str, argument: str, config: ExportConfig | TrainConfig) -> str:
    """Return a dataset argument with its ModelScope id replaced by a local folder; others unchanged."""
    name, mark, amount = argument.partition("#")
    is_local = storage.is_remote(name) or storage.exists(name) or format_of(name) is not None
    if is_local or hub_id(name) is None or (config.dataset_info and name.count("/") != 1):
        return argument
    if ":" in name:
        message = f"{option} {argument}: a subset or split of a ModelScope dataset cannot be selected"
        raise ConfigError(message, "Remove the colon and the text after it to read all files, or pass the files.")
    return download(option, "dataset_snapshot_download", name) + mark + amount


def download(option: str, function: str, name: str, **settings: Any) -> str:
    """Download a model or dataset from ModelScope, and return its local folder; ConfigError if that is impossible.

    Args:
        option: the option that names it, for messages.
        function: a function of ``modelscope.hub.snapshot_download``, which is called with ``name`` and ``settings``.
        name: ModelScope id.
    """
    try:
        from modelscope.hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{option} {name}: the package modelscope is not installed; it is needed for downloads from ModelScope "
            "(--use-hf false, or ms_hub_url in --dataset-info)",
            "Run pip install modelscope, or remove --use-hf false (or USE_HF) to use the Hugging Face hub.",
        ) from error
    try:
        return str(getattr(snapshot_download, function)(name, **settings))
    except Exception as error:  # of the hub or the network
        message = f"{option} {name}: there is no such directory, and it cannot be downloaded from ModelScope: {error}"
        raise ConfigError(message, "Check the name and the network connection, or pass a local directory.") from error


def modelscope_remedy(name: str) -> str:
    """Return how to get a dataset of ms-swift's registry, given its ModelScope id; "" for another name."""
    names = resources.files("packtool.rows").joinpath("modelscope_names.tsv").read_text(encoding="utf-8")
    other = dict(line.split("\t") for line in names.splitlines()).get(name)
    if other is None:
        return ""
    hugging_face = f"on the Hugging Face hub it is {other}; or " if other else ""
    return (
        f" {name} is a ModelScope id: {hugging_face}add --use-hf false, or download it with modelscope download "
        f"--dataset {name} --local_dir DIR and pass DIR."
    )
