"""Choice of how P ranks share a sequence: Ulysses, ring, all-gather, or Ulysses with one of the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from packtool.config.packing import ParallelOptions
from packtool.encode.families import FAMILIES, family_of, text_config_of, thinker_of
from packtool.encode.families.record import IN_CHUNKS
from packtool.errors import ConfigError, UnsupportedModelError

KvExchange = Literal["ring", "allgather"]
"""Exchange of K and V along the ring axis: passed from rank to rank in hops, or gathered at once."""

_MIN_CHUNK_TOKENS = 256
"""Tokens of a chunk below which kernels are mostly overhead."""

_MIN_RING_CHUNK_TOKENS = 1024
"""Tokens of a chunk from which attention to it takes longer than sending the next one, on today's machines."""


@dataclass(frozen=True)
class Heads:
    """Numbers of attention heads of Q, and of K and V; ``has_windows``: some layers have a sliding window."""

    queries: int
    keys: int
    has_windows: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Heads:
        """Read the numbers of heads from a ``config.json``; of a multimodal model, those of its text tower."""
        text = text_config_of(config)
        queries = int(text["num_attention_heads"])
        return cls(queries, int(text.get("num_key_value_heads") or queries), has_sliding_windows(config))

    def can_divide_among(self, ulysses_size: int) -> bool:
        """True if this many ranks can share the heads evenly; K and V are repeated where they have fewer."""
        return self.queries % math.lcm(self.keys, ulysses_size) == 0

    def volume(self, ring_size: int, ulysses_size: int, kv_exchange: KvExchange, *, backward: bool = True) -> float:
        """Return the 16-bit numbers that a rank sends in a layer, divided by the sequence's tokens and the head size.

        Forward, Ulysses sends (U - 1) / U of Q, K, V and the output of T / P tokens; ring and all-gather send K and V
        of the R - 1 other ring ranks, with a rank's share of the heads. Backward, Ulysses sends as much again. K and V
        are sent once more, and so are their 32-bit gradients: on the ring one hop more, back to their owner.
        """
        num_ranks, num_hops = ring_size * ulysses_size, ring_size - 1
        key_heads = math.lcm(self.keys, ulysses_size)
        ulysses_volume = (ulysses_size - 1) / ulysses_size * (2 * self.queries + 2 * key_heads) / num_ranks
        kv_of_rank = 2 * key_heads / num_ranks
        if not backward:
            return ulysses_volume + num_hops * kv_of_rank
        num_gradient_hops = ring_size if kv_exchange == "ring" and num_hops else num_hops
        numbers_per_gradient = 2  # a 32-bit gradient is as large as two 16-bit numbers
        kv_volume = (2 * num_hops + numbers_per_gradient * num_gradient_hops) * kv_of_rank
        return 2 * ulysses_volume + kv_volume


def has_sliding_windows(config: Mapping[str, Any]) -> bool:
    """Return whether some layers of a model have a sliding window, from its ``config.json``."""
    text = text_config_of(config)
    layers = text.get("layer_types")
    # Without the list all layers have the window, as Mistral's, unless it is switched off, as in most of Qwen2's.
    is_used = "sliding_attention" in layers if layers else bool(text.get("use_sliding_window", True))
    return is_used and bool(text.get("sliding_window"))


def refuse_unshareable_sequences(config: Mapping[str, Any], num_ranks: int = 1, *, trained: bool = False) -> None:
    """Raise if several ranks cannot share the sequences of a model, by its ``config.json``.

    ``num_ranks`` is 1 if their number is not known yet. If the model is ``trained``, it must have no attention dropout.
    """
    text_config = text_config_of(config)
    depends_on_position = text_config.get("attention_chunk_size") or text_config.get("attn_temperature_tuning")
    reason = family_of(config).unshared  # "" if nothing of the family prevents it
    if not reason and depends_on_position:
        reason = IN_CHUNKS
    if reason:
        raise UnsupportedModelError(
            f"--sequence-parallel-size: in a {config.get('model_type')} model, {reason}, which sequences that several "
            "processes share cannot",
            "Leave the option out; --gradient-checkpointing true and --fsdp full_shard save memory, too.",
        )
    if "linear_attention" in (text_config.get("layer_types") or ()):
        model_type = str(thinker_of(config).get("model_type"))
        _refuse_recurrent_layers(model_type, text_config, num_ranks)
    if trained and text_config.get("attention_dropout"):
        raise UnsupportedModelError(
            f"--sequence-parallel-size: the model drops {text_config['attention_dropout']:g} of its attention weights, "
            "which sequences that several processes share cannot",
            "Set attention_dropout to 0 in the model's config.json.",
        )


