"""Collation of one rank's part of a sequence that several ranks share; ``batch.shard`` describes the split.

Every rank is given the same samples, of which it reads the tokens (four bytes each) but loads only its share of the
pictures, videos and sounds: those of samples that are local to it, and of the others a share by their cost in the
towers (``planning.towers``), whichever rank holds their tokens; a ``FeatureRoute`` brings the features there. A video's
frames may be one rank's and its sound track another's, even if the tokens of both are interleaved. A rank without a
picture of its own encodes a blank one, and one without a sound encodes silence, as ranks wait for each other in every
call of a tower; these features are not sent.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.batch import ShardedBatch, ShardedTreeBatch
from packtool.batch.collate import (
    batch_fields,
    check_placeholders,
    filler_document,
    join_documents,
    joined_positions,
    slice_nodes,
    tree_positions,
    tree_token_fields,
)
from packtool.batch.media import blank_picture, blank_processed, load_media, silence
from packtool.batch.micro_batch import Tower
from packtool.batch.positions import NUM_POSITION_ROWS, PAD_ID, align_sample, sample_positions
from packtool.batch.prefix_tree import ROOT, Node, find_tree
from packtool.batch.shard import FeatureRoute, Int64Array, SequenceShard, SequenceSplit, assign_tokens, route_features
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, patch_squares
from packtool.encode.media_spans import sounds_in_order, visual_media
from packtool.planning.pack_plan import Costs
from packtool.planning.skrull import SHARDED
from packtool.planning.towers import assign_heaviest_first
from packtool.rows.sample import MediaKind


class DocumentMedium(NamedTuple):
    """A medium of a sequence, with the index of its document; a sound has the path or data of its file."""

    document: int
    kind: MediaKind
    medium: EncodedImage | EncodedVideo | EncodedAudio


def collate_shard(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    split: SequenceSplit,
    placement: Sequence[int] | None = None,
    towers: frozenset[Tower] | None = None,
    *,
    pad_to_multiple_of: int = 1,
    min_shared: int | None = None,
) -> ShardedBatch:
    """Make this rank's part of a micro-batch: a packed sequence that several ranks compute together.

    Args:
        samples: the samples of the complete sequence, the same on all of these ranks.
        split: number of these ranks, how they divide the sequence, and which of them this is.
        placement: for each sample, the rank that holds it, or ``SHARDED`` if all divide its tokens; None: all sharded.
        towers: media encoders that must run, even if no sample has media for them; None for all of the model's.
        pad_to_multiple_of: the tokens of each rank are padded to a multiple of it, by a filler document of its own.
        min_shared: minimum tokens of a common prefix that is computed once; None computes all samples separately.

    Returns:
        A ``ShardedTreeBatch`` if samples share a prefix; then ``placement`` is ignored, and all tokens are sharded.
    """
    check_placeholders(samples, spec)
    nodes = [] if min_shared is None else find_tree(samples, spec, min_shared=min_shared)
    is_tree = any(node.is_shared for node in nodes)
    documents = slice_nodes(samples, nodes, spec) if is_tree else samples
    if is_tree or placement is None:
        placement = [SHARDED] * len(documents)
    layout = _lay_out(documents, placement, split, pad_to_multiple_of)  # with fillers, and the tokens of each rank
    media, routes = _load_media(layout, spec, towers)  # routes: exchange of the towers' outputs between ranks
    shard = layout.shard(routes)
    num_samples = len(samples) if split.rank == 0 else 0  # only one rank counts the samples
    if is_tree:
        tree_shard = _with_tree(shard, nodes)
        fields = _tree_fields(samples, nodes, layout, media, spec)
        return ShardedTreeBatch(**fields, **layout.fields, shard=tree_shard, num_samples=num_samples)
    fields = _token_fields(layout, media, spec)
    return ShardedBatch(**fields, **layout.fields, shard=shard, num_samples=num_samples)


class _Layout(NamedTuple):
    """The documents of a sequence, and their distribution over its ranks.

    Args:
        documents: samples (or nodes of a prefix tree), then fillers.
        placement: the rank that holds each document, or ``SHARDED``.
        num_padding: tokens of the filler that pads this rank's part.
        tokens_by_rank: positions in the sequence of each rank's tokens, int64 (t,).
    """

    documents: list[EncodedSample]
    placement: list[int]
    split: SequenceSplit
    num_padding: int
    tokens_by_rank: list[Int64Array]

    @property
    def positions(self) -> Int64Array:
        """Positions in the sequence of this rank's tokens."""
        return self.tokens_by_rank[self.split.rank]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(document.length for document in self.documents)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the batch."""
        index = torch.from_numpy(self.positions)
        return {"index": index, "lengths": self.lengths, "num_padding": self.num_padding}

    def shard(self, routes: dict[str, FeatureRoute]) -> SequenceShard:
        """Describe this rank's part."""
        return SequenceShard(self.split, self._lengths_on(self.split.rank), self._lengths_on(SHARDED), routes)

    def _lengths_on(self, rank: int) -> tuple[int, ...]:
        pairs = zip(self.lengths, self.placement, strict=True)
        return tuple(length for length, document_rank in pairs if document_rank == rank)


