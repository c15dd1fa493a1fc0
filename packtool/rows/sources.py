"""Resolve ``--dataset`` and ``--val-dataset`` to files: local, remote, from a hub, or by name in ``--dataset-info``.

Datasets of the Hugging Face hub are loaded with ``datasets``, models and datasets of ModelScope with ``modelscope``;
both use the local caches of these packages. ``dataset_info.json`` has LLaMA-Factory's format, with two additional keys
for loss scale and system prompt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, TypeVar

from packtool import storage
from packtool.config.data import ExportConfig
from packtool.config.mixture import amount_suffix, parse_amount
from packtool.config.settings import load_json, parse_yaml
from packtool.config.train import TrainConfig
from packtool.constants import DROPPED_NAME, MANIFEST_NAME, PACKS_MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT
from packtool.errors import ConfigError, DataError, did_you_mean
from packtool.rows.forms.columns import NAMES
from packtool.rows.forms.messages import TAG_NAMES
from packtool.rows.forms.prepared import TOKENS
from packtool.rows.forms.segments import PROMPT_FORMATS
from packtool.rows.modelscope_names import modelscope_remedy
from packtool.rows.source import KNOWN_FORMATS, Pairs, SourceSpec, format_of

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
    """Return the Arrow files of a Hugging Face dataset, downloaded if they are not in the local cache.

    Args:
        name: id, perhaps with ``:subset`` and ``:split``, or a folder with a copy of the dataset.
        subset, split: used if ``name`` has none; None for the default subset and for ``train``.
        folder: sub-directory of the dataset to read.

    Raises:
        DataError: the dataset does not exist, or the hub cannot be reached.
    """
    import datasets  # here, because it takes a second and most exports do not need it

    identifier = name
    if not os.path.isdir(name):
        identifier, subset_in_name, split_in_name = f"{name}::".split(":")[:3]  # "" for missing ones
        subset = subset_in_name or subset
        split = split_in_name or split
    split = split or "train"
    try:
        dataset = datasets.load_dataset(identifier, subset, split=split, data_dir=folder)
    except Exception as error:  # of the hub, the network, or the code that reads the dataset
        first_line = str(error).strip().partition("\n")[0]
        in_folder = f", folder {folder}" if folder else ""
        raise DataError(
            f"--dataset {name}: there is no such file, and the Hugging Face dataset {identifier} (subset "
            f"{subset or 'default'}, split {split}{in_folder}) cannot be loaded: {type(error).__name__}: {first_line}",
            "Check the path or id; id:subset:split selects a subset and a split. Without a network, HF_HUB_OFFLINE=1 "
            f"uses datasets downloaded before.{modelscope_remedy(identifier)}",
        ) from error
    files = [file["filename"] for file in dataset.cache_files]
    if not files:
        message = f"--dataset {name}: the datasets package stores this dataset without files"
        raise DataError(message, "Save it with save_to_disk, and pass that folder.")
    return files


C = TypeVar("C", ExportConfig, TrainConfig)

# Files of a model that export needs.
_MODEL_FILES_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "*.txt", "*.model"]
_DOWNLOAD_DATASET = "dataset_snapshot_download"


def with_local_copies(config: C) -> C:
    """Return the settings with ids replaced by folders downloaded from ModelScope, if ``--use-hf false`` is set.

    ConfigError if ``modelscope`` is not installed, or a model or dataset cannot be downloaded.
    """
    if config.use_hf is not False:
        return config
    changes: dict[str, Any] = {}
    if not os.path.isdir(config.model):
        patterns = {"allow_patterns": _MODEL_FILES_WITHOUT_WEIGHTS} if isinstance(config, ExportConfig) else {}
        changes["model"] = _download("--model", "snapshot_download", config.model, **patterns)
    changes["dataset"] = tuple(_downloaded_dataset("--dataset", name, config) for name in config.dataset)
    changes["val_dataset"] = tuple(_downloaded_dataset("--val-dataset", name, config) for name in config.val_dataset)
    return replace(config, **changes)


def _downloaded_dataset(option: str, argument: str, config: ExportConfig | TrainConfig) -> str:
    """Return a dataset argument with its ModelScope id replaced by a local folder; others unchanged."""
    name, mark, amount = argument.partition("#")
    is_local = storage.is_remote(name) or storage.exists(name) or format_of(name) is not None
    if is_local or hub_id(name) is None or (config.dataset_info and name.count("/") != 1):
        return argument
    if ":" in name:
        raise ConfigError(
            f"{option} {argument}: a subset or split of a ModelScope dataset cannot be selected",
            "Remove the colon and the text after it to read all files, or pass the files.",
        )
    return _download(option, _DOWNLOAD_DATASET, name) + mark + amount


def _download(option: str, function: str, name: str, **settings: Any) -> str:
    """Download a model or dataset with a function of ``modelscope.hub.snapshot_download``, and return its folder."""
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
        raise ConfigError(
            f"{option} {name}: there is no such directory, and it cannot be downloaded from ModelScope: {error}",
            "Check the name and the network connection, or pass a local directory.",
        ) from error


# Keys for the location of a dataset; the first with a value is used, as in LLaMA-Factory.
_LOCATION_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
_SELECTION_KEYS = ("subset", "split", "folder")
_PROMPT_FORMAT_KEYS = ("prompt_format", "prompt_format_without_input")
_ENTRY_KEYS = (
    *_LOCATION_KEYS,
    *_SELECTION_KEYS,
    *("formatting", "ranking", "num_samples", "columns", "tags"),
    "file_sha1",  # ignored, as in LLaMA-Factory
    *("loss_scale", "system", *_PROMPT_FORMAT_KEYS),  # only in packtool
)
_FORMATTINGS = (None, "alpaca", "sharegpt", "openai")
_TAG_KEYS = (*TAG_NAMES, "role_tag", "content_tag")
# LLaMA-Factory's names of alpaca's columns, and packtool's.
_ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_PREFERENCE_COLUMNS = ("kto_tag", "chosen", "rejected")
_COLUMN_KEYS = tuple(dict.fromkeys((*NAMES, "prompt", *_PREFERENCE_COLUMNS)))


class DatasetInfo:
    """The ``entries`` of a ``dataset_info.json`` by name, which ``get`` checks.

    Args:
        path: the file, or its directory; paths in the file are relative to the directory.
        prefers_modelscope: for entries with both, use ``ms_hub_url`` instead of ``hf_hub_url``.

    Raises:
        ConfigError: the file is not a JSON object.
        StorageError: the file cannot be read.
    """

    def __init__(self, path: str, prefers_modelscope: bool = False) -> None:
        self.prefers_modelscope = prefers_modelscope
        if storage.is_directory(path):
            path = storage.join(path, "dataset_info.json")
        self.path, self._label = path, f"--dataset-info {storage.masked(path)}"
        try:
            entries = load_json(storage.read_bytes(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self._label}: the file is not JSON: {error}") from error
        if not isinstance(entries, dict):
            raise ConfigError(f"{self._label}: the file must contain an object with a dataset for each key")
        self.entries: dict[str, Any] = entries

    def get(self, name: str) -> Mapping[str, Any] | None:
        """Return the entry of a dataset; None if there is none.

        If the entry is invalid, ConfigError lists all of its problems.
        """
        if name not in self.entries:
            return None
        entry = self.entries[name]
        if not isinstance(entry, dict):
            raise ConfigError(f"{self._label}: {name!r} is a {type(entry).__name__}, not an object")
        problems = _unknown_keys(f"{name!r}", entry, _ENTRY_KEYS)
        problems += _unknown_keys(f"{name!r}, columns", _mapping(entry, "columns"), _COLUMN_KEYS)
        problems += _unknown_keys(f"{name!r}, tags", _mapping(entry, "tags"), _TAG_KEYS)
        problems += [f"{name!r}{problem}" for problem in _entry_problems(entry)]
        if problems:
            raise ConfigError.from_problems([f"{self._label}: {problem}" for problem in problems])
        return entry


def _columns_of_entry(entry: Mapping[str, Any]) -> Pairs:
    """Return (packtool's name, the file's name) for the ``columns`` of an entry, which use LLaMA-Factory's names."""
    columns = dict(_mapping(entry, "columns"))
    has_messages = entry.get("formatting") == "sharegpt" or "messages" in columns
    if has_messages or not columns.keys() & {"prompt", "query", "response"}:
        return tuple(columns.items())
    if "prompt" not in columns and "query" in columns and entry.get("formatting") != "alpaca":
        return tuple(columns.items())  # "query" without "prompt" has packtool's meaning
    named = {_ALPACA_COLUMNS.get(name, name): column for name, column in columns.items()}
    # As in LLaMA-Factory, a column "input" is ignored unless the entry names it.
    return tuple({"input": "", **named}.items())


