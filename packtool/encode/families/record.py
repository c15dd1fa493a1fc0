"""``Family``: everything that packtool knows about a family of models, as data in one record.

Encoding, collation, attention and training read the record and never name a model; everything else comes from the
model's own configuration. ``MediaEncoding`` is the base class of a family's code: it measures media and gives their
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from packtool.config.data import MediaOptions
from packtool.config.model import ModelPart
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.encode.model_files import ModelFiles
from packtool.media.files import MediaProblem
from packtool.rows.sample import MediaKind, MediaRef

if TYPE_CHECKING:
    from packtool.media.video import VideoSize  # which imports PyAV

Medium = EncodedImage | EncodedVideo | EncodedAudio


class TokenRun(NamedTuple):
    """A control token, ``length`` times in a row."""

    token: str
    length: int = 1


MediaSegment = str | TokenRun
"""A segment of a medium's tokens: plain text, or a control token with its repetitions."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits that determine the patches of a picture from its height and width.

    Args:
        min_pixels, max_pixels: bounds on height x width after resizing.
        patch_size: pixels along one side of a patch.
        merge_size: patches along one side of a token.
        temporal_patch_size: frames of a patch; a picture is repeated that often.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def pixels_per_token(self) -> int:
        """Pixels of one token."""
        return (self.patch_size * self.merge_size) ** 2


@dataclass(frozen=True)
class VideoLimits:
    """Limits that determine the sampled frames and the patches of a video from its size, length and rate.

    Args:
        fps: frames to sample per second.
        min_frames, max_frames: bounds on the number of sampled frames.
        min_pixels, max_pixels: bounds on the pixels after resizing.
        over_all_frames: whether these bounds are for all frames together; otherwise they are for each frame.
        frame_min_pixels, frame_max_pixels: with ``over_all_frames``, the user's bounds for each frame.
        total_pixels: without ``over_all_frames``, the user's bound on the pixels of all frames.
        even_ends: whether frames are sampled evenly from the first to the last (Qwen3-VL); otherwise at equal steps
            from the first.
    """

    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    over_all_frames: bool
    frame_min_pixels: int | None
    frame_max_pixels: int | None
    total_pixels: int | None
    even_ends: bool
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    def bounds(self, num_frames: int) -> tuple[int, int]:
        """Return the (min, max) pixels that are passed to the processor for ``num_frames`` sampled frames."""
        if self.over_all_frames:
            max_pixels = self.max_pixels
            if self.frame_max_pixels is not None:
                max_pixels = min(max_pixels, self.frame_max_pixels * num_frames)
            return min(max(self.min_pixels, (self.frame_min_pixels or 0) * num_frames), max_pixels), max_pixels
        if self.total_pixels is None:
            return self.min_pixels, self.max_pixels
        # The total divided by the frames, but slightly more than the minimum, as in qwen-vl-utils.
        frame_pixels = self.total_pixels * self.temporal_patch_size // num_frames
        return self.min_pixels, max(min(self.max_pixels, frame_pixels), int(self.min_pixels * 1.05))


def image_limits_of(ref: MediaRef, limits: ImageLimits) -> ImageLimits:
    """Return the limits of a picture: ``limits``, replaced by those of its row; ValueError if they contradict."""
    row_limits = dict(ref.limits)
    if not row_limits:
        return limits
    return replace(limits, **_bounds(row_limits, "pixels", limits.min_pixels, limits.max_pixels))


def video_limits_of(ref: MediaRef, limits: VideoLimits) -> VideoLimits:
    """Return the limits of a video: ``limits``, replaced by its row's (pixels of one frame); raises ValueError."""
    row_limits = dict(ref.limits)
    if not row_limits:
        return limits
    changes: dict[str, Any] = _bounds(row_limits, "frames", limits.min_frames, limits.max_frames)
    total_pixels = int(row_limits["total_pixels"]) if "total_pixels" in row_limits else None
    if limits.over_all_frames:
        frame_bounds = [name for name in ("min_pixels", "max_pixels") if name in row_limits]
        changes |= {f"frame_{name}": int(row_limits[name]) for name in frame_bounds}
        if total_pixels:
            changes |= {"max_pixels": total_pixels, "min_pixels": min(limits.min_pixels, total_pixels)}
    else:
        changes |= _bounds(row_limits, "pixels", limits.min_pixels, limits.max_pixels)
        changes |= {"total_pixels": total_pixels} if total_pixels else {}
    return replace(limits, fps=float(row_limits.get("fps", limits.fps)), **changes)


def _bounds(row_limits: dict[str, float], unit: str, min_value: int, max_value: int) -> dict[str, int]:
    """Return a row's bounds in a unit; one that it does not give is the default, moved to include the other one."""
    low, high = row_limits.get(f"min_{unit}"), row_limits.get(f"max_{unit}")
    if low is not None and high is not None and low > high:
        raise ValueError(f"its row requires at least {low:g} and at most {high:g} {unit}")
    return {
        f"min_{unit}": int(low if low is not None else min(min_value, high or min_value)),
        f"max_{unit}": int(high if high is not None else max(max_value, low or max_value)),
    }


