"""``packtool pack``."""

from __future__ import annotations

import dataclasses

from packtool.cli.invocation import Invocation
from packtool.config.pack import PackConfig
from packtool.visible import show_json


def run_pack(config: PackConfig, invocation: Invocation) -> None:
    """Write packs, and say what was written."""
    from packtool.packs.write import write_packs
    from packtool.report.markup import plural
    from packtool.report.tables import print_table
    from packtool.report.terminal import TerminalProgress

    with TerminalProgress() as progress:
        summary = write_packs(config, progress)
    if invocation.as_json:
        show_json(dataclasses.asdict(summary))
        return
    lines = [
        ("packs", f"{summary.packs:,} of at most {summary.capacity:,} tokens, in {plural(summary.files, 'file')}"),
        ("samples", f"{summary.samples:,}"),
        ("  left out, too long", f"{summary.filtered:,}"),
        ("tokens", f"{summary.tokens:,}, fill {summary.tokens / (summary.packs * summary.capacity):.2%}"),
        ("  target tokens", f"{summary.target_tokens:,}"),
    ]
    print_table(f"{summary.format} packs in {summary.output_dir}", lines)
