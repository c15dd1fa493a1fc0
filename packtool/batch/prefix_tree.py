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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.batch.spec import InputSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, files_of, media_fields
from packtool.encode.media_spans import media_spans
from packtool.media.files import content_digest, content_name
from packtool.rows.media_policy import MediaPolicy

Medium = EncodedImage | EncodedVideo | EncodedAudio


class MediaNumbers:
    """Numbers for media from 0; media of equal size and content get the same number, whatever their paths.

    Files are read only if two media of equal size have different paths: first pieces of both, then both completely if
    the pieces are equal. Media that cannot be read are equal only if their paths are.
    """

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy
        self._numbers: dict[Medium, int] = {}
        # Media with different contents that differ at most in their files, by the medium without its files.
        self._media_by_size: dict[Medium, list[Medium]] = {}
        self._content_names: dict[Medium, tuple[str, ...]] = {}
        self._num_contents = 0

    def __call__(self, medium: Medium) -> int:
        """Return the number of a medium: that of an equal earlier medium, or else a new one."""
        if medium not in self._numbers:
            candidates = self._media_by_size.setdefault(_without_files(medium), [])
            for candidate in candidates:
                if self._is_equal(medium, candidate):
                    self._numbers[medium] = self._numbers[candidate]
                    break
            else:
                candidates.append(medium)
                self._numbers[medium] = self._num_contents
                self._num_contents += 1
        return self._numbers[medium]

    def _is_equal(self, first: Medium, second: Medium) -> bool:
        if self._names_of(first) != self._names_of(second):
            return False
        for first_file, second_file in zip(files_of(first), files_of(second), strict=True):
            if first_file != second_file:
                digest = content_digest(*first_file, self._policy)
                if digest is None or digest != content_digest(*second_file, self._policy):
                    return False
        return True

    def _names_of(self, medium: Medium) -> tuple[str, ...]:
        if medium not in self._content_names:
            self._content_names[medium] = tuple(content_name(*file) for file in files_of(medium))
        return self._content_names[medium]


def _without_files(medium: Medium) -> Medium:
    """Return a medium without its paths and data: equal for media of equal kind, size and tokens."""
    changes: dict[str, Any] = {"path": None, "data": None}
    if isinstance(medium, EncodedVideo):
        changes["frames"] = ((None, None),) * len(medium.frames)
    return dataclasses.replace(medium, **changes)


Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ROOT = -1
"""The parent of a node at the beginning of samples."""