def _prompt_format(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the formats of questions with and without an input; () if the entry has none."""
    formats = [text for key in _PROMPT_FORMAT_KEYS if (text := entry.get(key))]
    return tuple(PROMPT_FORMATS.get(formats[0], formats)) if len(formats) == 1 else tuple(formats)


def _location_key(entry: Mapping[str, Any]) -> str:
    """Return the key for the location of an entry's dataset; "" if it has none."""
    return next((key for key in _LOCATION_KEYS if entry.get(key)), "")


def _mapping(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key of an entry; an empty one for another value, which ``_entry_problems`` reports."""
    value = entry.get(key)
    return value if isinstance(value, dict) else {}


def _unknown_keys(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    return [
        f"{where}: unknown key {key!r}{did_you_mean(key, known) or '; known keys are ' + ', '.join(known)}"
        for key in values
        if key not in known
    ]


def _entry_problems(entry: Mapping[str, Any]) -> list[str]:
    """Return the problems of an entry's values, each as the rest of a sentence that begins with the entry's name."""
    problems = _location_problems(entry)
    preference_columns = [key for key in _PREFERENCE_COLUMNS if key in _mapping(entry, "columns")]
    if entry.get("ranking") or preference_columns:
        setting = "ranking" if entry.get("ranking") else f"the columns {', '.join(preference_columns)}"
        problems.append(f" has {setting}: preference data is not supported, only supervised data")
    if entry.get("formatting") not in _FORMATTINGS:
        problems.append(f" has formatting {entry['formatting']!r}; it must be alpaca, sharegpt or openai")
    for key in ("columns", "tags"):
        value = entry.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            problems.append(f": {key} must be an object whose values are text")
    for key in (*_LOCATION_KEYS, *_SELECTION_KEYS, "loss_scale", "system", *_PROMPT_FORMAT_KEYS):
        if entry.get(key) is not None and not isinstance(entry[key], str):
            problems.append(f": {key} is {entry[key]!r}, not text")
    for key in _PROMPT_FORMAT_KEYS:
        value = entry.get(key)
        takes_name = key == "prompt_format"
        is_name = takes_name and value in PROMPT_FORMATS
        if isinstance(value, str) and "{instruction}" not in value and not is_name:
            names = f" or be one of {', '.join(PROMPT_FORMATS)}" if takes_name else ""
            problems.append(f": {key} {value!r} must contain {{instruction}}{names}")
    with_input, without_input = _PROMPT_FORMAT_KEYS
    if entry.get(without_input) and not entry.get(with_input):
        problems.append(f" has {without_input} without {with_input}")
    num_samples = entry.get("num_samples")
    is_count = isinstance(num_samples, int) and not isinstance(num_samples, bool) and num_samples >= 1
    if num_samples is not None and not is_count:
        problems.append(f": num_samples is {num_samples!r}, not a positive integer")
    return problems


def _location_problems(entry: Mapping[str, Any]) -> list[str]:
    """Return the problems of an entry's location, split, subset and folder, as ``_entry_problems`` does."""
    location_key = _location_key(entry)
    problems: list[str] = []
    if not location_key:
        problems.append(" needs one of file_name, cloud_file_name, hf_hub_url and ms_hub_url")
    if location_key == "om_hub_url":
        problems.append(
            " has om_hub_url: the openMind hub is not supported; download the dataset and set file_name to its path"
        )
    if location_key == "script_url":
        problems.append(
            " has script_url: loading scripts are not supported; save the script's rows as .jsonl and set file_name "
            "to that path"
        )
    if location_key in ("cloud_file_name", "file_name"):
        for key in ("subset", "split"):
            # Files have no splits, so all of their rows are the split train.
            allowed = (None, "", "train") if key == "split" else (None, "")
            if entry.get(key) not in allowed:
                problems.append(
                    f" has {key} {entry[key]!r}, which is only for datasets of a hub; remove {key} and set "
                    f"{location_key} to the files of that {key}"
                )
    folder = entry.get("folder")
    if isinstance(folder, str) and (folder.startswith(("/", "~")) or ".." in folder.split("/")):
        problems.append(f" has folder {folder!r}: it must be a sub-directory of the dataset")
    return problems


_WILDCARD = re.compile(r"[*?[]")
_HIDDEN = re.compile(r"(?:^|[/\\])\.")
# Files without rows. DROPPED_NAME is the only file in the output directory of an export that dropped every row.
_INFO_NAME, _DICT_NAME, _STATE_NAME = "dataset_info.json", "dataset_dict.json", "state.json"
_METADATA_NAMES = (_INFO_NAME, "dataset_infos.json", _DICT_NAME, PACKS_MANIFEST_NAME, DROPPED_NAME)
# Files that only caches, finished or not, and training runs have.
_OUTPUT_MARKERS = (MANIFEST_NAME, ".tasks/export.json", "history/run.json")


def sources_of(config: ExportConfig) -> list[SourceSpec]:
    """Return the files of rows in the order of the arguments, those of the val split last.

    An argument is the first of these that exists: a name in ``--dataset-info``, a file or folder, a pattern, an id of
    the hub. At its end, ``#1000``, ``#20%`` or ``#2.5x`` draws that number, fraction or multiple of its rows, and
    ``#first1000`` or ``#first20%`` takes the first ones, unless a file has exactly this name. Folders and patterns skip
    ``config.output_dir``, caches and training runs.

    Raises:
        ConfigError: ``--dataset-info`` or ``--columns`` is invalid.
        DataError: an argument does not exist, or has no files of rows.
        StorageError: a store cannot be read.
    """
    info = DatasetInfo(config.dataset_info, prefers_modelscope=config.use_hf is False) if config.dataset_info else None
    common = SourceSpec(
        path="",  # replaced below, like the name, split and group of each argument
        columns=_columns(config.columns),
        formatting=TOKENS if config.TAKES_TOKENS else None,
        media_root=config.media_root,
        system=config.system or None,
        media_access=config.media_access,
        max_media_bytes=config.max_media_bytes,
        max_media_failures=config.max_media_failures,
        max_row_bytes=config.max_row_bytes,
    )
    arguments = [(name, "--dataset", TRAIN_SPLIT) for name in config.dataset]
    arguments += [(name, "--val-dataset", VAL_SPLIT) for name in config.val_dataset]
    specs: list[SourceSpec] = []
    for group, (name, option, split) in enumerate(arguments):
        paths, spec_fields = _resolve(name, option, info, common)
        if not config.per_dataset_loss_scale:
            spec_fields["loss_scale"] = None
        spec = replace(common, name=name, split=split, group=group, **spec_fields)
        if config.output_dir:
            output = f"{storage.absolute(storage.normalize(config.output_dir)).rstrip('/')}/"
            # If all files are in the output directory, the user means them.
            paths = [path for path in paths if not storage.absolute(path).startswith(output)] or paths
        specs += [spec.replaced(path=path) for path in paths]
    return specs


def unread_splits(config: ExportConfig) -> list[str]:
    """Return a message for each saved ``DatasetDict`` in ``--dataset`` of which only one split is read."""
    messages = []
    arguments = {storage.normalize(argument) for argument in (*config.dataset, *config.val_dataset)}
    for name in config.dataset:
        path = name if _exists(name) else _without_amount(name)
        if not _exists(storage.join(path, _DICT_NAME)):
            continue
        used_split, splits = _split_of(path, "--dataset")
        unused_splits = [split for split in dict.fromkeys(splits) if split != used_split]
        # The folder of another split may be an argument of its own.
        unread = [split for split in unused_splits if storage.normalize(storage.join(path, split)) not in arguments]
        if unread:
            messages.append(
                f"{storage.masked(path)}: only the split {used_split} is read, not {', '.join(unread)}; to use it for "
                f"validation, add --val-dataset {storage.masked(storage.join(path, unread[0]))}"
            )
    return messages


def _resolve(
    argument: str, option: str, info: DatasetInfo | None, common: SourceSpec
) -> tuple[list[str], dict[str, Any]]:
    """Return the files of one argument of ``option``, and the fields of their specs that differ from ``common``."""
    name = _FIRST.sub("#", argument)
    amount_text = amount_suffix(name)  # the text after the #
    sampling: dict[str, Any] = {}
    if amount_text and not (info and name in info.entries) and not _exists(name):
        try:
            amount = parse_amount(amount_text)
        except ValueError as error:
            raise ConfigError(f"{option} {argument}: {error}", "Write a number of at least 1 after the #.") from error
        name = _without_amount(name)
        if amount.kind == "samples":
            sampling["num_sampled"] = int(amount.number)
        else:
            sampling["times_sampled"] = amount.number
        sampling["takes_first"] = _FIRST.search(argument) is not None
    entry = None if info is None else info.get(name)
    if info is None or entry is None:
        return _files(name, option, info), sampling
    # The form of OpenAI's messages is detected by their keys.
    formatting = "sharegpt" if entry.get("formatting") == "openai" else entry.get("formatting")
    fields = {
        "num_sampled": None if "times_sampled" in sampling else entry.get("num_samples"),
        "columns": common.columns or _columns_of_entry(entry),
        "tags": tuple(_mapping(entry, "tags").items()),
        "formatting": formatting or common.formatting,
        "loss_scale": entry.get("loss_scale"),
        "system": entry.get("system") or common.system,
        "prompt_format": _prompt_format(entry),
    }
    return _files_of_entry(entry, info, option, name), fields | sampling


# In front of an amount at the end of an argument: #first1000, #first20%.
_FIRST = re.compile(r"#first(?=\d[\d.]*%?$)")


def _without_amount(name: str) -> str:
    """Return an argument without ``#1000`` or similar at its end."""
    name = _FIRST.sub("#", name)
    text = amount_suffix(name)
    return name[: -len(text) - 1] if text else name


def _files_of_entry(entry: Mapping[str, Any], info: DatasetInfo, option: str, name: str) -> list[str]:
    """Return the files of dataset ``name``, an entry of ``info``; ``option`` is for messages."""
    subset, split, folder = (entry.get(key) or None for key in _SELECTION_KEYS)
    location_key = _location_key(entry)
    if location_key == "hf_hub_url" and info.prefers_modelscope and entry.get("ms_hub_url"):
        location_key = "ms_hub_url"
    location = entry[location_key]
    if location_key == "ms_hub_url":
        downloaded_folder = _download(f"{option} {name}:", _DOWNLOAD_DATASET, location)
        return hub_files(downloaded_folder, subset, split, folder)
    if location_key == "hf_hub_url":
        return hub_files(location, subset, split, folder)
    if location_key == "file_name":
        location = storage.join(storage.parent(info.path), location)
    if folder is None:
        return _files(location, option, None)
    if not storage.is_directory(location):
        raise DataError(
            f"{option} {name}: its --dataset-info entry has the folder {folder!r}, but {storage.masked(location)} is "
            "not a directory",
            "Remove folder, or set file_name to a directory.",
        )
    return _files(storage.join(location, folder), option, None)


def _exists(name: str) -> bool:
    return not name.startswith(HUB_PREFIX) and storage.exists(name)


def _files(name: str, option: str, info: DatasetInfo | None) -> list[str]:
    """Return the files of a path, pattern or hub id; ``info`` is only used for the error if there are no files."""
    if _exists(name):
        path = storage.normalize(name)
        return _files_in(path, option) if storage.is_directory(path) else [path]
    label = storage.masked(name)
    wildcard = _WILDCARD.search(name)
    if wildcard and not name.startswith("http"):
        files = _files_of_pattern(name, storage.parent(name[: wildcard.start()]), option)
        if not files:
            raise DataError(f"{option} {label}: no file of rows matches", f"Supported are {KNOWN_FORMATS}.")
        return files
    has_hub_prefix = name.startswith(HUB_PREFIX)
    identifier = hub_id(name) if has_hub_prefix or not storage.is_remote(name) else None
    if identifier is not None and (has_hub_prefix or format_of(name) is None):
        return hub_files(identifier)
    if info is not None:
        raise DataError(
            f"{option} {label}: there is no such file, and no such name in --dataset-info"
            f"{did_you_mean(name, info.entries)}",
            "Check the path or the name.",
        )
    remedy = "Check the path."
    if format_of(name) is None and "/" not in name:
        remedy = "Check the path; for a name in LLaMA-Factory's dataset_info.json, add --dataset-info DIR."
    raise DataError(f"{option} {label}: there is no such file", remedy)


def _files_of_pattern(pattern: str, folder: str, option: str) -> list[str]:
    """Return the files of rows that match a pattern or are in matching folders; ``folder`` is above all matches."""
    is_output = _output_finder(folder)
    files: list[str] = []
    for path in storage.glob(pattern):
        if is_output(path):
            continue
        if storage.is_directory(path):
            files += _files_in(path, option)
        elif format_of(path) and not storage.name(path).startswith(".") and not _is_metadata(path):
            files.append(path)
    return list(dict.fromkeys(files))  # a pattern with ** matches directories and the files in them


def _output_finder(folder: str) -> Callable[[str], bool]:
    """Return a function that tells whether a path is, or is inside of, a cache or a training run below a folder."""

    @cache
    def is_output(path: str) -> bool:
        if any(storage.exists(storage.join(path, marker)) for marker in _OUTPUT_MARKERS):
            return True
        return path.startswith(folder) and path != folder and is_output(storage.parent(path))

    return is_output


def _files_in(folder: str, option: str) -> list[str]:
    """Return the files of rows below a folder: those that its metadata list, for a saved dataset or packs, else all."""
    names = storage.list_names(folder)
    label = storage.masked(folder)
    if MANIFEST_NAME in names:
        raise DataError(
            f"{option} {label} is a cache written by packtool export, not rows", "Pass it to packtool train instead."
        )
    if _DICT_NAME in names:
        split, _ = _split_of(folder, option)
        return _files_in(storage.join(folder, split), option)
    if _STATE_NAME in names and _INFO_NAME in names:  # written by ``save_to_disk``
        state = _json(storage.join(folder, _STATE_NAME), option)
        files = [storage.join(folder, file["filename"]) for file in state.get("_data_files") or []]
        if not files:
            raise DataError(f"{option} {label}: its {_STATE_NAME} lists no data files", "Save the dataset again.")
        return files
    if PACKS_MANIFEST_NAME in names:
        manifest = _json(storage.join(folder, PACKS_MANIFEST_NAME), option)
        pack_names = [file.get("file") for file in manifest.get("files") or [] if isinstance(file, dict)]
        # Only the last part of a name is used, so that the manifest cannot name files elsewhere.
        files = [storage.join(folder, storage.name(name)) for name in pack_names if isinstance(name, str)]
        if not files:
            problem = f"{option} {label}: its {PACKS_MANIFEST_NAME} lists no files of packs"
            raise DataError(problem, "Write the packs again, or pass their files.")
        return files
    paths = list(storage.walk(folder))
    # Folders of caches and training runs, with a slash at the end.
    output_folders = tuple(
        path.removesuffix(marker) for path in paths for marker in _OUTPUT_MARKERS if path.endswith(f"/{marker}")
    )
    files = []
    for path in paths:
        is_hidden = _HIDDEN.search(path[len(folder) :]) is not None
        if format_of(path) and not is_hidden and not _is_metadata(path) and not path.startswith(output_folders):
            files.append(path)
    if not files:
        contents = ", ".join(path[len(folder) :].lstrip("/\\") for path in paths[:8]) or "nothing"
        message = f"{option} {label}: the folder has no files of rows; it contains {contents}"
        raise DataError(message, f"Supported are {KNOWN_FORMATS}.")
    return files


def _is_metadata(path: str) -> bool:
    name = storage.name(path)
    if name == _STATE_NAME:
        return storage.exists(storage.join(storage.parent(path), _INFO_NAME))
    return name in _METADATA_NAMES


def _split_of(folder: str, option: str) -> tuple[str, list[str]]:
    """Return the split of a saved ``DatasetDict`` to read (train, or the only one), and all splits."""
    splits = _json(storage.join(folder, _DICT_NAME), option).get("splits") or []
    if "train" in splits:
        return "train", splits
    if len(splits) != 1:
        raise DataError(
            f"{option} {storage.masked(folder)} has no split train; its splits are {', '.join(splits) or 'none'}",
            "Pass the folder of one split.",
        )
    return str(splits[0]), splits


def _json(path: str, option: str) -> dict[str, Any]:
    """Read a JSON object; return {} for another JSON value."""
    try:
        value = load_json(storage.read_bytes(path))
    except ValueError as error:
        raise DataError(f"{option}: {storage.masked(path)} is not JSON: {error}", "Save the dataset again.") from error
    return value if isinstance(value, dict) else {}


def _columns(items: Sequence[str]) -> Pairs:
    """Parse the items of ``--columns``: each is ``query=q``, or JSON such as ``{"query": "q", "response": "a"}``."""
    pairs: list[tuple[str, str]] = []
    for item in items:
        if item.lstrip().startswith("{"):
            import yaml  # here, because most runs do not need it; it parses JSON, and mappings as YAML writes them

            try:
                values = parse_yaml(item)
            except yaml.YAMLError as error:
                raise ConfigError(f"--columns {item}: invalid JSON: {error}") from error
            if not isinstance(values, dict) or not all(isinstance(text, str) for text in chain(*values.items())):
                raise ConfigError(f"--columns {item}: the JSON must be an object whose values are column names")
            pairs += values.items()
        else:
            name, equals, column = item.partition("=")
            if not equals or not name:
                raise ConfigError(
                    f"--columns {item}: it must be name=column", "For example --columns query=title response=body"
                )
            pairs.append((name, column))
    return tuple(pairs)
