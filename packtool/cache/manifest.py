"""``packtool.json``, the manifest: identity, sources, files and counts of a cache.

It is written last: a directory without it is unfinished. Reading checks every value against its field's type, because
somebody else may have written the file.
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
from packtool.config.mixture import amount_behind
from packtool.config.settings import load_json
from packtool.constants import FORMAT_VERSION, MANIFEST_NAME, TRAIN_SPLIT, VAL_SPLIT
from packtool.encode.families import MediaLimits
from packtool.errors import MismatchError
from packtool.rows.sample import Dropped

T = TypeVar("T")

_MAX_NUMBER = 2**62  # more than any count of tokens or bytes, and still an int64
_MAX_SHOWN = 60
_type_hints = cache(partial(get_type_hints, include_extras=True))


class WrongValue(ValueError):
    """A value of the wrong type or range; the message names its place and what is expected."""

    def __init__(self, place: str, value: object, expected: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
        super().__init__(f"{place or 'it'} is {shown}, not {expected}")


def build(kind: type[T], raw: object, place: str = "") -> T:
    """Rebuild a dataclass from the result of ``dataclasses.asdict``; numbers must be finite and not negative.

    Args:
        place: of the value in its file, for messages: ``splits.train.shards[3]``.

    Raises:
        WrongValue: naming place, value and what is expected.
    """
    if not isinstance(raw, dict):
        raise WrongValue(place, raw, "an object")
    types_by_name = _type_hints(cast(Hashable, kind))
    for name in raw:
        if name not in types_by_name:
            raise WrongValue(_at(place, str(name)), raw[name], f"known: {', '.join(types_by_name)} are")
    values = {}
    for member in dataclasses.fields(cast(Any, kind)):
        if member.name in raw:
            values[member.name] = value_of(types_by_name[member.name], raw[member.name], _at(place, member.name))
        elif member.default is dataclasses.MISSING and member.default_factory is dataclasses.MISSING:
            raise WrongValue(_at(place, member.name), None, "there, and must be")
    return kind(**values)


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def value_of(kind: Any, raw: Any, place: str) -> Any:
    """Convert a JSON value to a dataclass, str, int, float, bool, a union with None, a literal, tuple or mapping.

    ``Annotated[int, -1]`` is an int that may also be -1.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return raw if raw == arguments[1] else value_of(arguments[0], raw, place)
    if kind is Any:
        return raw
    if dataclasses.is_dataclass(kind):
        return build(cast(type, kind), raw, place)
    if origin in (Union, types.UnionType):
        (other,) = (each for each in arguments if each is not type(None))
        return None if raw is None else value_of(other, raw, place)
    if origin is Literal:
        if not isinstance(raw, str) or raw not in arguments:
            raise WrongValue(place, raw, f"one of {', '.join(map(str, arguments))}")
        return raw
    if origin is tuple:
        if not isinstance(raw, list):
            raise WrongValue(place, raw, "a list")
        return tuple(value_of(arguments[0], value, f"{place}[{i}]") for i, value in enumerate(raw))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, dict):
            raise WrongValue(place, raw, "an object")
        return {name: value_of(arguments[1], value, _at(place, name)) for name, value in raw.items()}
    expected, accepted = _PLAIN_TYPES[kind]
    if not isinstance(raw, accepted) or (kind is not bool and isinstance(raw, bool)):
        raise WrongValue(place, raw, expected)
    if isinstance(raw, (int, float)) and not 0 <= raw < _MAX_NUMBER:
        raise WrongValue(place, raw, expected)
    return raw


# The name of each type in messages, and the types of its values in JSON.
_PLAIN_TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    int: ("a count", (int,)),
    float: ("a number that is not negative", (int, float)),
}

# Settings that are paths: the content counts, by its hash.
PATH_SETTINGS = ("model", "chat_template")

# Reasons of drops that a larger --max-length would have avoided.
LENGTH_REASONS = ("over_max_length", "media_over_limit")


@dataclass(frozen=True)
class SourceInfo:
    """A file of rows and its state at the time of the export; ``settings`` is ``SourceSpec.settings``."""

    path: str
    size: Annotated[int, -1]  # -1: unknown
    modified: str
    digest: str
    rows: int
    settings: str = ""


@dataclass(frozen=True)
class ShardInfo:
    """One data file of a split: name, rows, bytes and SHA-256."""

    file: str
    rows: int
    bytes: int
    sha256: str


