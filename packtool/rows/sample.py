"""Samples, the rows of any form before encoding, and ``Dropped``, a row that is left out with a reason.

``guard_row`` limits an exception to its row. Known problems have their own drop reason; any other exception becomes a
``Dropped`` with the reason ``unexpected``, whose detail names the exception and its line in packtool's code.
"""

from __future__ import annotations

import errno
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from packtool.config.codes import reason_codes, with_code
from packtool.config.data import BboxType
from packtool.errors import DataError, PacktoolError, RowError
from packtool.rows.media_policy import MediaPolicy

MediaKind = Literal["image", "video", "audio"]


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Args:
        role: one of ``constants.ROLES``.
        content: text with the placeholders ``<image>``, ``<video>`` and ``<audio>`` at the positions of media.
        extra: other keys that chat templates read (``tool_calls``, ``reasoning_content``, ``name``, ...).
        loss: whether this assistant turn is trained; None if ``--loss-scale`` decides.
        loss_scale: loss weight of this assistant turn's tokens; None if ``--loss-scale`` decides.
    """

    role: str
    content: str
    extra: dict[str, Any] = field(default_factory=dict)
    loss: bool | None = None
    loss_scale: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that a template may write: reasoning, content, then the texts in tool calls."""
        if not self.extra:
            return (self.content,)
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        self.map_texts(collect)
        return tuple(texts)

    def map_texts(self, change: Callable[[str], str]) -> Turn:
        """Return a copy with ``change`` applied to each text, in the order of ``texts``."""
        changed = {key: change(value) for key, value in self.extra.items() if isinstance(value, str)}
        content = change(self.content)
        changed |= {key: _map_texts(value, change) for key, value in self.extra.items() if key not in changed}
        return replace(self, content=content, extra={key: changed[key] for key in self.extra})


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to each text in nested lists and mappings, but not to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Response:
    """One of several accepted answers to a row's prompt: assistant turns, perhaps with tool turns between them.

    ``weight``, above 0, is a factor on the loss weight of its tokens.
    """

    turns: tuple[Turn, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class RowPart:
    """Position of a sample in a row that becomes several samples.

    Args:
        turn: 1-based number of the sample's last assistant turn; 0 if the row is not split by turns.
        num_turns: assistant turns of the row.
        response: 1-based number of the sample's response; 0 if the row has one answer.
        num_responses: responses of the row.
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
    """An image, a video or an audio file: its path or URL, its bytes, or its frames.

    Args:
        path: absolute path or URL, or None.
        data: bytes of the encoded file, or None.
        frames: images of a video that the row lists as frames; ``path`` and ``data`` are None then.
        fps: frames per second of a video listed as frames, if the row has it.
        milliseconds: time of each of these frames, ascending, if the row has them (``seconds``); then ``fps`` is None.
        clip: (start, end) in seconds of the used section of a video; a None in it is the video's own start or end.
        limits: (name, value) of size limits that the row sets for this medium, as in Qwen's rows.
        policy: media access policy of the row.
    """

    path: str | None
    data: bytes | None = None
    frames: tuple[MediaRef, ...] = ()
    fps: float | None = None
    milliseconds: tuple[int, ...] = ()
    clip: tuple[float | None, float | None] | None = None
    limits: tuple[tuple[str, float], ...] = ()
    policy: MediaPolicy = field(default=MediaPolicy(), compare=False, repr=False)

    @property
    def frame_indices(self) -> tuple[int, ...]:
        """Indices of the listed frames in time: 0, 1, ..., or milliseconds."""
        return self.milliseconds or tuple(range(len(self.frames)))

    @property
    def name(self) -> str:
        """Description of the medium in messages."""
        if self.frames:
            return f"<{len(self.frames)} frames>"
        return self.path if self.path is not None else f"<{len(self.data or b'')} bytes>"


@dataclass(frozen=True)
class Region:
    """A box, a point or a polygon in an image.

    Args:
        corners: x and y of each corner, from the top left: one corner for a point, two for a box, more for a polygon.
        image: 0-based number of the image in the row.
        unit: pixels of the upright image (``real``), fractions of its sides (``norm1``), or thousandths (``norm1000``).
    """

    corners: tuple[float, ...]
    image: int = 0
    unit: BboxType = "real"


@dataclass(frozen=True)
class Objects:
    """Names and regions for the placeholders ``<ref-object>`` and ``<bbox>`` in a row's texts.

    Args:
        names: for each ``<ref-object>``, in order.
        boxes: regions for each ``<bbox>``, in order; usually one.
        unit: unit of coordinates written as JSON in the texts; None if the row does not state it.
        images: image number of each box written as JSON in the texts, in order; empty if the row does not state them.
    """

    names: tuple[str, ...] = ()
    boxes: tuple[tuple[Region, ...], ...] = ()
    unit: BboxType | None = None
    images: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """The L tokens of a row that another tool has tokenized, without padding; D samples if the row is a pack.

    Args:
        ids: int64 (L,).
        trained: bool (L,), true for targets; None if the row has no labels, so all tokens are targets.
        weights: loss weights, float32 (L,); None if all are 1.
        starts: first token of each sample, int64 (D,), ascending from 0.
        channels: channel of each sample; None if the row has one channel for all.
        measured: media sizes that packtool stored in the row, by kind; an empty object for other media.
    """

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None
    weights: npt.NDArray[np.float32] | None
    starts: npt.NDArray[np.int64]
    channels: tuple[str | None, ...] | None = None
    measured: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A conversation, its media in the order of their placeholders, and its origin.

    Args:
        source: the file of rows, as the user named it.
        row: 0-based number of the row in that file.
        num_marks_added: media placeholders that were missing in the texts and were added.
        is_text: encoded without a chat template: a pretraining text, which is one assistant turn and every token a
            target, or segments, of which the assistant turns are targets.
        ends_text: append the end-of-text token if ``is_text``, and begin with the tokenizer's start token, if any.
        loss_scale: the dataset's own loss scale (``--dataset-info``), None for that of the export.
        lone_mark: kind of a medium that a question has a placeholder for, but the row lacks; "" for none.
        responses: accepted answers to the turns; empty if the turns include the answer.
        part: position of this sample in its row, if the row becomes several samples.
        tokens: tokens of a row without turns that another tool has tokenized; else None.
        objects: boxes and names for the placeholders in the texts; None if there are none, or they are filled in.
        control: control tokens that keep their meaning in the texts; all others are plain text.
        chat_template_kwargs: the row's own arguments of the chat template; they take precedence over the run's.
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
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ends_text: bool = True

    @property
    def media(self) -> dict[MediaKind, tuple[MediaRef, ...]]:
        """Media by kind."""
        return {"image": self.images, "video": self.videos, "audio": self.audios}


_MAX_DETAIL, _MAX_SHOWN = 1000, 300


@dataclass(frozen=True)
class Dropped:
    """A row, or one sample of a row, that is left out. Every input row is either encoded or dropped.

    Args:
        reason: a key of ``DROP_REASONS``.
        detail: explanation for the user; truncated to 1,000 characters and made encodable as UTF-8.
        part: the sample that is left out of a row whose other samples are kept; None for the whole row.
    """

    source: str
    row: int
    reason: str
    detail: str
    part: RowPart | None = None

    def __post_init__(self) -> None:
        detail = self.detail if len(self.detail) <= _MAX_DETAIL else f"{self.detail[:_MAX_DETAIL]}..."
        object.__setattr__(self, "detail", detail.encode(errors="backslashreplace").decode())

    @property
    def summary(self) -> str:
        """File, row number and problem, in about one line."""
        part = "" if self.part is None else f", {self.part}"
        return f"{self.source}, row {self.row}{part}: {self.detail[:_MAX_SHOWN]}"

    def as_error(self) -> RowError:
        """Return the error to raise with ``--strict``."""
        part = "" if self.part is None else f"{self.part}: "
        return RowError(self.source, self.row, self.reason, part + self.detail)

    def to_json(self) -> str:
        """Return the line for ``dropped.jsonl``."""
        values = {"source": self.source, "row": self.row, "reason": self.reason, "detail": self.detail}
        if (row := reason_codes().get(self.reason)) is not None:
            values["code"] = row.code
        if self.part is not None:
            values["part"] = str(self.part)
        return json.dumps(values, ensure_ascii=False) + "\n"


UNEXPECTED = "unexpected"
"""Reason of rows dropped because of an exception that packtool does not expect."""


DROP_REASONS = {reason: "" if reason == UNEXPECTED else row.remedy for reason, row in reason_codes().items()}
"""Remedy for every reason in ``dropped.jsonl``; ``unexpected_note`` describes ``unexpected``."""
_MIN_WARNED_FRACTION, _MAX_REMEDIES = 0.25, 3


def drop_notes(dropped: Mapping[str, int], num_rows: int | None = None) -> list[str]:
    """Warn if more than a quarter of ``num_rows`` were dropped, with remedies for the three main reasons."""
    num_dropped = sum(dropped.values())
    notes = []
    if num_rows and num_dropped > _MIN_WARNED_FRACTION * num_rows:
        notes.append(f"warning: {num_dropped:,} of {num_rows:,} rows ({num_dropped / num_rows:.0%}) were dropped")
    common = sorted((-count, reason) for reason, count in dropped.items() if DROP_REASONS.get(reason))[:_MAX_REMEDIES]
    return notes + [f"{with_code(reason)} ({-count:,}): {DROP_REASONS[reason]}" for count, reason in common]


def all_dropped(what: str, dropped: Mapping[str, int], firsts: Mapping[str, str], where: str) -> DataError:
    """Return the error for sources whose rows were all dropped, with the remedy for the most common reason.

    Args:
        what: beginning of the message.
        dropped: number of dropped rows by reason; empty if there were no rows.
        firsts: description of the first dropped row by reason; shown for the most common reason.
        where: end of the remedy, which names the file with the reason of every row.
    """
    counts_by_reason = sorted(dropped.items(), key=lambda item: -item[1])
    counts = ", ".join(f"{count:,} {reason}" for reason, count in counts_by_reason) or "there were no rows"
    main_reason = counts_by_reason[0][0] if counts_by_reason else ""
    remedy = DROP_REASONS.get(main_reason, "")
    first_row = f"\nFirst dropped row: {firsts[main_reason]}" if main_reason in firsts else ""
    return DataError(f"{what}: {counts}{first_row}", f"{remedy} {where}".strip())


P = ParamSpec("P")
T = TypeVar("T")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Errors of the machine: the next row would raise them too.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
# A panic in a Rust library (tokenizers) is not an Exception, and its class cannot be imported.
_PANIC = "PanicException"


def guard_row(source: str, row: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Dropped:
    """Return ``function(*args, **kwargs)``; a ``Dropped`` with the reason ``unexpected`` if the row makes it raise."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        return unexpected_drop(source, row, error)


def unexpected_drop(source: str, row: int, error: BaseException) -> Dropped:
    """Drop row number ``row`` of a file because of an exception that packtool does not expect, such as a KeyError.

    Raises ``error`` itself if other rows would fail, too: an interrupt, an error of the machine, or one of packtool's.
    The detail names the last line of packtool in the traceback.
    """
    is_ordinary = isinstance(error, Exception) or type(error).__name__ == _PANIC
    is_machine_error = isinstance(error, OSError) and error.errno in _MACHINE_ERRORS
    if not is_ordinary or is_machine_error or isinstance(error, (PacktoolError, MemoryError)):
        raise error
    location = "an unknown place"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(_PACKAGE + os.sep):
            file = os.path.relpath(frame.filename, _PACKAGE).replace(os.sep, "/")
            location = f"{file}:{frame.lineno}"
    return Dropped(source, row, UNEXPECTED, f"{type(error).__name__} at {location}: {error}")


def unexpected_note(dropped: Mapping[str, int], where: str) -> str:
    """Return a message about rows dropped for unexpected exceptions, listed in file ``where``; "" if there are none."""
    if not (count := dropped.get(UNEXPECTED, 0)):
        return ""
    rows = "1 row was" if count == 1 else f"{count:,} rows were"
    return (
        f"{rows} dropped because of an error in packtool: see the lines with "
        f'"{UNEXPECTED}" in {where}. Please report one of them; --strict stops at the first such row'
    )