@dataclass(frozen=True)
class Node:
    """A node of a prefix tree: consecutive tokens that one or several samples have in common.

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


class _Group(NamedTuple):
    """Numbers of samples that share their first ``start`` tokens, which are in nodes up to ``parent``."""

    sample_numbers: list[int]
    start: int
    parent: int


def find_tree(samples: Sequence[EncodedSample], spec: InputSpec, *, min_shared: int) -> list[Node]:
    """Divide samples into the nodes of a prefix tree, so that tokens that samples begin with are in one node only.

    A node holds consecutive tokens that one or several samples have in common, and comes after its parent, the node
    that it continues. A common prefix of fewer than ``min_shared`` tokens, counted from the beginning of the samples,
    is not shared. Example with ``min_shared`` 2, if only the last token of each is trained: samples "a b x c" and
    "a b x d" have the nodes "a b", "x c" and "x d", because the last token of a prefix has only one label.
    """
    if not samples:
        return []
    symbols, can_end_at = _symbols_of_samples(samples, spec)
    nodes: list[Node] = []
    stack = [_Group(list(range(len(samples))), start=0, parent=ROOT)]
    while stack:
        group = stack.pop()
        numbers = group.sample_numbers
        next_start, next_parent = group.start, group.parent
        stop, branches = _divide_group(group, samples, symbols, can_end_at)
        is_too_short = len(numbers) > 1 and stop < min_shared
        if is_too_short and not branches:  # short samples that are equal
            branches = [[number] for number in numbers]
        if not is_too_short and stop > group.start:
            nodes.append(Node(tuple(numbers), group.start, stop, group.parent))
            next_start, next_parent = stop, len(nodes) - 1
        for branch in reversed(branches):  # so that the first branch is popped first
            stack.append(_Group(branch, next_start, next_parent))
    return nodes


def _divide_group(
    group: _Group, samples: Sequence[EncodedSample], symbols: Sequence[Int64Array], can_end_at: Sequence[BoolArray]
) -> tuple[int, list[list[int]]]:
    """Return where the common prefix of a group of samples ends, and the branches after it; none if all are equal."""
    sample_numbers, start, _ = group
    first = sample_numbers[0]
    num_equal = min(_common_prefix_length(symbols[first], symbols[number], start) for number in sample_numbers)
    branches = _branches(sample_numbers, symbols, num_equal)
    if not branches:
        return num_equal, []
    return _prefix_end([samples[number] for number in sample_numbers], can_end_at[first], start, num_equal), branches


def _branches(sample_numbers: Sequence[int], symbols: Sequence[Int64Array], num_equal: int) -> list[list[int]]:
    """Divide a group of samples by the symbol after their first ``num_equal`` ones, which are equal.

    Samples without a further symbol are a branch too; if none has one, there are no branches.
    """
    branches: dict[int | None, list[int]] = {}
    for number in sample_numbers:
        is_at_end = len(symbols[number]) == num_equal
        next_symbol = None if is_at_end else int(symbols[number][num_equal])
        branches.setdefault(next_symbol, []).append(number)
    all_at_end = branches.keys() == {None}
    return [] if all_at_end else list(branches.values())


def _prefix_end(samples: Sequence[EncodedSample], can_end_at: BoolArray, start: int, num_equal: int) -> int:
    """Return the last position where a node from ``start`` can end, if the first ``num_equal`` tokens are equal.

    ``can_end_at``, bool (L + 1,): whether a prefix of each length may end.
    """
    next_labels = {int(sample.labels[num_equal]) for sample in samples if len(sample.labels) > num_equal}
    # The last token of a prefix predicts the next token of every sample, but can have only one label.
    has_several_labels = len(next_labels - {IGNORE_INDEX}) > 1
    max_length = max(num_equal - 1 if has_several_labels else num_equal, start)
    return int(np.flatnonzero(can_end_at[: max_length + 1])[-1])


def _symbols_of_samples(samples: Sequence[EncodedSample], spec: InputSpec) -> tuple[list[Int64Array], list[BoolArray]]:
    """Return ``_symbols`` of each sample, as two lists."""
    medium_numbers = MediaNumbers(spec.media_policy)
    pairs = [_symbols(sample, spec, medium_numbers) for sample in samples]
    return [symbols for symbols, _ in pairs], [can_end_at for _, can_end_at in pairs]


def _symbols(sample: EncodedSample, spec: InputSpec, medium_numbers: MediaNumbers) -> tuple[Int64Array, BoolArray]:
    """Return what is compared to find the common prefix of a sample and others, and where such a prefix may end.

    Returns:
        A symbol for each token, int64 (L,): the token's id, or for the placeholder tokens of a medium a negative number
        that stands for its content. And whether a prefix of each length 0 to L may end there, bool (L + 1,).
    """
    input_ids = sample.input_ids
    tokens = spec.media_tokens
    is_placeholder = np.isin(input_ids, list(tokens.pads.values()))
    symbols = input_ids.astype(np.int64)
    can_end_at = np.ones(len(input_ids) + 1, np.bool_)
    for span in media_spans(sample, tokens):
        content_symbol = -1 - medium_numbers(span.medium)  # numbers count from 0, so that it is negative
        medium_tokens = span.start + np.flatnonzero(is_placeholder[span.start : span.stop])
        symbols[medium_tokens] = content_symbol
        can_end_at[span.start + 1 : span.stop] = False  # a prefix has all tokens of a medium, or none
    # Nor can it end after a token that opens a medium, as media of different kinds may follow.
    opening_ids = [token for token in (tokens.opening_vision, tokens.opening_sound) if token is not None]
    can_end_at[1:] &= ~np.isin(input_ids, opening_ids)  # the prefix of length i + 1 ends with token i
    return symbols, can_end_at


def _common_prefix_length(first: Int64Array, second: Int64Array, num_known: int) -> int:
    """Return the length of the common prefix, of which the first ``num_known`` symbols are known to be equal."""
    max_length = min(len(first), len(second))
    differs = first[num_known:max_length] != second[num_known:max_length]
    return num_known + int(differs.argmax()) if differs.any() else max_length


def slice_sample(sample: EncodedSample, start: int, stop: int, spec: InputSpec) -> EncodedSample:
    """Return the tokens ``start`` to ``stop`` of a sample, with their media, as a sample."""
    tokens = slice(start, stop)
    media = [span.medium for span in media_spans(sample, spec.media_tokens) if start <= span.start < stop]
    return dataclasses.replace(
        sample,
        input_ids=sample.input_ids[tokens],
        labels=sample.labels[tokens],
        turns=np.zeros(0, np.int32),
        loss_scale=None if sample.loss_scale is None else sample.loss_scale[tokens],
        **media_fields(media),
    )


def key_index(parents: Sequence[int], lengths: Sequence[int]) -> tuple[Int64Array, tuple[int, ...]]:
    """Return the keys that each node's queries attend to: the tokens of all nodes from the root to the node itself.

    Return the keys' positions, int64 (N,), node after node, and the number of keys of each node.
    """
    keys_by_node: list[Int64Array] = []
    start = 0
    for parent, length in zip(parents, lengths, strict=True):
        node_tokens = np.arange(start, start + length)
        keys_by_node.append(node_tokens if parent == ROOT else np.concatenate([keys_by_node[parent], node_tokens]))
        start += length
    return np.concatenate([np.zeros(0, np.int64), *keys_by_node]), tuple(map(len, keys_by_node))
