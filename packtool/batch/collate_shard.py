"""Samples become one rank's part of a sequence that several ranks share; see ``batch.shard`` for how it is cut.

Every rank is given the same samples, of which it reads the tokens (four bytes each) but loads only its share of the
pictures, videos and sounds: those of samples that are local to it, and of the others a share by what they cost the
towers (``plan.towers``), whoever holds their tokens; features find their way by a ``FeatureRoute``. A video's frames
may be one rank's and its sound track another's, wherever the tokens of both are woven together. A rank without a
picture of its own looks at a blank one, and one without a sound listens to silence; their features go nowhere, for
ranks wait for each other in every call of a tower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.batch import ShardedBatch, target_positions
from packtool.batch.collate import (
    as_positions,
    blank_picture,
    check_pads,
    filler,
    load_media,
    shifted_labels,
    shifted_weights,
    silence,
)
from packtool.batch.micro_batch import Tower
from packtool.batch.positions import PAD_ID, align_sample, sample_positions
from packtool.batch.processed import blank_picture_processed
from packtool.batch.shard import (
    Cut,
    FeatureRoute,
    Int64Array,
    SequenceShard,
    TokenAssignment,
    assign_tokens,
    route_features,
)
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo, patch_squares
from packtool.encode.families import MediaKind
from packtool.encode.media_spans import sounds_in_order
from packtool.planning.skrull import SHARDED
from packtool.planning.towers import assign_heaviest_first

DocumentMedium = tuple[int, MediaKind, int, EncodedImage | EncodedVideo | EncodedAudio]
"""Number of its document, kind, number in the document, and itself; sounds are in the order of their tokens."""


def collate_shard(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    cut: Cut,
    places: Sequence[int] | None = None,
    towers: frozenset[Tower] | None = None,
    *,
    multiple_of: int = 1,
) -> ShardedBatch:
    """One rank's part of some samples.

    Args:
        samples: the same on all ranks that share the sequence, in their order; none makes a filler for each rank.
        spec: the model they are for.
        cut: how they are cut, and the rank that this is for.
        places: of each sample ``SHARDED``, or the rank that it is local to; all are sharded without it.
        towers: that run whatever the samples bring; by default all that the model has.
        multiple_of: the length of each rank's part becomes one, by a filler document of its own.

    Raises:
        DataError: as ``collate_packs``, of the pictures that this rank loads.
    """
    check_pads(samples, spec)
    documents, placed = _documents(samples, list(places or [SHARDED] * len(samples)), cut)
    paddings = _paddings(documents, placed, cut, multiple_of)
    documents += [filler([PAD_ID] * number, ()) for number in paddings.values()]
    placed += paddings
    lengths = [document.length for document in documents]
    assigned = assign_tokens(lengths, placed, cut)
    index = assigned.index[cut.rank]
    media, routes = _share_media(documents, placed, spec, assigned, cut, spec.towers if towers is None else towers)
    input_ids = _picked([document.input_ids for document in documents], index)
    labels = _picked([shifted_labels(document) for document in documents], index)
    weights = shifted_weights(documents, spec)
    held = np.unique(np.repeat(np.arange(len(documents)), lengths)[index])
    shard = SequenceShard(
        cut,
        tuple(length for length, place in zip(lengths, placed, strict=True) if place == cut.rank),
        tuple(length for length, place in zip(lengths, placed, strict=True) if place == SHARDED),
        routes,
    )
    return ShardedBatch(
        input_ids=torch.from_numpy(input_ids).unsqueeze(0),
        labels=torch.from_numpy(labels).unsqueeze(0),
        position_ids=_positions(documents, spec, index, set(held.tolist())),
        media=media,
        towers=tower_inputs(spec, media, torch.from_numpy(input_ids), shared=True),
        target_positions=target_positions(torch.from_numpy(labels)),
        loss_weights=torch.from_numpy(np.concatenate(weights)[index]).unsqueeze(0) if weights is not None else None,
        channels=tuple(document.channel for document in documents),
        num_samples=len(samples) if cut.rank == 0 else 0,
        num_padding=paddings.get(cut.rank, 0),
        shard=shard,
        index=torch.from_numpy(index),
        lengths=tuple(lengths),
    )


def _documents(samples: Sequence[EncodedSample], places: list[int], cut: Cut) -> tuple[list[EncodedSample], list[int]]:
    """The samples, padded where they are sharded, and fillers: one that makes shares even, one for each bare rank."""
    documents = [
        align_sample(sample, cut.multiple) if place == SHARDED else sample
        for sample, place in zip(samples, places, strict=True)
    ]
    num_sharded = sum(doc.length for doc, place in zip(documents, places, strict=True) if place == SHARDED)
    if num_filler := cut.num_filler_tokens(num_sharded):
        documents.append(filler([PAD_ID] * num_filler, ()))
        places = [*places, SHARDED]
    if not num_sharded:
        bare = [rank for rank in range(cut.size) if rank not in places]
        documents += [filler([PAD_ID], ()) for _ in bare]
        places = [*places, *bare]
    return documents, places


def _paddings(documents: Sequence[EncodedSample], places: Sequence[int], cut: Cut, multiple_of: int) -> dict[int, int]:
    """The tokens that each rank's part lacks of a multiple, where it lacks some."""
    lengths = np.array([document.length for document in documents], np.int64)
    shared = int(lengths[np.array(places) == SHARDED].sum()) // cut.size
    held = [shared + int(lengths[np.array(places) == rank].sum()) for rank in range(cut.size)]
    return {rank: -number % multiple_of for rank, number in enumerate(held) if number % multiple_of}