def _lay_out(
    samples: Sequence[EncodedSample], sample_placement: Sequence[int], split: SequenceSplit, pad_to_multiple_of: int
) -> _Layout:
    """Append fillers to samples (or nodes), and assign all tokens to ranks."""
    documents, placement = _add_filler_documents(samples, sample_placement, split)
    padding_by_rank = _padding_by_rank(documents, placement, split, pad_to_multiple_of)
    documents += [filler_document([PAD_ID] * num_padding) for num_padding in padding_by_rank.values()]
    placement += padding_by_rank.keys()
    tokens_by_rank = assign_tokens([document.length for document in documents], placement, split)
    return _Layout(documents, placement, split, padding_by_rank.get(split.rank, 0), tokens_by_rank)


def _load_media(
    layout: _Layout, spec: InputSpec, towers: frozenset[Tower] | None
) -> tuple[dict[str, Tensor], dict[str, FeatureRoute]]:
    """Load this rank's media; return the inputs of its towers by argument, and the exchange of features by kind.

    The media of a sequence are divided among its ranks: each encodes some, and sends the features to those that
    hold their placeholder tokens. All ranks run the same towers, those without such media on a blank medium.
    """
    if not spec.towers:
        return {}, {}
    documents, split = layout.documents, layout.split
    media_ranks = _assign_media(documents, layout.placement, spec, split)
    media = load_media(_single_media(split.rank, documents, media_ranks), spec)
    required_towers = spec.towers if towers is None else towers
    routes: dict[str, FeatureRoute] = {}
    for kind in _routed_kinds(media_ranks, spec, required_towers):
        media = _with_blank_medium(media, kind, spec)
        placeholders = _placeholder_positions(documents, kind, spec)
        feature_ranks = _feature_ranks(media_ranks, kind, spec)
        routes[kind] = route_features(placeholders, feature_ranks, layout.tokens_by_rank, split.rank)
    return media, routes


def _with_tree(shard: SequenceShard, nodes: Sequence[Node]) -> SequenceShard:
    """Add the structure of a prefix tree to a shard whose sharded documents are its nodes, then fillers."""
    filler_lengths = shard.sharded_lengths[len(nodes) :]
    return dataclasses.replace(
        shard,
        parents=tuple(node.parent for node in nodes) + (ROOT,) * len(filler_lengths),
        sharded_tokens=tuple(node.length for node in nodes) + filler_lengths,
    )


def _tree_fields(
    samples: Sequence[EncodedSample], nodes: Sequence[Node], layout: _Layout, media: dict[str, Tensor], spec: InputSpec
) -> dict[str, Any]:
    """Return the batch's fields of tokens, targets, positions and media of a prefix tree by name."""
    fields = tree_token_fields(layout.documents, samples, nodes, spec, media, layout.positions)
    document_positions = tree_positions(samples, nodes, layout.documents, spec)
    fields["position_ids"] = joined_positions(document_positions, spec, layout.positions)
    return fields


def _token_fields(layout: _Layout, media: dict[str, Tensor], spec: InputSpec) -> dict[str, Any]:
    """Return the batch's fields of tokens, positions, channels and media by name."""
    documents, index = layout.documents, layout.positions
    tokens = join_documents(documents, spec)  # of the complete sequence
    weights = None if tokens.weights is None else tokens.weights[index]
    fields = batch_fields(tokens.input_ids[index], tokens.labels[index], weights, media, spec, exchanges_features=True)
    fields["position_ids"] = joined_positions(_document_positions(documents, spec, index), spec, index)
    fields["channels"] = tuple(document.channel for document in documents)
    return fields


