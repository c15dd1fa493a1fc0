#!/usr/bin/env python3
"""Measure memory, time and traffic of sequence parallelism, as ratios to one process.

One sequence (a document of half its tokens, and conversations) goes forward and backward through a random decoder. P
processes share it by Ulysses, the ring, or an all-gather of K and V. The baselines are:

- packed, P = 1: the same sequence on one process; all ratios refer to it
- padded, P = 1: its documents as padded rows
- whole documents: each document on one process, the longest first, as in data parallelism

Figures of the busiest rank:

- kept: what autograd keeps for the backward pass, without weights; exact, and the same on any device
- peak: the peak memory of a step minus the memory before it (of the process, or of CUDA's allocator)
- time: the median ratio of step times over alternating rounds
- sent: bytes sent, counted, and in the forward pass also estimated by ``Heads.volume``

All losses are first compared with that of P = 1. On the CPU, all P processes share the cores that P = 1 has alone.
There, the time shows the cost of sharing, not its benefit; the CPU time of all threads ("CPU") is less affected by
other work. With ``--device cuda`` every rank has its own GPU.

Without any process, the script then measures how evenly 8 ranks share the attention work for three ways to cut a
sequence, with lengths like Wikipedia's.

    python scripts/bench_sequence_parallel.py [--tokens 4096] [--ranks 2 4] [--model reduced] [--rounds 3]
                                              [--device cpu] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.attention.parallel.axes import Heads
from packtool.batch.shard import SequenceSplit, assign_tokens
from packtool.config.packing import PackOptions
from packtool.planning.packing import pack
from packtool.planning.skrull import SHARDED
from scripts._gpu_models import mixed_lengths
from scripts._sequence_ranks import MODELS, PACKED, PADDED, SHARING, WHOLE, Ranks, Step, Work

Int64Array = npt.NDArray[np.int64]

ALLOWED_ERROR = {"cpu": 1e-5, "cuda": 1e-2}
"""Largest relative difference of losses that rounding can cause, in float32 and in bfloat16."""

BALANCE_RANKS, BALANCE_ROW = 8, 32768
# From, to, share: Wikipedia's lengths (Skrull, arXiv 2505.19609, table 1), in each of them log-uniform.
WIKIPEDIA = ((32, 1024, 0.8788), (1024, 4096, 0.1146), (4096, 8192, 0.0058), (8192, 32768, 0.0008))


@dataclass
class Way:
    """A variant of computing a sequence, and its measurements.

    Args:
        name: as ``_sequence_ranks`` has it.
        ranks: the processes.
        steps: of each rank.
        seconds: of each round, and of all cores together.
    """

    name: str
    ranks: Ranks
    steps: list[Step] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)

    def most(self, what: str) -> float:
        """Return a figure of the busiest rank."""
        return max(getattr(step, what) for step in self.steps)

    def slower(self, other: Way, which: int) -> float:
        """Return the median ratio to another variant over the rounds, of wall time (0) or CPU time (1)."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine[which] / theirs[which] for mine, theirs in pairs)


def make_ways(work: Work, sizes: Sequence[int], folder: Path, stack: ExitStack) -> list[Way]:
    """Return all variants, P = 1 first; closing ``stack`` ends their processes."""
    ways = []
    for size in (1, *sizes):
        ranks = stack.enter_context(Ranks(work, size, folder))
        ways += [Way(name, ranks) for name in ((PACKED, PADDED) if size == 1 else (*SHARING, WHOLE))]
    return ways


def measure(ways: Sequence[Way], rounds: int) -> None:
    """Measure memory and traffic of each variant, then times over several rounds."""
    for way in ways:
        way.steps = way.ranks.step(way.name)
        print(f"  {way.name} on {way.ranks.size}: looked at", file=sys.stderr)
    for number in range(rounds):
        # Whoever else uses this machine does not always meet the same way.
        turn = number % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            way.seconds.append(way.ranks.seconds(way.name))
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)


