#!/usr/bin/env python3
"""Measure how evenly work is divided among ranks, on real rows with pictures of many sizes.

    python scripts/bench_balance.py REALDATA [--ranks 8 64] [--packing-length 8192] [--accumulation 4] [--copies 24]

REALDATA contains ``mm_*.jsonl`` and ``text_*.jsonl`` with their media, and ``tokenizers/qwen3-vl``. The rows are
exported for Qwen3-VL, rows with media are repeated, and all are packed. Packs are assigned to ranks for a Qwen3-VL-8B
in three ways: in turn, by a cost that depends only on the number of tokens, and by packtool's cost, which also
depends on the size of each picture. The figures are the work of the slowest rank divided by the mean, as the mean
over all steps and as the worst step. Work is measured by packtool's cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.cache.export import export
from packtool.cache.reader import CacheReader
from packtool.config.data import ExportConfig
from packtool.config.model import LearningOptions
from packtool.planning.cost import ALL_WEIGHTS, MODEL_PRESETS, CostModel
from packtool.planning.epoch import plan_epoch
from packtool.planning.options import PlanOptions
from packtool.planning.steps import imbalance
from packtool.planning.summary import pack_costs
from packtool.planning.towers import TowerWork
from packtool.progress import SilentProgress

# What the model's own config.json says.
TOWER: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
}
QWEN3_VL_8B: dict[str, Any] = {"text_config": MODEL_PRESETS["8b"], "vision_config": TOWER}
WAYS = {
    "adapters, frozen tower": LearningOptions(),
    "all weights": ALL_WEIGHTS,
}


@dataclasses.dataclass(frozen=True)
class Samples:
    """Sizes of N samples that planning needs; each field is (N,)."""

    lengths: Any
    targets: Any
    vision_tokens: Any
    patch_squares: Any
    num_media: Any

    def towers(self, cost: CostModel) -> TowerWork:
        """Return the vision tower's work for each sample."""
        flops = cost.towers(self.vision_tokens, self.patch_squares)
        return TowerWork(np.rint(flops).astype(np.int64), self.num_media)


def read_samples(realdata: Path, packing_length: int, copies: int) -> Samples:
    """Export the rows and repeat those with media ``copies`` times."""
    if not (realdata / "tokenizers" / "qwen3-vl").is_dir():
        sys.exit(f"{realdata} contains no real data: give its folder")
    rows = sorted(str(path) for path in [*realdata.glob("mm_*.jsonl"), *realdata.glob("text_*.jsonl")])
    with tempfile.TemporaryDirectory() as folder:
        config = ExportConfig(
            model=str(realdata / "tokenizers" / "qwen3-vl"),
            dataset=tuple(rows),
            output_dir=f"{folder}/cache",
            max_length=packing_length,
            media_root=str(realdata),
        )
        export(config, SilentProgress())
        index = CacheReader.open([f"{folder}/cache"]).index
    times = np.where(index.media_tokens > 0, copies, 1)
    columns = index.length, index.target_tokens, index.vision_tokens, index.patch_squares
    return Samples(*(np.repeat(column, times) for column in (*columns, index.num_images + index.num_videos)))


def by_tokens(cost: CostModel, samples: Samples) -> CostModel:
    """Return a cost model with the same total work, in which every picture token costs the same."""
    squares = samples.patch_squares.sum() / samples.vision_tokens.sum()
    per_token = cost.per_vision_token + cost.per_patch_square * squares
    return dataclasses.replace(cost, per_vision_token=float(per_token), per_patch_square=0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each training type, number of ranks and assignment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("realdata", type=Path, help="folder of the real data, which is not part of the repository")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--packing-length", type=int, default=8192)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--copies", type=int, default=24)
    given = parser.parse_args(arguments)
    samples = read_samples(given.realdata.resolve(), given.packing_length, given.copies)
    seen = samples.vision_tokens[samples.vision_tokens > 0]
    print(
        f"{len(samples.lengths):,} samples, {len(seen):,} with media of {seen.min():,} to {seen.max():,} tokens; "
        f"packs of {given.packing_length:,}, {given.accumulation} micro-batches a step"
    )
    print(f"\n{'trained':<24}{'ranks':>6}  {'assigned':<24}{'mean':>7}{'worst':>7}")
    for way, learning in WAYS.items():
        cost = CostModel.of_config(QWEN3_VL_8B, learning)
        true = samples.towers(cost)
        assigned = {"in turn": None, "by tokens": by_tokens(cost, samples), "by cost": cost}
        for num_ranks in given.ranks:
            for name, asked in assigned.items():
                options = PlanOptions(
                    max_length=given.packing_length,
                    packing_length=given.packing_length,
                    world_size=num_ranks,
                    gradient_accumulation_steps=given.accumulation,
                    balance="none" if asked is None else "within-step",
                    cost=asked,
                )
                towers = None if asked is None else samples.towers(asked)
                plan = plan_epoch(samples.lengths, samples.targets, options, seed=0, towers=towers)
                work = plan.steps.rank_costs(pack_costs(plan.packs, cost, samples.targets, true))
                full = imbalance(work)[:-1]  # the last step is not full
                print(f"{way:<24}{num_ranks:>6}  {name:<24}{full.mean():>7.3f}{full.max():>7.3f}")


if __name__ == "__main__":
    main()
