"""Samples become one micro-batch: laid end to end (packed) or one below the other (padded).

Labels are shifted here, inside each sample, so that no target crosses from one sample into the next::

    input_ids   a0 a1 a2 | b0 b1 b2 b3
    labels      a1 a2 -  | b1 b2 b3 -          "-" is -100
    cu_seqlens  0          3           7

Ranks wait for each other in every call of a tower (the one for pictures and videos, the one for sounds), so all of them
run the same towers in a micro-batch, once each: where a tower is to run and no sample brings anything for it, a filler
document does, with a blank picture or some silence and without labels. Its loss and gradients are exactly zero.

Samples become one micro-batch in which common prefixes are there once; see ``batch.prefix_tree``.

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
from torch import Tensor

from packtool.batch.batch import PackedBatch, PaddedBatch, TreeBatch, target_positions
from packtool.batch.micro_batch import Tower
from packtool.batch.pixels import load_pixels
from packtool.batch.positions import PAD_ID, sample_positions
from packtool.batch.prefix_tree import ROOT, Node, find_tree, key_index, stretch_of
from packtool.batch.processed import blank_picture_processed, load_processed
from packtool.batch.sounds import load_sounds
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.config.train import LossReduction
from packtool.constants import IGNORE_INDEX, MIN_SHARED
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.encode.families import MediaKind
from packtool.errors import DataError


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
        towers: that run whatever the samples bring; by default all that the model has.
        multiple_of: the row's length becomes one, by a filler document behind the others.

    Raises:
        DataError: naming a picture that cannot be read or has changed, or a sample whose placeholder
            tokens do not fit its pictures.
    """
    check_pads(samples, spec)
    documents, media = with_fillers(samples, spec, towers)
    documents, num_padding = with_padding(documents, multiple_of)
    input_ids = np.concatenate([sample.input_ids for sample in documents], dtype=np.int64)
    labels = np.concatenate([shifted_labels(sample) for sample in documents], dtype=np.int64)
    if spec.has_mrope:
        positions = np.concatenate([sample_positions(sample, spec) for sample in documents], axis=1)[:, None]
    else:
        positions = np.concatenate([np.arange(sample.length) for sample in documents], dtype=np.int64)[None]
    lengths = tuple(sample.length for sample in documents)
    weights = shifted_weights(documents, spec)
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids).unsqueeze(0),
        labels=torch.from_numpy(labels).unsqueeze(0),
        position_ids=as_positions(positions),
        media=media,
        towers=tower_inputs(spec, media, torch.from_numpy(input_ids)),
        target_positions=target_positions(torch.from_numpy(labels)),
        loss_weights=torch.from_numpy(np.concatenate(weights)).unsqueeze(0) if weights is not None else None,
        channels=tuple(sample.channel for sample in documents),
        num_samples=len(samples),
        num_padding=num_padding,
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        lengths=lengths,
    )


def collate_padded(
    samples: Sequence[EncodedSample], spec: InputSpec, towers: frozenset[Tower] | None = None
) -> PaddedBatch:
    """Put one sample into each row, padded on the right to the longest; the price is T x B minus the tokens.

    Args:
        samples: in their order; none at all makes a micro-batch of filler rows, with zero loss.
        spec: the model they are for.
        towers: as for ``collate_packs``.

    Raises:
        DataError: as ``collate_packs``.
    """
    check_pads(samples, spec)
    rows, media = with_fillers(samples, spec, towers)
    shape = (len(rows), max(sample.length for sample in rows))
    # A padding token is never attended to and has no label; 0 is in every vocabulary and is no picture's pad.
    found = [sample_positions(sample, spec) for sample in rows]
    input_ids, positions = np.zeros(shape, np.int64), np.zeros((4, *shape), np.result_type(*found))
    labels, mask = np.full(shape, IGNORE_INDEX, np.int64), np.zeros(shape, np.int64)
    weights = shifted_weights(rows, spec)
    loss_weights = np.zeros(shape, np.float32)
    for row, sample in enumerate(rows):
        taken = slice(sample.length)
        input_ids[row, taken] = sample.input_ids
        labels[row, taken] = shifted_labels(sample)
        mask[row, taken] = 1
        positions[:, row, taken] = found[row]
        if weights is not None:
            loss_weights[row, taken] = weights[row]
    return PaddedBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=as_positions(positions if spec.has_mrope else positions[0]),
        media=media,
        towers=tower_inputs(spec, media, torch.from_numpy(input_ids)),
        target_positions=target_positions(torch.from_numpy(labels)),
        loss_weights=torch.from_numpy(loss_weights) if weights is not None else None,
        channels=tuple(sample.channel for sample in rows),
        num_samples=len(samples),
        attention_mask=torch.from_numpy(mask),
    )


def shifted_labels(sample: EncodedSample) -> npt.NDArray[np.int32]:
    """int32 (L,): what each position is to predict; the last one predicts nothing."""
    return np.append(sample.labels[1:], np.int32(IGNORE_INDEX))


def shifted_weights(samples: Sequence[EncodedSample], spec: InputSpec) -> list[npt.NDArray[np.float32]] | None:
    """float32 (L,) of each sample, shifted like its labels; None if all labels of all samples weigh 1."""
    if spec.loss_reduction == "token" and all(sample.loss_scale is None for sample in samples):
        return None
    return [_weights(sample, spec.loss_reduction) for sample in samples]


