"""What an epoch takes of each source: which samples, and how often.

    source   samples   asked for   epoch 0                epoch 1
    a        5         #2.5x       0 1 2 3 4 0 1 2 3 4 1 3  0 1 2 3 4 0 1 2 3 4 0 4
    b        6         #50%        5 7 10                 6 8 9

An epoch has a fixed number of *places*, and each place a length that no sample that may stand there exceeds. Packing
works on places, so that every epoch has as many packs as the first, whatever is drawn; a draw fills the places with
samples. Of a source that is taken whole so many times, a place has one sample. Of the rest a place has a few neighbours
by length, of which it draws one: samples are drawn alike often, and what a place has too much is, over all places of a
source, no more than a few times its longest sample.

The first epoch of a stage of a curriculum knows how often samples were trained before it (``trained``). What it takes
of a source beside whole times are those that were trained least often: all that never were, then all that were once,
and of those that come next some, as above.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.config.mixture import MAX_AMOUNT, MixUnit, Recipe, SourceRecipe, check_drawn
from packtool.errors import DataError
from packtool.planning.pack_plan import Int32Array, Int64Array, PackPlan, digest_arrays, to_offsets
from packtool.planning.shuffle import RandomStream, seeded_order, seeded_uniform
from packtool.planning.steps import StepPlan

_LEAST_NEIGHBOURS, _MOST_NEIGHBOURS = 4, 64
_CHUNKS_OF_A_SOURCE = 500

Lengths = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Places:
    """M places of an epoch, in the order that the cache's has where nothing is shuffled: every source evenly.

    Args:
        lengths: int32 (M,), most tokens of the sample that stands there.
        media_tokens: int32 (M,), most media tokens.
        sources: int32 (M,), of which each is.
    """

    lengths: Int32Array
    media_tokens: Int32Array
    sources: Int32Array


@dataclass(frozen=True, eq=False)
class _Taken:
    """What an epoch takes of a source.

    Args:
        whole: samples that it has in any case, each as often as it is there.
        pool: of which some are drawn, each at most once.
        num_drawn: of these.
    """

    whole: Int64Array
    pool: Int64Array
    num_drawn: int


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sources of an epoch, S of them, and how many samples of each.

    Args:
        names: of the sources.
        offsets: int64 (S + 1,), where the samples of each begin among those of all caches.
        candidates: of each source its samples that may be drawn, int64 (n,), ascending.
        counts: samples that an epoch takes of each source, repeated ones counted.
        lengths: (N,), tokens of the samples of all caches.
        media_tokens: (N,), theirs.
        target_tokens: (N,), labels that carry loss.
        unit: that the order is even by.
        resample: every epoch draws anew.
        seed: of the run.
        num_filtered: samples that are too long, or outside what their source takes.
        loss_weights: of the sources.
        trained: how often each sample was trained before, (N,): those that were seldom are drawn first. None where
            nobody asks.
        loss_scales: that choose the targets of sources, as the recipe has them; empty where it has none.
    """

    names: tuple[str, ...]
    offsets: Int64Array
    candidates: tuple[Int64Array, ...]
    counts: tuple[int, ...]
    lengths: Lengths
    media_tokens: Lengths
    target_tokens: Lengths
    unit: MixUnit
    resample: bool
    seed: int
    num_filtered: int
    loss_weights: tuple[float, ...]
    trained: Int64Array | None = None
    loss_scales: tuple[str | None, ...] = ()

    @property
    def num_drawn(self) -> int:
        """The number M of samples of an epoch."""
        return sum(self.counts)

    @property
    def epochs(self) -> tuple[float, ...]:
        """How often an epoch has each source whole."""
        return tuple(count / max(len(own), 1) for count, own in zip(self.counts, self.candidates, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 in hex over what decides the draws, the targets and the weights of losses."""
        words = f"packtool mixture 1 {self.unit} {self.resample} {self.seed} {self.counts} {self.loss_weights}\n"
        words += f"{self.loss_scales}\n" if self.loss_scales else ""
        trained = () if self.trained is None else (self.trained,)
        return digest_arrays(hashlib.sha256(words.encode()), self.offsets, *self.candidates, *trained)

    def part(self, share: float, trained: Int64Array) -> Mixture:
        """A part of an epoch, of what was trained least often before.

        Args:
            share: 0 to 1.
            trained: how often each sample was, (N,).
        """
        counts = tuple(max(round(count * share), min(count, 1)) for count in self.counts)
        candidates = self.candidates
        if not self.resample:
            drawn = [np.unique(self._drawn_of(source, 0)) for source in range(len(self.counts))]
            candidates = tuple(drawn)
        return dataclasses.replace(self, counts=counts, candidates=candidates, trained=trained)

    def source_of(self, samples: Int64Array) -> Int64Array:
        """The source of each of some samples, which are positions in the caches."""
        return np.searchsorted(self.offsets, samples, side="right") - 1

    def amounts(self, samples: Int64Array) -> Lengths:
        """What each of some samples is to its source: 1, its tokens, or its target tokens."""
        if self.unit == "samples":
            return np.ones(len(samples), np.int64)
        return (self.lengths if self.unit == "tokens" else self.target_tokens)[samples]

    @cached_property
    def places(self) -> Places:
        """The places of every epoch."""
        found = [self._places_of(source) for source in range(len(self.counts))]
        lengths, media = (np.concatenate(each)[self._even] for each in zip(*found, strict=True))
        sources = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)[self._even]
        return Places(lengths.astype(np.int32), media.astype(np.int32), sources)

    def drawn(self, epoch: int) -> Int64Array:
        """The samples of an epoch, positions in the caches, by place; int64 (M,). The same sample may come again."""
        return self._drawn(epoch if self.resample else 0)[self._even]

    def wanted(self, epoch: int, trained: Int64Array) -> Int64Array:
        """How often an epoch is to have each sample, (N,), of which some were trained with other data.

        An epoch has as many samples of a source as the recipe says, and those that were trained in it are among them:
        for each one that is not drawn now, one that is drawn is left out, of any length alike.

        Args:
            epoch: that the run is in.
            trained: how often it has trained each sample, (N,).
        """
        found = np.bincount(self.drawn(epoch), minlength=len(trained))
        left = np.maximum(found - trained, 0)
        for source, (start, stop) in enumerate(pairwise(self.offsets.tolist())):
            done = int(trained[start:stop].sum())
            if done == 0:
                continue
            drawn = self._drawn_of(source, epoch if self.resample else 0)[len(self._taken[source].whole) :]
            drawn = drawn[left[drawn] > 0]
            too_many = int(left[start:stop].sum()) - max(self.counts[source] - done, 0)
            too_many = min(max(too_many, 0), len(drawn))
            found[drawn[self._falling(drawn)][np.arange(too_many) * len(drawn) // max(too_many, 1)]] -= 1
        return found

    @cached_property
    def _even(self) -> Int64Array:
        """Places of all sources, one source after the other, in an order in which sources take turns, (M,)."""
        first, offsets, times = self._drawn(0), to_offsets(np.array(self.counts)), np.empty(self.num_drawn)
        for source, (start, stop) in enumerate(pairwise(offsets.tolist())):
            whole = len(self._taken[source].whole)
            order = np.concatenate((np.arange(whole), whole + np.argsort(first[start + whole : stop], kind="stable")))
            times[start + order] = (np.arange(len(order)) + 0.5) / max(len(order), 1)
        return np.argsort(times, kind="stable").astype(np.int64, copy=False)

    def _drawn(self, epoch: int) -> Int64Array:
        """Samples as ``drawn`` gives them, one source after the other."""
        return np.concatenate([self._drawn_of(source, epoch) for source in range(len(self.counts))])

    def _drawn_of(self, source: int, epoch: int) -> Int64Array:
        taken = self._taken[source]
        own, part = taken.pool, taken.num_drawn
        if not part:
            return taken.whole
        num, stream = len(own), RandomStream.MIX_NEIGHBOURS + source
        chunks = np.arange(num) // self._neighbours(num)
        within = seeded_order(num, seed=self.seed, epoch=epoch, stream=stream, falling=chunks[-1] - chunks)
        mixed = self._falling(own)[within]
        begin = int(seeded_uniform(1, seed=self.seed, epoch=epoch, stream=RandomStream.MIX_START + source)[0] * num)
        # Steps of num / part, which is 1 or more: no sample twice.
        return np.concatenate((taken.whole, own[mixed[(np.arange(part) * num + begin) // part]]))

    def _places_of(self, source: int) -> tuple[Lengths, Lengths]:
        taken = self._taken[source]
        own, part = taken.pool, taken.num_drawn
        whole = self.lengths[taken.whole], self.media_tokens[taken.whole]
        if not part:
            return whole
        lengths, media = self.lengths[own], self.media_tokens[own]
        num, neighbours, falling = len(own), self._neighbours(len(own)), self._falling(own)
        first = np.arange(part) * num // part // neighbours
        last = np.minimum((np.arange(1, part + 1) * num - 1) // part, num - 1) // neighbours
        most_media = np.maximum.reduceat(media[falling], np.arange(0, num, neighbours))
        # Of the chunks from the first to the last that a place may draw from.
        bounds = np.stack((first, last + 1), axis=1).reshape(-1)
        most = np.maximum.reduceat(np.append(most_media, 0), bounds)[::2]
        return (
            np.concatenate((whole[0], lengths[falling][first * neighbours])),
            np.concatenate((whole[1], most)),
        )

    @cached_property
    def _taken(self) -> tuple[_Taken, ...]:
        """What an epoch takes of each source."""
        return tuple(self._taken_of(source) for source in range(len(self.counts)))

    def _taken_of(self, source: int) -> _Taken:
        own = self.candidates[source]
        times, part = divmod(self.counts[source], max(len(own), 1))
        whole = np.tile(own, times)
        if self.trained is None or not part:
            return _Taken(whole, own, part)
        often = self.trained[own]
        levels, sizes = np.unique(often, return_counts=True)
        ends = np.cumsum(sizes)
        level = int(np.searchsorted(ends, part, side="right"))
        seldom, before = own[often < levels[level]], int(ends[level] - sizes[level])
        return _Taken(np.concatenate((whole, seldom)), own[often == levels[level]], part - before)

    def _falling(self, samples: Int64Array) -> Int64Array:
        """An order of samples by length, the longest first."""
        return np.argsort(-self.lengths[samples], kind="stable").astype(np.int64, copy=False)

    @staticmethod
    def _neighbours(num: int) -> int:
        """Samples of about one length that change places before some are drawn."""
        return min(max(num // _CHUNKS_OF_A_SOURCE, _LEAST_NEIGHBOURS), _MOST_NEIGHBOURS)


def mixture_of(
    recipe: Recipe,
    offsets: Int64Array,
    lengths: Lengths,
    media_tokens: Lengths,
    target_tokens: Lengths,
    *,
    max_length: int,
    seed: int,
) -> Mixture:
    """The mixture that a recipe makes of caches.

    Args:
        recipe: of the caches, in their order.
        offsets: int64 (S + 1,), where each one's samples begin.
        lengths, media_tokens, target_tokens: (N,), of all samples.
        max_length: longer samples are left out.
        seed: of the run.

    Raises:
        DataError: nothing is left of a source.
    """
    candidates, num_filtered = [], 0
    for source, start, stop in zip(recipe.sources, offsets, offsets[1:], strict=False):
        if not source.is_taken:
            candidates.append(np.zeros(0, np.int64))
            continue
        own = lengths[start:stop]
        most = min(max_length, source.max_length or max_length)
        kept = np.flatnonzero((own <= most) & (own >= (source.min_length or 0))).astype(np.int64) + int(start)
        if not len(kept):
            raise DataError(
                f"{recipe.place}: nothing is left of {source.path}: of its {len(own):,} samples none has "
                f"{source.min_length or 1:,} to {most:,} tokens.",
                "Leave it out, or let longer samples in (--max-length, or the recipe's min_length and max_length).",
            )
        candidates.append(kept)
        num_filtered += len(own) - len(kept)
    counts = _counts(
        recipe, candidates, {"samples": None, "tokens": lengths, "target_tokens": target_tokens}[recipe.unit]
    )
    check_drawn(sum(counts), sum(map(len, candidates)), recipe.place or "an epoch")
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
        num_filtered=num_filtered,
        loss_weights=tuple(source.loss_weight for source in recipe.sources),
        loss_scales=tuple(source.loss_scale for source in recipe.sources) if recipe.has_loss_scales else (),
    )


def _counts(recipe: Recipe, candidates: list[Int64Array], values: Lengths | None) -> tuple[int, ...]:
    """Samples that an epoch takes of each source.

    Args:
        values: (N,), tokens or target tokens of the samples; None where each counts once.
    """
    if not recipe.has_weights:
        pairs = zip(recipe.sources, candidates, strict=True)
        return tuple(len(own) if source.amount is None else source.amount.of(len(own)) for source, own in pairs)
    is_taken = np.array([source.is_taken for source in recipe.sources])
    sizes = np.array(
        [len(own) if values is None else int(values[own].sum(dtype=np.int64)) for own in candidates], float
    )
    if not sizes[is_taken].all():
        empty = recipe.sources[int(np.argmin(np.where(is_taken, sizes, np.inf)))].path
        raise DataError(
            f"{recipe.place}: {empty} has no {recipe.unit.replace('_', ' ')} to weigh it by.", "Leave it out."
        )
    if recipe.temperature is not None:
        weights = sizes ** (1 / recipe.temperature)
    else:
        weights = np.array([source.weight or 1.0 for source in recipe.sources], float)
    each = sizes[is_taken] / weights[is_taken]
    epochs = np.zeros(len(sizes))
    epochs[is_taken] = (each.min() if recipe.stop == "first" else each.max()) / each
    shares = zip(epochs.tolist(), candidates, strict=True)
    return tuple(max(round(min(share * len(own), MAX_AMOUNT)), min(len(own), 1)) for share, own in shares)


def _names(sources: tuple[SourceRecipe, ...]) -> tuple[str, ...]:
    """What sources are called: by their channels, else by the last part of their paths, told apart by numbers."""
    plain = [source.channel or source.path.rstrip("/").rsplit("/", 1)[-1] for source in sources]
    found: list[str] = []
    for source, name in zip(sources, plain, strict=True):
        number, told = 1, name
        while source.channel is None and told in found:
            number += 1
            told = f"{name}-{number}"
        found.append(told)
    return tuple(found)


@dataclass(frozen=True)
class SourceCounts:
    """What was, or will be, trained of one source.

    Args:
        samples, tokens, target_tokens: as often as they are trained.
        epochs: samples over those that the source has.
    """

    samples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    epochs: float = 0.0

    def __add__(self, other: SourceCounts) -> SourceCounts:
        return SourceCounts(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.target_tokens + other.target_tokens,
            self.epochs + other.epochs,
        )


Counts = Mapping[str, SourceCounts]
"""What was trained of each source, by its name."""


def counts_of_steps(packs: PackPlan, steps: StepPlan, mixture: Mixture) -> Int64Array:
    """Samples, tokens and target tokens of each of S sources in each of T steps; int64 (T, S, 3).

    Args:
        packs: that the steps train, of samples by their positions in the caches.
    """
    num_sources = len(mixture.names)
    of_pack = np.empty(packs.num_packs, np.int64)
    of_pack[steps.order] = np.repeat(np.arange(steps.num_steps), np.diff(steps.cell_offsets[steps.step_offsets]))
    cells = np.repeat(of_pack, np.diff(packs.offsets)) * num_sources + mixture.source_of(packs.samples)
    found = np.empty((steps.num_steps * num_sources, 3), np.int64)
    for column, values in enumerate((None, packs.full_lengths, mixture.target_tokens[packs.samples])):
        # Sums of whole numbers below 2^53 are exact.
        found[:, column] = np.bincount(cells, weights=values, minlength=len(found))
    return found.reshape(steps.num_steps, num_sources, 3)


def counts_of_samples(samples: Int64Array, mixture: Mixture) -> Int64Array:
    """Samples, tokens and target tokens of each of S sources among some samples of the caches; int64 (S, 3)."""
    of, num_sources = mixture.source_of(samples), len(mixture.names)
    columns = (None, mixture.lengths[samples], mixture.target_tokens[samples])
    return np.stack([np.bincount(of, weights=each, minlength=num_sources) for each in columns], axis=1).astype(np.int64)


def by_name(counts: Int64Array, mixture: Mixture) -> dict[str, SourceCounts]:
    """Counts (S, 3) by the names of sources; those of one name are added up."""
    found: dict[str, SourceCounts] = {}
    for name, numbers, own in zip(mixture.names, counts.tolist(), mixture.candidates, strict=True):
        samples, tokens, target_tokens = numbers
        more = SourceCounts(samples, tokens, target_tokens, samples / max(len(own), 1))
        found[name] = found.get(name, SourceCounts()) + more
    return found


def added(parts: Sequence[Counts]) -> dict[str, SourceCounts]:
    """Counts of several steps added up."""
    found: dict[str, SourceCounts] = {}
    for part in parts:
        for name, counts in part.items():
            found[name] = found.get(name, SourceCounts()) + counts
    return found


def share_figures(counts: Counts) -> dict[str, dict[str, Any]]:
    """What is told of each source: its counts, their shares of all sources', 0 to 1, and its epochs."""
    whole = added([{"": each} for each in counts.values()]).get("", SourceCounts())
    return {
        name: {
            "num_samples": each.samples,
            "tokens": each.tokens,
            "target_tokens": each.target_tokens,
            "share_of_samples": each.samples / max(whole.samples, 1),
            "share_of_tokens": each.tokens / max(whole.tokens, 1),
            "share_of_target_tokens": each.target_tokens / max(whole.target_tokens, 1),
            "epochs": each.epochs,
        }
        for name, each in counts.items()
    }
