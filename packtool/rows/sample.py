"""What a row of any form becomes before it is encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class MediaRef:
    """Where one picture, video or sound lies.

    Args:
        path: absolute path or URL, or None.
        data: the encoded file's bytes, or None.
        frames: a video given as its pictures, in order; ``path`` and ``data`` are None then.
        fps: pictures a second of such a video, when the row says it.
        rights: what the path may be; whoever makes one of a path that stands in a row gives the row's.
    """

    path: str | None
    data: bytes | None = None
    frames: tuple[MediaRef, ...] = ()
    fps: float | None = None
    rights: MediaRights = field(default=MediaRights(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """What messages call the medium."""
        if self.frames:
            return f"<{len(self.frames)} frames>"
        return self.path if self.path is not None else f"<{len(self.data or b'')} bytes>"


@dataclass(frozen=True, eq=False)
class PreparedTokens:
    """The tokens of a row that another tool has made, without padding.

    Args:
        ids: int64 (L,).
        trained: bool (L,), which of them are targets; None where nothing says it, and all are.
        weights: float32 (L,), of the targets; None where all weigh 1.
        starts: int64 (D,), ascending from 0: where the D samples begin that the row is packed of.
    """

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_] | None
    weights: npt.NDArray[np.float32] | None
    starts: npt.NDArray[np.int64]


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
        tokens: of a row that another tool has tokenized, which has no turns; None for all others.
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
    tokens: PreparedTokens | None = None


_LONGEST_DETAIL, _MOST_SHOWN = 1000, 300


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why. Every row that goes in comes out encoded or as one of these.

    Args:
        detail: explanation for the user; what it quotes of the row ends after 1,000 characters, and can be written.
    """

    source: str
    row: int
    reason: str
    detail: str

    def __post_init__(self) -> None:
        detail = self.detail
        if len(detail) > _LONGEST_DETAIL:
            detail = f"{detail[:_LONGEST_DETAIL]}..."
        object.__setattr__(self, "detail", detail.encode(errors="backslashreplace").decode())

    @property
    def shown(self) -> str:
        """Which row, and what is wrong with it, in a line or so."""
        return f"{self.source}, row {self.row}: {self.detail[:_MOST_SHOWN]}"
