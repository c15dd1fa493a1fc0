"""What a run leaves under names that stay: ``OUTPUT_DIR/last`` and ``OUTPUT_DIR/best``, each a model that loads.

Links to checkpoints, made anew whenever one is finished, so that they are right after a crash, too. Where the file
system knows no links, copies of what is a model there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from packtool.train.prepare.checkpoint import finished_checkpoints, read_run_state

LAST, BEST = "last", "best"

# A copy is for loading, not for going on from.
_OF_THE_RUN = ("optimizer*", "scheduler*", "rng_state*", "scaler*", "trainer_state*", "training_args*")
_NOT_COPIED = (
    *_OF_THE_RUN,
    "packtool_state*",
    "packtool_ledger*",
    "master_weights*",
    "pytorch_model_fsdp*",
    "global_step*",
    "stream-*",
)
_MODEL_FILES = ("config.json", "adapter_config.json")


def best_of(output_dir: str, history: Iterable[Mapping[str, Any]]) -> str | None:
    """The finished checkpoint with the lowest loss on the val split; None if none was evaluated.

    Args:
        history: the Trainer's log lines; those of an evaluation hold ``eval_loss`` and the ``step`` it came after.
    """
    losses = {line["step"]: line["eval_loss"] for line in history if line.get("eval_loss") is not None}
    steps = {checkpoint: read_run_state(checkpoint).step for checkpoint in finished_checkpoints(output_dir)}
    evaluated = [checkpoint for checkpoint, step in steps.items() if step in losses]
    return min(evaluated, key=lambda checkpoint: losses[steps[checkpoint]], default=None)


def point(output_dir: str, name: str, checkpoint: str) -> None:
    """Let ``OUTPUT_DIR/NAME`` be a checkpoint; whoever loads it meanwhile finds the old one or the new one.

    Raises:
        OSError: if it can neither be linked nor copied.
    """
    path, part = os.path.join(output_dir, name), os.path.join(output_dir, f".{name}.part")
    _remove(part)
    try:
        os.symlink(os.path.relpath(checkpoint, output_dir), part)
        if not os.path.islink(path):
            _remove(path)
    except (OSError, NotImplementedError):
        shutil.copytree(checkpoint, part, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        _remove(path)
    os.replace(part, path)


def remove_names(output_dir: str) -> None:
    """Take the names away, not what they stand for; a directory that is no model stays."""
    for name in (LAST, BEST):
        path = os.path.join(output_dir, name)
        if os.path.islink(path) or any(os.path.exists(os.path.join(path, file)) for file in _MODEL_FILES):
            _remove(path)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
