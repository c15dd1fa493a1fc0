"""The micro-batch of a run that needs most of a rank's memory, as far as its plan tells. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.train import TrainConfig
from packtool.encode.families import family_of, thinker_of
from packtool.plan.cost import CostModel
from packtool.plan.epoch import EpochPlan
from packtool.plan.media_shares import Media, MediaShares
from packtool.plan.pack_plan import Int64Array, PackPlan
from packtool.train.prepare.lengths import longest_micro_batches


@dataclass(frozen=True, kw_only=True)
class RankTokens:
    """Tokens of a rank's micro-batch.

    Args:
        computed: by the language model.
        vision: of them, those that stand for pictures and videos.
        audio: of them, those that stand for sounds.
        looked_at: of pictures and videos that this rank looks at, where ranks share a sequence; None for ``vision``.
        keys: that documents see, those of shared prefixes once for each; 0 where nothing is shared.
    """

    computed: int
    vision: int = 0
    audio: int = 0
    looked_at: int | None = None
    keys: int = 0

    @property
    def num_seen(self) -> int:
        """Tokens of pictures and videos that the vision tower makes."""
        return self.vision if self.looked_at is None else self.looked_at

    def within(self, computed: int) -> RankTokens:
        """The same in a micro-batch of ``computed`` tokens, of which one at least stands for no medium."""
        audio = min(self.audio, computed - 1)
        return dataclasses.replace(
            self, computed=computed, audio=audio, vision=min(self.vision, computed - 1 - audio)
        )

    def scaled(self, computed: int) -> RankTokens:
        """As many of each in proportion, in a micro-batch of ``computed`` tokens."""
        share = computed / self.computed
        values = {name: value for name, value in vars(self).items() if value is not None}
        return RankTokens(**{name: math.ceil(share * value) for name, value in values.items()} | {"computed": computed})

    def holds_at_most(self, other: RankTokens) -> bool:
        """Whether another one has no fewer of any kind."""
        mine, theirs = ((t.computed, t.vision, t.audio, t.num_seen, t.keys) for t in (self, other))
        return all(a <= b for a, b in zip(mine, theirs, strict=True))


def media_of(index: SplitIndex, model: Mapping[str, Any]) -> Media:
    """The pictures and videos of caches.

    Args:
        model: its ``config.json``.
    """
    vision = thinker_of(model).get("vision_config") or {}
    return Media.of_samples(
        index.vision_tokens,
        index.patch_squares,
        index.num_images,
        index.num_videos,
        patches_per_token=int(vision.get("spatial_merge_size", 2)) ** 2,
    )


def share_media(media: Media, cost: CostModel, plan: EpochPlan, size: int) -> MediaShares:
    """Who of ``size`` ranks looks at which of the media that an epoch trains."""
    work = cost.towers(media.tokens, media.squares)  # type: ignore[arg-type]
    return MediaShares.of_plan(media, work, plan.packs, plan.steps, size, plan.places)


def heaviest_tokens(
    config: TrainConfig,
    plan: EpochPlan,
    model: Mapping[str, Any],
    media_tokens: npt.NDArray[np.integer[Any]],
    audio_tokens: npt.NDArray[np.integer[Any]],
    shares: MediaShares | None = None,
) -> tuple[RankTokens, ...]:
    """As if the most tokens of each kind came together; where layers are compiled, also the longest without media.

    Args:
        config: with its packing length.
        plan: of an epoch.
        model: its ``config.json``.
        media_tokens, audio_tokens: by position in the cache: of each sample, or what it adds to what others share.
        shares: where ranks share sequences.
    """
    packs, steps = plan.packs, plan.steps

    def most(values: npt.NDArray[Any]) -> int:
        return int(steps.cell_sums(packs.sums_per_pack(values[packs.samples])).max(initial=0))

    found = RankTokens(
        computed=1,
        vision=most(media_tokens - audio_tokens),
        audio=most(audio_tokens),
        looked_at=None if shares is None else math.ceil(shares.most(shares.media.tokens).max(initial=0) - 1e-6),
        keys=int(steps.cell_sums(keys_per_pack(packs)).max(initial=0)) if packs.shared is not None else 0,
    )
    return with_longest(config, model, found)


def with_longest(config: TrainConfig, model: Mapping[str, Any], found: RankTokens) -> tuple[RankTokens, ...]:
    """So many tokens of media in the longest micro-batch; where layers are compiled, also the longest without media."""
    longest, with_fillers = (max(number, 2) for number in longest_micro_batches(config, family_of(model).kinds))
    tokens = found.within(longest)
    return (tokens,) if with_fillers == longest else (tokens, RankTokens(computed=with_fillers, keys=tokens.keys))


def keys_per_pack(packs: PackPlan) -> Int64Array:
    """Keys that the documents of each pack see: for each node of a tree, the tokens from its root to its end; (K,).

    Samples of a tree are in its order, so a prefix is met where a sample shares more than those before it on its way.
    """
    assert packs.shared is not None, "without trees a document sees its own"
    found = packs.sums_per_pack(packs.whole_lengths)
    for pack in np.flatnonzero(packs.sums_per_pack(packs.shared)).tolist():
        levels = [0]
        for shared in packs.shared[packs.offsets[pack] : packs.offsets[pack + 1]].tolist():
            while levels[-1] > shared:
                levels.pop()
            if levels[-1] < shared:
                levels.append(shared)
                found[pack] += shared
    return found
