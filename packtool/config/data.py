"""Options of rows, media and caches, and the settings of export and import."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
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

DATASET_HELP = "Read these files, folders, patterns, hub ids, or names from --dataset-info."
TRUNCATION_HELP = "Drop rows above --max-length, truncate them left or right, split them, or stop."
MIN_LENGTH_HELP = "Drop samples of fewer than N tokens."
OVERFLOW_HELP = "If media alone exceed --max-length: drop the row, trim its oldest media, or stop."
MISTRAL_COMMON = "mistral-common"
"""Value of ``--chat-template`` for the template of mistral-common, by the model's own tokenizer file."""
TEMPLATE_HELP = "Use the chat template in this Jinja file, or mistral-common; default is the model's."
LOSS_SCALE_HELP = "Train all answers (default), only the last one (last_round), or all tokens (all)."
TEMPLATE_KWARGS_HELP = "Pass these JSON arguments to the chat template, such as '{\"enable_thinking\": false}'."
CHECK_AGAINST_HELP = "Find rows that overlap with the held-out questions in these files."
EXPAND_HELP = "Make one sample per assistant turn, to train the thoughts of every turn."


@dataclass(frozen=True, kw_only=True)
class AccessOptions(Settings):
    """Access policy for media referenced by rows and caches, which may come from untrusted authors."""

    media_access: MediaAccess = access_option(
        "root", "Allow media from the data file's folder (root), any local file (local), or anywhere (any)."
    )
    max_media_bytes: Bytes | None = access_option(
        None, "Refuse media files larger than this; default is 4GB, and 500MB for images.", minimum=None
    )

    @property
    def command_line_sources(self) -> tuple[str, ...]:
        """Caches, rows and the media root given on the command line; their stores may be accessed."""
        named = [getattr(self, name, None) or () for name in ("directory", "cached_dataset", "dataset", "media_root")]
        return tuple(chain.from_iterable([value] if isinstance(value, str) else value for value in named))


