"""Rows that begin alike, laid out with their prefixes once, whole and padded, for ``bench_prefix.py``."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from packtool.attention.register import set_attention
from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs, collate_padded, collate_tree
from packtool.batch.spec import InputSpec
from packtool.cache.export import export
from packtool.cache.reader import CacheReader
from packtool.config.data import ExportConfig
from packtool.constants import MIN_SHARED
from packtool.encode.encoded import EncodedSample
from packtool.planning.pack_plan import PackPlan
from packtool.planning.packing import pack
from packtool.planning.prefix_trees import Prefixes, PrefixTrees, plan_trees
from packtool.progress import SilentProgress
from packtool.train.model.loss import HeadLoss
from scripts._flop_counter import flop_counter
from scripts._kept import Kept

SHARED, WHOLE, PADDED = "prefixes once", "packed whole", "padded"


@dataclass(frozen=True)
class World:
    """What is asked about what.

    Args:
        model: directory.
        pictures: paths.
        asked: questions and answers.
        picture_tokens: of each picture, about.
        packing_length: tokens of a pack.
    """

    model: Path
    pictures: Sequence[str]
    asked: Sequence[Sequence[str]]
    picture_tokens: int
    packing_length: int


@dataclass(frozen=True)
class Rows:
    """Exported rows, and how each way lays them out: positions in the cache."""

    cache: Path
    spec: InputSpec
    samples: Sequence[EncodedSample]
    trees: PrefixTrees
    ways: Mapping[str, PackPlan]


@dataclass(frozen=True)
class Epoch:
    """One epoch in one way, in seconds of the processor.

    Args:
        collating, training: seconds.
        loss: sum over all targets.
    """

    collating: float
    training: float
    loss: float


@dataclass(frozen=True)
class Work:
    """What an epoch takes in one way.

    Args:
        tokens: that the model runs over, padding among them.
        patches: that the vision tower looks at.
        flops: forward and backward.
        kept: bytes of each micro-batch for its backward pass.
    """

    tokens: int
    patches: int
    flops: int
    kept: Sequence[int]


def export_rows(world: World, work: Path, name: str, rows: Sequence[Mapping[str, Any]], **settings: Any) -> Rows:
    """Export rows to a cache of this name, and plan.

    Args:
        settings: further ones of the export.
    """
    lines, cache = work / f"{name}.jsonl", work / f"cache-{name}"
    lines.write_text("\n".join(map(json.dumps, rows)))
    config = ExportConfig(
        model=str(world.model),
        max_length=world.packing_length,
        dataset=(str(lines),),
        output_dir=str(cache),
        image_max_token_num=world.picture_tokens,
        image_min_token_num=world.picture_tokens * 7 // 8,
        media_root=str(Path(world.pictures[0]).parent),
        **settings,
    )
    export(config, SilentProgress())
    reader = CacheReader.open([str(cache)])
    spec = InputSpec.load(str(world.model), reader.manifests[0].identity.media_limits)
    samples = [reader.sample(number) for number in range(len(reader))]
    lengths = np.array([sample.length for sample in samples])
    told = reader.prefixes()
    assert told is not None, "the cache was made just now"
    prefixes = Prefixes(told.offsets, told.prefixes.lengths, told.prefixes.hashes)
    trees = plan_trees(lengths, prefixes, capacity=world.packing_length, min_shared=MIN_SHARED)
    groups = pack(trees.sums_per_group(trees.new_tokens(lengths)), world.packing_length, seed=0)
    whole = pack(lengths, world.packing_length, seed=0)
    return Rows(cache, spec, samples, trees, {SHARED: trees.expand(groups, lengths), WHOLE: whole})


def micro_batches(rows: Rows, way: str) -> list[list[EncodedSample]]:
    """The samples of each; padded ones are as many as a pack holds whole, in the order of the rows."""
    if way == PADDED:
        size = max(round(len(rows.samples) / rows.ways[WHOLE].num_packs), 1)
        return [list(rows.samples[start : start + size]) for start in range(0, len(rows.samples), size)]
    plan = rows.ways[way]
    return [[rows.samples[number] for number in plan.pack(place)] for place in range(plan.num_packs)]


def collated(rows: Rows, way: str, samples: Sequence[EncodedSample]) -> Batch:
    """One micro-batch."""
    collate = {SHARED: collate_tree, WHOLE: collate_packs, PADDED: collate_padded}[way]
    return collate(samples, rows.spec)


def models_of(world: World) -> dict[str, Any]:
    """The same weights, packed and as transformers has them."""
    made: dict[str, Any] = {}
    for way in (WHOLE, PADDED):
        torch.manual_seed(0)
        made[way] = AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32)
    set_attention(made[WHOLE])
    return made | {SHARED: made[WHOLE]}


def heads_of(models: Mapping[str, Any]) -> dict[str, HeadLoss]:
    """Losses in the head, of each way; a model has but one."""
    heads = {way: HeadLoss(models[way]) for way in (WHOLE, PADDED)}
    return heads | {SHARED: heads[WHOLE]}


def run(rows: Rows, way: str, model: Any, head: HeadLoss) -> Epoch:
    """Collate and train every micro-batch once."""
    collating = training = loss = 0.0
    for samples in micro_batches(rows, way):
        begin = time.process_time()
        batch = collated(rows, way, samples)
        made = time.process_time()
        loss += step(model, head, batch)
        training += time.process_time() - made
        collating += made - begin
    return Epoch(collating, training, loss)


def step(model: Any, head: HeadLoss, batch: Batch) -> float:
    """Forward and backward; returns the sum of the losses."""
    model.zero_grad(set_to_none=True)
    found = head.losses(model, batch).weighted_sum()
    torch.autograd.backward(found)
    return float(found.detach())


def count(rows: Rows, way: str, model: Any, head: HeadLoss) -> Work:
    """Run an epoch once for its figures; it takes no time that is told."""
    tokens = patches = flops = 0
    kept = []
    for samples in micro_batches(rows, way):
        batch = collated(rows, way, samples)
        seen = Kept(model)
        with flop_counter() as counter:
            with seen:
                found = head.losses(model, batch).weighted_sum()
            torch.autograd.backward(found)
        tokens += batch.input_ids.numel()
        patches += len(batch.media.get(rows.spec.family.image_inputs[0], ()))
        flops += counter.get_total_flops()
        kept.append(seen.num_bytes)
    return Work(tokens, patches, flops, kept)


def measure(rows: Rows, world: World, rounds: int) -> tuple[dict[str, Work], dict[str, list[Epoch]]]:
    """What every way takes, and epochs of it, one a round."""
    models = models_of(world)
    heads = heads_of(models)
    names = [SHARED, WHOLE, PADDED]
    # Counted first, which also does what is only slow at first.
    counted = {way: count(rows, way, models[way], heads[way]) for way in names}
    measured: dict[str, list[Epoch]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for way in names[turn:] + names[:turn]:
            measured[way].append(run(rows, way, models[way], heads[way]))
    return counted, measured


def print_rows(title: str, rows: Rows, counted: Mapping[str, Work], measured: Mapping[str, Sequence[Epoch]]) -> None:
    """What each way takes, and how many rows a second it trains, as ratios to prefixes once."""
    lengths = np.array([sample.length for sample in rows.samples])
    saved = rows.trees.saved(lengths)
    print(f"\n{title}: {len(rows.samples)} rows of {lengths.mean():.0f} tokens, {saved:.0%} of them shared")
    columns = f"{'':14} {'tokens':>8} {'patches':>8} {'GFLOPs':>8} {'MiB kept':>9} {'a row':>6} {'rows/s':>7}"
    print(f"{columns}  once is faster by")
    for name, epochs in measured.items():
        work, rate = counted[name], len(rows.samples) / statistics.median(epoch.training for epoch in epochs)
        most, each = max(work.kept) / 2**20, sum(work.kept) / 2**20 / len(rows.samples)
        line = f"{name:14} {work.tokens:>8,} {work.patches:>8,} {work.flops / 1e9:>8,.0f} {most:>9,.0f} {each:>6.1f}"
        line += f" {rate:>7.2f}"
        if name != SHARED:
            pairs = list(zip(epochs, measured[SHARED], strict=True))
            ratios = [other.training / shared.training for other, shared in pairs]
            both = [(one.training + one.collating) / (other.training + other.collating) for one, other in pairs]
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            line += f"  {shown}, with collating {statistics.median(both):.2f}"
        print(line, flush=True)
    losses = [epochs[0].loss for epochs in measured.values()]
    print(f"sums of losses differ by {max(losses) / min(losses) - 1:.1e}")
