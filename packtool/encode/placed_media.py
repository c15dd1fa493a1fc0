"""Where the media of a sample lie among its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import MediaKind, family_of, thinker_of
from packtool.media.opening import MediaProblem
from packtool.rows.sample import Sample

Sound = tuple[EncodedAudio, str | None, bytes | None]
"""A sound, and the path or the bytes of the file that it lies in."""


@dataclass(frozen=True)
class MediaTokens:
    """The tokens by which a model's media are found.

    Args:
        pads: what stands for a piece of a medium, by kind.
        opening_vision, opening_sound: what opens a picture or video, and a sound; None where there is none.
    """

    pads: Mapping[MediaKind, int]
    opening_vision: int | None = None
    opening_sound: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MediaTokens:
        """Those that a ``config.json`` names, of the kinds that its model can be trained on."""
        family, settings = family_of(config), thinker_of(config)
        openings = (settings.get(marks[0]) for marks in (family.image_marks, family.sound_marks))
        return cls(family.pads_in(config), *openings)


def refuse_mixed(sample: Sample, tokens: MediaTokens) -> None:
    """Raise if a row has pictures and videos for which the same token stands: their order could not be told again.

    Raises:
        MediaProblem: saying so.
    """
    if sample.images and sample.videos and tokens.pads.get("image") == tokens.pads.get("video", -1):
        told = "this model takes a video's frames as pictures: a row may have pictures or videos, and this one has both"
        raise MediaProblem("media_unsupported", told)


@dataclass(frozen=True)
class PlacedMedium:
    """A picture, a video with its sound track, or a sound of a sample.

    Args:
        medium: itself.
        start: its first pad.
        stop: behind its last one.
    """

    medium: EncodedImage | EncodedVideo | EncodedAudio
    start: int
    stop: int


def sounds_in_order(sample: EncodedSample, tokens: MediaTokens) -> list[Sound]:
    """Sounds of a sample in the order of their placeholder tokens: a video's track comes where the video does."""
    audios = [(audio, audio.path, audio.data) for audio in sample.audios]
    tracks = [(video.audio, video.path, video.data) for video in sample.videos if video.audio is not None]
    if not audios or not tracks:
        return [*audios, *tracks]
    # A track's first mark stands right behind the mark that opens its video.
    opens = np.flatnonzero(sample.input_ids == tokens.opening_sound)
    is_track = sample.input_ids[opens - 1] == tokens.opening_vision
    return [tracks.pop(0) if track else audios.pop(0) for track in is_track]


def placed_media(sample: EncodedSample, tokens: MediaTokens) -> list[PlacedMedium]:
    """The media of a sample in the order of their first placeholder tokens; kinds without these are not found."""
    if not (sample.images or sample.videos or sample.audios):
        return []
    sounds = [sound for sound, _, _ in sounds_in_order(sample, tokens)]
    kinds: dict[MediaKind, list[Any]] = {"image": [*sample.images], "video": [*sample.videos], "audio": sounds}
    spans = {
        kind: _spans(sample.input_ids == pad, [medium.num_tokens for medium in kinds[kind]])
        for kind, pad in tokens.pads.items()
    }
    tracks = [span for sound, span in zip(sounds, spans.get("audio", []), strict=False) if is_track(sound)]
    found = []
    for kind, places in spans.items():
        for medium, (start, stop) in zip(kinds[kind], places, strict=True):
            if isinstance(medium, EncodedVideo) and medium.audio is not None:
                first, last = tracks.pop(0)
                start, stop = min(start, first), max(stop, last)
            if not (isinstance(medium, EncodedAudio) and is_track(medium)):
                found.append(PlacedMedium(medium, start, stop))
    return sorted(found, key=lambda placed: placed.start)


def is_track(sound: EncodedAudio) -> bool:
    """Whether a sound is a video's, in whose file it lies."""
    return sound.path is None and sound.data is None


def _spans(is_pad: npt.NDArray[np.bool_], counts: list[int]) -> list[tuple[int, int]]:
    """The first pad of each medium, and what is behind its last one."""
    if not counts:
        return []
    at, ends = np.flatnonzero(is_pad), np.cumsum(counts)
    return list(zip(at[ends - counts].tolist(), (at[ends - 1] + 1).tolist(), strict=True))
