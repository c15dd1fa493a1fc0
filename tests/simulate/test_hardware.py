"""Accelerators on paper: presets, files, and the time of collectives."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from packtool.errors import ConfigError
from packtool.simulate.hardware import HARDWARE_PRESETS, Hardware, nearest_preset, peak_tflops


def fields(**changes: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(HARDWARE_PRESETS["h100"]), **changes}


@pytest.mark.parametrize("name", HARDWARE_PRESETS)
def test_presets_equal_their_fields(name: str) -> None:
    assert Hardware.of_fields(dataclasses.asdict(HARDWARE_PRESETS[name]), name) == HARDWARE_PRESETS[name]


def test_fields_with_defaults_are_optional() -> None:
    needed = {"peak_tflops": 100, "memory_gb": 32, "hbm_gb_per_s": 1000}
    result = Hardware.of_fields({**needed, "intra_node_gb_per_s": 100, "inter_node_gb_per_s": 10}, "mine.yaml")
    assert (result.name, result.gpus_per_node, result.peak) == ("mine.yaml", 8, 1e14)


def test_all_errors_of_a_file_are_reported_at_once() -> None:
    invalid_fields = fields(
        peak_tflops="fast", memory_gb=-1, matmul_share=2, gpus_per_node=1.5, colour="red", latency_us=True
    )
    del invalid_fields["hbm_gb_per_s"]
    with pytest.raises(ConfigError) as error:
        Hardware.of_fields(invalid_fields, "mine.yaml")
    for problem in (
        "peak_tflops",
        "memory_gb",
        "share is at most 1",
        "whole number",
        "colour",
        "hbm_gb_per_s",
        "latency",
    ):
        assert problem in str(error.value)


def test_collectives_are_fixed_and_then_linear() -> None:
    machine = Hardware.of_fields(fields(link_share=1.0, intra_node_gb_per_s=87.5, latency_us=50), "test")
    assert machine.collective_seconds(1e9, 8) == pytest.approx(0.01)  # 7/8 of a GB at 87.5 GB/s
    assert machine.collective_seconds(1e3, 8) == pytest.approx(50e-6)
    assert machine.collective_seconds(1e6, 8) == pytest.approx(50e-6)
    assert machine.collective_seconds(1e9, 1) == machine.collective_seconds(0, 8) == 0


def test_nodes_are_joined_by_slower_links() -> None:
    machine = Hardware.of_fields(fields(link_share=1.0, inter_node_gb_per_s=1, latency_us=50), "test")
    assert machine.collective_seconds(16e9, 16) == pytest.approx(16 / 2 / 8)  # half of it through eight cards
    assert machine.collective_seconds(1, 64) == pytest.approx(50e-6 * (1 + math.log2(8)))
    seconds = [machine.collective_seconds(1e9, num) for num in (8, 16, 1024, 16384)]
    assert seconds == sorted(seconds)


def test_all_to_all_between_nodes_uses_one_card_per_rank() -> None:
    machine = Hardware.of_fields(fields(link_share=1.0, inter_node_gb_per_s=1, intra_node_gb_per_s=100), "test")
    assert machine.bytes_per_second(8, all_to_all=True) == machine.bytes_per_second(8) == pytest.approx(8 / 7 * 100e9)
    assert machine.bytes_per_second(16, all_to_all=True) == pytest.approx(2e9)  # half of it through one card
    assert machine.bytes_per_second(16) == pytest.approx(16e9)
    # A ring is as fast as its slowest link.
    assert machine.hop_bytes_per_second(8) == 100e9
    assert machine.hop_bytes_per_second(16) == 1e9


def test_all_gathers_measured_by_skrull() -> None:
    """2, 64 and 1024 MB took 53, 489 and 6468 us; a line through the last one meets the middle one to a sixth."""
    intra = 7 / 8 * 1024e6 / 6468e-6 / 1e9
    machine = Hardware.of_fields(fields(link_share=1.0, intra_node_gb_per_s=intra, latency_us=53), "paper")
    for size, micros, off in ((2e6, 53, 0.01), (64e6, 489, 0.18), (1024e6, 6468, 0.001)):
        assert machine.collective_seconds(size, 8) == pytest.approx(micros * 1e-6, rel=off)


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        ((), "h100"),
        (("NVIDIA H100 80GB HBM3",), "h100"),
        (("NVIDIA H200",), "h200"),
        (("NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe"), "a100"),
        (("Ascend 910B3",), "910b"),
        (("Tesla T4",), "h100"),
    ],
)
def test_preset_of_installed_devices(names: tuple[str, ...], preset: str) -> None:
    assert nearest_preset(names) is HARDWARE_PRESETS[preset]


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", HARDWARE_PRESETS["h100"].peak_tflops),
        ("NVIDIA H200", HARDWARE_PRESETS["h200"].peak_tflops),
        ("NVIDIA A100-SXM4-80GB", HARDWARE_PRESETS["a100"].peak_tflops),
        ("NVIDIA H20", 148),
        ("a card of tomorrow", None),
    ],
)
def test_peak_tflops_by_device_name(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak
