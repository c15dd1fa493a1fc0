"""Samples that begin alike as a tree: every common prefix is laid out, encoded and computed once.

Three questions about one picture; the last two have a longer common prefix::

    samples  picture who? Ann            nodes   0  picture              of all three, positions 0 to 6
             picture where is he? here           1  who? Ann             continues 0
             picture where is she? there         2  where is             of two, continues 0
                                                 3  he? here             continues 2
                                                 4  she? there           continues 2

A node holds the tokens that samples have in common beyond the node that it continues; its tokens keep the positions
that they have in the samples alone. In attention its queries see the keys of all nodes from the root down to it
(``key_index``).

Tokens and the content of media decide what is equal. A prefix ends only where every medium of it has all of its pads.
Its last token predicts the first token of every continuation: where these targets differ, the prefix ends a token
earlier, and each continuation has a last token of its own, so that a token never has two labels.
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
from packtool.media.files import content_digest, content_name
from packtool.rows.media_policy import MediaPolicy

Medium = EncodedImage | EncodedVideo | EncodedAudio


class MediaNumbers:
    """Numbers for media from 0; media of equal size and content get the same number, whatever their paths.

    Files are read only if two media of equal size have different paths: first pieces of both, then both completely if
    the pieces are equal. Media that cannot be read are equal only if their paths are.

    Args:
        policy: media access policy.
    """

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
        self._numbers: dict[Medium, int] = {}
        # Media that differ at most in their files, by the medium without its files.
        self._same_size: dict[Medium, list[Medium]] = {}
        self._names: dict[Medium, tuple[str, ...]] = {}
        self._num = 0

    def __call__(self, medium: Medium) -> int:
        """Return the number of a medium: that of an equal earlier medium, or else a new one."""
        if medium not in self._numbers:
            changes: dict[str, Any] = {"path": None, "data": None}
            if isinstance(medium, EncodedVideo):
                changes["frames"] = ((None, None),) * len(medium.frames)
            others = self._same_size.setdefault(dataclasses.replace(medium, **changes), [])
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


Int64Array = npt.NDArray[np.int64]
ROOT = -1
"""The parent of a node at the beginning of samples."""


@dataclass(frozen=True)
class Node:
    """A stretch of tokens that one or several samples have in common.

    Args:
        samples: numbers of the samples that contain it, ascending.
        start, stop: its tokens, the same in each of these samples.
        parent: index of the node that it continues, always an earlier one, or ``ROOT``.
    """

    samples: tuple[int, ...]
    start: int
    stop: int
    parent: int

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return self.stop - self.start

    @property
    def is_shared(self) -> bool:
        """True if more than one sample contains it."""
        return len(self.samples) > 1


def find_tree(samples: Sequence[EncodedSample], spec: InputSpec, *, min_shared: int) -> list[Node]:
    """Build the prefix tree of some samples: nodes that hold each common prefix once.

    The cost: each sample is compared with one other for each prefix that it shares.

    Args:
        spec: the model they are for.
        min_shared: minimum length of a shared prefix in tokens, counted from the samples' beginning.

    Returns:
        nodes, each after the one that it continues. A sample without tokens of its own has no node of its own.
    """
    numbers = MediaNumbers(spec.media_policy)
    pairs = [_symbols(sample, spec, numbers) for sample in samples]
    symbols, can_end = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    nodes: list[Node] = []
    # Groups of samples with equal beginnings, the number of tokens in their nodes so far, and the last of these nodes.
    groups = [(list(range(len(samples))), 0, ROOT)] if samples else []
    while groups:
        group, start, parent = groups.pop()
        first = group[0]
        num_equal = min(_common_prefix_length(symbols[first], symbols[number], start) for number in group)
        # By the next symbol; None: the sample ends here.
        branches: dict[int | None, list[int]] = {}
        for number in group:
            following = int(symbols[number][num_equal]) if len(symbols[number]) > num_equal else None
            branches.setdefault(following, []).append(number)
        parts, stop = list(branches.values()), num_equal
        if branches.keys() == {None}:
            parts = []  # nothing continues complete samples, so the prefix may end anywhere
        else:
            # One token earlier if the last one predicts more than one target.
            targets = {label for number in group for label in samples[number].labels[num_equal:][:1].tolist()}
            longest = max(num_equal - (len(targets - {IGNORE_INDEX}) > 1), start)
            stop = int(np.flatnonzero(can_end[first][: longest + 1])[-1])
        if len(group) == 1 or stop >= min_shared:
            if stop > start:
                nodes.append(Node(tuple(group), start, stop, parent))
                start, parent = stop, len(nodes) - 1
        elif not parts:
            parts = [[number] for number in group]
        # Samples that end with the prefix have no further node.
        rest = [part for part in parts if len(symbols[part[0]]) > start]
        groups += [(part, start, parent) for part in reversed(rest)]
    return nodes


def _symbols(sample: EncodedSample, spec: InputSpec, numbers: MediaNumbers) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Return symbols that are equal for equal inputs, and the lengths at which a prefix may end.

    Args:
        numbers: of the media of all samples.

    Returns:
        int64 (L,): the token, or a negative number of the medium whose pad it is; bool (L + 1,): whether a prefix of
        that length contains its media completely.
    """
    ids, tokens = sample.input_ids, spec.media_tokens
    symbols = ids.astype(np.int64)
    can_end = np.ones(len(ids) + 1, np.bool_)
    is_pad = np.isin(ids, list(tokens.pads.values()))
    for span in media_spans(sample, tokens):
        inside = slice(span.start, span.stop)
        symbols[inside][is_pad[inside]] = -1 - numbers(span.medium)
        can_end[span.start + 1 : span.stop] = False
    # After a mark that opens a medium the kind of a sound is not known yet.
    can_end[1:] &= ~np.isin(ids, [mark for mark in (tokens.opening_vision, tokens.opening_sound) if mark is not None])
    return symbols, can_end


