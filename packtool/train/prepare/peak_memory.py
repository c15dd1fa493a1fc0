"""The peak-memory micro-batch of a run, from its plan, and the lengths of micro-batches with ``--torch-compile``.

A compiled layer is compiled anew for each length, so these are rounded up to a few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.model import LearningOptions
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaKind, family_of, thinker_of
from packtool.planning.epoch import EpochPlan
from packtool.planning.pack_plan import Int64Array, PackPlan
from packtool.planning.towers import Media, MediaShares
from packtool.train.prepare.costs import cost_of
from packtool.train.prepare.figures import RankTokens

NUM_LENGTHS = 8
"""The number of lengths up to a full micro-batch, which most packs nearly are; one with fillers may have one more."""

_ALIGNED = 16
"""Lengths are multiples of it, for matrix products on GPUs."""

_FILLERS: dict[MediaKind, int] = {"image": 3, "audio": 1}
"""Tokens of the documents that let a tower run where no sample has media for it (``batch.collate``)."""


def length_step(num_tokens: int) -> int:
    """The multiple of tokens that compiled micro-batches of up to ``num_tokens`` are padded to."""
    return -(-num_tokens // (NUM_LENGTHS * _ALIGNED)) * _ALIGNED


def max_tokens(config: TrainConfig, sequence_parallel_size: int) -> int:
    """Maximum tokens of a micro-batch on one process, without fillers, by the packing length of ``config``."""
    if config.bucket_tokens is not None:
        return config.bucket_tokens
    packs = (config.packing_length or config.max_length or 0) * config.per_device_train_batch_size
    return -(-(config.dynamic_batch_tokens or packs) // sequence_parallel_size)


def longest_micro_batches(config: TrainConfig, kinds: Sequence[MediaKind]) -> tuple[int, int]:
    """Tokens that one process computes at most: with media of its own, and with fillers in their place."""
    tokens = max_tokens(config, config.sequence_parallel_ranks)
    if not config.torch_compile:
        return tokens, tokens
    step, fillers = length_step(tokens), num_fillers(kinds)
    return -(-tokens // step) * step, -(-(tokens + fillers) // step) * step


def num_fillers(kinds: Sequence[MediaKind]) -> int:
    """Tokens of the documents that stand in for missing media of these kinds."""
    return sum(number for kind, number in _FILLERS.items() if kind in kinds)


def seen_media(index: SplitIndex, model: Mapping[str, Any]) -> Media:
    """The pictures, videos and sounds of caches, for a model with this ``config.json``."""
    vision = thinker_of(model).get("vision_config") or {}
    seen = Media.of_samples(
        index.vision_tokens,
        index.patch_squares,
        index.num_images,
        index.num_videos,
        patches_per_token=int(vision.get("spatial_merge_size", 2)) ** 2,
    )
    return seen.with_sounds(index.audio_tokens, index.num_audios, index.num_videos)


def share_media(media: Media, model: Mapping[str, Any], plan: EpochPlan, size: int) -> MediaShares:
    """Assign the media of an epoch to the towers of ``size`` ranks, by the FLOPs of their forward passes."""
    work = cost_of(model, LearningOptions()).towers(media.tokens, media.squares, media.sounds)
    return MediaShares.of_plan(media, work, plan.packs, plan.steps, size, plan.placement)


def max_rank_tokens(
    config: TrainConfig,
    plan: EpochPlan,
    model: Mapping[str, Any],
    media_tokens: npt.NDArray[np.integer[Any]],
    audio_tokens: npt.NDArray[np.integer[Any]],
    shares: MediaShares | None = None,
) -> tuple[RankTokens, ...]:
    """The micro-batches of a rank that may need most memory: one with the most tokens of each kind that any has.

    Args:
        config: with its packing length.
        model: its ``config.json``.
        media_tokens, audio_tokens: (N,), of each sample of the cache, or what it adds to what others share.
        shares: where ranks share sequences.

    Returns:
        it, and where layers are compiled also the longest one that has fillers in place of media.
    """
    packs, steps = plan.packs, plan.steps

    def max_per_batch(values: npt.NDArray[Any]) -> int:
        return int(steps.cell_sums(packs.sums_per_pack(values[packs.samples])).max(initial=0))

    def max_of_rank(values: npt.NDArray[np.float64]) -> int:
        assert shares is not None, "ranks share sequences"
        return math.ceil(shares.max_per_rank(values).max(initial=0) - 1e-6)

    tokens = RankTokens(
        computed=1,
        vision=max_per_batch(media_tokens - audio_tokens),
        audio=max_per_batch(audio_tokens),
        num_local_vision_tokens=None if shares is None else max_of_rank(shares.media.tokens),
        num_local_audio_tokens=None if shares is None else max_of_rank(shares.media.sounds),
        keys=int(steps.cell_sums(keys_per_pack(packs)).max(initial=0)) if packs.shared is not None else 0,
    )
    return with_longest(config, model, tokens)


def with_longest(config: TrainConfig, model: Mapping[str, Any], tokens: RankTokens) -> tuple[RankTokens, ...]:
    """The longest micro-batch with these tokens of media, and if they differ the longest one with fillers."""
    longest, with_fillers = (max(number, 2) for number in longest_micro_batches(config, family_of(model).kinds))
    full = tokens.within(longest)
    return (full,) if with_fillers == longest else (full, RankTokens(computed=with_fillers, keys=full.keys))


def keys_per_pack(packs: PackPlan) -> Int64Array:
    """Keys that the documents of each pack see, at most; int64 (K,).

    A document is a node of a tree, and its keys go from the root to its end. Each sample is one, and where n samples
    begin alike there may be n - 1 forks: the plan knows of fewer than collation finds, which compares tokens.
    """
    assert packs.shared is not None, "without trees a document sees its own"
    return packs.sums_per_pack(packs.full_lengths) + packs.sums_per_pack(packs.shared)