def _picked(parts: Sequence[npt.NDArray[np.integer]], index: Int64Array) -> Int64Array:
    return np.concatenate(parts, dtype=np.int64)[index]


def _positions(documents: Sequence[EncodedSample], spec: InputSpec, index: Int64Array, held: set[int]) -> Tensor:
    """Positions of this rank's tokens; those of documents of which it holds nothing are not worked out."""
    if not spec.has_mrope:
        runs = np.concatenate([np.arange(document.length, dtype=np.int64) for document in documents])
        return torch.from_numpy(runs[index]).unsqueeze(0)
    found = [
        sample_positions(document, spec) if number in held else np.zeros((4, document.length), np.int64)
        for number, document in enumerate(documents)
    ]
    return as_positions(np.concatenate(found, axis=1)[:, None, index])


def _share_media(
    documents: Sequence[EncodedSample],
    placed: Sequence[int],
    spec: InputSpec,
    assigned: TokenAssignment,
    cut: Cut,
    towers: frozenset[Tower],
) -> tuple[dict[str, Tensor], dict[str, FeatureRoute]]:
    """What this rank's towers take, and the way of what they make of it."""
    if not spec.sees:
        return {}, {}
    media, owners = _owned_media(documents, placed, spec, cut)
    inputs = load_media(with_own_media(documents, placed, spec, cut), spec)
    input_ids = np.concatenate([document.input_ids for document in documents])
    routes: dict[str, FeatureRoute] = {}
    taken_as = [spec.family.taken_as(kind) for _, kind, *_ in media]
    brought = set(taken_as)
    if "vision" in towers and not brought & {"image", "video"}:
        brought.add("image")
    if "sound" in towers:
        brought.add("audio")
    for kind in [kind for kind in spec.family.kinds if kind in brought]:
        tokens = [medium.num_tokens for (*_, medium), other in zip(media, taken_as, strict=True) if other == kind]
        its_owners = [owner for owner, other in zip(owners.tolist(), taken_as, strict=True) if other == kind]
        positions = np.flatnonzero(input_ids == spec.pad_ids[kind])
        of_tokens = np.repeat(np.array(its_owners, np.int64), tokens)
        routes[kind] = route_features(positions, of_tokens, assigned, cut.rank, cut.size)
        if kind == "audio":
            inputs = silence(spec) | inputs
        elif spec.family.processor_inputs:
            inputs = inputs or blank_picture_processed(spec)[1]
        elif spec.family.visual_inputs[kind][0] not in inputs:
            inputs |= blank_picture(kind, spec)
    return inputs, routes


def with_own_media(
    samples: Sequence[EncodedSample], places: Sequence[int], spec: InputSpec, cut: Cut
) -> list[EncodedSample]:
    """The samples of a sequence with only those media that this rank looks at or listens to.

    Sound tracks are sounds by themselves, for the frames of their videos may be another rank's.
    """
    media, owners = _owned_media(samples, places, spec, cut)
    own = {(number, kind, i) for (number, kind, i, _), owner in zip(media, owners, strict=True) if owner == cut.rank}
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
    documents: Sequence[EncodedSample], placed: Sequence[int], spec: InputSpec, cut: Cut
) -> tuple[list[DocumentMedium], Int64Array]:
    """All media of a sequence, and the rank whose tower gets each: a local document's, else as shared."""
    media: list[DocumentMedium] = []
    for number, document in enumerate(documents):
        media += [(number, "image", i, image) for i, image in enumerate(document.images)]
        media += [(number, "video", i, video) for i, video in enumerate(document.videos)]
        sounds = sounds_in_order(document, spec.media_tokens)
        media += [(number, "audio", i, sound) for i, (sound, *_) in enumerate(sounds)]
    tokens = np.array([medium.num_tokens for *_, medium in media], np.int64)
    is_sound = np.array([kind == "audio" for _, kind, *_ in media], np.bool_)
    squares = [0 if isinstance(medium, EncodedAudio) else patch_squares(medium.grid) for *_, medium in media]
    work = spec.tower_costs.towers(tokens * ~is_sound, np.array(squares, np.int64), tokens * is_sound)
    owners = np.array([placed[number] for number, *_ in media], np.int64)
    shared = owners == SHARDED
    loads = np.bincount(owners[~shared], work[~shared], cut.size)
    owners[shared] = assign_heaviest_first(work[shared].tolist(), loads.tolist())
    return media, owners