@dataclass(frozen=True, kw_only=True)
class RowOptions(AccessOptions):
    """Selection and reading of rows."""

    dataset: tuple[str, ...] = row_option((), DATASET_HELP, path=True)
    val_dataset: tuple[str, ...] = row_option(
        (), "Read the validation split from these sources, as in --dataset.", path=True
    )
    dataset_info: str | None = row_option(
        None, "Look up names of --dataset in this dataset_info.json of LLaMA-Factory, or its folder.", path=True
    )
    columns: tuple[str, ...] = row_option(
        (), "Rename columns of your data, as in query=title response=body, or as JSON."
    )
    system: str | None = row_option(None, "Add this system prompt to conversations without one.")
    prompt_format: str | None = row_option(
        None, "Write questions without messages as alpaca, as plain text, or as text with {instruction}."
    )
    media_root: str | None = row_option(
        None,
        "Look up relative media paths in this folder first, then in the data file's folder.",
        env="ROOT_IMAGE_DIR",
        path=True,
    )
    max_media_failures: int = access_option(
        100, "Stop after N consecutive failed downloads from one server; 0 never stops.", minimum=0
    )
    per_dataset_loss_scale: bool = row_option(True, "Apply the loss_scale of each dataset in --dataset-info.")
    split_dataset_ratio: float = row_option(
        0.0, "Use this fraction of the rows, 0 to 1, for validation.", minimum=0.0, maximum=0.999
    )
    use_hf: bool | None = row_option(
        None, "Download from Hugging Face (true) or ModelScope (false); default is Hugging Face.", env="USE_HF"
    )
    strict: bool = row_option(False, "Stop at the first unusable row instead of dropping it.")
    max_row_bytes: Bytes = row_option(MAX_ROW_BYTES, "Drop rows larger than this, such as 64MB.")
    dataset_num_proc: int = row_option(1, "Tokenize in N processes; the output does not depend on N.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class MediaOptions(Settings):
    """Limits on media; the model's processor settings provide those that are not given.

    Names and meanings are those of the environment variables of the Qwen processors and ms-swift. N tokens of an image
    are N x (patch x merge)^2 pixels.
    """

    max_pixels: int | None = picture_limit("Shrink images above N pixels (width x height).", env="MAX_PIXELS")
    min_pixels: int | None = picture_limit("Enlarge images below N pixels (width x height).", env="MIN_PIXELS")
    image_max_token_num: Tokens | None = picture_limit("Shrink images above N tokens.", env="IMAGE_MAX_TOKEN_NUM")
    image_min_token_num: Tokens | None = picture_limit("Enlarge images below N tokens.", env="IMAGE_MIN_TOKEN_NUM")
    resize: int = picture_option(0, "Accepted only for ms-swift scripts; must be 0.", minimum=0, maximum=0)

    fps: float | None = video_option(None, "Sample this many frames per second of video.", env="FPS", minimum=0.001)
    fps_min_frames: int | None = video_limit("Sample at least N frames from a video.", env="FPS_MIN_FRAMES")
    fps_max_frames: int | None = video_limit("Sample at most N frames from a video.", env="FPS_MAX_FRAMES")
    video_max_pixels: int | None = video_limit("Shrink video frames above N pixels.", env="VIDEO_MAX_PIXELS")
    video_min_pixels: int | None = video_limit("Enlarge video frames below N pixels.", env="VIDEO_MIN_PIXELS")
    video_total_pixels: int | None = video_limit("Limit the sum of pixels over all frames.", env="VIDEO_TOTAL_PIXELS")
    video_max_token_num: Tokens | None = video_limit("Shrink video frames above N tokens.", env="VIDEO_MAX_TOKEN_NUM")
    video_min_token_num: Tokens | None = video_limit("Enlarge video frames below N tokens.", env="VIDEO_MIN_TOKEN_NUM")
    use_audio_in_video: bool | None = video_option(
        None, "Interleave the sound of videos with their frames (Omni models only).", env="USE_AUDIO_IN_VIDEO"
    )
    sampling_rate: int | None = video_limit("Resample audio to N Hz (samples per second).", env="SAMPLING_RATE")


@dataclass(frozen=True, kw_only=True)
class BoxOptions(Settings):
    """Format of boxes, points and polygons; by default, that of the row and the model's family."""

    bbox_type: BboxType | None = picture_option(
        None, "Read box coordinates in answers as pixels (real), fractions (norm1) or thousandths (norm1000)."
    )
    bbox_format: Literal["legacy", "new"] | None = picture_option(
        None, "Write boxes as Qwen2-VL's tokens (legacy) or as JSON lists (new).", env="QWENVL_BBOX_FORMAT"
    )
    norm_bbox: Literal["norm1000", "none"] | None = picture_option(
        None, "Write box coordinates in thousandths (norm1000) or resized pixels (none); default is the model's."
    )


BOX_SETTINGS = tuple(field.name for field in fields(BoxOptions))


def expand_problems(expand_turns: ExpandTurns | None, loss_scale: str | None) -> list[str]:
    """Return the message about a loss scale that contradicts ``--expand-turns``, if it does."""
    bases = (loss_scale or "").split("+")
    if expand_turns in (None, "false"):
        return []
    options = f"--expand-turns {expand_turns} and --loss-scale {loss_scale}"
    if "all" in bases:
        return [f"{options}: each sample would train its earlier turns again; leave out one of them"]
    if expand_turns == "true" and bases[0].startswith("last_round"):
        return [f"{options}: only the last turn is trained, which needs no expansion; leave out one of them"]
    return []


RESERVED_TEMPLATE_KWARGS = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
    *("padding", "truncation", "max_length"),
    *(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")),
)
"""Arguments of chat templates, and of ``apply_chat_template``, that packtool sets itself."""


def template_kwargs_problem(kwargs: Mapping[Any, Any]) -> str | None:
    """Return the error about arguments that cannot be passed to a chat template; None if all can."""
    for name in kwargs:
        if not isinstance(name, str):
            return f"{name!r} is not a name: names are text"
        if name in RESERVED_TEMPLATE_KWARGS:
            return f"{name} cannot be set: packtool takes it from the rows and the model"
    try:
        json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return None


def set_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that are set: null leaves an argument undefined, as tables fill in missing keys."""
    return {name: value for name, value in (kwargs or {}).items() if value is not None}


def row_option_problems(
    expand_turns: ExpandTurns | None, loss_scale: str | None, kwargs: Mapping[str, Any] | None
) -> list[str]:
    """Return the messages about options of rows that contradict each other or cannot be used."""
    problem = template_kwargs_problem(kwargs or {})
    invalid = [f"--chat-template-kwargs: {problem}"] if problem else []
    return [*expand_problems(expand_turns, loss_scale), *invalid]


Executor = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(BoxOptions, MediaOptions):
    """All options that determine the encoding of a row: exports with equal specs write the same tokens."""

    model: str = option(REQUIRED, "Tokenize for this model directory or hub id; weights are not read.")
    max_length: Tokens = option(0, "Limit each sample to N tokens; default is the model's, at most 8192.", minimum=2)
    min_length: Tokens = row_option(0, MIN_LENGTH_HELP, minimum=0)
    truncation_strategy: TruncationStrategy = option("delete", TRUNCATION_HELP)
    media_overflow: MediaOverflow = row_option("drop", OVERFLOW_HELP)
    loss_scale: str = row_option("default", LOSS_SCALE_HELP)
    expand_turns: ExpandTurns = row_option("false", EXPAND_HELP)
    chat_template: str | None = row_option(None, TEMPLATE_HELP, path=True)
    chat_template_kwargs: Mapping[str, Any] | None = row_option(None, TEMPLATE_KWARGS_HELP)
    media: Literal["reference", "embed"] = row_option(
        "reference", "Store paths of media files in the cache (reference), or the files (embed)."
    )

    def recorded(self) -> dict[str, Any]:
        """Return the values that a manifest records; newer options only if given, to keep old fingerprints."""
        values = dataclasses.asdict(self)
        if self.chat_template not in (None, MISTRAL_COMMON):
            values["chat_template"] = os.path.abspath(self.chat_template)
        values["chat_template_kwargs"] = set_kwargs(self.chat_template_kwargs) or None
        names = (*BOX_SETTINGS, "chat_template", "chat_template_kwargs")
        newer = {"expand_turns": "false", "min_length": 0, **dict.fromkeys(names)}
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

    dataset: tuple[str, ...] = row_option(REQUIRED, DATASET_HELP, path=True)
    output_dir: str = option(REQUIRED, "Write the cache (tokenized samples) to this new directory.", path=True)
    check_against: tuple[str, ...] = row_option((), CHECK_AGAINST_HELP, path=True)
    on_duplicates: Literal["keep", "drop"] = row_option("keep", "Keep or drop rows that equal an earlier row.")
    near_duplicates: float | None = row_option(
        None, "Also find rows that share this fraction of their text, such as 0.8.", minimum=0.1, maximum=1.0
    )
    on_overlap: Literal["keep", "drop", "fail"] = row_option("keep", "Keep or drop overlapping rows, or stop.")
    seed: int = shard_option(42, "Set the random seed that selects validation rows.", minimum=0)
    rows_per_shard: int | None = shard_option(
        None, "Write about N rows per cache file; N is a multiple of 64.", minimum=1
    )
    to_cached_dataset: bool = shard_option(True, "Accepted only for ms-swift scripts; export always writes a cache.")
    overwrite: bool = option(False, "Replace an existing cache in --output-dir.")
    repair: bool = option(False, "Rewrite only the damaged files of the cache in --output-dir.")
    executor: Executor = shard_option("local", "Export on this machine (local) or on a Ray cluster (ray).")
    ray_address: str | None = shard_option(
        None, "Connect to the Ray cluster at this address; default starts one on this machine.", env="RAY_ADDRESS"
    )
    task_index: int | None = shard_option(None, "Export only task N of --num-tasks, counted from 0.", minimum=0)
    num_tasks: int | None = shard_option(None, "Divide the export into N tasks, for several machines.")
    finalize: bool = shard_option(False, "Complete the cache after all --num-tasks tasks have ended.")
    dry_run: bool = option(False, "Tokenize and count rows without writing a cache.")

    @property
    def encode_spec(self) -> EncodeSpec:
        return part_of(EncodeSpec, self)

    @property
    def is_part(self) -> bool:
        """True for a part of a job array: other commands may export into the same directory."""
        return self.task_index is not None or self.finalize

    def value_problems(self) -> list[str]:
        """Return the messages about options of rows that contradict each other or cannot be used."""
        return row_option_problems(self.expand_turns, self.loss_scale, self.chat_template_kwargs)


@dataclass(frozen=True, kw_only=True)
class ImportConfig(ExportConfig):
    """Settings of ``packtool import``: those of export with another ``dataset`` and ``max_length``."""

    TAKES_TOKENS: ClassVar[bool] = True

    dataset: tuple[str, ...] = row_option(
        REQUIRED, "Read tokenized data: a saved dataset, its files, or a Megatron .idx file.", path=True
    )
    max_length: Tokens = option(0, "Limit samples to N tokens; 0 uses the model's max_position_embeddings.", minimum=0)


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
        "Store copies of remote caches in this local directory; default is ~/.cache/packtool.",
        env=_VARIABLE,
        path=True,
    )
    cache_dir_size: Bytes | None = cache_option(
        None,
        "Limit the size of --cache-dir, such as 200GB; default is unlimited.",
        env="PACKTOOL_CACHE_DIR_SIZE",
        minimum=None,
    )
    verify_cache: VerifyCache = cache_option(
        "once", "Check caches for damage in every run, once per machine, or never."
    )


@dataclass(frozen=True, kw_only=True)
class MediaCacheOptions(Settings):
    """Cache of resized images and video frames."""

    media_cache: str | None = cache_option(
        None, "Store resized images and video frames here, to reuse them in later epochs.", path=True
    )
    media_cache_size: Bytes | None = cache_option(None, "Limit the size of --media-cache, such as 500GB.", minimum=None)

    def value_problems(self) -> list[str]:
        directory, size = self.media_cache, self.media_cache_size
        if directory is None:
            return []
        if storage.is_remote(directory):
            return [f"--media-cache {storage.masked(directory)}: give a directory on a disk of this machine"]
        if size is None:
            return ["--media-cache-size is missing: give the maximum size of --media-cache, as in 500GB"]
        return [] if size else ["--media-cache-size 0 stores nothing: leave out --media-cache"]
