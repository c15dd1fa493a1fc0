"""The output directory of a run, and the checkpoint that it resumes from.

OUTPUT_DIR/                                 without --add-version
OUTPUT_DIR/v0-20260131-120000/              with it: the first run, with the time of its start
OUTPUT_DIR/v1-20260201-090000/              the second run
OUTPUT_DIR/last, OUTPUT_DIR/best            links to checkpoints; copies of the model on file systems without links
OUTPUT_DIR/history/                         the history of the run (``prepare.history``)

A run never writes into the directory of another run. Its first process locks the directory before anything is loaded;
all ranks check it, and nothing but the lock is written before they communicate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packtool.cache.lock import DirectoryLock, refuse_if_busy
from packtool.cache.reader import exported_model
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, StorageError
from packtool.launch.world import World
from packtool.train.prepare.caches import named_sources
from packtool.train.prepare.checkpoint import (
    PREFIX,
    RunState,
    discard_run_state,
    find_checkpoint,
    finished_checkpoints,
    read_run_state,
)

LAST, BEST = "last", "best"
HISTORY = "history"
"""Folder of an output directory for the history of its run, which all checkpoints share."""

# A copy is for loading, not for resuming.
_NOT_COPIED = (
    *("optimizer*", "scheduler*", "rng_state*", "scaler*", "trainer_state*", "training_args*", "stream-*"),
    *("packtool_state*", "packtool_ledger*", "master_weights*", "pytorch_model_fsdp*", "global_step*"),
)
_MODEL_FILES = ("config.json", "adapter_config.json")


def best_checkpoint(output_dir: str, history: Iterable[Mapping[str, Any]]) -> str | None:
    """The finished checkpoint with the lowest ``eval_loss`` in the Trainer's log ``history``; None without any."""
    losses = {line["step"]: line["eval_loss"] for line in history if line.get("eval_loss") is not None}
    steps = {checkpoint: read_run_state(checkpoint).step for checkpoint in finished_checkpoints(output_dir)}
    evaluated = [checkpoint for checkpoint, step in steps.items() if step in losses]
    return min(evaluated, key=lambda checkpoint: losses[steps[checkpoint]], default=None)


def point(output_dir: str, name: str, checkpoint: str) -> None:
    """Atomically make ``OUTPUT_DIR/NAME`` a link to a checkpoint, or a copy; OSError if neither is possible."""
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


def remove_links(output_dir: str) -> None:
    """Remove the links ``last`` and ``best``, or copies in their place; other directories of that name stay."""
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


RESULT_NAME = "packtool_train.json"
METRICS_NAME = "metrics.jsonl"
_OTHER_NAMES = ("skipped.jsonl", "curves.png")
_REMEDY = "Give a writable directory, or one that can be created."
_VERSION = re.compile(r"v(\d+)-\d{8}-\d{6}")


