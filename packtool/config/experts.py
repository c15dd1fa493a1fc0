"""Experts of a mixture that are spread over processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packtool.config.settings import not_together, option


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Experts of a mixture that are spread over processes."""

    expert_parallel_size: int = option(
        1,
        "Processes that divide the experts of a mixture among themselves and send each other tokens; the number of "
        "processes is a multiple of it. All other weights are sharded over all processes.",
        panel="Precision and memory",
        minimum=1,
    )

    @property
    def shares_experts(self) -> bool:
        """Whether processes hold different experts."""
        return self.expert_parallel_size > 1


def expert_problems(options: ExpertOptions, others: Mapping[str, bool]) -> list[str]:
    """Options that do not go with ``--expert-parallel-size``.

    Args:
        others: options, as they are given and with the reason, and whether they are.
    """
    if not options.shares_experts:
        return []
    return not_together(f"--expert-parallel-size {options.expert_parallel_size}", others)
