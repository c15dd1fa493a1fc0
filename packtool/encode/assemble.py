"""Pieces of a rendered conversation, with the media's tokens in their places, become ids and spans.

Text that belongs to a medium (a video's ``<1.5 seconds>``) is tokenized together with the text around it, as the
model's own processor does; a token that lies on the border counts as the medium's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packtool.encode.control import Piece
from packtool.encode.families import Medium, Part


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
