"""Where a run writes: a directory of its own, that of the run it goes on with, or a numbered one inside.

OUTPUT_DIR/                                 as it is, without --add-version
OUTPUT_DIR/v0-20260131-120000/              with it: the first run, and when it began
OUTPUT_DIR/v1-20260201-090000/              the second

Beside its checkpoints a run keeps a ``history`` of what its steps held.

A directory of another run is never written into: its log lines and checkpoints would be mixed with the new ones. What
is looked at before the ranks meet is looked at by all of them, and nothing is written until they have met.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from typing import Any

from packtool.cache.reader import exported_model
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, StorageError
from packtool.launch.world import World
from packtool.train.prepare.carried import HISTORY
from packtool.train.prepare.checkpoint import (
    PREFIX,
    FoundCheckpoint,
    discard_run_state,
    find_checkpoint,
    finished_checkpoints,
)
from packtool.train.prepare.mixtures import named_sources
from packtool.train.prepare.outcome import remove_names

RESULT_NAME = "packtool_train.json"
METRICS_NAME = "metrics.jsonl"
_OTHER_NAMES = ("skipped.jsonl", "curves.png")
_PLACE = "Give a directory that is there and may be written to, or one that can be made."
_VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")


def with_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in what may be left out: ``--model`` from the first cache, ``--output-dir`` with ``output/MODEL/vN-TIME``.

    The second is ms-swift's default. Every process finds the same.

    Raises:
        ConfigError, MismatchError, StorageError: if no cache can be read.
    """
    model = config.model or exported_model(named_sources(config)[0][0])
    if config.output_dir:
        return dataclasses.replace(config, model=model)
    folder = os.path.join("output", os.path.basename(model.rstrip("/")) or "model")
    return dataclasses.replace(config, model=model, output_dir=folder, add_version=True)


def with_resumed_version(config: TrainConfig) -> TrainConfig:
    """A run that goes on with ``--add-version`` does so in the folder that it began in: that of its checkpoint."""
    resume = config.resume_from_checkpoint
    if not config.add_version or resume is None or resume.lower() == "false":
        return config
    folders = _versions(config.output_dir)
    if resume.lower() == "true":
        begun = [folder for folder in folders if finished_checkpoints(folder)]
    else:
        parent = os.path.abspath(os.path.dirname(resume.rstrip("/")))
        begun = [folder for folder in folders if os.path.abspath(folder) == parent]
    if not begun:
        return config if resume.lower() != "true" else dataclasses.replace(config, add_version=False)
    return dataclasses.replace(config, output_dir=begun[-1], add_version=False)


def newest_checkpoint(config: TrainConfig) -> str | None:
    """What ``--resume-from-checkpoint true`` would go on from, None for nothing."""
    found = with_resumed_version(dataclasses.replace(config, resume_from_checkpoint="true"))
    checkpoints = finished_checkpoints(found.output_dir)
    return checkpoints[-1] if checkpoints else None


def checkpoint_of(config: TrainConfig) -> FoundCheckpoint:
    """The checkpoint that a run goes on from, or takes its weights from; none for a run from the beginning.

    Raises:
        ConfigError: if there is no such checkpoint, or the output directory holds another run, or can be none.
        MismatchError: if it is damaged.
    """
    _check_is_possible(config.output_dir)
    only_model = config.resume_only_model
    found = find_checkpoint(config.resume_from_checkpoint, config.output_dir, only_model=only_model)
    checkpoint = found.directory
    goes_on = checkpoint is not None and _is_in(checkpoint, config.output_dir)
    if goes_on and config.overwrite_output_dir:
        raise ConfigError(
            f"--overwrite-output-dir would remove {checkpoint}, which this run is to go on from",
            "Leave out one of --overwrite-output-dir and --resume-from-checkpoint.",
        )
    if goes_on or config.overwrite_output_dir or config.add_version:
        return found
    if used := _left_by_a_run(config.output_dir):
        shown = ", ".join(used[:3]) + (", ..." if len(used) > 3 else "")
        on = "--resume-from-checkpoint true goes on with it, " if finished_checkpoints(config.output_dir) else ""
        raise ConfigError(
            f"--output-dir {config.output_dir} holds another run: {shown}",
            f"Give another directory; or {on}--overwrite-output-dir true replaces it, and --add-version true makes a "
            "numbered folder inside for each run.",
        )
    return found


def make_place(config: TrainConfig, world: World) -> TrainConfig:
    """Make the output directory, once all ranks have met; what an earlier run left goes if that is asked for.

    Returns:
        the settings with the directory that all ranks write to.
    """
    agreed: list[Any] = [config.output_dir]
    if world.is_first:
        if config.add_version:
            number = max((_number(folder) for folder in _versions(config.output_dir)), default=-1) + 1
            agreed = [os.path.join(config.output_dir, f"v{number}-{time.strftime('%Y%m%d-%H%M%S')}")]
        elif config.overwrite_output_dir:
            _clear(config.output_dir)
        try:
            os.makedirs(agreed[0], exist_ok=True)
        except OSError as error:
            raise StorageError(f"--output-dir {agreed[0]} cannot be made: {error.strerror}", _PLACE) from error
    if config.add_version and world.size > 1:
        import torch.distributed as dist  # here, because directories are looked at without torch

        dist.broadcast_object_list(agreed)
    return dataclasses.replace(config, output_dir=agreed[0])


def _check_is_possible(output_dir: str) -> None:
    """A dry run makes no directory, and finds out all the same whether the run could."""
    if not output_dir:
        raise ConfigError("--output-dir is empty", _PLACE)
    there = os.path.abspath(output_dir)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise ConfigError(f"--output-dir {output_dir}: {there} is no directory", _PLACE)
    if not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"--output-dir {output_dir}: {there} may not be written to", _PLACE)


def _clear(output_dir: str) -> None:
    """Remove what a run left; files that packtool did not write stay."""
    for name in _left_by_a_run(output_dir):
        path = os.path.join(output_dir, name)
        if name.startswith(PREFIX):
            discard_run_state(path)
            shutil.rmtree(path)
        else:
            os.remove(path)
    remove_names(output_dir)
    shutil.rmtree(os.path.join(output_dir, HISTORY), ignore_errors=True)
    for name in _OTHER_NAMES:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(output_dir, name))


def _left_by_a_run(output_dir: str) -> list[str]:
    names = sorted(os.listdir(output_dir)) if os.path.isdir(output_dir) else []
    return [name for name in names if name in (RESULT_NAME, METRICS_NAME) or re.fullmatch(PREFIX + r"\d+", name)]


def _is_in(checkpoint: str, output_dir: str) -> bool:
    return os.path.realpath(os.path.dirname(checkpoint)) == os.path.realpath(output_dir)


def _versions(output_dir: str) -> list[str]:
    """Numbered folders, the newest last."""
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    folders = [os.path.join(output_dir, name) for name in names if _VERSION.fullmatch(name)]
    return sorted(folders, key=lambda folder: (_number(folder), folder))


def _number(folder: str) -> int:
    found = _VERSION.fullmatch(os.path.basename(folder))
    assert found is not None, "a version"
    return int(found[1])
