from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache.plan_file import SavedPlan, read_plan, write_plan
from packtool.errors import MismatchError
from packtool.planning.packing import pack


def test_a_written_plan_is_read_back(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 5000).astype(np.int32)
    plan = pack(lengths, 128, seed=3)
    info: dict[str, Any] = {"capacity": 128, "max_length": 128, "seed": 3, "cache": "c", "num_cached": 5000}
    info["plan"] = plan.fingerprint
    path = str(tmp_path / "a.plan")
    write_plan(path, SavedPlan(samples=plan.samples, offsets=plan.offsets, lengths=plan.lengths, **info))
    read_back = read_plan(path)
    assert {name: getattr(read_back, name) for name in info} == info
    for name in ("samples", "offsets", "lengths"):
        np.testing.assert_array_equal(getattr(read_back, name), getattr(plan, name))
    assert read_back.locations is None
    locations = np.arange(15_000, dtype=np.int32).reshape(5000, 3)
    write_plan(path, dataclasses.replace(read_back, locations=locations))
    np.testing.assert_array_equal(read_plan(path).locations, locations)


@pytest.mark.parametrize("content", [b"", b"not arrow at all", b"ARROW1\0\0"])
def test_errors_about_other_files_name_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "b.plan"
    path.write_bytes(content)
    with pytest.raises(MismatchError, match=r"b\.plan is not a plan file"):
        read_plan(str(path))
