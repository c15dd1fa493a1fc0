"""The traced memory of a pass against that of the same pass computed, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtool.train.model.trace import PassBytes
from tests.train.model.measured import computed_bytes, saved_bytes, traced_bytes
from tests.train.model.test_no_sync import ON_TEXT, THAT_HEAR, THAT_SEE, config_of

# Text alone, with linear attention and experts, with DeepStack, and with sounds.
OTHERWISE = ("qwen3", "qwen3_5_moe", "qwen3_vl", "qwen2.5-omni")


@pytest.mark.parametrize("name", [*ON_TEXT, *THAT_SEE, *THAT_HEAR])
def test_a_trace_holds_what_the_pass_holds(name: str, realdata: Path, tmp_path: Path) -> None:
    """And what is kept is what autograd saves, counted otherwise: by the hooks of saved tensors."""
    config = config_of(name, realdata, tmp_path)
    told = traced_bytes(config)
    check_same(told, computed_bytes(config))
    assert told.kept == pytest.approx(saved_bytes(config), rel=0.05)


@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("how", [{"adapters": True}, {"recomputes": True}], ids=str)
def test_with_adapters_or_recomputed(name: str, how: dict[str, bool], realdata: Path, tmp_path: Path) -> None:
    config = config_of(name, realdata, tmp_path)
    check_same(traced_bytes(config, **how), computed_bytes(config, **how))


def check_same(told: PassBytes, found: PassBytes) -> None:
    assert told.kept == pytest.approx(found.kept, rel=0.05)
    assert told.peak == pytest.approx(found.peak, rel=0.05)
