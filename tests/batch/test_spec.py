"""What collation reads of a model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from packtool.batch.spec import model_config


@pytest.mark.parametrize("name", ["qwen2.5-omni", "qwen3-omni"])
def test_talker_of_released_models_causes_no_warning(
    name: str, drawn_data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = logging.getLogger("transformers")
    # Trackers in other tests of the same process may have turned it off.
    monkeypatch.setattr(transformers, "disabled", False)
    monkeypatch.setattr(transformers, "level", logging.WARNING)
    level = transformers.level
    transformers.addHandler(caplog.handler)
    try:
        assert "thinker" in model_config(str(drawn_data / "tokenizers" / name)).model_type
        assert not caplog.records
        assert transformers.level == level
        transformers.warning("is heard")
        assert set(caplog.messages) == {"is heard"}  # twice where CI is set, for then the root hears it, too
    finally:
        transformers.removeHandler(caplog.handler)