class Counts:
    """Base of dataclasses whose fields add up: numbers, and mappings of names to numbers."""

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Self:
        """Return the sum of several; names of mappings in ascending order."""
        counts = list(parts)
        sums: dict[str, Any] = {}
        for member in dataclasses.fields(cast(Any, cls)):
            values = [getattr(each, member.name) for each in counts]
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
    """Counts of rows: each is dropped, or kept as one or several samples.

    Args:
        rows: of the input.
        dropped: dropped rows by reason.
        marks_added: rows whose missing picture marks were added.
        parts_left_out: dropped turns and responses by reason, of rows that are kept.
    """

    rows: int
    dropped: Mapping[str, int]
    marks_added: int
    parts_left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_dropped(cls, item: Dropped) -> InputCounts:
        """Return the counts of one dropped row, or part of a row; ``rows`` is 0, because rows are counted elsewhere."""
        dropped, left_out = ({item.reason: 1}, {}) if item.part is None else ({}, {item.reason: 1})
        return cls(rows=0, dropped=dropped, marks_added=0, parts_left_out=left_out)


@dataclass(frozen=True, kw_only=True)
class SampleCounts(Counts):
    """Counts of the samples of a split.

    Args:
        rows: samples.
        truncated, truncated_tokens: truncated samples, and tokens removed from them.
        pieces_added: samples in excess of one per row: pieces of texts, turns, responses.
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
        length_histogram: samples by length, in equal bins of ``max_length / len`` tokens.
        index_sha256: of the index; empty in older caches.
        prefixes_sha256: of ``prefixes.arrow``; empty in older caches, which have none.
    """

    length_histogram: tuple[int, ...]
    shards: tuple[ShardInfo, ...]
    index_sha256: str = ""
    prefixes_sha256: str = ""


@dataclass(frozen=True)
class Identity:
    """Everything that determines the content of a cache: equal identities, equal bytes.

    Args:
        spec: the EncodeSpec as recorded.
        model_type, tokenizer_hash, template_hash, processor_hash: of the model's files.
        media_limits: resolved from processor settings, environment and options.
        seed, split_dataset_ratio, rows_per_shard: of the export.
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
        packtool_version: that wrote it.
        channels: names in the order of the index's codes.
        splits: ``train`` and perhaps ``val``.
    """

    packtool_version: str
    identity: Identity
    sources: tuple[SourceInfo, ...]
    channels: tuple[str, ...]
    splits: Mapping[str, SplitInfo]
    fingerprint: str

    @property
    def max_length(self) -> int:
        """Maximum tokens of a sample."""
        return int(self.identity.spec["max_length"])

    @property
    def num_shortened(self) -> int:
        """Rows that truncation changed or a length limit dropped."""
        lost = [*self.dropped.items(), *self.parts_left_out.items()]
        return sum(split.truncated for split in self.splits.values()) + sum(
            count for reason, count in lost if reason in LENGTH_REASONS
        )

    def to_json(self) -> bytes:
        """Return the content of the file; equal exports have equal content."""
        plain = dataclasses.asdict(dataclasses.replace(self, sources=()))
        plain = {name: plain.pop(name) for name in ("packtool_version", "identity", "sources")} | plain
        # Counts that older caches lack come last, and only if there are any, so that other caches keep their bytes.
        if left_out := plain.pop("parts_left_out"):
            plain["parts_left_out"] = left_out
        text = json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
        if self.sources:
            # There may be many thousand, and json is a few times faster without an indent.
            encode = json.JSONEncoder(ensure_ascii=False, separators=(",\n   ", ": ")).encode
            lines = ",\n".join(f"  {{\n   {encode(vars(source))[1:-1]}\n  }}" for source in self.sources)
            text = text.replace('\n "sources": []', f'\n "sources": [\n{lines}\n ]', 1)
        return text.encode()

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """Read the manifest of a finished cache.

        Raises:
            MismatchError: if the directory is no finished cache, or has another format.
        """
        path = storage.join(directory, MANIFEST_NAME)
        if not storage.exists(path):
            if amount := amount_behind(directory):
                raise MismatchError(
                    f"{directory} is no cache, and #{amount} behind one is for training: caches are taken whole here",
                    f"Leave out #{amount}.",
                )
            is_there = storage.is_remote(directory) or storage.is_directory(directory)
            raise MismatchError(
                f"{directory} is no finished cache: "
                + (f"it has no {MANIFEST_NAME}" if is_there else "there is no such directory"),
                "Run packtool export to make it, or to finish it, with that --output-dir.",
            )
        data = storage.read_bytes(path)
        try:
            raw = load_json(data)
            version = raw["identity"]["format_version"]
            if version == FORMAT_VERSION:
                manifest = build(cls, raw)
                _check(manifest)
                return manifest
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            detail = str(error) if isinstance(error, WrongValue) else repr(error)
            raise MismatchError(f"{path} is broken: {detail}", "Copy the cache again, or export it again.") from error
        raise MismatchError(
            f"{directory} has format {str(version)[:20]}, this packtool reads format {FORMAT_VERSION}",
            "Export it again.",
        )


