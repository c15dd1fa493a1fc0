"""Options of rows, media and caches: export and import, and what other commands share with them."""

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
    scale_option,
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
"""Units of coordinates: pixels, shares of the picture's sides, thousandths of its sides."""

MAX_ROW_BYTES = 64_000_000

DATASET_HELP = (
    "Rows: files (json, jsonl, csv, tsv, txt, parquet, arrow, also .gz and .zst), folders, patterns, ids of the "
    "hub, or names in --dataset-info; several may follow, and #1000, #20% or #2.5x behind one draws so many rows of it."
)
TRUNCATION_HELP = (
    "What becomes of a longer row: left out, cut on the left or right with its media kept whole, cut into pieces "
    "(texts for pretraining only), or an error."
)
OVERFLOW_HELP = (
    "What becomes of a row whose media alone exceed --max-length: left out, its oldest media removed, or an error."
)
TEMPLATE_HELP = (
    "File with a Jinja chat template to take instead of the model's: for base models, which have none, and for other "
    "formats of a conversation."
)
LOSS_SCALE_HELP = (
    "Which tokens are trained, and how much: default (assistant turns), last_round or all, and further rules "
    "behind a +, as in last_round+hermes. Models for hybrid thinking: ignore_empty_think is added, unless "
    "keep_empty_think is there."
)
EXPAND_HELP = (
    "Make a sample of every turn of the assistant, the conversation up to it as the model will see it, so that its "
    "thinking is trained where the chat template leaves out what earlier turns thought: true, false, or auto for "
    "those turns alone of which the template leaves something out."
)


@dataclass(frozen=True, kw_only=True)
class AccessOptions(Settings):
    """Access policy for media of rows and caches, which somebody else may have written."""

    media_access: MediaAccess = access_option(
        "root",
        "Media that rows may name: root, files below the rows' folder and --media-root and the remote stores that "
        "these lie in; local, also any other file of this machine; any, also any other bucket and address. Caches, "
        "whose rows an export has checked, may name files and buckets, and with any other addresses, too.",
    )
    max_media_bytes: Bytes | None = access_option(
        None, "Largest file of a medium, as in 100MB; by default 4GB, and 500MB of a picture.", minimum=None
    )

    @property
    def named_places(self) -> tuple[str, ...]:
        """Caches, rows and the media root that the command line names, which may be accessed."""
        named = [getattr(self, name, None) or () for name in ("directory", "cached_dataset", "dataset", "media_root")]
        return tuple(chain.from_iterable([value] if isinstance(value, str) else value for value in named))


