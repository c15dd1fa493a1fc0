"""Figures of steps over all ranks; lengths of micro-batches, and the peak-memory micro-batch of a rank."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.batch.micro_batch import MicroBatch
from packtool.cache.reader import SplitIndex
from packtool.config.model import LearningOptions
from packtool.config.train import TrainConfig
from packtool.encode.families import family_of, thinker_of
from packtool.planning.epoch import EpochPlan
from packtool.planning.mixture import Counts, Mixture, added, by_name, counts_of_steps, share_figures
from packtool.planning.pack_plan import Costs, Int64Array, PackPlan
from packtool.planning.summary import computed_tokens
from packtool.planning.tower_layers import vision_patches
from packtool.planning.towers import Media, MediaShares
from packtool.rows.sample import MediaKind
from packtool.train.prepare.costs import cost_of
from packtool.train.prepare.inputs import Inputs


@dataclass(frozen=True)
class StepFigures:
    """Figures of one optimizer step over all ranks, or the sum of several.

    Args:
        units: denominator of the loss: target tokens, or samples with ``--loss-reduction sample``.
        computed_tokens: of the packs, padding included: ``tokens`` over this is the fill.
        attended: sum of len^2 over samples.
        attended_dense: the same if every pack were one text.
        flops: forward and backward, by the model's sizes; 0 if they are unknown.
        hardware_flops: the same with recomputed activations.
    """

    target_tokens: int = 0
    samples: int = 0
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

    def with_recomputed(self, share: float) -> StepFigures:
        """Return the figures if only a share of the layers' activations is recomputed."""
        return dataclasses.replace(self, hardware_flops=self.flops + share * (self.hardware_flops - self.flops))

    def logged(self) -> dict[str, float]:
        """The figures, by their names in a log line."""
        logged: dict[str, float] = {"target_tokens": self.target_tokens, "tokens": self.tokens}
        logged["samples"] = self.samples
        logged["fill"] = self.tokens / max(self.computed_tokens, 1)
        logged["efficient_attn_ratio"] = self.attended / max(self.attended_dense, 1)
        for source, figures in share_figures(self.sources).items():
            names = ("share_of_samples", "share_of_tokens", "share_of_target_tokens", "epochs")
            logged |= {f"{name}_{source}": figures[name] for name in names}
        return logged


_SUMMED = tuple(each.name for each in dataclasses.fields(StepFigures) if each.name != "sources")


@dataclass(frozen=True, eq=False)
class SampleFigures:
    """Figures of each sample of the caches, arrays (N,) by position.

    Args:
        units: contribution of a sample to the loss's denominator (``StepFigures.units``).
        hardware_flops: ``flops`` with recomputed activations.
        has_vision, has_sound: whether a sample has images or videos, and sounds or videos with sound.
    """

    media_tokens: npt.NDArray[np.integer[Any]]
    units: npt.NDArray[np.integer[Any]]
    flops: Costs | None = None
    hardware_flops: Costs | None = None
    has_vision: npt.NDArray[np.bool_] | None = None
    has_sound: npt.NDArray[np.bool_] | None = None
    mixture: Mixture | None = None


@dataclass(frozen=True, eq=False)
class RankStep:
    """One optimizer step of one rank, before any sample is read.

    Every rank has as many ``micro_batches``. ``begin`` returns the figures over all ranks; every rank calls it once,
    when the step is next.
    """

    micro_batches: tuple[MicroBatch, ...]
    begin: Callable[[], StepFigures]


class Steps(ABC):
    """Optimizer steps of a rank from the first to train; ``ended``: the step begun last is the last of the run."""

    ended = False

    @abstractmethod
    def rank_steps(self) -> Iterator[RankStep]:
        """Yield the steps in order; the data workers read them ahead of training."""

    def save(self, checkpoint: str, step: int) -> None:  # noqa: B027  # planned steps need nothing
        """Save this rank's position in the data after ``step`` steps, for resuming."""

    def final_counts(self) -> dict[str, Any]:
        """The fields of a ``TrainResult`` that are only known after training; every rank calls this at the end."""
        return {}


