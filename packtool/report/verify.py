"""What ``packtool verify`` says."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from packtool.visible import visible

if TYPE_CHECKING:  # the command line must not wait for torch
    from packtool.train.verify.run import VerifyReport

_WHAT = {
    "isolation": "a changed sample moves no other",
    "logits": "logits are those of each sample alone",
    "loss": "the loss is that of the samples alone",
    "gradients": "gradients are those of the samples alone",
}


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """What ``packtool verify --json`` prints."""
    checks = [{**dataclasses.asdict(check), "passed": check.passed} for check in report.checks]
    for check in checks:
        # JSON has no word for what is no number.
        check["error"] = check["error"] if math.isfinite(check["error"]) else None
    return {**dataclasses.asdict(report), "checks": checks, "passed": report.passed}


def print_report(report: VerifyReport, console: Console | None = None) -> None:
    """Each check with its largest error and what rounding would explain, on stdout."""
    console = console or Console(file=sys.stdout, highlight=False)
    verdict = (
        "packed samples are what they are alone" if report.passed else "packed samples are NOT what they are alone"
    )
    console.print(visible(f"{report.model}: {verdict}"), markup=False, soft_wrap=True)
    facts = (
        f"{report.num_packs:,} packs, {report.num_samples:,} samples, {report.num_tokens:,} tokens; on {report.device} "
        f"in {report.dtype}, attention by {report.attention}; {report.seconds:.1f} s"
    )
    console.print(visible(facts), markup=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("error", "allowed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for check in report.checks:
        mark = "[green]ok[/]" if check.passed else "[red]FAILED[/]"
        table.add_row(_WHAT[check.name], f"{check.error:.1e}", f"{check.allowed:.1e}", mark)
    console.print(table)
