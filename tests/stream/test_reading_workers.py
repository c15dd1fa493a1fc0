"""Errors of a stream's workers."""

from __future__ import annotations

from typing import Any

import pytest

from packtool.errors import StoreDownError
from packtool.stream import reading


def test_store_outage_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pool: Any, blocks: Any, **_: Any) -> Any:
        raise StoreDownError("http://h: 100 media in a row could not be had", "Look at the store.")

    monkeypatch.setattr(reading.WorkerPool, "map", fail)
    spec: Any = None
    with pytest.raises(StoreDownError) as raised:
        list(reading.encoded_blocks(iter([]), spec, num_proc=1, num_ahead=1))
    assert raised.value.remedy is not None
    assert raised.value.remedy.startswith("Look at the store. To resume from the latest checkpoint")
    assert "finished" not in raised.value.remedy
