"""The demo: create a model and a synthetic dataset, run the public commands on them, and measure the accuracy."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.demo.dataset import SyntheticDataset, make_rows
from packtool.demo.model import make_model
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.processes import environment_of_one_process
from packtool.progress import Progress
from packtool.train.evaluate.answers import exact_match

NUM_ROWS = 1200
NUM_UNUSABLE = 8
MAX_LENGTH = 256
PACKING_LENGTH = 256
NUM_EPOCHS = 1
LEARNING_RATE = "1e-3"

MIN_ACCURACY = 0.9
CHANCE_MARGIN = 0.08
"""Maximum accuracy above chance with swapped images; with some 400 questions, the standard deviation is 0.02."""

_MARKER = ".packtool-demo"
_TRAINING_FIGURES = (
    *("num_packs", "fill", "steps", "steps_without_packing", "target_tokens_per_second"),
    *("first_loss", "last_loss", "checkpoint"),
)


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Results of the demo.

    Args:
        num_rows, dropped: training rows, and the number of them that export dropped.
        first_loss, last_loss: mean over target tokens of the first and last log line.
        num_questions: held-out questions about images.
        accuracy: fraction of them answered exactly.
        swapped_accuracy: the same with the images of other rows.
        chance: expected accuracy without images.
    """

    num_rows: int
    dropped: int
    num_packs: int
    fill: float
    steps: int
    steps_without_packing: int
    target_tokens_per_second: float
    first_loss: float
    last_loss: float
    num_questions: int
    accuracy: float
    swapped_accuracy: float
    chance: float
    accuracy_by_kind: Mapping[str, float]
    seconds: float
    checkpoint: str

    @property
    def passed(self) -> bool:
        """True if the model answers correctly from its own images, and only by chance from swapped ones."""
        return self.accuracy >= MIN_ACCURACY and self.swapped_accuracy <= self.chance + CHANCE_MARGIN


def run_demo(output_dir: str, seed: int, progress: Progress) -> DemoResult:
    """Create model and dataset in ``output_dir``, export, train and evaluate."""
    begin = time.perf_counter()
    folder = _prepare_folder(output_dir)
    progress.note(f"creating a model, its processor and {NUM_ROWS:,} rows with images in {output_dir}")
    dataset = _make_model_and_rows(folder, seed, progress)
    exported = _export(dataset.train, folder, "cache", progress)
    _export(dataset.held_out, folder, "held-out", progress)
    _export(dataset.swapped, folder, "swapped", progress)  # the held-out questions with pictures of other rows
    trained = _train(folder, seed, progress)
    return DemoResult(
        num_rows=exported["num_rows"],
        dropped=sum(exported["dropped"].values()),
        **{name: trained[name] for name in _TRAINING_FIGURES},
        **_evaluate(trained["checkpoint"], folder, dataset, progress),
        seconds=time.perf_counter() - begin,
    )


def _evaluate(checkpoint: str, folder: Path, dataset: SyntheticDataset, progress: Progress) -> dict[str, Any]:
    """Return the results for held-out questions, with the images of their own rows and of others."""
    questions = [question for row_questions in dataset.held_out_questions for question in row_questions]
    is_correct = _correct_answers(checkpoint, folder / "held-out", len(questions), progress)
    is_correct_swapped = _correct_answers(checkpoint, folder / "swapped", len(questions), progress)
    kinds = np.array([question.kind for question in questions])
    return {
        "num_questions": len(questions),
        "accuracy": float(is_correct.mean()),
        "swapped_accuracy": float(is_correct_swapped.mean()),
        "chance": dataset.chance,
        "accuracy_by_kind": {str(kind): float(is_correct[kinds == kind].mean()) for kind in np.unique(kinds)},
    }


def _make_model_and_rows(folder: Path, seed: int, progress: Progress) -> SyntheticDataset:
    """Create the model in ``folder / "model"`` and the rows in ``folder / "data"``."""
    num_parameters = make_model(str(folder / "model"), seed)
    dataset = make_rows(str(folder / "data"), NUM_ROWS, seed, NUM_UNUSABLE)
    progress.note(
        f"created a Qwen3-VL of {num_parameters / 1e6:.1f}M random parameters and {dataset.num_pictures:,} images"
    )
    return dataset


def _correct_answers(checkpoint: str, cache: Path, num_questions: int, progress: Progress) -> npt.NDArray[np.bool_]:
    """Return whether the model answers each question of a cache exactly, (questions,)."""
    turns = exact_match(checkpoint, str(cache), packing_length=4 * PACKING_LENGTH, progress=progress)
    if len(turns) != num_questions:
        raise PacktoolError(f"{cache} holds {len(turns)} of {num_questions} held-out questions")
    return np.array([is_exact for _, _, is_exact in turns], np.bool_)


def _prepare_folder(output_dir: str) -> Path:
    """Create the demo's folder, or remove the files of an earlier demo, and nothing else, from it."""
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / _MARKER).exists())):
        raise ConfigError(
            f"--output-dir {output_dir} exists but was not made by the demo", "Give a folder that does not exist yet."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "data", "cache", "held-out", "swapped", "output", _MARKER):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
    (folder / _MARKER).touch()
    return folder


def _export(dataset: Path, folder: Path, cache: str, progress: Progress) -> dict[str, Any]:
    arguments = ["export", "--model", str(folder / "model"), "--dataset", str(dataset)]
    arguments += ["--output-dir", str(folder / cache), "--max-length", str(MAX_LENGTH)]
    return _run_command([*arguments, "--dataset-num-proc", "2", "--json"], progress)


def _train(folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
    arguments = ["train", "--model", str(folder / "model"), "--cached-dataset", str(folder / "cache")]
    arguments += ["--packing", "true", "--packing-length", str(PACKING_LENGTH)]
    arguments += ["--train-type", "full", "--freeze-vit", "false", "--freeze-aligner", "false"]
    arguments += ["--num-train-epochs", str(NUM_EPOCHS), "--learning-rate", LEARNING_RATE, "--weight-decay", "0"]
    arguments += ["--logging-steps", "20", "--seed", str(seed), "--output-dir", str(folder / "output"), "--json"]
    return _run_command(arguments, progress)


def _run_command(arguments: list[str], progress: Progress) -> dict[str, Any]:
    """Run a packtool command in its own process and return the JSON that it prints."""
    progress.note(f"\n$ packtool {shlex.join(arguments)}")
    command, environ = [sys.executable, "-m", "packtool", *arguments], environment_of_one_process()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, check=False)
    if done.returncode:
        raise PacktoolError(f"packtool {arguments[0]} ended with exit code {done.returncode}; its message is above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result
