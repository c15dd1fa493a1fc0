"""``packtool.json``: what a cache is, written last, so that a directory without it is unfinished."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packtool import storage
from packtool.constants import FORMAT_VERSION, MANIFEST_NAME
from packtool.encode.families import MediaLimits
from packtool.errors import MismatchError

# Settings that are paths: what lies there counts by its hash, wherever it lies.
PATH_SETTINGS = ("model", "chat_template")

# Drops that a larger --max-length would have avoided.
LENGTH_REASONS = ("over_max_length", "media_over_limit")


@dataclass(frozen=True)
class SourceInfo:
    """One file of rows of an export, and what it was then.

    Args:
        settings: how it was read, where that was not the usual way: ``SourceSpec.settings``.
    """

    path: str
    size: int
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


@dataclass(frozen=True)
class SplitInfo:
    """Counts of one split.

    Args:
        rows: samples.
        pieces_added: samples beyond one a row, where texts were split.
        length_histogram: samples by length, in equal bins of ``max_length / len`` tokens.
    """

    rows: int
    tokens: int
    target_tokens: int
    media_tokens: int
    truncated: int
    truncated_tokens: int
    pieces_added: int
    length_histogram: tuple[int, ...]
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True)
class Identity:
    """What decides the content of a cache: equal identities, equal bytes.

    Args:
        spec: the EncodeSpec as given.
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

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Manifest:
    """Everything that stage two asks about a cache.

    Args:
        packtool_version: that wrote it.
        rows: that went in.
        dropped: rows left out by reason.
        marks_added: rows whose missing picture marks were added.
        channels: names in the order of the index's codes.
        splits: ``train`` and perhaps ``val``.
    """

    packtool_version: str
    identity: Identity
    sources: tuple[SourceInfo, ...]
    rows: int
    dropped: Mapping[str, int]
    marks_added: int
    channels: tuple[str, ...]
    splits: Mapping[str, SplitInfo]
    fingerprint: str

    @property
    def max_length(self) -> int:
        """Most tokens of a sample."""
        return int(self.identity.spec["max_length"])

    @property
    def num_shortened(self) -> int:
        """Rows that truncation changed or a length limit left out."""
        return sum(split.truncated for split in self.splits.values()) + sum(
            count for reason, count in self.dropped.items() if reason in LENGTH_REASONS
        )

    def to_json(self) -> bytes:
        """The file's content: the same for the same export."""
        return (json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def read(cls, directory: str) -> Manifest:
        """Read the manifest of a finished cache.

        Raises:
            MismatchError: if the directory is no finished cache, or one of another format.
        """
        path = storage.join(directory, MANIFEST_NAME)
        if not storage.exists(path):
            raise MismatchError(
                f"{directory} is no finished cache: "
                + (f"it has no {MANIFEST_NAME}" if _may_be_there(directory) else "there is no such directory"),
                "Run packtool export to make it, or to finish it, with that --output-dir.",
            )
        data = storage.read_bytes(path)
        try:
            raw = json.loads(data)
            version = raw["identity"]["format_version"]
            if version == FORMAT_VERSION:
                return cls._of(raw)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise MismatchError(f"{path} is broken: {error!r}", "Copy the cache again, or export it again.") from error
        raise MismatchError(
            f"{directory} has format {version}, this packtool reads format {FORMAT_VERSION}", "Export it again."
        )

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Manifest:
        limits = MediaLimits.from_json(raw["identity"].pop("media_limits"))
        identity = Identity(media_limits=limits, **raw.pop("identity"))
        splits = {}
        for name, split in raw.pop("splits").items():
            shards = tuple(ShardInfo(**shard) for shard in split.pop("shards"))
            histogram = tuple(split.pop("length_histogram"))
            splits[name] = SplitInfo(shards=shards, length_histogram=histogram, **split)
        sources = tuple(SourceInfo(**source) for source in raw.pop("sources"))
        channels = tuple(raw.pop("channels"))
        return cls(identity=identity, sources=sources, splits=splits, channels=channels, **raw)


def fingerprint_of(identity: Identity, sources: tuple[SourceInfo, ...]) -> str:
    """Names a cache by what decides its content: identity and the digests of its sources."""
    plain = identity.as_dict()
    plain["spec"] = {key: value for key, value in plain["spec"].items() if key not in PATH_SETTINGS}
    text = json.dumps([plain, [(source.digest, source.settings) for source in sources]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _may_be_there(directory: str) -> bool:
    return storage.is_remote(directory) or storage.is_directory(directory)
