"""What decides which rows there are and what they become: options of export, and of training without a cache."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from packtool.config.settings import YES_OR_NO, option
from packtool.config.sizes import Bytes, Tokens

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
class AccessOptions:
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
class ImageOptions:
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
class BoxOptions:
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


def access_problems(options: AccessOptions) -> list[str]:
    """Mistakes in what rows and caches may reach."""
    return [] if options.max_media_bytes != 0 else ["--max-media-bytes 0 leaves no medium"]


def image_limit_problems(options: ImageOptions) -> list[str]:
    """Limits that contradict each other."""
    found = []
    for name, low, high in (
        ("--{}-pixels", options.min_pixels, options.max_pixels),
        ("--image-{}-token-num", options.image_min_token_num, options.image_max_token_num),
    ):
        if low is not None and high is not None and low > high:
            found.append(f"{name.format('min')} {low} is more than {name.format('max')} {high}")
    for name, pixels, tokens in (
        ("max", options.max_pixels, options.image_max_token_num),
        ("min", options.min_pixels, options.image_min_token_num),
    ):
        if pixels is not None and tokens is not None:
            found.append(
                f"--{name}-pixels {pixels} and --image-{name}-token-num {tokens} (or {name.upper()}_PIXELS and "
                f"IMAGE_{name.upper()}_TOKEN_NUM) set the same limit: give one of them"
            )
    return found
