#!/usr/bin/env python3
"""Simulate the six settings of the Skrull paper and compare with its measurements (arXiv 2505.19609).

    python scripts/bench_skrull.py [--steps 20] [--seed 0] [--json FILE]

The settings are Qwen2.5 0.5B and 7B on 32 H100 GPUs, with lengths as in Wikipedia, LMSYS-Chat-1M and
ChatQA2-Long-SFT. A GPU holds 26K (0.5B) or 13K (7B) tokens. There are 4 groups of 8 GPUs with 64 sequences each (7B
with ChatQA2: 2 groups of 16 with 40 sequences). packtool's own planners plan every strategy, and
``packtool.simulate.machine`` estimates the times. Its constants come from data sheets and other papers, not from
these results. Speed-ups are relative to context parallelism for all sequences, with one sequence per micro-batch.
This is our reading of the paper's ZeRO-2 baseline.

- *as printed*: the paper's algorithm with its two errors corrected. *Skrull*: packtool's extension of it.
- *over packed*, *over WLB*: Skrull relative to packs of equal tokens and of equal work that groups share. These
  baselines are stronger than the paper's.
- *dynamic*: a group of 1, 2, 4, ... GPUs for each sequence, relative to Skrull.
- *local*: share of Skrull's tokens that one GPU computes alone.

All strategies have the same sequences in each step, as many as the paper's global batch. The rivals are compared again
with larger groups, with five times the batch, and with weights sharded over all GPUs (ZeRO-3), where micro-batches run
in lock-step.

Group sizes: with a long tail (3 % of Wikipedia's lengths replaced by 16K to 256K, log-uniform), one sequence can have
more work than a group of 8 should do in a step. The table compares groups of 8, 16 and 32 GPUs with dynamic context
parallelism, and counts the steps in which the slowest group exceeds the mean by a fifth, and those of them in which it
has just one sequence: there, exchanging sequences between groups can't help.

Ablation (0.5B, ChatQA2, one group of 8): sequences assigned to ranks in turn, not to the least loaded rank; and no
roll-back, so that sequences that fit nowhere are sharded without room for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.config.simulate import StrategyName
from packtool.planning.cost import MODEL_PRESETS, ModelSizes
from packtool.planning.skrull import SHARDED, PlacedMicroBatch, schedule_step
from packtool.simulate.hardware import HARDWARE_PRESETS
from packtool.simulate.machine import Machine
from packtool.simulate.run import DistributionName, Outcome, arrange, draw_lengths, outcome, simulate
from packtool.simulate.strategies import PlacedBatch, Sequences, SimulateOptions, schedule_of

# An all-gather of 2 MB took 53 us there, and one of 1024 MB 6468 us: (7 / 8) 1024 MB / 6468 us. The links between nodes
# are not told: 80 % of 400 Gb/s for each GPU.
PAPERS_H100 = dataclasses.replace(
    HARDWARE_PRESETS["h100"],
    latency_us=53.0,
    intra_node_gb_per_s=7 / 8 * 1024e6 / 6468e-6 / 1e9,
    inter_node_gb_per_s=40.0,
    link_share=1.0,
)
PAPER = {"mean": 3.76, "peak": 7.54, "qwen2.5-0.5b": 5.50, "qwen2.5-7b": 2.03, "over sorted": 3.45}
PAPER_ABLATION = {"round robin": "1.17x", "Skrull as printed": "1.40x"}
DEPARTURES = """where this simulation departs from the paper
- The paper measured times; these are simulated. We do not know how its baseline fills micro-batches; here each has one
  sequence. With short sequences, launching kernels then takes longer than the computation (18 ms for 0.5B), so these
  speed-ups are far above the paper's. Packs of the same global batch avoid this (over packed).
- 7B recomputes activations, because 13K tokens do not fit into 80 GB without it by this model. 0.5B does not.
- Gradients are synchronized once per step. If ZeRO-2 does so for every micro-batch, its baseline is slower than here.
- Lengths are drawn from the published points, log-linear between them, from 64 tokens on. Sequences that 8 (or 16)
  buckets cannot hold are left out, such as LMSYS's longest, of 1643K."""


