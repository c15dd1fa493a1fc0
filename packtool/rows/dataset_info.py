"""``dataset_info.json``: datasets by name, in LLaMA-Factory's format plus a loss scale and a system prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from packtool import storage
from packtool.config.settings import load_json
from packtool.errors import ConfigError, did_you_mean
from packtool.rows.forms.columns import NAMES
from packtool.rows.forms.messages import TAG_NAMES
from packtool.rows.source import Pairs

# Keys for the place of an entry's rows; the first with a value counts, as in LLaMA-Factory.
_PLACES = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
_PARTS = ("subset", "split", "folder")
_KEYS = (
    *_PLACES,
    *_PARTS,
    *("formatting", "ranking", "num_samples", "columns", "tags"),
    "file_sha1",  # LLaMA-Factory no longer checks it either
    *("loss_scale", "system"),  # this project's own
)
_FORMATTINGS = (None, "alpaca", "sharegpt", "openai")
_TAGS = (*TAG_NAMES, "role_tag", "content_tag")
# LLaMA-Factory's column names that differ from this project's; its "prompt" and "query" are alpaca's.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_PREFERENCES = ("kto_tag", "chosen", "rejected")
_COLUMNS = tuple(dict.fromkeys((*NAMES, "prompt", *_PREFERENCES)))


class DatasetInfo:
    """The datasets of a file.

    Args:
        path: the file, or a directory with ``dataset_info.json``; paths in it are relative to its folder.
        prefers_modelscope: use ``ms_hub_url`` even for entries that also name the Hugging Face hub.

    Raises:
        ConfigError: if it is not such a file.
        StorageError: if it cannot be read.
    """

    def __init__(self, path: str, prefers_modelscope: bool = False) -> None:
        self._prefers_modelscope = prefers_modelscope
        if storage.is_directory(path):
            path = storage.join(path, "dataset_info.json")
        self._path, self._shown = path, f"--dataset-info {storage.masked(path)}"
        try:
            entries = load_json(storage.read_bytes(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self._shown}: not JSON: {error}") from error
        if not isinstance(entries, dict):
            raise ConfigError(f"{self._shown}: a {type(entries).__name__}, not an object of sets by name")
        self._entries: dict[str, Any] = entries

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def get(self, name: str) -> Mapping[str, Any] | None:
        """Return the entry of a dataset, None if there is none; raise ConfigError if it is invalid."""
        if name not in self._entries:
            return None
        entry = self._entries[name]
        if not isinstance(entry, dict):
            raise ConfigError(f"{self._shown}: {name!r} is a {type(entry).__name__}, not an object")
        problems = [
            *_unknown_keys(f"{name!r}", entry, _KEYS),
            *_unknown_keys(f"{name!r}, columns", _mapping(entry, "columns"), _COLUMNS),
            *_unknown_keys(f"{name!r}, tags", _mapping(entry, "tags"), _TAGS),
            *(f"{name!r}{problem}" for problem in (*_place_problems(entry), *_value_problems(entry))),
        ]
        if problems:
            raise ConfigError.from_problems([f"{self._shown}: {problem}" for problem in problems])
        return entry

    def place(self, entry: Mapping[str, Any]) -> tuple[str, Literal["hf", "ms"] | None]:
        """Return where an entry's rows are: a file, folder or pattern and None, or an id and its hub."""
        key = _place_key(entry)
        if key == "hf_hub_url":
            use_modelscope = self._prefers_modelscope and entry.get("ms_hub_url")
            return (entry["ms_hub_url"], "ms") if use_modelscope else (entry[key], "hf")
        if key == "ms_hub_url":
            return entry[key], "ms"
        return storage.join(storage.parent(self._path), entry[key]) if key == "file_name" else entry[key], None


def spec_values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``SourceSpec`` that an entry sets."""
    formatting = entry.get("formatting")
    return {
        "num_sampled": entry.get("num_samples"),
        "columns": _columns(entry),
        "tags": tuple(_mapping(entry, "tags").items()),
        # OpenAI's messages are recognised by their keys.
        "formatting": "sharegpt" if formatting == "openai" else formatting,
        "loss_scale": entry.get("loss_scale"),
        "system": entry.get("system"),
    }


def _columns(entry: Mapping[str, Any]) -> Pairs:
    columns = dict(_mapping(entry, "columns"))
    has_messages = entry.get("formatting") == "sharegpt" or "messages" in columns
    if has_messages or not columns.keys() & {"prompt", "query", "response"}:
        return tuple(columns.items())
    if "prompt" not in columns and "query" in columns and entry.get("formatting") != "alpaca":
        return tuple(columns.items())  # a query without a prompt has this project's meaning
    named = {_ALPACA.get(name, name): column for name, column in columns.items()}
    # Only named columns count: an input that is not among them is ignored.
    return tuple({"input": "", **named}.items())


def _place_key(entry: Mapping[str, Any]) -> str:
    return next((key for key in _PLACES if entry.get(key)), "")


def _mapping(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, dict) else {}


def _unknown_keys(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    return [
        f"{where}: unknown key {key!r}{did_you_mean(key, known) or '; known are ' + ', '.join(known)}"
        for key in values
        if key not in known
    ]


def _place_problems(entry: Mapping[str, Any]) -> list[str]:
    place, folder = _place_key(entry), entry.get("folder")
    problems: list[str] = []
    if not place:
        problems.append(" has none of file_name, cloud_file_name, hf_hub_url and ms_hub_url")
    if place == "om_hub_url":
        problems.append(" has om_hub_url: openMind's hub is not read here; download the set and name it as file_name")
    if place == "script_url":
        problems.append(
            " has script_url: loading scripts are not run here; save what the script makes as .jsonl and "
            "name it as file_name"
        )
    if place in ("cloud_file_name", "file_name"):
        problems += [
            f" has {key} {entry[key]!r}: only sets of a hub have such parts, and {place} names files; "
            f"leave out {key} and name the files of that part"
            for key in ("subset", "split")
            if entry.get(key) not in (None, "", *(("train",) if key == "split" else ()))
        ]
    if isinstance(folder, str) and (folder.startswith(("/", "~")) or ".." in folder.split("/")):
        problems.append(f" has folder {folder!r}: it must be a sub-directory of the set")
    return problems


def _value_problems(entry: Mapping[str, Any]) -> list[str]:
    problems = []
    preferences = [key for key in _PREFERENCES if key in _mapping(entry, "columns")]
    if entry.get("ranking") or preferences:
        what = "ranking" if entry.get("ranking") else f"the columns {', '.join(preferences)}"
        problems.append(f" has {what}: preferences between answers are no data for supervised training")
    if entry.get("formatting") not in _FORMATTINGS:
        problems.append(f" has formatting {entry['formatting']!r}; known are alpaca, sharegpt and openai")
    for key in ("columns", "tags"):
        value = entry.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            problems.append(f": {key} must be an object of names")
    for key in (*_PLACES, *_PARTS, "loss_scale", "system"):
        if entry.get(key) is not None and not isinstance(entry[key], str):
            problems.append(f": {key} is {entry[key]!r}, not text")
    samples = entry.get("num_samples")
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        problems.append(f": num_samples is {samples!r}, not a positive number")
    return problems
