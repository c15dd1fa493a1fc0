"""Ulysses, ring, all-gather, or two of them: what P ranks that share a sequence do, and why."""

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
        """Read the numbers of heads from a ``config.json``; of a multimodal model, those of its text tower."""
        text = text_config_of(config)
        queries = int(text["num_attention_heads"])
        layers = text.get("layer_types")
        # Without the list all layers have the window, as Mistral's, unless it is switched off, as in most of Qwen2's.
        sliding = "sliding_attention" in layers if layers else bool(text.get("use_sliding_window", True))
        has_windows = sliding and bool(text.get("sliding_window"))
        return cls(queries, int(text.get("num_key_value_heads") or queries), has_windows)

    def allow(self, ulysses_size: int) -> bool:
        """Whether so many ranks can share the heads; K and V are repeated where they have fewer."""
        return self.queries % math.lcm(self.keys, ulysses_size) == 0

    def forward_volume(self, ring_size: int, ulysses_size: int) -> float:
        """Numbers that a rank sends in one forward pass, per token of the sequence and unit of head size.

        Ulysses: (U - 1) / U of Q, K, V and the output of T / P tokens; ring and all-gather: K and V of the R - 1 other
        parts, with a rank's share of the heads.
        """
        return self._exchanged(ring_size, ulysses_size) + (ring_size - 1) * self._passed(ring_size, ulysses_size)

    def volume(self, ring_size: int, ulysses_size: int, way: Way) -> float:
        """What a rank sends in a forward and a backward pass, per token and unit of head size, in numbers of 16 bits.

        Backward Ulysses exchanges as much again. K and V go around, or are gathered, once more, and their gradients, of
        32 bits, travel too: on the ring one hop more than K and V, for they go home.
        """
        hops = ring_size - 1
        gradients = 2 * ring_size * (hops > 0) if way == "ring" else 2 * hops
        passed = (2 * hops + gradients) * self._passed(ring_size, ulysses_size)
        return 2 * self._exchanged(ring_size, ulysses_size) + passed

    def _exchanged(self, ring_size: int, ulysses_size: int) -> float:
        keys = math.lcm(self.keys, ulysses_size)
        return (ulysses_size - 1) / ulysses_size * (2 * self.queries + 2 * keys) / (ring_size * ulysses_size)

    def _passed(self, ring_size: int, ulysses_size: int) -> float:
        """K and V of one part."""
        return 2 * math.lcm(self.keys, ulysses_size) / (ring_size * ulysses_size)


def refuse_shared(config: Mapping[str, Any], num_ranks: int = 1, *, trained: bool = False) -> None:
    """Raise for a model whose sequences cannot be spread over several processes, by its ``config.json``.

    Args:
        num_ranks: P, that would share a sequence.
        trained: it will be, so that what is dropped in training counts.

    Raises:
        ConfigError: if its gated delta nets have heads that so many ranks cannot share.
        UnsupportedModelError: naming what it has that cannot.
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
    """What was chosen.

    Args:
        ring_size: R; its ranks pass K and V around, or gather them.
        ulysses_size: U.
        way: of the ring axis.
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
    size = options.sequence_parallel_ranks
    if size == 1:
        return Axes(reason="every rank has sequences of its own")
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
    split = [_split(u, size, options, typical_length) for u in allowed]
    if asked:
        chosen, why = split[0], "as asked"
    else:
        chosen, why = _least(split, heads, typical_length, ranks_per_node)
    if kind in ("auto", "ulysses") and chosen.ring_size > 1:
        hides = "long enough" if chosen.way == "ring" else "too short"
        why += f"; chunks of about {_chunk(chosen, typical_length):,} tokens are {hides} to hide the next one's way"
    return dataclasses.replace(chosen, reason=why)


def _split(ulysses_size: int, size: int, options: ParallelOptions, typical_length: int) -> Axes:
    """The axes with this many processes for Ulysses, and how K and V travel on the ring axis that is left."""
    axes = Axes(size // ulysses_size, ulysses_size)
    is_long = _chunk(axes, typical_length) >= _LONG_CHUNK
    if options.sequence_parallel_type in ("ring", "allgather"):
        is_long = options.sequence_parallel_type == "ring"
    return dataclasses.replace(axes, way="ring" if is_long else "allgather")


def _chunk(axes: Axes, typical_length: int) -> int:
    return typical_length // (2 * axes.ring_size)


def _least(split: list[Axes], heads: Heads, typical_length: int, ranks_per_node: int) -> tuple[Axes, str]:
    """The one that sends least, and why."""

    def volume(axes: Axes) -> float:
        return heads.volume(axes.ring_size, axes.ulysses_size, axes.way)

    near = [axes for axes in split if ranks_per_node % axes.ulysses_size == 0] or split[-1:]
    roomy = [axes for axes in near if axes.ring_size == 1 or _chunk(axes, typical_length) >= _SMALL_CHUNK] or near[:1]
    volumes = ", ".join(f"{volume(axes):.3g} by {axes.name}" for axes in roomy)
    why = (
        f"{heads.queries} heads of Q and {heads.keys} of K and V; sent for each token and unit of head size: {volumes}"
    )
    if len(roomy) < len(near):
        why += f"; samples of about {typical_length:,} tokens would make chunks of less than {_SMALL_CHUNK}"
    return min(roomy, key=lambda axes: (volume(axes), -axes.ulysses_size)), why


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
