#!/usr/bin/env python3
"""Plan an epoch of a mixture: time, and how far 100 steps are from its shares.

    python scripts/bench_mixture.py [--samples 1000000] [--sources 20] [--packs-per-step 64] [--peer-samples 1000000]

Sources have lognormal lengths of different medians; each weighs twice the one before, from 1 to 64, over and over, and
is about as large; an epoch ends when all are used up. The peers are the same samples joined, without a mixture, and
``datasets.interleave_datasets`` with probabilities, which draws rows as ms-swift's --interleave_prob and
LLaMA-Factory's interleave_probs have it; a step of it has as many samples as a step of the plan has on average. Seconds
are of CPU, for such a plan takes one process.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.config.recipe import Recipe, SourceRecipe
from packtool.plan.epoch import EpochPlan, plan_epoch, plan_mixture
from packtool.plan.mixture import Mixture, mixture_of
from packtool.plan.options import PlanOptions

_CAPACITY, _WINDOW = 8192, 100
_LARGE = 0.01  # of the tokens

Numbers, Shares = npt.NDArray[np.int64], npt.NDArray[np.float64]


def sources_of(num_samples: int, num_sources: int) -> tuple[npt.NDArray[np.int32], Numbers, Shares]:
    """Lengths (N,) of all samples, where each source's begin (S + 1,), and its share of an epoch's samples (S,)."""
    weights = 2.0 ** (np.arange(num_sources) % 7)
    sizes = weights * np.random.default_rng(0).uniform(1, 1.5, num_sources)
    offsets = np.concatenate(([0], np.round(num_samples * sizes.cumsum() / sizes.sum()))).astype(np.int64)
    medians = np.geomspace(100, 2000, num_sources).repeat(np.diff(offsets))
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(medians), 0.8), 16, _CAPACITY).astype(np.int32)
    return lengths, offsets, weights / weights.sum()


def furthest(source_of_sample: Numbers, step_of_sample: Numbers, shares: Shares) -> Shares:
    """The most that each source's share in any stretch of 100 steps is off, of its share."""
    counts = np.zeros((int(step_of_sample[-1]) + 1, len(shares)))
    np.add.at(counts, (step_of_sample, source_of_sample), 1)
    sums = np.vstack((np.zeros(len(shares)), counts.cumsum(axis=0)))
    windows = sums[_WINDOW:] - sums[:-_WINDOW] if len(counts) > _WINDOW else counts.sum(axis=0, keepdims=True)
    found = windows / windows.sum(axis=1, keepdims=True)
    return np.asarray(np.abs(found / shares - 1).max(axis=0))


def of_plan(plan: EpochPlan, mixture: Mixture) -> Shares:
    """``furthest`` of a plan's steps, the smaller last one left out."""
    packs, offsets = plan.steps.order, plan.packs.offsets
    num_packs_until = plan.steps.cell_offsets[plan.steps.step_offsets]
    sizes = np.diff(offsets)[packs]
    of_samples = np.arange(plan.steps.num_steps).repeat(np.diff(num_packs_until)).repeat(sizes)
    places = np.repeat(offsets[packs] - (sizes.cumsum() - sizes), sizes) + np.arange(sizes.sum())
    whole = of_samples < plan.steps.num_steps - 1
    shares = np.array(mixture.counts) / mixture.num_drawn
    return furthest(mixture.source_of(plan.packs.samples[places])[whole], of_samples[whole], shares)


def of_interleaving(num_samples: int, num_sources: int, samples_per_step: int) -> tuple[float, Shares]:
    """CPU seconds, and ``furthest``, of ``datasets.interleave_datasets``."""
    import datasets

    _, offsets, shares = sources_of(num_samples, num_sources)
    rows = [datasets.Dataset.from_dict({"of": np.full(n, i)}) for i, n in enumerate(np.diff(offsets))]
    start = time.process_time()
    mixed = datasets.interleave_datasets(rows, probabilities=shares.tolist(), seed=0)
    seconds = time.process_time() - start
    of = np.asarray(mixed.with_format("numpy")["of"][:])
    whole = len(of) // samples_per_step * samples_per_step
    return seconds / len(of) * num_samples, furthest(of[:whole], np.arange(whole) // samples_per_step, shares)


def main(arguments: list[str] | None = None) -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--sources", type=int, default=20)
    parser.add_argument("--packs-per-step", type=int, default=64)
    parser.add_argument(
        "--peer-samples", type=int, default=1_000_000, help="of interleave_datasets; its time is scaled"
    )
    given = parser.parse_args(arguments)
    lengths, offsets, shares = sources_of(given.samples, given.sources)
    sources = tuple(SourceRecipe(path=f"source{i}", weight=share) for i, share in enumerate(shares.tolist()))
    options = PlanOptions(
        max_length=_CAPACITY, packing_length=_CAPACITY, world_size=given.packs_per_step, balance="none"
    )
    targets, media = lengths // 4, np.zeros_like(lengths)
    start = time.process_time()
    mixture = mixture_of(
        Recipe(sources=sources, stop="all"), offsets, lengths, media, targets, max_length=_CAPACITY, seed=0
    )
    plan = plan_mixture(mixture, options, seed=0, media_tokens=media)
    mixed = time.process_time() - start
    start = time.process_time()
    plan_epoch(lengths, targets, options, seed=0, media_tokens=media)
    joined = time.process_time() - start
    # Of an epoch in which the source with the largest weight is seen once.
    per_sample = mixed / mixture.num_drawn
    samples_per_step = max(round(mixture.num_drawn / plan.steps.num_steps), 1)
    peer_samples = min(given.peer_samples, given.samples)
    seconds, off = of_interleaving(peer_samples, given.sources, samples_per_step)
    print(f"{given.sources} sources, {given.samples:,} samples; an epoch draws {mixture.num_drawn:,}")
    print(f"{plan.packs.num_packs:,} packs, {plan.steps.num_steps:,} steps of {samples_per_step:,} samples")
    print("furthest: the most that a source's share in any 100 steps is off; large: at least 1 % of the tokens")
    print(f"{'':32}{'CPU seconds':>12}{'a million samples':>20}{'furthest':>12}{'of large':>12}")
    tokens = np.add.reduceat(lengths.astype(np.int64), offsets[:-1]) * np.array(mixture.counts) / np.diff(offsets)
    is_large = tokens >= _LARGE * tokens.sum()
    for name, time_of_all, of_one, most in (
        ("packtool --mix", mixed, per_sample, of_plan(plan, mixture)),
        ("packtool, the caches joined", joined, joined / given.samples, None),
        ("datasets.interleave_datasets", None, seconds / peer_samples, off),
    ):
        whole = "" if time_of_all is None else f"{time_of_all:.2f}"
        told = "" if most is None else f"{most.max():>12.1%}{most[is_large].max():>12.1%}"
        print(f"{name:32}{whole:>12}{1e6 * of_one:>20.2f}{told}")


if __name__ == "__main__":
    main()
