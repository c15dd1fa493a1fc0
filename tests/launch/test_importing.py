"""Collections of garbage wait while large libraries are imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from packtool.cache.restart import delayed_gc
from packtool.launch.processes import imported_at_once


@pytest.fixture
def _enabled() -> Iterator[None]:
    """As in a process that no test has made."""
    gc.enable()
    yield
    gc.disable()


@pytest.mark.usefixtures("_enabled")
def test_what_was_imported_is_not_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    kept = [[] for _ in range(1000)]
    frozen = gc.get_freeze_count()
    with imported_at_once():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


@pytest.mark.usefixtures("_enabled")
def test_a_program_that_has_imported_it_all_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", sys)
    with imported_at_once():
        assert gc.isenabled()


def test_collections_that_were_off_stay_off() -> None:
    assert not gc.isenabled()
    frozen = gc.get_freeze_count()
    with delayed_gc() as collect, imported_at_once():
        collect()
        assert not gc.isenabled()
    assert (gc.isenabled(), gc.get_freeze_count()) == (False, frozen)
