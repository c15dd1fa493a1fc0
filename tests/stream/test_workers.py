"""What a worker of a stream met, as it is told to who trains."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from packtool.errors import StoreDownError
from packtool.stream import workers


def test_a_store_that_is_down_is_told_with_how_to_go_on() -> None:
    met = StoreDownError("http://h: 100 media in a row could not be had", "Look at the store.")
    pipe = SimpleNamespace(send=lambda asked: None, recv=lambda: met)
    idle: SimpleQueue[Any] = SimpleQueue()
    idle.put(SimpleNamespace(pipe=pipe))
    given: Any = None
    with pytest.raises(StoreDownError) as told:
        workers._ask(idle, given, given)
    assert told.value.remedy is not None
    assert told.value.remedy.startswith("Look at the store. --resume-from-checkpoint true")
    assert "finished" not in told.value.remedy
