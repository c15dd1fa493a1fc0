"""``packtool.json``, the manifest: identity, sources, files and counts of a cache.

It is written last: a directory without it is unfinished. Every value is checked when it is read, because a cache may
come from anyone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import types
import typing
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Annotated, Any, Literal, Self, TypeVar, Union, cast, get_type_hints

from packtool import storage
from packtool.config.data import EncodeSpec
from packtool.config.mixture import amount_suffix
from packtool.config.settings import load_json
from packtool.constants import FORMAT_VERSION, MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT
from packtool.encode.families import MediaLimits
from packtool.errors import MismatchError
from packtool.rows.sample import Dropped

T = TypeVar("T")

_MAX_NUMBER = 2**62  # more than any count of tokens or bytes, and still an int64
_MAX_SHOWN, _MAX_SHOWN_VERSION = 60, 20  # characters of a value in a message
_type_hints = cache(partial(get_type_hints, include_extras=True))


class ManifestError(ValueError):
    """An error in a manifest, whose message names the field and the problem."""


class WrongValue(ManifestError):
    """A value of the wrong type or range; the message names the field, its value and what is expected."""

    def __init__(self, path: str, value: object, expected: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
        super().__init__(f"{path or 'it'} is {shown}, not {expected}")


def build(cls: type[T], raw: object, path: str = "") -> T:
    """Create an instance of a dataclass from a JSON object, and check every field.

    The keys of the object are the names of the fields. Values are converted to the declared types; a field whose type
    is a dataclass is built in the same way. A missing key takes the default of its field.

    Args:
        raw: a parsed JSON value.
        path: where ``raw`` is in its file, such as ``splits.train.shards[3]``; used only in messages.

    Raises:
        ManifestError: if ``raw`` is not an object, if a key is unknown, if a field without a default is missing, or if
            a value has the wrong type.
    """
    if not isinstance(raw, dict):
        raise WrongValue(path, raw, "an object")
    type_by_name = _type_hints(cast(Hashable, cls))
    for name in raw:
        if name not in type_by_name:
            raise ManifestError(f"{_join(path, str(name))} is unknown; the fields are {', '.join(type_by_name)}")
    values = {}
    for each_field in dataclasses.fields(cast(Any, cls)):
        name = each_field.name
        field_path = _join(path, name)
        if name in raw:
            values[name] = value_of(type_by_name[name], raw[name], field_path)
        elif not _has_default(each_field):
            raise ManifestError(f"{field_path} is missing")
    return cls(**values)


def _has_default(each_field: dataclasses.Field[Any]) -> bool:
    no_default = dataclasses.MISSING
    return each_field.default is not no_default or each_field.default_factory is not no_default


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def value_of(kind: Any, raw: Any, path: str) -> Any:
    """Convert a JSON value to a declared type; raise a ManifestError if it does not fit. Numbers are from 0 to 2**62.

    Args:
        kind: a dataclass, str, int, float, bool, Any, a union with None, a literal of texts, ``tuple[X, ...]`` or
            ``Mapping[str, X]``; or ``Annotated[X, value]`` or ``Annotated[str, pattern]``.
        path: where the value is in its file, for messages.
    """
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is Annotated:
        return _annotated_value(arguments, raw, path)
    if kind is Any:
        return raw
    if dataclasses.is_dataclass(kind):
        return build(cast(type, kind), raw, path)
    if origin in (Union, types.UnionType):
        if raw is None:
            return None
        first, second = arguments  # a type and None, in any order
        return value_of(second if first is type(None) else first, raw, path)
    if origin is Literal:
        if not isinstance(raw, str) or raw not in arguments:
            raise WrongValue(path, raw, f"one of {', '.join(map(str, arguments))}")
        return raw
    if origin is not None:
        return _collection_of(origin, arguments, raw, path)
    return _plain_value(kind, raw, path)


def _annotated_value(arguments: tuple[Any, ...], raw: Any, path: str) -> Any:
    """Convert a JSON value to ``Annotated[str, pattern]``, or ``Annotated[X, value]``, which also accepts ``value``."""
    kind, special = arguments
    if not isinstance(special, re.Pattern):
        return raw if raw == special else value_of(kind, raw, path)
    text = value_of(kind, raw, path)
    if not special.fullmatch(text):
        raise WrongValue(path, raw, f"a name of the form {special.pattern}")
    return text


def _collection_of(origin: type, arguments: tuple[Any, ...], raw: Any, path: str) -> Any:
    """Convert a JSON list to a tuple, or an object to a mapping; ``arguments``: type arguments of the collection."""
    if origin is tuple:
        if not isinstance(raw, list):
            raise WrongValue(path, raw, "a list")
        return tuple(value_of(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(raw))
    if not isinstance(raw, dict):
        raise WrongValue(path, raw, "an object")
    return {name: value_of(arguments[1], item, _join(path, name)) for name, item in raw.items()}


def _plain_value(kind: Any, raw: Any, path: str) -> Any:
    """Return a text, number or truth value if it is of the declared type and not negative."""
    expected, json_types = _PLAIN_TYPES[kind]
    is_of_type = isinstance(raw, json_types)
    if kind is not bool and isinstance(raw, bool):
        is_of_type = False  # although bool is a subclass of int
    is_out_of_range = isinstance(raw, (int, float)) and not 0 <= raw < _MAX_NUMBER
    if not is_of_type or is_out_of_range:
        raise WrongValue(path, raw, expected)
    return raw


# Description of each type in messages, and the Python types of its JSON values.
_PLAIN_TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    int: ("a count", (int,)),
    float: ("a number that is not negative", (int, float)),
}

# Any other name in a manifest could lead out of the cache's directory.
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_SHARD_NAME = re.compile(r"data-[0-9]{5,9}-of-[0-9]{5,9}\.arrow")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA256_OR_EMPTY = re.compile(r"([0-9a-f]{64})?")

# Settings that are paths. They are not compared: hashes of the files are part of the identity.
PATH_SETTINGS = ("model", "chat_template")

# Reasons of drops that a larger --max-length would have avoided.
LENGTH_REASONS = ("over_max_length", "media_over_limit")


@dataclass(frozen=True)
class SourceInfo:
    """A file of rows at the time of the export.

    Args:
        path: absolute, or a URL without secrets.
        modified: time of the last change or entity tag.
        settings: of its source as JSON (``SourceSpec.settings``).
    """

    path: str
    size: Annotated[int, -1]  # -1: unknown
    modified: str
    digest: str
    rows: int
    settings: str = ""


@dataclass(frozen=True)
class ShardInfo:
    """A data file of a split: name, number of rows, size in bytes, SHA-256."""

    file: Annotated[str, _SHARD_NAME]
    rows: int
    bytes: int
    sha256: Annotated[str, _SHA256]


class Counts:
    """Base of dataclasses whose fields add up: numbers, and mappings of names to numbers."""

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Self:
        """Return the sum of several counts, which may be of subclasses; mappings are sorted by name."""
        parts = list(parts)
        sums: dict[str, Any] = {}
        for member in dataclasses.fields(cast(Any, cls)):
            values = [getattr(part, member.name) for part in parts]
            if member.type == "int":
                sums[member.name] = sum(values)
            else:
                by_name = Counter[str]()
                for value in values:
                    by_name.update(value)
                sums[member.name] = dict(sorted(by_name.items()))
        return cls(**sums)

    def __add__(self, other: Counts) -> Self:
        return self.total((self, other))


@dataclass(frozen=True, kw_only=True)
class InputCounts(Counts):
    """Counts of input rows, each of which is dropped or becomes one or several samples.

    Args:
        marks_added: rows in which missing media marks were inserted.
        parts_left_out: dropped turns and responses of kept rows, by reason.
    """

    rows: int
    dropped: Mapping[str, int]
    marks_added: int
    parts_left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_dropped(cls, item: Dropped) -> InputCounts:
        """Return the counts of a dropped row or part of a row; ``rows`` is 0, because rows are counted when read."""
        if item.part is None:
            return cls(rows=0, dropped={item.reason: 1}, marks_added=0)
        return cls(rows=0, dropped={}, marks_added=0, parts_left_out={item.reason: 1})


@dataclass(frozen=True, kw_only=True)
class SampleCounts(Counts):
    """Counts of the samples of a split.

    Args:
        rows: number of samples.
        target_tokens: tokens with loss.
        truncated, truncated_tokens: truncated samples, and tokens removed from them.
        pieces_added: samples in excess of one per row, where texts, turns or responses of a row become samples.
    """

    rows: int
    tokens: int
    target_tokens: int
    media_tokens: int
    truncated: int
    truncated_tokens: int
    pieces_added: int


@dataclass(frozen=True, kw_only=True)
class SplitInfo(SampleCounts):
    """Counts and files of a split.

    Args:
        length_histogram: number of samples by length, in 64 equal bins up to ``max_length``.
        index_sha256: of ``index.arrow``; empty in older caches.
        prefixes_sha256: of ``prefixes.arrow``; empty in older caches, which have none.
    """

    length_histogram: tuple[int, ...]
    shards: tuple[ShardInfo, ...]
    index_sha256: Annotated[str, _SHA256_OR_EMPTY] = ""
    prefixes_sha256: str = ""


@dataclass(frozen=True)
class Identity:
    """Settings that determine the content of a cache: the same rows and identity give the same bytes.

    Args:
        spec: result of ``EncodeSpec.recorded``.
        media_limits: resolved from processor settings, environment and options.
    """

    spec: Mapping[str, Any]
    model_type: str
    tokenizer_hash: str
    template_hash: str
    processor_hash: str
    media_limits: MediaLimits
    seed: int
    split_dataset_ratio: float
    rows_per_shard: int | None
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class Manifest(InputCounts):
    """The content of ``packtool.json``.

    Args:
        channels: names; the index stores their positions here.
        splits: ``train``, ``val`` or both.
    """

    packtool_version: str
    identity: Identity
    sources: tuple[SourceInfo, ...]
    channels: tuple[str, ...]
    splits: Mapping[str, SplitInfo]
    fingerprint: Annotated[str, _FINGERPRINT]

    @property
    def max_length(self) -> int:
        """Maximum tokens of a sample."""
        return int(self.identity.spec["max_length"])

    @property
    def num_shortened(self) -> int:
        """Number of truncated samples, and of rows and parts of rows that were dropped for their length."""
        dropped = [*self.dropped.items(), *self.parts_left_out.items()]
        num_too_long = sum(count for reason, count in dropped if reason in LENGTH_REASONS)
        return num_too_long + sum(split.truncated for split in self.splits.values())

    def to_json(self) -> bytes:
        """Return the content of ``packtool.json``; an older manifest that is read and written keeps its bytes."""
        values = dataclasses.asdict(dataclasses.replace(self, sources=()))
        first_names = ("packtool_version", "identity", "sources")
        values = {name: values.pop(name) for name in first_names} | values
        # Counts that older caches lack come last, and only if there are any, so that other caches keep their bytes.
        parts_left_out = values.pop("parts_left_out")
        if parts_left_out:
            values["parts_left_out"] = parts_left_out
        text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
        if self.sources:
            # Insert the sources, written without ``indent``, which is a few times faster: there may be many thousand.
            encode = json.JSONEncoder(ensure_ascii=False, separators=(",\n   ", ": ")).encode
            lines = ",\n".join(f"  {{\n   {encode(vars(source))[1:-1]}\n  }}" for source in self.sources)
            text = text.replace('\n "sources": []', f'\n "sources": [\n{lines}\n ]', 1)
        return text.encode()

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """Read the manifest of a finished cache; raise a MismatchError if it is unfinished or of another format."""
        path = storage.join(directory, MANIFEST_NAME)
        if not storage.exists(path):
            raise _no_cache_error(directory)
        data = storage.read_bytes(path)
        try:
            raw = load_json(data)
            version = raw["identity"]["format_version"]
            if version != FORMAT_VERSION:
                shown_version = str(version)[:_MAX_SHOWN_VERSION]
                message = f"{directory} has cache format {shown_version}, this packtool reads format {FORMAT_VERSION}"
                raise MismatchError(message, "Export it again.")
            manifest = build(cls, raw)
            _check_values(manifest)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            detail = str(error) if isinstance(error, ManifestError) else repr(error)
            raise MismatchError(f"{path} is broken: {detail}", "Copy the cache again, or export it again.") from error
        return manifest


def _no_cache_error(directory: str) -> MismatchError:
    if amount := amount_suffix(directory):
        return MismatchError(
            f"{directory} is not a cache: the suffix #{amount} selects samples for training, and this command "
            "reads whole caches",
            f"Leave out #{amount}.",
        )
    is_there = storage.is_remote(directory) or storage.is_directory(directory)
    problem = f"it has no {MANIFEST_NAME}" if is_there else "the directory does not exist"
    message = f"{directory} is no finished cache: {problem}"
    return MismatchError(message, "Run packtool export with this --output-dir to create or finish it.")


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """The counts of an export, with the field names of ``packtool export --json``.

    Args:
        length: p50, p90, p99 and max of the kept samples' tokens.
        already_finished: the cache existed, and nothing was exported.
        num_missing_shards: shards that other parts of a job array have not finished; then all counts are this part's.
        num_reused: shards that an earlier, interrupted run had finished.
        rows_made: rows that this run encoded.
        hygiene: rows with duplicates, conflicts and overlaps, by kind.
    """

    num_rows: int
    num_samples: int
    num_samples_by_split: Mapping[str, int]
    truncated: int
    dropped: Mapping[str, int]
    marks_added: int
    tokens: int
    target_tokens: int
    media_tokens: int
    length: Mapping[str, int]
    seconds: float
    already_finished: bool = False
    pieces_added: int
    parts_left_out: Mapping[str, int]
    num_missing_shards: int = 0
    output_dir: str
    num_reused: int = 0
    rows_made: int = 0
    hygiene: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: InputCounts, samples: SampleCounts, **other_fields: Any) -> ExportSummary:
        """Return the summary of these counts; ``other_fields`` are those that neither has."""
        names = {member.name for member in dataclasses.fields(cls)}
        counts = {name: value for name, value in (vars(rows) | vars(samples)).items() if name in names}
        return cls(num_rows=rows.rows, num_samples=samples.rows, **counts, **other_fields)

    @classmethod
    def of_manifest(cls, manifest: Manifest, **other_fields: Any) -> ExportSummary:
        """Return the summary of a finished cache; ``other_fields`` are those that its manifest lacks."""
        num_samples = {name: split.rows for name, split in manifest.splits.items()}
        rows, samples = InputCounts.total([manifest]), SampleCounts.total(manifest.splits.values())
        return cls.of(rows, samples, num_samples_by_split=num_samples, **other_fields)


def _check_split(path: str, split: SplitInfo) -> None:
    """Raise a WrongValue for the first wrong value of a split; ``path`` of the split in the manifest."""
    files = [shard.file for shard in split.shards]
    if len(set(files)) < len(files):
        raise WrongValue(f"{path}.shards", files, "distinct names")
    num_rows = sum(shard.rows for shard in split.shards)
    if num_rows < split.rows:  # an export may drop rows that are in its shards
        raise WrongValue(f"{path}.rows", split.rows, f"at most {num_rows}, the sum of its shards")


def _check_values(manifest: Manifest) -> None:
    """Raise a WrongValue for the first value that no export writes, although its type is right."""
    for name, split in manifest.splits.items():
        if name not in (TRAIN_SPLIT, VAL_SPLIT):
            raise WrongValue(f"splits.{name}", name, f"{TRAIN_SPLIT} or {VAL_SPLIT}")
        _check_split(f"splits.{name}", split)
    if len(set(manifest.channels)) < len(manifest.channels):
        raise WrongValue("channels", manifest.channels, "distinct names")
    for i, source in enumerate(manifest.sources):
        if source.settings and not isinstance(load_json(source.settings), dict):
            raise WrongValue(f"sources[{i}].settings", source.settings, "a JSON object")
    _check_identity(manifest.identity)


def _check_identity(identity: Identity) -> None:
    """Raise a WrongValue for the first setting of an export that has a wrong type, is missing or out of range."""
    spec = identity.spec  # the options of the export
    type_by_name = get_type_hints(EncodeSpec)
    for name, value in spec.items():
        if name in type_by_name:
            value_of(type_by_name[name], value, f"identity.spec.{name}")  # raises for a wrong type
    minimums = {"model": "", "max_length": 2}
    for name, minimum in minimums.items():
        if name not in spec or spec[name] < minimum:
            raise WrongValue(f"identity.spec.{name}", spec.get(name), f"at least {minimum!r}")
    if identity.split_dataset_ratio > 1:
        raise WrongValue("identity.split_dataset_ratio", identity.split_dataset_ratio, "at most 1")
    for limits in (identity.media_limits.image, identity.media_limits.video):
        if limits is not None and 0 in (limits.patch_size, limits.merge_size, limits.temporal_patch_size):
            raise WrongValue("identity.media_limits", limits, "patches of at least one pixel")


def fingerprint_of(identity: Identity, sources: tuple[SourceInfo, ...]) -> str:
    """Return the fingerprint of a cache: a digest of its identity and of the digests of its sources."""
    values = dataclasses.asdict(identity)
    values["spec"] = {name: value for name, value in values["spec"].items() if name not in PATH_SETTINGS}
    text = json.dumps([values, [(source.digest, source.settings) for source in sources]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
