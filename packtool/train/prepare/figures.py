"""Figures of steps over all ranks, and of a rank's micro-batch, which decide its memory."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.batch.micro_batch import MicroBatch
from packtool.planning.epoch import EpochPlan
from packtool.planning.mixture import Counts, Mixture, added, by_name, counts_of_steps, share_figures
from packtool.planning.pack_plan import Costs, PackPlan
from packtool.planning.summary import computed_tokens
from packtool.train.prepare.result import TrainResult


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimizer step over all ranks, or the sum of several.

    Args:
        units: denominator of the loss: target tokens, or samples with ``--loss-reduction sample``.
        tokens: of all samples.
        computed_tokens: of the packs, padding included: ``tokens`` over this is the fill.
        attended: sum of len^2 over samples.
        attended_dense: the same if every pack were one text.
        flops: forward and backward, by the model's sizes; 0 if they are unknown.
        hardware_flops: the same with recomputed activations.
        sources: counts of each source of a mixture.
    """

    target_tokens: int = 0
    units: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    attended: int = 0
    attended_dense: int = 0
    flops: float = 0.0
    hardware_flops: float = 0.0
    sources: Counts = field(default_factory=dict)

    def __add__(self, other: StepFigures) -> StepFigures:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return StepFigures(**sums, sources=added([self.sources, other.sources]))

    def logged(self) -> dict[str, float]:
        """The figures, by their names in a log line."""
        logged: dict[str, float] = {"target_tokens": self.target_tokens, "tokens": self.tokens}
        logged["fill"] = self.tokens / max(self.computed_tokens, 1)
        logged["efficient_attn_ratio"] = self.attended / max(self.attended_dense, 1)
        for source, figures in share_figures(self.sources).items():
            names = ("share_of_samples", "share_of_tokens", "share_of_target_tokens", "epochs")
            logged |= {f"{name}_{source}": figures[name] for name in names}
        return logged


_SUMMED = tuple(each.name for each in dataclasses.fields(StepFigures) if each.name != "sources")


@dataclass(frozen=True, eq=False)
class SampleFigures:
    """Figures of each sample of the caches, (N,) by position.

    Args:
        media_tokens, audio_tokens: placeholder tokens of all media, and of sounds.
        units: of each sample in the loss's denominator.
        flops: None if unknown.
        hardware_flops: the same with recomputed activations.
        is_seen, is_heard: whether a sample has images or videos, and sounds or videos with sound; None if unknown.
        mixture: whose sources are counted; None without one.
    """

    media_tokens: npt.NDArray[np.integer[Any]]
    audio_tokens: npt.NDArray[np.integer[Any]]
    units: npt.NDArray[np.integer[Any]]
    flops: Costs | None = None
    hardware_flops: Costs | None = None
    is_seen: npt.NDArray[np.bool_] | None = None
    is_heard: npt.NDArray[np.bool_] | None = None
    mixture: Mixture | None = None


@dataclass(frozen=True, eq=False)
class RankStep:
    """One optimizer step of one rank, before any sample is read.

    Args:
        micro_batches: of this rank, the same number on every rank.
        begin: returns the figures over all ranks; every rank calls it once, when the step is next.
    """

    micro_batches: tuple[MicroBatch, ...]
    begin: Callable[[], StepFigures]


class Steps(ABC):
    """The steps of one rank from the first one to train.

    Attributes:
        ended: True once the step that was begun last is the last one.
    """

    ended = False

    @abstractmethod
    def drawn(self) -> Iterator[RankStep]:
        """Yield the steps in order; they are drawn ahead of training."""

    def save(self, checkpoint: str, step: int) -> None:  # noqa: B027  # planned steps need nothing
        """Save what this rank needs to resume after ``step`` steps."""

    def counted(self, result: TrainResult) -> TrainResult:
        """Add counts that are only known after training to the result; every rank calls this at the end."""
        return result


