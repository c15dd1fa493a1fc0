"""What decides which rows there are and what they become: options of export, and of training without a cache.

What ``packtool export`` needs to know.

What ``packtool import`` needs to know.

Options of every command that reads caches: where copies lie, and whether files are held against their checksums.

Options of every command that loads media for a model: where resized ones are kept.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from packtool import storage
from packtool.config.conflicts import Settings
from packtool.config.packages import missing_packages
from packtool.config.settings import REQUIRED, YES_OR_NO, Bytes, Panel, Tokens, option, part_of

TruncationStrategy = Literal["delete", "left", "right", "split", "raise"]
MediaOverflow = Literal["drop", "trim", "raise"]
MediaAccess = Literal["root", "local", "any"]
ExpandTurns = Annotated[Literal["auto", "true", "false"], YES_OR_NO]
BboxType = Literal["real", "norm1", "norm1000"]
"""Units of coordinates: pixels of the picture, shares of its sides, thousandths of them."""
BboxFormat = Literal["legacy", "new"]
NormBbox = Literal["norm1000", "none"]

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
    """What rows and caches may reach; whoever wrote them need not be whoever runs this."""

    media_access: MediaAccess = option(
        "root",
        "Media that rows may name: root, files below the rows' folder and --media-root and the remote stores that "
        "these lie in; local, also any other file of this machine; any, also any other bucket and address. Caches, "
        "whose rows an export has checked, may name files and buckets, and with any other addresses, too.",
        panel="Media access",
    )
    max_media_bytes: Bytes | None = option(
        None, "Largest file of a medium, as in 100MB; by default 4GB, and 500MB of a picture.", panel="Media access"
    )

    @property
    def named_places(self) -> tuple[str, ...]:
        """Caches, rows and the media root that the command line names."""
        return ()


@dataclass(frozen=True, kw_only=True)
class RowOptions(AccessOptions):
    """What decides which rows there are."""

    dataset: tuple[str, ...] = option((), DATASET_HELP, panel="Rows")
    val_dataset: tuple[str, ...] = option((), "Rows for the val split, named like --dataset.", panel="Rows")
    dataset_info: str | None = option(
        None, "LLaMA-Factory's dataset_info.json, or its directory: names of datasets for --dataset.", panel="Rows"
    )
    columns: tuple[str, ...] = option(
        (),
        "Which column is which where names are unusual: query=title response=body, or a JSON object.",
        panel="Rows",
    )
    system: str | None = option(None, "System prompt of conversations that have none of their own.", panel="Rows")
    media_root: str | None = option(
        None,
        "Folder in which relative paths of media are looked for before the rows' own.",
        panel="Rows",
        env="ROOT_IMAGE_DIR",
    )
    max_media_failures: int = option(
        100,
        "Stop when so many media in a row could not be had because one and the same store is down; 0 never stops.",
        panel="Media access",
        minimum=0,
    )
    per_dataset_loss_scale: bool = option(
        True, "Rows of a set in --dataset-info have that set's own loss_scale; false ignores these.", panel="Rows"
    )
    split_dataset_ratio: float = option(
        0.0, "Share of the rows that goes to the val split.", panel="Rows", minimum=0.0, maximum=0.999
    )
    use_hf: bool | None = option(
        None,
        "Where ids of models and rows come from: true, the Hugging Face hub, or false, ModelScope. By default the hub.",
        panel="Rows",
        env="USE_HF",
    )
    strict: bool = option(False, "Stop at the first row that cannot be used, with exit code 3.", panel="Rows")
    max_row_bytes: Bytes = option(
        MAX_ROW_BYTES,
        "Largest row that is read, as in 64MB; larger ones are left out before they are parsed (of parquet and Arrow "
        "files, only their texts count).",
        panel="Rows",
        minimum=1,
    )
    dataset_num_proc: int = option(
        1, "Worker processes that encode; the output is the same for any number.", panel="Rows", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Settings):
    """Limits on a picture's size. Unset ones come from the model's processor settings.

    The environment variables are the ones of the Qwen processors: N tokens are N x (patch x merge)^2 pixels.
    """

    max_pixels: int | None = option(
        None, "Most pixels of a picture; larger ones are shrunk.", panel="Pictures", env="MAX_PIXELS", minimum=1
    )
    min_pixels: int | None = option(
        None, "Fewest pixels of a picture; smaller ones are enlarged.", panel="Pictures", env="MIN_PIXELS", minimum=1
    )
    image_max_token_num: Tokens | None = option(
        None, "Most tokens of a picture.", panel="Pictures", env="IMAGE_MAX_TOKEN_NUM", minimum=1
    )
    image_min_token_num: Tokens | None = option(
        None, "Fewest tokens of a picture.", panel="Pictures", env="IMAGE_MIN_TOKEN_NUM", minimum=1
    )
    resize: int = option(
        0,
        "Only 0, ms-swift's 'keep the pictures as they are', is known; limits are set with --max-pixels.",
        panel="Pictures",
        minimum=0,
        maximum=0,
    )


@dataclass(frozen=True, kw_only=True)
class MediaOptions(ImageOptions):
    """Limits on all media. Unset ones come from the model's processor settings.

    Names and meaning are those of the environment variables that Qwen's tools and ms-swift read.
    """

    fps: float | None = option(
        None, "Frames a second to take of a video.", panel="Video and audio", env="FPS", minimum=0.001
    )
    fps_min_frames: int | None = option(
        None, "Fewest frames to take of a video.", panel="Video and audio", env="FPS_MIN_FRAMES", minimum=1
    )
    fps_max_frames: int | None = option(
        None, "Most frames to take of a video.", panel="Video and audio", env="FPS_MAX_FRAMES", minimum=1
    )
    video_max_pixels: int | None = option(
        None, "Most pixels of a video's frame.", panel="Video and audio", env="VIDEO_MAX_PIXELS", minimum=1
    )
    video_min_pixels: int | None = option(
        None, "Fewest pixels of a video's frame.", panel="Video and audio", env="VIDEO_MIN_PIXELS", minimum=1
    )
    video_total_pixels: int | None = option(
        None, "Most pixels of all frames of a video.", panel="Video and audio", env="VIDEO_TOTAL_PIXELS", minimum=1
    )
    video_max_token_num: Tokens | None = option(
        None, "Most tokens of a video's frame.", panel="Video and audio", env="VIDEO_MAX_TOKEN_NUM", minimum=1
    )
    video_min_token_num: Tokens | None = option(
        None, "Fewest tokens of a video's frame.", panel="Video and audio", env="VIDEO_MIN_TOKEN_NUM", minimum=1
    )
    use_audio_in_video: bool | None = option(
        None,
        "Weave a video's sound track in between its frames (Omni models).",
        panel="Video and audio",
        env="USE_AUDIO_IN_VIDEO",
    )
    sampling_rate: int | None = option(
        None, "Samples a second of sound.", panel="Video and audio", env="SAMPLING_RATE", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class BoxOptions(Settings):
    """How boxes, points and polygons are read and written. Unset ones: as the row says, and as the family writes."""

    bbox_type: BboxType | None = option(
        None,
        "Unit of the coordinates that texts have as JSON (bbox_2d, point_2d), of rows that do not say it: pixels of "
        "the picture (real), shares of its sides, or thousandths. By default such texts stay as they are.",
        panel="Pictures",
    )
    bbox_format: BboxFormat | None = option(
        None,
        "How <bbox> and <ref-object> are written: legacy, with Qwen2-VL's tokens, or new, as lists for JSON. By "
        "default as the model's family has it.",
        panel="Pictures",
        env="QWENVL_BBOX_FORMAT",
    )
    norm_bbox: NormBbox | None = option(
        None,
        "What written coordinates are: thousandths of the picture's sides (norm1000), or pixels of the resized "
        "picture (none). By default as the model's family has it.",
        panel="Pictures",
    )


BOX_SETTINGS = tuple(field.name for field in fields(BoxOptions))


def expand_problems(expand_turns: ExpandTurns | None, loss_scale: str | None) -> list[str]:
    """Loss scales that do not go with turns that are samples of their own."""
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
MediaStorage = Literal["reference", "embed"]


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(BoxOptions, MediaOptions):
    """Everything that decides what a row becomes: two exports with the same spec write the same tokens."""

    model: str = option(
        REQUIRED, "Directory (or hub id) of the model: only its tokenizer, processor settings and config are read."
    )
    max_length: Tokens = option(
        0, "Maximum tokens of a sample; by default the model's maximum, but at most 8192.", minimum=2
    )
    truncation_strategy: TruncationStrategy = option("delete", TRUNCATION_HELP)
    media_overflow: MediaOverflow = option("drop", OVERFLOW_HELP, panel="Rows")
    loss_scale: str = option("default", LOSS_SCALE_HELP, panel="Rows")
    expand_turns: ExpandTurns = option("false", EXPAND_HELP, panel="Rows")
    chat_template: str | None = option(None, TEMPLATE_HELP, panel="Rows")
    media: MediaStorage = option(
        "reference", "Keep the media's paths, or embed the encoded files' bytes into the cache.", panel="Rows"
    )

    def recorded(self) -> dict[str, Any]:
        """What a cache's manifest keeps of it.

        A later option that is not given leaves no trace, so that the identity of caches that need none of it stays.
        """
        values = dataclasses.asdict(self)
        for name in BOX_SETTINGS:
            if values[name] is None:
                del values[name]
        if self.expand_turns == "false":
            del values["expand_turns"]
        if self.chat_template is None:
            del values["chat_template"]
        else:
            values["chat_template"] = os.path.abspath(self.chat_template)
        return values


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RowOptions, EncodeSpec):
    """What ``packtool export`` needs to know."""

    TAKES_TOKENS: ClassVar[bool] = False
    """Whether rows that have tokens and what these were made of are taken as tokens."""
    NEEDED_FIRST: ClassVar[tuple[str, ...]] = (
        "model",
        "dataset",
        "output_dir",
        "max_length",
        "truncation_strategy",
        "split_dataset_ratio",
        "dataset_num_proc",
        "overwrite",
        "repair",
        "dry_run",
    )

    dataset: tuple[str, ...] = option(REQUIRED, DATASET_HELP, panel="Rows")
    output_dir: str = option(REQUIRED, "Directory that becomes the cache.")
    seed: int = option(42, "Seed of the split.", minimum=0, panel="Scale")
    rows_per_shard: int | None = option(
        None,
        "Rows that one shard holds, in steps of 64; by default total/64, between 256 and 16384.",
        minimum=1,
        panel="Scale",
    )
    to_cached_dataset: bool = option(
        True, "Accepted for ms-swift's sake: export always writes a cached dataset.", panel="Scale"
    )
    overwrite: bool = option(False, "Delete the cache in the output directory first.")
    repair: bool = option(False, "Make again only those files of a finished cache that are damaged.")
    executor: Executor = option("local", "Where the work is done: this machine, or a Ray cluster.", panel="Scale")
    ray_address: str | None = option(
        None, "Address of the Ray cluster; by default one is started here.", panel="Scale", env="RAY_ADDRESS"
    )
    task_index: int | None = option(
        None,
        "Export only part i of --num-tasks, from 0 on; the last part to finish publishes.",
        panel="Scale",
        minimum=0,
    )
    num_tasks: int | None = option(None, "Parts that a job array exports.", panel="Scale", minimum=1)
    finalize: bool = option(False, "Publish what the parts of a job array have exported.", panel="Scale")
    dry_run: bool = option(False, "Encode and count, but write nothing.")

    @property
    def encode_spec(self) -> EncodeSpec:
        """The part that decides what a row becomes."""
        return part_of(EncodeSpec, self)

    @property
    def is_part(self) -> bool:
        """Whether other commands, perhaps on other machines, export other parts into the same directory."""
        return self.task_index is not None or self.finalize

    def missing_packages(self) -> list[str]:
        """Packages that these settings need and this environment lacks."""
        return missing_packages(executor=self.executor)

    def value_problems(self) -> list[str]:
        """Loss scales that do not go with ``--expand-turns``."""
        return expand_problems(self.expand_turns, self.loss_scale)


@dataclass(frozen=True, kw_only=True)
class ImportConfig(ExportConfig):
    """What ``packtool import`` needs to know: what export does, but for the options below."""

    TAKES_TOKENS: ClassVar[bool] = True

    dataset: tuple[str, ...] = option(
        REQUIRED,
        "What another tool has prepared: a saved dataset, its files, or an .idx file of Megatron; it may stand without "
        "the option's name.",
        panel="Rows",
    )
    max_length: Tokens = option(
        0, "Most tokens of a sample; 0 takes what the model says that it takes (max_position_embeddings).", minimum=0
    )


VerifyCache = Literal["always", "once", "never"]
_PANEL: Panel = "Caches"
_VARIABLE = "PACKTOOL_CACHE_DIR"


def default_cache_dir() -> str:
    """``PACKTOOL_CACHE_DIR``, or ``packtool`` in the user's directory for caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get(_VARIABLE) or os.path.join(home, "packtool")


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Settings):
    """How caches are read on this machine."""

    cache_dir: str | None = option(
        None,
        "Directory of this machine for copies of remote caches and for what was verified; by default packtool in "
        "~/.cache.",
        panel=_PANEL,
        env=_VARIABLE,
    )
    cache_dir_size: Bytes | None = option(
        None,
        "Most that --cache-dir may hold, as in 200GB; copies of other caches go first. By default all the disk has.",
        panel=_PANEL,
        env="PACKTOOL_CACHE_DIR_SIZE",
    )
    verify_cache: VerifyCache = option(
        "once",
        "Hold a cache's files against their checksums when they are first needed: always in every run, once on each "
        "machine and again when a file has changed, or never.",
        panel=_PANEL,
    )


@dataclass(frozen=True, kw_only=True)
class MediaCacheOptions(Settings):
    """Where resized pictures and frames are kept."""

    media_cache: str | None = option(
        None,
        "Directory on a disk of this machine for resized pictures and frames of videos, which later epochs and other "
        "runs read without decoding; --media-cache-size bounds it.",
        panel=_PANEL,
    )
    media_cache_size: Bytes | None = option(
        None,
        "Most that --media-cache may hold, as in 500GB; what a run reads in every epoch is not removed for something "
        "else that it reads as often.",
        panel=_PANEL,
    )

    def value_problems(self) -> list[str]:
        """A media cache without a size, or where none can be."""
        directory, size = self.media_cache, self.media_cache_size
        if directory is None:
            return []
        if storage.is_remote(directory):
            return [f"--media-cache {storage.masked(directory)}: give a directory on a disk of this machine"]
        if size is None:
            return ["--media-cache-size is missing: say how much --media-cache may hold, as in 500GB"]
        return [] if size else ["--media-cache-size 0 keeps nothing: leave out --media-cache"]
