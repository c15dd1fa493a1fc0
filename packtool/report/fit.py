"""``packtool plan --fit``: the settings that fit, as lines of a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtool.report.tables import aligned

_TITLES = (
    *("", "packing length", "recompute", "sharding", "ranks a pack", "GiB a rank"),
    *("tokens/step", "s/step", "tokens/s", "hours"),
)


def fit_lines(figures: Mapping[str, Any]) -> list[str]:
    """What ``packtool plan --fit`` prints below its title: a row for each proposal, the cheapest first."""
    rows = [
        (
            f"{number}",
            f"{found['packing_length']:,}",
            "yes" if found["gradient_checkpointing"] else "no",
            found["sharding"],
            f"{found['sequence_parallel_size']}",
            f"{found['memory_gib']:.1f}",
            f"{found['tokens_per_step']:,.0f}",
            f"{found['step_seconds']:.3g}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['hours']:,.2f}",
        )
        for number, found in enumerate(figures["proposals"], start=1)
    ]
    return aligned([_TITLES, *rows], "r")


def fit_title(figures: Mapping[str, Any]) -> list[str]:
    """What was searched, and what came of it."""
    return [
        f"{figures['num_settings']:,} settings for {figures['hardware']}, of which the {figures['num_tried']:,} of "
        "least time per token were tried:",
        f"{figures['num_too_large']:,} of them do not fit into {figures['budget_gib']:.1f} GiB of "
        f"{figures['fit'] / 2**30:.1f} (the rest is for libraries and the allocator)",
    ]


def fit_advice(figures: Mapping[str, Any], hardware: str | None) -> list[str]:
    """The command of the best, how to check it, and how to get the others'."""
    return [
        "",
        "the first one trains with:",
        f"  {figures['proposals'][0]['command']}",
        f"--dry-run --hardware {hardware or 'h100'} behind it checks it on any machine. --json has every row with its "
        "command;",
        "what is given beside --fit (--packing-length, --gradient-checkpointing, --fsdp, ...) is kept.",
        *_what_sharing_saves(figures["shareable"]),
    ]


def _what_sharing_saves(share: float) -> list[str]:
    if not share:
        return []
    return [
        f"shared prefixes could save {share:.0%} of the tokens beyond that: --fit computes every sample whole, and "
        "packtool plan --share-prefix true tells what they do to a plan."
    ]
