"""One cache, one plan, and the losses of ``packtool train`` on it, which every example must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import packtool
from packtool.progress import SilentProgress
from packtool.train.run import train
from tests.train.tiny import TinyWorld, make_tiny_world, read_metrics

PLAN: dict[str, Any] = {"packing_length": 200, "gradient_accumulation_steps": 4, "num_train_epochs": 2}
CONSTANT: dict[str, Any] = {"weight_decay": 0.0, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}


@dataclass(frozen=True)
class Reference:
    """A small world and the loss of each step on ``PLAN``; the last step of both epochs is a smaller one."""

    tiny: TinyWorld
    losses: list[float]

    def check(self, losses: list[float]) -> None:
        """Raise unless these are the losses."""
        assert losses == pytest.approx(self.losses, rel=0, abs=1e-5)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One run of ``packtool train``."""
    root = tmp_path_factory.mktemp("examples")
    tiny = make_tiny_world(root)
    train(tiny.config(root / "trained", save_strategy="no", **PLAN | CONSTANT), SilentProgress())
    sizes = {len(step.micro_batches[0]) for step in packtool.plan(tiny.cache, **PLAN).steps}
    assert len(sizes) == 2, "a last, smaller step is what trainers stumble over"
    return Reference(tiny, [line["loss"] for line in read_metrics(root / "trained")])
