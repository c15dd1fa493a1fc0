"""Attention, and whole models, on rows that two and four gloo processes share: as if one had the row."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.attention.parallel.in_processes import MODELS, cases

TOLERANCES = {"cpu_flash": 2e-6, "math": 2e-6, "float64": 1e-13, "bfloat16": 1e-2}


@pytest.fixture(scope="module", params=[2, 4])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, list[float]]]:
    """Largest differences by case, from one torchrun job for all of them."""
    result = tmp_path_factory.mktemp("shared") / "errors.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    command = [*torchrun, "--module", "tests.attention.parallel.in_processes", str(result)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, json.loads(result.read_text())


def test_attention_equals_the_dense_reference(found: tuple[int, dict[str, list[float]]]) -> None:
    """The output and the gradients of q, k and v: Hkv = 8, 2 and 1, every mesh, documents sharded and local."""
    size, errors = found
    for mesh, row, heads, blocks, window in cases(size):
        name = f"{mesh}, {row}, {heads}, {blocks}, {window}"
        assert max(errors[name]) < TOLERANCES[blocks], name


def test_models_equal_one_process(found: tuple[int, dict[str, list[float]]]) -> None:
    """Logits, loss, all parameters' gradients; and a perturbed document moves no other, not in the last bit."""
    size, errors = found
    for name, mesh in MODELS[size]:
        logits, loss, gradients, moved = errors[f"{name}, {mesh}"]
        assert max(logits, loss, gradients) < 2e-6, (name, mesh)
        assert moved == 0, (name, mesh)
