"""A family of models as one record: all that packtool knows of it, as plain data, before anything heavy is imported.

Encoding, collation, attention and training read it; none of them names a model. What the record does not tell they see
from the model's own configuration.

What encoding asks of a family of models: limits on media, and what stands for a medium in tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol

from packtool.config.data import MediaOptions
from packtool.config.model import ModelPart
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.encode.families.boxes import BoxForm
from packtool.encode.model_files import ModelFiles
from packtool.rows.sample import MediaRef


@dataclass(frozen=True)
class ImageLimits:
    """Everything that turns a picture's height and width into patches.

    Args:
        min_pixels, max_pixels: bounds on height x width after resizing.
        patch_size: pixels along one side of a patch.
        merge_size: patches along one side of a token.
        temporal_patch_size: frames of a patch; a picture is repeated to fill it.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def pixels_per_token(self) -> int:
        """Pixels that one token stands for."""
        return (self.patch_size * self.merge_size) ** 2


@dataclass(frozen=True)
class VideoLimits:
    """Everything that turns a video's frames into patches.

    Args:
        fps: frames a second to take.
        min_frames, max_frames: bounds on the frames that are taken.
        min_pixels, max_pixels: bounds on the pixels after resizing: of each frame, or of all frames together.
        over_all_frames: which of the two.
        frame_min_pixels, frame_max_pixels: the user's bounds for one frame where the others are for all.
        total_pixels: the user's bound on the pixels of all frames where the others are for one.
        even_ends: frames are spread from the first to the last one (Qwen3-VL), not at equal steps from the first.
        patch_size, merge_size, temporal_patch_size: as for pictures.
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
        """(least, most) pixels that the processor is given for a video of which ``num_frames`` are taken."""
        if self.over_all_frames:
            most = self.max_pixels
            if self.frame_max_pixels is not None:
                most = min(most, self.frame_max_pixels * num_frames)
            return min(max(self.min_pixels, (self.frame_min_pixels or 0) * num_frames), most), most
        if self.total_pixels is None:
            return self.min_pixels, self.max_pixels
        # An even share of the whole, but a little more than the least, as qwen-vl-utils has it.
        share = self.total_pixels * self.temporal_patch_size // num_frames
        return self.min_pixels, max(min(self.max_pixels, share), int(self.min_pixels * 1.05))


@dataclass(frozen=True)
class AudioLimits:
    """Everything that turns sound into tokens.

    Args:
        sampling_rate: samples a second that the model's feature extractor wants.
        hop_length: samples from one mel frame to the next.
        max_features: most mel frames of one sound, what comes later is cut off; None for no bound.
        in_video: whether a video's sound track is woven in between its frames.
        tokens_per_second: positions in time of a second of sound, by which frames and sound are woven.
        seconds_per_chunk: of video and sound that follow each other, where they are woven in chunks.
    """

    sampling_rate: int
    hop_length: int
    max_features: int | None
    in_video: bool
    tokens_per_second: float
    seconds_per_chunk: float


@dataclass(frozen=True)
class MediaLimits:
    """Limits of each kind of medium, None for kinds that the model does not take."""

    image: ImageLimits | None = None
    video: VideoLimits | None = None
    audio: AudioLimits | None = None

    @property
    def without_bounds(self) -> dict[str, Any]:
        """What bounds no size and no number of frames, by name: caches that differ in it cannot be trained together."""
        kinds = asdict(self).items()
        return {
            f"{kind} {name}": value
            for kind, limits in kinds
            for name, value in (limits or {}).items()
            if name not in _BOUNDS
        }


_BOUNDS = {"fps", "min_frames", "max_frames", "min_pixels", "max_pixels"}
_BOUNDS |= {"frame_min_pixels", "frame_max_pixels", "total_pixels"}
MediaKind = Literal["image", "video", "audio"]
Medium = EncodedImage | EncodedVideo | EncodedAudio
Part = str | tuple[str, int]
"""A piece of what stands for a medium in tokens: plain text, or a control token and how often it comes."""


class MediaEncoding(Protocol):
    """How a model that sees or hears has its media in tokens, with the limits of one export.

    Attributes:
        limits: resolved from processor settings, environment and options.
        control_tokens: tokens that mark media.
        content_as_list: how its chat template wants media. False: ``parts`` are put where the row's text has a mark,
            and must bring opening and closing marks with them. True: contents are lists of texts and media, the
            template writes ``placeholders``, and ``parts`` replace these.
        placeholders: the control token that the template writes for each kind; empty unless ``content_as_list``.
        remarks: what a user should know, a line each.
        alone_only: a row may have one picture only.
    """

    @property
    def alone_only(self) -> bool: ...

    @property
    def remarks(self) -> tuple[str, ...]: ...

    @property
    def limits(self) -> MediaLimits: ...

    @property
    def control_tokens(self) -> tuple[str, ...]: ...

    @property
    def content_as_list(self) -> bool: ...

    @property
    def placeholders(self) -> Mapping[str, MediaKind]: ...

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        """Look at a medium, at its header where that is enough.

        Raises:
            MediaProblem: if it cannot be used.
        """

    def parts(self, medium: Medium, number: int = 0) -> list[Part]:
        """What stands for a medium in tokens, from its first mark to its last.

        Args:
            number: of the medium among those of its kind in the row.
        """


Positions = Literal["token_types", "sound_seconds", "counted"]
"""What a model's ``get_rope_index`` is told beside the grids: the kind of each token, or the lengths of sounds.

