"""``packtool train``.

Ctrl-C that is heard whatever a library does with it.

``packtool eval``.

``packtool verify``.

``packtool merge``.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import typer

from packtool.cli.options import Invocation
from packtool.config.commands import EvalConfig, MergeConfig, VerifyConfig
from packtool.config.train import TrainConfig
from packtool.errors import EXIT_INTERRUPTED, EXIT_MISMATCH, EXIT_OK, PacktoolError
from packtool.launch.processes import begins_run, find_place, imported_at_once, share_cores_politely
from packtool.launch.world import LOST_PEER, is_lost_peer
from packtool.progress import Progress
from packtool.visible import show, show_json

if TYPE_CHECKING:
    from packtool.launch.world import World
    from packtool.train.prepare.result import TrainResult


@contextmanager
def interrupts_heard(progress: Progress) -> Iterator[Progress]:
    """Inside, an interrupt that somebody caught and dropped is raised again, the next time that progress is told.

    Libraries have ``except:`` without a name, and what is raised in a callback from C or in a finalizer goes nowhere:
    a Ctrl-C at that moment would be lost, and the run go on.

    Args:
        progress: that is told of every step.

    Returns:
        the one to tell instead.
    """
    listening = _Listening(progress)
    before = signal.signal(signal.SIGINT, listening.hear)
    try:
        yield listening
    finally:
        signal.signal(signal.SIGINT, before)


class _Listening:
    """Passes on what it is told, unless there was an interrupt before."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._was_interrupted = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._was_interrupted = True
        raise KeyboardInterrupt

    def start(self, title: str, total: int | None) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.start(title, total)

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.advance(num_done, **fields)

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.line(num_done, **fields)

    def note(self, message: str) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.note(message)

    def finish(self) -> None:
        """See ``packtool.progress.Progress``."""
        self._check()
        self._progress.finish()

    def _check(self) -> None:
        if self._was_interrupted:
            raise KeyboardInterrupt


def run_train(config: TrainConfig, invocation: Invocation) -> None:
    """Start under torchrun if the environment asks for it, else train and print the summary.

    What does not fit is told here, once and at once, before any process is started; a dry run starts none at all.
    """
    from packtool.rows.sources import with_local_copies
    from packtool.train.prepare.place import refuse_other_run, with_defaults

    config = with_defaults(config)
    if begins_run():
        refuse_other_run(config)  # the first process locks; no other need be started to learn this
    config = with_local_copies(config)
    world = find_place(
        invocation.arguments,
        config.sequence_parallel_ranks,
        partial(_prepare_train, config),
        # DeepSpeed asks torchrun's environment where it is, and MPI where there is none.
        even_one=config.deepspeed is not None,
        starts_none=config.dry_run,
        max_wait=config.ddp_timeout,
    )
    from packtool.report.statistics import source_rows, train_lines
    from packtool.report.tables import print_table
    from packtool.rows.sample import drop_notes, unforeseen_note
    from packtool.train.prepare.result import next_lines

    result = _train(config, invocation, world)
    if not world.is_first:
        return
    curves = None if config.dry_run else _draw_curves(result.output_dir)
    if note := unforeseen_note(result.dropped or {}, os.path.join(result.output_dir, "dropped-*.jsonl")):
        show(f"packtool: {note}", error=True)
    for note in drop_notes(result.dropped):
        show(note, error=True)
    if invocation.as_json:
        from packtool.cache.evaluation_file import plain_json

        show_json(plain_json(dataclasses.asdict(result)))
        return
    lines = train_lines(result, has_plan=config.plan is not None)
    if config.dry_run:
        print_table("planned, nothing trained (--dry-run)", lines)
    else:
        print_table(f"trained: {result.checkpoint or 'nothing saved (--save-strategy no)'}", lines)
        if result.sources:
            print_table("what these steps had of each source", source_rows(result.sources))
        for line in next_lines(config, result):
            show(line)
        if curves is not None:
            show(f"curves: {curves}")


def _train(config: TrainConfig, invocation: Invocation, world: World) -> TrainResult:
    """Train, and say what there is to resume from where that ends early."""
    from packtool.report.tables import TerminalProgress
    from packtool.train.run import train

    with TerminalProgress(enabled=world.is_first) as progress:
        try:
            with interrupts_heard(progress) as listening:
                return train(config, listening, world)
        except KeyboardInterrupt:
            progress.note(_after_interrupt(config))
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if not is_lost_peer(error):
                raise
            raise PacktoolError(LOST_PEER, _resume_lines(config, invocation)) from error


def _after_interrupt(config: TrainConfig) -> str:
    """What there is to go on from."""
    from packtool.train.prepare.place import newest_checkpoint

    checkpoint = newest_checkpoint(config)
    if checkpoint is None:
        return "interrupted; no checkpoint was finished, so there is nothing to go on from"
    return f"interrupted; the same command with --resume-from-checkpoint true goes on from {checkpoint}"


