"""Results of ``packtool check``: JSON, Markdown, annotations for GitHub, and a code quality report for GitLab."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from packtool import storage
from packtool.cache.manifest import ExportSummary
from packtool.config.codes import reason_codes
from packtool.config.commands import CheckConfig
from packtool.config.settings import load_json
from packtool.report.tables import Figures, export_figures, percent
from packtool.rows.source import format_of
from packtool.terminal import escape_line

_MAX_ANNOTATIONS = 50  # GitHub shows no more for a job
_HEAD_BYTES = 4096
_MAX_CELL = 300  # characters


def check_figures(summary: ExportSummary, drops: Sequence[str], config: CheckConfig) -> dict[str, Any]:
    """Return the output of ``packtool check --json``; ``drops``: lines for ``dropped.jsonl``."""
    num_overlaps = sum(summary.dropped.get(reason, 0) for reason in ("val_overlap", "held_out_overlap"))
    num_dropped = sum(summary.dropped.values()) - num_overlaps
    num_allowed = config.num_allowed(config.max_dropped, summary.num_rows)
    limit = config.num_allowed(config.max_overlap or "0", summary.num_rows)
    figures = export_figures(summary)
    del figures["output_dir"]
    return {
        "passed": num_dropped <= num_allowed and num_overlaps <= limit,
        "num_dropped": num_dropped,
        "num_allowed": num_allowed,
        **({} if config.max_overlap is None else {"num_overlaps": num_overlaps, "num_overlaps_allowed": limit}),
        **figures,
        "dropped_rows": _dropped_rows(drops),
    }


def _dropped_rows(drops: Sequence[str]) -> list[dict[str, Any]]:
    """Parse lines for ``dropped.jsonl``, without parts of rows that were kept, and add the line of the file."""
    rows: list[dict[str, Any]] = []
    has_lines: dict[str, bool] = {}  # by file
    for drop in drops:
        row = load_json(drop)
        source = row["source"]
        if "part" in row:
            continue
        if source not in has_lines:
            has_lines[source] = _has_row_per_line(source)
        rows.append({**row, "line": row["row"] + 1 if has_lines[source] else None})
    return rows


def _has_row_per_line(path: str) -> bool:
    """Return whether the row number of a file is that of its line, so that an editor can show the row."""
    file_format = format_of(path)
    if file_format is None or file_format[1] is not None:  # unknown or compressed
        return False
    if file_format[0] == "json" and not storage.is_remote(path):
        with open(path, "rb") as file:
            return file.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    return file_format[0] in ("jsonl", "txt")


def verdict(figures: Figures, config: CheckConfig) -> str:
    """Return a sentence about the numbers of dropped and, with ``--max-overlap``, of overlapping rows."""
    checks = [("num_dropped", "num_allowed", "are dropped", f"--max-dropped {config.max_dropped}")]
    if config.max_overlap is not None:
        checks.append(("num_overlaps", "num_overlaps_allowed", "overlap", f"--max-overlap {config.max_overlap}"))
    num_rows = figures["num_rows"]
    return "; ".join(
        f"{figures[name]:,} of {num_rows:,} rows ({percent(figures[name] / max(num_rows, 1))}) {verb}, "
        f"{'within' if figures[name] <= figures[limit] else 'above'} {option}"
        for name, limit, verb, option in checks
    )


_SUMMARY = """\
# packtool check: {title}

{verdict}.

| figure | value |
|---|---:|
| rows | {num_rows:,} |
| samples | {num_samples:,} |
| truncated samples | {truncated:,} |
| tokens | {tokens:,} |
| target tokens | {target_tokens:,} |
| media tokens | {media_tokens:,} |
| tokens per sample, p50 / p90 / p99 / max | {lengths} |"""
_REASONS_HEADING = ("", "| code | reason | rows | first row | remedy |", "|---|---|---:|---|---|")


def markdown_lines(figures: Figures, config: CheckConfig) -> list[str]:
    """Return the summary as Markdown, with a table of the reasons of dropped rows, the most frequent first."""
    title = "passed" if figures["passed"] else "failed"
    lengths = " / ".join(f"{number:,}" for number in figures["length"].values())
    values = {**figures, "title": title, "verdict": verdict(figures, config), "lengths": lengths}
    lines = _SUMMARY.format_map(values).splitlines() + [*_REASONS_HEADING] * bool(figures["dropped"])
    first_rows = {row["reason"]: row for row in reversed(figures["dropped_rows"])}
    for reason, count in sorted(figures["dropped"].items(), key=lambda item: -item[1]):
        code = reason_codes()[reason]
        first_row = first_rows.get(reason)
        example = "" if first_row is None else f"{_place(first_row)}: {first_row['detail']}"
        lines.append(f"| {code.code} | {reason} | {count:,} | {_cell(example)} | {_cell(code.remedy)} |")
    return lines


def _place(row: Figures) -> str:
    """Return file and line of a dropped row, or its number if lines are unknown."""
    return f"{_shown_path(row)}:{row['line']}" if row["line"] else f"{_shown_path(row)}, row {row['row']}"


def _shown_path(row: Figures) -> str:
    """Return the path of a row's file from the working directory, as GitHub and GitLab need it."""
    path = str(row["source"])
    if storage.is_remote(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _cell(text: str) -> str:
    """Return a text for a cell of a Markdown table, where it cannot start HTML, a link or another cell."""
    line = escape_line(text[:_MAX_CELL])
    for character in "\\`*_[]<>|":
        line = line.replace(character, f"\\{character}")
    return line


def github_lines(figures: Figures) -> Iterator[str]:
    """Yield workflow commands that attach dropped rows to lines: errors, or warnings of a check that passed."""
    level = "warning" if figures["passed"] else "error"
    for row in figures["dropped_rows"][:_MAX_ANNOTATIONS]:
        line = f",line={row['line']}" if row["line"] else ""
        file, title = _property(_shown_path(row)), _property(f"{row['code']} {row['reason']}")
        yield f"::{level} file={file}{line},title={title}::{_command_text(_message(row))}"


def _message(row: Figures) -> str:
    return str(row["detail"]) if row["line"] else f"row {row['row']}: {row['detail']}"


def _command_text(text: str) -> str:
    """Escape a text for a workflow command, which ends with its line."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _command_text(text).replace(":", "%3A").replace(",", "%2C")


def gitlab_report(figures: Figures) -> list[dict[str, Any]]:
    """Return GitLab's code quality report, an issue for each dropped row."""
    issues = []
    for row in figures["dropped_rows"]:
        path = _shown_path(row)
        identity = f"{path} {row['row']} {row['reason']}"
        issues.append(
            {
                "description": f"{row['reason']}: {_message(row)}",
                "check_name": row["code"],
                "fingerprint": hashlib.sha256(identity.encode()).hexdigest(),
                "severity": "minor" if figures["passed"] else "major",
                "location": {"path": path, "lines": {"begin": row["line"] or 1}},
            }
        )
    return issues