def figures_of_steps(plan: EpochPlan, samples: SampleFigures, *, is_dynamic: bool) -> Iterator[StepFigures]:
    """The figures of every step of an epoch; with ``is_dynamic``, unpacked micro-batches have no padding."""
    packs, steps = plan.packs, plan.steps
    tokens = packs.tokens_per_pack()
    if plan.placement is not None and plan.summary.skrull is not None:
        alignment = plan.summary.skrull.options.alignment
        computed = steps.sums_per_step(computed_tokens(packs, steps, plan.placement, alignment))
    elif plan.summary.options.packing:
        computed = steps.sums_per_step(np.full(packs.num_packs, packs.capacity))
    elif is_dynamic:
        computed = steps.sums_per_step(tokens)
    else:
        computed = _padded(plan)
    columns: tuple[npt.NDArray[Any], ...] = (
        steps.target_tokens_per_step,
        units_per_step(plan, samples),
        steps.sums_per_step(tokens),
        computed,
        steps.sums_per_step(packs.sum_squares_per_pack()),
        steps.sums_per_step(np.square(tokens.astype(np.int64))),
        steps.sums_per_step(_flops_of(packs, samples.flops)),
        steps.sums_per_step(_flops_of(packs, samples.hardware_flops)),
    )
    mixture = samples.mixture
    sources: Iterable[Counts] = repeat({}, steps.num_steps)
    if mixture is not None:
        sources = (by_name(counts, mixture) for counts in counts_of_steps(packs, steps, mixture))
    for *numbers, own in zip(*(column.tolist() for column in columns), sources, strict=True):
        yield dataclasses.replace(StepFigures(*numbers), sources=own)


def units_per_step(plan: EpochPlan, samples: SampleFigures) -> npt.NDArray[np.int64]:
    """The denominator of the loss of each step, over all ranks, (S,)."""
    packs = plan.packs
    units: npt.NDArray[np.int64] = plan.steps.sums_per_step(packs.sums_per_pack(samples.units[packs.samples]))
    return units


def _flops_of(packs: PackPlan, flops: Costs | None) -> Costs:
    if flops is None or not packs.num_packs:
        return np.zeros(packs.num_packs)
    return np.add.reduceat(flops[packs.samples], packs.offsets[:-1])


def _padded(plan: EpochPlan) -> npt.NDArray[np.int64]:
    """Tokens that every step's rows have, each padded to the longest of its micro-batch, (S,)."""
    steps = plan.steps
    sizes = steps.cell_sizes()
    longest = np.zeros(len(sizes), np.int64)
    lengths = plan.packs.tokens_per_pack()[steps.order]
    longest[sizes > 0] = np.maximum.reduceat(lengths, steps.cell_offsets[:-1][sizes > 0])
    before = np.concatenate(([0], np.cumsum(longest * sizes)))
    return np.diff(before[steps.step_offsets])


@dataclass(frozen=True, kw_only=True)
class RankTokens:
    """Tokens of a rank's micro-batch.

    Args:
        computed: by the language model.
        vision: of them, placeholders of images and videos.
        audio: of them, placeholders of sounds.
        num_local_vision_tokens: of pictures and videos that this rank encodes, where ranks share a sequence; None:
            ``vision``.
        num_local_audio_tokens: of sounds that it encodes; None: ``audio``.
        keys: that documents see, those of shared prefixes once for each; 0 where nothing is shared.
    """

    computed: int
    vision: int = 0
    audio: int = 0
    num_local_vision_tokens: int | None = None
    num_local_audio_tokens: int | None = None
    keys: int = 0

    @property
    def local_vision(self) -> int:
        """Tokens of pictures and videos that this rank's vision tower computes."""
        return self.vision if self.num_local_vision_tokens is None else self.num_local_vision_tokens

    @property
    def local_audio(self) -> int:
        """Tokens of sounds that this rank's audio tower computes."""
        return self.audio if self.num_local_audio_tokens is None else self.num_local_audio_tokens

    def within(self, computed: int) -> RankTokens:
        """A micro-batch of ``computed`` tokens with as many of each kind, at least one of them text."""
        audio = min(self.audio, computed - 1)
        return dataclasses.replace(self, computed=computed, audio=audio, vision=min(self.vision, computed - 1 - audio))

    def scaled(self, computed: int) -> RankTokens:
        """A micro-batch of ``computed`` tokens with as many of each kind in proportion."""
        share = computed / self.computed
        values = {name: value for name, value in vars(self).items() if value is not None}
        return RankTokens(**{name: math.ceil(share * value) for name, value in values.items()} | {"computed": computed})

    def holds_at_most(self, other: RankTokens) -> bool:
        """Return whether ``other`` has at least as many of every kind."""
        mine, theirs = ((t.computed, t.vision, t.audio, t.local_vision, t.local_audio, t.keys) for t in (self, other))
        return all(a <= b for a, b in zip(mine, theirs, strict=True))
