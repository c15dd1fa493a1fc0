"""Choice of how P ranks share a sequence: Ulysses, ring, all-gather, or Ulysses with one of the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packtool.config.packing import ParallelOptions
from packtool.encode.families import FAMILIES, text_config_of, thinker_of
from packtool.errors import ConfigError, UnsupportedModelError

Way = Literal["ring", "allgather"]

_SMALL_CHUNK = 256
"""Tokens of a chunk below which kernels are mostly overhead."""

_LONG_CHUNK = 1024
"""Tokens of a chunk from which attention to it takes longer than sending the next one, on today's machines."""


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model.

    Args:
        queries, keys: heads of Q, and of K and V.
        has_windows: some layers have a sliding window.
    """

    queries: int
    keys: int
    has_windows: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Heads:
        """Read the numbers of heads from a ``config.json``; of a multimodal model, those of its text tower."""
        text = text_config_of(config)
        queries = int(text["num_attention_heads"])
        layers = text.get("layer_types")
        # Without the list all layers have the window, as Mistral's, unless it is switched off, as in most of Qwen2's.
        sliding = "sliding_attention" in layers if layers else bool(text.get("use_sliding_window", True))
        has_windows = sliding and bool(text.get("sliding_window"))
        return cls(queries, int(text.get("num_key_value_heads") or queries), has_windows)

    def allow(self, ulysses_size: int) -> bool:
        """True if this many ranks can share the heads; K and V are repeated where they have fewer."""
        return self.queries % math.lcm(self.keys, ulysses_size) == 0

    def volume(self, ring_size: int, ulysses_size: int, way: Way, *, backward: bool = True) -> float:
        """16-bit numbers that a rank sends in a forward and a backward pass, per token and unit of head size.

        Forward, Ulysses sends (U - 1) / U of Q, K, V and the output of T / P tokens; ring and all-gather send K and V
        of the R - 1 other parts, with a rank's share of the heads. Backward, Ulysses sends as much again. K and V go
        around, or are gathered, once more, and so are their 32-bit gradients: on the ring one hop more, back to their
        owner.

        Args:
            backward: False counts the forward pass alone.
        """
        keys, num_ranks, hops = math.lcm(self.keys, ulysses_size), ring_size * ulysses_size, ring_size - 1
        exchanged = (ulysses_size - 1) / ulysses_size * (2 * self.queries + 2 * keys) / num_ranks
        passed = 2 * keys / num_ranks  # K and V of one part
        if not backward:
            return exchanged + hops * passed
        gradients = 2 * ring_size * (hops > 0) if way == "ring" else 2 * hops
        return 2 * exchanged + (2 * hops + gradients) * passed


def refuse_shared(config: Mapping[str, Any], num_ranks: int = 1, *, trained: bool = False) -> None:
    """Raise for a model whose sequences cannot be spread over several processes, by its ``config.json``.

    Args:
        num_ranks: P, the ranks that would share a sequence.
        trained: the model will be trained, so dropout is refused, too.

    Raises:
        ConfigError: if this number of ranks cannot share the heads of its gated delta nets.
        UnsupportedModelError: for layers or settings that rule it out.
    """
    name, text = thinker_of(config).get("model_type"), text_config_of(config)
    has_state = "linear_attention" in (text.get("layer_types") or ())
    has_heads = any(text.get("model_type") in family.recurrent_types for family in FAMILIES)
    if has_state and not has_heads:
        raise UnsupportedModelError(
            f"--sequence-parallel-size: sequences of a {name} model cannot be spread over several processes, "
            "for it has recurrent layers of a kind that is not known",
            "Leave the option out; --gradient-checkpointing true and --fsdp full_shard save memory, too.",
        )
    if has_state:
        heads = Heads(int(text["linear_num_value_heads"]), int(text["linear_num_key_heads"]))
        if not heads.allow(num_ranks):
            raise ConfigError(
                f"--sequence-parallel-size {num_ranks}: the gated delta nets of a {name} model have {heads.queries} "
                f"heads of values and {heads.keys} of keys, which {num_ranks} processes cannot share evenly",
                "Choose a size that divides the heads of keys.",
            )
    if trained and text.get("attention_dropout"):
        raise UnsupportedModelError(
            f"--sequence-parallel-size: the model drops {text['attention_dropout']:g} of its attention weights, which "
            "sequences that several processes share cannot",
            "Set attention_dropout to 0 in the model's config.json.",
        )


@dataclass(frozen=True)
class Axes:
    """The chosen split of sequences over ranks.

    Args:
        ring_size: R; its ranks pass K and V around, or gather them.
        ulysses_size: U.
        way: how the ranks of the ring axis get K and V.
        reason: a sentence for the user.
    """

    ring_size: int = 1
    ulysses_size: int = 1
    way: Way = "ring"
    reason: str = ""

    @property
    def multiple(self) -> int:
        """The multiple that the length of each document of a sequence is padded to."""
        return 2 * self.ring_size if self.ring_size > 1 else 1

    @property
    def name(self) -> str:
        """Name of the split for log lines and tables."""
        parts = [f"{self.way} over {self.ring_size}"] * (self.ring_size > 1)
        parts += [f"ulysses over {self.ulysses_size}"] * (self.ulysses_size > 1)
        return " and ".join(parts) or "none"


def choose_axes(options: ParallelOptions, heads: Heads, *, typical_length: int, ranks_per_node: int) -> Axes:
    """Choose the axes that a run's options request or, with ``auto``, those that send the least.

    ``auto`` considers the splits whose heads divide, whose Ulysses ranks are in one machine, and whose chunks are not
    tiny; of equals it takes the one with more Ulysses. K and V are passed around where chunks are long enough to hide
    it, and gathered at once where they are short.

    Args:
        options: of the run.
        heads: of the model.
        typical_length: mean length of the samples, weighted by their tokens.
        ranks_per_node: processes of one machine.

    Raises:
        ConfigError: if the model's heads cannot be shared so, or windows cannot be passed around.
    """
    size, kind, ulysses = options.sequence_parallel_ranks, options.sequence_parallel_type, options.ulysses_size
    if size == 1:
        return Axes(reason="every rank has sequences of its own")
    if ulysses is None and options.ring_size is not None:
        ulysses = size // options.ring_size
    elif ulysses is None and kind != "auto":
        ulysses = size if kind == "ulysses" else 1
    splits = [u for u in range(size, 0, -1) if size % u == 0] if ulysses is None else [ulysses]
    allowed = [u for u in splits if heads.allow(u) and (u == size or not heads.has_windows)]
    if not allowed:
        raise ConfigError(_refusal(splits, heads, size), "Choose a --sequence-parallel-size that divides the heads.")
    candidates = []
    for ulysses_size in allowed:
        axes = Axes(size // ulysses_size, ulysses_size)
        is_ring = kind == "ring" or (kind != "allgather" and _chunk(axes, typical_length) >= _LONG_CHUNK)
        candidates.append(dataclasses.replace(axes, way="ring" if is_ring else "allgather"))
    if ulysses is None:
        axes, reason = _cheapest(candidates, heads, typical_length, ranks_per_node)
    else:
        axes, reason = candidates[0], "as asked"
    if kind in ("auto", "ulysses") and axes.ring_size > 1:
        hides = "long enough" if axes.way == "ring" else "too short"
        reason += f"; chunks of about {_chunk(axes, typical_length):,} tokens are {hides} to hide the next one's way"
    return dataclasses.replace(axes, reason=reason)


def _chunk(axes: Axes, typical_length: int) -> int:
    return typical_length // (2 * axes.ring_size)


def _cheapest(candidates: list[Axes], heads: Heads, typical_length: int, ranks_per_node: int) -> tuple[Axes, str]:
    """The candidate that sends the least, and the reason."""

    def volume(axes: Axes) -> float:
        return heads.volume(axes.ring_size, axes.ulysses_size, axes.way)

    near = [axes for axes in candidates if ranks_per_node % axes.ulysses_size == 0] or candidates[-1:]
    roomy = [axes for axes in near if axes.ring_size == 1 or _chunk(axes, typical_length) >= _SMALL_CHUNK] or near[:1]
    volumes = ", ".join(f"{volume(axes):.3g} by {axes.name}" for axes in roomy)
    reason = (
        f"{heads.queries} heads of Q and {heads.keys} of K and V; sent for each token and unit of head size: {volumes}"
    )
    if len(roomy) < len(near):
        reason += f"; samples of about {typical_length:,} tokens would make chunks of less than {_SMALL_CHUNK}"
    return min(roomy, key=lambda axes: (volume(axes), -axes.ulysses_size)), reason


def _refusal(splits: list[int], heads: Heads, size: int) -> str:
    if heads.has_windows and heads.allow(size):
        return (
            "the model has sliding windows, which only --sequence-parallel-type ulysses knows: rings of chunks would "
            "cut them"
        )
    windows = " and sliding windows, which must not be cut" if heads.has_windows else ""
    return (
        f"the model has {heads.queries} heads of Q and {heads.keys} of K and V{windows}: ulysses over "
        f"{' or '.join(map(str, splits))} cannot share them evenly"
    )
