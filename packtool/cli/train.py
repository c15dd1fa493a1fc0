"""``packtool train``."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import TYPE_CHECKING

import typer

from packtool.cli.interrupts import interrupts_heard
from packtool.cli.invocation import Invocation
from packtool.config.train import TrainConfig
from packtool.errors import EXIT_INTERRUPTED, PacktoolError
from packtool.launch.exchange import LOST_PEER, is_lost_peer
from packtool.launch.launcher import begins_run, find_place
from packtool.visible import show, show_json

if TYPE_CHECKING:
    from packtool.launch.world import World
    from packtool.train.prepare.result import TrainResult


def run_train(config: TrainConfig, invocation: Invocation) -> None:
    """Start under torchrun if the environment asks for it, else train and print the summary.

    What does not fit is told here, once and at once, before any process is started; a dry run starts none at all.
    """
    from packtool.rows.modelscope import with_local_copies
    from packtool.train.prepare.place import refuse_other_run, with_defaults

    config = with_defaults(config)
    if begins_run():
        refuse_other_run(config)  # the first process locks; no other need be started to learn this
    config = with_local_copies(config)
    world = find_place(
        invocation.arguments,
        config.sequence_parallel_ranks,
        partial(_prepare, config),
        # DeepSpeed asks torchrun's environment where it is, and MPI where there is none.
        even_one=config.deepspeed is not None,
        starts_none=config.dry_run,
        max_wait=config.ddp_timeout,
    )
    from packtool.cache.nothing_left import drop_notes
    from packtool.report.statistics import source_rows, train_lines
    from packtool.report.tables import print_table
    from packtool.rows.boundary import unforeseen_note
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
    from packtool.report.terminal import TerminalProgress
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


def _prepare(config: TrainConfig, world: World) -> None:
    """Find mistakes, and make the cache of rows, before processes are started."""
    from packtool.report.terminal import TerminalProgress
    from packtool.train.prepare.from_rows import with_cache
    from packtool.train.prepare.run import prepare_run
    from packtool.train.run import check_without_rows

    with TerminalProgress() as progress:
        config = with_cache(config, progress, check_without_rows)
    if config.bucket_size == "auto":
        # Every process finds it out for itself, and says so; the plan is only checked here.
        from packtool.progress import SilentProgress
        from packtool.train.model.bucket import with_bucket
        from packtool.train.prepare.recompute import with_recomputing

        config = with_bucket(with_recomputing(config), world, SilentProgress())
    prepare_run(config, world)
