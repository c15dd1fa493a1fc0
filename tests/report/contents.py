"""Contents of plan pages for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from packtool.planning.prefix_branches import Branch, find_branches
from packtool.report.tables import Histogram

SWEEP_FIGURES = (
    *("packing_length", "num_packs", "samples_per_pack", "fill", "over_lower_bound", "steps_per_epoch", "filtered"),
    "num_samples_in_caches",
)
"""Figures of a plan that the page of a sweep shows."""


def content(
    title: str = "cache",
    reason: str = "media_over_limit",
    command: str = "packtool plan cache --html plan.html",
    packs: Sequence[Sequence[int]] = ((600, 400, 24), (1000,), (300, 300, 300, 4)),
    lengths: Sequence[int] = (2, 3, 2, 0, 1),
    fills: Sequence[int] = (0, 0, 0, 1, 2),
    parts: Sequence[tuple[str, int]] | None = None,
    steps: int = 3,
    scale: int = 1,
) -> dict[str, Any]:
    """A small plan with packs of 1,024 tokens.

    Args:
        reason: of dropped rows.
        packs, lengths, fills: sample lengths of packs, and counts of the histograms.
        steps: number of steps in the chart of the balance; 0 for a single rank.
        scale: factor of all counts.
    """
    before, after = [1.2 + i / 100 for i in range(steps)], [1.01] * (steps - 1) + [3.0]
    return {
        "title": title,
        "headline": [("99.1%", "fill of the packs", "68% padding without"), (f"{3 * scale:,}", "packs", "of 1,024")],
        "sample_counts": parts or [("in the plan", 8 * scale), ("not drawn in this epoch", 5 * scale), ("longer", 1)],
        "dropped": [(f"dropped at export: {reason}", 5 * scale)],
        "lengths": Histogram(range(0, 200 * len(lengths) + 1, 200), [count * scale for count in lengths]),
        "capacity": 1024,
        "fills": Histogram(range(0, 20 * len(fills) + 1, 20), [count * scale for count in fills]),
        "packs": [branches(pack) for pack in packs],
        "without_packing": {"rows": 3, "padding": "68.00%", "times": "3.13×", "shows_times": True},
        "balance": (before, after) if steps else None,
        "processes_per_rank": 4,
        "shared": None,
        "mixture": None,
        "figures": [("samples", f"{8 * scale:,}"), ("  filtered by length", "0"), ("plan", "0123456789abcdef" * 4)],
        "commands": [("This page was made by", command)],
    }


def content_with_trees() -> dict[str, Any]:
    """A small plan whose samples share prefixes."""
    tree = branches([500, 24, 30, 100, 2], [0, 400, 400, 400, 480])
    cards = [("61.10%", "of the tokens saved", "2,048 of 3,352"), ("80.00%", "of the towers' work saved", "each once")]
    trees = [
        ("The tree that saves most", "5 samples, 656 tokens instead of 2,336", tree),
        ("The median tree", "one sample, 1,000 tokens", branches([1000])),
    ]
    return content() | {"packs": [tree, branches([1000])], "shared": {"headline": cards, "trees": trees}}


def branches(new: Sequence[int], shared: Sequence[int] | None = None) -> list[Branch]:
    """Return the branches of a pack.

    Args:
        new: tokens that each sample adds.
        shared: tokens that each sample shares with the one before.
    """
    return find_branches(np.array(new), None if shared is None else np.array(shared))