def _weights(sample: EncodedSample, reduction: LossReduction) -> npt.NDArray[np.float32]:
    scale = np.ones(sample.length, np.float32) if sample.loss_scale is None else sample.loss_scale
    weights = np.append(scale[1:], np.float32(0))
    if reduction == "sample":
        # Each sample's mean counts as much as another's, however many targets it has.
        weights /= max(int(np.count_nonzero(sample.labels[1:] != IGNORE_INDEX)), 1)
    return weights


def as_positions(positions: npt.NDArray[Any]) -> Tensor:
    """Position ids of any shape as models take them: int64, or float32 where they have fractions."""
    if np.issubdtype(positions.dtype, np.floating):
        positions = positions.astype(np.float32)
    return torch.from_numpy(positions)


def with_fillers(
    samples: Sequence[EncodedSample], spec: InputSpec, towers: frozenset[Tower] | None
) -> tuple[list[EncodedSample], dict[str, Tensor]]:
    """The samples, a filler for each tower that has nothing to do, and what the towers take of all of them.

    The tensors have the shapes that ``load_media`` says: (patches, dimension), (sounds, bins, frames) and the like.
    """
    documents, media = list(samples), load_media(samples, spec)
    towers = spec.towers if towers is None else towers
    if "vision" in towers and spec.family.processor_inputs:
        if not media:
            count, media = blank_picture_processed(spec)
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
        documents.append(filler([spec.pad_ids["audio"]], ()))
        media |= silence(spec)
    return documents or [filler([0], ())], media


def with_padding(documents: Sequence[EncodedSample], multiple_of: int) -> tuple[list[EncodedSample], int]:
    """The documents, with a filler behind them whose tokens make their length a multiple, and the number of these."""
    num_padding = -sum(document.length for document in documents) % multiple_of
    return [*documents, *([filler([PAD_ID] * num_padding, ())] if num_padding else [])], num_padding


def blank_picture(kind: MediaKind, spec: InputSpec) -> dict[str, Tensor]:
    """The smallest picture, or video, there is, as the vision tower takes it: one token; as for ``load_pixels``."""
    side = int(spec.config.vision_config.spatial_merge_size)
    pixels, grid = spec.family.visual_inputs[kind]
    return {pixels: torch.zeros(side * side, spec.patch_dim), grid: torch.tensor([(1, side, side)])}


def silence(spec: InputSpec) -> dict[str, Tensor]:
    """The shortest sound there is, as the audio tower takes it: one token; as for ``load_sounds``."""
    frames = spec.family.mel_frames
    mask = torch.ones(1, frames, dtype=torch.int64)
    return {"input_features": torch.zeros(1, spec.num_mel_bins, frames), "feature_attention_mask": mask}


def load_media(samples: Sequence[EncodedSample], spec: InputSpec) -> dict[str, Tensor]:
    """What the towers take of some samples: see ``load_pixels`` and ``load_sounds``, or ``load_processed``.

    Raises:
        MediaError: naming a file that cannot be read or has changed.
    """
    if spec.family.processor_inputs:
        return load_processed(samples, spec)
    media = load_pixels(samples, spec)
    return media | load_sounds(samples, spec) if spec.hears else media


def filler(input_ids: list[int], images: tuple[EncodedImage, ...]) -> EncodedSample:
    """A document of these tokens and pictures without labels, so that its loss is zero."""
    ids = np.array(input_ids, np.int32)
    return EncodedSample(ids, np.full_like(ids, IGNORE_INDEX), np.zeros(0, np.int32), images, None, "filler", 0)


def check_pads(samples: Sequence[EncodedSample], spec: InputSpec) -> None:
    """Check that media meet their own sample's placeholder tokens: transformers compares a micro-batch's totals."""
    for sample in samples:
        tracks = [video.audio for video in sample.videos if video.audio is not None]
        needed: dict[MediaKind, int] = {
            "image": sum(image.num_tokens for image in sample.images),
            "video": sum(video.num_tokens for video in sample.videos),
            "audio": sum(audio.num_tokens for audio in (*sample.audios, *tracks)),
        }
        for kind in needed:
            pad = spec.pad_ids.get(kind)
            found = int(np.count_nonzero(sample.input_ids == pad)) if pad is not None else 0
            wanted = sum(number for other, number in needed.items() if spec.pad_ids.get(other) == pad)
            if found != wanted:
                raise DataError(
                    f"row {sample.row} of {sample.source}: {found} {kind} tokens for media that need {wanted}",
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
    """Lay samples end to end in one row, the prefixes that they have in common once.

    The price: attention gathers keys and values of all samples whole, one layer at a time.

    Args:
        samples, spec, towers, multiple_of: as for ``collate_packs``.
        min_shared: see ``prefix_tree.find_tree``.

    Returns:
        a ``TreeBatch``, or what ``collate_packs`` makes where nothing is shared.

    Raises:
        DataError: as ``collate_packs``.
    """
    check_pads(samples, spec)
    nodes = find_tree(samples, spec, min_shared=min_shared)
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
