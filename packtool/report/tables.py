"""Tables, histograms and progress for a terminal, and the results of export and training as lines of a table.

Lines are never wrapped or cut, because logs are searched by line and commands are copied from them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from packtool.config.codes import with_code
from packtool.terminal import escape_line, escape_text, show

if TYPE_CHECKING:
    from packtool.cache.manifest import ExportSummary
    from packtool.planning.pack_plan import PackPlan
    from packtool.train.prepare.result import TrainResult

Line = tuple[str, str]
Figures = Mapping[str, Any]
"""Output of a command with ``--json``, or a part of it."""
_MAX_WIDTH = 60  # of a column; a wider cell shifts only the rest of its own line
_SECONDS_BETWEEN_LINES = 5.0
_NUM_BINS = 48  # of a histogram of lengths
_LOG_RATIO = 100  # longest ÷ shortest sample from which the bins of lengths are logarithmic


def aligned(rows: Sequence[Sequence[str]], sides: str = "lr") -> list[str]:
    """Return rows of cells as lines with aligned columns; control characters are escaped.

    ``sides``: alignment of each column, ``l``eft or ``r``ight; the last letter applies to all further columns.
    """
    cells = [[escape_line(cell) for cell in row] for row in rows]
    columns = []
    for number, column in enumerate(zip(*cells, strict=True)):
        widths = [cell_len(cell) for cell in column]
        column_width = max((width for width in widths if width <= _MAX_WIDTH), default=0)
        padded = zip(column, (" " * (column_width - width) for width in widths), strict=True)
        is_left = sides[min(number, len(sides) - 1)] == "l"
        columns.append([cell + padding if is_left else padding + cell for cell, padding in padded])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def table(title: str, rows: Sequence[Sequence[str]], sides: str = "lr") -> list[str]:
    """Return a title and the lines of the table below it."""
    return [title, *aligned(rows, sides)]


class _FigureFormatter(string.Formatter):
    """Formats like ``str.format``, and percentages: ``{fill:percent}``."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return percent(value) if format_spec == "percent" else str(format(value, format_spec))


def fill_in(texts: Sequence[str], figures: Figures) -> tuple[str, ...]:
    """Return texts with figures in place of fields such as ``{tokens:,}``, ``{length[max]}`` or ``{fill:percent}``."""
    return tuple(_FigureFormatter().vformat(text, (), figures) for text in texts)


def filled_lines(section: str, figures: Figures) -> list[Line]:
    """Return the lines in a section of ``templates/lines.tsv`` for these figures."""
    lines = []
    for name, text, *conditions in _line_templates()[section]:
        if all(bool(figures.get(figure.lstrip("!"))) != figure.startswith("!") for figure in conditions):
            shown_name, shown_text = fill_in([name, text], figures)
            lines.append((shown_name, shown_text))
    return lines


@functools.cache
def _line_templates() -> dict[str, list[tuple[str, ...]]]:
    """Return the lines of ``templates/lines.tsv`` by section: name, text, and the figure that they need, if any."""
    sections: dict[str, list[tuple[str, ...]]] = {}
    file = resources.files("packtool.report").joinpath("templates/lines.tsv")
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            section.append(tuple(line.split("\t")))
    return sections


def print_table(title: str, rows: Sequence[Sequence[str]], sides: str = "lr") -> None:
    """Print a title and the table below it on stdout."""
    show("\n".join(table(title, rows, sides)))


@dataclass(frozen=True)
class Histogram:
    """Counts (B,) in bins with ascending edges (B + 1,); ``is_log``: draw on a logarithmic axis."""

    edges: Sequence[float]
    counts: Sequence[int]
    is_log: bool = False


def length_histogram(lengths: npt.NDArray[np.integer[Any]]) -> Histogram:
    """Count samples by their tokens, ``lengths`` (S,), in equal or logarithmic bins that include their upper edge."""
    longest = max(int(lengths.max(initial=1)), 1)  # 1 if there are no samples
    shortest = max(int(lengths.min(initial=longest)), 1)
    is_log = longest >= _LOG_RATIO * shortest
    if is_log:
        # Edges are integers of equal ratios, except that short lengths have fewer bins, at least a token wide.
        upper_edges = np.minimum(np.ceil(np.geomspace(shortest, longest, _NUM_BINS + 1)[1:]), longest)
        edges = np.concatenate(([shortest - 0.5], np.unique(upper_edges)))  # the first bin includes the shortest sample
    else:
        width = math.ceil(longest / _NUM_BINS)  # an integer, so that all bins hold equally many lengths
        edges = np.arange(math.ceil(longest / width) + 1) * width
    # NumPy's bins exclude their upper edge. With half a token more, they include it.
    counts, _ = np.histogram(lengths, edges + 0.5)
    return Histogram(edges.tolist(), counts.tolist(), is_log)


