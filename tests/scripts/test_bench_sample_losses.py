"""The benchmark of sample losses: it runs, and swaps as many answers as it says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts._copying_model import CONFIG, set_copying_heads
from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_sample_losses")


def test_shares_are_printed(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--rows", "100", "--rounds", "0"])
    out = capsys.readouterr().out
    assert re.match(r"demo: 100 samples, 2 with a swapped answer, \d+ steps", out)
    assert re.findall(r"^  epoch (\d): \d+% of them among the 5% highest", out, re.MULTILINE) == ["1", "2"]


def test_shares_of_real_rows_are_printed(bench: ModuleType, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--rows", "0", "--realdata", str(data), "--real-rows", "50"])
    out = capsys.readouterr().out
    assert re.match(r"real: 50 samples, 2 with a swapped answer, \d+ steps", out)
    assert re.findall(r"^  epoch (\d): \d+% of them among the 5% highest", out, re.MULTILINE) == ["1", "2"]


def test_attention_of_the_model_for_real_rows_copies() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=512, **CONFIG))
    set_copying_heads(model)
    text = torch.randint(512, (8, 40))
    tokens = torch.cat([text, text], dim=1)
    with torch.no_grad():
        is_predicted = model(input_ids=tokens).logits[:, :-1].argmax(-1) == tokens[:, 1:]
    assert is_predicted[:, 40:].float().mean() > 0.85
    assert is_predicted[:, :39].float().mean() < 0.1


def test_answers_are_swapped_in_pairs(bench: ModuleType) -> None:
    rows = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": str(n // 2)}]}
        for n in range(200)
    ]
    before = copy.deepcopy(rows)
    swapped = bench.swap_answers(rows)
    assert len(swapped) == 4
    assert {n for n, (row, old) in enumerate(zip(rows, before, strict=True)) if row != old} == swapped
    assert sorted(row["messages"][1]["content"] for row in rows) == sorted(
        row["messages"][1]["content"] for row in before
    )
