"""What decides how much memory a micro-batch needs: its tokens, by what is done with them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankTokens:
    """Tokens of a rank's micro-batch.

    Args:
        computed: by the language model.
        vision: of them, those that stand for pictures and videos.
        audio: of them, those that stand for sounds.
        looked_at: of pictures and videos that this rank looks at, where ranks share a sequence; None for ``vision``.
        heard: of sounds that it listens to; None for ``audio``.
        keys: that documents see, those of shared prefixes once for each; 0 where nothing is shared.
    """

    computed: int
    vision: int = 0
    audio: int = 0
    looked_at: int | None = None
    heard: int | None = None
    keys: int = 0

    @property
    def num_seen(self) -> int:
        """Tokens of pictures and videos that the vision tower makes."""
        return self.vision if self.looked_at is None else self.looked_at

    @property
    def num_heard(self) -> int:
        """Tokens of sounds that the audio tower makes."""
        return self.audio if self.heard is None else self.heard

    def within(self, computed: int) -> RankTokens:
        """A micro-batch of ``computed`` tokens with as many of each kind, but for one at least that is text."""
        audio = min(self.audio, computed - 1)
        return dataclasses.replace(self, computed=computed, audio=audio, vision=min(self.vision, computed - 1 - audio))

    def scaled(self, computed: int) -> RankTokens:
        """A micro-batch of ``computed`` tokens with as many of each kind in proportion."""
        share = computed / self.computed
        values = {name: value for name, value in vars(self).items() if value is not None}
        return RankTokens(**{name: math.ceil(share * value) for name, value in values.items()} | {"computed": computed})

    def holds_at_most(self, other: RankTokens) -> bool:
        """Whether another one has no fewer of any kind."""
        mine, theirs = ((t.computed, t.vision, t.audio, t.num_seen, t.num_heard, t.keys) for t in (self, other))
        return all(a <= b for a, b in zip(mine, theirs, strict=True))