@dataclass(frozen=True)
class AudioLimits:
    """Limits that determine the tokens of a sound.

    Args:
        sampling_rate: samples per second that the model's feature extractor takes.
        hop_length: samples from one mel frame to the next.
        max_features: maximum mel frames of one sound, the rest is removed; None for no bound.
        in_video: a video's sound track is interleaved with its frames.
        tokens_per_second: positions in time per second of sound, by which frames and sound are interleaved.
        seconds_per_chunk: length of the chunks of video and sound that alternate, where they are interleaved in chunks.
    """

    sampling_rate: int
    hop_length: int
    max_features: int | None
    in_video: bool
    tokens_per_second: float
    seconds_per_chunk: float


_BOUNDS = {"fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"}
_BOUNDS |= {"frame_min_pixels", "frame_max_pixels"}


@dataclass(frozen=True)
class MediaLimits:
    """Limits of each kind of medium; None for kinds that the model does not support."""

    image: ImageLimits | None = None
    video: VideoLimits | None = None
    audio: AudioLimits | None = None

    @property
    def without_bounds(self) -> dict[str, Any]:
        """Values other than bounds on sizes and frames, by name; they must be equal in caches trained together."""
        return {
            f"{kind} {name}": value
            for kind, limits in asdict(self).items()
            for name, value in (limits or {}).items()
            if name not in _BOUNDS
        }


class MediaEncoding:
    """Measures media and gives their tokens; this base class is for models of text alone.

    Subclasses take (files, options, family): the model's files, the user's limits on media and the family's record.
    They raise ConfigError for options that the family does not support.

    Attributes:
        limits: resolved from processor settings, environment and options.
        control_tokens: tokens that mark media.
        content_as_list: how media are passed to the chat template. False: in the texts, where ``segments`` replace the
            media marks. True: in lists of texts and media; the template writes a control token for each medium
            (``placeholders``), which ``segments`` replace.
        placeholders: kind of medium by this control token; empty unless ``content_as_list``.
        warnings: for the user, one line each.
        one_picture_only: whether rows may have only one picture.
        video_template: chat template of rows with videos, if the processor has one for them.
    """

    limits = MediaLimits()
    control_tokens: tuple[str, ...] = ()
    content_as_list = False
    placeholders: Mapping[str, MediaKind] = MappingProxyType({})
    warnings: tuple[str, ...] = ()
    one_picture_only = False
    video_template = ""

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        """Measure a medium, by its header if that is enough; MediaProblem if it cannot be used."""
        raise MediaProblem("media_unsupported", f"the row has {kind}s, and the model supports only text")

    def together(self, images: list[Medium]) -> list[Medium]:
        """Return the measured pictures of a row that has several."""
        return images

    def segments(self, medium: Medium, number: int = 0) -> list[MediaSegment]:
        """Return a medium's tokens from its first mark to its last; ``number``: its index among its kind in the row."""
        raise AssertionError("a model of text alone measures no media")


@dataclass(frozen=True)
class Towers:
    """Prefixes of the parameter names of a model's towers; all other parameters are the language model's.

    Args:
        vision: the vision tower, and the audio tower if there is one; they may contain the aligner.
        aligner: the projection from vision (or sound) to text.
        unused: modules that no forward pass uses; if they were trained, ranks would wait for their gradients.
    """

    vision: tuple[str, ...] = ()
    aligner: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def is_unused(self, name: str) -> bool:
        """Return whether no forward pass uses the module or parameter with this name."""
        return _is_under(name, self.unused)

    def part_of(self, name: str) -> ModelPart:
        """Return the part of the model that the module or parameter with this name belongs to."""
        if _is_under(name, self.aligner):
            return "aligner"
        return "vision tower" if _is_under(name, self.vision) else "language model"


class BoxTokens(NamedTuple):
    """Control tokens around names and boxes.

    ``is_list``: the text of a box is a list with the numbers of several boxes; otherwise the pairs of a single box.
    """

    name: tuple[str, str]
    box: tuple[str, str]
    is_list: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """The four tokens, in order."""
        return *self.name, *self.box

    @property
    def box_pattern(self) -> str:
        """Regular expression for the text between the tokens of a box."""
        return r"[\d\[\],.\s]*" if self.is_list else r"[\d(),.\s]*"


QWEN_TOKENS = BoxTokens(("<|object_ref_start|>", "<|object_ref_end|>"), ("<|box_start|>", "<|box_end|>"))
INTERNVL_TOKENS = BoxTokens(("<ref>", "</ref>"), ("<box>", "</box>"), is_list=True)


