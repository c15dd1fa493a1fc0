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
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from packtool.batch.batch import ShardedBatch
from packtool.batch.collate import batch_fields, check_pads, filler, joined_positions, shifted_labels, shifted_weights
from packtool.batch.media import blank_picture, blank_processed, load_media, silence
from packtool.batch.micro_batch import Tower
from packtool.batch.positions import PAD_ID, align_sample, sample_positions
from packtool.batch.shard import FeatureRoute, Int64Array, SequenceShard, SequenceSplit, assign_tokens, route_features
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, patch_squares
from packtool.encode.media_spans import sounds_in_order
from packtool.planning.skrull import SHARDED
from packtool.planning.towers import assign_heaviest_first
from packtool.rows.sample import MediaKind

DocumentMedium = tuple[int, MediaKind, int, EncodedImage | EncodedVideo | EncodedAudio]
"""Number of its document, kind, number in the document, and the medium; sounds are in the order of their tokens."""


def collate_shard(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    split: SequenceSplit,
    places: Sequence[int] | None = None,
    towers: frozenset[Tower] | None = None,
    *,
    multiple_of: int = 1,
) -> ShardedBatch:
    """Collate one rank's part of some samples.

    Args:
        samples: the same on all ranks that share the sequence, in their order; none makes a filler for each rank.
        spec: the model they are for.
        split: ranks that share the sequence, and the rank that this is for.
        places: of each sample ``SHARDED``, or the rank that it is local to; by default all are sharded.
        towers: that run even if no sample has media for them; by default all of the model's.
        multiple_of: pads each rank's part to a multiple, by a filler document of its own.
    """
    check_pads(samples, spec)
    documents, placed = _documents(samples, list(places or [SHARDED] * len(samples)), split)
    paddings = _paddings(documents, placed, split, multiple_of)
    documents += [filler([PAD_ID] * number) for number in paddings.values()]
    placed += paddings
    lengths = [document.length for document in documents]
    assigned = assign_tokens(lengths, placed, split)
    index = assigned[split.rank]
    media, routes = _load_share(documents, placed, spec, assigned, split, spec.towers if towers is None else towers)
    weights = shifted_weights(documents, spec)
    # Positions are computed for the documents that have tokens here: those of M-RoPE models are expensive.
    local = set(np.repeat(np.arange(len(documents)), lengths)[index].tolist())
    positions = [
        sample_positions(document, spec) if number in local else np.zeros((4, document.length), np.int64)
        for number, document in enumerate(documents)
    ]
    shard = SequenceShard(
        split,
        tuple(length for length, place in zip(lengths, placed, strict=True) if place == split.rank),
        tuple(length for length, place in zip(lengths, placed, strict=True) if place == SHARDED),
        routes,
    )
    return ShardedBatch(
        **batch_fields(
            np.concatenate([document.input_ids for document in documents], dtype=np.int64)[index],
            np.concatenate([shifted_labels(document) for document in documents], dtype=np.int64)[index],
            None if weights is None else np.concatenate(weights)[index],
            media,
            spec,
            shared=True,
        ),
        position_ids=joined_positions(positions, spec, index),
        channels=tuple(document.channel for document in documents),
        num_samples=len(samples) if split.rank == 0 else 0,
        num_padding=paddings.get(split.rank, 0),
        shard=shard,
        index=torch.from_numpy(index),
        lengths=tuple(lengths),
    )


def _documents(
    samples: Sequence[EncodedSample], places: list[int], split: SequenceSplit
) -> tuple[list[EncodedSample], list[int]]:
    """Return documents and their places: the samples (padded if sharded) and fillers.

    One filler makes the sharded total divisible by the ranks; ranks without any tokens get one each.
    """
    documents = [
        align_sample(sample, split.multiple) if place == SHARDED else sample
        for sample, place in zip(samples, places, strict=True)
    ]
    num_sharded = sum(doc.length for doc, place in zip(documents, places, strict=True) if place == SHARDED)
    if num_filler := split.num_filler_tokens(num_sharded):
        documents.append(filler([PAD_ID] * num_filler))
        places = [*places, SHARDED]
    if not num_sharded:
        empty = [rank for rank in range(split.size) if rank not in places]
        documents += [filler([PAD_ID]) for _ in empty]
        places = [*places, *empty]
    return documents, places