def with_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in ``--model`` from the first cache, and ``--output-dir`` as ms-swift does: ``output/MODEL/vN-TIME``."""
    model = config.model or exported_model(named_sources(config)[0][0])
    if config.output_dir:
        return dataclasses.replace(config, model=model)
    folder = os.path.join("output", os.path.basename(model.rstrip("/")) or "model")
    return dataclasses.replace(config, model=model, output_dir=folder, add_version=True)


def with_resumed_folder(config: TrainConfig) -> TrainConfig:
    """The settings of a run with ``--add-version`` that resumes in the numbered folder of its checkpoint."""
    resume = config.resume_from_checkpoint
    if not config.add_version or resume is None or resume.lower() == "false":
        return config
    folders = _versions(config.output_dir)
    if resume.lower() == "true":
        matching = [folder for folder in folders if finished_checkpoints(folder)]
    else:
        parent = os.path.abspath(os.path.dirname(resume.rstrip("/")))
        matching = [folder for folder in folders if os.path.abspath(folder) == parent]
    if not matching:
        return config if resume.lower() != "true" else dataclasses.replace(config, add_version=False)
    return dataclasses.replace(config, output_dir=matching[-1], add_version=False)


def newest_checkpoint(config: TrainConfig) -> str | None:
    """The checkpoint that ``--resume-from-checkpoint true`` names; None if there is none."""
    resumed = with_resumed_folder(dataclasses.replace(config, resume_from_checkpoint="true"))
    checkpoints = finished_checkpoints(resumed.output_dir)
    return checkpoints[-1] if checkpoints else None


@dataclass(frozen=True)
class ResumePoint:
    """The point at which a run starts: the beginning, or a checkpoint.

    Args:
        saved_state: to resume from; ``packtool.Batches`` has one without a checkpoint, which its user keeps.
        weights: checkpoint from which only the weights are loaded; None for those of the model.
    """

    checkpoint: str | None = None
    saved_state: RunState | None = None
    weights: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: TrainConfig) -> ResumePoint:
        """Find the checkpoint that the options and the output directory name."""
        checkpoint, notes = checkpoint_of(config)
        if config.resume_only_model or checkpoint is None:
            return cls(weights=checkpoint, notes=tuple(notes))
        return cls(checkpoint, read_run_state(checkpoint), notes=tuple(notes))

    @property
    def start(self) -> int:
        """The first step to train."""
        return 0 if self.saved_state is None else self.saved_state.step


def checkpoint_of(config: TrainConfig) -> tuple[str | None, list[str]]:
    """Find the checkpoint of a run, with warnings on damaged ones, and check that its output directory is free."""
    _check_can_create(config.output_dir)
    checkpoint, warnings = find_checkpoint(
        config.resume_from_checkpoint, config.output_dir, only_model=config.resume_only_model
    )
    resumed_dir = None if checkpoint is None else os.path.realpath(os.path.dirname(checkpoint))
    resumes_here = resumed_dir == os.path.realpath(config.output_dir)
    if resumes_here and config.overwrite_output_dir:
        raise ConfigError(
            f"--overwrite-output-dir would delete {checkpoint}, from which this run resumes",
            "Leave out one of --overwrite-output-dir and --resume-from-checkpoint.",
        )
    if not (resumes_here or config.overwrite_output_dir or config.add_version):
        _check_has_no_run(config.output_dir)
    return checkpoint, warnings


def _check_has_no_run(output_dir: str) -> None:
    """Raise a ConfigError if an output directory already contains a run."""
    run_files = _run_files(output_dir)
    if not run_files:
        return
    shown = ", ".join(run_files[:3]) + (", ..." if len(run_files) > 3 else "")
    resume = "--resume-from-checkpoint true resumes it, " if finished_checkpoints(output_dir) else ""
    raise ConfigError(
        f"--output-dir {output_dir} already contains a run: {shown}",
        f"Give another directory; or {resume}--overwrite-output-dir true deletes it first, and --add-version true "
        "creates a numbered folder in it for each run.",
    )


def refuse_other_run(config: TrainConfig) -> None:
    """Raise a MismatchError if another run is training in the output directory; writes nothing."""
    config = with_resumed_folder(config)
    if not config.add_version:
        refuse_if_busy(os.path.abspath(config.output_dir))


@contextlib.contextmanager
def locked_output_dir(config: TrainConfig, world: World) -> Iterator[tuple[TrainConfig, DirectoryLock | None]]:
    """Create the output directory, and lock it so that no other run can use it; only in the first process of a run.

    A dry run creates nothing, and only checks that no run uses the directory. On exit, new directories that are still
    empty are removed.

    Yields:
        the settings, in the first process with the new folder of ``--add-version`` as their output directory; and the
        lock, None in other processes and in a dry run.
    """
    config = with_resumed_folder(config)
    _check_can_create(config.output_dir)
    if config.dry_run:
        refuse_other_run(config)
        yield config, None
        return
    if not world.is_first:
        yield config, None
        return

    new_directories = _missing_directories(config.output_dir)  # innermost first
    try:
        os.makedirs(config.output_dir, exist_ok=True)
        if config.add_version:
            config = dataclasses.replace(config, output_dir=_new_version(config.output_dir))
            new_directories.insert(0, config.output_dir)
    except OSError as error:
        raise StorageError(f"--output-dir {config.output_dir} cannot be created: {error.strerror}", _REMEDY) from error

    try:
        with DirectoryLock(os.path.abspath(config.output_dir), what="training") as lock:
            yield config, lock
    finally:
        for directory in new_directories:
            with contextlib.suppress(OSError):  # cannot be removed unless it is empty
                os.rmdir(directory)


def _missing_directories(path: str) -> list[str]:
    """The directory ``path`` and its parents that do not exist, innermost first."""
    missing = []
    directory = os.path.abspath(path)
    while not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    return missing


def _new_version(output_dir: str) -> str:
    """Create the next numbered folder; two runs that start at once get different ones."""
    while True:
        number = max((_number(folder) for folder in _versions(output_dir)), default=-1) + 1
        folder = os.path.join(output_dir, f"v{number}-{time.strftime('%Y%m%d-%H%M%S')}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
            return folder


def make_output_dir(config: TrainConfig, world: World) -> TrainConfig:
    """Delete an earlier run with ``--overwrite-output-dir``; return the settings with the first rank's directory.

    With ``--add-version``, only the first rank knows the numbered folder, so all ranks must call this function.
    """
    if world.is_first and config.overwrite_output_dir:
        _delete_run(config.output_dir)
    output_dir: list[Any] = [config.output_dir]
    if config.add_version and world.size > 1:
        import torch.distributed as dist  # here, because directories are checked without torch

        dist.broadcast_object_list(output_dir)  # replaces the entry by the first rank's
    return dataclasses.replace(config, output_dir=output_dir[0])


def _delete_run(output_dir: str) -> None:
    """Delete the files of a run; files that packtool did not write stay."""
    for name in _run_files(output_dir):
        path = os.path.join(output_dir, name)
        if name.startswith(PREFIX):
            discard_run_state(path)
            shutil.rmtree(path)
        else:
            os.remove(path)
    remove_links(output_dir)
    shutil.rmtree(os.path.join(output_dir, HISTORY), ignore_errors=True)
    for name in _OTHER_NAMES:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(output_dir, name))


def _check_can_create(output_dir: str) -> None:
    """Raise a ConfigError or StorageError unless the directory is writable, or can be created."""
    if not output_dir:
        raise ConfigError("--output-dir is empty", _REMEDY)
    existing = os.path.abspath(output_dir)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise ConfigError(f"--output-dir {output_dir}: {existing} is not a directory", _REMEDY)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(f"--output-dir {output_dir}: {existing} is not writable", _REMEDY)


def _run_files(output_dir: str) -> list[str]:
    """Names of a run's checkpoints, result and metrics in a directory, sorted."""
    names = sorted(os.listdir(output_dir)) if os.path.isdir(output_dir) else []
    return [name for name in names if name in (RESULT_NAME, METRICS_NAME) or re.fullmatch(PREFIX + r"\d+", name)]


def _versions(output_dir: str) -> list[str]:
    """The numbered folders of ``--add-version``, the newest last."""
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    folders = [os.path.join(output_dir, name) for name in names if _VERSION.fullmatch(name)]
    return sorted(folders, key=lambda folder: (_number(folder), folder))


def _number(folder: str) -> int:
    return int(os.path.basename(folder)[1:].partition("-")[0])