@dataclass(frozen=True)
class BoxForm:
    """Notation of boxes, points and polygons in a picture, and of the names of objects.

    One box of 331.5,761.4 to 853.5,1594.8 in a picture of 1500 x 1800 pixels, which is resized to 1512 x 1792::

        Qwen2-VL      <|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>
        InternVL      <ref>a dog</ref><box>[[221, 423, 569, 886]]</box>
        Qwen2.5-VL    [334, 758, 860, 1588]                pixels of the resized picture
        Qwen3-VL      [221, 423, 569, 886]                 thousandths of its sides

    Args:
        notation: numbers between control ``tokens``, or ``lists`` of numbers, possibly in JSON.
        scale: unit of the numbers: ``thousandths`` of the picture's sides, or ``pixels`` of the resized picture.
        tokens: the family's tokens for boxes, even if ``notation`` is ``lists``.
    """

    notation: Literal["tokens", "lists"]
    scale: Literal["thousandths", "pixels"]
    tokens: BoxTokens = QWEN_TOKENS

    def name(self, text: str) -> str:
        """Return the text of a name."""
        return text.join(self.tokens.name) if self.notation == "tokens" else text

    def boxes(self, boxes: Sequence[Sequence[int]]) -> str:
        """Return the text of the boxes that replace one mark: x and y of each corner, in written units."""
        lists = [[*corners] for corners in boxes]
        if self.notation == "lists":
            return str(lists[0] if len(lists) == 1 else lists)
        if self.tokens.is_list:
            return str(lists).join(self.tokens.box)
        pairs = [zip(corners[::2], corners[1::2], strict=True) for corners in boxes]
        return "".join(",".join(f"({x},{y})" for x, y in box).join(self.tokens.box) for box in pairs)


