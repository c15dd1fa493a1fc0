#!/usr/bin/env python3
"""Measure how well the losses of samples show wrong answers, and what keeping them costs.

    python scripts/bench_sample_losses.py [--rows 2400] [--rounds 3]
    python scripts/bench_sample_losses.py --rows 0 --real-model SMOLLM2 --real-file text_gsm8k_test.jsonl
    python scripts/bench_sample_losses.py --rows 0 --real-model SMOLLM2 --real-file ROWS.jsonl --real-rows 2000

The answers of 2 % of the rows are swapped with those of other rows. Two epochs are trained, and the script prints the
share of these rows among the 5 % and 10 % of samples with the highest loss in each epoch: for the demo's rows with the
demo's model, and for real rows with a pretrained text model. The quoted figures are of SmolLM2-135M-Instruct.

The cost is the CPU time of the steps with and without ``--sample-losses``, in runs that alternate over several rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.cache.export import export
from packtool.cache.origins import read_origins
from packtool.cache.reader import CacheReader
from packtool.config.data import ExportConfig
from packtool.config.train import TrainConfig
from packtool.demo.dataset import make_rows
from packtool.demo.model import make_model
from packtool.progress import SilentProgress
from packtool.train.prepare.sample_losses import losses_by_epoch
from packtool.train.run import train

SWAPPED, HIGHEST = 0.02, (0.05, 0.1)  # shares of the samples
LENGTH = {"demo": 256, "real": 1024}  # maximum length of samples, and length of packs
OPTIONS: dict[str, Any] = {"verify_packing": False, "logging_steps": 20, "num_train_epochs": 2.0, "weight_decay": 0.0}
OPTIONS_OF = {
    "demo": {"train_type": "full", "freeze_vit": False, "freeze_aligner": False, "learning_rate": 1e-3},
    "real": {"train_type": "lora", "learning_rate": 5e-4, "gradient_checkpointing": False},
}

Row = dict[str, Any]


def swap_answers(rows: list[Row]) -> set[int]:
    """Swap the first answers of pairs of rows, where they differ; return the numbers of these rows."""
    numbers = list(range(len(rows)))
    random.Random(0).shuffle(numbers)
    swapped: set[int] = set()
    while len(swapped) < SWAPPED * len(rows):
        pair = numbers.pop(), numbers.pop()
        first, second = (next(turn for turn in rows[row]["messages"] if turn["role"] == "assistant") for row in pair)
        if first["content"] != second["content"]:
            first["content"], second["content"] = second["content"], first["content"]
            swapped |= set(pair)
    return swapped


def make_demo(work: Path, num_rows: int) -> tuple[Path, list[Row]]:
    """Make the demo's model, and rows with pictures."""
    make_model(str(work / "model"), 0)
    dataset = make_rows(str(work / "data"), num_rows, 0)
    return work / "data", json.loads(dataset.train.read_text())


def last_layers(model: Path) -> str:
    """Match the projections of the last fifth of the layers: those before need no backward pass, half of the time."""
    num_layers = AutoConfig.from_pretrained(model).get_text_config().num_hidden_layers
    numbers = range(num_layers - max(num_layers // 5, 1), num_layers)
    return rf".*layers\.({'|'.join(map(str, numbers))})\..*_proj"


def draw_rows(file: Path, num_rows: int) -> list[Row]:
    """Draw rows of a file at random."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    return rows[:num_rows]


def train_swapped(name: str, work: Path, folder: Path, rows: list[Row]) -> None:
    """Swap answers, train two epochs, and print how many of the swapped rows have a high loss."""
    swapped = swap_answers(rows)
    (folder / "swapped-answers.json").write_text(json.dumps(rows))
    source = str(folder / "swapped-answers.json")
    limits = {"max_length": LENGTH[name], "dataset_num_proc": 2}
    export(
        ExportConfig(model=str(work / "model"), dataset=(source,), output_dir=str(work / "cache"), **limits),
        SilentProgress(),
    )
    result = train(config_of(name, work, work / "output"), SilentProgress())
    reader = CacheReader.open([str(work / "cache")])
    is_swapped = np.isin(read_origins(reader, 0).row, sorted(swapped))
    print(
        f"{name}: {len(reader):,} samples, {is_swapped.sum()} with a swapped answer, {result.steps:,} steps, ", end=""
    )
    print(f"{result.seconds:.0f} s, loss {result.first_loss:.2f} to {result.last_loss:.2f}")
    for epoch, losses_of_caches in losses_by_epoch(str(work / "output" / "history")).items():
        (losses,) = losses_of_caches.values()
        is_found = is_swapped[np.argsort(-losses.astype(np.float32), kind="stable")]
        shares = {highest: is_found[: round(highest * len(losses))].sum() / is_swapped.sum() for highest in HIGHEST}
        text = ", ".join(f"{share:.0%} of them among the {highest:.0%} highest" for highest, share in shares.items())
        medians = f"{np.median(losses[is_swapped]):.2f} against {np.median(losses[~is_swapped]):.2f}"
        print(f"  epoch {epoch + 1}: {text}; median loss {medians}")


def config_of(name: str, work: Path, output_dir: Path, **options: Any) -> TrainConfig:
    """Return the settings of a run on a cache of ``train_swapped``."""
    length = {"packing_length": LENGTH[name]}
    paths = {"model": str(work / "model"), "cached_dataset": (str(work / "cache"),), "output_dir": str(output_dir)}
    adapters = {"target_regex": last_layers(work / "model")} if name == "real" else {}
    return TrainConfig(**OPTIONS | OPTIONS_OF[name] | adapters | paths | length | options)


class StepTimer(SilentProgress):
    """Measures the CPU seconds of this process in the steps of a run."""

    seconds = 0.0

    def start(self, title: str, total: int | None) -> None:
        self.seconds = -time.process_time()

    def finish(self) -> None:
        self.seconds += time.process_time()


def measure_cost(work: Path, num_rounds: int) -> None:
    """Print the CPU time of steps that keep losses relative to steps that do not."""
    ratios = []
    for number in range(num_rounds):
        seconds = {}
        for keeps in (True, False) if number % 2 else (False, True):
            options = {"max_steps": 60, "sample_losses": keeps, "save_strategy": "no", "dataloader_num_workers": 0}
            timer = StepTimer()
            train(config_of("demo", work, work / f"cost-{number}-{keeps}", **options), timer)
            seconds[keeps] = timer.seconds
        ratios.append(seconds[True] / seconds[False])
    rounds = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    print(f"CPU time with --sample-losses / without: {statistics.median(ratios):.3f} (rounds: {rounds})")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2400, help="demo rows; 0 for none")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement of the cost; 0 for none")
    parser.add_argument("--real-model", type=Path, help="directory of a pretrained text model, for --real-file")
    parser.add_argument("--real-file", type=Path, help="JSONL file with real rows")
    parser.add_argument("--real-rows", type=int, default=2000, help="at most so many rows are drawn from the file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.real_file is not None:
            work = Path(folder) / "real"
            (work / "data").mkdir(parents=True)
            (work / "model").symlink_to(options.real_model.resolve())
            train_swapped("real", work, work / "data", draw_rows(options.real_file, options.real_rows))
        if options.rows:
            work = Path(folder) / "demo"
            work.mkdir()
            train_swapped("demo", work, *make_demo(work, options.rows))
            if options.rounds:
                measure_cost(work, options.rounds)


if __name__ == "__main__":
    main()
