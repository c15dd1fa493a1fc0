"""The ready files in ``configs`` hold settings that exist, with values that are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from packtool.config.data import ExportConfig
from packtool.config.settings import resolve
from packtool.config.train import TrainConfig

FILES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
PATHS = {
    "export": {"model": "m", "dataset": ("d",), "output_dir": "o"},
    "train": {"model": "m", "cached_dataset": ("c",), "output_dir": "o"},
}


def test_configs_exist() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_configs_resolve(path: Path) -> None:
    command = path.stem.rpartition("_")[2]
    settings = yaml.safe_load(path.read_text())
    config = resolve({"export": ExportConfig, "train": TrainConfig}[command], PATHS[command], file=settings)
    assert f"{settings['max_length'] // 1024}k" in path.stem
    for name, value in settings.items():
        # YAML 1.1 reads 1e-4 as text.
        assert getattr(config, name) == (float(value) if name == "learning_rate" else value), name
