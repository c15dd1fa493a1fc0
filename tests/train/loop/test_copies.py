"""Copies go over a stream of their own, and nobody reads what has not arrived."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from packtool.train.loop.copies import DeviceCopies


class FakeBatch:
    """Notes what is done to it."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def to(self, device: torch.device, *, non_blocking: bool = False) -> FakeBatch:
        self.events.append(f"to {device.type}, {'not ' if non_blocking else ''}blocking")
        return self

    def map(self, function: Any) -> FakeBatch:
        function(self)
        return self

    def record_stream(self, stream: Any) -> None:
        self.events.append(f"recorded on {stream.name}")


def test_the_computation_waits_for_the_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "copies"

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def on(stream: Stream) -> Any:
        events.append(f"on {stream.name}")
        yield
        events.append(f"off {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("computation"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    DeviceCopies(torch.device("cuda")).bring(FakeBatch(events))  # type: ignore[type-var]
    assert events == [
        "on copies",
        "to cuda, not blocking",
        "off copies",
        "computation waits for copies",
        "recorded on computation",
    ]


def test_the_cpu_has_no_streams() -> None:
    events: list[str] = []
    DeviceCopies(torch.device("cpu")).bring(FakeBatch(events))  # type: ignore[type-var]
    assert events == ["to cpu, blocking"]
