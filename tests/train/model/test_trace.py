"""The traced memory of a pass against that of the same pass computed, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.model.measured import computed_bytes, saved_bytes, traced_bytes
from tests.train.model.test_no_sync import ON_TEXT, THAT_HEAR, THAT_SEE, config_of

FAMILIES = (*ON_TEXT, *THAT_SEE, *THAT_HEAR)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("adapters", "recomputes"), [(False, False), (True, False), (False, True)])
def test_a_trace_holds_what_the_pass_holds(
    name: str, adapters: bool, recomputes: bool, realdata: Path, tmp_path: Path
) -> None:
    config = config_of(name, realdata, tmp_path)
    told = traced_bytes(config, adapters=adapters, recomputes=recomputes)
    found = computed_bytes(config, adapters=adapters, recomputes=recomputes)
    assert told.kept == pytest.approx(found.kept, rel=0.05)
    assert told.peak == pytest.approx(found.peak, rel=0.05)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_kept_is_what_autograd_saves(name: str, realdata: Path, tmp_path: Path) -> None:
    """Counted otherwise: by the hooks of saved tensors."""
    config = config_of(name, realdata, tmp_path)
    assert traced_bytes(config).kept == pytest.approx(saved_bytes(config), rel=0.05)