def fill_histogram(packs: PackPlan, num_bins: int) -> Histogram:
    """Count packs by the percentage of their capacity that is filled."""
    counts, edges = np.histogram(packs.tokens_per_pack() / packs.capacity * 100, bins=num_bins, range=(0, 100))
    return Histogram(edges.tolist(), counts.tolist())


def histogram_lines(counts: Sequence[int], upper_edges: Sequence[float], width: int, max_bars: int = 16) -> list[str]:
    """Return a histogram as at most ``max_bars`` horizontal bars, each with its upper edge and count."""
    bins_per_bar = math.ceil(len(counts) / max_bars)
    bar_counts = np.add.reduceat(counts, np.arange(0, len(counts), bins_per_bar))  # sums over groups of bins
    last_bar = int(np.flatnonzero(bar_counts).max(initial=0))  # the last one that is not empty, or the first
    max_count = int(bar_counts.max())
    # Four columns are for the spaces between edge, bar and count.
    max_width = max(width - len(f"{upper_edges[-1]:,.0f}{max_count:,}") - 4, 10)
    ends = [*upper_edges[bins_per_bar - 1 :: bins_per_bar], upper_edges[-1]]  # upper edge of each bar
    lines = []
    for end, count in zip(ends, bar_counts[: last_bar + 1].tolist(), strict=False):
        bar = "█" * max(round(max_width * count / max_count), 1) + " " if count else ""
        lines.append((f"{end:,.0f}", f"{bar}{count:,}"))
    return aligned(lines, "rl")


class TerminalProgress:
    """A ``packtool.progress.Progress`` on stderr: a bar in a terminal, otherwise a line every few seconds."""

    def __init__(self, console: Console | None = None, enabled: bool = True) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._enabled = enabled
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._title, self._total, self._done = "", 0, 0
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def start(self, title: str, total: int | None) -> None:
        self._title, self._total, self._done = escape_line(title), total or 0, 0
        self._begin = self._last = time.monotonic()
        if not self._enabled or not self._console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            # In a narrow terminal the fields wrap, so that the remaining time stays visible.
            TextColumn("{task.fields[shown]}", markup=False, table_column=Column(no_wrap=False)),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(self._title, total=total, shown="")
        self._bar.start()

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        self._advance(num_done, fields, is_due=time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES)

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        self._advance(num_done, fields, is_due=True, label=f"at {self._done + num_done:,}: ")

    def _advance(
        self, num_done: int, fields: Mapping[str, float | int | str], *, is_due: bool, label: str = ""
    ) -> None:
        """Update the bar, or print a line if ``is_due``; a bar keeps its label and fields until the next ones."""
        self._done += num_done
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            if fields:
                self._bar.update(self._task, shown=label + _field_text(fields))
        elif self._enabled and is_due:
            self._last = time.monotonic()
            count = f"{self._done:,} of {self._total:,}" if self._total else f"{self._done:,}"
            seconds, left = self._last - self._begin, ""
            if self._total and self._done:
                left = f", {_remaining(seconds / self._done * (self._total - self._done))} left"
            self.note(f"{self._title}: {count} after {_elapsed(seconds)}{left}  {_field_text(fields)}".rstrip())

    def note(self, message: str) -> None:
        if self._enabled:
            self._console.print(escape_text(message), markup=False, soft_wrap=True)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = None


def _elapsed(seconds: float) -> str:
    """Return a duration as ``45 s``, ``12 min 5 s`` or ``3 h 25 min 7 s``, so precise that successive lines differ."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min {left} s" if hours else f"{minutes} min {left} s"


def _remaining(seconds: float) -> str:
    """Return a duration as ``45 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _field_text(fields: Mapping[str, float | int | str]) -> str:
    """Return fields of a progress line as text, such as ``loss 1.234  samples 1,000``."""
    texts = []
    for name, value in fields.items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else value
        texts.append(f"{name.replace('_', ' ')} {shown}")
    return escape_line("  ".join(texts))


