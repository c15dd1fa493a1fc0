#!/usr/bin/env python3
"""Measure planning of a mixture: time, fill, and how far the shares of sources in 100 steps are from the recipe.

    python scripts/bench_mixture.py [--samples 1000000] [--sources 20] [--packs-per-step 64] [--peer-samples 1000000]
                                    [--rounds 5]

Each source has lognormal lengths with its own median. The weights of the sources repeat 1, 2, 4, ..., 64, and sizes are
about proportional to weights. An epoch ends when all sources are used up. A second mixture is harder: it has short
samples, which packers usually put into separate packs, and long samples, with 4 packs per step.

There are two baselines: the same samples joined without a mixture, and ``datasets.interleave_datasets`` with
probabilities, which draws rows like ms-swift's --interleave_prob and LLaMA-Factory's interleave_probs. Its steps have
as many samples as a step of the plan has on average. Times are CPU seconds of one process per million samples, medians
of the rounds, in which packtool and its baselines take turns.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.config.mixture import Recipe, SourceRecipe
from packtool.planning.epoch import EpochPlan, plan_epoch, plan_mixture
from packtool.planning.mixture import Mixture, make_mixture
from packtool.planning.options import PlanOptions
from packtool.planning.packing import pack

_CAPACITY, _WINDOW = 8192, 100
_LARGE = 0.01  # of the tokens
_SHORT, _SHARE_OF_SHORT, _LONG, _FEW_PACKS, _HARD_SAMPLES = 100, 1 / 7, (1000, 4000), 4, 70_000

Numbers, Shares = npt.NDArray[np.int64], npt.NDArray[np.float64]


def sources_of(num_samples: int, num_sources: int) -> tuple[npt.NDArray[np.int32], Numbers, Shares]:
    """Return lengths (N,) of all samples, offsets of the sources (S + 1,), and shares of an epoch's samples (S,)."""
    weights = 2.0 ** (np.arange(num_sources) % 7)
    sizes = weights * np.random.default_rng(0).uniform(1, 1.5, num_sources)
    offsets = np.concatenate(([0], np.round(num_samples * sizes.cumsum() / sizes.sum()))).astype(np.int64)
    medians = np.geomspace(100, 2000, num_sources).repeat(np.diff(offsets))
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(medians), 0.8), 16, _CAPACITY).astype(np.int32)
    return lengths, offsets, weights / weights.sum()


def short_among_long(num_samples: int) -> tuple[npt.NDArray[np.int32], Numbers, Shares]:
    """Return the same as ``sources_of`` for two sources: short samples of one length, and long samples."""
    num_short = round(num_samples * _SHARE_OF_SHORT)
    long = np.random.default_rng(0).integers(*_LONG, num_samples - num_short)
    lengths = np.concatenate((np.full(num_short, _SHORT), long)).astype(np.int32)
    return lengths, np.array([0, num_short, num_samples]), np.array([num_short, num_samples - num_short]) / num_samples


def largest_errors(source_of_sample: Numbers, step_of_sample: Numbers, shares: Shares) -> Shares:
    """Return the largest relative error of each source's share in any 100 steps, (S,)."""
    counts = np.zeros((int(step_of_sample[-1]) + 1, len(shares)))
    np.add.at(counts, (step_of_sample, source_of_sample), 1)
    sums = np.vstack((np.zeros(len(shares)), counts.cumsum(axis=0)))
    windows = sums[_WINDOW:] - sums[:-_WINDOW] if len(counts) > _WINDOW else counts.sum(axis=0, keepdims=True)
    shares_in_windows = windows / windows.sum(axis=1, keepdims=True)
    return np.asarray(np.abs(shares_in_windows / shares - 1).max(axis=0))


def errors_of_plan(plan: EpochPlan, mixture: Mixture) -> Shares:
    """Return ``largest_errors`` for the steps of a plan, without the smaller last step."""
    packs, offsets = plan.steps.order, plan.packs.offsets
    num_packs_until = plan.steps.micro_batch_offsets[plan.steps.step_offsets]
    sizes = np.diff(offsets)[packs]
    step_of_sample = np.arange(plan.steps.num_steps).repeat(np.diff(num_packs_until)).repeat(sizes)
    indices = np.repeat(offsets[packs] - (sizes.cumsum() - sizes), sizes) + np.arange(sizes.sum())
    in_full_step = step_of_sample < plan.steps.num_steps - 1
    shares = np.array(mixture.counts) / mixture.num_drawn
    source_of_sample = mixture.source_of(plan.packs.samples[indices])
    return largest_errors(source_of_sample[in_full_step], step_of_sample[in_full_step], shares)


