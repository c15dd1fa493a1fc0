"""``packtool demo``."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.settings import option


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What ``packtool demo`` needs to know."""

    output_dir: str = option("packtool-demo", "Folder that the demo makes and works in.")
    seed: int = option(7, "Seed of the world, the model and the training.", minimum=0)

    def problems(self) -> list[str]:
        """None are possible."""
        return []


def run_demo_command(config: DemoConfig, as_json: bool) -> None:
    raise NotImplementedError
