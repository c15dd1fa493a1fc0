#!/usr/bin/env python3
"""Compare ways to train one epoch of real mixed rows on the CPU, as ratios in one run.

Rows with and without pictures are exported and trained for one epoch in each way. The ways alternate over several
rounds, and ratios are medians over the rounds:

- packed: packtool's default; and with ``--samples-per-step``, with the samples of the padded ways' steps
- padded: ``--packing false``, in micro-batches of as many rows as a pack has on average, so that both ways have the
  same number of micro-batches and steps; and in micro-batches of four rows, several of them per step
- padded, grouped: the first of these with ``--group-by-length true``
- Trainer, TRL's packing: transformers' Trainer without packtool's loss and attention, see ``_trl_packing.py``

The model is random, see ``_reduced_model.py``. The script prints the share of the head and the vision tower in its
FLOPs, and in those of the real model. Only the memory of a step is measured with the full vocabulary.

A second part trains two epochs of large pictures and long videos with and without ``--media-cache``, which is empty at
first, with one loading process. It uses the demo's model, whose ratio of step time to media time is like that of a GPU.
The script prints the share of time that steps wait for data in each epoch.

    python scripts/bench_train.py [--realdata DIR] [--one-in 64] [--rounds 3] [--packing-length 2048] [--quick]

``--quick`` runs everything once with the demo's rows and model; its ratios are meaningless. The real data
(conversations, pictures, tokenizers) is not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.attention.register import set_attention
from packtool.batch.batch import PackedBatch
from packtool.batch.dataset import MicroBatches
from packtool.batch.micro_batch import PlannedEpoch
from packtool.batch.spec import InputSpec
from packtool.cache.export import export
from packtool.config.data import ExportConfig
from packtool.config.train import TrainConfig
from packtool.demo.dataset import make_rows
from packtool.demo.model import make_model as make_demo_model
from packtool.launch.world import World
from packtool.media.files import SETTLED_SECONDS
from packtool.planning.cost import CostModel
from packtool.progress import SilentProgress
from packtool.train.model.loss import HeadLoss, target_losses
from packtool.train.prepare.run import Run
from packtool.train.run import train
from scripts._media_wait import make_media_rows
from scripts._reduced_model import reduce_model
from scripts._trl_packing import train_an_epoch

ROWS = {"mm_mathvision_a.jsonl": 321, "mm_xtuner_coco_zh.jsonl": 43, "text_gpteacher_toolformer.jsonl": 7673}
REAL_VOCABULARY = 151936
MAX_PICTURE_TOKENS = 512
FEW_ROWS = 4
LEARNING_RATE = 1e-4
# Large files of which little is seen, so that a step is short against them.
SMALL_MEDIA = {"image_max_token_num": 64, "video_max_token_num": 16, "fps_max_frames": 32}
PACKED, GROUPED, PEER = "packed", "padded, grouped by length", "Trainer, TRL's packing"

_TEXT_2B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128}
_TEXT_2B |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": REAL_VOCABULARY}
_VISION_2B = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "out_hidden_size": 2048}
QWEN3_VL_2B = {"text_config": _TEXT_2B, "vision_config": _VISION_2B | {"spatial_merge_size": 2}}


@dataclass(frozen=True)
class Setting:
    """Model, cache and lengths of a comparison.

    Args:
        model: directory.
        cache: of the rows.
        work: for everything that is written.
        packing_length: tokens of a pack, and most of a sample.
        real_vocabulary: tokens of the head whose memory is measured.
    """

    model: Path
    cache: Path
    work: Path
    packing_length: int
    real_vocabulary: int


@dataclass(frozen=True)
class Epoch:
    """Measurements of one epoch; seconds from the start of the first step to the end of the last.

    Args:
        fill: share of sample tokens among all computed tokens, or among the capacity of the packs.
        waited: seconds that steps waited for micro-batches; None if not measured.
    """

    seconds: float
    target_tokens: int
    num_micro_batches: int
    num_steps: int
    fill: float
    waited: float | None

    @property
    def rate(self) -> float:
        """Target tokens per second."""
        return self.target_tokens / self.seconds


def make_real(realdata: Path, work: Path, one_in: int, packing_length: int) -> tuple[Setting, dict[str, Any]]:
    """Make the reduced model and a cache of every ``one_in``-th real row."""
    model = work / "model"
    reduce_model(realdata / "tokenizers" / "qwen3-vl", model)
    rows = [f"{realdata / name}#{-(-count // one_in)}" for name, count in ROWS.items()]
    return _exported(model, rows, work, packing_length, REAL_VOCABULARY)


def make_small(work: Path) -> tuple[Setting, dict[str, Any]]:
    """Make the demo's model and a cache of some of its rows."""
    make_demo_model(str(work / "model"), seed=0)
    world = make_rows(str(work / "rows"), num_rows=28, seed=0)
    return _exported(work / "model", [str(world.train)], work, 256, 512)


