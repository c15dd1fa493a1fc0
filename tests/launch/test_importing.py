"""Collections of garbage wait while large libraries are imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from packtool.cache.output_dir import delayed_gc
from packtool.launch.processes import imported_at_once


@pytest.fixture(autouse=True)
def _gc_state() -> Iterator[None]:
    """Enable garbage collection, as in a new process, and restore its state after the test."""
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_imported_objects_are_skipped_by_later_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with imported_at_once():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert frozen == [True]


def test_nothing_changes_if_transformers_is_already_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", sys)
    with imported_at_once():
        assert gc.isenabled()


def test_disabled_garbage_collection_stays_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()
    # The number of frozen objects is not compared: it falls whenever one of them is released.
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    with delayed_gc() as collect, imported_at_once():
        collect()
        assert not gc.isenabled()
    assert (gc.isenabled(), frozen) == (False, [])
