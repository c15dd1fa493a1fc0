"""The measurement of leakage between packed samples."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts._compare_packed import find_samples, largest_leakage, sum_losses
from scripts._compare_recorder import with_options

SAMPLES = [([number, *range(20, 30), number], [8, 9, 10, 11]) for number in (1, 2, 3)]
PACK = (list(chain(*(ids for ids, _ in SAMPLES))), [12 * i + place for i in range(3) for place in (8, 9, 10, 11)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=32, num_hidden_layers=1, head_dim=8, initializer_range=0.5, **sizes)
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def step(folder: Path, is_isolated: bool) -> dict[str, Any]:
    model = Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    parts = SAMPLES if is_isolated else [PACK]
    return {"samples": [PACK], "loss": sum(sum_losses(model, *part) for part in parts) / len(PACK[1])}


def test_isolated_packs_do_not_leak(folder: Path) -> None:
    num_packs, leakage, unisolated = largest_leakage(folder, SAMPLES, [step(folder, True)] * 3)
    assert num_packs == 2
    assert leakage < 1e-5 < 1e-3 < unisolated


def test_leaking_packs_are_found(folder: Path) -> None:
    _, leakage, unisolated = largest_leakage(folder, SAMPLES, [step(folder, False)])
    assert leakage == pytest.approx(unisolated)
    assert leakage > 1e-3


def test_single_samples_are_no_packs(folder: Path) -> None:
    with pytest.raises(SystemExit, match="no pack with several samples"):
        largest_leakage(folder, SAMPLES, [{"samples": [SAMPLES[0]], "loss": 1.0}])


@given(st.lists(st.sampled_from(SAMPLES), min_size=1), st.integers(0, 2))
def test_find_samples_skips_other_tokens(samples: list[Any], num_others: int) -> None:
    ids = [token for sample, _ in samples for token in [*sample, *[0] * num_others]]
    bounds = list(find_samples(ids, [sample for sample, _ in SAMPLES]))
    assert [ids[start:end] for start, end in bounds] == [sample for sample, _ in samples]


def test_options_replace_those_of_every_form(tmp_path: Path) -> None:
    options = {"packing": True}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"packing": False, "seed": 1}))
    assert with_options({"packing": False}, options) == {"packing": True}
    assert with_options(["train", "--packing=false", "--seed=1"], options) == ["train", "--seed=1", "--packing=true"]
    assert with_options(str(path), options) == str(path)
    assert json.loads(path.read_text()) == {"packing": True, "seed": 1}