IN_CHUNKS = "tokens attend to those of their chunk"
"""The reason why several ranks cannot share sequences of Llama 4 (``Family.unshared``)."""


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models.

    Args:
        title: name in the documentation.
        model_types: values of ``model_type`` in ``config.json``, of the model and of its thinker if it has one.
        encoding: its subclass of ``MediaEncoding``; None for text alone.
        is_qwen3: whether videos, timestamps and sounds are encoded as by Qwen3-VL and Qwen3-Omni; otherwise as by their
            predecessors.
        no_videos: for a ``ProcessorFamily`` that does not support videos, the reason why rows with videos are dropped.
        kinds: kinds of media that it can be trained on.
        towers: its vision tower and aligner; empty for models of text alone.
        image_inputs, video_inputs: arguments of its forward for the patches and for the grids of pictures and videos.
        image_marks, sound_marks: names in ``config.json`` of the tokens that open and close a medium.
        video_marks: with ``videos_as_pictures``, names of the tokens before and after a video's frames, if it has any.
        positions: input of the model's ``get_rope_index`` besides the grids: the kind of each token
            (``token_types``) or the lengths of sounds (``sound_seconds``). ``counted``: positions of a model with
            pictures are those of a text, 0, 1, 2, ...
        whole_pictures: layers in which the tokens of a picture see each other in both directions: ``all``, or
            ``windows``: those with a sliding window, if ``config.json`` sets this; "" if every token sees only earlier
            ones.
        cross_attention: whether its text attends to pictures by cross-attention, so that a picture has one token.
        unshared: why several ranks cannot share its sequences; "" if they can.
        token_types: argument of its forward with the kind of each token, by which transformers finds these pictures.
        processor_inputs: arguments of its forward that its own processor may produce for pictures; empty if the tower
            takes patches and a grid.
        keeps_bounds: whether all pictures and videos are resized to the bounds of the processor's settings.
        videos_as_pictures: whether the model takes a video's frames as pictures, by the same inputs and with the same
            placeholder tokens. ``media_spans`` distinguishes them by ``video_marks``, or by the text between frames.
        video_outputs: with ``videos_as_pictures``, outputs of its processor for videos that correspond to the first
            ``processor_inputs``, if these have other names than those for pictures. Videos then have placeholder tokens
            of their own, which become those of pictures in a batch.
        refused: reason why its models can be exported for, but not trained; "" if they can be trained.
        mel_frames: mel frames of the shortest sound, which has one token; 0 for a model without sound.
        sound_chunk: mel frames of a full chunk of sound, and its number of tokens.
        recurrent_types: values of ``model_type`` of text towers that have recurrent layers of these classes only.
        recurrent_layers: classes of layers with a state that runs along the sequence; ``attention.recurrent`` resets
            it for each document. Their forward takes (hidden_states, cache_params, attention_mask, **boundaries).
        projector: linear modules from the vision tower to the text's width, in order: the names of the input and the
            output width of each, as in ``tower_layers``. It begins with ``merged`` if patches are merged.
        has_joint_inputs: whether these layers have one module ``in_proj_qkvz`` for queries, keys, values and gates;
            otherwise two modules.
        boxes: notation of boxes, points and polygons in a picture; None if unknown.
    """

    title: str = ""
    model_types: tuple[str, ...] = ()
    encoding: Callable[[ModelFiles, MediaOptions, Family], MediaEncoding] | None = None
    is_qwen3: bool = False
    no_videos: str = ""
    kinds: tuple[MediaKind, ...] = ()
    towers: Towers = Towers()
    image_inputs: tuple[str, str] = ("pixel_values", "image_grid_thw")
    video_inputs: tuple[str, str] = ("pixel_values_videos", "video_grid_thw")
    image_marks: tuple[str, str] = ("vision_start_token_id", "vision_end_token_id")
    sound_marks: tuple[str, str] = ("audio_start_token_id", "audio_end_token_id")
    video_marks: tuple[str, ...] = ()
    positions: Literal["token_types", "sound_seconds", "counted"] = "token_types"
    whole_pictures: Literal["", "all", "windows"] = ""
    cross_attention: bool = False
    unshared: str = ""
    token_types: str = ""
    processor_inputs: tuple[str, ...] = ()
    keeps_bounds: bool = False
    videos_as_pictures: bool = False
    video_outputs: tuple[str, ...] = ()
    refused: str = ""
    mel_frames: int = 0
    sound_chunk: tuple[int, int] = (1, 1)
    recurrent_types: tuple[str, ...] = ()
    recurrent_layers: tuple[str, ...] = ()
    projector: tuple[str, ...] = ("merged merged", "merged out")
    has_joint_inputs: bool = False
    boxes: BoxForm | None = None

    @property
    def visual_inputs(self) -> dict[MediaKind, tuple[str, str]]:
        """Names of the vision tower's inputs by kind; empty if these are not patches and grids."""
        if self.processor_inputs:
            return {}
        names: dict[MediaKind, tuple[str, str]] = {"image": self.image_inputs, "video": self.video_inputs}
        return {kind: pair for kind, pair in names.items() if kind in self.kinds and self.taken_as(kind) == kind}

    def taken_as(self, kind: MediaKind) -> MediaKind:
        """Return the kind of medium whose inputs the model uses for a kind: ``image`` also for videos of some."""
        return "image" if kind == "video" and self.videos_as_pictures else kind

    def pads_in(self, config: Mapping[str, Any]) -> dict[MediaKind, int]:
        """Return the id of the placeholder token of each kind that the family supports and ``config.json`` names."""
        ids = pad_ids_of(config)
        named = self.kinds if self.video_outputs else tuple(map(self.taken_as, self.kinds))
        return {kind: ids[name] for kind, name in zip(self.kinds, named, strict=True) if name in ids}

    def mel_frames_of(self, num_tokens: int) -> int:
        """Return the maximum number of mel frames of a sound with ``num_tokens`` tokens."""
        frames, tokens = self.sound_chunk
        chunks, rest = divmod(num_tokens, tokens)
        return chunks * frames + rest * -(-frames // tokens)


def thinker_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a ``config.json`` that is trained: the thinker's of an Omni model, otherwise all of it."""
    thinker: Mapping[str, Any] = config.get("thinker_config") or config
    return thinker


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text tower's part of a ``config.json``; all of it for a model of text alone."""
    thinker = thinker_of(config)
    text: Mapping[str, Any] = thinker.get("text_config") or thinker
    return text


def square_side(config: Mapping[str, Any], name: str, default: int) -> int:
    """Read the side of a square from part of a ``config.json``, which gives one number, or height and width."""
    size = config.get(name) or default
    return int(size[0] if isinstance(size, list | tuple) else size)


def default_max_length(config: Mapping[str, Any]) -> int:
    """Return the default of ``--max-length``: the model's maximum length, but at most 8,192 tokens."""
    return min(int(text_config_of(config).get("max_position_embeddings", 8192)), 8192)


def pad_ids_of(config: Mapping[str, Any]) -> dict[MediaKind, int]:
    """Return the id of the placeholder token of each kind of medium that a ``config.json`` names."""
    config = thinker_of(config)
    kinds: tuple[MediaKind, ...] = ("image", "video", "audio")
    names = [(kind, f"{kind}_token_{suffix}") for kind in kinds for suffix in ("index", "id")]
    return {kind: int(config[name]) for kind, name in names if config.get(name) is not None}


def encoded_video(ref: MediaRef, size: VideoSize, **fields: Any) -> EncodedVideo:
    """Return a measured video; ``fields`` are those that its sampling determines."""
    frames = tuple((frame.path, frame.data) for frame in ref.frames)
    return EncodedVideo(ref.path, ref.data, frames, height=size.height, width=size.width, fps=size.fps, **fields)


def _is_under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
