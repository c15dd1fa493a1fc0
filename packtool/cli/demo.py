"""``packtool demo``."""

from __future__ import annotations

import dataclasses

import typer

from packtool.cli.invocation import Invocation, interruptible_progress
from packtool.config.commands import DemoConfig
from packtool.errors import EXIT_UNEXPECTED
from packtool.launch.processes import share_cores_politely
from packtool.terminal import show


def run_demo_command(config: DemoConfig, invocation: Invocation) -> None:
    """Run the demo and print its table; exit with code 1 if the model fails the check at the end."""
    share_cores_politely()
    from packtool.demo.run import run_demo
    from packtool.report.tables import table

    with interruptible_progress("interrupted; the same command starts afresh") as progress:
        result = run_demo(config.output_dir, config.seed, progress)
    lines = [
        ("rows", f"{result.num_rows:,}"),
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
    invocation.show({**dataclasses.asdict(result), "passed": result.passed}, table("\nwhat the demo shows", lines))
    if not result.passed:
        show("The model has not learned to see, or sees the wrong pictures: please report this.", error=True)
        raise typer.Exit(EXIT_UNEXPECTED)