def errors_of_interleaving(dataset: Any, shares: Shares, samples_per_step: int) -> Shares:
    """Return ``largest_errors`` for an interleaved dataset whose column ``source`` has the source of each row."""
    sources = np.asarray(dataset.with_format("numpy")["source"][:])
    num_in_steps = len(sources) // samples_per_step * samples_per_step
    return largest_errors(sources[:num_in_steps], np.arange(num_in_steps) // samples_per_step, shares)


def time_alternately(ways: dict[str, Callable[[], Any]], num_rounds: int) -> tuple[dict[str, Any], dict[str, Numbers]]:
    """Call all functions in turn, in each round; return their last results, and their CPU seconds in each round."""
    results: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, function in ways.items():
            start = time.process_time()
            results[name] = function()
            seconds[name].append(time.process_time() - start)
    return results, {name: np.array(values) for name, values in seconds.items()}


def compare(
    lengths: npt.NDArray[np.int32],
    offsets: Numbers,
    shares: Shares,
    packs_per_step: int,
    peer_samples: int,
    num_rounds: int,
) -> None:
    """Print the comparison for one mixture; the first three arguments are as returned by ``sources_of``."""
    import datasets

    options = PlanOptions(max_length=_CAPACITY, packing_length=_CAPACITY, world_size=packs_per_step, balance="none")
    targets, media = lengths // 4, np.zeros_like(lengths)
    peer_sizes = np.round(np.diff(offsets) * min(1, peer_samples / len(lengths))).astype(np.int64)
    tables = [datasets.Dataset.from_dict({"source": np.full(size, i)}) for i, size in enumerate(peer_sizes)]

    def mix() -> tuple[EpochPlan, Mixture]:
        sources = tuple(SourceRecipe(path=f"source{i}", weight=share) for i, share in enumerate(shares.tolist()))
        recipe = Recipe(sources=sources, stop="all")
        mixture = make_mixture(recipe, offsets, lengths, media, targets, max_length=_CAPACITY, seed=0)
        return plan_mixture(mixture, options, seed=0, media_tokens=media), mixture

    ways = {
        "packtool --mix": mix,
        "packtool, without shares": partial(plan_epoch, lengths, targets, options, seed=0, media_tokens=media),
        "datasets.interleave_datasets": partial(
            datasets.interleave_datasets, tables, probabilities=shares.tolist(), seed=0
        ),
    }
    results, seconds = time_alternately(ways, num_rounds)
    plan, mixture = results["packtool --mix"]
    interleaved = results["datasets.interleave_datasets"]
    samples_per_step = max(round(mixture.num_drawn / plan.steps.num_steps), 1)
    print(f"{len(shares)} sources, {len(lengths):,} samples; an epoch draws {mixture.num_drawn:,}")
    print(f"{plan.packs.num_packs:,} packs, {plan.steps.num_steps:,} steps of {samples_per_step:,} samples")

    num_drawn = (mixture.num_drawn, len(lengths), len(interleaved))
    for (name, values), count in zip(seconds.items(), num_drawn, strict=True):
        per_million = 1e6 * values / count
        spread = f"{per_million.min():.2f} to {per_million.max():.2f}"
        print(f"  {name:30} {statistics.median(per_million):.2f} CPU seconds per million samples ({spread})")

    unmixed_fill = pack(mixture.slots.lengths, _CAPACITY, seed=0).fill  # the same samples, whatever their sources
    print(f"  fill of packs {plan.packs.fill:.2%}; of the same samples without shares {unmixed_fill:.2%}")
    tokens = np.add.reduceat(lengths.astype(np.int64), offsets[:-1]) * np.array(mixture.counts) / np.diff(offsets)
    is_large = tokens >= _LARGE * tokens.sum()
    for name, errors in (
        ("packtool --mix", errors_of_plan(plan, mixture)),
        ("datasets.interleave_datasets", errors_of_interleaving(interleaved, shares, samples_per_step)),
    ):
        large = f"{errors[is_large].max(initial=0):.1%} among sources with 1 % of the tokens"
        print(f"  {name:30} largest error of a share in 100 steps: {errors.max():.1%}, {large}")


def main(arguments: list[str] | None = None) -> None:
    """Print the comparison for both mixtures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--sources", type=int, default=20)
    parser.add_argument("--packs-per-step", type=int, default=64)
    parser.add_argument("--peer-samples", type=int, default=1_000_000, help="samples for interleave_datasets")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    compare(*sources_of(options.samples, options.sources), options.packs_per_step, options.peer_samples, options.rounds)
    print(f"\nshort and long: 1 of 7 samples has {_SHORT:,} tokens, the others {_LONG[0]:,} to {_LONG[1]:,}")
    num_samples = min(options.samples, _HARD_SAMPLES)
    compare(*short_among_long(num_samples), _FEW_PACKS, options.peer_samples, options.rounds)


if __name__ == "__main__":
    main()
