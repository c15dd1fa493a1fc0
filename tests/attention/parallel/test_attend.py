"""Attention, and whole models, on sequences that two and four gloo processes share: as if one had the sequence."""

from __future__ import annotations

import json

import pytest
import torch

from tests.attention.parallel.cases import MODELS, TREES, cases, find_errors
from tests.attention.parallel.shared_model import forward_alone, gradients_of, make_setting, tree_setting
from tests.forked import run_ranks

TOLERANCES = {"cpu_flash": 2e-6, "math": 2e-6, "float64": 1e-13, "bfloat16": 1e-2}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.smoke), 4])
def largest_errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, list[float]]]:
    """Largest differences by case, from one process group for all of them."""
    torch.set_num_threads(1)
    scratch = tmp_path_factory.mktemp("shared")
    settings = {name: make_setting(name, scratch) for name in dict(MODELS[request.param])}
    models = {name: (setting, forward_alone(setting)) for name, setting in settings.items()}
    (scratch / "trees").mkdir()
    tree_settings = {name: tree_setting(name, scratch / "trees") for name in dict(TREES[request.param])}
    trees = {name: (setting, gradients_of(setting)) for name, setting in tree_settings.items()}
    run_ranks(request.param, find_errors, models, trees, scratch / "errors.json", scratch=scratch)
    return request.param, json.loads((scratch / "errors.json").read_text())


def test_attention_equals_the_dense_reference(largest_errors: tuple[int, dict[str, list[float]]]) -> None:
    """The output and the gradients of q, k and v: Hkv = 8, 2 and 1, every mesh, documents sharded and local."""
    size, errors = largest_errors
    for mesh, sequence, heads, blocks, window in cases(size):
        name = f"{mesh}, {sequence}, {heads}, {blocks}, {window}"
        assert max(errors[name]) < TOLERANCES[blocks], name


def test_models_equal_one_process(largest_errors: tuple[int, dict[str, list[float]]]) -> None:
    """Logits, loss, all parameters' gradients; and a perturbed document moves no other, not in the last bit."""
    size, errors = largest_errors
    for name, mesh in MODELS[size]:
        logits, loss, gradients, moved = errors[f"{name}, {mesh}"]
        assert max(logits, loss, gradients) < 2e-6, (name, mesh)
        assert moved == 0, (name, mesh)


def test_trees_equal_their_samples_alone(largest_errors: tuple[int, dict[str, list[float]]]) -> None:
    """Loss and all parameters' gradients, in float64 but for what transformers computes in float32."""
    size, errors = largest_errors
    for name, mesh in TREES[size]:
        assert max(errors[f"tree of {name}, {mesh}"]) < 2e-6, (name, mesh)
