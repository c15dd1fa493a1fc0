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
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.batch import (
    CrossPictures,
    PackedBatch,
    PaddedBatch,
    TreeBatch,
    WholePictures,
    add_cross_attention_mask,
    find_whole_pictures,
    target_positions,
)
from packtool.batch.media import blank_picture, blank_processed, load_media, silence
from packtool.batch.micro_batch import Tower
from packtool.batch.positions import NUM_POSITION_ROWS, PAD_ID, TOKEN_TYPES, sample_positions
from packtool.batch.prefix_tree import ROOT, Node, find_tree, key_index, slice_sample
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.constants import IGNORE_INDEX, MIN_SHARED
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.errors import ConfigError, DataError
from packtool.rows.sample import MediaKind


def collate_packs(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    towers: frozenset[Tower] | None = None,
    *,
    pad_to_multiple_of: int = 1,
) -> PackedBatch:
    """Make a micro-batch of samples whose tokens lie end to end in one sequence.

    Fillers, after the samples, are documents of padding or of blank media; they have no labels, so their loss is zero.

    Args:
        samples: if empty, the micro-batch has only fillers.
        towers: media encoders that must run, even if no sample has media for them; None for all of the model's.
        pad_to_multiple_of: a filler pads the sequence to a multiple of this many tokens.
    """
    check_placeholders(samples, spec)
    loaded = _load_with_fillers(samples, spec, towers, pad_to_multiple_of)
    documents = loaded.documents
    tokens = join_documents(documents, spec)
    lengths = tuple(document.length for document in documents)
    document_positions = [sample_positions(document, spec) for document in documents]  # (4, L) each
    pictures: CrossPictures | WholePictures | None
    if spec.family.cross_attention and loaded.media:
        pictures = add_cross_attention_mask(documents, loaded.media, spec)  # the mask becomes one of the media inputs
    else:
        pictures = find_whole_pictures(tokens.input_ids, spec, lengths)
    return PackedBatch(
        **batch_fields(tokens.input_ids, tokens.labels, tokens.weights, loaded.media, spec),
        position_ids=joined_positions(document_positions, spec),
        channels=tuple(document.channel for document in documents),
        num_samples=len(samples),
        num_padding=loaded.num_padding,
        cu_seqlens=_cu_seqlens(lengths),
        lengths=lengths,
        pictures=pictures,
    )


def collate_padded(
    samples: Sequence[EncodedSample], spec: InputSpec, towers: frozenset[Tower] | None = None
) -> PaddedBatch:
    """Make a micro-batch with one sample per row, (B, T), padded on the right to the longest sample.

    Filler rows, after the samples, have padding or blank media and no labels, so their loss is zero.

    Args:
        samples: if empty, the micro-batch has only filler rows.
        towers: media encoders that must run, even if no sample has media for them; None for all of the model's.
    """
    if spec.family.cross_attention:
        problem = f"--packing false: text of a {spec.config.model_type} model would attend to pictures that pad its row"
        raise ConfigError(problem, "Leave --packing false out.")
    check_placeholders(samples, spec)
    loaded = _load_with_fillers(samples, spec, towers)
    documents = loaded.documents  # one for each row
    input_ids = _padded_rows([document.input_ids for document in documents], PAD_ID, np.int64)
    labels = _padded_rows([shifted_labels(document) for document in documents], IGNORE_INDEX, np.int64)
    attention_mask = _padded_rows([np.ones(document.length) for document in documents], 0, np.int64)
    weights = None  # every label has weight 1
    document_weights = shifted_weights(documents, spec)
    if document_weights is not None:
        weights = _padded_rows(document_weights, 0, np.float32)
    return PaddedBatch(
        **batch_fields(input_ids, labels, weights, loaded.media, spec),
        position_ids=_padded_positions(documents, spec),
        channels=tuple(document.channel for document in documents),
        num_samples=len(samples),
        attention_mask=torch.from_numpy(attention_mask),
    )


