"""Options of rows, media and caches, and the settings of export and import."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass, fields
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from packtool import storage
from packtool.config.conflicts import Settings
from packtool.config.packages import PackageOptions
from packtool.config.settings import (
    REQUIRED,
    YES_OR_NO,
    Bytes,
    Tokens,
    access_option,
    cache_option,
    option,
    part_of,
    picture_option,
    row_option,
    shard_option,
    video_option,
)

# For limits that are not set by default.
picture_limit = functools.partial(picture_option, None)
video_limit = functools.partial(video_option, None)

TruncationStrategy = Literal["delete", "left", "right", "split", "raise"]
MediaOverflow = Literal["drop", "trim", "raise"]
MediaAccess = Literal["root", "local", "any"]
ExpandTurns = Annotated[Literal["auto", "true", "false"], YES_OR_NO]
BboxType = Literal["real", "norm1", "norm1000"]
"""Units of coordinates: pixels, fractions of the image's sides, thousandths of its sides."""

MAX_ROW_BYTES = 64_000_000

DATASET_HELP = "Input files, folders, patterns, hub ids, or names from --dataset-info."
TRUNCATION_HELP = "Drop a longer row, truncate it left or right, split it, or stop."
OVERFLOW_HELP = "Drop a row whose media exceed --max-length, remove its oldest media, or stop."
TEMPLATE_HELP = "File with a Jinja chat template that replaces the model's."
LOSS_SCALE_HELP = "Tokens to train: default, last_round or all, and rules such as +hermes."
EXPAND_HELP = "Make a sample of every assistant turn, so that its thinking is trained."


@dataclass(frozen=True, kw_only=True)
class AccessOptions(Settings):
    """Access policy for media referenced by rows and caches, which may come from untrusted authors."""

    media_access: MediaAccess = access_option(
        "root", "Restrict which files, buckets and addresses rows may reference as media."
    )
    max_media_bytes: Bytes | None = access_option(
        None, "Maximum size of a media file; by default 4GB, and 500MB for images.", minimum=None
    )

    @property
    def command_line_sources(self) -> tuple[str, ...]:
        """Caches, rows and the media root given on the command line; their stores may be accessed."""
        named = [getattr(self, name, None) or () for name in ("directory", "cached_dataset", "dataset", "media_root")]
        return tuple(chain.from_iterable([value] if isinstance(value, str) else value for value in named))


