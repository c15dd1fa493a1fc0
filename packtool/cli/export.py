"""``packtool export``."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from packtool.cli.invocation import Invocation
from packtool.config.export import ExportConfig
from packtool.errors import EXIT_INTERRUPTED
from packtool.visible import show_json


def run_export(config: ExportConfig, invocation: Invocation) -> None:
    """Export and print the summary."""
    from packtool.cache.export import export
    from packtool.cache.nothing_left import drop_notes
    from packtool.report.names import named
    from packtool.report.statistics import export_json, export_lines
    from packtool.report.tables import print_table
    from packtool.report.terminal import TerminalProgress
    from packtool.rows.modelscope import with_local_copies

    config = with_local_copies(config)
    with TerminalProgress() as progress:
        try:
            with _ended_by_schedulers():
                summary = export(config, progress)
        except KeyboardInterrupt:
            progress.note("interrupted; the same command again goes on after the finished shards")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except _Terminated:
            progress.note("ended by SIGTERM; the same command again goes on after the finished shards")
            raise typer.Exit(128 + signal.SIGTERM) from None
    if summary.num_missing:
        progress.note(
            f"part {config.task_index} of {config.num_tasks} is done; {summary.num_missing} shards of other parts are "
            "missing, and the last part to finish publishes the cache (or the same command with --finalize)"
        )
    if invocation.as_json:
        show_json(named(export_json(summary)))
    else:
        print_table(_title(config, summary.already_finished), export_lines(summary))
    for note in drop_notes(summary.dropped, summary.rows):
        progress.note(note)


class _Terminated(BaseException):
    """Raised where SIGTERM interrupts an export."""


@contextmanager
def _ended_by_schedulers() -> Iterator[None]:
    """SIGTERM ends the export as Ctrl-C does: workers end, and the directory is free for the next one."""

    def end(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _title(config: ExportConfig, already_finished: bool) -> str:
    if config.repair:
        return f"{config.output_dir} is whole"
    if already_finished:
        return f"{config.output_dir} was already finished with these settings: nothing to do"
    if config.is_part and config.task_index is not None:
        return f"part {config.task_index} of {config.num_tasks} for {config.output_dir}"
    return "counted, nothing written (--dry-run)" if config.dry_run else f"exported to {config.output_dir}"