def _document_positions(
    documents: Sequence[EncodedSample], spec: InputSpec, index: Int64Array
) -> list[npt.NDArray[Any]]:
    """Return the positions of each document, (4, L); zeros for documents without tokens on this rank."""
    lengths = [document.length for document in documents]
    document_of_token = np.repeat(np.arange(len(documents)), lengths)
    local_documents = set(document_of_token[index].tolist())
    positions: list[npt.NDArray[Any]] = []  # expensive for M-RoPE models
    for number, document in enumerate(documents):
        if number in local_documents:
            positions.append(sample_positions(document, spec))
        else:
            positions.append(np.zeros((NUM_POSITION_ROWS, document.length), np.int64))
    return positions


def _add_filler_documents(
    samples: Sequence[EncodedSample], sample_placement: Sequence[int], split: SequenceSplit
) -> tuple[list[EncodedSample], list[int]]:
    """Add padding so that the samples of a sequence can be divided among the ranks that compute it together.

    Fillers are documents of padding tokens without labels, so they do not affect the loss. If no sample is sharded,
    they give every rank at least one token. Otherwise they make the sharded tokens divisible among the ranks.

    Args:
        sample_placement: for each sample, the rank that holds it, or ``SHARDED`` if its tokens are divided among all.
        split: number of ranks, and how they divide a sequence.

    Returns:
        The documents (first the samples, the sharded ones padded, then fillers), and the placement of each.
    """
    if SHARDED not in sample_placement:
        idle_ranks = [rank for rank in range(split.size) if rank not in sample_placement]
        fillers = [filler_document([PAD_ID]) for _ in idle_ranks]
        return [*samples, *fillers], [*sample_placement, *idle_ranks]

    documents = []
    num_sharded_tokens = 0
    for sample, rank in zip(samples, sample_placement, strict=True):
        if rank == SHARDED:
            sample = align_sample(sample, split.multiple)  # pads its length to a multiple
            num_sharded_tokens += sample.length
        documents.append(sample)

    placement = list(sample_placement)
    num_filler_tokens = split.num_filler_tokens(num_sharded_tokens)
    if num_filler_tokens:
        documents.append(filler_document([PAD_ID] * num_filler_tokens))
        placement.append(SHARDED)
    return documents, placement


def _padding_by_rank(
    documents: Sequence[EncodedSample], placement: Sequence[int], split: SequenceSplit, pad_to_multiple_of: int
) -> dict[int, int]:
    """Return the number of padding tokens of each rank that needs any."""
    lengths = np.array([document.length for document in documents], np.int64)
    document_ranks = np.array(placement)
    num_sharded_per_rank = int(lengths[document_ranks == SHARDED].sum()) // split.size
    padding_by_rank = {}
    for rank in range(split.size):
        num_tokens = num_sharded_per_rank + int(lengths[document_ranks == rank].sum())
        num_padding = -num_tokens % pad_to_multiple_of  # up to the next multiple
        if num_padding:
            padding_by_rank[rank] = num_padding
    return padding_by_rank


def _placeholder_positions(documents: Sequence[EncodedSample], kind: MediaKind, spec: InputSpec) -> Int64Array:
    """Return the positions in the sequence of the placeholder tokens of a kind of media, (n,), ascending."""
    input_ids = spec.model_ids(np.concatenate([document.input_ids for document in documents]))
    return np.flatnonzero(input_ids == spec.pad_ids[kind])


def _feature_ranks(media_ranks: Sequence[tuple[DocumentMedium, int]], kind: MediaKind, spec: InputSpec) -> Int64Array:
    """Return the rank that computes the feature of each placeholder token of a kind, (n,), in the tokens' order."""
    ranks: list[int] = []
    for each, rank in media_ranks:
        if spec.family.taken_as(each.kind) == kind:
            ranks += [rank] * each.medium.num_tokens
    return np.array(ranks, np.int64)


def _routed_kinds(
    media_ranks: Sequence[tuple[DocumentMedium, int]], spec: InputSpec, towers: frozenset[Tower]
) -> list[MediaKind]:
    """Return the kinds of media whose features ranks exchange: those of the sequence, and of ``towers``."""
    kinds = {spec.family.taken_as(each.kind) for each, _ in media_ranks}
    if "vision" in towers and not kinds & {"image", "video"}:
        kinds.add("image")
    if "sound" in towers:
        kinds.add("audio")
    return [kind for kind in spec.family.kinds if kind in kinds]


def _with_blank_medium(inputs: dict[str, Tensor], kind: MediaKind, spec: InputSpec) -> dict[str, Tensor]:
    """Add a blank medium of a kind to the towers' inputs, unless they have media of this kind."""
    if kind == "audio":
        return silence(spec) | inputs  # loaded sounds replace the silence
    if spec.family.processor_inputs:
        return inputs or blank_processed(spec)[1]
    pixels_name, _ = spec.family.visual_inputs[kind]
    return inputs if pixels_name in inputs else inputs | blank_picture(kind, spec)


