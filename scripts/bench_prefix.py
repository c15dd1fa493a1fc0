#!/usr/bin/env python3
"""What rows begin with in common, computed once or once a row: the difference on the CPU, as ratios in one run.

- ``questions``: pictures of real rows, each of about 500 tokens, are asked 1, 2, 4, 8 and 16 short questions, of real
  rows too, and exported. The same rows are packed with their common prefixes once (``plan.prefix_trees`` and
  ``batch.collate_tree``), packed whole, and padded, and every way collates and trains the same epoch of them, forward
  and backward without an optimizer, round after round in an order that turns.
- ``alone``: rows that share nothing, prepared and trained as ``packtool train`` does it, with ``--share-prefix auto``
  and with ``false``: what looking for prefixes costs.
- ``planning``: caches of a million rows, of which planning reads what it always reads: seconds with and without trees.

    python scripts/bench_prefix.py [--parts questions alone planning] [--realdata DIR] [--pictures 3]
        [--questions 1 2 4 8 16] [--rounds 3] [--planning-rows 1000000] [--quick]

Times are of the processor, on one thread: other work on the machine changes them little. FLOPs are those that torch
counts, with the whole square of causal attention. What is kept are the tensors that autograd holds for the backward
pass, without the weights. The model is random, see ``_reduced_model.py``. ``--quick`` takes drawn pictures and the
demo's model, to see that everything runs; its ratios say nothing. The real data (conversations, pictures, tokenizers)
is not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.attention.register import set_attention
from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs, collate_padded
from packtool.batch.collate_tree import collate_tree
from packtool.batch.dataset import MicroBatches
from packtool.batch.micro_batch import planned_steps
from packtool.batch.spec import InputSpec
from packtool.cache.export import export
from packtool.cache.reader import CacheReader
from packtool.config.export import ExportConfig
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.constants import LEAST_SHARED
from packtool.demo.model import make_model as make_demo_model
from packtool.demo.world import make_rows
from packtool.encode.encoded import EncodedSample
from packtool.launch.world import World as Processes
from packtool.plan.pack_plan import PackPlan
from packtool.plan.packing import pack
from packtool.plan.prefix_trees import Prefixes, PrefixTrees, plan_trees
from packtool.progress import SilentProgress
from packtool.train.model.head_loss import HeadLoss
from packtool.train.prepare.cached import prepare_cached
from packtool.train.prepare.preview import preview
from scripts._kept import Kept
from scripts._prefix_planning import make_large_cache
from scripts._reduced_model import reduce_model

ROWS = "mm_mathvision_a.jsonl"
PICTURE_TOKENS = 512
LONGEST_QUESTION = 100
SHARED, WHOLE, PADDED = "prefixes once", "packed whole", "padded"
PARTS = ("questions", "alone", "planning")
ROWS_PER_PICTURE = 5.4  # VQAv2's


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
    asked: Sequence[tuple[str, str]]
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


def real_world(realdata: Path, work: Path, num_pictures: int) -> World:
    """Pictures and short questions of real rows, and the reduced model."""
    reduce_model(realdata / "tokenizers" / "qwen3-vl", work / "model")
    rows = [json.loads(line) for line in (realdata / ROWS).read_text().splitlines()]
    pictures = list(dict.fromkeys(str(realdata / row["images"][0]) for row in rows))[:num_pictures]
    pairs = [tuple(turn["content"].replace("<image>", "") for turn in row["messages"][:2]) for row in rows]
    asked = [(question, answer) for question, answer in pairs if len(question) + len(answer) < LONGEST_QUESTION]
    return World(work / "model", pictures, asked, PICTURE_TOKENS, 8192)


def small_world(work: Path) -> World:
    """The demo's pictures and model."""
    make_demo_model(str(work / "model"), seed=0)
    make_rows(str(work / "rows"), num_rows=24, seed=0)
    pictures = [str(path) for path in sorted((work / "rows" / "pictures").iterdir())[:2]]
    return World(work / "model", pictures, [(f"How many {name}?", "3") for name in "abcdefgh"], 64, 512)


def questions_about(world: World, num_questions: int) -> list[dict[str, Any]]:
    """Rows that ask each picture so many questions."""
    rows = []
    for number, picture in enumerate(world.pictures):
        for place in range(num_questions):
            question, answer = world.asked[(number * num_questions + place) % len(world.asked)]
            user = {"role": "user", "content": f"<image>{question}"}
            rows.append({"messages": [user, {"role": "assistant", "content": answer}], "images": [picture]})
    return rows


