"""Results of export and training as figures for JSON and as lines of a table.

Counts are named ``num_...`` in every JSON document, except counts of tokens: ``tokens``, ``target_tokens``,
``media_tokens``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packtool.cache.manifest import ExportSummary
    from packtool.train.prepare.result import TrainResult


Line = tuple[str, str]


def percent(share: float) -> str:
    """A share with two decimals; never rounded to 0 % or 100 %."""
    if 0 < share < 1e-4:
        return "< 0.01%"
    return "> 99.99%" if 1 - 1e-4 < share < 1 else f"{share:.2%}"


def export_figures(summary: ExportSummary) -> dict[str, Any]:
    """The output of ``packtool export --json``."""
    figures = dataclasses.asdict(summary) | {"seconds": round(summary.seconds, 3)}
    return {name: value for name, value in figures.items() if name not in ("num_reused", "rows_made")}


def export_lines(summary: ExportSummary) -> list[Line]:
    """The output of ``packtool export``."""
    kept = f"{summary.num_samples:,}"
    if len(summary.num_samples_by_split) > 1:
        kept += f" ({', '.join(f'{name} {count:,}' for name, count in summary.num_samples_by_split.items())})"
    if summary.pieces_added:
        kept += f" samples of {summary.num_samples - summary.pieces_added:,} rows"
    lines = [("rows in", f"{summary.num_rows:,}"), ("kept", kept)]
    if summary.marks_added:
        lines.append(("  media marks added", f"{summary.marks_added:,} rows"))
    if summary.pieces_added:
        lines.append(("  samples beyond one a row", f"{summary.pieces_added:,}"))
    lines.append(("  of them truncated", f"{summary.truncated:,}"))
    if summary.parts_left_out:
        lines += _count_lines("  turns and responses left out of them", summary.parts_left_out)
    lines += _count_lines("dropped", summary.dropped)
    tokens = summary.tokens or 1
    lengths = " / ".join(f"{summary.length[name]:,}" for name in ("p50", "p90", "p99", "max"))
    lines += [
        ("tokens", f"{summary.tokens:,}"),
        ("  target tokens", f"{summary.target_tokens:,} ({summary.target_tokens / tokens:.1%})"),
        ("  media tokens", f"{summary.media_tokens:,} ({summary.media_tokens / tokens:.1%})"),
        ("length in tokens, p50 / p90 / p99 / max", lengths),
    ]
    if not summary.already_finished:
        rate = summary.rows_made / summary.seconds if summary.seconds else 0.0
        lines.append(("time", f"{summary.seconds:.1f} s, {rate:,.0f} samples/s"))
    return lines


def train_lines(result: TrainResult, *, has_plan: bool = False) -> list[Line]:
    """The output of ``packtool train`` after training or a dry run.

    Args:
        has_plan: packs were read from ``--plan``, which may lack some samples.
    """
    if result.streaming and not result.num_samples:
        return [("optimizer steps, at most", f"{result.steps:,}"), ("packing length", f"{result.packing_length:,}")]
    lines = [("samples of the first stage" if result.stages else "samples", f"{result.num_samples:,}")]
    if result.streaming:
        lines += _count_lines("rows dropped", result.dropped)
        if result.parts_left_out:
            lines += _count_lines("turns and responses left out", result.parts_left_out)
    else:
        if result.num_repeats:
            lines.append(("  of them repeats", f"{result.num_repeats:,}"))
        if result.not_drawn:
            lines.append(("  not drawn", f"{result.not_drawn:,}"))
        lines.append(("  not in the plan" if has_plan else "  filtered by length", f"{result.filtered:,}"))
    lines += [
        ("packs" if result.packing else "padded rows", f"{result.num_packs:,}"),
        ("  samples per pack" if result.packing else "  samples per row", f"{result.samples_per_pack:.2f}"),
        ("  fill", percent(result.fill)),
    ]
    if result.num_shared_tokens:
        lines.append(("tokens saved by shared prefixes", f"{result.num_shared_tokens:,}"))
    lines += [
        ("optimizer steps", f"{result.steps:,}"),
        ("  without packing, one sample a row", f"{result.steps_without_packing:,}"),
    ]
    if result.first_loss is not None and result.last_loss is not None:
        lines += [
            ("loss, first and last", f"{result.first_loss:.4f} → {result.last_loss:.4f}"),
            ("target tokens per second", f"{result.target_tokens_per_second or 0:,.0f}"),
            ("time", f"{result.seconds:.1f} s"),
        ]
    return lines


def source_rows(sources: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """A table of a mixture's sources: a heading, then counts and shares of each source by name."""
    rows: list[tuple[str, ...]] = [
        ("source", "samples", "share", "tokens", "share", "target tokens", "share", "epochs of it")
    ]
    for name, figures in sources.items():
        cells = [name]
        for unit, count in (("samples", "num_samples"), ("tokens", "tokens"), ("target_tokens", "target_tokens")):
            cells += [f"{figures[count]:,}", percent(figures[f"share_of_{unit}"])]
        rows.append((*cells, f"{figures['epochs']:.3g}"))
    return rows


def _count_lines(name: str, counts: Mapping[str, int]) -> list[Line]:
    """A sum, and indented below it the counts by reason."""
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    return [(name, f"{sum(counts.values()):,}"), *((indent + reason, f"{count:,}") for reason, count in counts.items())]