def figures_of_steps(plan: EpochPlan, samples: SampleFigures, *, is_dynamic: bool) -> Iterator[StepFigures]:
    """Yield the figures of every step of an epoch, in order; with ``is_dynamic``, unpacked samples are not padded."""
    steps, mixture = plan.steps, samples.mixture
    columns = _figure_columns(plan, samples, is_dynamic=is_dynamic)
    lists = {name: column.tolist() for name, column in columns.items()}
    source_counts: Iterable[Counts] = repeat({}, steps.num_steps)
    if mixture is not None:
        source_counts = (by_name(counts, mixture) for counts in counts_of_steps(plan.packs, steps, mixture))
    for step, sources in enumerate(source_counts):
        values = {name: column[step] for name, column in lists.items()}
        yield StepFigures(**values, sources=sources)


def _figure_columns(plan: EpochPlan, samples: SampleFigures, *, is_dynamic: bool) -> dict[str, npt.NDArray[Any]]:
    """The values of each step, (S,), by field of ``StepFigures``, without its ``sources``."""
    packs, steps = plan.packs, plan.steps
    tokens_per_pack = packs.tokens_per_pack()
    return {
        "target_tokens": steps.target_tokens_per_step,
        "samples": steps.sums_per_step(np.diff(packs.offsets)),
        "units": units_per_step(plan, samples),
        "tokens": steps.sums_per_step(tokens_per_pack),
        "computed_tokens": _computed_tokens_per_step(plan, is_dynamic),
        "attended": steps.sums_per_step(packs.sum_squares_per_pack()),
        "attended_dense": steps.sums_per_step(np.square(tokens_per_pack.astype(np.int64))),
        "flops": _flops_per_step(plan, samples.flops),
        "hardware_flops": _flops_per_step(plan, samples.hardware_flops),
    }


def _flops_per_step(plan: EpochPlan, sample_flops: Costs | None) -> npt.NDArray[Any]:
    """Sums of the FLOPs of the samples of each step, float (S,); zeros if they are unknown."""
    packs, steps = plan.packs, plan.steps
    if sample_flops is None or not packs.num_packs:
        return np.zeros(steps.num_steps)
    return steps.sums_per_step(np.add.reduceat(sample_flops[packs.samples], packs.offsets[:-1]))


def _computed_tokens_per_step(plan: EpochPlan, is_dynamic: bool) -> npt.NDArray[Any]:
    """Tokens that each step computes on all ranks, padding included, (S,)."""
    packs, steps, summary = plan.packs, plan.steps, plan.summary
    if plan.placement is not None and summary.skrull is not None:
        alignment = summary.skrull.options.alignment
        return steps.sums_per_step(computed_tokens(packs, steps, plan.placement, alignment))
    if summary.options.packing:
        return steps.sums_per_step(np.full(packs.num_packs, packs.capacity))
    if is_dynamic:
        return steps.sums_per_step(packs.tokens_per_pack())
    return _padded_tokens_per_step(plan)


def _padded_tokens_per_step(plan: EpochPlan) -> npt.NDArray[Any]:
    """Tokens of each step without packing, (S,): each sample is padded to the longest one of its micro-batch."""
    steps = plan.steps
    sample_lengths = plan.packs.tokens_per_pack()  # a pack is one sample
    num_samples = steps.micro_batch_sizes()
    longest = np.zeros(len(num_samples), np.int64)
    # ``reduceat`` has no result for empty micro-batches, so their longest sample stays 0.
    is_filled = num_samples > 0
    first_samples = steps.micro_batch_offsets[:-1]
    longest[is_filled] = np.maximum.reduceat(sample_lengths[steps.order], first_samples[is_filled])
    # Differences of running sums at the bounds of steps are the sums over the micro-batches of each step.
    running_sums = np.concatenate(([0], np.cumsum(longest * num_samples)))
    return np.diff(running_sums[steps.step_offsets])


def units_per_step(plan: EpochPlan, samples: SampleFigures) -> npt.NDArray[np.int64]:
    """The denominator of the loss of each step, over all ranks, (S,)."""
    packs = plan.packs
    units: npt.NDArray[np.int64] = plan.steps.sums_per_step(packs.sums_per_pack(samples.units[packs.samples]))
    return units