# Names of files and directories in a manifest, which somebody else may have written.
_PATTERNS = {
    "fingerprint": re.compile(r"[0-9a-f]{16}"),
    "shard": re.compile(r"data-[0-9]{5,9}-of-[0-9]{5,9}\.arrow"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
}


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """The counts of an export, under the names of ``packtool export --json``.

    Args:
        truncated: samples that truncation changed.
        dropped: rows left out by reason.
        marks_added: rows whose missing picture marks were added.
        length: p50, p90, p99 and max of the kept samples' tokens.
        already_finished: nothing was done, because the cache was there.
        pieces_added: samples beyond one a row: pieces of texts, turns, responses.
        parts_left_out: turns and responses by reason, of rows of which others are kept.
        num_missing_shards: shards that other parts of a job array have not finished; the counts are this part's then.
        num_reused: shards that an earlier, interrupted run had finished.
        rows_made: rows that this run encoded, without those of an earlier one's shards.
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

    @classmethod
    def of(cls, rows: InputCounts, samples: SampleCounts, **figures: Any) -> ExportSummary:
        """Return the summary of these counts and further ``figures``."""
        names = {member.name for member in dataclasses.fields(cls)}
        counts = {name: value for name, value in (vars(rows) | vars(samples)).items() if name in names}
        return cls(num_rows=rows.rows, num_samples=samples.rows, **counts, **figures)

    @classmethod
    def of_manifest(cls, manifest: Manifest, **figures: Any) -> ExportSummary:
        """Return the summary of a finished cache."""
        by_split = {name: split.rows for name, split in manifest.splits.items()}
        rows, samples = InputCounts.total([manifest]), SampleCounts.total(manifest.splits.values())
        return cls.of(rows, samples, num_samples_by_split=by_split, **figures)


def _check(manifest: Manifest) -> None:
    """Raise a WrongValue for the first name or number that an export would not write."""
    _named("fingerprint", manifest.fingerprint, "fingerprint")
    for name, split in manifest.splits.items():
        place = f"splits.{name}"
        if name not in (TRAIN_SPLIT, VAL_SPLIT):
            raise WrongValue(place, name, f"{TRAIN_SPLIT} or {VAL_SPLIT}")
        if split.index_sha256:
            _named(f"{place}.index_sha256", split.index_sha256, "sha256")
        for i, shard in enumerate(split.shards):
            _named(f"{place}.shards[{i}].file", shard.file, "shard")
            _named(f"{place}.shards[{i}].sha256", shard.sha256, "sha256")
        files = [shard.file for shard in split.shards]
        if len(set(files)) < len(files):
            raise WrongValue(f"{place}.shards", files, "files of different names")
        if (rows := sum(shard.rows for shard in split.shards)) != split.rows:
            raise WrongValue(f"{place}.rows", split.rows, f"the {rows} of its shards")
    if len(set(manifest.channels)) < len(manifest.channels):
        raise WrongValue("channels", manifest.channels, "different names")
    for i, source in enumerate(manifest.sources):
        if source.settings and not isinstance(load_json(source.settings), dict):
            raise WrongValue(f"sources[{i}].settings", source.settings, "an object as JSON")
    identity = manifest.identity
    kinds = get_type_hints(EncodeSpec)
    for name, value in identity.spec.items():
        if name in kinds:
            value_of(kinds[name], value, f"identity.spec.{name}")
    for name, minimum in (("model", ""), ("max_length", 2)):
        if name not in identity.spec or identity.spec[name] < minimum:
            raise WrongValue(f"identity.spec.{name}", identity.spec.get(name), f"at least {minimum!r}")
    if identity.split_dataset_ratio > 1:
        raise WrongValue("identity.split_dataset_ratio", identity.split_dataset_ratio, "a share")
    for limits in (identity.media_limits.image, identity.media_limits.video):
        if limits is not None and 0 in (limits.patch_size, limits.merge_size, limits.temporal_patch_size):
            raise WrongValue("identity.media_limits", limits, "patches of at least one pixel")


def _named(place: str, value: str, kind: str) -> None:
    if not _PATTERNS[kind].fullmatch(value):
        raise WrongValue(place, value, f"such a name as an export gives ({_PATTERNS[kind].pattern})")


def fingerprint_of(identity: Identity, sources: tuple[SourceInfo, ...]) -> str:
    """Return the fingerprint of a cache: a digest of its identity and of the digests of its sources."""
    plain = dataclasses.asdict(identity)
    plain["spec"] = {key: value for key, value in plain["spec"].items() if key not in PATH_SETTINGS}
    text = json.dumps([plain, [(source.digest, source.settings) for source in sources]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