def _common_prefix_length(one: Int64Array, other: Int64Array, start: int) -> int:
    """Return the length of the common prefix, of which the first ``start`` symbols are known to be equal."""
    shorter = min(len(one), len(other))
    differs = one[start:shorter] != other[start:shorter]
    return start + int(differs.argmax()) if differs.any() else shorter


def stretch_of(sample: EncodedSample, start: int, stop: int, spec: InputSpec) -> EncodedSample:
    """Return the tokens ``start`` to ``stop`` of a sample, with their media, as a sample."""
    tokens = slice(start, stop)
    media = [span.medium for span in media_spans(sample, spec.media_tokens) if start <= span.start < stop]
    return dataclasses.replace(
        sample,
        input_ids=sample.input_ids[tokens],
        labels=sample.labels[tokens],
        turns=np.zeros(0, np.int32),
        images=tuple(medium for medium in media if isinstance(medium, EncodedImage)),
        videos=tuple(medium for medium in media if isinstance(medium, EncodedVideo)),
        audios=tuple(medium for medium in media if isinstance(medium, EncodedAudio)),
        loss_scale=None if sample.loss_scale is None else sample.loss_scale[tokens],
    )


def key_index(parents: Sequence[int], lengths: Sequence[int]) -> tuple[Int64Array, tuple[int, ...]]:
    """Return the keys that each node's queries attend to: the tokens of all nodes from the root to the node itself.

    Args:
        parents: (K,), of each node the number of an earlier one, or ``ROOT``.
        lengths: (K,), tokens of the nodes, which lie end to end.

    Returns:
        int64 (T',), positions in the sequence, node after node, and the number of keys of each node.
    """
    paths: list[Int64Array] = []
    start = 0
    for parent, length in zip(parents, lengths, strict=True):
        own = np.arange(start, start + length)
        paths.append(own if parent == ROOT else np.concatenate([paths[parent], own]))
        start += length
    return np.concatenate([np.zeros(0, np.int64), *paths]), tuple(map(len, paths))
