"""Accelerators: peak speed, memory and links, from their makers' data sheets.

GB and TB are powers of ten, links are counted in one direction, and speeds of matrix products are dense bfloat16 (half
of what data sheets print "with sparsity"). A file with the same fields describes other hardware (``read_hardware``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from packtool import storage
from packtool.config.settings import load_json, parse_yaml
from packtool.errors import ConfigError, did_you_mean
from packtool.launch.world import gpu_names


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator and its links to others; of links, bandwidths are in one direction.

    Args:
        peak_tflops: dense bfloat16, TFLOP/s.
        hbm_gb_per_s: bandwidth of its memory, which bounds short kernels and the gathering of shared keys and values.
        intra_node_gb_per_s: to the others of its node.
        inter_node_gb_per_s: of each accelerator's network card.
        gpus_per_node: joined by the faster links.
        latency_us: minimum microseconds of a collective in one node; 53 for 2 MB in Skrull's table (arXiv 2505.19609).
        matmul_share, attention_share: of the peak that large matrix products reach, and attention of long sequences,
            forward and backward.
        link_share: of a link's bandwidth that collectives reach.
    """

    name: str
    peak_tflops: float
    memory_gb: float
    hbm_gb_per_s: float
    intra_node_gb_per_s: float
    inter_node_gb_per_s: float
    gpus_per_node: int = 8
    latency_us: float = 50.0
    matmul_share: float = 0.8
    attention_share: float = 0.5
    link_share: float = 0.8

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any], origin: str) -> Hardware:
        """Check and convert fields from a file; raise a ConfigError that lists all problems.

        Fields with a default may be missing, and so may the name.

        Args:
            origin: option and file, such as ``--hardware my.yaml``; begins each error, and is the default name.
        """
        declared_fields = {field.name: field for field in dataclasses.fields(cls)}
        problems = []
        for name in fields:
            if name not in declared_fields:
                problems.append(f"{origin}: unknown field {name!r}{did_you_mean(name, declared_fields)}")

        values: dict[str, Any] = {"name": str(fields.get("name", origin))}
        del declared_fields["name"]
        for name, field in declared_fields.items():
            if name not in fields:
                if field.default is dataclasses.MISSING:
                    problems.append(f"{origin}: {name} is missing")
                continue
            problem = _field_problem(name, fields[name])
            if problem is not None:
                problems.append(f"{origin}: {problem}")
            else:
                convert = int if name == "gpus_per_node" else float
                values[name] = convert(fields[name])
        if problems:
            raise ConfigError.from_problems(problems)
        return cls(**values)

    @property
    def peak(self) -> float:
        """Peak FLOP/s of a GPU."""
        return self.peak_tflops * 1e12

    def collective_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Estimate the seconds of an all-gather that leaves ``num_bytes`` on every rank, or of such a reduce-scatter.

        Each of n ranks receives (n - 1) / n of all, by the slower of the links within and between nodes. The fixed part
        grows with the logarithm of the nodes, as for a tree.
        """
        if num_ranks == 1 or num_bytes <= 0:
            return 0.0
        return max(self.fixed_seconds(num_ranks), num_bytes / self.bytes_per_second(num_ranks))

    def fixed_seconds(self, num_ranks: int) -> float:
        """Estimate the minimum seconds of a collective."""
        return self.latency_us * 1e-6 * (1 + math.log2(-(-num_ranks // self.gpus_per_node)))

    def bytes_per_second(self, num_ranks: int, *, all_to_all: bool = False) -> float:
        """Estimate bytes per second that a large all-gather leaves on every rank, or each sends in an all-to-all."""
        num_nodes, num_cards = -(-num_ranks // self.gpus_per_node), 1 if all_to_all else self.gpus_per_node
        inside = (num_ranks - 1) / num_ranks / self.intra_node_gb_per_s
        between = (num_nodes - 1) / num_nodes / (self.inter_node_gb_per_s * num_cards)
        return self.link_share * 1e9 / max(inside, between)

    def hop_bytes_per_second(self, num_ranks: int) -> float:
        """Estimate the bytes per second that each rank of a ring sends to the next, over the slowest link."""
        is_inside = num_ranks <= self.gpus_per_node
        link = self.intra_node_gb_per_s if is_inside else min(self.intra_node_gb_per_s, self.inter_node_gb_per_s)
        return self.link_share * 1e9 * link


def _field_problem(name: str, value: Any) -> str | None:
    """Say why a field of ``Hardware`` other than its name cannot have this value, or return None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    may_be_zero = name == "latency_us"
    if not is_number or value < 0 or (value == 0 and not may_be_zero):
        return f"{name} is {value!r}, not a number above zero"
    if name.endswith("_share") and value > 1:
        return f"{name} is {value!r}; a share is at most 1"
    if name == "gpus_per_node" and value != int(value):
        return f"gpus_per_node is {value!r}, not a whole number"
    return None


def _table(kind: str) -> list[list[str]]:
    """Return the columns of the lines of ``hardware.tsv`` for devices or presets."""
    lines = resources.files("packtool.simulate").joinpath("hardware.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[1:] for line in lines if line.startswith(f"{kind}\t")]


PEAK_TFLOPS: dict[str, float] = {word: load_json(peak) for word, peak, _ in _table("device")}
"""TFLOP/s of dense bfloat16 (float16 where there is none) matrix products, by a word of the device's name."""
_PRESET_OF_DEVICE = {word: preset for word, _, preset in _table("device") if preset != "-"}
_PRESET_COLUMNS = ("memory_gb", "hbm_gb_per_s", "intra_node_gb_per_s", "inter_node_gb_per_s", "attention_share")
HARDWARE_PRESETS = {
    preset: Hardware(
        name=name, peak_tflops=PEAK_TFLOPS[device], **dict(zip(_PRESET_COLUMNS, map(load_json, numbers), strict=True))
    )
    for preset, device, name, *numbers in _table("preset")
}


def peak_tflops(device_name: str) -> float | None:
    """Return the peak dense TFLOP/s in 16 bits of a device by its driver's name for it, or None if unknown."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


def nearest_preset(device_names: Sequence[str]) -> Hardware:
    """Return the preset of the first known device, by its driver's name for it; that of an H100 if none is known."""
    presets = (preset for name in device_names for word, preset in _PRESET_OF_DEVICE.items() if word in name.upper())
    return HARDWARE_PRESETS[next(presets, "h100")]


def read_hardware(name: str | None) -> Hardware:
    """Return the preset called ``name``, or read a YAML or JSON file; None means the local GPUs, or else an H100."""
    if name is None:
        return nearest_preset(gpu_names())
    if name.lower() in HARDWARE_PRESETS:
        return HARDWARE_PRESETS[name.lower()]
    if not name.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(f"--hardware {name}: neither {', '.join(HARDWARE_PRESETS)} nor a .yaml or .json file.")
    fields = _read_fields(name)
    if not isinstance(fields, Mapping):
        raise ConfigError(f"--hardware {name}: the file must hold names and values, not a {type(fields).__name__}")
    return Hardware.of_fields(fields, f"--hardware {name}")


def _read_fields(path: str) -> Any:
    """Parse a YAML or JSON file."""
    import yaml  # here, because most runs need no YAML

    with storage.open_read(path) as file:
        text = file.read()
    try:
        return load_json(text) if path.endswith(".json") else parse_yaml(text.decode())
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--hardware {path}: {error}") from error
