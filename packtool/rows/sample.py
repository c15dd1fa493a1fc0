"""What a row of any form becomes before it is encoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Args:
        role: one of ``constants.ROLES``.
        content: its text; ``<image>`` stands where a picture goes.
        extra: further keys that chat templates read (``tool_calls``, ``reasoning_content``, ``name``, ...).
    """

    role: str
    content: str
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MediaRef:
    """Where one picture lies: a path, or the encoded file's bytes."""

    path: str | None
    data: bytes | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.path if self.path is not None else f"<{len(self.data or b'')} bytes>"


@dataclass(frozen=True)
class Sample:
    """A conversation, its media in the order of their marks, and where it came from.

    Args:
        source: the dataset as the user named it.
        row: 0-based row in that source.
        num_marks_added: picture marks that the row lacked.
    """

    turns: tuple[Turn, ...]
    images: tuple[MediaRef, ...]
    source: str
    row: int
    tools: tuple[Any, ...] | None = None
    channel: str | None = None
    num_marks_added: int = 0


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, and why. Every row that goes in comes out encoded or as one of these."""

    source: str
    row: int
    reason: str
    detail: str