def _paddings(
    documents: Sequence[EncodedSample], places: Sequence[int], split: SequenceSplit, multiple_of: int
) -> dict[int, int]:
    """Return the padding tokens of each rank whose part is not a multiple of ``multiple_of`` yet."""
    lengths = np.array([document.length for document in documents], np.int64)
    num_sharded = int(lengths[np.array(places) == SHARDED].sum()) // split.size
    totals = [num_sharded + int(lengths[np.array(places) == rank].sum()) for rank in range(split.size)]
    return {rank: -total % multiple_of for rank, total in enumerate(totals) if total % multiple_of}


def _load_share(
    documents: Sequence[EncodedSample],
    placed: Sequence[int],
    spec: InputSpec,
    assigned: Sequence[Int64Array],
    split: SequenceSplit,
    towers: frozenset[Tower],
) -> tuple[dict[str, Tensor], dict[str, FeatureRoute]]:
    """Load the inputs of this rank's towers; return them with the routes of their features by kind of medium."""
    if not spec.sees:
        return {}, {}
    media, owners = _owned_media(documents, placed, spec, split)
    inputs = load_media(with_own_media(documents, placed, spec, split), spec)
    input_ids = np.concatenate([document.input_ids for document in documents])
    kinds = np.array([spec.family.taken_as(kind) for _, kind, *_ in media], object)
    num_tokens = np.array([medium.num_tokens for *_, medium in media], np.int64)
    present = set(kinds)
    if "vision" in towers and not present & {"image", "video"}:
        present.add("image")
    if "sound" in towers:
        present.add("audio")
    routes: dict[str, FeatureRoute] = {}
    for kind in [kind for kind in spec.family.kinds if kind in present]:
        token_owners = np.repeat(owners[kinds == kind], num_tokens[kinds == kind])
        routes[kind] = route_features(
            np.flatnonzero(input_ids == spec.pad_ids[kind]), token_owners, assigned, split.rank
        )
        if kind == "audio":
            inputs = silence(spec) | inputs
        elif spec.family.processor_inputs:
            inputs = inputs or blank_processed(spec)[1]
        elif spec.family.visual_inputs[kind][0] not in inputs:
            inputs |= blank_picture(kind, spec)
    return inputs, routes


def with_own_media(
    samples: Sequence[EncodedSample], places: Sequence[int], spec: InputSpec, split: SequenceSplit
) -> list[EncodedSample]:
    """Return the samples of a sequence with only those media that this rank's towers encode.

    Sound tracks become sounds of their own, as the frames of their videos may be another rank's.
    """
    media, owners = _owned_media(samples, places, spec, split)
    own = {(number, kind, i) for (number, kind, i, _), owner in zip(media, owners, strict=True) if owner == split.rank}
    return [
        dataclasses.replace(
            sample,
            images=tuple(image for i, image in enumerate(sample.images) if (number, "image", i) in own),
            videos=tuple(
                dataclasses.replace(video, audio=None)
                for i, video in enumerate(sample.videos)
                if (number, "video", i) in own
            ),
            audios=tuple(
                dataclasses.replace(sound, path=path, data=data)
                for i, (sound, path, data) in enumerate(sounds_in_order(sample, spec.media_tokens))
                if (number, "audio", i) in own
            ),
        )
        for number, sample in enumerate(samples)
    ]


def _owned_media(
    documents: Sequence[EncodedSample], placed: Sequence[int], spec: InputSpec, split: SequenceSplit
) -> tuple[list[DocumentMedium], Int64Array]:
    """Return all media of a sequence, and the rank that encodes each, int64 (media,).

    Media of a local document belong to its rank; those of sharded documents are balanced by their cost in the towers.
    """
    media: list[DocumentMedium] = []
    for number, document in enumerate(documents):
        media += [(number, "image", i, image) for i, image in enumerate(document.images)]
        media += [(number, "video", i, video) for i, video in enumerate(document.videos)]
        sounds = sounds_in_order(document, spec.media_tokens)
        media += [(number, "audio", i, sound) for i, (sound, *_) in enumerate(sounds)]
    tokens = np.array([medium.num_tokens for *_, medium in media], np.int64)
    is_sound = np.array([kind == "audio" for _, kind, *_ in media], np.bool_)
    squares = [0 if isinstance(medium, EncodedAudio) else patch_squares(medium.grid) for *_, medium in media]
    costs = spec.tower_costs.towers(tokens * ~is_sound, np.array(squares, np.int64), tokens * is_sound)
    owners = np.array([placed[number] for number, *_ in media], np.int64)
    shared = owners == SHARDED
    loads = np.bincount(owners[~shared], costs[~shared], split.size)
    owners[shared] = assign_heaviest_first(costs[shared].tolist(), loads.tolist())
    return media, owners