@dataclass(frozen=True, kw_only=True)
class RankTokens:
    """Numbers of tokens in a rank's micro-batch, which decide its memory.

    Args:
        computed: all tokens that the language model computes.
        vision: of these, placeholders of images and videos.
        audio: of these, placeholders of audio.
        num_local_vision_tokens: tokens of images and videos that this rank's tower encodes, where ranks share a
            sequence; None: ``vision``.
        num_local_audio_tokens: tokens of audio that it encodes; None: ``audio``.
        keys: attention keys of all documents, where those of a shared prefix count for each; 0 without shared prefixes.
    """

    computed: int
    vision: int = 0
    audio: int = 0
    num_local_vision_tokens: int | None = None
    num_local_audio_tokens: int | None = None
    keys: int = 0

    @property
    def local_vision(self) -> int:
        return self.vision if self.num_local_vision_tokens is None else self.num_local_vision_tokens

    @property
    def local_audio(self) -> int:
        return self.audio if self.num_local_audio_tokens is None else self.num_local_audio_tokens

    def within(self, computed: int) -> RankTokens:
        """A micro-batch of ``computed`` tokens with these media, cut to leave at least one token of text."""
        audio = min(self.audio, computed - 1)
        return dataclasses.replace(self, computed=computed, audio=audio, vision=min(self.vision, computed - 1 - audio))

    def scaled(self, computed: int) -> RankTokens:
        """A micro-batch of ``computed`` tokens with the same share of each kind, rounded up."""
        ratio = computed / self.computed
        values = {name: value for name, value in vars(self).items() if value is not None}
        return RankTokens(**{name: math.ceil(ratio * value) for name, value in values.items()} | {"computed": computed})

    def is_at_most(self, other: RankTokens) -> bool:
        """Return whether ``other`` has at least as many tokens of every kind."""
        names = ("computed", "vision", "audio", "local_vision", "local_audio", "keys")
        return all(getattr(self, name) <= getattr(other, name) for name in names)


NO_MEDIA = RankTokens(computed=0)

NUM_LENGTHS = 8
"""The number of lengths up to a full micro-batch, which most packs nearly are; one with fillers may have one more."""

_ALIGNED = 16
"""Lengths are multiples of it, for matrix products on GPUs."""

_FILLERS: dict[MediaKind, int] = {"image": 3, "audio": 1}
"""Tokens of filler documents, which let a tower run where no sample has media for it (``batch.collate``)."""


