from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packtool.cache.manifest import ExportSummary
from tests.cache.conftest import tree
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def exported(model: Path, rows: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own: Ray's threads do not go away, and would be forked by other tests."""
    command = [sys.executable, "-m", "packtool", "export", "--model", str(model), "--dataset", str(rows)]
    command += ["--output-dir", str(output), "--max-length", "200", "--rows-per-shard", "50"]
    command += ["--executor", "ray", "--dataset-num-proc", "2", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_cluster_writes_the_same_bytes(
    run_export: Callable[..., ExportSummary], model: Path, rows: Path, tmp_path: Path
) -> None:
    run_export("local")
    done = exported(model, rows, tmp_path / "cluster")
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "cluster") == tree(tmp_path / "local")
