"""``dataset_info.json``: sets of rows by name, in the style of LLaMA-Factory, with a loss scale of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packtool import storage
from packtool.config.settings import load_json
from packtool.errors import ConfigError, did_you_mean
from packtool.rows.forms.columns import NAMES
from packtool.rows.forms.messages import TAG_NAMES
from packtool.rows.source import Pairs

# Where an entry's rows are; of several places the first counts, as in LLaMA-Factory.
_HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url")
_PLACES = (*_HUBS, "script_url", "cloud_file_name", "file_name")
_PARTS = ("subset", "split", "folder")
_KEYS = (
    *_PLACES,
    *_PARTS,
    *("formatting", "ranking", "num_samples", "columns", "tags"),
    "file_sha1",  # LLaMA-Factory had it once; it, too, reads files without comparing it
    *("loss_scale", "system"),  # this project's own
)
_FORMATTINGS = (None, "alpaca", "sharegpt", "openai")
_TAGS = (*TAG_NAMES, "role_tag", "content_tag")
# Its names of columns, where they differ from this project's; "prompt" and "query" are alpaca's there.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_COLUMNS = tuple(dict.fromkeys((*NAMES, "prompt", "kto_tag", "chosen", "rejected")))
_NOT_TRAINED = ("kto_tag", "chosen", "rejected")


@dataclass(frozen=True)
class Entry:
    """One set.

    Args:
        place: file, folder or pattern, or the id of a set of a hub.
        hub: ``hf`` or ``ms`` (ModelScope) if ``place`` is an id.
        subset, split: of a hub's set.
        folder: sub-directory of the hub's set or of the folder; only what lies in it is read.
        columns: (this project's name, the file's name).
        tags: (name in ``dataset_info.json``, value) of roles and keys of messages.
        formatting: ``alpaca`` or ``sharegpt``; None tells it from the rows.
        num_samples: rows to draw, None for all.
        loss_scale, system: for the rows of this set.
    """

    place: str
    hub: Literal["hf", "ms"] | None
    subset: str | None
    split: str | None
    folder: str | None
    columns: Pairs
    tags: Pairs
    formatting: str | None
    num_samples: int | None
    loss_scale: str | None
    system: str | None


class DatasetInfo:
    """The sets that a file names.

    Args:
        path: the file, or a directory with ``dataset_info.json``; paths in it are relative to its folder.
        prefers_modelscope: takes ``ms_hub_url`` of entries that name the Hugging Face hub, too.

    Raises:
        ConfigError: if it is no such file.
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
        """Names of the sets that the file declares."""
        return list(self._entries)

    def get(self, name: str) -> Entry | None:
        """A set by its name.

        Raises:
            ConfigError: if what is said of it cannot be understood.
        """
        if name not in self._entries:
            return None
        raw = self._entries[name]
        if not isinstance(raw, dict):
            raise ConfigError(f"{self._shown}: {name!r} is a {type(raw).__name__}, not an object")
        problems = [
            *_unknown(f"{name!r}", raw, _KEYS),
            *_unknown(f"{name!r}, columns", _mapping(raw, "columns"), _COLUMNS),
            *_unknown(f"{name!r}, tags", _mapping(raw, "tags"), _TAGS),
            *_wrong(name, raw),
        ]
        if problems:
            raise ConfigError.from_problems([f"{self._shown}: {problem}" for problem in problems])
        return self._entry(raw)

    def _entry(self, raw: Mapping[str, Any]) -> Entry:
        kind = _place_of(raw)
        if kind == "hf_hub_url" and self._prefers_modelscope and raw.get("ms_hub_url"):
            kind = "ms_hub_url"
        place = raw[kind]
        if kind == "file_name":
            place = storage.join(storage.parent(self._path), place)
        hubs: dict[str, Literal["hf", "ms"]] = {"hf_hub_url": "hf", "ms_hub_url": "ms"}
        return Entry(
            place=place,
            hub=hubs.get(kind),
            subset=raw.get("subset") or None,
            split=raw.get("split") or None,
            folder=raw.get("folder") or None,
            columns=_columns(raw),
            tags=tuple(_mapping(raw, "tags").items()),
            # The messages of OpenAI's form are told by their keys.
            formatting="sharegpt" if raw.get("formatting") == "openai" else raw.get("formatting"),
            num_samples=raw.get("num_samples"),
            loss_scale=raw.get("loss_scale"),
            system=raw.get("system"),
        )