def length_step(num_tokens: int) -> int:
    """The multiple of tokens that compiled micro-batches of up to ``num_tokens`` are padded to."""
    return -(-num_tokens // (NUM_LENGTHS * _ALIGNED)) * _ALIGNED


def max_tokens(config: TrainConfig, sequence_parallel_size: int) -> int:
    """Maximum tokens of a micro-batch on one process, without fillers, by the packing length of ``config``."""
    if config.bucket_tokens is not None:
        return config.bucket_tokens
    packs = (config.packing_length or config.max_length or 0) * config.per_device_train_batch_size
    return -(-(config.dynamic_batch_tokens or packs) // sequence_parallel_size)


def num_fillers(kinds: Sequence[MediaKind]) -> int:
    """Tokens of the filler documents for these kinds of media (``_FILLERS``)."""
    return sum(number for kind, number in _FILLERS.items() if kind in kinds)


def media_of_caches(index: SplitIndex, model: Mapping[str, Any]) -> Media:
    """The images, videos and audio of all samples of the caches, for a model with this ``config.json``."""
    patches = vision_patches(thinker_of(model))
    media = Media.of_samples(
        index.vision_tokens,
        index.patch_squares,
        index.num_images,
        index.num_videos,
        patches_per_token=max(patches.num_patches // patches.num_tokens, 1),
    )
    if patches.tile_squares:  # squares of tiles are no squares of pictures; the cost model estimates tiles by tokens
        media = dataclasses.replace(media, squares=np.zeros(len(media.squares)))
    return media.with_sounds(index.audio_tokens, index.num_audios, index.num_videos)


def media_added(media: Media, inputs: Inputs, plan: EpochPlan) -> Media:
    """The media that each sample adds to its shared prefix; each medium is scaled to the share that is left."""
    shared, reader = inputs.shared_in(plan.packs), inputs.reader
    if shared is None or reader is None:
        return media
    scale = (shared.media_tokens / np.maximum(reader.index.media_tokens, 1))[media.samples]
    tokens, squares, sounds = (scale * values for values in (media.tokens, media.squares, media.sounds))
    return dataclasses.replace(media, tokens=tokens, squares=squares, sounds=sounds)


def assign_media(media: Media, model: Mapping[str, Any], plan: EpochPlan, size: int) -> MediaShares:
    """Assign the media of an epoch to the ``size`` ranks that share a sequence, by the FLOPs of the towers."""
    work = cost_of(model, LearningOptions()).towers(media.tokens, media.squares, media.sounds)
    return MediaShares.of_plan(media, work, plan.packs, plan.steps, size, plan.placement)


def peak_memory_batches(
    config: TrainConfig, plan: EpochPlan, inputs: Inputs, shares: MediaShares | None = None
) -> tuple[RankTokens, ...]:
    """Return micro-batches that need at least as much memory on a rank as any micro-batch of the plan.

    They are of maximum length, with the maximum tokens of each kind (images and videos, audio) in any micro-batch.
    ``shares`` assigns media to ranks that share sequences; computed here if None.
    """
    reader = inputs.reader
    if reader is None:  # a file of lengths has no media
        return longest_micro_batches(config, inputs.model, NO_MEDIA)

    tokens_by_kind = tokens_per_micro_batch(plan, inputs)
    max_tokens_by_kind = {kind: int(tokens.max(initial=0)) for kind, tokens in tokens_by_kind.items()}
    max_tokens = RankTokens(**max_tokens_by_kind)
    num_sharing = config.sequence_parallel_ranks  # ranks that share a sequence
    if num_sharing > 1:
        if shares is None:
            media = media_added(media_of_caches(reader.index, inputs.model), inputs, plan)
            shares = assign_media(media, inputs.model, plan, num_sharing)
        max_tokens = _with_encoded_media(max_tokens, shares)
    return longest_micro_batches(config, inputs.model, max_tokens)


def _with_encoded_media(tokens: RankTokens, shares: MediaShares) -> RankTokens:
    """Add the most media tokens that one of the ranks that share a micro-batch encodes."""
    max_vision = shares.max_per_rank(shares.media.tokens).max(initial=0)
    max_audio = shares.max_per_rank(shares.media.sounds).max(initial=0)
    return dataclasses.replace(
        tokens,
        # Sums of floats may be slightly above an integer, which must not be rounded up.
        num_local_vision_tokens=math.ceil(max_vision - 1e-6),
        num_local_audio_tokens=math.ceil(max_audio - 1e-6),
    )


def tokens_per_micro_batch(plan: EpochPlan, inputs: Inputs) -> dict[str, Costs]:
    """Tokens of each kind by the names of ``RankTokens``, arrays (C,) of all micro-batches, without padding."""
    assert inputs.reader is not None, "a plan of caches"
    packs, steps = plan.packs, plan.steps
    # With shared prefixes, a sample has only the media that it adds to its prefix.
    media = inputs.shared_in(packs) or inputs.reader.index
    audio_per_pack = packs.sums_per_pack(media.audio_tokens[packs.samples])
    media_per_pack = packs.sums_per_pack(media.media_tokens[packs.samples])
    per_pack = {
        "computed": packs.tokens_per_pack(),
        "vision": media_per_pack - audio_per_pack,
        "audio": audio_per_pack,
        "keys": np.zeros(packs.num_packs, np.int64) if packs.shared_tokens is None else max_keys_per_pack(packs),
    }
    return {name: steps.micro_batch_sums(tokens) for name, tokens in per_pack.items()}


def longest_micro_batches(config: TrainConfig, model: Mapping[str, Any], media: RankTokens) -> tuple[RankTokens, ...]:
    """The longest micro-batch with the tokens of ``media``; and, if it is longer, the longest one with fillers.

    Fillers are documents of a few tokens that replace missing media; ``media.computed`` is not used.
    """
    longest = with_fillers = max_tokens(config, config.sequence_parallel_ranks)
    if config.torch_compile:  # compiled micro-batches are padded to multiples of ``multiple``
        multiple = length_step(longest)
        with_fillers = math.ceil((longest + num_fillers(family_of(model).kinds)) / multiple) * multiple
        longest = math.ceil(longest / multiple) * multiple
    longest, with_fillers = max(longest, 2), max(with_fillers, 2)
    full = media.within(longest)
    return (full,) if with_fillers == longest else (full, RankTokens(computed=with_fillers, keys=full.keys))


def max_keys_per_pack(packs: PackPlan) -> Int64Array:
    """Upper bound of the attention keys of all documents of each pack with shared prefixes, int64 (K,).

    A document is a node of a prefix tree, and its keys reach from the root to its end. Each sample is a node, and n
    samples with a common prefix may have n - 1 forks: collation compares tokens and may find more than the plan has.
    """
    assert packs.shared_tokens is not None, "packs with shared prefixes"
    return packs.sums_per_pack(packs.full_lengths) + packs.sums_per_pack(packs.shared_tokens)