@dataclass(frozen=True, kw_only=True)
class RowOptions(AccessOptions):
    """Selection and reading of rows."""

    dataset: tuple[str, ...] = row_option((), DATASET_HELP)
    val_dataset: tuple[str, ...] = row_option((), "Rows of the validation split, given like --dataset.")
    dataset_info: str | None = row_option(
        None, "LLaMA-Factory's dataset_info.json, or its folder, which names datasets for --dataset."
    )
    columns: tuple[str, ...] = row_option(
        (), "Map unusual column names, as in query=title response=body, or a JSON object."
    )
    system: str | None = row_option(None, "System prompt for conversations that have none.")
    media_root: str | None = row_option(
        None, "Folder to search for relative media paths before the folder of the rows.", env="ROOT_IMAGE_DIR"
    )
    max_media_failures: int = access_option(
        100, "Stop after this many consecutive media failures of one store; 0 never stops.", minimum=0
    )
    per_dataset_loss_scale: bool = row_option(True, "Apply the loss_scale that --dataset-info gives to each dataset.")
    split_dataset_ratio: float = row_option(
        0.0, "Fraction of the rows in the validation split.", minimum=0.0, maximum=0.999
    )
    use_hf: bool | None = row_option(
        None, "Download ids from the Hugging Face hub; false downloads from ModelScope.", env="USE_HF"
    )
    strict: bool = row_option(False, "Stop at the first unusable row, with exit code 3.")
    max_row_bytes: Bytes = row_option(MAX_ROW_BYTES, "Maximum size of a row, such as 64MB; larger rows are dropped.")
    dataset_num_proc: int = row_option(1, "Number of encoding processes; does not change the output.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class MediaOptions(Settings):
    """Limits on media; the model's processor settings provide those that are not given.

    Names and meanings are those of the environment variables of the Qwen processors and ms-swift. N tokens of an image
    are N x (patch x merge)^2 pixels.
    """

    max_pixels: int | None = picture_limit("Maximum pixels of an image; larger images are shrunk.", env="MAX_PIXELS")
    min_pixels: int | None = picture_limit("Minimum pixels of an image; smaller images are enlarged.", env="MIN_PIXELS")
    image_max_token_num: Tokens | None = picture_limit("Maximum tokens of an image.", env="IMAGE_MAX_TOKEN_NUM")
    image_min_token_num: Tokens | None = picture_limit("Minimum tokens of an image.", env="IMAGE_MIN_TOKEN_NUM")
    resize: int = picture_option(
        0, "Accepted for ms-swift; only 0 (keep image sizes) is supported.", minimum=0, maximum=0
    )

    fps: float | None = video_option(None, "Frames per second to sample from a video.", env="FPS", minimum=0.001)
    fps_min_frames: int | None = video_limit("Minimum frames to sample from a video.", env="FPS_MIN_FRAMES")
    fps_max_frames: int | None = video_limit("Maximum frames to sample from a video.", env="FPS_MAX_FRAMES")
    video_max_pixels: int | None = video_limit("Maximum pixels of a video frame.", env="VIDEO_MAX_PIXELS")
    video_min_pixels: int | None = video_limit("Minimum pixels of a video frame.", env="VIDEO_MIN_PIXELS")
    video_total_pixels: int | None = video_limit("Maximum pixels of all frames of a video.", env="VIDEO_TOTAL_PIXELS")
    video_max_token_num: Tokens | None = video_limit("Maximum tokens of a video frame.", env="VIDEO_MAX_TOKEN_NUM")
    video_min_token_num: Tokens | None = video_limit("Minimum tokens of a video frame.", env="VIDEO_MIN_TOKEN_NUM")
    use_audio_in_video: bool | None = video_option(
        None, "Interleave a video's sound track with its frames (Omni models).", env="USE_AUDIO_IN_VIDEO"
    )
    sampling_rate: int | None = video_limit("Audio samples per second.", env="SAMPLING_RATE")


@dataclass(frozen=True, kw_only=True)
class BoxOptions(Settings):
    """Format of boxes, points and polygons; by default, that of the row and the model's family."""

    bbox_type: BboxType | None = picture_option(
        None, "Unit of box coordinates in JSON texts: pixels, fractions or thousandths."
    )
    bbox_format: Literal["legacy", "new"] | None = picture_option(
        None, "Write boxes with Qwen2-VL's special tokens (legacy) or as JSON lists (new).", env="QWENVL_BBOX_FORMAT"
    )
    norm_bbox: Literal["norm1000", "none"] | None = picture_option(
        None, "Write coordinates in thousandths of the image (norm1000) or in resized pixels (none)."
    )


BOX_SETTINGS = tuple(field.name for field in fields(BoxOptions))


def expand_problems(expand_turns: ExpandTurns | None, loss_scale: str | None) -> list[str]:
    """Return the message about a loss scale that contradicts ``--expand-turns``, if it does."""
    bases = (loss_scale or "").split("+")
    if expand_turns in (None, "false"):
        return []
    if "all" in bases:
        return [
            f"--expand-turns {expand_turns} and --loss-scale {loss_scale}: each sample would train its earlier turns "
            "again; leave out one of them"
        ]
    if expand_turns == "true" and bases[0].startswith("last_round"):
        return [
            f"--expand-turns true and --loss-scale {loss_scale}: only the last turn is trained, which needs no "
            "expansion; leave out one of them"
        ]
    return []


Executor = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(BoxOptions, MediaOptions):
    """All options that determine the encoding of a row: exports with equal specs write the same tokens."""

    model: str = option(REQUIRED, "Model directory or hub id; only tokenizer, processor and config are read.")
    max_length: Tokens = option(0, "Maximum tokens of a sample; by default the model's limit, at most 8192.", minimum=2)
    truncation_strategy: TruncationStrategy = option("delete", TRUNCATION_HELP)
    media_overflow: MediaOverflow = row_option("drop", OVERFLOW_HELP)
    loss_scale: str = row_option("default", LOSS_SCALE_HELP)
    expand_turns: ExpandTurns = row_option("false", EXPAND_HELP)
    chat_template: str | None = row_option(None, TEMPLATE_HELP)
    media: Literal["reference", "embed"] = row_option(
        "reference", "Store media paths in the cache, or embed the files."
    )

    def recorded(self) -> dict[str, Any]:
        """Return the values that a cache's manifest records.

        Newer options are recorded only if they are given, so that older caches keep their fingerprints.
        """
        values = dataclasses.asdict(self)
        if self.chat_template is not None:
            values["chat_template"] = os.path.abspath(self.chat_template)
        newer = {"expand_turns": "false", **dict.fromkeys((*BOX_SETTINGS, "chat_template"))}
        return {name: value for name, value in values.items() if name not in newer or value != newer[name]}


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RowOptions, EncodeSpec, PackageOptions):
    """Settings of ``packtool export``."""

    TAKES_TOKENS: ClassVar[bool] = False
    """True if rows that contain both tokens and messages are read as tokens."""
    COMMON_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("model", "dataset", "output_dir", "max_length", "truncation_strategy", "split_dataset_ratio", "max_pixels"),
        *("fps", "loss_scale", "dataset_num_proc", "overwrite", "repair", "dry_run"),
    )

    dataset: tuple[str, ...] = row_option(REQUIRED, DATASET_HELP)
    output_dir: str = option(REQUIRED, "Directory of the new cache.")
    seed: int = shard_option(42, "Random seed of the validation split.", minimum=0)
    rows_per_shard: int | None = shard_option(
        None, "Rows per shard, in steps of 64; by default total/64, from 256 to 16384.", minimum=1
    )
    to_cached_dataset: bool = shard_option(True, "Accepted for ms-swift; export always writes a cached dataset.")
    overwrite: bool = option(False, "Delete an existing cache in --output-dir first.")
    repair: bool = option(False, "Rebuild only the damaged files of a finished cache.")
    executor: Executor = shard_option("local", "Run on this machine or on a Ray cluster.")
    ray_address: str | None = shard_option(
        None, "Address of the Ray cluster; by default one starts on this machine.", env="RAY_ADDRESS"
    )
    task_index: int | None = shard_option(None, "Export only part i of --num-tasks, counted from 0.", minimum=0)
    num_tasks: int | None = shard_option(None, "Number of parts of a job array.")
    finalize: bool = shard_option(False, "Publish the cache from the exported parts of a job array.")
    dry_run: bool = option(False, "Encode and count rows without writing a cache.")

    @property
    def encode_spec(self) -> EncodeSpec:
        """The options that determine how a row is encoded."""
        return part_of(EncodeSpec, self)

    @property
    def is_part(self) -> bool:
        """True for a part of a job array: other commands may export into the same directory."""
        return self.task_index is not None or self.finalize

    def value_problems(self) -> list[str]:
        """Return the message about a loss scale that contradicts ``--expand-turns``, if it does."""
        return expand_problems(self.expand_turns, self.loss_scale)


