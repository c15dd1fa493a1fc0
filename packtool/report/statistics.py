"""Results as plain numbers and as lines of a table; pure.

One name for one thing in every JSON document: ``num_`` before what is counted, as the library's own fields have it.

Tokens are the exception, as in log lines: ``tokens``, ``target_tokens``, ``media_tokens``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packtool.cache.finish import ExportSummary
    from packtool.train.prepare.result import TrainResult


Line = tuple[str, str]


def percent(share: float) -> str:
    """Two decimals, and never 0 % or 100 % of what is neither."""
    if 0 < share < 1e-4:
        return "< 0.01%"
    return "> 99.99%" if 1 - 1e-4 < share < 1 else f"{share:.2%}"


def export_json(summary: ExportSummary) -> dict[str, Any]:
    """What ``packtool export --json`` prints."""
    figures = dataclasses.asdict(summary) | {"seconds": round(summary.seconds, 3)}
    return {name: value for name, value in figures.items() if name not in ("num_reused", "rows_made")}


def export_lines(summary: ExportSummary) -> list[Line]:
    """What ``packtool export`` prints."""
    lines = [("rows in", f"{summary.num_rows:,}"), ("kept", _kept(summary))]
    if summary.marks_added:
        lines.append(("  media marks added", f"{summary.marks_added:,} rows"))
    if summary.pieces_added:
        lines.append(("  samples beyond one a row", f"{summary.pieces_added:,}"))
    lines += [("  of them truncated", f"{summary.truncated:,}")]
    lines += (
        _counted("  turns and responses left out of them", summary.parts_left_out) if summary.parts_left_out else []
    )
    lines += _counted("dropped", summary.dropped)
    lines += [
        ("tokens", f"{summary.tokens:,}"),
        ("  target tokens", f"{summary.target_tokens:,} ({summary.target_tokens / (summary.tokens or 1):.1%})"),
        ("  media tokens", f"{summary.media_tokens:,} ({summary.media_tokens / (summary.tokens or 1):.1%})"),
        (
            "length in tokens, p50 / p90 / p99 / max",
            " / ".join(f"{summary.length[k]:,}" for k in ("p50", "p90", "p99", "max")),
        ),
    ]
    if not summary.already_finished:
        rate = summary.rows_made / summary.seconds if summary.seconds else 0.0
        lines.append(("time", f"{summary.seconds:.1f} s, {rate:,.0f} samples/s"))
    return lines


def train_lines(result: TrainResult, *, has_plan: bool = False) -> list[Line]:
    """What ``packtool train`` prints at its end, or instead of training.

    Args:
        has_plan: packs are those of ``--plan``, which may hold some samples only.
    """
    if result.streaming and not result.num_samples:
        return [("optimizer steps, at most", f"{result.steps:,}"), ("packing length", f"{result.packing_length:,}")]
    lines = [("samples of the first stage" if result.stages else "samples", f"{result.num_samples:,}")]
    if result.streaming:
        lines += _counted("rows dropped", result.dropped)
        lines += _counted("turns and responses left out", result.parts_left_out) if result.parts_left_out else []
    else:
        lines += [("  of them repeats", f"{result.num_repeats:,}")] if result.num_repeats else []
        lines += [("  not drawn", f"{result.not_drawn:,}")] if result.not_drawn else []
        lines.append(("  not in the plan" if has_plan else "  filtered by length", f"{result.filtered:,}"))
    lines += [
        ("packs" if result.packing else "padded rows", f"{result.num_packs:,}"),
        ("  samples per pack" if result.packing else "  samples per row", f"{result.samples_per_pack:.2f}"),
        ("  fill", percent(result.fill)),
        *([("tokens saved by shared prefixes", f"{result.num_shared_tokens:,}")] if result.num_shared_tokens else []),
        ("optimizer steps", f"{result.steps:,}"),
        ("  without packing, one sample a row", f"{result.steps_without_packing:,}"),
    ]
    if result.first_loss is None or result.last_loss is None:
        return lines
    lines += [
        ("loss, first and last", f"{result.first_loss:.4f} → {result.last_loss:.4f}"),
        ("target tokens per second", f"{result.target_tokens_per_second or 0:,.0f}"),
        ("time", f"{result.seconds:.1f} s"),
    ]
    return lines


def source_rows(sources: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """A heading, and of each source of a mixture what was, or will be, trained of it."""
    heading = ("source", "samples", "share", "tokens", "share", "target tokens", "share", "epochs of it")
    return [
        heading,
        *(
            (
                name,
                *(
                    text
                    for unit in ("samples", "tokens", "target_tokens")
                    for text in (
                        f"{each['num_samples' if unit == 'samples' else unit]:,}",
                        percent(each[f"share_of_{unit}"]),
                    )
                ),
                f"{each['epochs']:.3g}",
            )
            for name, each in sources.items()
        ),
    ]


def _counted(name: str, counts: Mapping[str, int]) -> list[Line]:
    """A sum, and what it is made of."""
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    return [(name, f"{sum(counts.values()):,}"), *((f"{indent}{of}", f"{count:,}") for of, count in counts.items())]


def _kept(summary: ExportSummary) -> str:
    kept = f"{summary.num_samples:,}"
    if len(summary.num_samples_by_split) > 1:
        parts = ", ".join(f"{name} {count:,}" for name, count in summary.num_samples_by_split.items())
        kept = f"{kept} ({parts})"
    if not summary.pieces_added:
        return kept
    return f"{kept} samples of {summary.num_samples - summary.pieces_added:,} rows"


_NAMES = {
    "rows": "num_rows",
    "samples": "num_samples",
    "kept": "num_samples",
    "kept_by_split": "num_samples_by_split",
    "sequences": "num_samples",
    "exact_samples": "num_exact_samples",
    "left_out": "filtered",
    "packs": "num_packs",
    "capacity": "packing_length",
    "shards": "num_shards",
    "files": "num_files",
    "missing_shards": "num_missing_shards",
    "micro_batches": "num_micro_batches",
    "empty_micro_batches": "num_empty_micro_batches",
    "processes": "num_processes",
    "num_tokens": "tokens",
}
# What a split of a cache counts as rows are its samples.
_OF_A_SPLIT = {"rows": "num_samples"}
# By name of what they belong to: a split, a channel. Their own names are the user's.
_FURTHER = {"splits": _OF_A_SPLIT, "channels": {}, "sources": {}}


def named(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures under the names that they have in all JSON; lists keep theirs, for they are no counts."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if name in _FURTHER and isinstance(value, Mapping):
            value = {key: _renamed(item, _NAMES | _FURTHER[name]) for key, item in value.items()}
        found |= _renamed({name: value}, _NAMES)
    return found


def _renamed(figures: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name if isinstance(value, list) else names.get(name, name): value for name, value in figures.items()}
