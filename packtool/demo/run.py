"""The demo: makes the small world, runs the public commands on it, and measures what was learned."""

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

from packtool.demo.model import make_model
from packtool.demo.world import DemoWorld, Question, make_rows
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.processes import environment_of_one_process
from packtool.progress import Progress
from packtool.train.evaluate.answers import ExactMatch, exact_match

NUM_ROWS = 1200
NUM_UNUSABLE = 8
MAX_LENGTH = 256
PACKING_LENGTH = 256
NUM_EPOCHS = 1
LEARNING_RATE = "1e-3"

LEAST_ACCURACY = 0.9
CHANCE_MARGIN = 0.08
"""How far above chance the accuracy with swapped pictures may lie: some 400 questions scatter by 0.02."""

_MARKER = ".packtool-demo"
_OWN = ("model", "data", "cache", "held-out", "swapped", "output", _MARKER)


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the demo shows.

    Args:
        num_rows, dropped: of the training rows, and how many export left out.
        num_packs, fill, steps, steps_without_packing: of the training.
        first_loss, last_loss: mean over target tokens of the first and last log line.
        num_questions: held-out questions about pictures.
        accuracy: share of them answered exactly.
        swapped_accuracy: the same with each picture exchanged for another row's.
        chance: what the best guesser reaches who sees no picture.
        accuracy_by_kind: by kind of question.
        seconds: for everything.
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
        """Whether the model has learned to see, and sees the right pictures."""
        return self.accuracy >= LEAST_ACCURACY and self.swapped_accuracy <= self.chance + CHANCE_MARGIN


def run_demo(output_dir: str, seed: int, progress: Progress) -> DemoResult:
    """Make the world in ``output_dir``, export, train and evaluate.

    Raises:
        ConfigError: if the folder holds something else.
        PacktoolError: if a command fails.
    """
    begin = time.perf_counter()
    folder = _fresh_folder(output_dir)
    progress.note(f"making a small world in {output_dir}: a model, its processor, {NUM_ROWS:,} rows and their pictures")
    num_parameters = make_model(str(folder / "model"), seed)
    world = make_rows(str(folder / "data"), NUM_ROWS, seed, NUM_UNUSABLE)
    progress.note(f"a Qwen3-VL of {num_parameters / 1e6:.1f}M random parameters; {world.num_pictures:,} pictures")
    exported = _export(world.train, folder, "cache", progress)
    for path, cache in ((world.held_out, "held-out"), (world.swapped, "swapped")):
        _export(path, folder, cache, progress)
    trained = _train(folder, seed, progress)
    seen, swapped = (
        _answers(trained["checkpoint"], str(folder / cache), world, progress) for cache in ("held-out", "swapped")
    )
    questions = [question for asked in world.held_out_questions for question in asked]
    return DemoResult(
        num_rows=exported["num_rows"],
        dropped=sum(exported["dropped"].values()),
        num_packs=trained["num_packs"],
        fill=trained["fill"],
        steps=trained["steps"],
        steps_without_packing=trained["steps_without_packing"],
        target_tokens_per_second=trained["target_tokens_per_second"],
        first_loss=trained["first_loss"],
        last_loss=trained["last_loss"],
        num_questions=seen.num_turns,
        accuracy=seen.accuracy,
        swapped_accuracy=swapped.accuracy,
        chance=world.chance,
        accuracy_by_kind=_by_kind(questions, seen),
        seconds=time.perf_counter() - begin,
        checkpoint=trained["checkpoint"],
    )


def _fresh_folder(output_dir: str) -> Path:
    """The demo's folder, emptied of what an earlier demo made; nothing else is ever removed."""
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / _MARKER).exists())):
        raise ConfigError(
            f"--output-dir {output_dir} is there and was not made by the demo", "Give a folder that does not exist yet."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in _OWN:
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
    return _run([*arguments, "--dataset-num-proc", "2", "--json"], progress)


def _train(folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
    arguments = ["train", "--model", str(folder / "model"), "--cached-dataset", str(folder / "cache")]
    arguments += ["--packing", "true", "--packing-length", str(PACKING_LENGTH)]
    arguments += ["--train-type", "full", "--freeze-vit", "false", "--freeze-aligner", "false"]
    arguments += ["--num-train-epochs", str(NUM_EPOCHS), "--learning-rate", LEARNING_RATE, "--weight-decay", "0"]
    arguments += ["--logging-steps", "20", "--seed", str(seed), "--output-dir", str(folder / "output"), "--json"]
    return _run(arguments, progress)


def _run(arguments: list[str], progress: Progress) -> dict[str, Any]:
    """Run a public command in a process of its own and read the JSON that it prints."""
    progress.note(f"\n$ packtool {shlex.join(arguments)}")
    command, environ = [sys.executable, "-m", "packtool", *arguments], environment_of_one_process()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, check=False)
    if done.returncode:
        raise PacktoolError(f"packtool {arguments[0]} ended with exit code {done.returncode}; its message is above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _answers(checkpoint: str, cache: str, world: DemoWorld, progress: Progress) -> ExactMatch:
    found = exact_match(checkpoint, cache, packing_length=4 * PACKING_LENGTH, progress=progress)
    expected = sum(map(len, world.held_out_questions))
    if found.num_turns != expected:
        raise PacktoolError(f"{cache} holds {found.num_turns} of {expected} held-out questions")
    return found


def _by_kind(questions: list[Question], answers: ExactMatch) -> dict[str, float]:
    kinds = np.array([question.kind for question in questions])
    return {str(kind): float(answers.exact[kinds == kind].mean()) for kind in np.unique(kinds)}