def check_losses(ways: Sequence[Way], allowed: float) -> float:
    """Return the largest relative difference from the first variant's loss; exit if rounding cannot explain it."""
    names = [f"{way.name} on {way.ranks.size}" for way in ways]
    losses = [sum(step.loss for step in way.steps) for way in ways]
    errors = {name: abs(loss / losses[0] - 1) for name, loss in zip(names, losses, strict=True)}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= allowed:
        sys.exit(f"{worst}: the loss is off by {errors[worst]:.1e}: it computes something else")
    return errors[worst]


def volume(way: Way, work: Work) -> float:
    """Return the estimated bytes that a rank sends in the forward pass of all layers."""
    text = MODELS[work.model].text
    heads = Heads(text["num_attention_heads"], text["num_key_value_heads"])
    size = way.ranks.size
    sizes = (1, size) if way.name == "ulysses" else (size, 1)
    per_token = heads.volume(*sizes, "ring", backward=False)
    item = 2 if work.device == "cuda" else 4
    return per_token * way.steps[0].num_sequence_tokens * text["head_dim"] * text["num_hidden_layers"] * item


def print_head(work: Work, rounds: int) -> None:
    """Print the sequence, the model and the device."""
    text = MODELS[work.model].text
    print(
        f"a sequence of {sum(work.lengths):,} tokens in {len(work.lengths)} documents, the longest of "
        f"{max(work.lengths):,}; {text['num_hidden_layers']} layers of {text['hidden_size']}, "
        f"{text['num_attention_heads']} heads of Q, {text['num_key_value_heads']} of K and V, "
        f"{text['head_dim']} numbers each; {rounds} round{'s' if rounds > 1 else ''}"
    )
    if work.device == "cuda":
        print(f"{torch.cuda.get_device_name()}, bfloat16, NCCL, torch {torch.__version__}")
        return
    print(
        f"CPU, float32, gloo, torch {torch.__version__}; P processes share the {torch.get_num_threads()} cores of one: "
        "times show what sharing costs"
    )


def print_ways(ways: Sequence[Way], work: Work) -> None:
    """Print the table: MiB, and ratios to the first variant."""
    memory, of_first = f"{'MiB':>7} {'of P = 1':>9}", f"{'time':>6} {'CPU':>6}"
    print(f"\n{'':26}  {'kept for backward':>17}  {'peak of a step':>17}  {'of P = 1':>13}  {'sent, MiB a rank':>26}")
    print(
        f"{'':15} {'P':>3} {'tokens':>6}  {memory}  {memory}  {of_first}  {'forward':>8} {'formula':>8} {'backward':>8}"
    )
    first = ways[0]
    for way in ways:
        sizes = []
        for what in ("kept", "peak"):
            most = way.most(what)
            sizes.append(f"{most / 2**20:>7,.0f} {most / first.most(what):>9.2f}")
        busy = f"{way.slower(first, 1):.2f}" if work.device == "cpu" else "-"
        slower = f"{way.slower(first, 0):>6.2f} {busy:>6}"
        sent = ""
        if way.name in SHARING:
            numbers = (way.most("sent"), volume(way, work), way.most("sent_back"))
            sent = " ".join(f"{number / 2**20:>8.2f}" for number in numbers)
        start = f"{way.name:15} {way.ranks.size:>3} {way.most('num_tokens'):>6,}"
        print(f"{start}  {sizes[0]}  {sizes[1]}  {slower}  {sent}".rstrip())


def wikipedia_lengths(number: int, longest: int) -> npt.NDArray[np.int32]:
    """Return random lengths like Wikipedia's, at most ``longest``."""
    generator = np.random.default_rng(0)
    low, high, share = np.array(WIKIPEDIA).T
    kind = generator.choice(len(share), size=number, p=share / share.sum())
    lengths = np.exp(generator.uniform(np.log(low[kind]), np.log(high[kind]))).astype(np.int32)
    return np.minimum(lengths, longest)


