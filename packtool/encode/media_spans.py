"""Pieces of a rendered conversation, with the media's tokens in their places, become ids and spans.

Text that belongs to a medium (a video's ``<1.5 seconds>``) is tokenized together with the text around it, as the
model's own processor does; a token that lies on the border counts as the medium's.

Where the media of a sample lie among its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.encode.control import Piece
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import MediaKind, Medium, Part, family_of, thinker_of
from packtool.media.opening import MediaProblem
from packtool.rows.sample import Sample


@dataclass(frozen=True)
class Span:
    """What must live or die together: a medium from its first mark to its last.

    Args:
        kind: "image", "video" or "audio".
        index: among the sample's media of that kind.
        start, end: tokens [start, end).
    """

    kind: str
    index: int
    start: int
    end: int


@dataclass(frozen=True)
class _Place:
    """A border of a medium: before the control token of a unit, or behind ``char`` characters of its text."""

    unit: int
    char: int | None


class MediaLayout(NamedTuple):
    """A conversation with its media written out, before tokenization.

    Args:
        units: pieces, none of which stands for a medium any more.
        firsts: the unit that each of the original pieces begins at.
        borders: (kind, index, begin, end) of each medium.
        num_omitted: control tokens of media that are not in ``units``.
    """

    units: list[Piece]
    firsts: list[int]
    borders: list[tuple[str, int, _Place, _Place]]
    num_omitted: int


def lay_out(
    pieces: Sequence[Piece],
    media: Mapping[str, Sequence[Medium]],
    parts_of: Callable[[Medium, int], Sequence[Part]],
    max_length: int,
) -> MediaLayout:
    """Write the media's tokens out where pieces stand for them.

    Args:
        max_length: of a sample. Of a medium with more control tokens, which no sample can hold, ``max_length + 1`` are
            written: memory must not depend on a limit that the row sets.
    """
    num_omitted = 0
    units: list[Piece] = []
    firsts: list[int] = []
    borders: list[tuple[str, int, _Place, _Place]] = []
    counts = dict.fromkeys(media, 0)
    for piece in pieces:
        firsts.append(len(units))
        if not piece.media:
            units.append(piece)
            continue
        index = counts[piece.media]
        counts[piece.media] += 1
        begin: _Place | None = None
        room = max_length + 1
        for part in parts_of(media[piece.media][index], index):
            if isinstance(part, str):
                last = units[-1]
                begin = begin or _Place(len(units) - 1, len(last.text))
                units[-1] = last._replace(text=last.text + part)
            elif part[1]:
                times = min(part[1], room)
                room -= times
                num_omitted += part[1] - times
                begin = begin or _Place(len(units), None)
                units.append(Piece(part[0], "", "", times))
        last = units[-1]
        borders.append((piece.media, index, begin or _Place(len(units), None), _Place(len(units) - 1, len(last.text))))
        units[-1] = last._replace(text=last.text + piece.text)
    return MediaLayout(units, firsts, borders, num_omitted)


class TokenizedLayout(NamedTuple):
    """A tokenized layout.

    Args:
        ids: of the whole conversation.
        text_starts: where the text of each unit begins in ``ids``, behind its control tokens.
        spans: of the media, ascending.
    """

    ids: list[int]
    text_starts: list[int]
    spans: list[Span]


def join_pieces(
    layout: MediaLayout,
    unit_ids: Sequence[Sequence[int]],
    control_ids: Mapping[str, int],
    encode: Callable[[Piece], Sequence[int]],
) -> TokenizedLayout:
    """Put the ids of all units together.

    Args:
        unit_ids: of each unit's text.
        encode: ids of one further text behind a control token.
    """
    ids: list[int] = []
    text_starts: list[int] = []
    for unit, text_ids in zip(layout.units, unit_ids, strict=True):
        if unit.control:
            ids += [control_ids[unit.control]] * unit.times
        text_starts.append(len(ids))
        ids += text_ids
    spans = []
    for kind, index, begin, end in layout.borders:
        start = _start(layout.units, begin, unit_ids, text_starts, encode)
        spans.append(Span(kind, index, start, _end(layout.units, end, unit_ids, text_starts, encode)))
    return TokenizedLayout(ids, text_starts, spans)


def _start(
    units: Sequence[Piece],
    place: _Place,
    unit_ids: Sequence[Sequence[int]],
    text_starts: Sequence[int],
    encode: Callable[[Piece], Sequence[int]],
) -> int:
    unit = units[place.unit]
    if place.char is None:
        return text_starts[place.unit] - unit.times
    before = encode(unit._replace(text=unit.text[: place.char])) if place.char else []
    return text_starts[place.unit] + num_common(before, unit_ids[place.unit])


def _end(
    units: Sequence[Piece],
    place: _Place,
    unit_ids: Sequence[Sequence[int]],
    text_starts: Sequence[int],
    encode: Callable[[Piece], Sequence[int]],
) -> int:
    if not place.char:
        return text_starts[place.unit]
    unit, ids = units[place.unit], unit_ids[place.unit]
    behind = encode(unit._replace(text=unit.text[place.char :])) if place.char < len(unit.text) else []
    return text_starts[place.unit] + len(ids) - num_common(behind[::-1], ids[::-1])


def num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many elements both begin with."""
    for count, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return count
    return min(len(a), len(b))


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