``counted``: a model with pictures whose positions are those of a text, 0, 1, 2, ...
"""


Encoding = partial[MediaEncoding]
"""Makes what encodes media of a model's files (``ModelFiles``) and the user's limits (``MediaOptions``)."""


def encoded_by(name: str, **options: Any) -> Encoding:
    """A class that encodes media, imported when it is used: it opens pictures, which readers of a record need not.

    Args:
        name: module of this folder and class, as in ``qwen_vl.QwenVL``.
        options: what it is given beside the model's files and the user's limits.
    """
    return partial(_encoding, name, **options)


def _encoding(name: str, files: ModelFiles, limits: MediaOptions, **options: Any) -> MediaEncoding:
    module, _, class_name = name.rpartition(".")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), class_name)
    made: MediaEncoding = found(files, limits, **options)
    return made


MAX_DEFAULT_LENGTH = 8192
TEXT_ONLY = encoded_by("text.TextOnly")
"""The encoding of media by models that take none."""


def by_processor(no_videos: str) -> Encoding:
    """The encoding of media by models whose own processor is asked.

    Args:
        no_videos: why rows with videos are left out; "" where they are not.
    """
    return encoded_by("processor.ProcessorFamily", no_videos=no_videos)


BY_PROCESSOR = by_processor("of this model packtool knows pictures only")
"""The encoding of media by models of which nothing else is known."""


@dataclass(frozen=True)
class Towers:
    """Names of modules, as prefixes of parameter names; what neither of the two claims is language model.

    Args:
        vision: the vision tower, and the audio tower of a model that hears; they may contain the aligner.
        aligner: the projection from vision (or sound) to text.
        unused: what no forward pass uses; trained, ranks would wait for its gradient.
    """

    vision: tuple[str, ...] = ()
    aligner: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def is_unused(self, name: str) -> bool:
        """Whether no forward pass uses a module or parameter."""
        return _is_under(name, self.unused)

    def part_of(self, name: str) -> ModelPart:
        """The part that a module or parameter belongs to."""
        if _is_under(name, self.aligner):
            return "aligner"
        return "vision tower" if _is_under(name, self.vision) else "language model"


@dataclass(frozen=True)
class Recurrence:
    """Layers that carry a state along the sequence, and that ``attention.recurrent`` keeps to each document.

    Args:
        text_types: ``model_type`` of text towers whose recurrent layers are all of these classes.
        layers: names of classes whose forward takes (hidden_states, cache_params, attention_mask, **boundaries).
        has_joint_inputs: queries, keys, values and gates come from one module, ``in_proj_qkvz``, instead of from two.
    """

    text_types: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    has_joint_inputs: bool = False


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models.

    Args:
        title: what people call it.
        model_types: ``model_type`` in ``config.json``, of the whole model and of its thinker where it has one.
        encoding: counts and spells media, made of the model's settings and the user's limits.
        kinds: of media that it can be trained on.
        towers: where its parts lie; all is language model in a model of text alone.
        image_inputs, video_inputs: arguments of its forward for patches of pictures (or videos), and for their grids.
        image_marks, sound_marks: names in ``config.json`` of the tokens that open and close a medium.
        positions: what its rotary positions are made of.
        processor_inputs: of a family whose pictures are made by its own processor: what that makes of them and the
            model's forward takes, as far as it is there. Empty where the tower takes patches and a grid.
        keeps_bounds: all its pictures and videos are made at the bounds of the processor's settings.
        videos_as_pictures: its model takes a video's frames as it takes pictures, by the same inputs and for the same
            placeholder tokens; so nothing but its marks tells them apart, and a row has pictures or videos.
        refused: why its models are exported for, but not trained.
        mel_frames: of the shortest sound, which makes one token; 0 for a model that hears nothing.
        sound_chunk: mel frames of a whole chunk of sound, and the tokens that it makes.
        recurrence: its recurrent layers.
        boxes: how it writes boxes, points and polygons in a picture; None if nobody knows.
    """

    title: str = ""
    model_types: tuple[str, ...] = ()
    encoding: Encoding = TEXT_ONLY
    kinds: tuple[MediaKind, ...] = ()
    towers: Towers = Towers()
    image_inputs: tuple[str, str] = ("pixel_values", "image_grid_thw")
    video_inputs: tuple[str, str] = ("pixel_values_videos", "video_grid_thw")
    image_marks: tuple[str, str] = ("vision_start_token_id", "vision_end_token_id")
    sound_marks: tuple[str, str] = ("audio_start_token_id", "audio_end_token_id")
    positions: Positions = "token_types"
    processor_inputs: tuple[str, ...] = ()
    keeps_bounds: bool = False
    videos_as_pictures: bool = False
    refused: str = ""
    mel_frames: int = 0
    sound_chunk: tuple[int, int] = (1, 1)
    recurrence: Recurrence = Recurrence()
    boxes: BoxForm | None = None

    @property
    def visual_inputs(self) -> dict[MediaKind, tuple[str, str]]:
        """What its vision tower takes, by kind, where that is patches and grids."""
        if self.processor_inputs:
            return {}
        named: dict[MediaKind, tuple[str, str]] = {"image": self.image_inputs, "video": self.video_inputs}
        return {kind: names for kind, names in named.items() if kind in self.kinds and self.taken_as(kind) == kind}

    def taken_as(self, kind: MediaKind) -> MediaKind:
        """The kind of medium as which its model takes media of a kind."""
        return "image" if kind == "video" and self.videos_as_pictures else kind

    def pads_in(self, config: Mapping[str, Any]) -> dict[MediaKind, int]:
        """The token that stands for a piece of a medium, by kind, of those it takes and a ``config.json`` names."""
        named = pad_ids_of(config)
        wanted = {kind: self.taken_as(kind) for kind in self.kinds}
        return {kind: named[other] for kind, other in wanted.items() if other in named}

    @property
    def is_encoded_by_processor(self) -> bool:
        """Whether its own processor is asked what stands for a picture; else that follows from headers."""
        return self.encoding.args == BY_PROCESSOR.args

    @property
    def no_videos(self) -> str:
        """Why rows with videos are left out, where its own processor is asked for the pictures; else ""."""
        return str(self.encoding.keywords.get("no_videos", ""))

    @property
    def shares_sequences(self) -> bool:
        """Whether several ranks can share a sequence of such a model."""
        return not self.refused

    def mel_frames_of(self, num_tokens: int) -> int:
        """Mel frames of a sound of so many tokens: those of whole chunks, and the most of what is left."""
        frames, tokens = self.sound_chunk
        whole, rest = divmod(num_tokens, tokens)
        return whole * frames + rest * -(-frames // tokens)


def thinker_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a ``config.json`` that is trained: an Omni model's thinker, or all of it."""
    thinker: Mapping[str, Any] = config.get("thinker_config") or config
    return thinker


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a ``config.json`` that tells of the text tower: all of it in a model of text alone."""
    thinker = thinker_of(config)
    text: Mapping[str, Any] = thinker.get("text_config") or thinker
    return text


def default_max_length(config: Mapping[str, Any]) -> int:
    """Tokens of a sample where ``--max-length`` is not given: as many as the model takes, but at most 8,192."""
    return min(int(text_config_of(config).get("max_position_embeddings", MAX_DEFAULT_LENGTH)), MAX_DEFAULT_LENGTH)


def pad_ids_of(config: Mapping[str, Any]) -> dict[MediaKind, int]:
    """The token that stands for a piece of a medium, by kind, as far as a ``config.json`` names it."""
    config = thinker_of(config)
    kinds: tuple[MediaKind, ...] = ("image", "video", "audio")
    named = {kind: (config.get(f"{kind}_token_id"), config.get(f"{kind}_token_index")) for kind in kinds}
    return {kind: int(token) for kind, tokens in named.items() for token in tokens[::-1] if token is not None}


def _is_under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