@dataclass(frozen=True, kw_only=True)
class RowOptions(AccessOptions):
    """Selection and reading of rows."""

    dataset: tuple[str, ...] = row_option((), DATASET_HELP)
    val_dataset: tuple[str, ...] = row_option((), "Rows for the val split, named like --dataset.")
    dataset_info: str | None = row_option(
        None, "LLaMA-Factory's dataset_info.json, or its directory: names of datasets for --dataset."
    )
    columns: tuple[str, ...] = row_option(
        (), "Which column is which where names are unusual: query=title response=body, or a JSON object."
    )
    system: str | None = row_option(None, "System prompt of conversations that have none of their own.")
    media_root: str | None = row_option(
        None, "Folder in which relative paths of media are looked for before the rows' own.", env="ROOT_IMAGE_DIR"
    )
    max_media_failures: int = access_option(
        100,
        "Stop when so many media in a row could not be had because one and the same store is down; 0 never stops.",
        minimum=0,
    )
    per_dataset_loss_scale: bool = row_option(
        True, "Rows of a set in --dataset-info have that set's own loss_scale; false ignores these."
    )
    split_dataset_ratio: float = row_option(
        0.0, "Share of the rows that goes to the val split.", minimum=0.0, maximum=0.999
    )
    use_hf: bool | None = row_option(
        None,
        "Where ids of models and rows come from: true, the Hugging Face hub, or false, ModelScope. By default the hub.",
        env="USE_HF",
    )
    strict: bool = row_option(False, "Stop at the first row that cannot be used, with exit code 3.")
    max_row_bytes: Bytes = row_option(
        MAX_ROW_BYTES,
        "Largest row that is read, as in 64MB; larger ones are left out before they are parsed (of parquet and Arrow "
        "files, only their texts count).",
    )
    dataset_num_proc: int = row_option(
        1, "Worker processes that encode; the output is the same for any number.", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class MediaOptions(Settings):
    """Limits on media; those not given come from the model's processor settings.

    Names and meanings are those of the environment variables of the Qwen processors and ms-swift. N tokens of a picture
    are N x (patch x merge)^2 pixels.
    """

    max_pixels: int | None = picture_limit("Most pixels of a picture; larger ones are shrunk.", env="MAX_PIXELS")
    min_pixels: int | None = picture_limit("Fewest pixels of a picture; smaller ones are enlarged.", env="MIN_PIXELS")
    image_max_token_num: Tokens | None = picture_limit("Most tokens of a picture.", env="IMAGE_MAX_TOKEN_NUM")
    image_min_token_num: Tokens | None = picture_limit("Fewest tokens of a picture.", env="IMAGE_MIN_TOKEN_NUM")
    resize: int = picture_option(
        0,
        "Only 0, ms-swift's 'keep the pictures as they are', is known; limits are set with --max-pixels.",
        minimum=0,
        maximum=0,
    )

    fps: float | None = video_option(None, "Frames a second to take of a video.", env="FPS", minimum=0.001)
    fps_min_frames: int | None = video_limit("Fewest frames to take of a video.", env="FPS_MIN_FRAMES")
    fps_max_frames: int | None = video_limit("Most frames to take of a video.", env="FPS_MAX_FRAMES")
    video_max_pixels: int | None = video_limit("Most pixels of a video's frame.", env="VIDEO_MAX_PIXELS")
    video_min_pixels: int | None = video_limit("Fewest pixels of a video's frame.", env="VIDEO_MIN_PIXELS")
    video_total_pixels: int | None = video_limit("Most pixels of all frames of a video.", env="VIDEO_TOTAL_PIXELS")
    video_max_token_num: Tokens | None = video_limit("Most tokens of a video's frame.", env="VIDEO_MAX_TOKEN_NUM")
    video_min_token_num: Tokens | None = video_limit("Fewest tokens of a video's frame.", env="VIDEO_MIN_TOKEN_NUM")
    use_audio_in_video: bool | None = video_option(
        None, "Weave a video's sound track in between its frames (Omni models).", env="USE_AUDIO_IN_VIDEO"
    )
    sampling_rate: int | None = video_limit("Samples a second of sound.", env="SAMPLING_RATE")


@dataclass(frozen=True, kw_only=True)
class BoxOptions(Settings):
    """Format of boxes, points and polygons; by default that of the row and of the model's family."""

    bbox_type: BboxType | None = picture_option(
        None,
        "Unit of the coordinates that texts have as JSON (bbox_2d, point_2d), of rows that do not say it: pixels of "
        "the picture (real), shares of its sides, or thousandths. By default such texts stay as they are.",
    )
    bbox_format: Literal["legacy", "new"] | None = picture_option(
        None,
        "How <bbox> and <ref-object> are written: legacy, with Qwen2-VL's tokens, or new, as lists for JSON. By "
        "default as the model's family has it.",
        env="QWENVL_BBOX_FORMAT",
    )
    norm_bbox: Literal["norm1000", "none"] | None = picture_option(
        None,
        "What written coordinates are: thousandths of the picture's sides (norm1000), or pixels of the resized "
        "picture (none). By default as the model's family has it.",
    )


BOX_SETTINGS = tuple(field.name for field in fields(BoxOptions))


def expand_problems(expand_turns: ExpandTurns | None, loss_scale: str | None) -> list[str]:
    """Return the problem of a loss scale that contradicts ``--expand-turns``."""
    bases = (loss_scale or "").split("+")
    if expand_turns in (None, "false"):
        return []
    if "all" in bases:
        return [
            f"--expand-turns {expand_turns} and --loss-scale {loss_scale}: each sample would train all that it begins "
            "with once more; leave out one of them"
        ]
    if expand_turns == "true" and bases[0].startswith("last_round"):
        return [
            f"--expand-turns true and --loss-scale {loss_scale}: only the last turn is trained, and that is whole "
            "anyway; leave out one of them"
        ]
    return []


Executor = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(BoxOptions, MediaOptions):
    """Everything that determines how a row is encoded: two exports with the same spec write the same tokens."""

    model: str = option(
        REQUIRED, "Directory (or hub id) of the model: only its tokenizer, processor settings and config are read."
    )
    max_length: Tokens = option(
        0, "Maximum tokens of a sample; by default the model's maximum, but at most 8192.", minimum=2
    )
    truncation_strategy: TruncationStrategy = option("delete", TRUNCATION_HELP)
    media_overflow: MediaOverflow = row_option("drop", OVERFLOW_HELP)
    loss_scale: str = row_option("default", LOSS_SCALE_HELP)
    expand_turns: ExpandTurns = row_option("false", EXPAND_HELP)
    chat_template: str | None = row_option(None, TEMPLATE_HELP)
    media: Literal["reference", "embed"] = row_option(
        "reference", "Keep the media's paths, or embed the encoded files' bytes into the cache."
    )

    def recorded(self) -> dict[str, Any]:
        """Return the values for the manifest of a cache.

        Newer options appear only where they are given, so that older caches keep their fingerprints.
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
    """Whether a row with both tokens and their source is read as tokens."""
    NEEDED_FIRST: ClassVar[tuple[str, ...]] = (
        *("model", "dataset", "output_dir", "max_length", "truncation_strategy", "split_dataset_ratio"),
        *("dataset_num_proc", "overwrite", "repair", "dry_run"),
    )

    dataset: tuple[str, ...] = row_option(REQUIRED, DATASET_HELP)
    output_dir: str = option(REQUIRED, "Directory that becomes the cache.")
    seed: int = scale_option(42, "Seed of the split.", minimum=0)
    rows_per_shard: int | None = scale_option(
        None, "Rows that one shard holds, in steps of 64; by default total/64, between 256 and 16384.", minimum=1
    )
    to_cached_dataset: bool = scale_option(True, "Accepted for ms-swift's sake: export always writes a cached dataset.")
    overwrite: bool = option(False, "Delete the cache in the output directory first.")
    repair: bool = option(False, "Make again only those files of a finished cache that are damaged.")
    executor: Executor = scale_option("local", "Where the work is done: this machine, or a Ray cluster.")
    ray_address: str | None = scale_option(
        None, "Address of the Ray cluster; by default one is started here.", env="RAY_ADDRESS"
    )
    task_index: int | None = scale_option(
        None, "Export only part i of --num-tasks, from 0 on; the last part to finish publishes.", minimum=0
    )
    num_tasks: int | None = scale_option(None, "Parts that a job array exports.")
    finalize: bool = scale_option(False, "Publish what the parts of a job array have exported.")
    dry_run: bool = option(False, "Encode and count, but write nothing.")

    @property
    def encode_spec(self) -> EncodeSpec:
        """The options that determine how a row is encoded."""
        return part_of(EncodeSpec, self)

    @property
    def is_part(self) -> bool:
        """True if other commands, perhaps on other machines, export into the same directory."""
        return self.task_index is not None or self.finalize

    def value_problems(self) -> list[str]:
        """Return the problem of a loss scale that contradicts ``--expand-turns``."""
        return expand_problems(self.expand_turns, self.loss_scale)


@dataclass(frozen=True, kw_only=True)
class ImportConfig(ExportConfig):
    """Settings of ``packtool import``: those of export, except for the options below."""

    TAKES_TOKENS: ClassVar[bool] = True

    dataset: tuple[str, ...] = row_option(
        REQUIRED,
        "What another tool has prepared: a saved dataset, its files, or an .idx file of Megatron; it may stand without "
        "the option's name.",
    )
    max_length: Tokens = option(
        0, "Most tokens of a sample; 0 takes what the model says that it takes (max_position_embeddings).", minimum=0
    )


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
        None,
        "Directory of this machine for copies of remote caches and for what was verified; by default packtool in "
        "~/.cache.",
        env=_VARIABLE,
    )
    cache_dir_size: Bytes | None = cache_option(
        None,
        "Most that --cache-dir may hold, as in 200GB; copies of other caches go first. By default all the disk has.",
        env="PACKTOOL_CACHE_DIR_SIZE",
        minimum=None,
    )
    verify_cache: VerifyCache = cache_option(
        "once",
        "Hold a cache's files against their checksums when they are first needed: always in every run, once on each "
        "machine and again when a file has changed, or never.",
    )


@dataclass(frozen=True, kw_only=True)
class MediaCacheOptions(Settings):
    """The cache of resized pictures and frames."""

    media_cache: str | None = cache_option(
        None,
        "Directory on a disk of this machine for resized pictures and frames of videos, which later epochs and other "
        "runs read without decoding; --media-cache-size bounds it.",
    )
    media_cache_size: Bytes | None = cache_option(
        None,
        "Most that --media-cache may hold, as in 500GB; what a run reads in every epoch is not removed for something "
        "else that it reads as often.",
        minimum=None,
    )

    def value_problems(self) -> list[str]:
        """Return the problems of a media cache without a size or on a remote store."""
        directory, size = self.media_cache, self.media_cache_size
        if directory is None:
            return []
        if storage.is_remote(directory):
            return [f"--media-cache {storage.masked(directory)}: give a directory on a disk of this machine"]
        if size is None:
            return ["--media-cache-size is missing: say how much --media-cache may hold, as in 500GB"]
        return [] if size else ["--media-cache-size 0 keeps nothing: leave out --media-cache"]