def export_rows(world: World, work: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Export rows to a cache of this name, and plan."""
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
    )
    export(config, SilentProgress())
    reader = CacheReader.open([str(cache)])
    spec = InputSpec.load(str(world.model), reader.manifests[0].identity.media_limits)
    samples = [reader.sample(number) for number in range(len(reader))]
    lengths = np.array([sample.length for sample in samples])
    told = reader.prefixes()
    assert told is not None, "the cache was made just now"
    prefixes = Prefixes(told.offsets, told.prefixes.lengths, told.prefixes.hashes)
    trees = plan_trees(lengths, prefixes, capacity=world.packing_length, least_shared=LEAST_SHARED)
    groups = pack(trees.sums_per_group(trees.new_tokens(lengths)), world.packing_length, seed=0)
    whole = pack(lengths, world.packing_length, seed=0)
    return Rows(cache, spec, samples, trees, {SHARED: trees.unfolded(groups, lengths), WHOLE: whole})


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
    found = head.losses(model, batch).sum(batch.loss_weights)
    torch.autograd.backward(found)
    return float(found.detach())


def count(rows: Rows, way: str, model: Any, head: HeadLoss) -> Work:
    """Run an epoch once for its figures; it takes no time that is told."""
    tokens = patches = flops = 0
    kept = []
    for samples in micro_batches(rows, way):
        batch = collated(rows, way, samples)
        seen = Kept(model)
        with FlopCounterMode(display=False) as counter:
            with seen:
                found = head.losses(model, batch).sum(batch.loss_weights)
            torch.autograd.backward(found)
        tokens += batch.input_ids.numel()
        patches += len(batch.media[rows.spec.family.image_inputs[0]])
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


def bench_questions(world: World, work: Path, questions: Sequence[int], rounds: int) -> None:
    """Several questions about each picture."""
    for num_questions in questions:
        rows = export_rows(world, work, f"questions-{num_questions}", questions_about(world, num_questions))
        print_rows(f"{num_questions} questions a picture", rows, *measure(rows, world, rounds))


def bench_alone(world: World, work: Path, rounds: int) -> None:
    """Rows that share nothing, from their preparation to the end of an epoch, with and without looking for prefixes."""
    rows = export_rows(world, work, "alone", questions_about(world, 1))
    model = models_of(world)[WHOLE]
    head = HeadLoss(model)

    def seconds(share_prefix: str) -> float:
        begin = time.process_time()
        config = TrainConfig(
            model=str(world.model),
            cached_dataset=(str(rows.cache),),
            output_dir=str(work / "out"),
            packing_length=world.packing_length,
            share_prefix=share_prefix,
        )
        run = prepare_cached(config, Processes())
        assert run.shared is None, "these rows share nothing"
        dataset = MicroBatches(run.read, rows.spec, least_shared=run.least_shared)
        for micro_batch in (each for steps in planned_steps(run.schedule.plan_of(0), 0) for each in steps):
            batch: Any = dataset[micro_batch]
            step(model, head, batch)
        return time.process_time() - begin

    print(f"\n{len(rows.samples)} rows that share nothing, prepared and trained for an epoch")
    print_both(seconds, rounds)


def bench_planning(source: Path, work: Path, num_rows: int, model: Path, rounds: int) -> None:
    """What planning of many rows takes, beside reading their index and prefixes."""
    for name, rows_per_picture in (("share", ROWS_PER_PICTURE), ("alone", 1)):
        cache = work / f"large-{name}"
        make_large_cache(source, cache, num_rows, rows_per_picture)

        def seconds(share_prefix: str, cache: Path = cache) -> float:
            given = {"cached_dataset": (str(cache),), "packing_length": 8192, "share_prefix": share_prefix}
            config = TrainConfig(model=str(model), output_dir=str(work / "out"), gradient_accumulation_steps=2, **given)
            begin = time.process_time()
            prepare_cached(config, Processes(0, 64))
            return time.process_time() - begin

        told = f"{rows_per_picture:g} of a picture" if rows_per_picture != 1 else "that share nothing"
        print(f"\n{num_rows:,} rows, {told}: index and prefixes read, packed and assigned to 64 processes")
        print_both(seconds, rounds)
        config = PlanConfig(cached_dataset=(str(cache),), packing_length=8192, world_size=64)
        begin = time.process_time()
        preview(config)
        print(f"packtool plan, which also plans whole and padded rows: {time.process_time() - begin:.2f} s", flush=True)


def print_both(seconds: Callable[[str], float], rounds: int) -> None:
    """Times with ``--share-prefix auto`` and ``false``, by turns, after one that does what is only slow at first."""
    seconds("auto")
    measured: dict[str, list[float]] = {"auto": [], "false": []}
    for number in range(rounds):
        for way in (("auto", "false"), ("false", "auto"))[number % 2]:
            measured[way].append(seconds(way))
    ratios = [auto / false for auto, false in zip(*measured.values(), strict=True)]
    for way, found in measured.items():
        print(f"--share-prefix {way:5} {statistics.median(found):>8.2f} s ({min(found):.2f} to {max(found):.2f})")
    print(f"auto ÷ false {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Make rows and model, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "realdata"
    parser.add_argument("--realdata", type=Path, default=default, help="folder of the real data")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pictures", type=int, default=3, help="pictures that are asked about")
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of each picture")
    parser.add_argument("--rounds", type=int, default=3, help="epochs each way")
    parser.add_argument("--planning-rows", type=int, default=1_000_000, help="rows of the caches that are only planned")
    parser.add_argument("--quick", action="store_true", help="the demo's pictures and model, one round")
    options = parser.parse_args(arguments)
    if not options.quick and not (options.realdata / "tokenizers" / "qwen3-vl").is_dir():
        print(f"{options.realdata} holds no real data; give its folder with --realdata", file=sys.stderr)
        sys.exit(2)
    if options.quick:
        options.questions, options.rounds, options.planning_rows = [1, 4], 1, 2000
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as temporary:
        warnings.simplefilter("ignore")
        work = Path(temporary)
        world = small_world(work) if options.quick else real_world(options.realdata, work, options.pictures)
        print(f"CPU ({platform.machine()}, 1 thread), float32, torch {torch.__version__}")
        if "questions" in options.parts:
            bench_questions(world, work, options.questions, options.rounds)
        if "alone" in options.parts:
            bench_alone(world, work, options.rounds)
        if "planning" in options.parts:
            rows = export_rows(world, work, "planned", questions_about(world, 2))
            bench_planning(rows.cache, work, options.planning_rows, world.model, options.rounds)


if __name__ == "__main__":
    main()
