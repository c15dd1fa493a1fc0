"""What a row of any form becomes before it is encoded.

The boundary between one row and all the others: whatever a row holds, it costs that row only.

What is wrong with a row is usually foreseen and has a reason of its own. This is for the rest: an exception that
nobody thought of becomes a ``Dropped`` with the reason ``unexpected``, which names the exception and the place in
packtool's code, so that it can be counted, looked at and reported.
"""

from __future__ import annotations

import errno
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from packtool.config.data import BboxType
from packtool.errors import PacktoolError, RowError
from packtool.rows.rights import MediaRights


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Args:
        role: one of ``constants.ROLES``.
        content: its text; ``<image>``, ``<video>`` and ``<audio>`` stand where a medium goes.
        extra: further keys that chat templates read (``tool_calls``, ``reasoning_content``, ``name``, ...).
        loss: the row's own word on whether an assistant turn is trained; None leaves it to the loss scale.
        loss_scale: the row's own weight for an assistant turn's tokens; None leaves it to the loss scale.
    """

    role: str
    content: str
    extra: dict[str, Any] = field(default_factory=dict)
    loss: bool | None = None
    loss_scale: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """What templates may write of it: its thoughts, its content, then what its calls say."""
        if not self.extra:
            return (self.content,)
        found: list[str] = []

        def note(text: str) -> str:
            found.append(text)
            return text

        self.with_texts(note)
        return tuple(found)

    def with_texts(self, change: Callable[[str], str]) -> Turn:
        """The turn with what ``change`` makes of each of ``texts``, which it is given in their order."""
        told = {key: change(value) for key, value in self.extra.items() if isinstance(value, str)}
        content = change(self.content)
        told |= {key: _with_texts(value, change) for key, value in self.extra.items() if key not in told}
        return replace(self, content=content, extra={key: told[key] for key in self.extra})


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of lists and mappings with what ``change`` makes of each text in them, but for keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _with_texts(item, change) for key, item in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Response:
    """One of several accepted answers to what a row asks.

    Args:
        turns: of the assistant, and of tools between them.
        weight: that the loss scale of its tokens is multiplied by, above 0.
    """

    turns: tuple[Turn, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class RowPart:
    """Which part of its row a sample is, where a row becomes several samples.

    Args:
        turn: number, from 1 on, of the row's last assistant turn that it has; 0 where turns are no samples.
        num_turns: assistant turns of the row.
        response: number, from 1 on, of its response; 0 for a row with one answer.
        num_responses: of the row.
    """

    turn: int = 0
    num_turns: int = 0
    response: int = 0
    num_responses: int = 0

    def __str__(self) -> str:
        turn = f"turn {self.turn} of {self.num_turns}" if self.turn else ""
        response = f"response {self.response} of {self.num_responses}" if self.response else ""
        return ", ".join(filter(None, (turn, response)))


@dataclass(frozen=True)
class MediaRef:
    """Where one picture, video or sound lies.

    Args:
        path: absolute path or URL, or None.
        data: the encoded file's bytes, or None.
        frames: a video given as its pictures, in order; ``path`` and ``data`` are None then.
        fps: pictures a second of such a video, when the row says it.
        clip: (start, end) in seconds of the part of a video that is meant, None for its beginning or its end; None for
            the whole video.
        limits: (name, number) of limits on the size that the row gives this medium, as Qwen's rows have them.
        rights: what the path may be; whoever makes one of a path that stands in a row gives the row's.
    """

    path: str | None
    data: bytes | None = None
    frames: tuple[MediaRef, ...] = ()
    fps: float | None = None
    clip: tuple[float | None, float | None] | None = None
    limits: tuple[tuple[str, float], ...] = ()
    rights: MediaRights = field(default=MediaRights(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """What messages call the medium."""
        if self.frames:
            return f"<{len(self.frames)} frames>"
        return self.path if self.path is not None else f"<{len(self.data or b'')} bytes>"


@dataclass(frozen=True)
class Region:
    """A box, a point or a polygon in a picture.

    Args:
        corners: x and y of each corner, from the left and the top: one of a point, two of a box, more of a polygon.
        image: number of the picture among the row's, from 0 on.
        unit: pixels of the picture as it is shown (``real``), shares of its sides, or thousandths of them.
    """

    corners: tuple[float, ...]
    image: int = 0
    unit: BboxType = "real"


@dataclass(frozen=True)
class Objects:
    """Places in a row's pictures, and names, which its texts have marks of.

    Args:
        names: what stands at each ``<ref-object>``, in order.
        boxes: what stands at each ``<bbox>``, in order; mostly one box.
        unit: of coordinates that the texts have as JSON; None if the row does not say.
        images: for each box of that JSON, in order, its picture; empty if the row does not say.
    """

    names: tuple[str, ...] = ()
    boxes: tuple[tuple[Region, ...], ...] = ()
    unit: BboxType | None = None
    images: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """The tokens of a row that another tool has made, without padding.

    Args:
        ids: int64 (L,).
        trained: bool (L,), which of them are targets; None where nothing says it, and all are.
        weights: float32 (L,), of the targets; None where all weigh 1.
        starts: int64 (D,), ascending from 0: where the D samples begin that the row is packed of.
        channels: of each of these samples; None where the row has one for all.
        measured: what the row says of its media's sizes, by kind; an object without keys where it says nothing.
    """

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None
    weights: npt.NDArray[np.float32] | None
    starts: npt.NDArray[np.int64]
    channels: tuple[str | None, ...] | None = None
    measured: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A conversation, its media in the order of their marks, and where it came from.

    Args:
        source: the dataset as the user named it.
        row: 0-based row in that source.
        num_marks_added: media marks that the row lacked.
        is_text: a text for pretraining: one assistant turn, encoded without a chat template, every token a target.
        loss_scale: the dataset's own loss scale (``--dataset-info``), None for the export's.
        lone_mark: kind of medium that a question has a mark of and the row has none of; "" for none.
        responses: accepted answers to what the turns ask; none where the turns have the answer.
        part: of the row, where it becomes several samples and this is to be one of them.
        tokens: of a row that another tool has tokenized, which has no turns; None for all others.
        objects: boxes and names that its texts have marks of; None if it has none, or they are written.
        control: control tokens that its texts may hold as such; all others in them are text.
    """

    turns: tuple[Turn, ...]
    images: tuple[MediaRef, ...]
    source: str
    row: int
    tools: tuple[Any, ...] | None = None
    channel: str | None = None
    num_marks_added: int = 0
    videos: tuple[MediaRef, ...] = ()
    audios: tuple[MediaRef, ...] = ()
    is_text: bool = False
    loss_scale: str | None = None
    lone_mark: str = ""
    responses: tuple[Response, ...] = ()
    part: RowPart | None = None
    tokens: PreparedTokens | None = None
    objects: Objects | None = None
    control: frozenset[str] = frozenset()