def with_rank_media(
    samples: Sequence[EncodedSample], placement: Sequence[int], spec: InputSpec, split: SequenceSplit
) -> list[EncodedSample]:
    """Return the samples of a sequence with only those media that this rank's towers encode."""
    return _with_media_of(split.rank, samples, _assign_media(samples, placement, spec, split))


def _single_media(
    rank: int, documents: Sequence[EncodedSample], media_ranks: Sequence[tuple[DocumentMedium, int]]
) -> list[EncodedSample]:
    """Return a document with a single medium for each medium of a rank, in their order."""
    samples = []
    for each, medium_rank in media_ranks:
        if medium_rank == rank:
            samples += _with_media_of(rank, [documents[each.document]], [(each._replace(document=0), rank)])
    return samples


def _with_media_of(
    rank: int, documents: Sequence[EncodedSample], media_ranks: Sequence[tuple[DocumentMedium, int]]
) -> list[EncodedSample]:
    """Return documents with only the media of a rank; a video's sound track is a sound, maybe of another rank."""
    media: dict[tuple[int, MediaKind], list[Any]] = defaultdict(list)  # by number of the document, and kind
    for (number, kind, medium), medium_rank in media_ranks:
        if medium_rank == rank:
            if isinstance(medium, EncodedVideo):
                medium = dataclasses.replace(medium, audio=None)
            media[number, kind].append(medium)
    results = []
    for number, document in enumerate(documents):
        images = tuple(media[number, "image"])
        videos = tuple(media[number, "video"])
        sounds = tuple(media[number, "audio"])
        results.append(dataclasses.replace(document, images=images, videos=videos, audios=sounds))
    return results


def _assign_media(
    documents: Sequence[EncodedSample], placement: Sequence[int], spec: InputSpec, split: SequenceSplit
) -> list[tuple[DocumentMedium, int]]:
    """Return all media of a sequence, each with the rank that encodes it; a sound track is a medium of its own.

    Media of local documents go to their rank. The others are distributed so that the towers' costs are balanced.
    """
    media: list[DocumentMedium] = []
    for number, document in enumerate(documents):
        media += _media_of(document, number, spec)
    costs = _tower_costs(media, spec)
    encoding_ranks = np.array([placement[each.document] for each in media], np.int64)
    is_sharded = encoding_ranks == SHARDED  # whether the medium is in a sharded document
    local_costs = np.bincount(encoding_ranks[~is_sharded], costs[~is_sharded], split.size)  # of each rank
    encoding_ranks[is_sharded] = assign_heaviest_first(costs[is_sharded].tolist(), local_costs.tolist())
    return list(zip(media, encoding_ranks.tolist(), strict=True))


def _media_of(document: EncodedSample, number: int, spec: InputSpec) -> list[DocumentMedium]:
    """List the media of the document with this number: images, then videos, then sounds, sound tracks included.

    Where the model takes videos as images, these are in the order of their tokens.
    """
    visual: list[EncodedImage | EncodedVideo] = [*document.images, *document.videos]
    if spec.family.videos_as_pictures:
        visual = visual_media(document, spec.media_tokens)
    kinds: list[MediaKind] = ["video" if isinstance(medium, EncodedVideo) else "image" for medium in visual]
    media = [DocumentMedium(number, kind, medium) for kind, medium in zip(kinds, visual, strict=True)]
    for sound, path, data in sounds_in_order(document, spec.media_tokens):
        sound_of_file = dataclasses.replace(sound, path=path, data=data)
        media.append(DocumentMedium(number, "audio", sound_of_file))
    return media


def _tower_costs(media: Sequence[DocumentMedium], spec: InputSpec) -> Costs:
    """Estimate the work of encoding each medium in its tower, float64 (media,)."""
    vision_tokens = np.zeros(len(media), np.int64)
    vision_squares = np.zeros(len(media), np.int64)
    sound_tokens = np.zeros(len(media), np.int64)
    for number, each in enumerate(media):
        if isinstance(each.medium, EncodedAudio):
            sound_tokens[number] = each.medium.num_tokens
        else:
            vision_tokens[number] = each.medium.num_tokens
            vision_squares[number] = patch_squares(each.medium.grid)
    return spec.tower_costs.towers(vision_tokens, vision_squares, sound_tokens)
