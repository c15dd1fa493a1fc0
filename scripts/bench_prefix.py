#!/usr/bin/env python3
"""Measure the savings of shared prefixes on the CPU, as ratios in one run.

- ``questions``: 1, 2, 4, 8 and 16 short questions about each picture of about 500 tokens, all from real rows. The same
  samples are trained with shared prefixes (``plan.prefix_trees`` and ``batch.collate``), packed without sharing, and
  padded. Each variant collates and trains the same epoch, forward and backward without an optimizer. The variants
  alternate over several rounds.
- ``turns``: the same three variants for real conversations with several questions, tools and thoughts, in which the
  thoughts of each turn are trained (``--expand-turns auto``), as text and about pictures.
- ``alone``: samples without common prefixes, prepared and trained as by ``packtool train``, with ``--share-prefix
  auto`` and ``false``. This measures the cost of looking for prefixes.
- ``planning``: CPU seconds to plan caches of a million samples, with and without prefix trees.

    python scripts/bench_prefix.py [questions] [turns] [alone] [planning] [--realdata DIR] [--pictures 1]
        [--questions 1 2 4 8 16] [--conversations 4] [--rounds 3] [--planning-rows 1000000] [--quick]

Times are CPU seconds of one thread, which depend little on other work on the machine. FLOPs are counted by torch, with
the full square of causal attention. "kept" are the tensors that autograd keeps for the backward pass, without weights.
The model is random, see ``_reduced_model.py``. ``--quick`` runs everything once with synthetic pictures and the demo's
model; its ratios are meaningless. The real data (conversations, pictures, tokenizers) is not part of this repository.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.batch.dataset import MicroBatches
from packtool.batch.micro_batch import PlannedEpoch
from packtool.cache.shard import num_targets
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.demo.dataset import make_rows
from packtool.demo.model import make_model as make_demo_model
from packtool.launch.world import World as Processes
from packtool.train.model.loss import HeadLoss
from packtool.train.prepare.preview import preview
from packtool.train.prepare.run import Run
from scripts._prefix_planning import make_large_cache
from scripts._prefix_turns import TEMPLATE, small_thinking_rows, thinking_rows
from scripts._prefix_ways import WHOLE, World, export_rows, measure, models_of, print_rows, step
from scripts._reduced_model import reduce_model

ROWS = "mm_mathvision_a.jsonl"
PICTURE_TOKENS = 512
NUM_QUESTIONS = 16  # the shortest
NUM_PICTURES = 6
PARTS = ("questions", "turns", "alone", "planning")
ROWS_PER_PICTURE = 5.4  # VQAv2's


def real_world(realdata: Path, work: Path) -> World:
    """Return pictures and short questions of real rows, and the reduced model."""
    reduce_model(realdata / "tokenizers" / "qwen3-vl", work / "model")
    rows = [json.loads(line) for line in (realdata / ROWS).read_text().splitlines()]
    pictures = list(dict.fromkeys(str(realdata / row["images"][0]) for row in rows))[:NUM_PICTURES]
    pairs = {tuple(turn["content"].replace("<image>", "") for turn in row["messages"][:2]) for row in rows}
    asked = sorted((len(question) + len(answer), question, answer) for question, answer in pairs)[:NUM_QUESTIONS]
    return World(work / "model", pictures, [pair for _, *pair in asked], PICTURE_TOKENS, 8192)


def small_world(work: Path) -> World:
    """Return the demo's pictures and model."""
    make_demo_model(str(work / "model"), seed=0)
    make_rows(str(work / "rows"), num_rows=24, seed=0)
    pictures = [str(path) for path in sorted((work / "rows" / "pictures").iterdir())[:2]]
    return World(work / "model", pictures, [(f"How many {name}?", "3") for name in "abcdefgh"], 64, 512)


