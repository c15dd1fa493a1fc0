"""Resolve ``--dataset`` and ``--val-dataset`` to files: local, remote, from a hub, or by name in ``--dataset-info``.

Datasets of the Hugging Face hub are loaded with ``datasets``, models and datasets of ModelScope with ``modelscope``;
both use the local caches of these packages. ``dataset_info.json`` has LLaMA-Factory's format, with two additional keys
for loss scale and system prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

from packtool import storage
from packtool.config.data import ExportConfig
from packtool.config.mixture import amount_suffix, parse_amount
from packtool.config.settings import load_json, parse_yaml
from packtool.constants import DROPPED_NAME, MANIFEST_NAME, PACKS_MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT
from packtool.errors import ConfigError, DataError, did_you_mean
from packtool.rows.forms.columns import NAMES
from packtool.rows.forms.messages import TAG_NAMES
from packtool.rows.forms.prepared import TOKENS
from packtool.rows.forms.segments import PROMPT_FORMATS
from packtool.rows.hubs import HUB_PREFIX, download, hub_files, hub_id
from packtool.rows.source import KNOWN_FORMATS, Pairs, SourceSpec, format_of

# Keys for the location of a dataset; the first with a value is used, as in LLaMA-Factory.
_LOCATION_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
_REFUSED_LOCATIONS = {
    "om_hub_url": "the openMind hub is not supported; download the dataset and set file_name to its path",
    "script_url": "loading scripts are not supported; save the script's rows as .jsonl and set file_name to that path",
}
_PROMPT_FORMAT_KEYS = ("prompt_format", "prompt_format_without_input")
_TEXT_KEYS = (*_LOCATION_KEYS, "subset", "split", "folder", "loss_scale", "system", *_PROMPT_FORMAT_KEYS)
# LLaMA-Factory's file_sha1 is ignored. loss_scale, system and prompt formats are only in packtool.
_ENTRY_KEYS = (*_TEXT_KEYS, "formatting", "ranking", "num_samples", "columns", "tags", "file_sha1")
_TAG_KEYS = (*TAG_NAMES, "role_tag", "content_tag")
# LLaMA-Factory's names of alpaca's columns, and packtool's.
_ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_PREFERENCE_COLUMNS = ("kto_tag", "chosen", "rejected")
_COLUMN_KEYS = tuple(dict.fromkeys((*NAMES, "prompt", *_PREFERENCE_COLUMNS)))


class DatasetInfo:
    """The ``entries`` of a ``dataset_info.json`` by name, which ``get`` checks; ConfigError if it is no JSON object.

    Args:
        path: the file, or its directory; paths in the file are relative to the directory.
        prefers_modelscope: for entries with both, use ``ms_hub_url`` instead of ``hf_hub_url``.
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
        """Return the entry of a dataset, None if there is none; ConfigError lists all problems of an invalid entry."""
        if name not in self.entries:
            return None
        entry = self.entries[name]
        if not isinstance(entry, dict):
            raise ConfigError(f"{self._label}: {name!r} is a {type(entry).__name__}, not an object")
        problems = [
            *_unknown_keys("", entry, _ENTRY_KEYS),
            *_unknown_keys(", columns", _mapping(entry, "columns"), _COLUMN_KEYS),
            *_unknown_keys(", tags", _mapping(entry, "tags"), _TAG_KEYS),
            *_location_problems(entry),
            *_value_problems(entry),
            *_prompt_format_problems(entry),
        ]
        if problems:
            raise ConfigError.from_problems([f"{self._label}: {name!r}{problem}" for problem in problems])
        return entry


def _columns_of_entry(entry: Mapping[str, Any]) -> Pairs:
    """Return (packtool's name, the file's name) for the ``columns`` of an entry, which use LLaMA-Factory's names."""
    columns, formatting = _mapping(entry, "columns"), entry.get("formatting")
    has_messages = formatting == "sharegpt" or "messages" in columns
    # "query" without "prompt" has packtool's meaning.
    has_query = "prompt" not in columns and "query" in columns and formatting != "alpaca"
    has_alpaca_names = not columns.keys().isdisjoint(_ALPACA_COLUMNS)
    if has_messages or has_query or not has_alpaca_names:
        return tuple(columns.items())
    file_names = {_ALPACA_COLUMNS.get(name, name): column for name, column in columns.items()}
    # As in LLaMA-Factory, a column "input" is ignored ("") unless the entry names it.
    return tuple({"input": "", **file_names}.items())