def _place_of(raw: Mapping[str, Any]) -> str:
    """The key that says where the rows are; empty if none does."""
    return next((key for key in _PLACES if raw.get(key)), "")


def _columns(raw: Mapping[str, Any]) -> Pairs:
    columns = dict(_mapping(raw, "columns"))
    has_messages = raw.get("formatting") == "sharegpt" or "messages" in columns
    if has_messages or not columns.keys() & {"prompt", "query", "response"}:
        return tuple(columns.items())
    if "prompt" not in columns and "query" in columns and raw.get("formatting") != "alpaca":
        return tuple(columns.items())  # a query without a prompt is meant as one
    named = {_ALPACA.get(name, name): column for name, column in columns.items()}
    # Columns that are named are all that count: an input that is not among them is not read.
    return tuple({"input": "", **named}.items())


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _unknown(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> list[str]:
    return [
        f"{where}: unknown key {key!r}{did_you_mean(key, known) or '; known are ' + ', '.join(known)}"
        for key in given
        if key not in known
    ]


def _wrong(name: str, raw: Mapping[str, Any]) -> list[str]:
    found = [*_wrong_place(name, raw), *_wrong_part(name, raw)]
    preferences = [key for key in _NOT_TRAINED if key in _mapping(raw, "columns")]
    if raw.get("ranking") or preferences:
        said = "ranking" if raw.get("ranking") else f"the columns {', '.join(preferences)}"
        found.append(f"{name!r} has {said}: preferences between answers are no data for supervised training")
    if raw.get("formatting") not in _FORMATTINGS:
        found.append(f"{name!r} has formatting {raw['formatting']!r}; known are alpaca, sharegpt and openai")
    for key in ("columns", "tags"):
        value = raw.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            found.append(f"{name!r}: {key} must be an object of names")
    for key in (*_PLACES, *_PARTS, "loss_scale", "system"):
        if raw.get(key) is not None and not isinstance(raw[key], str):
            found.append(f"{name!r}: {key} is {raw[key]!r}, not text")
    samples = raw.get("num_samples")
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        found.append(f"{name!r}: num_samples is {samples!r}, not a positive number")
    return found


def _wrong_place(name: str, raw: Mapping[str, Any]) -> list[str]:
    place = _place_of(raw)
    if not place:
        return [f"{name!r} has none of file_name, cloud_file_name, hf_hub_url and ms_hub_url"]
    if place == "om_hub_url":
        return [f"{name!r} has om_hub_url: openMind's hub is not read here; download the set and name it as file_name"]
    if place == "script_url":
        return [
            f"{name!r} has script_url: loading scripts are not run here; save what the script makes as .jsonl and "
            "name it as file_name"
        ]
    return []


def _wrong_part(name: str, raw: Mapping[str, Any]) -> list[str]:
    found = []
    place, folder = _place_of(raw), raw.get("folder")
    if place in ("cloud_file_name", "file_name"):
        for key in ("subset", "split"):
            if raw.get(key) not in (None, "", *(("train",) if key == "split" else ())):
                found.append(
                    f"{name!r} has {key} {raw[key]!r}: only sets of a hub have such parts, and {place} names files; "
                    f"leave out {key} and name the files of that part"
                )
    if isinstance(folder, str) and (folder.startswith(("/", "~")) or ".." in folder.split("/")):
        found.append(f"{name!r} has folder {folder!r}: it must be a sub-directory of the set")
    return found