@dataclass(frozen=True)
class Setting:
    """A model and a dataset; see ``SimulateOptions``."""

    model: str
    data: DistributionName
    world_size: int = 32
    sequence_parallel_size: int = 8
    sequences_per_rank: int = 64

    def options(self, steps: int, seed: int) -> SimulateOptions:
        """Return the simulation options with the paper's bucket sizes."""
        large = self.model == "qwen2.5-7b"
        sizes = ModelSizes.of_config(MODEL_PRESETS[self.model])
        bucket = (13 if large else 26) * 1024
        return SimulateOptions(
            machine=Machine(sizes=sizes, hardware=PAPERS_H100, world_size=self.world_size, recompute=large),
            sequence_parallel_size=self.sequence_parallel_size,
            bucket_size=bucket,
            packing_length=bucket,
            sequences_per_rank=self.sequences_per_rank,
            num_steps=steps,
            seed=seed,
        )

    def sequences(self, options: SimulateOptions) -> Sequences:
        """Return lengths and targets for all strategies."""
        num = round(1.1 * options.num_steps * options.sequences_per_step) + 10
        return arrange(draw_lengths(self.data, num, seed=options.seed), options)


STRATEGIES: tuple[StrategyName, ...] = ("context-parallel", "sorted", "packed-shared", "wlb", "dynamic-cp", "skrull")
RIVALS: tuple[StrategyName, ...] = ("wlb", "dynamic-cp", "skrull")
# GPUs of a group (None: the setting's), what is sharded over all, and how many times the global batch.
RIVALRIES = {
    "as above": (None, 2, 1),
    "batch x 5": (None, 2, 5),
    "groups of 16": (16, 2, 1),
    "groups of 32": (32, 2, 1),
    "lock-step": (None, 3, 1),
}
SETTINGS = (
    Setting("qwen2.5-0.5b", "wikipedia"),
    Setting("qwen2.5-0.5b", "lmsys"),
    Setting("qwen2.5-0.5b", "chatqa2"),
    Setting("qwen2.5-7b", "wikipedia"),
    Setting("qwen2.5-7b", "lmsys"),
    Setting("qwen2.5-7b", "chatqa2", sequence_parallel_size=16, sequences_per_rank=40),
)
ABLATION = Setting("qwen2.5-0.5b", "chatqa2", world_size=8)
GROUP_SIZES = (8, 16, 32)
TAIL_SHARE, TAIL_RANGE = 0.03, (16 * 1024, 256 * 1024)  # sequences of the long tail, and their tokens