@dataclass(frozen=True, kw_only=True)
class ImportConfig(ExportConfig):
    """Settings of ``packtool import``: those of export with another ``dataset`` and ``max_length``."""

    TAKES_TOKENS: ClassVar[bool] = True

    dataset: tuple[str, ...] = row_option(
        REQUIRED, "Tokenized data: a saved dataset, its files, or a Megatron .idx file."
    )
    max_length: Tokens = option(0, "Maximum tokens of a sample; 0 uses the model's max_position_embeddings.", minimum=0)


VerifyCache = Literal["always", "once", "never"]
_VARIABLE = "PACKTOOL_CACHE_DIR"


def default_cache_dir() -> str:
    """Return ``PACKTOOL_CACHE_DIR``, or ``packtool`` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get(_VARIABLE) or os.path.join(home, "packtool")


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Settings):
    """Local copies of remote caches, and verification of their files."""

    cache_dir: str | None = cache_option(
        None, "Local directory for copies of remote caches and for verification records.", env=_VARIABLE
    )
    cache_dir_size: Bytes | None = cache_option(
        None,
        "Maximum size of --cache-dir, such as 200GB; by default unlimited.",
        env="PACKTOOL_CACHE_DIR_SIZE",
        minimum=None,
    )
    verify_cache: VerifyCache = cache_option(
        "once", "Verify checksums of caches in every run, once per machine, or never."
    )


@dataclass(frozen=True, kw_only=True)
class MediaCacheOptions(Settings):
    """Cache of resized images and video frames."""

    media_cache: str | None = cache_option(
        None, "Local directory for resized images and video frames, reused in later epochs."
    )
    media_cache_size: Bytes | None = cache_option(None, "Maximum size of --media-cache, such as 500GB.", minimum=None)

    def value_problems(self) -> list[str]:
        """Return the message about a media cache that is remote or has no size."""
        directory, size = self.media_cache, self.media_cache_size
        if directory is None:
            return []
        if storage.is_remote(directory):
            return [f"--media-cache {storage.masked(directory)}: give a directory on a disk of this machine"]
        if size is None:
            return ["--media-cache-size is missing: give the maximum size of --media-cache, as in 500GB"]
        return [] if size else ["--media-cache-size 0 stores nothing: leave out --media-cache"]
