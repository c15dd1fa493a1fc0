"""Samples of an epoch drawn from several sources: which samples, and how often.

    source   samples   requested   epoch 0                epoch 1
    a        5         #2.5x       0 1 2 3 4 0 1 2 3 4 1 3  0 1 2 3 4 0 1 2 3 4 0 4
    b        6         #50%        5 7 10                 6 8 9

An epoch has a fixed number of *slots*, each with a maximum length. Slots are packed, so that every epoch has as many
packs as the first; a draw then fills them with samples. Full copies of a source have one slot per sample. For the
remaining fraction a slot draws one of a few samples of similar length, so samples are drawn equally often. With
training counts of earlier stages (``trained``) it takes the least trained samples first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.config.mixture import MAX_AMOUNT, MixUnit, Recipe, SourceRecipe, check_drawn
from packtool.errors import DataError
from packtool.planning.pack_plan import Int32Array, Int64Array, IntArray, PackPlan, digest_arrays, to_offsets
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform
from packtool.planning.steps import StepPlan

_MIN_NEIGHBORS, _MAX_NEIGHBORS = 4, 64
_CHUNKS_PER_SOURCE = 500
_UNITS: tuple[MixUnit, ...] = ("samples", "tokens", "target_tokens")


@dataclass(frozen=True, eq=False)
class Slots:
    """M slots of an epoch, sources interleaved evenly: the order of samples without shuffling.

    Each is int32 (M,): maximum tokens and media tokens of a slot's sample, and its source.
    """

    lengths: Int32Array
    media_tokens: Int32Array
    sources: Int32Array


class _Selection(NamedTuple):
    """Samples of a source: ``fixed`` are in every epoch, and may repeat; ``num_drawn`` are drawn from the ``pool``."""

    fixed: Int64Array
    pool: Int64Array
    num_drawn: int


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources of an epoch, S of them, and the number of samples of each.

    Args:
        offsets: int64 (S + 1,), first sample of each source among those of all caches.
        candidates: samples of each source that may be drawn, int64 (n,), ascending.
        counts: samples that an epoch draws from each source, repeated ones counted.
        lengths, media_tokens, target_tokens: (N,), of the samples of all caches.
        unit: that the order of packs balances.
        resample: every epoch draws anew.
        num_filtered: samples that are too long, or excluded by the limits of their source.
        trained: earlier training count of each sample, (N,): the least trained are drawn first. None to ignore it.
        loss_scales: that choose the targets of sources; empty if the recipe has none.
    """

    names: tuple[str, ...]
    offsets: Int64Array
    candidates: tuple[Int64Array, ...]
    counts: tuple[int, ...]
    lengths: IntArray
    media_tokens: IntArray
    target_tokens: IntArray
    unit: MixUnit
    resample: bool
    seed: int
    num_filtered: int
    loss_weights: tuple[float, ...]
    trained: Int64Array | None = None
    loss_scales: tuple[str | None, ...] = ()

    @property
    def num_drawn(self) -> int:
        return sum(self.counts)

    @property
    def draws_one_source(self) -> bool:
        return max(self.counts) == self.num_drawn

    @property
    def varies(self) -> bool:
        """True if epochs have different samples."""
        return self.resample and any(selection.num_drawn for selection in self._selections)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over everything that affects the draws, the targets and the weights of losses."""
        words = f"packtool mixture 1 {self.unit} {self.resample} {self.seed} {self.counts} {self.loss_weights}\n"
        words += f"{self.loss_scales}\n" if self.loss_scales else ""
        trained = () if self.trained is None else (self.trained,)
        return digest_arrays(hashlib.sha256(words.encode()), self.offsets, *self.candidates, *trained)

    def partial_epoch(self, share: float, trained: Int64Array) -> Mixture:
        """Return a ``share``, 0 to 1, of an epoch, with the samples that ``trained`` (N,) counts least often."""
        counts = tuple(max(round(count * share), min(count, 1)) for count in self.counts)
        candidates = self.candidates
        if not self.resample:
            candidates = tuple(np.unique(self._draw_source(source, 0)) for source in range(len(self.counts)))
        return dataclasses.replace(self, counts=counts, candidates=candidates, trained=trained)

    def source_of(self, samples: Int64Array) -> Int64Array:
        """Return the source of each sample (n,), given by its position in the caches."""
        return np.searchsorted(self.offsets, samples, side="right") - 1

    def amounts(self, samples: Int64Array) -> IntArray:
        """Return the amount of each sample (n,) in ``unit``: 1, its tokens, or its target tokens."""
        if self.unit == "samples":
            return np.ones(len(samples), np.int64)
        return (self.lengths if self.unit == "tokens" else self.target_tokens)[samples]

    @cached_property
    def slots(self) -> Slots:
        """Slots, the same in every epoch."""
        columns = zip(*(self._slots_of(source) for source in range(len(self.counts))), strict=True)
        lengths, media = (np.concatenate(column)[self._interleaved].astype(np.int32) for column in columns)
        sources = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)[self._interleaved]
        return Slots(lengths, media, sources)

    def draw(self, epoch: int) -> Int64Array:
        """Draw the samples of an epoch, positions in the caches, by slot; int64 (M,). Samples may repeat."""
        return self._draw(epoch)[self._interleaved]

    def epoch_counts(self, epoch: int, trained: Int64Array) -> Int64Array:
        """Return how often an epoch has each sample, (N,), if it trained ``trained``, (N,), before its data changed.

        For each trained sample that this mixture does not draw, one that it draws from the same source is left out.
        """
        counts = np.bincount(self.draw(epoch), minlength=len(trained))
        num_untrained = np.maximum(counts - trained, 0)
        for source, (start, stop) in enumerate(pairwise(self.offsets.tolist())):
            num_to_train = max(self.counts[source] - int(trained[start:stop].sum()), 0)
            num_to_leave_out = int(num_untrained[start:stop].sum()) - num_to_train
            if num_to_leave_out > 0:
                # Only samples drawn from the pool are left out, which are distinct; every epoch has the fixed ones.
                fixed = self._selections[source].fixed
                drawn_from_pool = self._draw_source(source, epoch)[len(fixed) :]
                untrained = drawn_from_pool[num_untrained[drawn_from_pool] > 0]
                counts[self._spaced_by_length(untrained, num_to_leave_out)] -= 1
        return counts

    def _spaced_by_length(self, samples: Int64Array, max_samples: int) -> Int64Array:
        """Select up to ``max_samples`` of the samples, evenly spaced in the order of their lengths."""
        num_selected = min(max_samples, len(samples))
        longest_first = samples[self._by_length(samples)]
        evenly_spaced = np.arange(num_selected) * len(samples) // max(num_selected, 1)
        return longest_first[evenly_spaced]

    @cached_property
    def _interleaved(self) -> Int64Array:
        """(M,): order of slots, given source after source, that interleaves the sources evenly."""
        first_epoch, offsets, times = self._draw(0), to_offsets(np.array(self.counts)), np.empty(self.num_drawn)
        for source, (start, stop) in enumerate(pairwise(offsets.tolist())):
            num_fixed = len(self._selections[source].fixed)
            drawn = num_fixed + np.argsort(first_epoch[start + num_fixed : stop], kind="stable")
            order = np.concatenate((np.arange(num_fixed), drawn))
            times[start + order] = (np.arange(len(order)) + 0.5) / max(len(order), 1)
        return np.argsort(times, kind="stable").astype(np.int64, copy=False)

    def _draw(self, epoch: int) -> Int64Array:
        return np.concatenate([self._draw_source(source, epoch) for source in range(len(self.counts))])

    def _draw_source(self, source: int, epoch: int) -> Int64Array:
        """Draw a source's samples of an epoch: the fixed ones, then some of its pool.

        The pool is sorted by length, shuffled among neighbors, and drawn from at equal steps.
        """
        epoch = epoch if self.resample else 0
        fixed, pool, num_drawn = self._selections[source]
        if not num_drawn:
            return fixed
        num, stream = len(pool), RandomStream.MIX_NEIGHBOURS + source
        chunks = np.arange(num) // _num_neighbors(num)
        within_chunks = seeded_order(num, seed=self.seed, epoch=epoch, stream=stream, descending_by=chunks[-1] - chunks)
        shuffled = self._by_length(pool)[within_chunks]
        begin = int(seeded_uniform(1, seed=self.seed, epoch=epoch, stream=RandomStream.MIX_START + source)[0] * num)
        # Steps of num / num_drawn, which is 1 or more: no sample twice.
        return np.concatenate((fixed, pool[shuffled[(np.arange(num_drawn) * num + begin) // num_drawn]]))

    def _slots_of(self, source: int) -> tuple[IntArray, IntArray]:
        """Return the maximum lengths and media tokens of a source's slots, in the order of ``_draw_source``."""
        fixed, pool, num_drawn = self._selections[source]
        lengths, media = self.lengths[fixed], self.media_tokens[fixed]
        if not num_drawn:
            return lengths, media
        num, by_length = len(pool), pool[self._by_length(pool)]
        chunk_size = _num_neighbors(num)
        first_chunk = np.arange(num_drawn) * num // num_drawn // chunk_size
        last_chunk = np.minimum((np.arange(1, num_drawn + 1) * num - 1) // num_drawn, num - 1) // chunk_size
        # Maximum over the chunks, from first to last, that a slot may draw from; lengths fall from chunk to chunk.
        chunk_media = np.maximum.reduceat(self.media_tokens[by_length], np.arange(0, num, chunk_size))
        bounds = np.stack((first_chunk, last_chunk + 1), axis=1).reshape(-1)
        slot_media = np.maximum.reduceat(np.append(chunk_media, 0), bounds)[::2]
        slot_lengths = self.lengths[by_length][first_chunk * chunk_size]
        return np.concatenate((lengths, slot_lengths)), np.concatenate((media, slot_media))

    @cached_property
    def _selections(self) -> tuple[_Selection, ...]:
        """Samples of each source that every epoch has, or that are drawn."""
        selections = []
        for pool, count in zip(self.candidates, self.counts, strict=True):
            copies, num_drawn = divmod(count, max(len(pool), 1))
            fixed = np.tile(pool, copies)
            if self.trained is not None and num_drawn:
                # Samples with the lowest training counts are taken, and those with the next count drawn from.
                trained = self.trained[pool]
                levels, sizes = np.unique(trained, return_counts=True)
                ends = np.cumsum(sizes)
                level = int(np.searchsorted(ends, num_drawn, side="right"))
                fixed = np.concatenate((fixed, pool[trained < levels[level]]))
                pool, num_drawn = pool[trained == levels[level]], num_drawn - int(ends[level] - sizes[level])
            selections.append(_Selection(fixed, pool, num_drawn))
        return tuple(selections)

    def _by_length(self, samples: Int64Array) -> Int64Array:
        """Order samples by length, the longest first."""
        return np.argsort(-self.lengths[samples], kind="stable").astype(np.int64, copy=False)


def _num_neighbors(num: int) -> int:
    """Return the number of samples of similar length that are exchanged before some are drawn."""
    return min(max(num // _CHUNKS_PER_SOURCE, _MIN_NEIGHBORS), _MAX_NEIGHBORS)


def make_mixture(
    recipe: Recipe,
    offsets: Int64Array,
    lengths: IntArray,
    media_tokens: IntArray,
    target_tokens: IntArray,
    *,
    max_length: int,
    seed: int,
) -> Mixture:
    """Decide how many samples of each source an epoch draws, and which samples it may draw.

    A source is a cache that ``recipe`` names. Longer samples than ``max_length``, and those outside the limits of
    their source, are not drawn. A source left without samples is a DataError.

    Args:
        offsets: the samples of source s are numbered ``offsets[s]`` to ``offsets[s + 1] - 1``, (S + 1,).
        lengths, media_tokens, target_tokens: tokens, those of media, and those that carry loss, of the samples of all
            sources, (N,).
    """
    candidates = _candidates(recipe, offsets, lengths, max_length)
    source_sizes = zip(recipe.sources, np.diff(offsets).tolist(), strict=True)
    num_taken = sum(size for source, size in source_sizes if source.is_taken)
    num_candidates = sum(len(samples) for samples in candidates)
    sample_sizes = {"samples": np.ones_like(lengths), "tokens": lengths, "target_tokens": target_tokens}
    counts = _count_draws(recipe, candidates, sample_sizes[recipe.unit])
    check_drawn(sum(counts), num_candidates, recipe.place or "an epoch")  # an error names the recipe, if it has a file
    loss_scales = tuple(source.loss_scale for source in recipe.sources)
    if all(scale is None for scale in loss_scales):
        loss_scales = ()
    return Mixture(
        names=_names(recipe.sources),
        offsets=offsets.astype(np.int64),
        candidates=tuple(candidates),
        counts=counts,
        lengths=lengths,
        media_tokens=media_tokens,
        target_tokens=target_tokens,
        unit=recipe.unit,
        resample=recipe.resample,
        seed=seed,
        num_filtered=num_taken - num_candidates,
        loss_weights=tuple(source.loss_weight for source in recipe.sources),
        loss_scales=loss_scales,
    )


def _candidates(recipe: Recipe, offsets: Int64Array, lengths: IntArray, max_length: int) -> list[Int64Array]:
    """Return the samples that may be drawn from each source; none of sources that are not taken."""
    candidates: list[Int64Array] = []
    for source, (start, stop) in zip(recipe.sources, pairwise(offsets.tolist()), strict=True):
        if source.is_taken:
            candidates.append(start + _allowed_samples(source, lengths[start:stop], max_length, recipe.place))
        else:
            candidates.append(np.zeros(0, np.int64))
    return candidates


def _allowed_samples(source: SourceRecipe, lengths: IntArray, max_length: int, recipe_name: str) -> Int64Array:
    """Return the samples within a source's limits, int64 (n,), from 0, by their ``lengths``; none is a DataError."""
    shortest = source.min_length or 0
    longest = min(max_length, source.max_length or max_length)
    is_allowed = (lengths <= longest) & (lengths >= shortest)
    allowed = np.flatnonzero(is_allowed).astype(np.int64)
    if not len(allowed):
        raise DataError(
            f"{recipe_name}: no samples remain of {source.path}: none of its {len(lengths):,} samples has "
            f"{source.min_length or 1:,} to {longest:,} tokens.",
            "Remove the source, or allow other lengths (--max-length, or the recipe's min_length and max_length).",
        )
    return allowed


def _count_draws(recipe: Recipe, candidates: list[Int64Array], sample_sizes: IntArray) -> tuple[int, ...]:
    """Compute the number of samples that an epoch draws from each source, by its amount (by default all) or weight.

    ``sample_sizes``, (N,), are of the samples of all caches: 1, tokens or target tokens.
    """
    num_candidates = [len(samples) for samples in candidates]
    if not recipe.has_weights:
        counts = []
        for source, num in zip(recipe.sources, num_candidates, strict=True):
            counts.append(num if source.amount is None else source.amount.of(num))
        return tuple(counts)
    source_sizes = np.array([sample_sizes[samples].sum(dtype=np.int64) for samples in candidates], float)
    _check_sizes(recipe, source_sizes)
    times_drawn = _times_drawn(recipe, source_sizes)  # (S,)
    num_drawn = np.rint(np.minimum(times_drawn * num_candidates, MAX_AMOUNT))  # check_drawn refuses more
    min_drawn = np.minimum(num_candidates, 1)  # at least one sample of each source that is not empty
    return tuple(np.maximum(num_drawn, min_drawn).astype(np.int64).tolist())


def _times_drawn(recipe: Recipe, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Compute how often an epoch draws each source, (S,), from their ``sizes`` in the recipe's unit and their weights.

    The epoch ends when the first, or the last, source has been drawn completely: that source is drawn once.
    """
    is_taken = np.array([source.is_taken for source in recipe.sources])
    if recipe.temperature is not None:
        weights = sizes ** (1 / recipe.temperature)
    else:
        weights = np.array([source.weight or 1.0 for source in recipe.sources], float)
    sizes_per_weight = sizes[is_taken] / weights[is_taken]
    end = sizes_per_weight.min() if recipe.stop == "first" else sizes_per_weight.max()
    times_drawn = np.zeros(len(sizes))
    times_drawn[is_taken] = end / sizes_per_weight
    return times_drawn


def _check_sizes(recipe: Recipe, sizes: npt.NDArray[np.float64]) -> None:
    """Check that each source that is taken has a size, in the recipe's unit, above 0."""
    for source, size in zip(recipe.sources, sizes.tolist(), strict=True):
        if source.is_taken and size == 0:
            raise DataError(
                f"{recipe.place}: {source.path} has no {recipe.unit.replace('_', ' ')}, so it cannot be weighted by "
                "them.",
                "Remove the source, or weight it in another unit.",
            )


def _names(sources: tuple[SourceRecipe, ...]) -> tuple[str, ...]:
    """Name sources by their channels, else by the last part of their paths, with a number if not unique."""
    names: list[str] = []
    for source in sources:
        plain = name = source.channel or source.path.rstrip("/").rsplit("/", 1)[-1]
        number = 1
        while source.channel is None and name in names:
            number += 1
            name = f"{plain}-{number}"
        names.append(name)
    return tuple(names)


@dataclass(frozen=True)
class SourceCounts:
    """Training counts of one source, repeats included; ``epochs`` are samples divided by the source's."""

    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    epochs: float = 0.0

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


Counts = Mapping[str, SourceCounts]
"""Training counts of each source, by its name."""


def counts_of_steps(packs: PackPlan, steps: StepPlan, mixture: Mixture) -> Int64Array:
    """Count samples, tokens and target tokens of each source in each step of a plan; int64 (T, S, 3)."""
    num_sources = len(mixture.names)
    step_of_pack = steps.locations()[:, 0].astype(np.int64)
    cells = np.repeat(step_of_pack, np.diff(packs.offsets)) * num_sources + mixture.source_of(packs.samples)
    columns = None, packs.full_lengths, mixture.target_tokens[packs.samples]
    return _count(cells, columns, steps.num_steps * num_sources).reshape(steps.num_steps, num_sources, 3)


def counts_of_samples(samples: Int64Array, mixture: Mixture) -> Int64Array:
    """Count samples, tokens and target tokens of each source among samples of the caches; int64 (S, 3)."""
    columns = None, mixture.lengths[samples], mixture.target_tokens[samples]
    return _count(mixture.source_of(samples), columns, len(mixture.names))


def _count(cells: Int64Array, columns: Sequence[IntArray | None], num_cells: int) -> Int64Array:
    # Sums of integers below 2^53 are exact.
    sums = [np.bincount(cells, weights=values, minlength=num_cells) for values in columns]
    return np.stack(sums, axis=1).astype(np.int64)


def by_name(counts: Int64Array, mixture: Mixture) -> dict[str, SourceCounts]:
    """Convert counts (S, 3) to counts by name; sources of one name are added up."""
    rows = zip(mixture.names, counts.tolist(), mixture.candidates, strict=True)
    return added(
        {name: SourceCounts(samples, tokens, targets, samples / max(len(own), 1))}
        for name, (samples, tokens, targets), own in rows
    )


def added(parts: Iterable[Counts]) -> dict[str, SourceCounts]:
    """Add up counts by name."""
    total: dict[str, SourceCounts] = {}
    for part in parts:
        for name, counts in part.items():
            total[name] = total.get(name, SourceCounts()) + counts
    return total


def share_figures(counts: Counts) -> dict[str, dict[str, Any]]:
    """Return counts of each source, their shares of all sources, 0 to 1, and epochs, by their names in JSON."""
    total = sum(counts.values(), SourceCounts())
    figures = {}
    for name, each in counts.items():
        amounts = {"num_samples": each.samples, "tokens": each.tokens, "target_tokens": each.target_tokens}
        shares = {f"share_of_{unit}": getattr(each, unit) / max(getattr(total, unit), 1) for unit in _UNITS}
        figures[name] = {**amounts, **shares, "epochs": each.epochs}
    return figures
