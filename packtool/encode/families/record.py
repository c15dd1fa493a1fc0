"""A family of models as one record: all that packtool knows of it, as plain data, before anything heavy is imported.

Encoding, collation, attention and training read it; none of them names a model. What the record does not tell they see
from the model's own configuration.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from packtool.config.adapters import ModelPart
from packtool.config.rows import MediaOptions
from packtool.encode.families.base import MediaEncoding, MediaKind
from packtool.encode.families.boxes import BoxForm
from packtool.encode.model_files import ModelFiles

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