def questions_about(world: World, num_questions: int) -> list[dict[str, Any]]:
    """Return rows with ``num_questions`` different questions about each picture; repeated ones would cost nothing."""
    if num_questions > len(world.asked):
        sys.exit(f"there are {len(world.asked)} questions, not {num_questions}")
    rows = []
    for number, picture in enumerate(world.pictures):
        for place in range(num_questions):
            question, answer = world.asked[(number * num_questions + place) % len(world.asked)]
            user = {"role": "user", "content": f"<image>{question}"}
            rows.append({"messages": [user, {"role": "assistant", "content": answer}], "images": [picture]})
    return rows


def bench_questions(world: World, work: Path, questions: Sequence[int], rounds: int) -> None:
    """Measure several questions about each picture."""
    for num_questions in questions:
        rows = export_rows(world, work, f"questions-{num_questions}", questions_about(world, num_questions))
        print_rows(f"{num_questions} questions a picture", rows, *measure(rows, world, rounds))


def bench_turns(world: World, work: Path, realdata: Path | None, conversations: int, rounds: int) -> None:
    """Measure conversations with one sample per turn, and print the tokens of one sample per conversation.

    Args:
        realdata: folder of the real data; None uses synthetic conversations.
    """
    template = work / "thinking.jinja"
    template.write_text(TEMPLATE)
    for name, pictures in (("of text", ()), ("about pictures", world.pictures)):
        rows = thinking_rows(realdata, conversations, pictures) if realdata else small_thinking_rows(1, pictures)
        whole, turns = (
            export_rows(world, work, f"{name}-{way}", rows, chat_template=str(template), expand_turns=way)
            for way in ("false", "auto")
        )
        print_rows(f"turns of {len(rows)} conversations {name}", turns, *measure(turns, world, rounds))
        for what, found in (("a sample each", whole), ("expanded", turns)):
            tokens = sum(sample.length for sample in found.samples)
            targets = sum(num_targets(sample) for sample in found.samples)
            print(f"{what}: {tokens:,} tokens, of which {targets:,} are trained", flush=True)


def bench_alone(world: World, work: Path, rounds: int) -> None:
    """Measure preparation and training of samples without common prefixes, with and without looking for prefixes.

    Both variants train each micro-batch right after each other, so that other work on the machine affects both.
    """
    rows = export_rows(world, work, "alone", questions_about(world, 1))
    model = models_of(world)[WHOLE]
    head = HeadLoss(model)
    length = max(sample.length for sample in rows.samples)  # of a pack: of one row, so that there are some to train

    def prepared(share_prefix: str) -> Run:
        given = {"cached_dataset": (str(rows.cache),), "packing_length": length, "share_prefix": share_prefix}
        return Run.of(TrainConfig(model=str(world.model), output_dir=str(work / "out"), **given), Processes())

    def preparing(share_prefix: str) -> float:
        begin = time.process_time()
        prepared(share_prefix)
        return time.process_time() - begin

    runs = {way: prepared(way) for way in ("auto", "false")}
    assert all(run.source.inputs.shared is None for run in runs.values()), "these rows share nothing"
    plans = {
        way: [each for micro_batches in PlannedEpoch(run.timeline.plan_of(0)).steps(0) for each in micro_batches]
        for way, run in runs.items()
    }

    def training(share_prefix: str, place: int) -> float:
        run = runs[share_prefix]
        begin = time.process_time()
        batch: Any = MicroBatches(run.source.read, rows.spec, min_shared=run.source.min_shared)[
            plans[share_prefix][place]
        ]
        step(model, head, batch)
        return time.process_time() - begin

    found = [both_ways(preparing, 10 * rounds)]
    found += [both_ways(partial(training, place=place), rounds) for place in range(len(plans["auto"]))]
    print(f"\n{len(rows.samples)} rows that share nothing")
    print_both("prepared", found[:1])
    print_both("trained", found[1:])
    print_both("both", found)


