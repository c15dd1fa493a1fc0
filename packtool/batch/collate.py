"""Collation: samples become one micro-batch, end to end (packed), below each other (padded), or with shared prefixes.

Labels are shifted here, inside each sample, so that no target crosses from one sample into the next::

    input_ids   a0 a1 a2 | b0 b1 b2 b3
    labels      a1 a2 -  | b1 b2 b3 -          "-" is -100
    cu_seqlens  0          3           7

Ranks wait for each other in every call of a tower (one for pictures and videos, one for sounds), so all of them run the
same towers in a micro-batch, once each: if a tower is to run and no sample has media for it, a filler document with a
blank picture or silence and without labels is added. Its loss and gradients are exactly zero.

Where samples share prefixes (``batch.prefix_tree``), each prefix is there once. A token has the position that it has in
its samples alone, and its label has the sum of the weights that it has in them::

    samples      P P P a a a | P P P b b           P is the prefix, a and b its continuations
    input_ids    P P P | a a a | b b               8 tokens instead of 11
    positions    0 1 2 | 3 4 5 | 3 4
    keys         P P P | P P P a a a | P P P b b   of each document
    weights      2 2 1 | 1 1   | 1                 the third P predicts the first a, but not b: that is no target
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.batch import PackedBatch, PaddedBatch, TreeBatch, target_positions
from packtool.batch.media import blank_picture, blank_processed, load_media, silence
from packtool.batch.micro_batch import Tower
from packtool.batch.positions import PAD_ID, sample_positions
from packtool.batch.prefix_tree import ROOT, Node, find_tree, key_index, stretch_of
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.constants import IGNORE_INDEX, MIN_SHARED
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.errors import DataError
from packtool.rows.sample import MediaKind


def collate_packs(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    towers: frozenset[Tower] | None = None,
    *,
    multiple_of: int = 1,
) -> PackedBatch:
    """Lay samples end to end in one sequence.

    Args:
        samples: in their order; none at all makes a micro-batch of filler documents, with zero loss.
        spec: the model they are for.
        towers: that run even if no sample has media for them; by default all of the model's.
        multiple_of: pads the sequence to a multiple, by a filler document after the others.

    Raises:
        DataError: naming a picture that cannot be read or has changed, or a sample whose placeholder
            tokens do not fit its pictures.
    """
    check_pads(samples, spec)
    documents, media, num_padding = _with_fillers(samples, spec, towers, multiple_of)
    lengths = tuple(sample.length for sample in documents)
    weights = shifted_weights(documents, spec)
    return PackedBatch(
        **batch_fields(
            np.concatenate([sample.input_ids for sample in documents], dtype=np.int64),
            np.concatenate([shifted_labels(sample) for sample in documents], dtype=np.int64),
            None if weights is None else np.concatenate(weights),
            media,
            spec,
        ),
        position_ids=joined_positions([sample_positions(sample, spec) for sample in documents], spec),
        channels=tuple(sample.channel for sample in documents),
        num_samples=len(samples),
        num_padding=num_padding,
        cu_seqlens=_bounds(lengths),
        lengths=lengths,
    )


def collate_padded(
    samples: Sequence[EncodedSample], spec: InputSpec, towers: frozenset[Tower] | None = None
) -> PaddedBatch:
    """Put one sample into each row, padded on the right to the longest, which costs T x B minus the tokens.

    Args:
        samples: in their order; none at all makes a micro-batch of filler rows, with zero loss.
        spec, towers: as for ``collate_packs``.
    """
    check_pads(samples, spec)
    rows, media, _ = _with_fillers(samples, spec, towers)
    shape = (len(rows), max(sample.length for sample in rows))
    row_positions = [sample_positions(sample, spec) for sample in rows]
    # Padding tokens have no label and are never attended to.
    input_ids, positions = np.full(shape, PAD_ID, np.int64), np.zeros((4, *shape), np.result_type(*row_positions))
    labels, mask = np.full(shape, IGNORE_INDEX, np.int64), np.zeros(shape, np.int64)
    weights, loss_weights = shifted_weights(rows, spec), np.zeros(shape, np.float32)
    for row, sample in enumerate(rows):
        tokens = slice(sample.length)
        input_ids[row, tokens] = sample.input_ids
        labels[row, tokens] = shifted_labels(sample)
        mask[row, tokens] = 1
        positions[:, row, tokens] = row_positions[row]
        if weights is not None:
            loss_weights[row, tokens] = weights[row]
    return PaddedBatch(
        **batch_fields(input_ids, labels, None if weights is None else loss_weights, media, spec),
        position_ids=_as_position_ids(positions if spec.has_mrope else positions[0]),
        channels=tuple(sample.channel for sample in rows),
        num_samples=len(samples),
        attention_mask=torch.from_numpy(mask),
    )


def batch_fields(
    input_ids: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32] | None,
    media: dict[str, Tensor],
    spec: InputSpec,
    *,
    shared: bool = False,
) -> dict[str, Any]:
    """Return the fields of a ``Batch`` that every kind of micro-batch derives from its tokens (T,) or (B, T)."""
    ids, targets = _as_rows(input_ids), _as_rows(labels)
    return {
        "input_ids": ids,
        "labels": targets,
        "loss_weights": None if weights is None else _as_rows(weights),
        "target_positions": target_positions(targets),
        "media": media,
        "towers": tower_inputs(spec, media, ids, shared=shared),
    }


def _as_rows(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array) if array.ndim == 2 else torch.from_numpy(array).unsqueeze(0)


def shifted_labels(sample: EncodedSample) -> npt.NDArray[np.int32]:
    """Return the label that each position predicts, int32 (L,); the last position predicts nothing (-100)."""
    return np.append(sample.labels[1:], np.int32(IGNORE_INDEX))


def shifted_weights(samples: Sequence[EncodedSample], spec: InputSpec) -> list[npt.NDArray[np.float32]] | None:
    """Return each sample's loss weights float32 (L,), shifted like its labels; None if every label has weight 1."""
    if spec.loss_reduction == "token" and all(sample.loss_scale is None for sample in samples):
        return None
    weights = []
    for sample in samples:
        scale = np.ones(sample.length, np.float32) if sample.loss_scale is None else sample.loss_scale
        shifted = np.append(scale[1:], np.float32(0))
        if spec.loss_reduction == "sample":
            # Every sample's mean loss has the same weight, however many targets the sample has.
            shifted /= max(int(np.count_nonzero(sample.labels[1:] != IGNORE_INDEX)), 1)
        weights.append(shifted)
    return weights


