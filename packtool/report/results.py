"""Results of ``packtool verify`` and ``packtool eval`` as tables, JSON and a page."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from packtool import storage
from packtool.cache.evaluation_file import plain_json
from packtool.report.drawing import render
from packtool.report.tables import table

if TYPE_CHECKING:
    from packtool.train.evaluate.per_sample import Total
    from packtool.train.evaluate.run import EvalResult
    from packtool.train.verify.run import VerifyReport


_CHECKS = {
    "isolation": "changing a sample affects no other sample",
    "prefixes": "changing a shared prefix has the same effect as alone",
    "logits": "logits equal those of each sample alone",
    "loss": "the loss equals that of the samples alone",
    "gradients": "gradients equal those of the samples alone",
    "losses": "losses of all steps equal those of unpacked steps",
    "weights": "final weights equal those of unpacked steps",
}


def verify_figures(report: VerifyReport) -> dict[str, Any]:
    """Return the output of ``packtool verify --json``; errors that are not finite are null."""
    figures = {"tokens" if name == "num_tokens" else name: value for name, value in vars(report).items()}
    checks = [
        {**vars(check), "error": check.error if math.isfinite(check.error) else None, "passed": check.passed}
        for check in report.checks
    ]
    steps = [vars(step) for step in report.trajectory]
    return {**figures, "checks": checks, "trajectory": steps, "passed": report.passed}


def _verdict(report: VerifyReport) -> str:
    does = "" if report.passed else " do NOT"
    if report.trajectory:
        return f"packed steps{does} train the same as unpacked steps"
    return f"packed samples{does} give the same outputs as unpacked ones"


def _check_rows(report: VerifyReport) -> list[tuple[str, ...]]:
    return [
        (_CHECKS[check.name], f"{check.error:.1e}", f"{check.allowed:.1e}", "ok" if check.passed else "FAILED")
        for check in report.checks
    ]


def _step_rows(report: VerifyReport) -> list[tuple[str, ...]]:
    """Return a heading and a row for each step; [] without ``--trajectory``."""
    rows: list[tuple[str, ...]] = []
    for step in report.trajectory:
        counts = map("{:,}".format, (step.step, step.num_samples, step.num_targets, step.num_packs))
        difference = abs(step.packed - step.unpacked)
        rows.append((*counts, f"{step.packed:.7f}", f"{step.unpacked:.7f}", f"{difference:.1e}"))
    heading = ("step", "samples", "target tokens", "packs", "loss packed", "loss unpacked", "difference")
    return [heading, *rows] if rows else []


def _shared(report: VerifyReport) -> str:
    """Return the tokens saved by shared prefixes as text; "" if there are none."""
    return f"{report.num_shared_tokens:,} of them saved by shared prefixes" if report.num_shared_tokens else ""


def write_page(report: VerifyReport, path: str, command: str) -> None:
    """Write the report of ``packtool verify`` as a self-contained HTML page; it shows the ``command`` that made it."""
    failures = [check.sentence() for check in report.checks if not check.passed]
    num_checks = len(report.checks)
    num_passed = num_checks - len(failures)
    cards = [  # (large number, what it counts, remark)
        (f"{num_passed} of {num_checks}", "checks passed", ""),
        (f"{report.num_packs:,}", "packs", ""),
        (f"{report.num_samples:,}", "samples", ""),
        (f"{report.num_tokens:,}", "tokens", _shared(report)),
    ]
    figures = [
        ("model", storage.masked(report.model)),
        ("device", report.device),
        ("precision", report.dtype),
        ("attention", report.attention),
        ("time", f"{report.seconds:.1f} s"),
    ]
    page = render(
        "verify.html",
        title=f"{storage.name(report.model)}: {_verdict(report)}",
        command=command,
        cards=cards,
        checks=[("", "largest error", "allowed", "result"), *_check_rows(report)],
        failures=failures,
        steps=_step_rows(report),
        figures=figures,
    )
    storage.publish(path, page.encode())


def verify_lines(report: VerifyReport) -> list[str]:
    """Return the output of ``packtool verify``: losses of steps, if any, the result, and a table of checks."""
    shared = f", {_shared(report)}" if report.num_shared_tokens else ""
    counts = f"{report.num_packs:,} packs, {report.num_samples:,} samples, {report.num_tokens:,} tokens{shared}"
    setup = f"device {report.device}, precision {report.dtype}, attention {report.attention}"
    facts = f"{counts}; {setup}; {report.seconds:.1f} s"
    steps = table("losses of training packed and unpacked:", _step_rows(report), "r") if report.trajectory else []
    checks = [("", "largest error", "allowed", ""), *_check_rows(report)]
    return [*steps, f"{report.model}: {_verdict(report)}", *table(facts, checks, "lrrl")]


def evaluation_figures(result: EvalResult) -> dict[str, Any]:
    """Return the output of ``packtool eval --json``; values that are not finite are null."""
    totals = result.evaluation.channel_totals
    figures = {
        **_total_figures(result.evaluation.total),
        "channels": {name: _total_figures(total) for name, total in totals.items() if name is not None},
        **{name: value for name, value in vars(result).items() if name != "evaluation"},
        "seconds": round(result.seconds, 3),
    }
    return dict(plain_json(figures))


def _total_figures(total: Total) -> dict[str, float]:
    names = {"samples": "num_samples", "exact_samples": "num_exact_samples"}
    return {names.get(name, name): value for name, value in dataclasses.asdict(total).items()}


def evaluation_lines(result: EvalResult) -> list[str]:
    """Return the output of ``packtool eval``: totals of all samples, and of each channel if there are channels."""
    totals = [("all", result.evaluation.total)]
    channels = result.evaluation.channel_totals
    if any(name is not None for name in channels):
        totals += [("(no channel)" if name is None else name, total) for name, total in channels.items()]
    rows = [("", "samples", "target tokens", "loss", "perplexity", "token accuracy", "exact samples")]
    for name, total in totals:
        counts = (name, f"{total.samples:,}", f"{total.target_tokens:,}", f"{total.loss:.4f}")
        rows.append((*counts, f"{total.perplexity:,.2f}", f"{total.token_accuracy:.2%}", f"{total.exact_samples:,}"))
    rate = result.tokens / max(result.seconds, 1e-9)
    return table(f"{result.split} split, {result.seconds:.1f} s, {rate:,.0f} tokens/s", rows)
