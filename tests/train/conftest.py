"""The tiny world, made once."""

from __future__ import annotations

import pytest
import torch

from tests.train.tiny import TinyWorld, make_tiny_world


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A model and its cache, not to be written to."""
    torch.set_num_threads(1)
    return make_tiny_world(tmp_path_factory.mktemp("tiny"))
