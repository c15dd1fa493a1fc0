"""Samples that begin alike as a tree: every common prefix is laid out, looked at and computed once.

Three questions about one picture; the last two begin alike once more::

    samples  picture who? Ann            nodes   0  picture              of all three, positions 0 to 6
             picture where is he? here           1  who? Ann             goes on from 0
             picture where is she? there         2  where is             of two, goes on from 0
                                                 3  he? here             goes on from 2
                                                 4  she? there           goes on from 2

A node is what samples have in common beyond the node that it goes on from; its tokens keep the positions that they have
in the samples alone. In attention its queries see the keys of all nodes from the root down to it (``key_index``).

What is equal is decided on tokens and on what media hold. A prefix ends only where every medium of it has all of its
pads. Its last token is to predict the first token of every continuation: where that is more than one target, the prefix
ends a token earlier, and each continuation has a last token of its own, so that a token never has two labels.

Which media of some samples are the same, so that one of them can be computed for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.batch.spec import InputSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, files_of
from packtool.encode.media_spans import media_spans
from packtool.media.content import content_digest, content_name
from packtool.rows.media_policy import MediaPolicy

Medium = EncodedImage | EncodedVideo | EncodedAudio


class MediaNumbers:
    """Numbers of media, from 0: two have the same one if they were measured alike and hold the same, wherever they lie.

    Files are read only where two that were measured alike lie in different places: pieces of both first, and all of
    them where these are equal. Media that cannot be read are the same only in the same place.

    Args:
        policy: which media may be read.
    """

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
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
            digest = None if mine == its else content_digest(*mine, self._policy)
            if mine != its and (digest is None or digest != content_digest(*its, self._policy)):
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


Int64Array = npt.NDArray[np.int64]
ROOT = -1
"""The parent of a node that begins samples."""


@dataclass(frozen=True)
class Node:
    """Tokens that some samples have in common, once.

    Args:
        samples: numbers of those that contain it, ascending.
        start, stop: its tokens, the same of each of these samples.
        parent: number of the node that it goes on from, smaller than its own, or ``ROOT``.
    """

    samples: tuple[int, ...]
    start: int
    stop: int
    parent: int

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.stop - self.start

    @property
    def is_shared(self) -> bool:
        """Whether more than one sample contains it."""
        return len(self.samples) > 1


def find_tree(samples: Sequence[EncodedSample], spec: InputSpec, *, min_shared: int) -> list[Node]:
    """Every token of some samples once, where these begin alike.

    Price: each sample is compared with one other for each prefix that it shares.

    Args:
        spec: the model they are for.
        min_shared: tokens that a prefix must have, from the samples' beginning, to be shared.

    Returns:
        nodes, each behind the one that it goes on from. A sample without tokens of its own has no node of its own.
    """
    numbers = MediaNumbers(spec.media_policy)
    read = [_Read.of(sample, spec, numbers) for sample in samples]
    nodes: list[Node] = []
    # Groups of samples that are alike so far, how much of them their ancestors hold, and the last of these.
    groups = [(list(range(len(samples))), 0, ROOT)] if samples else []
    while groups:
        group, start, parent = groups.pop()
        first = read[group[0]]
        alike = min(first.alike(read[number], start) for number in group)
        parts = _continuations([(number, read[number]) for number in group], alike)
        # Nothing goes on from whole samples: they may end anywhere.
        stop = first.last_cut(max(alike - _is_torn(group, samples, alike), start)) if parts else alike
        if len(group) == 1 or stop >= min_shared:
            if stop > start:
                nodes.append(Node(tuple(group), start, stop, parent))
                start, parent = stop, len(nodes) - 1
        elif not parts:
            parts = [[number] for number in group]
        # A sample that ends with the prefix needs nothing more.
        left = [part for part in parts if len(read[part[0]].symbols) > start]
        groups += [(part, start, parent) for part in reversed(left)]
    return nodes


@dataclass(frozen=True, eq=False)
class _Read:
    """A sample in a form in which equal symbols are equal inputs.

    Args:
        symbols: int64 (L,): tokens; where a medium's pads stand, a number below 0 of this very medium.
        is_cut: bool (L + 1,), whether a prefix of so many tokens has all pads of its media.
    """

    symbols: Int64Array
    is_cut: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, sample: EncodedSample, spec: InputSpec, numbers: MediaNumbers) -> _Read:
        """Read a sample, with numbers of its media that are those of the others."""
        ids, tokens = sample.input_ids, spec.media_tokens
        symbols = ids.astype(np.int64)
        is_cut = np.ones(len(ids) + 1, np.bool_)
        is_pad = np.isin(ids, list(tokens.pads.values()))
        for span in media_spans(sample, tokens):
            inside = slice(span.start, span.stop)
            symbols[inside][is_pad[inside]] = -1 - numbers(span.medium)
            is_cut[span.start + 1 : span.stop] = False
        # Behind a mark that opens a medium it is not told of what kind a sound is.
        is_cut[1:] &= ~np.isin(
            ids, [mark for mark in (tokens.opening_vision, tokens.opening_sound) if mark is not None]
        )
        return cls(symbols, is_cut)

    def alike(self, other: _Read, start: int) -> int:
        """How many symbols both begin with; at least ``start``, which is known."""
        most = min(len(self.symbols), len(other.symbols))
        differs = self.symbols[start:most] != other.symbols[start:most]
        return start + int(differs.argmax()) if differs.any() else most

    def last_cut(self, most: int) -> int:
        """The longest prefix that may end there, of at most ``most`` tokens."""
        return int(np.flatnonzero(self.is_cut[: most + 1])[-1])


def _continuations(group: Sequence[tuple[int, _Read]], alike: int) -> list[list[int]]:
    """The members of a group by the symbol with which they go on behind what is alike; none if all end there."""
    found: dict[int | None, list[int]] = {}
    for number, read in group:
        following = int(read.symbols[alike]) if len(read.symbols) > alike else None
        found.setdefault(following, []).append(number)
    return [] if found.keys() == {None} else list(found.values())


def _is_torn(group: Sequence[int], samples: Sequence[EncodedSample], alike: int) -> bool:
    """Whether the last token that is alike is to predict more than one."""
    following = [samples[number].labels[alike : alike + 1].tolist() for number in group]
    return len({label for labels in following for label in labels if label != IGNORE_INDEX}) > 1


def stretch_of(sample: EncodedSample, start: int, stop: int, spec: InputSpec) -> EncodedSample:
    """A stretch of a sample between two cuts, with its own media."""
    taken = slice(start, stop)
    media = [span.medium for span in media_spans(sample, spec.media_tokens) if start <= span.start < stop]
    return dataclasses.replace(
        sample,
        input_ids=sample.input_ids[taken],
        labels=sample.labels[taken],
        turns=np.zeros(0, np.int32),
        images=tuple(medium for medium in media if isinstance(medium, EncodedImage)),
        videos=tuple(medium for medium in media if isinstance(medium, EncodedVideo)),
        audios=tuple(medium for medium in media if isinstance(medium, EncodedAudio)),
        loss_scale=None if sample.loss_scale is None else sample.loss_scale[taken],
    )


def key_index(parents: Sequence[int], lengths: Sequence[int]) -> tuple[Int64Array, tuple[int, ...]]:
    """The keys that each node's queries see, for nodes that lie end to end: all from the root down to its own.

    Args:
        parents: (K,), of each node the number of an earlier one, or ``ROOT``.
        lengths: (K,), of the nodes in tokens.

    Returns:
        int64 (S,), positions in the sequence of T tokens, node after node, and how many each node has.
    """
    paths: list[Int64Array] = []
    start = 0
    for parent, length in zip(parents, lengths, strict=True):
        own = np.arange(start, start + length)
        paths.append(own if parent == ROOT else np.concatenate([paths[parent], own]))
        start += length
    return np.concatenate([np.zeros(0, np.int64), *paths]), tuple(map(len, paths))
