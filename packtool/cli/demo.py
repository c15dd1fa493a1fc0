"""``packtool demo``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from packtool.cli.options import Invocation
from packtool.config.commands import DemoConfig
from packtool.errors import EXIT_INTERRUPTED, EXIT_UNEXPECTED
from packtool.launch.processes import share_cores_politely
from packtool.visible import show, show_json

if TYPE_CHECKING:
    from packtool.demo.run import DemoResult
    from packtool.report.statistics import Line


def run_demo_command(config: DemoConfig, invocation: Invocation) -> None:
    """Run the demo and print its table; exit code 1 if the model has not learned to see."""
    share_cores_politely()
    from packtool.demo.run import run_demo
    from packtool.report.statistics import named
    from packtool.report.tables import TerminalProgress, print_table

    with TerminalProgress() as progress:
        try:
            result = run_demo(config.output_dir, config.seed, progress)
        except KeyboardInterrupt:
            progress.note("interrupted; the same command starts afresh")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if invocation.as_json:
        show_json(named({**dataclasses.asdict(result), "passed": result.passed}))
    else:
        print_table("\nwhat the demo shows", demo_lines(result))
    if not result.passed:
        show("The model has not learned to see, or sees the wrong pictures: please report this.", error=True)
        raise typer.Exit(EXIT_UNEXPECTED)


def demo_lines(result: DemoResult) -> list[Line]:
    """What ``packtool demo`` ends with."""
    return [
        ("rows", f"{result.rows:,}"),
        ("  dropped", f"{result.dropped:,}"),
        ("packs", f"{result.num_packs:,}"),
        ("  fill", f"{result.fill:.2%}"),
        ("optimizer steps with packing", f"{result.steps:,}"),
        ("  without packing, one sample a row", f"{result.steps_without_packing:,}"),
        ("target tokens per second", f"{result.target_tokens_per_second:,.0f}"),
        ("loss, first and last", f"{result.first_loss:.3f} → {result.last_loss:.3f}"),
        (f"accuracy on {result.num_questions:,} held-out questions", f"{result.accuracy:.1%}"),
        *((f"  {kind}", f"{share:.1%}") for kind, share in result.accuracy_by_kind.items()),
        ("  with the pictures swapped", f"{result.swapped_accuracy:.1%}"),
        ("  guessing blindly", f"{result.chance:.1%}"),
        ("time", f"{result.seconds:.0f} s"),
    ]
