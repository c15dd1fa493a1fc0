"""Settings of ``packtool demo``."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.config.settings import option


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What ``packtool demo`` needs to know."""

    output_dir: str = option("packtool-demo", "Folder that the demo makes and works in.")
    seed: int = option(7, "Seed of the world, the model and the training.", minimum=0)

    def problems(self) -> list[str]:
        """No problems: no two of these settings can contradict each other."""
        return []
