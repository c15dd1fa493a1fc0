"""``dataset_info.json``: sets of rows by name, in the style of LLaMA-Factory, with a loss scale of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packtool import storage
from packtool.errors import ConfigError
from packtool.rows.forms.columns import NAMES, did_you_mean
from packtool.rows.forms.messages import TAG_NAMES
from packtool.rows.source import Pairs

_KEYS = (
    *("file_name", "hf_hub_url", "cloud_file_name", "columns", "tags", "formatting", "subset", "split"),
    *("num_samples", "loss_scale", "system"),
    # Known to LLaMA-Factory and of no use here: other hubs, checksums of single files.
    *("ms_hub_url", "om_hub_url", "file_sha1", "ranking", "folder"),
)
_TAGS = (*TAG_NAMES, "role_tag", "content_tag")
# Its names of columns, where they differ from this project's; "prompt" and "query" are alpaca's there.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_COLUMNS = tuple(dict.fromkeys((*NAMES, "prompt", "kto_tag", "chosen", "rejected")))
_NOT_TRAINED = ("kto_tag", "chosen", "rejected")


@dataclass(frozen=True)
class Entry:
    """One set.

    Args:
        path: file, folder or pattern; None for a set of the hub.
        hub_id: with subset and split behind colons.
    """

    path: str | None
    hub_id: str | None
    columns: Pairs
    tags: Pairs
    formatting: str | None
    num_samples: int | None
    loss_scale: str | None
    system: str | None


class DatasetInfo:
    """The sets that a file names.

    Args:
        path: the file; paths in it are relative to its folder.

    Raises:
        ConfigError: if it is no such file.
        StorageError: if it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path, self._shown = path, f"--dataset-info {storage.masked(path)}"
        try:
            entries = json.loads(storage.read_bytes(path))
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
        path = raw.get("cloud_file_name")
        if raw.get("file_name"):
            path = storage.join(storage.parent(self._path), raw["file_name"])
        hub_id = None
        if not path:
            hub_id = ":".join([raw["hf_hub_url"], raw.get("subset") or "", raw.get("split") or ""]).rstrip(":")
        return Entry(
            path=path or None,
            hub_id=hub_id,
            columns=_columns(raw),
            tags=tuple(_mapping(raw, "tags").items()),
            formatting=raw.get("formatting"),
            num_samples=raw.get("num_samples"),
            loss_scale=raw.get("loss_scale"),
            system=raw.get("system"),
        )


def _columns(raw: Mapping[str, Any]) -> Pairs:
    columns = {name: column for name, column in _mapping(raw, "columns").items() if name not in _NOT_TRAINED}
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
    return [f"{where}: unknown key {key!r}{did_you_mean(key, known)}" for key in given if key not in known]


def _wrong(name: str, raw: Mapping[str, Any]) -> list[str]:
    found = []
    if not any(raw.get(key) for key in ("file_name", "hf_hub_url", "cloud_file_name")):
        found.append(f"{name!r} has neither file_name nor hf_hub_url")
    if raw.get("ranking"):
        found.append(f"{name!r} has ranking: pairs of a better and a worse answer are no data for supervised training")
    if raw.get("formatting") not in (None, "alpaca", "sharegpt"):
        found.append(f"{name!r} has formatting {raw['formatting']!r}; known are alpaca and sharegpt")
    for key in ("columns", "tags"):
        value = raw.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            found.append(f"{name!r}: {key} must be an object of names")
    for key in ("file_name", "hf_hub_url", "cloud_file_name", "subset", "split", "loss_scale", "system"):
        if raw.get(key) is not None and not isinstance(raw[key], str):
            found.append(f"{name!r}: {key} is {raw[key]!r}, not text")
    samples = raw.get("num_samples")
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
        found.append(f"{name!r}: num_samples is {samples!r}, not a positive number")
    return found