def _padded_rows(rows: Sequence[npt.NDArray[Any]], fill: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Put rows (L,) below each other, (B, T), padded on the right to the longest."""
    padded = np.full((len(rows), max(map(len, rows))), fill, dtype)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return padded


def _padded_positions(documents: Sequence[EncodedSample], spec: InputSpec) -> Tensor:
    """Return the position ids of documents as padded rows: (4, B, T) for M-RoPE models, else (B, T)."""
    document_positions = [sample_positions(document, spec) for document in documents]  # (4, L) of each
    dtype = np.result_type(*document_positions)
    num_rows = NUM_POSITION_ROWS if spec.has_mrope else 1
    rows = [_padded_rows([positions[row] for positions in document_positions], 0, dtype) for row in range(num_rows)]
    return _as_position_ids(np.stack(rows) if spec.has_mrope else rows[0])


def batch_fields(
    input_ids: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32] | None,
    media: dict[str, Tensor],
    spec: InputSpec,
    *,
    exchanges_features: bool = False,
) -> dict[str, Any]:
    """Return constructor arguments that all classes of ``Batch`` share: tokens (B, T), targets and media.

    Args:
        input_ids: (B, T), or (T,) for a single row.
        labels: in the same shape, the token that each token predicts; -100 if none.
        weights: in the same shape, the weight of each label in the loss; None if all are 1.
        media: inputs of the media encoders ("towers"), by the names of the model's arguments.
        exchanges_features: True if several ranks share the sequence, and send each other the towers' outputs.
    """
    id_rows = _as_rows(spec.model_ids(input_ids))
    label_rows = _as_rows(labels)
    token_types_argument = spec.family.token_types  # "" if the model takes none
    if token_types_argument:
        media = media | {token_types_argument: _token_types(id_rows, spec)}
    return {
        "input_ids": id_rows,
        "labels": label_rows,
        "loss_weights": None if weights is None else _as_rows(weights),
        "target_positions": target_positions(label_rows),
        "media": media,
        "towers": tower_inputs(spec, media, id_rows, exchanges_features=exchanges_features),
    }


def _token_types(input_ids: Tensor, spec: InputSpec) -> Tensor:
    """Return the type of each token, int64 in the shape of ``input_ids``: 0 for text, others for kinds of media."""
    token_types = torch.zeros_like(input_ids)
    for kind, pad_id in spec.pad_ids.items():
        token_types[input_ids == pad_id] = TOKEN_TYPES[kind]
    return token_types


def _as_rows(array: npt.NDArray[Any]) -> Tensor:
    """Return values (B, T) unchanged, and values (T,) as one row (1, T)."""
    return torch.from_numpy(array) if array.ndim == 2 else torch.from_numpy(array).unsqueeze(0)


class JoinedDocuments(NamedTuple):
    """Tokens of documents that lie end to end, (T,) each; labels and weights (None: all 1) are of the next token."""

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None


def join_documents(documents: Sequence[EncodedSample], spec: InputSpec) -> JoinedDocuments:
    """Lay the tokens of documents end to end, with the label and the loss weight that each token predicts."""
    weights = shifted_weights(documents, spec)
    input_ids = np.concatenate([document.input_ids for document in documents], dtype=np.int64)
    labels = np.concatenate([shifted_labels(document) for document in documents], dtype=np.int64)
    return JoinedDocuments(input_ids, labels, None if weights is None else np.concatenate(weights))


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
            num_targets = int(np.count_nonzero(sample.labels[1:] != IGNORE_INDEX))
            shifted /= max(num_targets, 1)
        weights.append(shifted)
    return weights


def joined_positions(
    document_positions: Sequence[npt.NDArray[Any]], spec: InputSpec, index: npt.NDArray[np.int64] | None = None
) -> Tensor:
    """Join documents' positions (4, L) into the position ids of a sequence: (4, 1, T) for M-RoPE models, else (1, T).

    ``index``, (T,): positions in the sequence of the tokens to take; None for all.
    """
    num_rows = NUM_POSITION_ROWS if spec.has_mrope else 1
    positions = np.concatenate([rows[:num_rows] for rows in document_positions], axis=1)
    if index is not None:
        positions = positions[:, index]
    return _as_position_ids(positions[:, None] if spec.has_mrope else positions)


def _as_position_ids(positions: npt.NDArray[Any]) -> Tensor:
    """Convert positions to position ids of the model: int64, or float32 if they have fractions."""
    if np.issubdtype(positions.dtype, np.floating):
        positions = positions.astype(np.float32)
    return torch.from_numpy(positions)


def _cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


class _LoadedDocuments(NamedTuple):
    """Samples and then fillers, the media inputs of all by argument of the model, and tokens of the padding filler."""

    documents: list[EncodedSample]
    media: dict[str, Tensor]
    num_padding: int


def _load_with_fillers(
    samples: Sequence[EncodedSample], spec: InputSpec, towers: frozenset[Tower] | None, pad_to_multiple_of: int = 1
) -> _LoadedDocuments:
    """Load the media of samples, and append fillers: blank media for ``towers`` without media, then padding tokens.

    There is at least one document, and the tokens of all together are a multiple of ``pad_to_multiple_of``.
    """
    documents = list(samples)
    media = load_media(samples, spec)
    _append_blank_media(documents, media, spec, spec.towers if towers is None else towers)
    if not documents:
        documents.append(filler_document([PAD_ID]))
    num_tokens = sum(document.length for document in documents)
    num_padding = -num_tokens % pad_to_multiple_of  # up to the next multiple
    if num_padding:
        documents.append(filler_document([PAD_ID] * num_padding))
    return _LoadedDocuments(documents, media, num_padding)


def _append_blank_media(
    documents: list[EncodedSample], media: dict[str, Tensor], spec: InputSpec, towers: frozenset[Tower]
) -> None:
    """Append a filler with a blank medium, and add the medium's inputs, for each of ``towers`` that has no media."""
    if "vision" in towers and not _has_visual_media(media, spec):
        document, blank_inputs = _blank_image_document(spec)
        documents.append(document)
        media |= blank_inputs
    has_sounds = "input_features" in media
    if "sound" in towers and not has_sounds:
        documents.append(filler_document([spec.pad_ids["audio"]]))
        media |= silence(spec)


def _has_visual_media(media: dict[str, Tensor], spec: InputSpec) -> bool:
    """Check whether the inputs of towers, by argument, contain images or videos."""
    if spec.family.processor_inputs:
        return bool(media)  # such a family has no other media
    return any(pixels_name in media for pixels_name, _ in spec.family.visual_inputs.values())


def _blank_image_document(spec: InputSpec) -> tuple[EncodedSample, dict[str, Tensor]]:
    """Return a filler document with a small blank image, and the image's inputs of the vision tower."""
    pad_id = spec.pad_ids["image"]
    if spec.family.processor_inputs:
        num_tokens, media = blank_processed(spec)
        image = EncodedImage(None, b"", 0, 0, (), num_tokens=num_tokens)
        return filler_document([pad_id] * num_tokens, (image,)), media
    media = blank_picture("image", spec)
    _, grid_name = spec.family.visual_inputs["image"]
    grid = tuple(media[grid_name][0].tolist())
    _, height, width = grid
    opening_id, closing_id = (getattr(spec.config, name) for name in spec.family.image_marks)
    image = EncodedImage(None, b"", height, width, grid, num_tokens=1)
    return filler_document([opening_id, pad_id, closing_id], (image,)), media


def filler_document(input_ids: list[int], images: tuple[EncodedImage, ...] = ()) -> EncodedSample:
    """Return a document of these tokens and images without labels, whose loss is therefore zero."""
    ids = np.array(input_ids, np.int32)
    return EncodedSample(ids, np.full_like(ids, IGNORE_INDEX), np.zeros(0, np.int32), images, None, "filler", 0)


def check_placeholders(samples: Sequence[EncodedSample], spec: InputSpec) -> None:
    """Raise a DataError, naming the row, unless each sample has as many placeholder tokens as its media need."""
    for sample in samples:
        num_needed = _num_tokens_by_kind(sample)
        for kind in num_needed:
            pad_id = spec.pad_ids.get(kind)  # None if the model has no such media
            num_placeholders = 0 if pad_id is None else int(np.count_nonzero(sample.input_ids == pad_id))
            # Kinds of media may have the same placeholder token, so the needs of all such kinds are added.
            num_expected = sum(num for other, num in num_needed.items() if spec.pad_ids.get(other) == pad_id)
            if num_placeholders != num_expected:
                raise DataError(
                    f"row {sample.row} of {sample.source}: {num_placeholders} {kind} tokens for media "
                    f"that need {num_expected}",
                    "The cache does not belong to this model, or is damaged: run packtool export again.",
                )


def _num_tokens_by_kind(sample: EncodedSample) -> dict[MediaKind, int]:
    """Count the placeholder tokens that a sample's media of each kind need; sound tracks are sounds."""
    sounds = list(sample.audios)
    sounds += [video.audio for video in sample.videos if video.audio is not None]
    return {
        "image": sum(image.num_tokens for image in sample.images),
        "video": sum(video.num_tokens for video in sample.videos),
        "audio": sum(sound.num_tokens for sound in sounds),
    }


def collate_tree(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    towers: frozenset[Tower] | None = None,
    *,
    min_shared: int = MIN_SHARED,
    pad_to_multiple_of: int = 1,
) -> PackedBatch:
    """Make a micro-batch in which tokens that several samples begin with are laid out and computed only once.

    The documents of the sequence are the nodes of a prefix tree: tokens that one or several samples have in common,
    each after the node that it continues. Fillers without labels come last.

    Args:
        towers: media encoders that must run, even if no sample has media for them; None for all of the model's.
        min_shared: minimum number of tokens of a common prefix.
        pad_to_multiple_of: a filler pads the sequence to a multiple of this many tokens.

    Returns:
        A ``TreeBatch``; if the samples share no prefix, the result of ``collate_packs``.
    """
    check_placeholders(samples, spec)
    can_share = not spec.family.cross_attention
    nodes = find_tree(samples, spec, min_shared=min_shared) if can_share else []
    if not any(node.is_shared for node in nodes):
        return collate_packs(samples, spec, towers, pad_to_multiple_of=pad_to_multiple_of)
    node_documents = slice_nodes(samples, nodes, spec)
    loaded = _load_with_fillers(node_documents, spec, towers, pad_to_multiple_of)
    lengths = tuple(document.length for document in loaded.documents)
    token_fields = tree_token_fields(loaded.documents, samples, nodes, spec, loaded.media)
    key_fields = _key_fields(nodes, lengths)
    input_ids = token_fields["input_ids"][0].numpy()
    document_positions = tree_positions(samples, nodes, loaded.documents, spec)
    return TreeBatch(
        **token_fields,
        **key_fields,
        pictures=find_whole_pictures(input_ids, spec, lengths, key_fields["key_lengths"]),
        position_ids=joined_positions(document_positions, spec),
        num_samples=len(samples),
        num_padding=loaded.num_padding,
        cu_seqlens=_cu_seqlens(lengths),
        lengths=lengths,
        sample_ends=_last_nodes(nodes, len(samples)),
    )


def _key_fields(nodes: Sequence[Node], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the fields of ``TreeBatch`` about attention keys, for documents of these lengths: nodes, then fillers."""
    parents = tuple(node.parent for node in nodes) + (ROOT,) * (len(lengths) - len(nodes))
    key_positions, key_lengths = key_index(parents, lengths)
    return {
        "parents": parents,
        "key_index": torch.from_numpy(key_positions),
        "key_lengths": key_lengths,
        "cu_seqlens_k": _cu_seqlens(key_lengths),
    }


def tree_token_fields(
    documents: Sequence[EncodedSample],
    samples: Sequence[EncodedSample],
    nodes: Sequence[Node],
    spec: InputSpec,
    media: dict[str, Tensor],
    index: npt.NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Return constructor arguments of a tree batch: tokens, targets, channels and media.

    In a tree batch, a prefix that several samples begin with is laid out once; its targets count for all of them.

    Args:
        documents: the documents of the sequence: one for each node, which may be padded, then fillers.
        samples: the samples that ``nodes`` divide into shared and own tokens.
        media: inputs of the media encoders, by the names of the model's arguments.
        index: positions of this rank's tokens in the sequence, (t,), if ranks share it; None for all tokens.
    """
    input_ids = np.concatenate([document.input_ids for document in documents], dtype=np.int64)
    lengths = [document.length for document in documents]
    targets = _tree_targets(samples, nodes, lengths, spec)
    is_shared_by_ranks = index is not None
    if index is not None:
        input_ids = input_ids[index]
        targets = targets.at(index)
    fields = batch_fields(
        input_ids, targets.labels, targets.weights, media, spec, exchanges_features=is_shared_by_ranks
    )
    positions_of_targets = fields["target_positions"].numpy()
    return fields | _target_fields(samples, targets, positions_of_targets)


class _TreeTargets(NamedTuple):
    """Targets of T tokens of a sequence with shared prefixes, and of the M labels of the samples.

    Args:
        labels: int64 (T,), of each token, shifted.
        weights: float32 (T,), the sum of the label's weights in all samples that contain the token.
        label_samples: int64 (M,), the number of the sample that has each label.
        label_positions: int64 (M,), the position among the T tokens of the token with that label.
    """

    labels: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    label_samples: npt.NDArray[np.int64]
    label_positions: npt.NDArray[np.int64]

    def at(self, index: npt.NDArray[np.int64]) -> _TreeTargets:
        """Return the targets of the tokens at ``index``, (t,), in this order."""
        new_positions = np.full(len(self.labels), -1)
        new_positions[index] = np.arange(len(index))
        positions = new_positions[self.label_positions]
        is_kept = positions >= 0
        return _TreeTargets(self.labels[index], self.weights[index], self.label_samples[is_kept], positions[is_kept])


def _target_fields(
    samples: Sequence[EncodedSample], targets: _TreeTargets, target_positions: npt.NDArray[np.int64]
) -> dict[str, Any]:
    """Return the channels, and the fields of ``TreeTargets``; ``target_positions``, (N,), are those of the batch."""
    target_of_label = np.searchsorted(target_positions, targets.label_positions)  # index among the N targets
    channels = tuple(dict.fromkeys(sample.channel for sample in samples))
    channel_of_sample = np.array([channels.index(sample.channel) for sample in samples])
    target_counts = np.zeros((len(channels), len(target_positions)), np.int64)
    np.add.at(target_counts, (channel_of_sample[targets.label_samples], target_of_label), 1)
    return {
        "channels": channels,
        "target_counts": torch.from_numpy(target_counts),
        "sample_targets": torch.from_numpy(np.stack((targets.label_samples, target_of_label))),
    }


def slice_nodes(samples: Sequence[EncodedSample], nodes: Sequence[Node], spec: InputSpec) -> list[EncodedSample]:
    """Return the tokens and media of each node as a sample; all samples of a node have the same there."""
    return [slice_sample(samples[node.samples[0]], node.start, node.stop, spec) for node in nodes]


def tree_positions(
    samples: Sequence[EncodedSample], nodes: Sequence[Node], documents: Sequence[EncodedSample], spec: InputSpec
) -> list[npt.NDArray[Any]]:
    """Return the positions of nodes, then fillers, (4, L) each; padding of a node repeats its last position."""
    padded_nodes, fillers = documents[: len(nodes)], documents[len(nodes) :]
    positions = []
    for padded, unpadded in zip(padded_nodes, _node_positions(samples, nodes, spec), strict=True):
        num_padding = padded.length - unpadded.shape[1]
        positions.append(np.pad(unpadded, ((0, 0), (0, num_padding)), "edge"))
    return positions + [sample_positions(filler, spec) for filler in fillers]


def _node_positions(samples: Sequence[EncodedSample], nodes: Sequence[Node], spec: InputSpec) -> list[npt.NDArray[Any]]:
    """Return the positions of each node's tokens, (4, node length): those that they have in the complete samples."""
    first_samples = {node.samples[0] for node in nodes}
    positions_of_sample = {number: sample_positions(samples[number], spec) for number in first_samples}
    return [positions_of_sample[node.samples[0]][:, node.start : node.stop] for node in nodes]


def _last_nodes(nodes: Sequence[Node], num_samples: int) -> tuple[int, ...]:
    """Return the number of each sample's last node; nodes come after the nodes that they continue."""
    last_node = [0] * num_samples
    for number, node in enumerate(nodes):
        for sample in node.samples:
            last_node[sample] = number
    return tuple(last_node)


def _tree_targets(
    samples: Sequence[EncodedSample], nodes: Sequence[Node], lengths: Sequence[int], spec: InputSpec
) -> _TreeTargets:
    """Return the labels and loss weights of a sequence in which samples share prefixes.

    ``lengths`` are those of the sequence's documents: one for each node (tokens that one or several samples have in
    common, maybe with padding at the end), then fillers. A token of a node may be a target in only some of its samples;
    its weight is the sum over these.
    """
    labels_of_samples = [shifted_labels(sample) for sample in samples]
    weights_of_samples = shifted_weights(samples, spec)  # None: every target has weight 1
    labels = np.full(sum(lengths), IGNORE_INDEX)
    weights = np.zeros(sum(lengths), np.float32)
    samples_of_labels: list[npt.NDArray[np.int64]] = []
    positions_of_labels: list[npt.NDArray[np.int64]] = []
    document_starts = accumulate(lengths, initial=0)
    for node, start in zip(nodes, document_starts, strict=False):  # fillers have no targets
        node_tokens = slice(start, start + node.length)  # without padding
        label_rows = _rows_of_samples(labels_of_samples, node)  # (samples of the node, its tokens)
        is_target = label_rows != IGNORE_INDEX
        labels[node_tokens] = _common_labels(label_rows)
        weights[node_tokens] = _summed_weights(is_target, weights_of_samples, node)
        rows, columns = np.nonzero(is_target)
        samples_of_labels.append(np.array(node.samples, np.int64)[rows])
        positions_of_labels.append(start + columns)
    return _TreeTargets(labels, weights, np.concatenate(samples_of_labels), np.concatenate(positions_of_labels))


def _common_labels(label_rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the label of each token of a node, int64 (n,), from its labels in each sample, (samples, n)."""
    labels = label_rows.max(axis=0, initial=IGNORE_INDEX)  # a target exceeds IGNORE_INDEX
    is_target = label_rows != IGNORE_INDEX
    assert (label_rows == labels)[is_target].all(), "a token has one label"
    return labels.astype(np.int64)


def _summed_weights(
    is_target: npt.NDArray[np.bool_], weights_of_samples: Sequence[npt.NDArray[np.float32]] | None, node: Node
) -> npt.NDArray[np.float32]:
    """Return the sum of the weights that each token of a node has in its samples, float32 (n,)."""
    weight_rows = is_target.astype(np.float32)
    if weights_of_samples is not None:
        weight_rows *= _rows_of_samples(weights_of_samples, node)
    return weight_rows.sum(axis=0, dtype=np.float32)


def _rows_of_samples(values_of_samples: Sequence[npt.NDArray[Any]], node: Node) -> npt.NDArray[Any]:
    """Return a row for each sample of a node: its values (node length,) of the node's tokens."""
    return np.stack([values_of_samples[number][node.start : node.stop] for number in node.samples])
