"""Samples become one micro-batch in which common prefixes are there once; see ``batch.prefix_tree``.

A token has the position that it has in its samples alone, and its label weighs what it weighs in all of them together::

    samples      P P P a a a | P P P b b           P is the prefix, a and b its continuations
    input_ids    P P P | a a a | b b               8 tokens instead of 11
    positions    0 1 2 | 3 4 5 | 3 4
    keys         P P P | P P P a a a | P P P b b   of each document
    weights      2 2 1 | 1 1   | 1                 the third P predicts the first a, but no b: that is no target
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from packtool.batch.batch import PackedBatch, TreeBatch, target_positions
from packtool.batch.collate import (
    as_positions,
    check_pads,
    collate_packs,
    shifted_labels,
    shifted_weights,
    with_fillers,
    with_padding,
)
from packtool.batch.micro_batch import Tower
from packtool.batch.positions import sample_positions
from packtool.batch.prefix_tree import ROOT, Node, find_tree, key_index, stretch_of
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.constants import IGNORE_INDEX, LEAST_SHARED
from packtool.encode.encoded import EncodedSample


def collate_tree(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    towers: frozenset[Tower] | None = None,
    *,
    least_shared: int = LEAST_SHARED,
    multiple_of: int = 1,
) -> PackedBatch:
    """Lay samples end to end in one row, the prefixes that they have in common once.

    The price: attention gathers keys and values of all samples whole, one layer at a time.

    Args:
        samples, spec, towers, multiple_of: as for ``collate_packs``.
        least_shared: see ``prefix_tree.find_tree``.

    Returns:
        a ``TreeBatch``, or what ``collate_packs`` makes where nothing is shared.

    Raises:
        DataError: as ``collate_packs``.
    """
    check_pads(samples, spec)
    nodes = find_tree(samples, spec, least_shared=least_shared)
    if not any(node.is_shared for node in nodes):
        return collate_packs(samples, spec, towers, multiple_of=multiple_of)
    parts = [stretch_of(samples[node.samples[0]], node.start, node.stop, spec) for node in nodes]
    documents, media = with_fillers(parts, spec, towers)
    documents, num_padding = with_padding(documents, multiple_of)
    fillers = documents[len(nodes) :]
    lengths = tuple(document.length for document in documents)
    keys, key_lengths = key_index([node.parent for node in nodes] + [ROOT] * len(fillers), lengths)
    input_ids = torch.from_numpy(np.concatenate([document.input_ids for document in documents], dtype=np.int64))
    channels = tuple(dict.fromkeys(sample.channel for sample in samples))
    labels, weights, counts = _targets(samples, nodes, spec, channels)
    num_fillers = sum(filler.length for filler in fillers)
    labels = np.append(labels, np.full(num_fillers, IGNORE_INDEX))
    weights = np.append(weights, np.zeros(num_fillers, np.float32))
    positions = target_positions(torch.from_numpy(labels))
    counts = counts[:, positions.numpy()]
    return TreeBatch(
        input_ids=input_ids.unsqueeze(0),
        labels=torch.from_numpy(labels).unsqueeze(0),
        position_ids=_positions(samples, nodes, fillers, spec),
        media=media,
        towers=tower_inputs(spec, media, input_ids),
        target_positions=positions,
        loss_weights=torch.from_numpy(weights).unsqueeze(0),
        channels=channels,
        num_samples=len(samples),
        num_padding=num_padding,
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        lengths=lengths,
        key_index=torch.from_numpy(keys),
        cu_seqlens_k=torch.tensor([0, *np.cumsum(key_lengths)], dtype=torch.int32),
        key_lengths=key_lengths,
        target_counts=torch.from_numpy(counts),
        num_sample_targets=int(counts.sum()),
        sample_ends=_ends(nodes, len(samples)),
    )


def _ends(nodes: Sequence[Node], num_samples: int) -> tuple[int, ...]:
    """The last node of each sample; nodes come behind those that they go on from."""
    found = {number: document for document, node in enumerate(nodes) for number in node.samples}
    return tuple(found[number] for number in range(num_samples))


def _targets(
    samples: Sequence[EncodedSample], nodes: Sequence[Node], spec: InputSpec, channels: Sequence[str | None]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Labels of the nodes' tokens and what they weigh, (T,); how many labels of each channel they stand for, (C, T)."""
    shifted = [shifted_labels(sample) for sample in samples]
    weighed = shifted_weights(samples, spec)
    labels, weights, counts = [], [], []
    code_of = {channel: code for code, channel in enumerate(channels)}
    for node in nodes:
        taken = slice(node.start, node.stop)
        wanted = np.stack([shifted[number][taken] for number in node.samples])
        is_target = wanted != IGNORE_INDEX
        label = np.where(is_target.any(axis=0), wanted.max(axis=0, initial=IGNORE_INDEX), IGNORE_INDEX)
        assert (wanted[is_target] == np.broadcast_to(label, wanted.shape)[is_target]).all(), "a token has one label"
        weight = is_target.astype(np.float32)
        if weighed is not None:
            weight *= np.stack([weighed[number][taken] for number in node.samples])
        labels.append(label.astype(np.int64))
        weights.append(weight.sum(axis=0, dtype=np.float32))
        count = np.zeros((len(channels), node.length), np.int64)
        np.add.at(count, [code_of[samples[number].channel] for number in node.samples], is_target)
        counts.append(count)
    return np.concatenate(labels), np.concatenate(weights), np.concatenate(counts, axis=1)


def _positions(
    samples: Sequence[EncodedSample], nodes: Sequence[Node], fillers: Sequence[EncodedSample], spec: InputSpec
) -> torch.Tensor:
    """Those of the samples alone, (4, 1, T) for M-RoPE and (1, T) else."""
    if not spec.has_mrope:
        runs = [np.arange(node.start, node.stop, dtype=np.int64) for node in nodes]
        return torch.from_numpy(np.concatenate([*runs, *(np.arange(filler.length) for filler in fillers)])[None])
    alone: dict[int, npt.NDArray[Any]] = {}
    found = []
    for node in nodes:
        first = node.samples[0]
        if first not in alone:
            alone[first] = sample_positions(samples[first], spec)
        found.append(alone[first][:, node.start : node.stop])
    found += [sample_positions(filler, spec) for filler in fillers]
    return as_positions(np.concatenate(found, axis=1)[:, None])
