"""Files that ``--dataset`` and ``--val-dataset`` name: local or remote, of a hub, or by name in ``--dataset-info``.

Datasets of the Hugging Face hub are loaded with ``datasets``, and models and datasets of ModelScope with its own
package, each through its cache on this machine. ``dataset_info.json`` has LLaMA-Factory's format, plus a loss scale and
a system prompt.
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
from packtool.rows.source import Compression, FileFormat, Pairs, SourceSpec

HUB_PREFIX = "hf::"
_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w. /-]*){0,2}")
_ID_WITH_PREFIX = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?::[\w. /-]*){0,2}")


def hub_id(name: str) -> str | None:
    """Return the id, perhaps with subset and split, that a name may be: ``owner/set:subset:split``, ``hf::set``."""
    if name.startswith(HUB_PREFIX):
        name = name.removeprefix(HUB_PREFIX)
        return name if _ID_WITH_PREFIX.fullmatch(name) else None
    return name if _ID.fullmatch(name) and not name.startswith(".") else None


def hub_files(name: str, subset: str | None = None, split: str | None = None, folder: str | None = None) -> list[str]:
    """Return the Arrow files of a dataset, after downloading them to ``datasets``' cache if needed.

    Args:
        name: id, perhaps with ``:subset`` and ``:split`` (``train`` by default), or a folder with a copy of the set.
        subset, split: used if the name has none.
        folder: sub-directory of the set to read.

    Raises:
        DataError: if there is no such set, or the hub cannot be reached.
    """
    import datasets  # here, because it takes a second and most exports read files

    identifier = name
    if not os.path.isdir(name):
        identifier, subset_in_name, split_in_name = [*name.split(":"), "", ""][:3]
        subset, split = subset_in_name or subset, split_in_name or split
    split = split or "train"
    try:
        dataset = datasets.load_dataset(identifier, subset, split=split, data_dir=folder)
    except Exception as error:  # of the hub, of the network, or of the code that reads the set
        first_line = str(error).strip().partition("\n")[0]
        inside = f", folder {folder}" if folder else ""
        raise DataError(
            f"--dataset {name}: no such file here, and the hub's set {identifier} (subset {subset or 'default'}, split "
            f"{split}{inside}) cannot be loaded: {type(error).__name__}: {first_line}",
            "Check the path or id; id:subset:split names another part. Without a network, HF_HUB_OFFLINE=1 uses what "
            "was downloaded before.",
        ) from error
    files = [file["filename"] for file in dataset.cache_files]
    if not files:
        raise DataError(f"--dataset {name}: datasets keeps this set in no files", "Save it with save_to_disk first.")
    return files


_KINDS: dict[str, FileFormat] = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
    ".tar": "tar",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

KNOWN_FORMATS = (
    f"{', '.join(suffix for suffix in _KINDS if suffix not in ('.idx', '.tar'))}, each also with "
    f"{' or '.join(_COMPRESSIONS)}, .tar of packs, and .idx with Megatron's .bin beside it"
)
"""All formats, for messages."""


def format_of(path: str) -> tuple[FileFormat, Compression | None] | None:
    """Return format and compression of a file by its name; None if unknown."""
    stem, dot, suffix = storage.name(path).lower().rpartition(".")
    if suffix == "idx" and stem.endswith(".tar"):  # the index of a tar file
        return None
    compression = _COMPRESSIONS.get(dot + suffix)
    if compression is not None:
        _, dot, suffix = stem.rpartition(".")
    kind = _KINDS.get(dot + suffix)
    return None if kind is None else (kind, compression)


C = TypeVar("C", ExportConfig, TrainConfig)

# Files of a model that encoding reads.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_DOWNLOAD_DATASET = "dataset_snapshot_download"


def with_local_copies(config: C) -> C:
    """Replace ids of ModelScope in the settings by local copies if ``--use-hf false`` is set.

    Raises:
        ConfigError: if the package is not installed, or ModelScope cannot provide a model or dataset.
    """
    if config.use_hf is not False:
        return config
    changes: dict[str, Any] = {}
    if not os.path.isdir(config.model):
        small = {"allow_patterns": _SMALL_FILES} if isinstance(config, ExportConfig) else {}
        changes["model"] = _local_copy("--model", "snapshot_download", config.model, **small)
    changes["dataset"] = tuple(_local_rows("--dataset", argument, config) for argument in config.dataset)
    changes["val_dataset"] = tuple(_local_rows("--val-dataset", argument, config) for argument in config.val_dataset)
    return replace(config, **changes)


def _local_rows(option: str, argument: str, config: ExportConfig | TrainConfig) -> str:
    name, mark, number = argument.partition("#")
    is_local = storage.is_remote(name) or storage.exists(name) or format_of(name) is not None
    if is_local or hub_id(name) is None or (config.dataset_info and name.count("/") != 1):
        return argument
    if ":" in name:
        raise ConfigError(
            f"{option} {argument}: of ModelScope's sets all files are read, and no single subset or split",
            "Leave out what follows the colon, or give the files.",
        )
    return _local_copy(option, _DOWNLOAD_DATASET, name) + mark + number


def _local_copy(option: str, function: str, name: str, **settings: Any) -> str:
    """Return the local folder to which a function of ModelScope downloads the model or dataset that an option names."""
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
    except Exception as error:  # of the hub or of the network
        raise ConfigError(
            f"{option} {name}: no such directory here, and ModelScope does not give it: {error}",
            "Give a local directory, or check the name and the connection.",
        ) from error


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
        self.prefers_modelscope = prefers_modelscope
        if storage.is_directory(path):
            path = storage.join(path, "dataset_info.json")
        self.path, self._shown = path, f"--dataset-info {storage.masked(path)}"
        try:
            entries = load_json(storage.read_bytes(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self._shown}: not JSON: {error}") from error
        if not isinstance(entries, dict):
            raise ConfigError(f"{self._shown}: a {type(entries).__name__}, not an object of sets by name")
        self.entries: dict[str, Any] = entries

    def get(self, name: str) -> Mapping[str, Any] | None:
        """Return the entry of a dataset, None if there is none; raise ConfigError if it is invalid."""
        if name not in self.entries:
            return None
        entry = self.entries[name]
        if not isinstance(entry, dict):
            raise ConfigError(f"{self._shown}: {name!r} is a {type(entry).__name__}, not an object")
        problems = [
            *_unknown_keys(f"{name!r}", entry, _KEYS),
            *_unknown_keys(f"{name!r}, columns", _mapping(entry, "columns"), _COLUMNS),
            *_unknown_keys(f"{name!r}, tags", _mapping(entry, "tags"), _TAGS),
            *(f"{name!r}{problem}" for problem in _entry_problems(entry)),
        ]
        if problems:
            raise ConfigError.from_problems([f"{self._shown}: {problem}" for problem in problems])
        return entry


def _columns_of_entry(entry: Mapping[str, Any]) -> Pairs:
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


def _entry_problems(entry: Mapping[str, Any]) -> list[str]:
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


_MAGIC = re.compile(r"[*?[]")
_HIDDEN = re.compile(r"(?:^|[/\\])\.")
# Metadata files beside the rows. DROPPED_NAME is all that an export without kept rows leaves in its directory.
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", PACKS_MANIFEST_NAME, DROPPED_NAME)
# Files that mark a cache, finished or not, or the directory of a training run.
_OUTPUT_MARKERS = (MANIFEST_NAME, ".tasks/export.json", "history/run.json")
_STATE_NAME, _DICT_NAME = "state.json", "dataset_dict.json"


def sources_of(config: ExportConfig) -> list[SourceSpec]:
    """Return the files of rows in the order of the arguments, those of the val split last.

    An argument is, in this order, a name in ``--dataset-info``, a file or folder, a pattern, or an id of the hub.
    ``#1000``, ``#20%`` or ``#2.5x`` at its end draws that many rows, that share, or that multiple, unless a file has
    that very name. Folders and patterns leave out ``config.output_dir``, caches and training runs.

    Raises:
        ConfigError: if ``--dataset-info`` or ``--columns`` is invalid.
        DataError: if an argument names nothing, or nothing with files of rows.
        StorageError: if a store cannot be read.
    """
    info = DatasetInfo(config.dataset_info, config.use_hf is False) if config.dataset_info else None
    plain = SourceSpec(
        "",
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
        paths, values = _paths(name, option, info, plain)
        if not config.per_dataset_loss_scale:
            values["loss_scale"] = None
        spec = replace(plain, name=name, split=split, group=group, **values)
        if config.output_dir:
            output = f"{storage.absolute(storage.normalize(config.output_dir)).rstrip('/')}/"
            # All of them if none lies outside.
            paths = [path for path in paths if not storage.absolute(path).startswith(output)] or paths
        specs += [spec.replaced(path=path) for path in paths]
    return specs


def splits_left_out(config: ExportConfig) -> list[str]:
    """Return a line for each saved ``DatasetDict`` in ``--dataset`` of which only one split is read."""
    lines = []
    arguments = {storage.normalize(argument) for argument in (*config.dataset, *config.val_dataset)}
    for name in config.dataset:
        path = name if _exists(name) else _without_amount(name)
        if not _exists(storage.join(path, _DICT_NAME)):
            continue
        used, splits = _split_of(path, "--dataset")
        others = [s for s in splits if s != used and storage.normalize(storage.join(path, s)) not in arguments]
        if others := list(dict.fromkeys(others)):
            lines.append(
                f"{storage.masked(path)}: its split {used} is read, and {', '.join(others)} is not; "
                f"--val-dataset {storage.masked(storage.join(path, others[0]))} would read it"
            )
    return lines


def _paths(argument: str, option: str, info: DatasetInfo | None, plain: SourceSpec) -> tuple[list[str], dict[str, Any]]:
    """Return the files that one argument names, and the values of their specs that differ from ``plain``."""
    name, values = argument, dict[str, Any]()
    if (text := amount_suffix(name)) and not (info and name in info.entries) and not _exists(name):
        try:
            amount = parse_amount(text)
        except ValueError as error:
            raise ConfigError(f"{option} {argument}: {error}", "Give a number of at least 1 behind the #.") from error
        name = _without_amount(name)
        values = {"num_sampled": int(amount.number)} if amount.kind == "samples" else {"times_sampled": amount.number}
    if info is None or (entry := info.get(name)) is None:
        return _files(name, option, info), values
    # OpenAI's messages are recognised by their keys.
    formatting = "sharegpt" if entry.get("formatting") == "openai" else entry.get("formatting")
    own = {
        "num_sampled": None if "times_sampled" in values else entry.get("num_samples"),
        "columns": plain.columns or _columns_of_entry(entry),
        "tags": tuple(_mapping(entry, "tags").items()),
        "formatting": formatting or plain.formatting,
        "loss_scale": entry.get("loss_scale"),
        "system": entry.get("system") or plain.system,
    }
    return _files_of_entry(entry, info, option, name), own | values


def _without_amount(name: str) -> str:
    text = amount_suffix(name)
    return name[: -len(text) - 1] if text else name


def _files_of_entry(entry: Mapping[str, Any], info: DatasetInfo, option: str, name: str) -> list[str]:
    """Return the files of an entry of ``--dataset-info``, in its sub-directory ``folder`` if it names one."""
    subset, split, folder = (entry.get(key) or None for key in _PARTS)
    key = _place_key(entry)
    if key == "hf_hub_url" and info.prefers_modelscope and entry.get("ms_hub_url"):
        key = "ms_hub_url"
    place = entry[key]
    if key in ("hf_hub_url", "ms_hub_url"):
        if key == "ms_hub_url":
            place = _local_copy(f"{option} {name}:", _DOWNLOAD_DATASET, place)
        return hub_files(place, subset, split, folder)
    if key == "file_name":
        place = storage.join(storage.parent(info.path), place)
    if folder is None:
        return _files(place, option, None)
    if not storage.is_directory(place):
        raise DataError(
            f"{option} {name}: --dataset-info gives it the folder {folder!r}, and {storage.masked(place)} "
            "is no directory that could hold one",
            "Leave out folder, or name a directory as file_name.",
        )
    return _files(storage.join(place, folder), option, None)


def _exists(name: str) -> bool:
    return not name.startswith(HUB_PREFIX) and storage.exists(name)


def _files(name: str, option: str, info: DatasetInfo | None) -> list[str]:
    if _exists(name):
        name = storage.normalize(name)
        return _files_in(name, option) if storage.is_directory(name) else [name]
    shown = storage.masked(name)
    if (magic := _MAGIC.search(name)) and not name.startswith("http"):
        is_output = _output_finder(storage.parent(name[: magic.start()]))
        files: list[str] = []
        for path in storage.glob(name):
            if is_output(path):
                continue
            if storage.is_directory(path):
                files += _files_in(path, option)
            elif format_of(path) and not storage.name(path).startswith(".") and not _is_metadata(path):
                files.append(path)
        if not files:
            raise DataError(f"{option} {shown}: no file of rows fits", f"Known are {KNOWN_FORMATS}.")
        return list(dict.fromkeys(files))  # a pattern with ** matches directories and the files in them
    identifier = None if storage.is_remote(name) and not name.startswith(HUB_PREFIX) else hub_id(name)
    if identifier is not None and (name.startswith(HUB_PREFIX) or format_of(name) is None):
        return hub_files(identifier)
    if info is not None:
        raise DataError(
            f"{option} {shown}: there is no such file, and --dataset-info has no such name"
            f"{did_you_mean(name, info.entries)}",
            "Check the path or the name.",
        )
    remedy = "Check the path."
    if format_of(name) is None and "/" not in name:
        remedy = "Check the path; for a name in LLaMA-Factory's dataset_info.json, add --dataset-info DIR."
    raise DataError(f"{option} {shown}: there is no such file", remedy)


def _output_finder(folder: str) -> Callable[[str], bool]:
    """Return a function that recognises paths of caches and training runs in a folder, and paths inside of them."""

    @cache
    def is_output(path: str) -> bool:
        if any(storage.exists(storage.join(path, marker)) for marker in _OUTPUT_MARKERS):
            return True
        return path.startswith(folder) and path != folder and is_output(storage.parent(path))

    return is_output


def _files_in(folder: str, option: str) -> list[str]:
    """Return the files of rows below a folder, or those of a dataset or packs that were saved there."""
    names = storage.list_names(folder)
    shown = storage.masked(folder)
    if MANIFEST_NAME in names:
        raise DataError(
            f"{option} {shown} is a cache that packtool export made, not rows", "Give it to packtool train instead."
        )
    if _DICT_NAME in names:
        return _files_in(storage.join(folder, _split_of(folder, option)[0]), option)
    if _STATE_NAME in names and _METADATA[0] in names:
        state = _json(storage.join(folder, _STATE_NAME), option)
        files = [storage.join(folder, file["filename"]) for file in state.get("_data_files") or []]
        if not files:
            raise DataError(f"{option} {shown}: its {_STATE_NAME} names no data files", "Save it again.")
        return files
    if PACKS_MANIFEST_NAME in names:
        manifest = _json(storage.join(folder, PACKS_MANIFEST_NAME), option)
        entries = [file.get("file") for file in manifest.get("files") or [] if isinstance(file, dict)]
        files = [storage.join(folder, storage.name(name)) for name in entries if isinstance(name, str)]
        if not files:
            problem = f"{option} {shown}: its {PACKS_MANIFEST_NAME} names no files of packs"
            raise DataError(problem, "Write the packs again, or name their files.")
        return files
    paths = list(storage.walk(folder))
    outputs = tuple(path[: -len(marker)] for path in paths for marker in _OUTPUT_MARKERS if path.endswith(f"/{marker}"))
    files = [
        path
        for path in paths
        if format_of(path)
        and not _HIDDEN.search(path[len(folder) :])
        and not _is_metadata(path)
        and not path.startswith(outputs)
    ]
    if not files:
        seen = ", ".join(path[len(folder) :].lstrip("/\\") for path in paths[:8]) or "nothing"
        raise DataError(f"{option} {shown}: no files of rows in it, but {seen}", f"Known are {KNOWN_FORMATS}.")
    return files


def _is_metadata(path: str) -> bool:
    name = storage.name(path)
    if name == _STATE_NAME:
        return storage.exists(storage.join(storage.parent(path), _METADATA[0]))
    return name in _METADATA


def _split_of(folder: str, option: str) -> tuple[str, list[str]]:
    """Return the split of a saved ``DatasetDict`` to read (train, or the only one), and all of its splits."""
    splits = _json(storage.join(folder, _DICT_NAME), option).get("splits") or []
    if "train" in splits:
        return "train", splits
    if len(splits) != 1:
        raise DataError(
            f"{option} {storage.masked(folder)} holds the splits {', '.join(splits) or 'none'}, and no train",
            "Name the folder of one of them.",
        )
    return str(splits[0]), splits


def _json(path: str, option: str) -> dict[str, Any]:
    try:
        value = load_json(storage.read_bytes(path))
    except ValueError as error:
        raise DataError(f"{option}: {storage.masked(path)} is broken: {error}", "Save the dataset again.") from error
    return value if isinstance(value, dict) else {}


def _columns(items: Sequence[str]) -> Pairs:
    """Parse ``query=q response=a``, or ``{"query": "q", "response": "a"}``."""
    pairs: list[tuple[str, str]] = []
    for item in items:
        if item.lstrip().startswith("{"):
            import yaml  # here, because most runs need none of it; it reads JSON, and mappings as YAML files print them

            try:
                values = parse_yaml(item)
            except yaml.YAMLError as error:
                raise ConfigError(f"--columns {item}: not JSON: {error}") from error
            if not isinstance(values, dict) or not all(isinstance(text, str) for text in chain(*values.items())):
                raise ConfigError(f"--columns {item}: expected an object of names")
            pairs += values.items()
            continue
        name, equals, column = item.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--columns {item}: expected name=column", "For example --columns query=title response=body"
            )
        pairs.append((name, column))
    return tuple(pairs)