def _refuse_recurrent_layers(name: str, text: Mapping[str, Any], num_ranks: int) -> None:
    """Raise if ranks cannot share the recurrent layers of a model, from the config of its text tower."""
    if not any(text.get("model_type") in family.recurrent_types for family in FAMILIES):
        raise UnsupportedModelError(
            f"--sequence-parallel-size: sequences of a {name} model cannot be spread over several processes, "
            "for it has recurrent layers of a kind that is not known",
            "Leave the option out; --gradient-checkpointing true and --fsdp full_shard save memory, too.",
        )
    value_heads = int(text["linear_num_value_heads"])
    key_heads = int(text["linear_num_key_heads"])
    # Ranks divide the values of a gated delta net as they divide the queries of attention.
    if not Heads(queries=value_heads, keys=key_heads).can_divide_among(num_ranks):
        raise ConfigError(
            f"--sequence-parallel-size {num_ranks}: the gated delta nets of a {name} model have {value_heads} "
            f"heads of values and {key_heads} of keys, which {num_ranks} processes cannot share evenly",
            "Choose a size that divides the heads of keys.",
        )


@dataclass(frozen=True)
class Axes:
    """The chosen split of sequences over ranks.

    Args:
        ring_size: R; its ranks divide the tokens and exchange K and V.
        ulysses_size: U; its ranks divide the heads.
        kv_exchange: how the ranks of the ring axis get K and V.
        reason: a sentence for the user; not compared.
    """

    ring_size: int = 1
    ulysses_size: int = 1
    kv_exchange: KvExchange = "ring"
    reason: str = field(default="", compare=False)

    @property
    def multiple(self) -> int:
        """The multiple that the length of each document of a sequence is padded to."""
        return 2 * self.ring_size if self.ring_size > 1 else 1

    @property
    def name(self) -> str:
        """Name of the split for log lines and tables."""
        parts = [f"{self.kv_exchange} over {self.ring_size}"] * (self.ring_size > 1)
        parts += [f"ulysses over {self.ulysses_size}"] * (self.ulysses_size > 1)
        return " and ".join(parts) or "none"


