"""``packtool export``, ``packtool import`` and ``packtool check``."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from packtool.cli.options import Invocation, interruptible_progress, terminal_progress
from packtool.config.commands import CheckConfig
from packtool.config.data import ExportConfig, ImportConfig
from packtool.config.settings import part_of
from packtool.errors import ConfigError, DataError

if TYPE_CHECKING:
    from packtool.cache.manifest import ExportSummary
    from packtool.progress import Progress


def run_export(config: ExportConfig, invocation: Invocation) -> None:
    """Export rows and print the summary; Ctrl-C and SIGTERM leave an export that can be resumed."""
    from packtool.cache.executor import block_pandas
    from packtool.report.tables import export_figures, export_lines, table
    from packtool.rows.hubs import with_local_copies
    from packtool.rows.sample import drop_notes

    block_pandas()  # not needed, and slow to import
    config = with_local_copies(config)
    with terminal_progress() as progress:
        summary = _interruptible_export(config, progress)
    if summary.num_missing_shards:
        progress.note(
            f"part {config.task_index} of {config.num_tasks} is done; {summary.num_missing_shards} shards of other "
            "parts are missing, and the last part to finish publishes the cache (or the same command with --finalize)"
        )
    title = _title(config, summary.already_finished)
    invocation.show(export_figures(summary), table(title, export_lines(summary)))
    for note in drop_notes(summary.dropped, summary.num_rows):
        progress.note(note)


def _interruptible_export(config: ExportConfig, progress: Progress) -> ExportSummary:
    """Export rows; after Ctrl-C or SIGTERM, print how to resume and exit with the code of the signal."""
    from packtool.cache.export import export

    received_signal = int(signal.SIGINT)  # the cause of a KeyboardInterrupt, unless ``terminate`` is called

    def terminate(number: int, _: object) -> None:
        """Raise KeyboardInterrupt, so that workers end and the directory's lock is released as after Ctrl-C."""
        nonlocal received_signal
        received_signal = number
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, terminate)
    try:
        return export(config, progress)
    except KeyboardInterrupt:
        cause = "ended by SIGTERM" if received_signal == signal.SIGTERM else "interrupted"
        progress.note(f"{cause}; repeat the command to resume after the finished shards")
        raise typer.Exit(128 + received_signal) from None
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _title(config: ExportConfig, already_finished: bool) -> str:
    if config.repair:
        return f"{config.output_dir} is complete"
    if already_finished:
        return f"{config.output_dir} was already finished with these settings: nothing to do"
    if config.is_part and config.task_index is not None:
        return f"part {config.task_index} of {config.num_tasks} for {config.output_dir}"
    return "counted, nothing written (--dry-run)" if config.dry_run else f"exported to {config.output_dir}"


def run_import(config: ImportConfig, invocation: Invocation) -> None:
    """Make a cache of rows that another tool has tokenized; the default of ``--max-length`` is the model's limit."""
    if not config.max_length:
        from packtool.encode.families import text_config_of
        from packtool.encode.model_files import ModelFiles
        from packtool.rows.hubs import with_local_copies

        files = ModelFiles.load(with_local_copies(config).model, config.chat_template)
        max_length = text_config_of(files.config).get("max_position_embeddings")
        if not isinstance(max_length, int) or max_length < 2:
            problem = f"--model {config.model}: its config.json has no maximum length (max_position_embeddings)"
            raise ConfigError(problem, "Give --max-length.")
        config = dataclasses.replace(config, max_length=max_length)
    run_export(config, invocation)


def run_check(config: CheckConfig, invocation: Invocation) -> None:
    """Encode all rows without writing a cache, and report the dropped ones; DataError if there are too many."""
    from packtool.cache.executor import block_pandas
    from packtool.cache.export import export
    from packtool.report.check import check_figures, markdown_lines, verdict
    from packtool.rows.hubs import with_local_copies

    block_pandas()
    on_overlap = "keep" if config.max_overlap is None else "drop"  # only dropped rows are counted
    export_config = with_local_copies(part_of(ExportConfig, config, output_dir="", dry_run=True, on_overlap=on_overlap))
    drops: list[str] = []
    with interruptible_progress() as progress:
        summary = export(export_config, progress, drops)  # adds to ``drops``
    figures = check_figures(summary, drops, config)
    lines = markdown_lines(figures, config)
    invocation.show(figures, lines)
    _report_check(config, figures, lines)
    if figures["passed"]:
        return
    problem, remedy = verdict(figures, config), "packtool explain CODE explains a reason."
    has_too_many_drops = figures["num_dropped"] > figures["num_allowed"]
    if has_too_many_drops:
        raise DataError(problem, remedy, code="D009")
    raise DataError(problem, remedy, code="D010")  # too many overlaps


def _report_check(config: CheckConfig, figures: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write the files that the options name, and print annotations; ``lines`` are the summary in Markdown."""
    from packtool import storage
    from packtool.report.check import github_lines, gitlab_report
    from packtool.terminal import show

    if config.markdown is not None:
        storage.publish(config.markdown, ("\n".join(lines) + "\n").encode())
    if config.gitlab is not None:
        storage.publish(config.gitlab, json.dumps(gitlab_report(figures), indent=1).encode())
    if config.github:
        for line in github_lines(figures):
            show(line, error=True)
