"""The numbers of a page are those of the terminal and of JSON."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool.config.plan import PlanConfig
from packtool.report.plan import plan_lines, sweep_cells, sweep_page
from packtool.report.plan_page import balance_chart, page, page_content
from packtool.report.tables import aligned
from packtool.train.prepare.preview import preview

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=80)
KINDS: dict[str, dict[str, Any]] = {
    "packs": {"packing": True},
    "rows": {"packing": False},
    "skrull": {"schedule": "skrull", "bucket_size": "160", "sequence_parallel_size": 2},
}


def texts(page_text: str, pattern: str) -> list[str]:
    """Return the plain text of all matches of a pattern in a page."""
    return [html.unescape(re.sub("<[^>]*>", "", match)) for match in re.findall(pattern, page_text, re.S)]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=LENGTHS,
    kind=st.sampled_from(sorted(KINDS)),
    world_size=st.sampled_from([2, 4, 6]),
    batch=st.integers(1, 3),
    accumulation=st.integers(1, 3),
)
def test_page_terminal_and_json_have_the_same_figures(
    lengths: list[int], kind: str, world_size: int, batch: int, accumulation: int, tmp_path: Path
) -> None:
    np.save(tmp_path / "lengths.npy", np.array(lengths))
    config = PlanConfig(
        lengths=str(tmp_path / "lengths.npy"),
        packing_length=320,
        world_size=world_size,
        per_device_train_batch_size=1 if kind == "skrull" else batch,
        gradient_accumulation_steps=accumulation,
        **KINDS[kind],
    )
    schedule = preview(config)
    figures = schedule.figures()
    text = page(page_content(schedule, figures, "packtool plan", "lengths.npy"))

    lines = [" ".join(line.split()) for line in aligned(plan_lines(figures))]
    names, values = texts(text, "<dt>(.*?)</dt>"), texts(text, "<dd>(.*?)</dd>")
    for name, value in list(zip(names, values, strict=True))[: len(plan_lines(figures))]:
        assert f"{name} {value}" in lines

    use, *counts = texts(text, '<p class="number[^>]*>(.*?)</p>')[:4]
    share = figures["skrull"]["bucket_fill"] if figures["skrull"] else figures["fill"]
    assert float(use.strip("<> %")) / 100 == pytest.approx(share, abs=1.01e-4)
    assert (use == "100.00%") == (share == 1)
    assert [int(count.replace(",", "")) for count in counts] == [
        figures[name] for name in ("num_packs", "steps_per_epoch", "num_samples")
    ]

    # One baseline in every representation.
    padding, times = figures["padding_of_plain_batches"], figures["tokens_of_plain_batches"] / figures["tokens"]
    assert times == pytest.approx(1 / (1 - padding), rel=1e-9)
    for shown_number in texts(text, r"([\d.]+% padding without packing)") + texts(
        text, r"epoch, ([\d.]+%) of the tokens"
    ):
        assert float(shown_number.partition("%")[0]) / 100 == pytest.approx(padding, abs=1.01e-4)
    for shown_number in texts(text, '<p class="times"><span class="number">(.*?)</span>'):
        assert float(shown_number.rstrip("×")) == pytest.approx(times, abs=0.0051)
    for shown_number in texts(text, r"in padded batches of ([\d,]+) row"):
        assert int(shown_number) == figures["rows_of_plain_batches"]
    rows = figures["rows_of_plain_batches"] * schedule.options.world_size * accumulation
    assert figures["steps_of_plain_batches"] == -(-figures["num_samples"] // rows)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(1, 4), st.floats(1, 4)), min_size=3, max_size=30))
def test_an_outlier_is_labeled_with_the_value_of_its_series(pairs: list[tuple[float, float]]) -> None:
    before, after = zip(*pairs, strict=True)
    series = {"hollow": before, "c0": after}
    for look, label in labels_above_chart(before, after):
        assert label in {f"{value:.2f} ↑" for value in series[look]}


def labels_above_chart(before: Sequence[float], after: Sequence[float]) -> list[tuple[str, str]]:
    """Return the labels of steps above the upper end of the chart."""
    return [text for note in balance_chart(before, after).notes for text in note.texts]


def test_the_worst_round_robin_step_is_not_labeled_as_planned() -> None:
    labels = labels_above_chart([1.01, 1.02, 1.01, 2.14], [1.01, 1.01, 1.0, 1.554])
    assert labels == [("hollow", "2.14 ↑"), ("c0", "1.55 ↑")]
    assert labels_above_chart([1.0, 1.1, 2.88], [1.0, 1.0, 2.88]) == [("c0", "2.88 ↑")]


def test_sweep_page_has_the_same_figures(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(10, 300, 500))
    config = PlanConfig(lengths=str(tmp_path / "lengths.npy"), sweep="300,600,900")
    rows = [preview(config, length).figures() for length in config.sweep_lengths()]
    rows[1]["shared_prefixes"] = {"token_share_saved": 0.25}
    assert [line[-1] for line in sweep_cells(rows)[1:]] == ["none", "25.00%", "none"]
    text = sweep_page(rows, "lengths.npy", "packtool plan --sweep")
    header, *cells = sweep_cells(rows)
    assert texts(text, "<th>(.*?)</th>") == list(header)
    assert texts(text, "<td[^>]*>(.*?)</td>") == [cell for line in cells for cell in line]
    widths = [float(width) for width in re.findall(r'class="accent" style="width:([\d.]+)%"', text)]
    assert widths[:3] == pytest.approx([row["fill"] * 100 for row in rows], abs=1e-3)
    steps = [row["steps_per_epoch"] for row in rows]
    assert widths[3:] == pytest.approx([step / max(steps) * 100 for step in steps], abs=1e-3)
