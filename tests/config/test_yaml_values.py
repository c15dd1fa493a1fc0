"""Numbers and words of YAML are what people mean by them, in ``--set`` and in ``--config`` alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.cli.options import _read_yaml
from packtool.config.settings import resolve
from packtool.config.train import TrainConfig
from packtool.config.yaml_values import parse_yaml

TRAIN = {"model": "m", "cached_dataset": ("c",), "output_dir": "o"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-6", 1e-6), ("2E5", 2e5), ("-1.5e+3", -1500.0), (".5", 0.5), ("3", 3), ("-7", -7), ("0x10", 16)],
        *[("true", True), ("False", False), ("no", "no"), ("on", "on"), ("null", None), ("", None)],
        *[("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("v1.2.3", "v1.2.3"), ('"1e-6"', "1e-6")],
        ("{min_lr: 1e-5, on: [2e-4, no]}", {"min_lr": 1e-5, "on": [2e-4, "no"]}),
    ],
)
def test_plain_scalars(text: str, value: Any) -> None:
    found = parse_yaml(text)
    assert (found, type(found)) == (value, type(value))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_that_python_writes_is_read_as_that_number(number: float) -> None:
    for shown in (repr(number), f"{number:g}", f"{number:.3e}"):
        assert parse_yaml(shown) == float(shown)


def test_both_ways_in_read_alike(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("packing: yes\ntraining:\n  adam_epsilon: 1e-6\n  run_name: no\n")
    for config in (
        resolve(TrainConfig, TRAIN, file=_read_yaml(str(tmp_path / "a.yaml"))),
        resolve(TrainConfig, TRAIN, sets=["packing=yes", "training.adam_epsilon=1e-6", "training.run_name=no"]),
    ):
        assert config.packing is True
        assert config.training == {"adam_epsilon": 1e-6, "run_name": "no"}
