"""Media in the tokens of a sample: written out before tokenization, and found again afterwards.

Text that belongs to a medium (a video's ``<1.5 seconds>``) is tokenized together with the text around it, as the
model's own processor does; a token across the border belongs to the medium.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.encode.encoded import EncodedAudio, EncodedSample, EncodedVideo
from packtool.encode.families import family_of, thinker_of
from packtool.encode.families.record import Medium, Part
from packtool.encode.tokenize import Piece
from packtool.rows.sample import MediaKind


class Span(NamedTuple):
    """Tokens [start, end) of a medium, from its first mark to its last, which truncation keeps or removes as one.

    Args:
        kind: "image", "video" or "audio".
        number: among the sample's media of that kind.
    """

    kind: str
    number: int
    start: int
    end: int


_Border = tuple[int, int | None]
"""Border of a medium: a unit, and a number of characters of its text, or None for before its control token."""


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
    borders: list[tuple[str, int, _Border, _Border]]
    num_omitted: int


def lay_out(
    pieces: Sequence[Piece],
    media: Mapping[str, Sequence[Medium]],
    parts_of: Callable[[Medium, int], Sequence[Part]],
    max_length: int,
) -> MediaLayout:
    """Write the tokens of media out where pieces stand for them.

    Args:
        max_length: of a sample. Of a medium with more control tokens, which no sample can hold, ``max_length + 1`` are
            written: memory must not depend on a limit that the row sets.
    """
    layout = MediaLayout([], [], [], 0)
    units, num_omitted = layout.units, 0
    counts = dict.fromkeys(media, 0)
    for piece in pieces:
        layout.firsts.append(len(units))
        if not piece.media:
            units.append(piece)
            continue
        index = counts[piece.media]
        counts[piece.media] += 1
        begin: _Border | None = None
        room = max_length + 1
        for part in parts_of(media[piece.media][index], index):
            if isinstance(part, str):
                last = units[-1]
                begin = begin or (len(units) - 1, len(last.text))
                units[-1] = last._replace(text=last.text + part)
            elif part[1]:
                times = min(part[1], room)
                room -= times
                num_omitted += part[1] - times
                begin = begin or (len(units), None)
                units.append(Piece(part[0], "", "", times))
        last = units[-1]
        layout.borders.append((piece.media, index, begin or (len(units), None), (len(units) - 1, len(last.text))))
        units[-1] = last._replace(text=last.text + piece.text)
    return layout._replace(num_omitted=num_omitted)


class TokenizedLayout(NamedTuple):
    """A tokenized layout.

    Args:
        ids: of the conversation.
        text_starts: where the text of each unit begins in ``ids``, after its control tokens.
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
    """Concatenate the ids of all units.

    Args:
        encode: returns the ids of another text after a control token.
    """
    units = layout.units
    ids: list[int] = []
    text_starts: list[int] = []
    for unit, text_ids in zip(units, unit_ids, strict=True):
        if unit.control:
            ids += [control_ids[unit.control]] * unit.times
        text_starts.append(len(ids))
        ids += text_ids

    def start_of(i: int, char: int | None) -> int:
        if char is None:
            return text_starts[i] - units[i].times
        before = encode(units[i]._replace(text=units[i].text[:char])) if char else []
        return text_starts[i] + num_common(before, unit_ids[i])

    def end_of(i: int, char: int | None) -> int:
        if not char:
            return text_starts[i]
        after = encode(units[i]._replace(text=units[i].text[char:])) if char < len(units[i].text) else []
        return text_starts[i] + len(unit_ids[i]) - num_common(after[::-1], unit_ids[i][::-1])

    spans = [Span(kind, index, start_of(*begin), end_of(*end)) for kind, index, begin, end in layout.borders]
    return TokenizedLayout(ids, text_starts, spans)


def num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    for count, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return count
    return min(len(a), len(b))


@dataclass(frozen=True)
class MediaTokens:
    """The tokens by which a model's media are found.

    Args:
        pads: placeholder token of a piece of a medium, by kind.
        opening_vision, opening_sound: what opens a picture or video, and a sound; None where there is none.
    """

    pads: Mapping[MediaKind, int]
    opening_vision: int | None = None
    opening_sound: int | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> MediaTokens:
        """Read the tokens from a ``config.json``, of the kinds that its model can be trained on."""
        family, settings = family_of(config), thinker_of(config)
        openings = (settings.get(marks[0]) for marks in (family.image_marks, family.sound_marks))
        return cls(family.pads_in(config), *openings)


class MediumSpan(NamedTuple):
    """Placeholder tokens [start, stop) of a medium; a video's sound track is part of it."""

    medium: Medium
    start: int
    stop: int


def sounds_in_order(sample: EncodedSample, tokens: MediaTokens) -> list[tuple[EncodedAudio, str | None, bytes | None]]:
    """Return a sample's sounds, sound tracks of videos among them, in the order of their placeholder tokens.

    Returns:
        each sound with the path or the bytes of its file.
    """
    audios = [(audio, audio.path, audio.data) for audio in sample.audios]
    tracks = [(video.audio, video.path, video.data) for video in sample.videos if video.audio is not None]
    if not audios or not tracks:
        return [*audios, *tracks]
    # A track's first mark directly follows the mark that opens its video.
    opens = np.flatnonzero(sample.input_ids == tokens.opening_sound)
    is_track = sample.input_ids[opens - 1] == tokens.opening_vision
    return [tracks.pop(0) if track else audios.pop(0) for track in is_track]


def media_spans(sample: EncodedSample, tokens: MediaTokens) -> list[MediumSpan]:
    """Return the media of a sample with their first and last positions, in the order of the tokens.

    Kinds without placeholder tokens are left out. A video's span includes its sound track, which has none of its own.
    """
    if not (sample.images or sample.videos or sample.audios):
        return []
    sounds = [sound for sound, _, _ in sounds_in_order(sample, tokens)]
    media: dict[MediaKind, list[Any]] = {"image": [*sample.images], "video": [*sample.videos], "audio": sounds}
    spans = {
        kind: _pad_spans(sample.input_ids == pad, [medium.num_tokens for medium in media[kind]])
        for kind, pad in tokens.pads.items()
    }
    tracks = [span for sound, span in zip(sounds, spans.get("audio", []), strict=False) if _is_track(sound)]
    result = []
    for kind, kind_spans in spans.items():
        for medium, (start, stop) in zip(media[kind], kind_spans, strict=True):
            if isinstance(medium, EncodedVideo) and medium.audio is not None:
                first, last = tracks.pop(0)
                start, stop = min(start, first), max(stop, last)
            if not (isinstance(medium, EncodedAudio) and _is_track(medium)):
                result.append(MediumSpan(medium, start, stop))
    return sorted(result, key=lambda span: span.start)


def _is_track(sound: EncodedAudio) -> bool:
    return sound.path is None and sound.data is None


def _pad_spans(is_pad: npt.NDArray[np.bool_], counts: list[int]) -> list[tuple[int, int]]:
    """Return the first pad of each medium, and the position after its last one."""
    if not counts:
        return []
    positions, ends = np.flatnonzero(is_pad), np.cumsum(counts)
    return list(zip(positions[ends - counts].tolist(), (positions[ends - 1] + 1).tolist(), strict=True))
