#!/usr/bin/env python3
"""Measure planning of a mixture: time, fill, and how far the shares of sources in 100 steps are from the recipe.

    python scripts/bench_mixture.py [--samples 1000000] [--sources 20] [--packs-per-step 64] [--peer-samples 1000000]

Each source has lognormal lengths with its own median. The weights of the sources repeat 1, 2, 4, ..., 64, and sizes are
about proportional to weights. An epoch ends when all sources are used up. A second mixture is harder: it has short
samples, which packers usually put into separate packs, and long samples, with 4 packs per step.

There are two baselines: the same samples joined without a mixture, and ``datasets.interleave_datasets`` with
probabilities, which draws rows like ms-swift's --interleave_prob and LLaMA-Factory's interleave_probs. Its steps have
as many samples as a step of the plan has on average. Times are CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

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


def furthest(source_of_sample: Numbers, step_of_sample: Numbers, shares: Shares) -> Shares:
    """Return the largest relative deviation of each source's share in any 100 steps, (S,)."""
    counts = np.zeros((int(step_of_sample[-1]) + 1, len(shares)))
    np.add.at(counts, (step_of_sample, source_of_sample), 1)
    sums = np.vstack((np.zeros(len(shares)), counts.cumsum(axis=0)))
    windows = sums[_WINDOW:] - sums[:-_WINDOW] if len(counts) > _WINDOW else counts.sum(axis=0, keepdims=True)
    found = windows / windows.sum(axis=1, keepdims=True)
    return np.asarray(np.abs(found / shares - 1).max(axis=0))


def of_plan(plan: EpochPlan, mixture: Mixture) -> Shares:
    """Return ``furthest`` for the steps of a plan, without the smaller last step."""
    packs, offsets = plan.steps.order, plan.packs.offsets
    num_packs_until = plan.steps.micro_batch_offsets[plan.steps.step_offsets]
    sizes = np.diff(offsets)[packs]
    of_samples = np.arange(plan.steps.num_steps).repeat(np.diff(num_packs_until)).repeat(sizes)
    places = np.repeat(offsets[packs] - (sizes.cumsum() - sizes), sizes) + np.arange(sizes.sum())
    whole = of_samples < plan.steps.num_steps - 1
    shares = np.array(mixture.counts) / mixture.num_drawn
    return furthest(mixture.source_of(plan.packs.samples[places])[whole], of_samples[whole], shares)


def of_interleaving(sizes: Numbers, shares: Shares, samples_per_step: int) -> tuple[float, Shares]:
    """Return the CPU seconds per sample and ``furthest`` of ``datasets.interleave_datasets``."""
    import datasets

    rows = [datasets.Dataset.from_dict({"of": np.full(n, i)}) for i, n in enumerate(sizes)]
    start = time.process_time()
    mixed = datasets.interleave_datasets(rows, probabilities=shares.tolist(), seed=0)
    seconds = time.process_time() - start
    of = np.asarray(mixed.with_format("numpy")["of"][:])
    whole = len(of) // samples_per_step * samples_per_step
    return seconds / len(of), furthest(of[:whole], np.arange(whole) // samples_per_step, shares)


def compare(
    lengths: npt.NDArray[np.int32], offsets: Numbers, shares: Shares, packs_per_step: int, peer_samples: int
) -> None:
    """Print the comparison for one mixture; arguments are as returned by ``sources_of``."""
    sources = tuple(SourceRecipe(path=f"source{i}", weight=share) for i, share in enumerate(shares.tolist()))
    options = PlanOptions(max_length=_CAPACITY, packing_length=_CAPACITY, world_size=packs_per_step, balance="none")
    targets, media = lengths // 4, np.zeros_like(lengths)
    start = time.process_time()
    mixture = make_mixture(
        Recipe(sources=sources, stop="all"), offsets, lengths, media, targets, max_length=_CAPACITY, seed=0
    )
    plan = plan_mixture(mixture, options, seed=0, media_tokens=media)
    mixed = time.process_time() - start
    start = time.process_time()
    joined = plan_epoch(lengths, targets, options, seed=0, media_tokens=media)
    seconds_joined = time.process_time() - start
    # The same samples, packed without regard to their sources.
    fill = pack(mixture.slots.lengths, _CAPACITY, seed=0).fill
    samples_per_step = max(round(mixture.num_drawn / plan.steps.num_steps), 1)
    sizes = np.diff(offsets)
    per_sample, off = of_interleaving(
        np.round(sizes * min(1, peer_samples / len(lengths))).astype(np.int64), shares, samples_per_step
    )
    print(f"{len(sources)} sources, {len(lengths):,} samples; an epoch draws {mixture.num_drawn:,}")
    print(f"{plan.packs.num_packs:,} packs, {plan.steps.num_steps:,} steps of {samples_per_step:,} samples")
    print(f"{'':32}{'CPU seconds':>12}{'per million samples':>20}{'fill':>9}{'furthest':>10}{'of large':>10}")
    tokens = np.add.reduceat(lengths.astype(np.int64), offsets[:-1]) * np.array(mixture.counts) / sizes
    is_large = tokens >= _LARGE * tokens.sum()
    for name, seconds, of_one, full, most in (
        ("packtool --mix", mixed, mixed / mixture.num_drawn, plan.packs.fill, of_plan(plan, mixture)),
        ("the same, packed one by one", None, None, fill, None),
        ("packtool, the caches joined", seconds_joined, seconds_joined / len(lengths), joined.packs.fill, None),
        ("datasets.interleave_datasets", None, per_sample, None, off),
    ):
        cells = (
            f"{'' if seconds is None else f'{seconds:.2f}':>12}{'' if of_one is None else f'{1e6 * of_one:.2f}':>20}"
        )
        cells += f"{'' if full is None else f'{full:.2%}':>9}"
        print(
            f"{name:32}{cells}" + ("" if most is None else f"{most.max():>10.1%}{most[is_large].max(initial=0):>10.1%}")
        )


def main(arguments: list[str] | None = None) -> None:
    """Print the comparison for both mixtures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--sources", type=int, default=20)
    parser.add_argument("--packs-per-step", type=int, default=64)
    parser.add_argument(
        "--peer-samples", type=int, default=1_000_000, help="samples for interleave_datasets; its time is scaled"
    )
    given = parser.parse_args(arguments)
    print("furthest: largest deviation of a source's share in any 100 steps; of large: sources with 1 % of the tokens")
    compare(*sources_of(given.samples, given.sources), given.packs_per_step, given.peer_samples)
    print()
    print(f"hard: 1 of 7 samples has {_SHORT:,} tokens, the others {_LONG[0]:,} to {_LONG[1]:,}")
    compare(*short_among_long(min(given.samples, _HARD_SAMPLES)), _FEW_PACKS, given.peer_samples)


if __name__ == "__main__":
    main()