_LONGEST_DETAIL, _MOST_SHOWN = 1000, 300


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why. Every row that goes in comes out encoded or as one of these.

    Args:
        part: what was left out of a row of which other parts are kept; None for a whole row.
        detail: explanation for the user; what it quotes of the row ends after 1,000 characters, and can be written.
    """

    source: str
    row: int
    reason: str
    detail: str
    part: RowPart | None = None

    def __post_init__(self) -> None:
        detail = self.detail
        if len(detail) > _LONGEST_DETAIL:
            detail = f"{detail[:_LONGEST_DETAIL]}..."
        object.__setattr__(self, "detail", detail.encode(errors="backslashreplace").decode())

    @property
    def shown(self) -> str:
        """Which row, and what is wrong with it, in a line or so."""
        part = "" if self.part is None else f", {self.part}"
        return f"{self.source}, row {self.row}{part}: {self.detail[:_MOST_SHOWN]}"

    def as_error(self) -> RowError:
        """What ``--strict`` raises."""
        part = "" if self.part is None else f"{self.part}: "
        return RowError(self.source, self.row, self.reason, part + self.detail)

    def to_json(self) -> str:
        """A line of ``dropped.jsonl``."""
        told = {name: getattr(self, name) for name in ("source", "row", "reason", "detail")}
        if self.part is not None:
            told["part"] = str(self.part)
        return json.dumps(told, ensure_ascii=False) + "\n"


UNEXPECTED = "unexpected"
"""The reason of rows that met something unforeseen."""

P = ParamSpec("P")
T = TypeVar("T")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The machine's trouble, which the next row would meet too.
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
# What a panic in a library written in Rust (tokenizers) arrives as: no Exception, and its class cannot be imported.
_PANIC = "PanicException"


def held(source: str, row: int, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Dropped:
    """Do something with one row; what nobody foresaw becomes ``Dropped``.

    Raises:
        PacktoolError: what was raised on purpose: a row that may not be dropped, an output that cannot be written.
        MemoryError, OSError: where the machine and not the row is at fault: no memory, no free file handle, a full
            disk.
        BaseException: Ctrl-C and its like.
    """
    try:
        return act(*args, **kwargs)
    except BaseException as error:
        return unexpected(source, row, error)


def unexpected(source: str, row: int, error: BaseException) -> Dropped:
    """The ``Dropped`` that an exception becomes.

    Raises:
        the error: if it says nothing about the row; see ``held``.
    """
    is_ordinary = isinstance(error, Exception) or type(error).__name__ == _PANIC
    if not is_ordinary or isinstance(error, (PacktoolError, MemoryError)):
        raise error
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        raise error
    return Dropped(source, row, UNEXPECTED, f"{type(error).__name__} at {_place(error)}: {error}")


def unforeseen_note(dropped: Mapping[str, int], where: str) -> str:
    """What to tell at the end about rows that met something unforeseen; "" if none did.

    Args:
        dropped: rows by reason.
        where: what lists them.
    """
    if not (count := dropped.get(UNEXPECTED, 0)):
        return ""
    rows = "1 row" if count == 1 else f"{count:,} rows"
    return (
        f"{rows} left out for something that packtool did not foresee: see the lines with "
        f'"{UNEXPECTED}" in {where}. Please report one of them; --strict stops at the first'
    )


def _place(error: BaseException) -> str:
    """File and line of packtool's code that the exception came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_PACKAGE + os.sep)]
    if not own:
        return "an unknown place"
    return f"{os.path.relpath(own[-1].filename, _PACKAGE).replace(os.sep, '/')}:{own[-1].lineno}"
