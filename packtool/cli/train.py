"""``packtool train``, ``eval``, ``verify``, ``merge`` and ``demo``."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import typer

from packtool.cli.options import Invocation, interruptible_progress, terminal_progress
from packtool.config.commands import DemoConfig, EvalConfig, MergeConfig, VerifyConfig
from packtool.config.train import TrainConfig
from packtool.errors import EXIT_INTERRUPTED, EXIT_MISMATCH, EXIT_OK, EXIT_UNEXPECTED, PacktoolError
from packtool.launch.processes import begins_run, imported_at_once, launch_ranks, set_passive_omp_wait
from packtool.launch.world import LOST_PEER, is_lost_peer
from packtool.terminal import show, show_json

if TYPE_CHECKING:
    from packtool.demo.run import DemoResult
    from packtool.launch.world import World
    from packtool.progress import Progress
    from packtool.train.prepare.result import TrainResult


@contextmanager
def repeated_interrupts(progress: Progress) -> Iterator[Progress]:
    """Yield a wrapper of ``progress`` whose methods all raise KeyboardInterrupt once there was a Ctrl-C.

    Libraries have bare ``except:`` clauses, and Python discards exceptions in callbacks from C and in finalizers.
    """
    was_interrupted = False

    def handle_interrupt(*_: object) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    def repeating(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **fields: Any) -> None:
            if was_interrupted:
                raise KeyboardInterrupt
            method(*args, **fields)

        return call

    names = ("start", "advance", "line", "note", "finish")  # all methods of Progress
    wrapped = SimpleNamespace(**{name: repeating(getattr(progress, name)) for name in names})
    previous_handler = signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield cast("Progress", wrapped)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def run_train(config: TrainConfig, invocation: Invocation) -> None:
    """Train and print the summary; start torchrun first if the environment asks for several processes."""
    from packtool.rows.hubs import with_local_copies
    from packtool.train.prepare.output_dir import refuse_other_run, with_defaults

    config = with_defaults(config)
    if begins_run():
        refuse_other_run(config)
    config = with_local_copies(config)
    torchrun: Literal["auto", "always", "never"] = "auto"
    if config.dry_run:
        torchrun = "never"
    elif config.deepspeed is not None:
        torchrun = "always"  # without torchrun's environment, DeepSpeed looks for MPI's
    world = launch_ranks(
        invocation.arguments,
        config.sequence_parallel_ranks,
        partial(_prepare_train, config),
        torchrun=torchrun,
        max_wait=config.ddp_timeout,
    )
    result = _train(config, invocation, world)
    if world.is_first:
        _show_result(config, result, invocation)


def _show_result(config: TrainConfig, result: TrainResult, invocation: Invocation) -> None:
    """Draw the curves of a run, and print notes about dropped rows and the summary."""
    from packtool.cache.evaluation_file import plain_json
    from packtool.report.tables import print_table, source_rows, train_lines
    from packtool.rows.sample import drop_notes, unexpected_note
    from packtool.train.prepare.result import next_lines

    curves = None if config.dry_run else _draw_curves(result.output_dir)
    if note := unexpected_note(result.dropped or {}, os.path.join(result.output_dir, "dropped-*.jsonl")):
        show(f"packtool: {note}", error=True)
    for note in drop_notes(result.dropped):
        show(note, error=True)
    if invocation.as_json:
        show_json(plain_json(dataclasses.asdict(result)))
        return
    lines = train_lines(result, has_plan=config.plan is not None)
    if config.dry_run:
        print_table("planned, nothing trained (--dry-run)", lines)
        return
    print_table(f"trained: {result.checkpoint or 'nothing saved (--save-strategy no)'}", lines)
    if result.sources:
        print_table("samples of each source in these steps", source_rows(result.sources))
    for line in next_lines(config, result):
        show(line)
    if curves is not None:
        show(f"curves: {curves}")


def _prepare_train(config: TrainConfig, world: World) -> None:
    """Check the settings and export the rows of ``--dataset`` before other processes start."""
    from packtool.train.run import prepare

    with terminal_progress() as progress:
        prepare(config, progress, world)


def _train(config: TrainConfig, invocation: Invocation, world: World) -> TrainResult:
    """Train; after Ctrl-C or the loss of another process, name the checkpoint to resume from."""
    from packtool.train.prepare.output_dir import newest_checkpoint
    from packtool.train.run import train

    with terminal_progress(enabled=world.is_first) as progress:
        try:
            with repeated_interrupts(progress) as repeating_progress:
                return train(config, repeating_progress, world)
        except KeyboardInterrupt:
            advice = "no checkpoint to resume from"
            if (checkpoint := newest_checkpoint(config)) is not None:
                advice = f"to resume from {checkpoint}, repeat the command with --resume-from-checkpoint true"
            progress.note(f"interrupted; {advice}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            if not is_lost_peer(error):
                raise
            raise _lost_peer_error(config, invocation, newest_checkpoint(config)) from error


def _lost_peer_error(config: TrainConfig, invocation: Invocation, checkpoint: str | None) -> PacktoolError:
    """Return the error for the loss of another process, with the command that resumes from the checkpoint, if any."""
    if checkpoint is None:
        return PacktoolError(LOST_PEER, "No checkpoint was finished: start the run again.")
    command = f"{invocation.command} --resume-from-checkpoint true"
    if config.overwrite_output_dir:
        command += " --overwrite-output-dir false"
    advice = f"The newest checkpoint is {checkpoint}. To resume, on every machine, with the same environment:"
    return PacktoolError(LOST_PEER, f"{advice}\n  {command}")


def _draw_curves(output_dir: str) -> str | None:
    """Draw ``curves.png`` and return its path; None without metrics. A failure only prints a warning."""
    from packtool.report.curves import write_curves
    from packtool.train.prepare.output_dir import METRICS_NAME

    metrics = os.path.join(output_dir, METRICS_NAME)
    if not os.path.exists(metrics):
        return None
    try:
        return write_curves(metrics, output_dir)
    except OSError as error:
        show(f"packtool: the curves could not be drawn: {error}", error=True)
        return None


def run_eval(config: EvalConfig, invocation: Invocation) -> None:
    """Evaluate and print the totals; start torchrun first if the environment asks for several processes."""

    def prepare(world: World) -> None:
        from packtool.train.prepare.evaluation import prepare_evaluation

        prepare_evaluation(config, world)

    world = launch_ranks(invocation.arguments, config.sequence_parallel_ranks, prepare, max_wait=config.ddp_timeout)
    from packtool.report.results import evaluation_figures, evaluation_lines
    from packtool.train.evaluate.run import evaluate_caches

    with terminal_progress(enabled=world.is_first) as progress:
        result = evaluate_caches(config, progress, world)
    if world.is_first:
        invocation.show(evaluation_figures(result), [*evaluation_lines(result), f"written: {result.output}"])


def run_verify(config: VerifyConfig, invocation: Invocation) -> None:
    """Compare packed and single samples and print the report; exit with code 4 if they differ."""
    num_ranks = config.sequence_parallel_ranks
    torchrun: Literal["auto", "never"] = "auto" if num_ranks > 1 else "never"
    check = partial(_check_verify, config)
    world = launch_ranks(invocation.arguments, num_ranks, check, torchrun=torchrun, max_wait=config.ddp_timeout)
    from packtool.report.results import verify_figures, verify_lines, write_page

    with imported_at_once():
        from packtool.train.verify.run import verify

    with terminal_progress(enabled=world.is_first) as progress:
        report = verify(config, progress, world)
    if not world.is_first:
        raise typer.Exit(EXIT_OK if report.passed else EXIT_MISMATCH)  # only the first process prints the report
    lines = verify_lines(report)
    if config.html is not None:
        write_page(report, config.html, invocation.command)
        lines.append(f"written: {config.html}")
    invocation.show(verify_figures(report), lines)
    report.raise_if_failed()


def _check_verify(config: VerifyConfig, world: World) -> None:
    """Raise a ConfigError if the model cannot be read, or its samples not be shared by the requested processes."""
    import numpy as np

    from packtool.encode.model_files import ModelFiles
    from packtool.train.prepare.parallelism import axes_of

    no_samples = np.zeros(0, np.int64)
    axes_of(config, world, ModelFiles.load(config.model), no_samples)


def run_merge(config: MergeConfig, invocation: Invocation) -> None:
    """Merge an adapter into its base model."""
    set_passive_omp_wait()
    with imported_at_once():
        from packtool.train.model.merge import merge_adapter

    with terminal_progress() as progress:
        result = merge_adapter(config, progress)
    merged = f"merged: {result.num_merged:,} modules of {result.base_model}, saved as {result.dtype}"
    invocation.show(dataclasses.asdict(result), [merged, f"written: {result.output}"])


def run_demo_command(config: DemoConfig, invocation: Invocation) -> None:
    """Run the demo and print its table; exit with code 1 if the model fails the check at the end."""
    set_passive_omp_wait()
    from packtool.demo.run import run_demo
    from packtool.report.tables import table

    with interruptible_progress() as progress:
        result = run_demo(config.output_dir, config.seed, progress)
    figures = {**dataclasses.asdict(result), "passed": result.passed}
    invocation.show(figures, table("\ndemo results", _demo_lines(result)))
    if not result.passed:
        show("The trained model does not answer from its images: please report this.", error=True)
        raise typer.Exit(EXIT_UNEXPECTED)


def _demo_lines(result: DemoResult) -> list[tuple[str, str]]:
    return [
        ("rows", f"{result.num_rows:,}"),
        ("  dropped", f"{result.dropped:,}"),
        ("packs", f"{result.num_packs:,}"),
        ("  fill", f"{result.fill:.2%}"),
        ("optimizer steps with packing", f"{result.steps:,}"),
        ("  without packing", f"{result.steps_without_packing:,}"),
        ("target tokens per second", f"{result.target_tokens_per_second:,.0f}"),
        ("loss, first and last", f"{result.first_loss:.3f} → {result.last_loss:.3f}"),
        (f"accuracy on {result.num_questions:,} held-out questions", f"{result.accuracy:.1%}"),
        *((f"  {kind}", f"{share:.1%}") for kind, share in result.accuracy_by_kind.items()),
        ("  with the pictures swapped", f"{result.swapped_accuracy:.1%}"),
        ("  chance", f"{result.chance:.1%}"),
        ("time", f"{result.seconds:.0f} s"),
    ]