def cuts_of(lengths: Sequence[int], size: int) -> Iterator[tuple[str, Int64Array]]:
    """Yield the attended query-key pairs of each of ``size`` ranks, for each way to cut a sequence."""
    # The query at position i sees i + 1 keys.
    pairs = np.concatenate([np.arange(1, length + 1) for length in lengths])
    chunks = [int(part.sum()) for part in np.array_split(pairs, 2 * size)]
    split = SequenceSplit(ring_size=size)
    padded = [-(-length // split.multiple) * split.multiple for length in lengths]
    of_padded = np.concatenate([np.arange(1, length + 1) for length in padded])
    assigned = assign_tokens(padded, [SHARDED] * len(padded), split)
    yield "every document in zigzag", np.array([of_padded[index].sum() for index in assigned])
    yield "the sequence in zigzag", np.array([chunks[rank] + chunks[-1 - rank] for rank in range(size)])
    yield "the sequence in equal parts", np.array([chunks[2 * rank] + chunks[2 * rank + 1] for rank in range(size)])


def print_balance(num_documents: int, size: int, capacity: int) -> None:
    """Print the busiest rank's work divided by the mean, in the median sequence and over all sequences."""
    lengths = wikipedia_lengths(num_documents, capacity)
    multiple = SequenceSplit(ring_size=size).multiple
    print(
        f"\nattended pairs of the busiest of {size} ranks over their mean: {num_documents:,} lengths like Wikipedia's "
        f"(mean {lengths.mean():,.0f}) in sequences of {capacity:,}"
    )
    print(f"{'':28} {'as they come':>16}  {'best fit':>16}")
    print(f"{'':28} {'median':>8} {'all':>7}  {'median':>8} {'all':>7}")
    found: dict[str, str] = {}
    for algorithm in ("sequential", "best_fit"):
        plan = pack(lengths, capacity, PackOptions(packing_algorithm=algorithm), seed=0)
        works: dict[str, list[Int64Array]] = {}
        for samples in np.split(plan.samples, plan.offsets[1:-1]):
            for name, work in cuts_of(lengths[samples].tolist(), size):
                works.setdefault(name, []).append(work)
        for name, all_sequences in works.items():
            busiest, mean = np.max(all_sequences, axis=1), np.mean(all_sequences, axis=1)
            ratios = f"{np.median(busiest / mean):>8.2f} {busiest.sum() / mean.sum():>7.2f}"
            found[name] = f"{found[name]}  {ratios}" if name in found else ratios
    for name, ratios in found.items():
        print(f"{name:28} {ratios}")
    padding = int((-lengths % multiple).sum())
    print(f"the first pads documents to multiples of {multiple}: {padding / lengths.sum():.1%} more tokens")


def main(arguments: list[str] | None = None) -> None:
    """Start processes, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the sequence")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of processes besides 1; default is 2 and 4")
    parser.add_argument("--model", choices=MODELS, default="reduced")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default is cuda if there are several GPUs")
    parser.add_argument("--quick", action="store_true", help="use a tiny model, P = 2, one round")
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    options.device = options.device or ("cuda" if num_gpus > 1 else "cpu")
    if options.quick:
        options.tokens, options.ranks, options.model, options.rounds = 256, [2], "tiny", 1
    options.ranks = options.ranks or [size for size in (2, 4) if options.device == "cpu" or size <= num_gpus]
    if options.device == "cuda" and max([1, *options.ranks]) > num_gpus:
        parser.error(f"--ranks {max(options.ranks, default=1)} needs as many GPUs; there are {num_gpus}")
    long = options.tokens // 2
    work = Work((long, *mixed_lengths(options.tokens - long)), options.model, options.device)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        warnings.simplefilter("ignore")
        ways = make_ways(work, options.ranks, Path(folder), stack)
        print_head(work, options.rounds)
        measure(ways, options.rounds)
        error = check_losses(ways, ALLOWED_ERROR[work.device])
        print(f"every way computes the loss of P = 1 (largest difference {error:.0e})")
        print_ways(ways, work)
    print_balance(1000 if options.quick else 40000, BALANCE_RANKS, BALANCE_ROW)


if __name__ == "__main__":
    main()