def _exported(
    model: Path, rows: Sequence[str], work: Path, length: int, vocabulary: int, **limits: int
) -> tuple[Setting, dict[str, Any]]:
    config = ExportConfig(
        model=str(model),
        max_length=length,
        dataset=tuple(rows),
        output_dir=str(work / "cache"),
        **{"image_max_token_num": min(MAX_PICTURE_TOKENS, length // 2), **limits},  # type: ignore[arg-type]
    )
    begin = time.perf_counter()
    summary = export(config, SilentProgress())
    figures = {"rows": summary.num_rows, "kept": summary.num_samples, "seconds": time.perf_counter() - begin}
    return Setting(model, work / "cache", work, length, vocabulary), figures


def run_config(setting: Setting, seed: int, **options: Any) -> TrainConfig:
    """Return the configuration of a run: all weights are trained, from the same initial weights in every way."""
    return TrainConfig(
        model=str(setting.model),
        cached_dataset=(str(setting.cache),),
        output_dir=str(setting.work / "output"),
        max_length=setting.packing_length,
        packing_length=setting.packing_length,
        train_type="full",
        freeze_vit=False,
        freeze_aligner=False,
        learning_rate=LEARNING_RATE,
        logging_steps=1,
        seed=seed,
        **({"verify_packing": False} | options),
    )


def run_packtool(setting: Setting, seed: int, **options: Any) -> Epoch:
    """Train one epoch with packtool; the seconds are those of the log lines."""
    config = run_config(setting, seed, **options)
    shutil.rmtree(config.output_dir, ignore_errors=True)
    result = train(config, SilentProgress(), World())
    path = Path(config.output_dir) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    num = math.ceil(result.num_packs / config.per_device_train_batch_size)
    return Epoch(
        seconds=sum(line["seconds"] for line in lines),
        target_tokens=result.target_tokens,
        num_micro_batches=num,
        num_steps=result.steps,
        fill=result.fill,
        waited=sum(line["data_wait"] * line["seconds"] for line in lines),
    )


def prepared(setting: Setting) -> Run:
    """Plan the packed run."""
    return Run.of(run_config(setting, 0, packing=True), World())


def preparing(run: Run) -> dict[str, float]:
    """Return the seconds to plan and to collate an epoch."""
    begin = time.perf_counter()
    plan = run.timeline.plan_of(1)
    planned = time.perf_counter()
    dataset = MicroBatches(run.source.read, spec_of(run))
    for step in PlannedEpoch(plan).steps(0):
        for micro_batch in step:
            dataset[micro_batch]
    return {"planning": planned - begin, "collating": time.perf_counter() - planned}


def spec_of(run: Run) -> InputSpec:
    """Return the model's properties that collation needs."""
    return InputSpec.load(run.source.files.directory, run.source.media_limits)


def run_peer(setting: Setting, seed: int) -> Epoch:
    """Train one epoch with transformers' Trainer and TRL's packing."""
    length, output = setting.packing_length, setting.work / "peer"
    epoch = train_an_epoch(
        setting.model, setting.cache, output, packing_length=length, learning_rate=LEARNING_RATE, seed=seed
    )
    return Epoch(epoch.seconds, epoch.target_tokens, epoch.num_packs, epoch.num_packs, epoch.fill, None)


def peak_memory(setting: Setting, batch: PackedBatch) -> dict[str, float]:
    """Return MiB of a forward and backward pass without the model, for each way to compute the loss."""
    ways: dict[str, Callable[[Any], torch.Tensor]] = {
        "logits of all tokens": lambda model: target_losses(model, batch, label_logits_only=False).weighted_sum(),
        "logits of targets": lambda model: target_losses(model, batch, label_logits_only=True).weighted_sum(),
        "losses in the head": lambda model: HeadLoss(model).losses(model, batch).weighted_sum(),
    }
    return {name: _in_a_process(setting, way) for name, way in ways.items()}


def _in_a_process(setting: Setting, way: Callable[[Any], torch.Tensor]) -> float:
    """Run in a new process, because the peak memory of a process never falls."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_step, args=(setting, way, sender))
    process.start()
    sender.close()
    try:
        return float(receiver.recv())
    except EOFError:
        return math.nan
    finally:
        process.join()


def _step(setting: Setting, way: Callable[[Any], torch.Tensor], sender: Connection) -> None:
    # A pool of threads does not outlive a fork.
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(setting.model)
    config.text_config.vocab_size = setting.real_vocabulary
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    set_attention(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    way(model).backward()
    sender.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def ways_of(setting: Setting) -> dict[str, Callable[[int], Epoch]]:
    """Return a function for each way, which trains an epoch with a seed."""
    rows = max(round(prepared(setting).timeline.plan_of(0).summary.samples_per_pack), 1)
    padded = {"packing": False, "per_device_train_batch_size": rows}
    few = {"per_device_train_batch_size": FEW_ROWS, "gradient_accumulation_steps": max(round(rows / FEW_ROWS), 1)}
    return {
        PACKED: lambda seed: run_packtool(setting, seed, packing=True),
        f"packed, {rows} samples a step": lambda seed: run_packtool(setting, seed, samples_per_step=rows),
        f"padded, {rows} rows": lambda seed: run_packtool(setting, seed, **padded),
        f"padded, {FEW_ROWS} rows, several a step": lambda seed: run_packtool(setting, seed, **(padded | few)),
        f"{GROUPED}, {rows} rows": lambda seed: run_packtool(setting, seed, **padded, group_by_length=True),
        PEER: lambda seed: run_peer(setting, seed),
    }


def measure(setting: Setting, rounds: int) -> dict[str, list[Epoch]]:
    """Train an epoch of each way in every round."""
    ways = ways_of(setting)
    names = list(ways)
    measured: dict[str, list[Epoch]] = {name: [] for name in names}
    for number in range(rounds):
        # Rotate the order, so that other work on the machine does not always affect the same way.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            measured[name].append(ways[name](number))
            print(f"  round {number + 1} of {rounds}: {name}, {measured[name][-1].seconds:.1f} s", file=sys.stderr)
    return measured


def print_ways(measured: Mapping[str, Sequence[Epoch]]) -> None:
    """Print the medians of all ways and the speed-up of packing, with its minimum and maximum over the rounds.

    The last column compares the fastest epoch of each way, which other work on the machine affects least.
    """
    print(f"\n{'':36} {'':>6} {'micro-':>8} {'':>6} {'':>10}  packed is faster by")
    print(f"{'':36} {'fill':>6} {'batches':>8} {'steps':>6} {'targets/s':>10}  {'median':<21} fastest epochs")
    fastest = {name: max(epoch.rate for epoch in epochs) for name, epochs in measured.items()}
    for name, epochs in measured.items():
        one, rate = epochs[0], statistics.median(epoch.rate for epoch in epochs)
        start = f"{name:36} {one.fill:>6.1%} {one.num_micro_batches:>8,} {one.num_steps:>6,} {rate:>10,.0f}"
        if name == PACKED:
            print(start)
            continue
        ratios = [packed.rate / epoch.rate for packed, epoch in zip(measured[PACKED], epochs, strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{start}  {shown:<21} {fastest[PACKED] / fastest[name]:.2f}")


def print_head(setting: Setting, exported: Mapping[str, Any], run: Run, rounds: int) -> None:
    """Print the rows, the model and the device."""
    index, targets = run.source.reader.index, run.source.inputs.targets
    lengths = index.length.astype(np.int64)
    print(
        f"{exported['kept']:,} of {exported['rows']:,} rows, {np.count_nonzero(index.num_images):,} with pictures, "
        f"exported in {exported['seconds']:.1f} s; {lengths.sum():,} tokens, {targets.sum() / lengths.sum():.0%} of "
        f"them targets; packs of {setting.packing_length:,}; {rounds} round{'s' if rounds > 1 else ''}"
    )
    print(f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), float32, torch {torch.__version__}")
    told = []
    for cost in (CostModel.of_config(run.source.files.config), CostModel.of_config(QWEN3_VL_2B)):
        towers = cost.towers(index.vision_tokens, index.patch_squares, index.audio_tokens)
        whole = cost(lengths, cost.attention(lengths), targets, towers).sum()
        head, vision = cost.per_target_token * targets.sum(), towers.sum()
        told.append(f"head {head / whole:.0%}, vision {vision / whole:.0%}")
    print(f"of the FLOPs: {told[0]}; of a Qwen3-VL-2B's on these rows: {told[1]}")


def print_shares(run: Run, epochs: Sequence[Epoch]) -> None:
    """Print planning, collating and waiting as shares of the median packed epoch."""
    middle = sorted(epochs, key=lambda epoch: epoch.seconds)[len(epochs) // 2]
    print(f"\nof the packed epoch's {middle.seconds:.1f} s")
    for name, seconds in preparing(run).items():
        note = ", by another process beside the step" if name == "collating" else ""
        print(f"  {name:34} {seconds / middle.seconds:>6.2%}{note}")
    print(f"  {'waiting for data':34} {(middle.waited or 0) / middle.seconds:>6.2%}")


def print_memory(setting: Setting, batch: PackedBatch) -> None:
    """Print the memory of a step with and without logits of tokens that are not targets."""
    found = peak_memory(setting, batch)
    print(
        f"\nmemory of forward and backward of {batch.input_ids.numel():,} tokens, {batch.num_target_tokens:,} of them "
        f"targets, {setting.real_vocabulary:,} logits each"
    )
    most = next(iter(found.values()))
    for name, size in found.items():
        note = "" if size == most else f"  {most / size:.1f} times less"
        print(f"  {name:34} {size:>6,.0f} MiB{note}")


def waits_of_epochs(setting: Setting, kept: Path | None) -> tuple[list[float], list[float]]:
    """Return the seconds of each of two epochs: waiting for data, and in total."""
    options: dict[str, Any] = {"num_train_epochs": 2.0, "dataloader_num_workers": 1, "save_strategy": "no"}
    if kept is not None:
        options |= {"media_cache": str(kept), "media_cache_size": 10**11}
    config = run_config(setting, 0, **options)
    shutil.rmtree(config.output_dir, ignore_errors=True)
    steps = train(config, SilentProgress(), World()).steps
    lines = [json.loads(line) for line in (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()]
    halves = [lines[: steps // 2], lines[steps // 2 :]]
    waited = [sum(line["data_wait"] * line["seconds"] for line in half) for half in halves]
    return waited, [sum(line["seconds"] for line in half) for half in halves]


def print_media_cache(setting: Setting, rounds: int, *, quick: bool) -> None:
    """Print the share of time that steps wait for large media, with and without a media cache."""
    num_pictures, num_videos, scale = (3, 1, 16) if quick else (32, 8, 96)
    rows = make_media_rows(setting.work / "media", num_pictures, num_videos, scale=scale)
    work = setting.work / "large"
    model = setting.model if quick else work / "model"
    if not quick:
        make_demo_model(str(model), seed=0)
    large, _ = _exported(model, [str(rows)], work, 1024, 512, **SMALL_MEDIA)
    time.sleep(SETTLED_SECONDS)  # the media cache skips files that have just changed
    ways: dict[str, Path | None] = {"without": None, "with --media-cache": work / "kept"}
    found: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            shutil.rmtree(work / "kept", ignore_errors=True)
            found[name].append(waits_of_epochs(large, ways[name]))
    print(f"\n{num_pictures} large pictures and {num_videos} long videos, one loading process; share of waiting")
    print(f"{'':20} {'first epoch':>12} {'second':>8}  {'seconds waited':>16}")
    for name, each in found.items():
        waits, times = (np.median([one[part] for one in each], axis=0) for part in (0, 1))
        shares = f"{waits[0] / times[0]:>12.1%} {waits[1] / times[1]:>8.1%}"
        print(f"{name:20} {shares}  {waits[0]:>7.2f} {waits[1]:>8.2f}")
    plain, kept = ([sum(one[1][1:]) for one in found[name]] for name in ways)
    ratios = [slow / fast for slow, fast in zip(plain, kept, strict=True)]
    print(f"second epoch: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast")


def report(setting: Setting, exported: Mapping[str, Any], rounds: int, *, quick: bool) -> None:
    """Measure everything and print it."""
    run = prepared(setting)
    print_head(setting, exported, run, rounds)
    dataset = MicroBatches(run.source.read, spec_of(run))
    wanted = (micro_batch for step in PlannedEpoch(run.timeline.plan_of(0)).steps(0) for micro_batch in step)
    some: list[Any] = [dataset[micro_batch] for micro_batch in islice(wanted, 8)]
    # Before any training, because freed memory of this process would be reused and not counted.
    print_memory(setting, max(some, key=lambda batch: batch.num_target_tokens))
    measured = measure(setting, rounds)
    print_ways(measured)
    print_shares(run, measured[PACKED])
    print_media_cache(setting, rounds, quick=quick)


def main(arguments: list[str] | None = None) -> None:
    """Make rows and model, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "realdata"
    parser.add_argument("--realdata", type=Path, default=default, help="folder of the real data")
    parser.add_argument("--one-in", type=int, default=64, help="use every N-th real row")
    parser.add_argument("--rounds", type=int, default=3, help="epochs per way")
    parser.add_argument("--packing-length", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="use the demo's rows and model, one round")
    options = parser.parse_args(arguments)
    if not options.quick and not (options.realdata / "tokenizers" / "qwen3-vl").is_dir():
        print(f"{options.realdata} contains no real data; give its folder with --realdata", file=sys.stderr)
        sys.exit(2)
    logging.disable_progress_bar()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as temporary:
        warnings.simplefilter("ignore")
        if options.quick:
            setting, exported = make_small(Path(temporary))
        else:
            setting, exported = make_real(options.realdata, Path(temporary), options.one_in, options.packing_length)
        report(setting, exported, 1 if options.quick else options.rounds, quick=options.quick)


if __name__ == "__main__":
    main()
