"""Copies go over a stream of their own, nobody reads what has not arrived, and the waits for them are told."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from packtool.train.loop.trainer import DeviceCopies


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


@dataclass
class BatchOfOne:
    """A single tensor."""

    tensor: torch.Tensor

    def to(self, device: torch.device, *, non_blocking: bool = False) -> BatchOfOne:
        return BatchOfOne(self.tensor.to(device, non_blocking=non_blocking))

    def map(self, function: Any) -> BatchOfOne:
        return BatchOfOne(function(self.tensor))


class Stream:
    """A stream of work that takes as long as it is told to."""

    def __init__(self, name: Any) -> None:
        self.name = name if isinstance(name, str) else "copies"

    def wait_stream(self, other: Stream) -> None:
        EVENTS.append(f"{self.name} waits for {other.name}")


class Event:
    """Reached at a time of the device; nobody may ask before."""

    times: ClassVar[list[float]] = []
    reached = True

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        EVENTS.append(f"noted on {stream.name}")
        self.ms = Event.times.pop(0)

    def query(self) -> bool:
        return Event.reached

    def elapsed_time(self, end: Event) -> float:
        assert Event.reached
        return end.ms - self.ms


EVENTS: list[str] = []


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> DeviceCopies:
    """Copies to a GPU that is none."""

    @contextmanager
    def on(stream: Stream) -> Any:
        EVENTS.append(f"on {stream.name}")
        yield
        EVENTS.append(f"off {stream.name}")

    EVENTS.clear()
    monkeypatch.setattr(Event, "times", [])
    for name, fake in {"Stream": Stream, "Event": Event, "stream": on}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("computation"))
    return DeviceCopies(torch.device("cuda"))


def test_computation_waits_only_for_the_copy(copies: DeviceCopies) -> None:
    Event.times += [0.0, 0.0]
    copies.to_device(FakeBatch(EVENTS))  # type: ignore[type-var]
    assert EVENTS == [
        "on copies",
        "to cuda, not blocking",
        "off copies",
        "noted on computation",
        "computation waits for copies",
        "noted on computation",
        "recorded on computation",
    ]


def test_waits_are_counted_once_and_only_after_the_device_reached_them(
    copies: DeviceCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copies.wait_seconds() == 0.0
    Event.times += [0.0, 250.0, 1000.0, 1750.0, 2000.0, 2000.0]
    for _ in range(3):
        copies.to_device(FakeBatch(EVENTS))  # type: ignore[type-var]
    monkeypatch.setattr(Event, "reached", False)
    assert copies.wait_seconds() == 0.0
    monkeypatch.setattr(Event, "reached", True)
    assert copies.wait_seconds() == 1.0
    assert copies.wait_seconds() == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_copies_to_a_gpu_are_complete_and_report_waits() -> None:
    copies, expected = DeviceCopies(torch.device("cuda")), torch.arange(1 << 22)
    batch = BatchOfOne(expected.pin_memory())
    for _ in range(3):
        arrived = copies.to_device(batch)  # type: ignore[type-var]
        assert int((arrived.tensor + 1).sum()) == int(expected.sum()) + len(expected)
    waited = copies.wait_seconds()
    assert waited is not None
    assert 0 < waited < 10
    assert copies.wait_seconds() == 0.0


def test_the_cpu_has_no_streams() -> None:
    events: list[str] = []
    DeviceCopies(torch.device("cpu")).to_device(FakeBatch(events))  # type: ignore[type-var]
    assert events == ["to cpu, blocking"]
    assert DeviceCopies(torch.device("cpu")).wait_seconds() is None
