"""What ``packtool verify`` says."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from packtool.report.tables import print_table
from packtool.visible import show

if TYPE_CHECKING:  # the command line must not wait for torch
    from packtool.train.verify.run import VerifyReport
    from packtool.train.verify.trajectory import TrainedStep

_WHAT = {
    "isolation": "a changed sample moves no other",
    "prefixes": "a changed prefix does what it does alone",
    "logits": "logits are those of each sample alone",
    "loss": "the loss is that of the samples alone",
    "gradients": "gradients are those of the samples alone",
    "losses": "losses of all steps are those of unpacked steps",
    "weights": "weights in the end are those of unpacked steps",
}


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """What ``packtool verify --json`` prints."""
    checks = [{**dataclasses.asdict(check), "passed": check.passed} for check in report.checks]
    for check in checks:
        # JSON has no word for what is no number.
        check["error"] = check["error"] if math.isfinite(check["error"]) else None
    return {**dataclasses.asdict(report), "checks": checks, "passed": report.passed}


def _step_row(step: TrainedStep) -> tuple[str, ...]:
    return (
        f"{step.step:,}",
        f"{step.num_samples:,}",
        f"{step.num_targets:,}",
        f"{step.num_packs:,}",
        f"{step.packed:.7f}",
        f"{step.unpacked:.7f}",
        f"{abs(step.packed - step.unpacked):.1e}",
    )


def print_report(report: VerifyReport) -> None:
    """Print each check with its largest error and what rounding would explain, on stdout."""
    no = "" if report.passed else "NOT "
    verdict = f"packed samples are {no}what they are alone"
    if report.trajectory:
        verdict = f"packed steps train {no}what unpacked steps do"
        heads = ("step", "samples", "target tokens", "packs", "loss packed", "loss unpacked", "difference")
        print_table("AdamW, packed and unpacked:", [heads, *map(_step_row, report.trajectory)], "r")
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
