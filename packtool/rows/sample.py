"""Samples: what rows of any form become before encoding, and what becomes of rows that cannot be used.

``guard_row`` confines errors to one row. Known problems have a drop reason of their own; any other exception becomes a
``Dropped`` with the reason ``unexpected``, which names the exception and its place in packtool's code for a report.
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

from packtool.config.data import BboxType
from packtool.constants import MEDIA_MARKS
from packtool.errors import DataError, PacktoolError, RowError
from packtool.rows.media_policy import ALLOWED_BY, NOT_ALLOWED, MediaPolicy

MediaKind = Literal["image", "video", "audio"]


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Args:
        role: one of ``constants.ROLES``.
        content: text with ``<image>``, ``<video>`` and ``<audio>`` where media go.
        extra: further keys that chat templates read (``tool_calls``, ``reasoning_content``, ``name``, ...).
        loss: whether the row trains this assistant turn; None leaves it to the loss scale.
        loss_scale: the row's weight for this assistant turn's tokens; None leaves it to the loss scale.
    """

    role: str
    content: str
    extra: dict[str, Any] = field(default_factory=dict)
    loss: bool | None = None
    loss_scale: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that templates may write: its reasoning, its content, then those in its tool calls."""
        if not self.extra:
            return (self.content,)
        texts: list[str] = []

        def collect(text: str) -> str:
            texts.append(text)
            return text

        self.map_texts(collect)
        return tuple(texts)

    def map_texts(self, change: Callable[[str], str]) -> Turn:
        """Return the turn with ``change`` applied to each of ``texts``, in their order."""
        changed = {key: change(value) for key, value in self.extra.items() if isinstance(value, str)}
        content = change(self.content)
        changed |= {key: _map_texts(value, change) for key, value in self.extra.items() if key not in changed}
        return replace(self, content=content, extra={key: changed[key] for key in self.extra})


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to each text in nested lists and mappings, except keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Response:
    """One of several accepted answers to a row's prompt.

    Args:
        turns: of the assistant, and of tools between them.
        weight: factor on the loss scale of its tokens, above 0.
    """

    turns: tuple[Turn, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class RowPart:
    """Position of a sample in its row, if a row becomes several samples.

    Args:
        turn: 1-based number of its last assistant turn; 0 if turns are not samples.
        num_turns: assistant turns of the row.
        response: 1-based number of its response; 0 for a row with one answer.
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
    """One picture, video or sound: where its file is, or its bytes.

    Args:
        path: absolute path or URL, or None.
        data: the encoded file's bytes, or None.
        frames: pictures of a video that is given so, in order; ``path`` and ``data`` are None then.
        fps: frames per second of such a video, if the row has it.
        clip: (start, end) in seconds of the part of a video that is used; None for its beginning or its end.
        limits: (name, number) of limits on the size that the row gives this medium, as in Qwen's rows.
        policy: media access policy of the row that names the path.
    """

    path: str | None
    data: bytes | None = None
    frames: tuple[MediaRef, ...] = ()
    fps: float | None = None
    clip: tuple[float | None, float | None] | None = None
    limits: tuple[tuple[str, float], ...] = ()
    policy: MediaPolicy = field(default=MediaPolicy(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the medium in messages."""
        if self.frames:
            return f"<{len(self.frames)} frames>"
        return self.path if self.path is not None else f"<{len(self.data or b'')} bytes>"


@dataclass(frozen=True)
class Region:
    """A box, a point or a polygon in a picture.

    Args:
        corners: x and y of each corner from the top left: one corner for a point, two for a box, more for a polygon.
        image: 0-based number of the picture in the row.
        unit: pixels of the picture after rotation (``real``), fractions of its sides, or thousandths of them.
    """

    corners: tuple[float, ...]
    image: int = 0
    unit: BboxType = "real"


@dataclass(frozen=True)
class Objects:
    """Names and regions for the marks in a row's texts.

    Args:
        names: for each ``<ref-object>``, in order.
        boxes: for each ``<bbox>``, in order; mostly one region each.
        unit: of coordinates that are JSON in the texts; None if the row has none.
        images: picture of each box in that JSON, in order; empty if the row has none.
    """

    names: tuple[str, ...] = ()
    boxes: tuple[tuple[Region, ...], ...] = ()
    unit: BboxType | None = None
    images: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """Tokens of a row that another tool has tokenized, without padding.

    Args:
        ids: int64 (L,).
        trained: bool (L,), true for targets; None if the row has no labels, so that all tokens are targets.
        weights: float32 (L,), of the targets; None if all are 1.
        starts: int64 (D,), ascending from 0: first tokens of the D samples in the row.
        channels: of each of these samples; None if the row has one channel.
        measured: sizes of media in the row, by kind; an empty object for a medium without.
    """

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None
    weights: npt.NDArray[np.float32] | None
    starts: npt.NDArray[np.int64]
    channels: tuple[str | None, ...] | None = None
    measured: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A conversation with its media in the order of their marks, and its origin.

    Args:
        source: the dataset as the user named it.
        row: 0-based row in that source.
        num_marks_added: media marks that the row lacked.
        is_text: a text for pretraining: one assistant turn, encoded without a chat template, every token a target.
        loss_scale: the dataset's own loss scale (``--dataset-info``), None for the export's.
        lone_mark: kind of medium whose mark is in a question although the row has no such medium; "" for none.
        responses: accepted answers to the turns; empty if the turns include the answer.
        part: the part of the row that this sample is, if the row becomes several samples.
        tokens: of a row that another tool has tokenized, which has no turns; else None.
        objects: boxes and names for the marks in its texts; None if there are none, or they are already written.
        control: control tokens that its texts may use as such; all others are plain text.
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

    @property
    def media(self) -> dict[MediaKind, tuple[MediaRef, ...]]:
        """Media by kind."""
        return {"image": self.images, "video": self.videos, "audio": self.audios}


_MAX_DETAIL, _MAX_SHOWN = 1000, 300


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why. Every input row is either encoded or dropped.

    Args:
        part: the part that was left out of a row whose other parts are kept; None for a whole row.
        detail: explanation for the user, at most 1,000 characters, encodable as UTF-8.
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
        """The row and what is wrong with it, in about a line."""
        part = "" if self.part is None else f", {self.part}"
        return f"{self.source}, row {self.row}{part}: {self.detail[:_MAX_SHOWN]}"

    def as_error(self) -> RowError:
        """Return the error that ``--strict`` raises."""
        part = "" if self.part is None else f"{self.part}: "
        return RowError(self.source, self.row, self.reason, part + self.detail)

    def to_json(self) -> str:
        """Return a line of ``dropped.jsonl``."""
        values = {"source": self.source, "row": self.row, "reason": self.reason, "detail": self.detail}
        if self.part is not None:
            values["part"] = str(self.part)
        return json.dumps(values, ensure_ascii=False) + "\n"


UNEXPECTED = "unexpected"
"""Reason of rows that met an unexpected exception."""

DROP_REASONS = {
    NOT_ALLOWED: f"{ALLOWED_BY[0].upper()}{ALLOWED_BY[1:]}.",
    "media_missing": "The files that the rows name are not where they were looked for: give the folder that their "
    "paths begin in with --media-root.",
    "media_secret": "Addresses with a password or a signature are not kept: export with --media embed.",
    "media_unsupported": "Take a model that reads such media, or rows without them.",
    "media_over_limit": "Give a larger --max-length, smaller pictures with --max-pixels, or --media-overflow.",
    "over_max_length": "Give a larger --max-length, or shorten rows with --truncation-strategy.",
    "no_target_tokens": "No token of the rows would be trained. --truncation-strategy right cuts off the answers "
    "behind long questions: take left, or a larger --max-length. Else check --loss-scale and the roles of the turns.",
    "turns_not_found": "The chat template writes the turns so that they cannot be found again: give another model or "
    "template.",
    "media_unreadable": "The files are there, and are not what the rows say: look at one of them.",
    "media_size": "Their files are larger than --max-media-bytes, or the model cannot be shown media or clips of "
    "such a size.",
    "media_limits": "Leave out what rows say of the size of their media, but for min_pixels, max_pixels and the others "
    "that docs/media.md names.",
    "media_refused": "Their store refuses them: check the credentials, and whether the addresses are still good.",
    "media_unreachable": "Their store does not answer: check the network and the addresses.",
    "over_max_row_bytes": "Give a larger --max-row-bytes, as in --max-row-bytes 256MB.",
    "cannot_be_split": "Take another --truncation-strategy: split is for plain text.",
    "duplicate_keys": "Write each key of an object once: JSON readers do not agree on which of two counts.",
    "invalid_text": "Save the file as UTF-8, and mend what was cut through in the middle of a character.",
    "invalid_content": "Turns must say text: NaN, Infinity and parts of unknown kinds are no text.",
    "empty_conversation": "The rows hold no turns: say which column does with --columns, as in "
    "--columns messages=dialog.",
    "turn_left_out": "The chat template does not write all turns, as some write only the first system prompt: join "
    "them in the rows, or give another template with --chat-template FILE.",
    "template_refused": "The chat template does not take such conversations: mend the rows, or give another template "
    "with --chat-template FILE.",
    "no_chat_template": "Give a template with --chat-template FILE, or take the instruct model.",
    "role_order": "Conversations begin with a turn of the user, behind the system prompt.",
    "unknown_form": "Say which columns hold what with --columns, as in --columns messages=dialog.",
    "unknown_role": "Say how the rows name their roles in --dataset-info.",
    "token_out_of_range": "Give the --model whose tokenizer made the tokens.",
    "media_tokens": "Give the limits on media (--max-pixels, ...) and the model that the rows were prepared with.",
    "media_changed": "Give the limits on media (--max-pixels, --fps, ...) that the rows were prepared with, and the "
    "same files.",
    "unknown_boundaries": "Packs must say where their samples begin: leave out the columns that do not, or import the "
    "samples before they were packed.",
    "unknown_loss_mask": "Name the mask: --columns completion_mask=loss_mask if it stands at the target itself.",
    "labels_shifted": "Shift them back: a label stands at its own token, and the loss shifts.",
    "labels_differ": "Labels are the token itself or -100: packtool trains no other targets.",
    "labels_given": "Leave --loss-scale's rules out: rules look at text, and these rows are tokens.",
    "invalid_tokens": "The columns of such rows are lists of integers, as many of each as there are tokens.",
    "invalid_json": "Is it a .jsonl file, with one JSON object a line?",
    "null_field": "Say which columns hold what with --columns, as in --columns messages=dialog.",
    "object_marks": "The texts have more or fewer <bbox> and <ref-object> than 'objects' has. If they are plain text, "
    "add --columns objects= to say so.",
    "object_image": "Give 'image_id' the number of a picture in the row, from 0 on.",
    "objects_unsupported": "Take a model whose boxes docs/rows.md describes, or write them into the texts yourself.",
    "box_outside": "Check 'bbox_type' (real, norm1 or norm1000), and that 'objects' fits the pictures' present sizes.",
    "invalid_objects": "Write 'objects' as docs/rows.md describes it.",
    "invalid_media": "Give each medium as a path, a URL, a data URI, base64 text or {bytes, path}.",
    "invalid_row": "Give the columns values of the types that docs/rows.md describes.",
    "invalid_tool_call": "Write tool calls as {name, arguments}.",
    "invalid_csv": "Give each record as many fields as the header has, and quote fields that hold separators.",
    "empty_text": "Leave out rows without text.",
    "empty_tokens": "Leave out rows without tokens, or check 'attention_mask'.",
    "private_characters": "Remove characters of Unicode's planes 15 and 16 from the texts.",
    "media_budget": "Give a larger --max-media-tokens-per-pack, or smaller pictures with --max-pixels.",
    UNEXPECTED: "",
    **{
        f"{kind}_marks": f"The texts have more or fewer {mark} marks than the rows have {kind}s. If a column holds "
        f"them, name it, as in --columns {kind}s=NAME; if {mark} is plain text, add --columns {kind}s= to say so."
        for kind, mark in MEDIA_MARKS.items()
    },
}
"""All reasons in ``dropped.jsonl`` with their remedies; ``unforeseen_note`` describes ``unexpected``."""
_MAX_SHARE, _MAX_REMEDIES = 0.25, 3


def drop_notes(dropped: Mapping[str, int], num_rows: int | None = None) -> list[str]:
    """Return lines about dropped rows: a warning if they are many, and remedies for the most common reasons.

    Args:
        dropped: number of rows by reason.
        num_rows: rows that were read, None if unknown.
    """
    num_dropped = sum(dropped.values())
    notes = []
    if num_rows and num_dropped > _MAX_SHARE * num_rows:
        notes.append(f"warning: {num_dropped:,} of {num_rows:,} rows ({num_dropped / num_rows:.0%}) were dropped")
    common = sorted((-count, reason) for reason, count in dropped.items() if DROP_REASONS.get(reason))[:_MAX_REMEDIES]
    return notes + [f"{reason} ({-count:,}): {DROP_REASONS[reason]}" for count, reason in common]


def all_dropped(what: str, dropped: Mapping[str, int], firsts: Mapping[str, str], where: str) -> DataError:
    """Return the error for sources of which no row is left.

    Args:
        what: short description of the failure.
        dropped: number of rows by reason.
        firsts: summary of the first row of each reason; that of the most common reason is shown.
        where: where each row's reason is kept.
    """
    common = sorted(dropped.items(), key=lambda item: -item[1])
    counts = ", ".join(f"{count:,} {reason}" for reason, count in common)
    reason = common[0][0] if common else ""
    remedy = DROP_REASONS.get(reason, "")
    first = f"\nThe first: {firsts[reason]}" if reason in firsts else ""
    return DataError(f"{what}: {counts or 'there were none'}{first}", f"{remedy} {where}".strip())


P = ParamSpec("P")
T = TypeVar("T")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Errors of the machine, which the next row would meet too.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
# A panic in a library written in Rust (tokenizers) is no Exception, and its class cannot be imported.
_PANIC = "PanicException"


def guard_row(source: str, row: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Dropped:
    """Return ``function(*args, **kwargs)`` for one row, or a ``Dropped`` if it raises; see ``unexpected_drop``."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        return unexpected_drop(source, row, error)


def unexpected_drop(source: str, row: int, error: BaseException) -> Dropped:
    """Return the ``Dropped`` for an unexpected exception.

    Raises:
        the error: if the row is not its cause: an error raised on purpose (PacktoolError), Ctrl-C and its like, or an
            error of the machine: no memory, no free file handle, a full disk.
    """
    is_ordinary = isinstance(error, Exception) or type(error).__name__ == _PANIC
    is_machine_error = isinstance(error, OSError) and error.errno in _MACHINE_ERRORS
    if not is_ordinary or is_machine_error or isinstance(error, (PacktoolError, MemoryError)):
        raise error
    place = "an unknown place"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(_PACKAGE + os.sep):
            place = f"{os.path.relpath(frame.filename, _PACKAGE).replace(os.sep, '/')}:{frame.lineno}"
    return Dropped(source, row, UNEXPECTED, f"{type(error).__name__} at {place}: {error}")


def unforeseen_note(dropped: Mapping[str, int], where: str) -> str:
    """Return a note on rows that met an unexpected exception and are listed in the file ``where``; "" if none did."""
    if not (count := dropped.get(UNEXPECTED, 0)):
        return ""
    rows = "1 row" if count == 1 else f"{count:,} rows"
    return (
        f"{rows} left out for something that packtool did not foresee: see the lines with "
        f'"{UNEXPECTED}" in {where}. Please report one of them; --strict stops at the first'
    )