class Ranks:
    """The ranks of a micro-batch while sequences are placed by the paper's heuristic or a variant of it."""

    def __init__(self, options: SimulateOptions, in_turn: bool) -> None:
        self.num, self.in_turn, self.turn = options.sequence_parallel_size, in_turn, 0
        self.alignment = options.skrull.alignment
        self.room = [float(options.bucket_size)] * self.num
        self.load = [0.0] * self.num
        self.places: dict[int, int] = {}
        self.local: list[list[tuple[int, int, float]]] = [[] for _ in range(self.num)]

    def add(self, sequence: int, tokens: int, flops: float, roll_back: bool) -> bool:
        """Place a sequence; False if it fits nowhere, in which case it is sharded without room for it."""
        share = -(-tokens // self.alignment) * self.alignment / self.num
        while True:
            if min(self.room) >= 0:
                candidates = [self.turn % self.num] if self.in_turn else [int(np.argmin(self.load))]
                rank = next((one for one in [*candidates, int(np.argmax(self.room))] if self.room[one] >= tokens), None)
                if rank is not None:
                    self.turn += 1
                    self.room[rank] -= tokens
                    self.load[rank] += flops
                    self.local[rank].append((sequence, tokens, flops))
                    self.places[sequence] = rank
                    return True
                if min(self.room) >= share:
                    self._shard(sequence, share)
                    return True
            fullest = int(np.argmin(self.room))
            if not roll_back or not self.local[fullest]:
                self._shard(sequence, share)
                return False
            rolled, its_tokens, its_flops = self.local[fullest].pop()
            self.room[fullest] += its_tokens
            self.load[fullest] -= its_flops
            self._shard(rolled, -(-its_tokens // self.alignment) * self.alignment / self.num)

    def _shard(self, sequence: int, share: float) -> None:
        self.places[sequence] = SHARDED
        self.room = [room - share for room in self.room]


def as_printed(
    sequences: Sequences, options: SimulateOptions, *, in_turn: bool = False, roll_back: bool = True
) -> list[PlacedBatch]:
    """Run the paper's corrected algorithm, or a part of it, on every step.

    Args:
        in_turn: sequences go to the ranks of a group in turn, not to the least loaded one.
        roll_back: False gives up instead, with as few micro-batches as the tokens need.
    """
    per_step, size = options.sequences_per_step, options.sequence_parallel_size
    cost = options.machine.sizes.cost
    found = []
    for step in range(options.num_steps):
        first = step * per_step
        sizes = sequences.lengths[first : first + per_step].astype(np.int64)
        flops = cost(sizes, cost.attention(sizes), target_tokens=sizes)
        for group, hand in enumerate(_assign(flops.tolist(), options.num_groups)):
            ascending = sorted(hand, key=lambda one: (sizes[one], one))
            fewest = -(-int(sizes[hand].sum()) // (options.bucket_size * options.sequence_parallel_size))
            for num in range(fewest, len(hand) + 1):
                cut = [ascending[part::num] for part in range(num)]
                placed = [
                    _place(part, sizes.tolist(), flops.tolist(), Ranks(options, in_turn), roll_back) for part in cut
                ]
                if not roll_back or all(fits for _, fits in placed):
                    break
            found += [
                PlacedBatch(group * size, size, np.array(one.samples) + first, np.array(one.placement), step)
                for one, _ in placed
            ]
    return found


def _place(
    part: Sequence[int], sizes: Sequence[int], flops: Sequence[float], ranks: Ranks, roll_back: bool
) -> tuple[PlacedMicroBatch, bool]:
    fits = [ranks.add(one, sizes[one], flops[one], roll_back) for one in part]
    return PlacedMicroBatch(list(part), [ranks.places[one] for one in part], 0.0), all(fits)


def _assign(flops: Sequence[float], num_ranks: int) -> list[list[int]]:
    rank_sequences: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for one in sorted(range(len(flops)), key=lambda one: -flops[one]):
        load, rank = heapq.heappop(loads)
        rank_sequences[rank].append(one)
        heapq.heappush(loads, (load + flops[one], rank))
    return rank_sequences


def variant(sequences: Sequences, options: SimulateOptions, **parts: bool) -> Outcome:
    """Simulate a variant of Skrull."""
    return outcome(
        "skrull", schedule_of(as_printed(sequences, options, **parts), sequences, options), sequences, options
    )


def run_settings(settings: Sequence[Setting], steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the speed-ups of each setting, relative to context parallelism and to the rivals."""
    for setting in settings:
        options = setting.options(steps, seed)
        sequences = setting.sequences(options)
        base, by_length, packed, balanced, dynamic, skrull = simulate(sequences, STRATEGIES, options)
        assert not skrull.out_of_memory.any()
        yield {
            "model": setting.model,
            "data": setting.data,
            "baseline_seconds": float(base.timing.step_seconds.mean()),
            "sorted": by_length.speedup_over(base),
            "packed": packed.speedup_over(base),
            "as_printed": variant(sequences, options).speedup_over(base),
            "skrull": skrull.speedup_over(base),
            "over_packed": skrull.speedup_over(packed),
            "over_balanced": skrull.speedup_over(balanced),
            "dynamic_over_skrull": dynamic.speedup_over(skrull),
            "local": skrull.local_share,
        }


def run_rivals(settings: Sequence[Setting], steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield (speed-up of dynamic over Skrull, of Skrull over WLB-LLM, local share) for each entry of ``RIVALRIES``."""
    for setting in settings:
        usual = setting.sequence_parallel_size
        row: dict[str, Any] = {"model": setting.model, "data": setting.data}
        for name, (size, zero_stage, times) in RIVALRIES.items():
            num_ranks = size or usual
            per_rank = times * setting.sequences_per_rank * num_ranks // usual
            placed = dataclasses.replace(setting, sequence_parallel_size=num_ranks, sequences_per_rank=per_rank)
            options = placed.options(steps, seed)
            machine = dataclasses.replace(options.machine, zero_stage=zero_stage)
            options = dataclasses.replace(options, machine=machine)
            balanced, dynamic, skrull = simulate(placed.sequences(options), RIVALS, options)
            row[name] = dynamic.speedup_over(skrull), skrull.speedup_over(balanced), skrull.local_share
        yield row


def draw_long_tail(num: int, seed: int) -> np.ndarray:
    """Draw lengths as in Wikipedia, int64 (num,), with a share of ``TAIL_SHARE`` log-uniform in ``TAIL_RANGE``."""
    rng = np.random.default_rng(seed)
    lengths = draw_lengths("wikipedia", num, seed=seed)
    tail = np.exp(rng.uniform(*np.log(TAIL_RANGE), num)).astype(np.int64)
    return np.where(rng.random(num) < TAIL_SHARE, tail, lengths)


def run_group_sizes(steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the seconds per step of each data set by size of the groups; 256 sequences per step, 32 GPUs."""
    for model in ("qwen2.5-0.5b", "qwen2.5-7b"):
        for data in ("long tail", "wikipedia", "lmsys", "chatqa2"):
            row: dict[str, Any] = {"model": model, "data": data, "uneven": 0, "single": 0}
            for size in GROUP_SIZES:
                name = cast(DistributionName, data)
                setting = Setting(model, name, sequence_parallel_size=size, sequences_per_rank=8 * size)
                bucket = TAIL_RANGE[1] // min(GROUP_SIZES) + 1024  # the longest sequence fits into the smallest group
                options = dataclasses.replace(setting.options(steps, seed), bucket_size=bucket, packing_length=bucket)
                num = round(1.1 * steps * options.sequences_per_step) + 10
                lengths = draw_long_tail(num, seed) if data == "long tail" else draw_lengths(name, num, seed=seed)
                sequences = arrange(lengths, options)
                dynamic, skrull = simulate(sequences, ("dynamic-cp", "skrull"), options)
                row[size] = float(skrull.timing.step_seconds.mean())
                if size == min(GROUP_SIZES):
                    row["dynamic"] = float(dynamic.timing.step_seconds.mean())
                    row["uneven"], row["single"] = count_uneven_steps(sequences, options)
            yield row


def count_uneven_steps(sequences: Sequences, options: SimulateOptions) -> tuple[int, int]:
    """Count steps whose slowest group exceeds the mean by a fifth, and those where it has a single sequence."""
    per_step, cost = options.sequences_per_step, options.machine.sizes.cost
    num_uneven = num_single = 0
    for step in range(options.num_steps):
        batch = sequences[slice(step * per_step, (step + 1) * per_step)]
        lengths = batch.lengths.astype(np.int64)
        flops = cost(lengths, cost.attention(lengths), target_tokens=batch.targets)
        groups = schedule_step(lengths, flops, options.skrull, num_ranks=options.num_groups)
        seconds = [sum(micro_batch.seconds for micro_batch in group) for group in groups]
        slowest = groups[int(np.argmax(seconds))]
        if max(seconds) > 1.2 * np.mean(seconds):
            num_uneven += 1
            num_single += sum(len(micro_batch.samples) for micro_batch in slowest) == 1
    return num_uneven, num_single


def run_ablation(setting: Setting, steps: int, seed: int) -> Iterator[tuple[str, float, int]]:
    """Yield (variant, speed-up relative to context parallelism, steps out of memory)."""
    options = setting.options(steps, seed)
    sequences = setting.sequences(options)
    base, skrull = simulate(sequences, ["context-parallel", "skrull"], options)
    found = {
        "round robin": variant(sequences, options, in_turn=True),
        "round robin, no roll-back": variant(sequences, options, in_turn=True, roll_back=False),
        "Skrull as printed": variant(sequences, options),
        "as printed, no roll-back": variant(sequences, options, roll_back=False),
        "Skrull": skrull,
    }
    for name, one in found.items():
        yield name, one.speedup_over(base), int(one.out_of_memory.sum())


def main(arguments: list[str] | None = None) -> None:
    """Simulate and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    args = parser.parse_args(arguments)
    constants = SETTINGS[0].options(1, 0).machine.constants
    print(f"constants: {constants}\nhardware: {PAPERS_H100}\n")
    names = ("baseline", "sorted", "packed", "as printed", "Skrull", "over packed", "over WLB", "dynamic", "local")
    print(f"{'':<26}" + "".join(f"{name:>12}" for name in names))
    rows = []
    for row in run_settings(SETTINGS, args.steps, args.seed):
        rows.append(row)
        speedups = [value for key, value in row.items() if key not in ("model", "data", "baseline_seconds", "local")]
        shown = "".join(f"{value:>11.2f}x" for value in speedups) + f"{row['local']:>12.0%}"
        print(f"{row['model']:<14}{row['data']:<12}{row['baseline_seconds'] * 1000:>9,.0f} ms{shown}", flush=True)
    print(f"\n{'Skrull over ZeRO-2':<26}{'paper':>13}{'as printed':>13}{'Skrull':>13}")
    for name, pick in summaries(rows).items():
        shown = "".join(f"{value:>12.2f}x" for value in pick)
        print(f"{name:<26}{PAPER[name]:>12.2f}x{shown}")
    print("\ndynamic over Skrull | Skrull over WLB | local")
    print(f"{'':<26}" + "".join(f"{name:>22}" for name in RIVALRIES))
    rivals = []
    for row in run_rivals(SETTINGS, max(args.steps // 2, 1), args.seed):
        rivals.append(row)
        cells = [f"{dyn:.2f} | {over:.2f} | {local:.0%}" for dyn, over, local in (row[name] for name in RIVALRIES)]
        print(f"{row['model']:<14}{row['data']:<12}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    sizes = "".join(f"{f'groups of {size}':>14}" for size in GROUP_SIZES)
    print(f"\n{'seconds per step':<26}{sizes}{'dynamic':>14}{'gain':>8}{'uneven':>8}{'single':>8}")
    group_sizes = []
    for row in run_group_sizes(args.steps, args.seed):
        group_sizes.append(row)
        seconds = [row[size] for size in GROUP_SIZES]
        cells = "".join(f"{value:>14.3f}" for value in [*seconds, row["dynamic"]])
        gain = min(seconds) / row["dynamic"]
        print(
            f"{row['model']:<14}{row['data']:<12}{cells}{gain:>7.2f}x{row['uneven']:>8}{row['single']:>8}", flush=True
        )
    print(f"\n{'ablation':<26}{'paper':>13}{'here':>13}{'out of memory':>16}")
    ablation = list(run_ablation(ABLATION, args.steps, args.seed))
    for name, speedup, full in ablation:
        told = PAPER_ABLATION.get(name, "out of memory" if "no roll" in name else "")
        print(f"{name:<26}{told:>13}{speedup:>12.2f}x{f'{full} of {args.steps}' if full else '-':>16}")
    print(f"\n{DEPARTURES}")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"settings": rows, "rivals": rivals, "group_sizes": group_sizes, "ablation": ablation})
        )
        print(f"wrote {args.json}")


def summaries(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Return the figures that the paper reports, as (as printed, Skrull)."""
    found: dict[str, list[float]] = {name: [] for name in PAPER}
    for key in ("as_printed", "skrull"):
        speedups = np.array([row[key] for row in rows])
        found["mean"].append(float(speedups.mean()))
        found["peak"].append(float(speedups.max()))
        for model in ("qwen2.5-0.5b", "qwen2.5-7b"):
            found[model].append(float(np.mean([row[key] for row in rows if row["model"] == model])))
        found["over sorted"].append(float(np.mean([row[key] / row["sorted"] for row in rows])))
    return {name: tuple(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
