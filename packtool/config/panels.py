"""The headings that ``--help`` shows options under, in the order in which it shows them."""

from __future__ import annotations

from typing import Literal, get_args

Panel = Literal[
    "Options",
    "Model and hardware",
    "Mixtures",
    "Packing",
    "Training",
    "Optimizer",
    "Parameters",
    "Precision and memory",
    "Speed",
    "Steps",
    "Sequence parallel",
    "Evaluation",
    "Checkpoints and logs",
    "Rows",
    "Streaming",
    "Pictures",
    "Video and audio",
    "Scale",
    "Media access",
    "Caches",
    "Other options",
]
PANELS: tuple[Panel, ...] = get_args(Panel)
FIRST, LAST = PANELS[0], PANELS[-1]
"""What a command needs first, whatever else its options are declared as; and what all commands have."""