def _prompt_format(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the formats of questions with and without an input; () if the entry has none."""
    formats = [text for key in _PROMPT_FORMAT_KEYS if (text := entry.get(key))]
    return tuple(PROMPT_FORMATS.get(formats[0], formats)) if len(formats) == 1 else tuple(formats)


def _location_key(entry: Mapping[str, Any]) -> str:
    """Return the key for the location of an entry's dataset; "" if it has none."""
    return next((key for key in _LOCATION_KEYS if entry.get(key)), "")


def _mapping(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key of an entry; an empty one for another value, which ``_value_problems`` reports."""
    value = entry.get(key)
    return value if isinstance(value, dict) else {}


# The functions below return problems of an entry, each as the rest of a sentence that begins with the entry's name.


def _unknown_keys(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    return [
        f"{where}: unknown key {key!r}{did_you_mean(key, known) or '; known keys are ' + ', '.join(known)}"
        for key in values
        if key not in known
    ]


def _value_problems(entry: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the values of an entry: their types, an unknown formatting, preference data."""
    problems = _preference_problems(entry)
    if entry.get("formatting") not in (None, "alpaca", "sharegpt", "openai"):
        problems.append(f" has formatting {entry['formatting']!r}; it must be alpaca, sharegpt or openai")
    for key in ("columns", "tags"):
        value = entry.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            problems.append(f": {key} must be an object whose values are text")
    problems += [
        f": {key} is {entry[key]!r}, not text" for key in _TEXT_KEYS if not isinstance(entry.get(key), str | None)
    ]
    num_samples = entry.get("num_samples")
    if num_samples is not None and (type(num_samples) is not int or num_samples < 1):  # bool is a subclass of int
        problems.append(f": num_samples is {num_samples!r}, not a positive integer")
    return problems


def _preference_problems(entry: Mapping[str, Any]) -> list[str]:
    columns = [key for key in _PREFERENCE_COLUMNS if key in _mapping(entry, "columns")]
    if not entry.get("ranking") and not columns:
        return []
    setting = "ranking" if entry.get("ranking") else f"the columns {', '.join(columns)}"
    return [f" has {setting}: preference data is not supported, only supervised data"]


def _prompt_format_problems(entry: Mapping[str, Any]) -> list[str]:
    problems = []
    for key in _PROMPT_FORMAT_KEYS:
        names = PROMPT_FORMATS if key == "prompt_format" else ()
        if problem := _instruction_problem(entry.get(key), names):
            problems.append(f": {key} {problem}")
    if entry.get("prompt_format_without_input") and not entry.get("prompt_format"):
        problems.append(" has prompt_format_without_input without prompt_format")
    return problems


def _instruction_problem(prompt_format: object, names: Collection[str]) -> str:
    """Describe a prompt format that lacks the instruction and is none of ``names``; "" for none."""
    if not isinstance(prompt_format, str) or "{instruction}" in prompt_format or prompt_format in names:
        return ""
    alternative = f" or be one of {', '.join(names)}" if names else ""
    return f"{prompt_format!r} must contain {{instruction}}{alternative}"


def _location_problems(entry: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the location, split, subset and folder of an entry."""
    key = _location_key(entry)  # such as file_name or hf_hub_url; "" if the entry has no location
    problems = []
    if not key:
        problems.append(" needs one of file_name, cloud_file_name, hf_hub_url and ms_hub_url")
    if key in _REFUSED_LOCATIONS:
        problems.append(f" has {key}: {_REFUSED_LOCATIONS[key]}")
    if key in ("cloud_file_name", "file_name"):
        for name, allowed in (("subset", (None, "")), ("split", (None, "", "train"))):
            value = entry.get(name)
            if value not in allowed:
                problems.append(
                    f" has {name} {value!r}, which is only for datasets of a hub; remove {name} and set {key} to the "
                    f"files of that {name}"
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


def sources_of(config: ExportConfig, *, held_out: bool = False) -> list[SourceSpec]:
    """Return the files of rows of ``--dataset``, then of ``--val-dataset``; with ``held_out`` of ``--check-against``.

    An argument is looked up as a name in ``--dataset-info``, a file or folder, a pattern, and an id of the hub. With
    ``#1000``, ``#20%`` or ``#2.5x`` at its end, that number, fraction or multiple of its rows is drawn; ``#first1000``
    and ``#first20%`` take the first ones. Folders and patterns skip ``config.output_dir``, caches and training runs.
    """
    info = None
    if config.dataset_info:
        info = DatasetInfo(config.dataset_info, prefers_modelscope=config.use_hf is False)
    common = _common_spec(config)  # the settings that all files share
    if held_out:
        arguments = [(name, "--check-against", TRAIN_SPLIT) for name in config.check_against]
    else:
        arguments = [(name, "--dataset", TRAIN_SPLIT) for name in config.dataset]
        arguments += [(name, "--val-dataset", VAL_SPLIT) for name in config.val_dataset]
    specs: list[SourceSpec] = []
    for number, (name, option, split) in enumerate(arguments):
        paths, changed_fields = _resolve(name, option, info, common)
        if not config.per_dataset_loss_scale:
            changed_fields["loss_scale"] = None  # ignore the one in ``--dataset-info``: ``--loss-scale`` is used
        argument_spec = common.replaced(name=name, split=split, group=number, **changed_fields)
        specs += [argument_spec.replaced(path=path) for path in _outside_output(paths, config.output_dir)]
    return specs


def _common_spec(config: ExportConfig) -> SourceSpec:
    """Return the settings of all sources; their paths, names, splits and groups are still missing."""
    problem = _instruction_problem(config.prompt_format, PROMPT_FORMATS)
    if problem:
        raise ConfigError(f"--prompt-format {problem}", "Correct the option, or remove it to use the chat template.")
    return SourceSpec(
        path="",
        columns=_columns(config.columns),
        formatting=TOKENS if config.TAKES_TOKENS else None,
        media_root=config.media_root,
        system=config.system or None,
        prompt_format=_prompt_format({"prompt_format": config.prompt_format}),
        media_access=config.media_access,
        max_media_bytes=config.max_media_bytes,
        max_media_failures=config.max_media_failures,
        max_row_bytes=config.max_row_bytes,
    )


def _outside_output(paths: list[str], output_dir: str | None) -> list[str]:
    """Return the files outside of the output directory; if all are in it, the user means them."""
    if not output_dir:
        return paths
    output = f"{storage.absolute(storage.normalize(output_dir)).rstrip('/')}/"
    return [path for path in paths if not storage.absolute(path).startswith(output)] or paths


def unread_splits(config: ExportConfig) -> list[str]:
    """Return a message for each folder in ``--dataset`` that has splits which no argument reads.

    Such a folder is a saved ``DatasetDict``: it has a sub-directory for each split, of which only one is read, normally
    ``train``. Another split is read if an argument names its sub-directory.
    """
    messages = []
    named_paths = {storage.normalize(argument) for argument in (*config.dataset, *config.val_dataset)}
    for name in config.dataset:
        folder = name if _exists(name) else _without_amount(name)
        is_dataset_dict = _exists(storage.join(folder, _DICT_NAME))
        if not is_dataset_dict:
            continue
        used_split, all_splits = _split_of(folder, "--dataset")
        ignored_splits = []
        for split in dict.fromkeys(all_splits):
            is_named = storage.normalize(storage.join(folder, split)) in named_paths
            if split != used_split and not is_named:
                ignored_splits.append(split)
        if ignored_splits:
            messages.append(
                f"{storage.masked(folder)}: only the split {used_split} is read, not {', '.join(ignored_splits)}; to "
                f"use it for validation, add --val-dataset {storage.masked(storage.join(folder, ignored_splits[0]))}"
            )
    return messages


def _resolve(
    argument: str, option: str, info: DatasetInfo | None, common: SourceSpec
) -> tuple[list[str], dict[str, Any]]:
    """Find the files of one dataset argument: an entry of ``--dataset-info``, a path, a pattern or a hub id.

    Args:
        argument: perhaps with an amount of rows at its end, such as ``rows.jsonl#1000``.
        option: the option that has the argument, for messages.
        info: the entries of ``--dataset-info``; None without it.
        common: the settings of all arguments.

    Returns:
        The paths or URLs of the files, and the fields of ``SourceSpec`` in which they differ from ``common``.
    """
    name = _FIRST.sub("#", argument)  # #first1000 becomes #1000
    sampling: dict[str, Any] = {}
    # An entry or a file may have exactly this name, with its #.
    is_entry = info is not None and name in info.entries
    if amount_suffix(name) and not is_entry and not _exists(name):
        sampling = _sampling_of(argument, name, option)
        name = _without_amount(name)
    entry = None if info is None else info.get(name)
    if info is None or entry is None:
        return _files(name, option, info), sampling
    entry_fields = _fields_of_entry(entry, common)
    if "times_sampled" in sampling:
        entry_fields["num_sampled"] = None  # the amount of the argument replaces that of the entry
    return _files_of_entry(entry, info, option, name), entry_fields | sampling


def _sampling_of(argument: str, name: str, option: str) -> dict[str, Any]:
    """Return the fields of a spec for the amount at the end of ``name``, which is ``argument`` without ``first``."""
    try:
        amount = parse_amount(amount_suffix(name))
    except ValueError as error:
        raise ConfigError(f"{option} {argument}: {error}", "Write a number of at least 1 after the #.") from error
    takes_first = _FIRST.search(argument) is not None
    if amount.kind == "samples":
        return {"num_sampled": int(amount.number), "takes_first": takes_first}
    return {"times_sampled": amount.number, "takes_first": takes_first}


def _fields_of_entry(entry: Mapping[str, Any], common: SourceSpec) -> dict[str, Any]:
    """Return the fields of a spec that an entry of ``--dataset-info`` sets; options of the command come first."""
    # The form of OpenAI's messages is detected by their keys.
    formatting = "sharegpt" if entry.get("formatting") == "openai" else entry.get("formatting")
    return {
        "num_sampled": entry.get("num_samples"),
        "columns": common.columns or _columns_of_entry(entry),
        "tags": tuple(_mapping(entry, "tags").items()),
        "formatting": formatting or common.formatting,
        "loss_scale": entry.get("loss_scale"),
        "system": entry.get("system") or common.system,
        "prompt_format": _prompt_format(entry) or common.prompt_format,
    }


# In front of an amount at the end of an argument: #first1000, #first20%.
_FIRST = re.compile(r"#first(?=\d[\d.]*%?$)")


def _without_amount(name: str) -> str:
    """Return an argument without ``#1000`` or similar at its end."""
    name = _FIRST.sub("#", name)
    text = amount_suffix(name)
    return name[: -len(text) - 1] if text else name


def _files_of_entry(entry: Mapping[str, Any], info: DatasetInfo, option: str, name: str) -> list[str]:
    """Return the files of a dataset that is an entry of ``dataset_info.json``; datasets of a hub are downloaded.

    Args:
        entry: the entry, already checked. Its location is in the first key of ``_LOCATION_KEYS`` that it has.
        option, name: the option and its argument that name the dataset, for messages.
    """
    location_key = _location_key(entry)
    if location_key == "hf_hub_url" and info.prefers_modelscope and entry.get("ms_hub_url"):
        location_key = "ms_hub_url"
    location = entry[location_key]
    folder = entry.get("folder")  # a sub-directory of the dataset; None or "" for all of it
    if location_key == "ms_hub_url":
        location = download(f"{option} {name}:", "dataset_snapshot_download", location)
    if location_key in ("hf_hub_url", "ms_hub_url"):
        return hub_files(location, entry.get("subset") or None, entry.get("split") or None, folder or None)

    if location_key == "file_name":  # relative to the directory of the JSON file
        location = storage.join(storage.parent(info.path), location)
    if not folder:
        return _files(location, option)
    if not storage.is_directory(location):
        raise DataError(
            f"{option} {name}: its --dataset-info entry has the folder {folder!r}, but {storage.masked(location)} is "
            "not a directory",
            "Remove folder, or set file_name to a directory.",
        )
    return _files(storage.join(location, folder), option)


def _exists(name: str) -> bool:
    return not name.startswith(HUB_PREFIX) and storage.exists(name)


def _files(name: str, option: str, info: DatasetInfo | None = None) -> list[str]:
    """Return the files of rows that a name stands for: a file or folder, a pattern, or an id of the Hugging Face hub.

    The first of these that applies is used; DataError if none does. ``option`` has the name as its argument, and
    ``info`` are the entries of ``--dataset-info``, if any; both are only used in errors.
    """
    if _exists(name):
        path = storage.normalize(name)
        return _files_in(path, option) if storage.is_directory(path) else [path]

    wildcard = _WILDCARD.search(name)
    if wildcard and not name.startswith("http"):
        folder = storage.parent(name[: wildcard.start()])  # contains all matches
        files = _files_of_pattern(name, folder, option)
        if not files:
            problem = f"{option} {storage.masked(name)}: no file of rows matches"
            raise DataError(problem, f"Supported are {KNOWN_FORMATS}.")
        return files

    has_hub_prefix = name.startswith(HUB_PREFIX)  # hf::
    may_be_hub_id = has_hub_prefix or (not storage.is_remote(name) and format_of(name) is None)
    identifier = hub_id(name) if may_be_hub_id else None
    if identifier is None:
        raise _no_file_error(name, option, info)
    return hub_files(identifier)


def _no_file_error(name: str, option: str, info: DatasetInfo | None) -> DataError:
    """Return the error for an argument that is no file, pattern, hub id or, with ``--dataset-info``, name."""
    label = storage.masked(name)
    if info is not None:
        return DataError(
            f"{option} {label}: there is no such file, and no such name in --dataset-info"
            f"{did_you_mean(name, info.entries)}",
            "Check the path or the name.",
        )
    remedy = "Check the path."
    if format_of(name) is None and "/" not in name:
        remedy = "Check the path; for a name in LLaMA-Factory's dataset_info.json, add --dataset-info DIR."
    return DataError(f"{option} {label}: there is no such file", remedy)


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
    """Return the files of rows below a folder.

    For a dataset saved by the datasets package, or packs of ``packtool pack``, these are the files that its metadata
    list; of a ``DatasetDict`` only one split is read. The folder of a cache is a DataError.
    """
    names = storage.list_names(folder)
    if MANIFEST_NAME in names:
        message = f"{option} {storage.masked(folder)} is a cache written by packtool export, not rows"
        raise DataError(message, "Pass it to packtool train instead.")
    if _DICT_NAME in names:
        split, _ = _split_of(folder, option)
        return _files_in(storage.join(folder, split), option)
    if _STATE_NAME in names and _INFO_NAME in names:  # written by ``save_to_disk``
        return _files_of_state(folder, option)
    if PACKS_MANIFEST_NAME in names:
        return _files_of_packs(folder, option)
    return _files_below(folder, option)


def _files_of_state(folder: str, option: str) -> list[str]:
    """Return the files that the metadata of a saved dataset list."""
    state = _json(storage.join(folder, _STATE_NAME), option)
    files = [storage.join(folder, file["filename"]) for file in state.get("_data_files") or []]
    if not files:
        problem = f"{option} {storage.masked(folder)}: its {_STATE_NAME} lists no data files"
        raise DataError(problem, "Save the dataset again.")
    return files


def _files_of_packs(folder: str, option: str) -> list[str]:
    """Return the files that the manifest of a folder of packs lists."""
    manifest = _json(storage.join(folder, PACKS_MANIFEST_NAME), option)
    names = [file.get("file") for file in manifest.get("files") or [] if isinstance(file, dict)]
    # Only the last part of a name is used, so that the manifest cannot name files elsewhere.
    files = [storage.join(folder, storage.name(name)) for name in names if isinstance(name, str)]
    if not files:
        problem = f"{option} {storage.masked(folder)}: its {PACKS_MANIFEST_NAME} lists no files of packs"
        raise DataError(problem, "Write the packs again, or pass their files.")
    return files


def _files_below(folder: str, option: str) -> list[str]:
    """Return all files of rows below a folder, except hidden files, metadata, and files of caches and training runs."""
    paths = list(storage.walk(folder))
    # Folders of caches and training runs, which have a file that nothing else has; with a slash at the end.
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
        message = f"{option} {storage.masked(folder)}: the folder has no files of rows; it contains {contents}"
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
        message = f"{option} {storage.masked(folder)} has no split train; its splits are {', '.join(splits) or 'none'}"
        raise DataError(message, "Pass the folder of one split.")
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
            pairs += _columns_of_json(item)
            continue
        name, equals, column = item.partition("=")
        if not equals or not name:
            message = f"--columns {item}: it must be name=column"
            raise ConfigError(message, "For example --columns query=title response=body")
        pairs.append((name, column))
    return tuple(pairs)


def _columns_of_json(text: str) -> list[tuple[str, str]]:
    import yaml  # here, because most runs do not need it; it parses JSON, and mappings as YAML writes them

    try:
        values = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--columns {text}: invalid JSON: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(item, str) for item in chain(*values.items())):
        raise ConfigError(f"--columns {text}: the JSON must be an object whose values are column names")
    return list(values.items())
