"""Exchanges on paper take what the runtime's order of sending, computing and waiting takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning.cost import MODEL_PRESETS, ModelSizes, StepTime
from packtool.simulate.hardware import HARDWARE_PRESETS
from packtool.simulate.machine import exchange_type_of, exchanges_of

SIZES = ModelSizes.of_config(MODEL_PRESETS["8b"])
NODE = replace(HARDWARE_PRESETS["h100"], link_share=1.0)


def test_resolved_exchange_type() -> None:
    assert exchange_type_of("auto", SIZES, NODE, 8) == "ulysses"
    assert exchange_type_of("auto", SIZES, NODE, 16) == "allgather"
    assert exchange_type_of("ulysses", SIZES, NODE, 16) == "ulysses"
    assert exchange_type_of("ring", SIZES, NODE, 8) == "ring"
    # 14 heads of Q and 2 of K and V cannot be shared among eight.
    small = ModelSizes.of_config(MODEL_PRESETS["qwen2.5-0.5b"])
    assert exchange_type_of("auto", small, NODE, 8) == exchange_type_of("ulysses", small, NODE, 8) == "allgather"
    assert exchanges_of("ring", SIZES, NODE, 1, recompute=False) == ()


class Clock:
    """A layer's compute stream, and links that carry one message after the other."""

    def __init__(self) -> None:
        self.now = self.link = 0.0

    def send(self, seconds: float) -> float:
        """When what is sent now has come."""
        self.link = max(self.link, self.now) + seconds
        return self.link

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


def all_gather(clock: Clock, local: float, block: float, gather: float, scatter: float, num: int) -> None:
    """``attention.parallel.attend``: _gather_forward, and with a scatter _gather_backward."""
    coming = clock.send(gather)
    clock.compute(local)
    clock.compute(block)
    clock.wait(coming)
    clock.compute((num - 1) * block)
    if scatter:
        clock.wait(clock.send(scatter))


def ring(clock: Clock, local: float, block: float, hop: float, gradients: float, num: int) -> None:
    """``attention.parallel.attend``: _ring_forward, and with gradients _ring_backward."""
    coming = clock.send(hop)
    clock.compute(local)
    clock.compute(block)
    for step in range(1, num):
        clock.wait(coming)
        home = clock.send(gradients) if gradients else 0.0
        if step + 1 < num:
            coming = clock.send(hop)
        clock.compute(block)
        clock.wait(home)
    if gradients:
        clock.wait(clock.send(gradients))


def ulysses(clock: Clock, local: float, block: float, there: float, back: float, num: int) -> None:
    """``attention.parallel.attend``: _sharded_forward and _sharded_backward."""
    coming = clock.send(there)
    clock.compute(local)
    clock.wait(coming)
    clock.compute(num * block)
    clock.wait(clock.send(back))


@settings(max_examples=150)
@given(
    st.sampled_from(["allgather", "ring", "ulysses"]),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.integers(1, 200_000),
    st.floats(0, 0.05),
    st.floats(0, 0.05),
    st.sampled_from([1.0, 20.0, 450.0]),
)
def test_exchange_times_use_the_order_of_the_runtime(
    exchange_type: Any, num: int, recompute: bool, tokens: int, local: float, sharded: float, links: float
) -> None:
    node = replace(NODE, intra_node_gb_per_s=links, latency_us=20)
    kv, queries = SIZES.kv_bytes, SIZES.query_bytes
    forward, passes = 1 / (4.5 if recompute else 3.5), 1 + recompute

    def travel(num_bytes: float, rate: float) -> float:
        return max(20e-6, tokens * num_bytes / rate)

    clock = Clock()
    for _ in range(SIZES.num_layers):
        for pass_index in range(passes + 1):
            goes_back = pass_index == passes
            share = (2.5 if goes_back else 1.0) * forward / SIZES.num_layers
            local_load, block = local * share, sharded * share / num
            if exchange_type == "allgather":
                gather = travel(kv, node.bytes_per_second(num))
                scatter = travel(2 * kv, node.bytes_per_second(num, all_to_all=True)) if goes_back else 0
                all_gather(clock, local_load, block, gather, scatter, num)
            elif exchange_type == "ring":
                rate = node.hop_bytes_per_second(num)
                gradients = travel(2 * kv / num, rate) if goes_back else 0
                ring(clock, local_load, block, travel(kv / num, rate), gradients, num)
            else:
                rate, inputs = node.bytes_per_second(num, all_to_all=True), queries + max(num // 8, 1) * kv
                there, back = travel(inputs / num, rate), travel(queries / num, rate)
                ulysses(clock, local_load, block, *((back, there) if goes_back else (there, back)), num)
    times = StepTime(exchanges=exchanges_of(exchange_type, SIZES, node, num, recompute=recompute))
    result = times.exposed_seconds(np.array([float(tokens)]), np.array([local]), np.array([sharded]))
    # A hop of K and V beside gradients is one message here, of which only one part may be below the fixed time.
    slack = 20e-6 * SIZES.num_layers * num if exchange_type == "ring" else 0.0
    assert local + sharded + result[0] == pytest.approx(clock.now, rel=1e-9, abs=slack + 1e-12)
