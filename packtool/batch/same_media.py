"""Which media of some samples are the same, so that one of them can be computed for all."""

from __future__ import annotations

import dataclasses
from typing import Any

from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo, files_of
from packtool.media.content import content_digest, content_name
from packtool.rows.rights import MediaRights

Medium = EncodedImage | EncodedVideo | EncodedAudio


class MediaNumbers:
    """Numbers of media, from 0: two have the same one if they were measured alike and hold the same, wherever they lie.

    Files are read only where two that were measured alike lie in different places: pieces of both first, and all of
    them where these are equal. Media that cannot be read are the same only in the same place.

    Args:
        rights: which media may be read.
    """

    def __init__(self, rights: MediaRights) -> None:
        self._rights = rights
        self._numbers: dict[Medium, int] = {}
        self._alike: dict[Medium, list[Medium]] = {}
        self._names: dict[Medium, tuple[str, ...]] = {}
        self._num = 0

    def __call__(self, medium: Medium) -> int:
        """The number of a medium; a new one if none before was the same."""
        if medium not in self._numbers:
            others = self._alike.setdefault(_without_files(medium), [])
            same = next((other for other in others if self._are_same(medium, other)), None)
            if same is None:
                others.append(medium)
                self._num += 1
            self._numbers[medium] = self._num - 1 if same is None else self._numbers[same]
        return self._numbers[medium]

    def _are_same(self, one: Medium, other: Medium) -> bool:
        if self._names_of(one) != self._names_of(other):
            return False
        for mine, its in zip(files_of(one), files_of(other), strict=True):
            digest = None if mine == its else content_digest(*mine, self._rights)
            if mine != its and (digest is None or digest != content_digest(*its, self._rights)):
                return False
        return True

    def _names_of(self, medium: Medium) -> tuple[str, ...]:
        if medium not in self._names:
            self._names[medium] = tuple(content_name(*file) for file in files_of(medium))
        return self._names[medium]


def _without_files(medium: Medium) -> Medium:
    changes: dict[str, Any] = {"path": None, "data": None}
    if isinstance(medium, EncodedVideo):
        changes["frames"] = ((None, None),) * len(medium.frames)
    return dataclasses.replace(medium, **changes)
