"""What ``packtool verify`` and ``packtool eval`` print, as tables, JSON and a page."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from packtool import storage
from packtool.cache.evaluation_file import plain_json
from packtool.report.drawing import render
from packtool.report.tables import print_table
from packtool.visible import show

if TYPE_CHECKING:
    from packtool.train.evaluate.run import EvalResult
    from packtool.train.evaluate.scorer import Total
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


_STEP_HEADS = ("step", "samples", "target tokens", "packs", "loss packed", "loss unpacked", "difference")


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


def _verdict(report: VerifyReport) -> str:
    no = "" if report.passed else "NOT "
    if report.trajectory:
        return f"packed steps train {no}what unpacked steps do"
    return f"packed samples are {no}what they are alone"


def _check_rows(report: VerifyReport) -> list[tuple[str, ...]]:
    """Each check with its largest error and what rounding would explain."""
    return [
        (_WHAT[check.name], f"{check.error:.1e}", f"{check.allowed:.1e}", "ok" if check.passed else "FAILED")
        for check in report.checks
    ]


def write_page(report: VerifyReport, path: str, command: str) -> None:
    """Write the report as a page that loads nothing from elsewhere.

    Args:
        command: that the page says it was made by.

    Raises:
        StorageError: if it cannot be written.
    """
    num_failed = sum(not check.passed for check in report.checks)
    shared = f"{report.num_shared_tokens:,} of them saved by shared prefixes" if report.num_shared_tokens else ""
    page = render(
        "verify.html",
        title=f"{storage.name(report.model)}: {_verdict(report)}",
        command=command,
        cards=[
            (f"{len(report.checks) - num_failed} of {len(report.checks)}", "checks passed", ""),
            (f"{report.num_packs:,}", "packs", ""),
            (f"{report.num_samples:,}", "samples", ""),
            (f"{report.num_tokens:,}", "tokens", shared),
        ],
        checks=[("", "largest error", "allowed", "result"), *_check_rows(report)],
        failures=[check.sentence() for check in report.checks if not check.passed],
        steps=[_STEP_HEADS, *map(_step_row, report.trajectory)] if report.trajectory else [],
        figures=[
            ("model", storage.masked(report.model)),
            ("device", report.device),
            ("precision", report.dtype),
            ("attention", report.attention),
            ("time", f"{report.seconds:.1f} s"),
        ],
    )
    storage.publish(path, page.encode())


def print_report(report: VerifyReport) -> None:
    """Print each check with its largest error and what rounding would explain, on stdout."""
    if report.trajectory:
        print_table("AdamW, packed and unpacked:", [_STEP_HEADS, *map(_step_row, report.trajectory)], "r")
    show(f"{report.model}: {_verdict(report)}")
    shared = f", {report.num_shared_tokens:,} of them saved by shared prefixes" if report.num_shared_tokens else ""
    facts = (
        f"{report.num_packs:,} packs, {report.num_samples:,} samples, {report.num_tokens:,} tokens{shared}; on "
        f"{report.device} in {report.dtype}, attention by {report.attention}; {report.seconds:.1f} s"
    )
    print_table(facts, [("", "largest error", "allowed", ""), *_check_rows(report)], "lrrl")


_HEADER = ("", "samples", "target tokens", "loss", "perplexity", "token accuracy", "exact samples")
_ALL, _WITHOUT = "all", "(no channel)"


def evaluation_json(result: EvalResult) -> dict[str, Any]:
    """What ``packtool eval --json`` prints."""
    evaluation = result.evaluation
    totals = evaluation.channel_totals
    figures = {
        **dataclasses.asdict(evaluation.total),
        "channels": {name: dataclasses.asdict(total) for name, total in totals.items() if name is not None},
        "split": result.split,
        "tokens": result.tokens,
        "micro_batches": result.num_micro_batches,
        "processes": result.num_processes,
        "seconds": round(result.seconds, 3),
        "output": result.output,
    }
    return dict(plain_json(figures))


def print_evaluation(result: EvalResult) -> None:
    """What ``packtool eval`` prints: totals, and those of each channel where there are channels."""
    totals = result.evaluation.channel_totals
    rows = [_row(_ALL, result.evaluation.total)]
    if any(name is not None for name in totals):
        rows += [_row(_WITHOUT if name is None else name, total) for name, total in totals.items()]
    rate = result.tokens / max(result.seconds, 1e-9)
    print_table(f"{result.split} split, {result.seconds:.1f} s, {rate:,.0f} tokens/s", [_HEADER, *rows])


def _row(name: str, total: Total) -> tuple[str, ...]:
    return (
        name,
        f"{total.samples:,}",
        f"{total.target_tokens:,}",
        f"{total.loss:.4f}",
        f"{total.perplexity:,.2f}",
        f"{total.token_accuracy:.2%}",
        f"{total.exact_samples:,}",
    )
