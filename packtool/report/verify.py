"""What ``packtool verify`` says."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from packtool.report.tables import print_table
from packtool.visible import show

if TYPE_CHECKING:  # the command line must not wait for torch
    from packtool.train.verify.run import VerifyReport

_WHAT = {
    "isolation": "a changed sample moves no other",
    "prefixes": "a changed prefix does what it does alone",
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


def print_report(report: VerifyReport) -> None:
    """Print each check with its largest error and what rounding would explain, on stdout."""
    verdict = (
        "packed samples are what they are alone" if report.passed else "packed samples are NOT what they are alone"
    )
    show(f"{report.model}: {verdict}")
    rows = [
        (_WHAT[check.name], f"{check.error:.1e}", f"{check.allowed:.1e}", "ok" if check.passed else "FAILED")
        for check in report.checks
    ]
    shared = f", {report.num_shared_tokens:,} of them saved by shared prefixes" if report.num_shared_tokens else ""
    facts = (
        f"{report.num_packs:,} packs, {report.num_samples:,} samples, {report.num_tokens:,} tokens{shared}; on "
        f"{report.device} in {report.dtype}, attention by {report.attention}; {report.seconds:.1f} s"
    )
    print_table(facts, [("", "largest error", "allowed", ""), *rows], "lrrl")
