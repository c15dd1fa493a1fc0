#!/usr/bin/env python3
"""Several questions about one picture on the CPU: its tokens once, or once a question, as ratios in one run.

Pictures of real rows, each of about 500 tokens, are asked 1, 2, 4, 8 and 16 short questions, of real rows too, and
exported. The same rows are then packed with their common prefixes once (``plan.prefix_trees`` and
``batch.collate_tree``), packed whole, and padded, and every way collates and trains the same epoch of them, forward and
backward without an optimizer, round after round in an order that turns. With one question nothing is shared: that
column tells what looking for prefixes costs.

    python scripts/bench_prefix.py [--realdata DIR] [--pictures 6] [--questions 1 2 4 8 16] [--rounds 3] [--quick]

The model is random, see ``_reduced_model.py``. ``--quick`` takes drawn pictures and the demo's model, to see that
everything runs; its ratios say nothing. The real data (conversations, pictures, tokenizers) is not part of this
repository.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.attention.register import set_attention
from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs, collate_padded
from packtool.batch.collate_tree import collate_tree
from packtool.batch.spec import InputSpec
from packtool.cache.export import export
from packtool.cache.reader import CacheReader
from packtool.config.export import ExportConfig
from packtool.constants import LEAST_SHARED
from packtool.demo.model import make_model as make_demo_model
from packtool.demo.world import make_rows
from packtool.encode.encoded import EncodedSample
from packtool.plan.pack_plan import PackPlan
from packtool.plan.packing import pack
from packtool.plan.prefix_trees import Prefixes, PrefixTrees, plan_trees
from packtool.progress import SilentProgress
from packtool.train.model.head_loss import HeadLoss
from scripts._reduced_model import reduce_model

ROWS = "mm_mathvision_a.jsonl"
PICTURE_TOKENS = 512
LONGEST_QUESTION = 100
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
    asked: Sequence[tuple[str, str]]
    picture_tokens: int
    packing_length: int


@dataclass(frozen=True)
class Rows:
    """Rows of so many questions a picture, and how each way lays them out: positions in the cache."""

    num_questions: int
    spec: InputSpec
    samples: Sequence[EncodedSample]
    trees: PrefixTrees
    ways: Mapping[str, PackPlan]


@dataclass(frozen=True)
class Epoch:
    """One epoch in one way.

    Args:
        tokens: that the model ran over, padding among them.
        patches: that the vision tower looked at.
        collating, training: seconds.
        loss: sum over all targets.
    """

    tokens: int
    patches: int
    collating: float
    training: float
    loss: float


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


def make_rows_of(world: World, work: Path, num_questions: int) -> Rows:
    """Ask each picture so many questions, export, and plan."""
    lines = []
    for number, picture in enumerate(world.pictures):
        for place in range(num_questions):
            question, answer = world.asked[(number * num_questions + place) % len(world.asked)]
            user = {"role": "user", "content": f"<image>{question}"}
            turns = [user, {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": turns, "images": [picture]}))
    rows, cache = work / f"{num_questions}.jsonl", work / f"cache-{num_questions}"
    rows.write_text("\n".join(lines))
    config = ExportConfig(
        model=str(world.model),
        max_length=world.packing_length,
        dataset=(str(rows),),
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
    return Rows(num_questions, spec, samples, trees, {SHARED: trees.unfolded(groups, lengths), WHOLE: whole})


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


def run(rows: Rows, way: str, model: Any, head: HeadLoss) -> Epoch:
    """Collate and train every micro-batch once."""
    tokens = patches = 0
    collating = training = loss = 0.0
    for samples in micro_batches(rows, way):
        begin = time.perf_counter()
        batch = collated(rows, way, samples)
        made = time.perf_counter()
        model.zero_grad(set_to_none=True)
        found = head.losses(model, batch).sum(batch.loss_weights)
        torch.autograd.backward(found)
        training += time.perf_counter() - made
        collating += made - begin
        loss += float(found.detach())
        tokens += batch.input_ids.numel()
        patches += len(batch.media[rows.spec.family.image_inputs[0]])
    return Epoch(tokens, patches, collating, training, loss)


def measure(rows: Rows, world: World, rounds: int) -> dict[str, list[Epoch]]:
    """Epochs of every way, one a round."""
    models = models_of(world)
    heads = {way: HeadLoss(models[way]) for way in (WHOLE, PADDED)}
    heads[SHARED] = heads[WHOLE]
    names = [SHARED, WHOLE, PADDED]
    for way in names:  # what is only slow at first
        head_batch = micro_batches(rows, way)[0][:1]
        torch.autograd.backward(heads[way].losses(models[way], collated(rows, way, head_batch)).sum(None))
    measured: dict[str, list[Epoch]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for way in names[turn:] + names[:turn]:
            measured[way].append(run(rows, way, models[way], heads[way]))
    return measured


def print_rows(rows: Rows, measured: Mapping[str, Sequence[Epoch]]) -> None:
    """What each way ran over, and how many rows a second it trained, as ratios to prefixes once."""
    lengths = np.array([sample.length for sample in rows.samples])
    print(
        f"\n{rows.num_questions} questions a picture: {len(rows.samples)} rows of {lengths.mean():.0f} tokens, "
        f"{rows.trees.saved(lengths):.0%} of them shared"
    )
    print(f"{'':16} {'tokens':>9} {'patches':>9} {'rows/s':>8}  {'once is faster by':<24} with collating")
    for name, epochs in measured.items():
        one, rate = epochs[0], len(rows.samples) / statistics.median(epoch.training for epoch in epochs)
        line = f"{name:16} {one.tokens:>9,} {one.patches:>9,} {rate:>8.2f}"
        if name != SHARED:
            pairs = list(zip(epochs, measured[SHARED], strict=True))
            ratios = [other.training / shared.training for other, shared in pairs]
            both = [
                (other.training + other.collating) / (shared.training + shared.collating) for other, shared in pairs
            ]
            shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            line += f"  {shown:<24} {statistics.median(both):.2f}"
        print(line)
    losses = [epochs[0].loss for epochs in measured.values()]
    print(f"sums of losses differ by {max(losses) / min(losses) - 1:.1e}")


def main(arguments: list[str] | None = None) -> None:
    """Make rows and model, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "realdata"
    parser.add_argument("--realdata", type=Path, default=default, help="folder of the real data")
    parser.add_argument("--pictures", type=int, default=6, help="pictures that are asked about")
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of each picture")
    parser.add_argument("--rounds", type=int, default=3, help="epochs each way")
    parser.add_argument("--quick", action="store_true", help="the demo's pictures and model, one round")
    options = parser.parse_args(arguments)
    if not options.quick and not (options.realdata / "tokenizers" / "qwen3-vl").is_dir():
        print(f"{options.realdata} holds no real data; give its folder with --realdata", file=sys.stderr)
        sys.exit(2)
    logging.disable_progress_bar()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as temporary:
        warnings.simplefilter("ignore")
        work = Path(temporary)
        world = small_world(work) if options.quick else real_world(options.realdata, work, options.pictures)
        print(f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), float32, torch {torch.__version__}")
        for num_questions in [1, 4] if options.quick else options.questions:
            rows = make_rows_of(world, work, num_questions)
            print_rows(rows, measure(rows, world, 1 if options.quick else options.rounds))


if __name__ == "__main__":
    main()