def choose_axes(options: ParallelOptions, heads: Heads, *, typical_length: int, ranks_per_node: int) -> Axes:
    """Choose how ranks share a sequence: as the options request, or with ``auto`` so that they exchange the least data.

    Ranks can divide attention heads (the Ulysses axis), tokens (the ring axis), or both. On the ring axis, chunks of
    keys pass from rank to rank, or are gathered at once. Raises a ConfigError if the heads cannot be divided so,
    or if a ring would divide sliding windows.

    Args:
        heads: attention heads of the model.
        typical_length: mean tokens of a sample, where samples are weighted by their tokens.
    """
    num_ranks = options.sequence_parallel_ranks
    if num_ranks == 1:
        return Axes(reason="every rank has sequences of its own")
    requested_ulysses = _requested_ulysses_size(options)
    ulysses_sizes = _divisors(num_ranks) if requested_ulysses is None else [requested_ulysses]
    candidates = _possible_axes(options, heads, ulysses_sizes, typical_length)
    if not candidates:
        problem = _refusal(ulysses_sizes, heads, num_ranks)
        raise ConfigError(problem, "Choose a --sequence-parallel-size that divides the heads.")
    if requested_ulysses is None:
        axes, reason = _cheapest(candidates, heads, typical_length, ranks_per_node)
    else:
        (axes,) = candidates
        reason = "as asked"
    is_exchange_requested = options.sequence_parallel_type in ("ring", "allgather")
    if axes.ring_size > 1 and not is_exchange_requested:
        # ``_possible_axes`` has chosen a ring if attention to one chunk takes longer than sending the next one.
        verdict = "long enough" if axes.kv_exchange == "ring" else "too short"
        chunk_tokens = _chunk_tokens(axes, typical_length)
        reason += f"; chunks of about {chunk_tokens:,} tokens are {verdict} to hide the next one's way"
    return dataclasses.replace(axes, reason=reason)


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _possible_axes(
    options: ParallelOptions, heads: Heads, ulysses_sizes: Sequence[int], typical_length: int
) -> list[Axes]:
    """Return the axes with these Ulysses sizes that divide the heads evenly and do not cut sliding windows."""
    possible = []
    for ulysses_size in ulysses_sizes:
        axes = Axes(ring_size=options.sequence_parallel_ranks // ulysses_size, ulysses_size=ulysses_size)
        cuts_windows = heads.has_windows and axes.ring_size > 1
        if not heads.can_divide_among(ulysses_size) or cuts_windows:
            continue
        kv_exchange = options.sequence_parallel_type
        if kv_exchange not in ("ring", "allgather"):
            hides_transfer = _chunk_tokens(axes, typical_length) >= _MIN_RING_CHUNK_TOKENS
            kv_exchange = "ring" if hides_transfer else "allgather"
        possible.append(dataclasses.replace(axes, kv_exchange=kv_exchange))
    return possible


def _requested_ulysses_size(options: ParallelOptions) -> int | None:
    """Return the size of the Ulysses axis if the options determine it, else None."""
    size = options.sequence_parallel_ranks
    if options.ulysses_size is not None:
        return options.ulysses_size
    if options.ring_size is not None:
        return size // options.ring_size
    if options.sequence_parallel_type == "auto":
        return None
    return size if options.sequence_parallel_type == "ulysses" else 1


def _chunk_tokens(axes: Axes, typical_length: int) -> int:
    """Tokens of one of the 2R chunks of a document."""
    return typical_length // (2 * axes.ring_size)


def _cheapest(candidates: list[Axes], heads: Heads, typical_length: int, ranks_per_node: int) -> tuple[Axes, str]:
    """Return the candidate that sends the least, and the reason. Candidates are ordered by descending Ulysses size."""

    def volume(axes: Axes) -> float:
        return heads.volume(axes.ring_size, axes.ulysses_size, axes.kv_exchange)

    def has_small_chunks(axes: Axes) -> bool:
        return axes.ring_size > 1 and _chunk_tokens(axes, typical_length) < _MIN_CHUNK_TOKENS

    on_one_node = [axes for axes in candidates if ranks_per_node % axes.ulysses_size == 0] or candidates[-1:]
    eligible = [axes for axes in on_one_node if not has_small_chunks(axes)] or on_one_node[:1]
    volumes = ", ".join(f"{volume(axes):.3g} by {axes.name}" for axes in eligible)
    reason = f"{heads.queries} heads of Q and {heads.keys} of K and V; "
    reason += f"sent for each token and unit of head size: {volumes}"
    if len(eligible) < len(on_one_node):
        reason += f"; samples of about {typical_length:,} tokens would make chunks of less than {_MIN_CHUNK_TOKENS}"
    return min(eligible, key=lambda axes: (volume(axes), -axes.ulysses_size)), reason


def _refusal(ulysses_sizes: list[int], heads: Heads, size: int) -> str:
    """Return why none of these sizes of the Ulysses axis is possible."""
    if heads.has_windows and heads.can_divide_among(size):
        return (
            "the model has sliding windows, which only --sequence-parallel-type ulysses knows: rings of chunks would "
            "cut them"
        )
    windows = " and sliding windows, which must not be cut" if heads.has_windows else ""
    sizes = " or ".join(map(str, ulysses_sizes))
    counts = f"{heads.queries} heads of Q and {heads.keys} of K and V"
    return f"the model has {counts}{windows}: ulysses over {sizes} cannot share them evenly"