def _resume_lines(config: TrainConfig, invocation: Invocation) -> str:
    """The newest checkpoint, and the command that resumes from it."""
    from packtool.train.prepare.place import newest_checkpoint

    checkpoint = newest_checkpoint(config)
    if checkpoint is None:
        return "No checkpoint was finished: start the run again."
    command = f"{invocation.command} --resume-from-checkpoint true"
    command += " --overwrite-output-dir false" if config.overwrite_output_dir else ""
    return (
        f"The newest checkpoint is {checkpoint}. To resume, on every machine, with the same environment:\n  {command}"
    )


def _draw_curves(output_dir: str) -> str | None:
    """A picture more or less must not make a trained run look failed."""
    from packtool.report.curves import write_curves
    from packtool.train.prepare.place import METRICS_NAME

    metrics = os.path.join(output_dir, METRICS_NAME)
    if not os.path.exists(metrics):
        return None
    try:
        return write_curves(metrics, output_dir)
    except OSError as error:
        show(f"packtool: the curves could not be drawn: {error}", error=True)
        return None


def _prepare_train(config: TrainConfig, world: World) -> None:
    """Find mistakes, and make the cache of rows, before processes are started."""
    from packtool.report.tables import TerminalProgress
    from packtool.train.prepare.from_rows import with_cache
    from packtool.train.prepare.run import Run
    from packtool.train.run import check_without_rows

    with TerminalProgress() as progress:
        config = with_cache(config, progress, check_without_rows)
    if config.bucket_size == "auto":
        # Every process finds it out for itself, and says so; the plan is only checked here.
        from packtool.progress import SilentProgress
        from packtool.train.model.bucket import with_bucket
        from packtool.train.prepare.costs import with_recomputing

        config = with_bucket(with_recomputing(config), world, SilentProgress())
    Run.of(config, world)


def run_eval(config: EvalConfig, invocation: Invocation) -> None:
    """Start under torchrun if the environment asks for it, else evaluate and print the totals.

    What does not fit is told here, once and at once, before any process is started.
    """
    world = find_place(
        invocation.arguments,
        config.sequence_parallel_ranks,
        partial(_prepare_eval, config),
        max_wait=config.ddp_timeout,
    )
    from packtool.report.results import evaluation_json, print_evaluation
    from packtool.report.statistics import named
    from packtool.report.tables import TerminalProgress
    from packtool.train.evaluate.run import evaluate_caches

    with TerminalProgress(enabled=world.is_first) as progress:
        result = evaluate_caches(config, progress, world)
    if not world.is_first:
        return
    if invocation.as_json:
        show_json(named(evaluation_json(result)))
        return
    print_evaluation(result)
    show(f"written: {result.output}")


def _prepare_eval(config: EvalConfig, world: World) -> None:
    from packtool.train.prepare.evaluation import prepare_evaluation

    prepare_evaluation(config, world)


def run_verify(config: VerifyConfig, invocation: Invocation) -> None:
    """Compare and print; a leak ends with exit code 4, after the report.

    Several processes are started only where they share sequences: otherwise one computes all.
    """
    ranks = config.sequence_parallel_ranks
    world = find_place(
        invocation.arguments,
        ranks,
        partial(_prepare_verify, config),
        starts_none=ranks == 1,
        max_wait=config.ddp_timeout,
    )
    from packtool.report.results import print_report, verify_json, write_page
    from packtool.report.statistics import named
    from packtool.report.tables import TerminalProgress

    with imported_at_once():
        from packtool.train.verify.run import verify

    with TerminalProgress(enabled=world.is_first) as progress:
        report = verify(config, progress, world)
    if not world.is_first:
        # The first one says what is wrong.
        raise typer.Exit(EXIT_OK if report.passed else EXIT_MISMATCH)
    if config.html is not None:
        write_page(report, config.html, invocation.command)
    if invocation.as_json:
        show_json(named(verify_json(report)))
    else:
        print_report(report)
        if config.html is not None:
            show(f"written: {config.html}")
    report.raise_if_failed()


def _prepare_verify(config: VerifyConfig, world: World) -> None:
    import numpy as np

    from packtool.encode.model_files import ModelFiles
    from packtool.train.prepare.sequence_parallel import axes_of

    axes_of(config, world, ModelFiles.load(config.model), np.zeros(0, np.int64))


def run_merge(config: MergeConfig, invocation: Invocation) -> None:
    """Merge and say where the model is."""
    share_cores_politely()
    from packtool.report.tables import TerminalProgress

    with imported_at_once():
        from packtool.train.model.merge import merge_adapter

    with TerminalProgress() as progress:
        result = merge_adapter(config, progress)
    if invocation.as_json:
        show_json(dataclasses.asdict(result))
        return
    show(f"merged: {result.num_merged:,} modules of {result.base_model}, saved as {result.dtype}")
    show(f"written: {result.output}")
