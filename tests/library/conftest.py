"""The tiny world and what the library makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedModel

import packtool
from tests.train.conftest import tiny as tiny  # a fixture
from tests.train.tiny import TinyWorld

PLAN: dict[str, Any] = {"packing_length": 256, "gradient_accumulation_steps": 2}
HERE: dict[str, Any] = {"dataloader_num_workers": 0}


@pytest.fixture(scope="session")
def model(tiny: TinyWorld) -> PreTrainedModel:
    """The tiny world's, prepared; nothing trains it."""
    return packtool.prepare_model(transformers.AutoModelForImageTextToText.from_pretrained(tiny.model))


@pytest.fixture(scope="session")
def plan(tiny: TinyWorld) -> packtool.Plan:
    """Four steps of at most two packs, twice."""
    return packtool.plan(tiny.cache, num_train_epochs=2, **PLAN)
