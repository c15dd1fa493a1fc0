"""``packtool pack``."""

from __future__ import annotations

import dataclasses

import typer

from packtool.cli.invocation import Invocation
from packtool.config.pack import PackConfig
from packtool.errors import EXIT_INTERRUPTED
from packtool.visible import show_json


def run_pack(config: PackConfig, invocation: Invocation) -> None:
    """Write packs, and say what was written."""
    from packtool.packs.write import write_packs
    from packtool.report.markup import plural
    from packtool.report.names import named
    from packtool.report.tables import print_table
    from packtool.report.terminal import TerminalProgress

    with TerminalProgress() as progress:
        try:
            summary = write_packs(config, progress)
        except KeyboardInterrupt:
            progress.note("interrupted; the same command begins anew")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if invocation.as_json:
        show_json(named(dataclasses.asdict(summary)))
        return
    lines = [
        ("packs", f"{summary.packs:,} of at most {summary.capacity:,} tokens, in {plural(summary.files, 'file')}"),
        ("samples", f"{summary.samples:,}"),
        ("  left out, too long" if config.plan is None else "  not in the plan", f"{summary.filtered:,}"),
        ("tokens", f"{summary.tokens:,}, fill {summary.tokens / (summary.packs * summary.capacity):.2%}"),
        ("  target tokens", f"{summary.target_tokens:,}"),
    ]
    print_table(f"{summary.format} packs in {summary.output_dir}", lines)