def joined_positions(
    parts: Sequence[npt.NDArray[Any]], spec: InputSpec, index: npt.NDArray[np.int64] | None = None
) -> Tensor:
    """Join documents' positions into the position ids of a sequence: (4, 1, T) for M-RoPE models, else (1, T).

    Args:
        parts: (4, L) each, laid end to end.
        index: (T,), the tokens to take; None for all.
    """
    positions = np.concatenate(parts if spec.has_mrope else [part[:1] for part in parts], axis=1)
    if index is not None:
        positions = positions[:, index]
    return _as_position_ids(positions[:, None] if spec.has_mrope else positions)


def _as_position_ids(positions: npt.NDArray[Any]) -> Tensor:
    """Convert positions to position ids of the model: int64, or float32 if they have fractions."""
    if np.issubdtype(positions.dtype, np.floating):
        positions = positions.astype(np.float32)
    return torch.from_numpy(positions)


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def _with_fillers(
    samples: Sequence[EncodedSample], spec: InputSpec, towers: frozenset[Tower] | None, multiple_of: int = 1
) -> tuple[list[EncodedSample], dict[str, Tensor], int]:
    """Return the samples plus a filler for each tower without media and for padding; all media; padding tokens."""
    documents, media = list(samples), load_media(samples, spec)
    towers = spec.towers if towers is None else towers
    if "vision" in towers and spec.family.processor_inputs:
        if not media:
            count, media = blank_processed(spec)
            picture = EncodedImage(None, b"", 0, 0, (), num_tokens=count)
            documents.append(filler([spec.pad_ids["image"]] * count, (picture,)))
    elif "vision" in towers and not any(pixels in media for pixels, _ in spec.family.visual_inputs.values()):
        blank = blank_picture("image", spec)
        _, height, width = grid = tuple(blank[spec.family.visual_inputs["image"][1]][0].tolist())
        opening, closing = (getattr(spec.config, name) for name in spec.family.image_marks)
        picture = EncodedImage(None, b"", height, width, grid, num_tokens=1)
        documents.append(filler([opening, spec.pad_ids["image"], closing], (picture,)))
        media |= blank
    if "sound" in towers and "input_features" not in media:
        documents.append(filler([spec.pad_ids["audio"]]))
        media |= silence(spec)
    documents = documents or [filler([PAD_ID])]
    num_padding = -sum(document.length for document in documents) % multiple_of
    return documents + [filler([PAD_ID] * num_padding)] * bool(num_padding), media, num_padding


def filler(input_ids: list[int], images: tuple[EncodedImage, ...] = ()) -> EncodedSample:
    """Return a document of these tokens and images without labels, whose loss is therefore zero."""
    ids = np.array(input_ids, np.int32)
    return EncodedSample(ids, np.full_like(ids, IGNORE_INDEX), np.zeros(0, np.int32), images, None, "filler", 0)


