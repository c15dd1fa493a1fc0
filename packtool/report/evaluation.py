"""An evaluation as plain numbers and as a table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from packtool.cache.evaluation_file import plain_json
from packtool.report.tables import print_table

if TYPE_CHECKING:
    from packtool.train.evaluate.run import EvalResult
    from packtool.train.evaluate.totals import Total

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
