"""The tiny world, made once, and what every run on it would find out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from packtool.attention import support
from tests.train.tiny import TinyWorld, make_tiny_world


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A model and its cache, not to be written to."""
    torch.set_num_threads(1)
    return make_tiny_world(tmp_path_factory.mktemp("tiny"))


_PASSED: set[tuple[Any, str]] = set()


@pytest.fixture(scope="module", autouse=True)
def _models_are_tried_once() -> Iterator[None]:
    """A model that has passed the trial call passes it again, which would be a third of a run of two steps."""
    refuse_after_trial = support.refuse_after_trial

    def refuse_once(config: PreTrainedConfig, model_class: Any) -> None:
        if (tried := (model_class, config.to_json_string())) not in _PASSED:
            refuse_after_trial(config, model_class)
            _PASSED.add(tried)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "refuse_after_trial", refuse_once)
        yield