def check_pads(samples: Sequence[EncodedSample], spec: InputSpec) -> None:
    """Check each sample's placeholder tokens against its media; transformers checks only a micro-batch's totals.

    Raises:
        DataError: naming the row.
    """
    for sample in samples:
        tracks = [video.audio for video in sample.videos if video.audio is not None]
        needed: dict[MediaKind, int] = {
            "image": sum(image.num_tokens for image in sample.images),
            "video": sum(video.num_tokens for video in sample.videos),
            "audio": sum(audio.num_tokens for audio in (*sample.audios, *tracks)),
        }
        for kind in needed:
            pad = spec.pad_ids.get(kind)
            num_placeholders = int(np.count_nonzero(sample.input_ids == pad)) if pad is not None else 0
            num_needed = sum(number for other, number in needed.items() if spec.pad_ids.get(other) == pad)
            if num_placeholders != num_needed:
                raise DataError(
                    f"row {sample.row} of {sample.source}: {num_placeholders} {kind} tokens for media "
                    f"that need {num_needed}",
                    "The cache does not belong to this model, or is damaged: run packtool export again.",
                )


def collate_tree(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    towers: frozenset[Tower] | None = None,
    *,
    min_shared: int = MIN_SHARED,
    multiple_of: int = 1,
) -> PackedBatch:
    """Lay samples end to end in one sequence, with each common prefix once.

    The cost: attention gathers keys and values of all complete samples, one layer at a time.

    Args:
        samples, spec, towers, multiple_of: as for ``collate_packs``.
        min_shared: see ``prefix_tree.find_tree``.

    Returns:
        a ``TreeBatch``, or the result of ``collate_packs`` if nothing is shared.
    """
    check_pads(samples, spec)
    nodes = find_tree(samples, spec, min_shared=min_shared)
    if not any(node.is_shared for node in nodes):
        return collate_packs(samples, spec, towers, multiple_of=multiple_of)
    parts = [stretch_of(samples[node.samples[0]], node.start, node.stop, spec) for node in nodes]
    documents, media, num_padding = _with_fillers(parts, spec, towers, multiple_of)
    fillers = documents[len(nodes) :]
    lengths = tuple(document.length for document in documents)
    keys, key_lengths = key_index([node.parent for node in nodes] + [ROOT] * len(fillers), lengths)
    channels = tuple(dict.fromkeys(sample.channel for sample in samples))
    labels, weights, counts = _targets(samples, nodes, spec, channels)
    num_fillers = sum(filler.length for filler in fillers)
    fields = batch_fields(
        np.concatenate([document.input_ids for document in documents], dtype=np.int64),
        np.append(labels, np.full(num_fillers, IGNORE_INDEX)),
        np.append(weights, np.zeros(num_fillers, np.float32)),
        media,
        spec,
    )
    counts = counts[:, fields["target_positions"].numpy()]
    # Nodes come after the nodes that they continue, so the last node of a sample is its end.
    ends = {number: document for document, node in enumerate(nodes) for number in node.samples}
    complete_positions = {node.samples[0]: sample_positions(samples[node.samples[0]], spec) for node in nodes}
    positions = [complete_positions[node.samples[0]][:, node.start : node.stop] for node in nodes]
    positions += [sample_positions(filler, spec) for filler in fillers]
    return TreeBatch(
        **fields,
        position_ids=joined_positions(positions, spec),
        channels=channels,
        num_samples=len(samples),
        num_padding=num_padding,
        cu_seqlens=_bounds(lengths),
        lengths=lengths,
        key_index=torch.from_numpy(keys),
        cu_seqlens_k=_bounds(key_lengths),
        key_lengths=key_lengths,
        target_counts=torch.from_numpy(counts),
        num_sample_targets=int(counts.sum()),
        sample_ends=tuple(ends[number] for number in range(len(samples))),
    )


def _targets(
    samples: Sequence[EncodedSample], nodes: Sequence[Node], spec: InputSpec, channels: Sequence[str | None]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return labels and weights of the nodes' tokens, (T,), and label counts by channel, (C, T)."""
    sample_labels = [shifted_labels(sample) for sample in samples]
    sample_weights = shifted_weights(samples, spec)
    labels, weights, counts = [], [], []
    codes = {channel: code for code, channel in enumerate(channels)}
    for node in nodes:
        tokens = slice(node.start, node.stop)
        node_labels = np.stack([sample_labels[number][tokens] for number in node.samples])
        is_target = node_labels != IGNORE_INDEX
        label = np.where(is_target.any(axis=0), node_labels.max(axis=0, initial=IGNORE_INDEX), IGNORE_INDEX)
        assert (node_labels[is_target] == np.broadcast_to(label, node_labels.shape)[is_target]).all(), (
            "a token has one label"
        )
        weight = is_target.astype(np.float32)
        if sample_weights is not None:
            weight *= np.stack([sample_weights[number][tokens] for number in node.samples])
        labels.append(label.astype(np.int64))
        weights.append(weight.sum(axis=0, dtype=np.float32))
        count = np.zeros((len(channels), node.length), np.int64)
        np.add.at(count, [codes[samples[number].channel] for number in node.samples], is_target)
        counts.append(count)
    return np.concatenate(labels), np.concatenate(weights), np.concatenate(counts, axis=1)