def percent(fraction: float) -> str:
    """Return a fraction as a percentage with two decimals, which is 0 % or 100 % only if the fraction is 0 or 1."""
    if 0 < fraction < 1e-4:
        return "< 0.01%"
    return "> 99.99%" if 1 - 1e-4 < fraction < 1 else f"{fraction:.2%}"


def export_figures(summary: ExportSummary) -> dict[str, Any]:
    """Return the output of ``packtool export --json``."""
    figures = dataclasses.asdict(summary) | {"seconds": round(summary.seconds, 3)}
    left_out = ("num_reused", "rows_made", *([] if summary.hygiene else ["hygiene"]))
    return {name: value for name, value in figures.items() if name not in left_out}


def export_lines(summary: ExportSummary) -> list[Line]:
    """Return the output of ``packtool export`` as (name, value)."""
    figures = vars(summary) | {
        "samples": _sample_counts(summary),
        "target_share": summary.target_tokens / (summary.tokens or 1),
        "media_share": summary.media_tokens / (summary.tokens or 1),
        "rate": summary.rows_made / summary.seconds if summary.seconds else 0.0,
        "is_new": not summary.already_finished,
    }
    return [
        *filled_lines("export rows", figures),
        *_optional_count_lines("  turns and responses left out", summary.parts_left_out),
        *_count_lines("dropped rows", summary.dropped),
        *_optional_count_lines("rows listed in hygiene.jsonl", summary.hygiene),
        *filled_lines("export tokens", figures),
    ]


def _sample_counts(summary: ExportSummary) -> str:
    """Return the numbers of exported samples, of the samples of each split, and of their rows as text."""
    text = f"{summary.num_samples:,}"
    if len(summary.num_samples_by_split) > 1:
        samples_by_split = [f"{name} {count:,}" for name, count in summary.num_samples_by_split.items()]
        text += f" ({', '.join(samples_by_split)})"
    if summary.pieces_added:  # further samples of rows that have become several
        text += f" from {summary.num_samples - summary.pieces_added:,} rows"
    return text


def train_lines(result: TrainResult, *, has_plan: bool = False) -> list[Line]:
    """Return the output of ``packtool train`` as (name, value); ``has_plan``: packs are those of ``--plan``."""
    figures = vars(result) | {
        "has_plan": has_plan,
        "has_losses": result.first_loss is not None and result.last_loss is not None,
        "rate": result.target_tokens_per_second or 0,
    }
    if result.streaming and not result.num_samples:  # a dry run, which reads no rows
        return filled_lines("train without rows", figures)
    lines = filled_lines("train samples", figures)
    if not result.streaming:
        return lines + filled_lines("train left out", figures) + filled_lines("train", figures)
    lines += _count_lines("dropped rows", result.dropped)
    lines += _optional_count_lines("turns and responses left out", result.parts_left_out)
    return lines + filled_lines("train", figures)


def source_rows(sources: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Return a table of a mixture's sources: a heading, and a row for each source; ``sources`` are figures by name."""
    heading = ("source", "samples", "share", "tokens", "share", "target tokens", "share", "epochs")
    rows: list[tuple[str, ...]] = [heading]
    for name, figures in sources.items():
        rows.append((name, *fill_in(_SOURCE_CELLS, figures)))
    return rows


_SOURCE_CELLS = (
    *("{num_samples:,}", "{share_of_samples:percent}", "{tokens:,}", "{share_of_tokens:percent}"),
    *("{target_tokens:,}", "{share_of_target_tokens:percent}", "{epochs:.3g}"),
)


def _optional_count_lines(name: str, counts: Mapping[str, int]) -> list[Line]:
    return _count_lines(name, counts) if counts else []


def _count_lines(name: str, counts: Mapping[str, int]) -> list[Line]:
    """Return a line with the sum of counts, and indented lines below it with the count of each reason."""
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    return [
        (name, f"{sum(counts.values()):,}"),
        *((indent + with_code(reason), f"{count:,}") for reason, count in counts.items()),
    ]
