"""Ulysses, ring, all-gather, or two of them: what P ranks that share a row do, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packtool.errors import ConfigError
from packtool.parallel_options import ParallelOptions

_SMALL_CHUNK = 256
"""Tokens of a chunk below which kernels are mostly overhead."""

_LONG_CHUNK = 1024
"""Tokens of a chunk from which attention to it takes longer than to send the next one, on today's machines."""


@dataclass(frozen=True)
class Heads:
    """What a model's attention looks like.

    Args:
        queries, keys: heads of Q, and of K and V.
        has_windows: some layers see a sliding window only.
    """

    queries: int
    keys: int
    has_windows: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Heads:
        """Of a ``config.json``, of a multimodal model its text tower."""
        config = config.get("thinker_config") or config
        text = config.get("text_config") or config
        queries = int(text["num_attention_heads"])
        layers = text.get("layer_types") or ()
        sliding = (
            any(kind == "sliding_attention" for kind in layers) if layers else bool(text.get("use_sliding_window"))
        )
        return cls(
            queries, int(text.get("num_key_value_heads") or queries), sliding and bool(text.get("sliding_window"))
        )

    def allow(self, ulysses_size: int) -> bool:
        """Whether so many ranks can share the heads; K and V are repeated where they have fewer."""
        return self.queries % math.lcm(self.keys, ulysses_size) == 0

    def volume(self, ring_size: int, ulysses_size: int) -> float:
        """Numbers that a rank sends in one forward pass, per token of the row and unit of head size.

        Ulysses: (U - 1) / U of Q, K, V and the output of T / P tokens; ring and all-gather: K and V of the R - 1 other
        parts, with a rank's share of the heads.
        """
        size = ring_size * ulysses_size
        keys = math.lcm(self.keys, ulysses_size)
        heads = (ulysses_size - 1) / ulysses_size * (2 * self.queries + 2 * keys) / size
        return heads + (ring_size - 1) * 2 * keys / size


@dataclass(frozen=True)
class Axes:
    """What was chosen.

    Args:
        ring_size: R; its ranks pass K and V around, or gather them.
        ulysses_size: U.
        way: of the ring axis.
        reason: a sentence for the user.
    """

    ring_size: int = 1
    ulysses_size: int = 1
    way: Literal["ring", "allgather"] = "ring"
    reason: str = ""

    @property
    def multiple(self) -> int:
        """That the documents of a row are padded to."""
        return 2 * self.ring_size if self.ring_size > 1 else 1

    @property
    def name(self) -> str:
        """For a person."""
        parts = [f"{self.way} over {self.ring_size}"] * (self.ring_size > 1)
        parts += [f"ulysses over {self.ulysses_size}"] * (self.ulysses_size > 1)
        return " and ".join(parts) or "none"


def choose_axes(options: ParallelOptions, heads: Heads, *, typical_length: int, ranks_per_node: int) -> Axes:
    """What a run's options mean for its model and samples.

    ``auto`` takes the split that sends least, among those whose heads divide, whose Ulysses ranks are in one machine,
    and whose chunks are not tiny; of equals the one with more Ulysses. K and V are passed around where chunks are long
    enough to hide it, and gathered at once where they are short.

    Args:
        options: of the run.
        heads: of the model.
        typical_length: of the samples, weighed by their tokens.
        ranks_per_node: processes of one machine.

    Raises:
        ConfigError: if the model's heads cannot be shared so, or windows cannot be passed around.
    """
    size = options.num_sharing
    if size == 1:
        return Axes(reason="every rank has rows of its own")
    kind = options.sequence_parallel_type
    ulysses, ring = options.ulysses_size, options.ring_size
    if ulysses is None and ring is None and kind in ("ulysses", "ring", "allgather"):
        ulysses = size if kind == "ulysses" else 1
    if ulysses is None and ring is not None:
        ulysses = size // ring
    asked = ulysses is not None
    splits = [ulysses] if ulysses is not None else [u for u in range(size, 0, -1) if size % u == 0]
    allowed = [u for u in splits if heads.allow(u) and (u == size or not heads.has_windows)]
    if not allowed:
        raise ConfigError(_refusal(splits, heads, size), "Choose a --sequence-parallel-size that divides the heads.")
    if asked:
        chosen, why = allowed[0], "as asked"
    else:
        chosen, why = _least(allowed, heads, size, typical_length, ranks_per_node)
    ring_size = size // chosen
    chunk = typical_length // (2 * ring_size)
    way: Literal["ring", "allgather"] = "ring" if chunk >= _LONG_CHUNK else "allgather"
    if kind in ("ring", "allgather"):
        way = "ring" if kind == "ring" else "allgather"
    elif ring_size > 1:
        hides = "long enough to hide the next one's way" if way == "ring" else "too short to hide the next one's way"
        why += f"; chunks of about {chunk:,} tokens are {hides}"
    return Axes(ring_size, chosen, way, why)


def _least(allowed: list[int], heads: Heads, size: int, typical_length: int, ranks_per_node: int) -> tuple[int, str]:
    """The Ulysses size, and why."""
    near = [u for u in allowed if u <= ranks_per_node] or allowed[-1:]
    roomy = [u for u in near if size == u or typical_length // (2 * (size // u)) >= _SMALL_CHUNK] or near[:1]
    chosen = min(roomy, key=lambda u: (heads.volume(size // u, u), -u))
    volumes = ", ".join(f"{heads.volume(size // u, u):.3g} with ulysses over {u}" for u in roomy)
    why = (
        f"{heads.queries} heads of Q and {heads.keys} of K and V; numbers sent a token and unit of head size: {volumes}"
    )
    if len(roomy) < len(near):
        why += f"; samples of about {typical_length:,} tokens would make smaller chunks than {_SMALL_CHUNK}"
    return chosen, why


def _refusal(splits: list[int], heads: Heads, size: int) -> str:
    if heads.has_windows and heads.allow(size):
        return (
            "the model has sliding windows, which only --sequence-parallel-type ulysses knows: rings of chunks would "
            "cut them"
        )
    told = " or ".join(map(str, splits))
    windows = " and sliding windows, which must not be cut" if heads.has_windows else ""
    return (
        f"the model has {heads.queries} heads of Q and {heads.keys} of K and V{windows}: ulysses over {told} "
        "cannot share them evenly"
    )