def bench_planning(source: Path, work: Path, num_rows: int, model: Path, rounds: int) -> None:
    """Measure planning of many samples, including reading their index and prefixes."""
    for name, rows_per_picture in (("share", ROWS_PER_PICTURE), ("alone", 1)):
        cache = work / f"large-{name}"
        make_large_cache(source, cache, num_rows, rows_per_picture)

        def seconds(share_prefix: str, cache: Path = cache) -> float:
            given = {"cached_dataset": (str(cache),), "packing_length": 8192, "share_prefix": share_prefix}
            config = TrainConfig(model=str(model), output_dir=str(work / "out"), gradient_accumulation_steps=2, **given)
            begin = time.process_time()
            Run.of(config, Processes(0, 64))
            return time.process_time() - begin

        told = f"{rows_per_picture:g} of a picture" if rows_per_picture != 1 else "that share nothing"
        print(f"\n{num_rows:,} rows, {told}: index and prefixes read, packed and assigned to 64 processes")
        print_both("prepared", [both_ways(seconds, rounds)])
        config = PlanConfig(cached_dataset=(str(cache),), packing_length=8192, world_size=64)
        begin = time.process_time()
        preview(config)
        print(f"packtool plan, which also plans whole and padded rows: {time.process_time() - begin:.2f} s", flush=True)


def both_ways(seconds: Callable[[str], float], rounds: int) -> dict[str, list[float]]:
    """Return times with ``--share-prefix auto`` and ``false``, alternating, after a warm-up."""
    seconds("auto")
    measured: dict[str, list[float]] = {"auto": [], "false": []}
    for number in range(rounds):
        for way in (("auto", "false"), ("false", "auto"))[number % 2]:
            measured[way].append(seconds(way))
    return measured


def print_both(what: str, parts: Sequence[Mapping[str, Sequence[float]]]) -> None:
    """Print the sums of the parts' medians and their ratio."""
    auto, false = (sum(statistics.median(part[way]) for part in parts) for way in ("auto", "false"))
    print(
        f"{what:9} --share-prefix auto {auto:.3f} s, false {false:.3f} s: auto ÷ false {auto / false:.3f}", flush=True
    )


def main(arguments: list[str] | None = None) -> None:
    """Make rows and model, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "realdata"
    parser.add_argument("--realdata", type=Path, default=default, help="folder of the real data")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--pictures", type=int, default=1, help="number of pictures")
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="questions per picture")
    parser.add_argument("--conversations", type=int, default=4, help="number of conversations")
    parser.add_argument("--rounds", type=int, default=3, help="epochs per variant")
    parser.add_argument("--planning-rows", type=int, default=1_000_000, help="samples of the caches for planning")
    parser.add_argument("--quick", action="store_true", help="use the demo's pictures and model, one round")
    options = parser.parse_args(arguments)
    if wrong := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    parts = options.parts or PARTS
    if not options.quick and not (options.realdata / "tokenizers" / "qwen3-vl").is_dir():
        print(f"{options.realdata} contains no real data; give its folder with --realdata", file=sys.stderr)
        sys.exit(2)
    if options.quick:
        options.questions, options.rounds, options.planning_rows = [1, 4], 1, 2000
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as temporary:
        warnings.simplefilter("ignore")
        work = Path(temporary)
        world = small_world(work) if options.quick else real_world(options.realdata.resolve(), work)
        print(f"CPU ({platform.machine()}, 1 thread), float32, torch {torch.__version__}")
        if "questions" in parts:
            bench_questions(
                replace(world, pictures=world.pictures[: options.pictures]), work, options.questions, options.rounds
            )
        if "turns" in parts:
            realdata = None if options.quick else options.realdata.resolve()
            bench_turns(world, work, realdata, options.conversations, options.rounds)
        if "alone" in parts:
            bench_alone(world, work, options.rounds)
        if "planning" in parts:
            rows = export_rows(world, work, "planned", questions_about(world, 2))
            bench_planning(rows.cache, work, options.planning_rows, world.model, options.rounds)


if __name__ == "__main__":
    main()
