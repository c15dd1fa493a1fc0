"""What several folders of tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# Nothing here may wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run side by side on few cores: threads that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def realdata() -> Path:
    """Real conversations, pictures and tokenizers, kept beside the checkout; tests that need them skip without."""
    folder = REPOSITORY.parent / "shared" / "realdata"
    if not folder.is_dir():
        pytest.skip(f"no real data beside the checkout ({folder.name})")
    return folder


@pytest.fixture(autouse=True)
def _no_limits_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests must not decide them."""
    for name in ("MAX_PIXELS", "MIN_PIXELS", "IMAGE_MAX_TOKEN_NUM", "IMAGE_MIN_TOKEN_NUM", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
