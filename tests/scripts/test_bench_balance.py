"""The benchmark of balance compares ways of assignment the same work."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("bench_balance")


def test_balancing_work_is_more_even_than_balancing_tokens(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    image_tokens = np.where(random.random(2000) < 0.5, 0, random.integers(16, 3900, 2000))
    samples = bench.Samples(
        image_tokens + 100,
        np.full(2000, 50),
        image_tokens,
        (4 * image_tokens) ** 2,
        (image_tokens > 0).astype(np.int64),
    )
    monkeypatch.setattr(bench, "read_samples", lambda *args: samples)
    bench.main([".", "--ranks", "4", "--packing-length", "4096"])
    lines = capsys.readouterr().out.splitlines()[-6:]
    means = [float(line.split()[-2]) for line in lines]
    for cards, tokens, cost in (means[:3], means[3:]):
        assert 1 <= cost < tokens < cards
    cost = bench.CostModel.of_config(bench.QWEN3_VL_8B)
    blind = bench.by_tokens(cost, samples)
    assert samples.towers(blind).flops.sum() == pytest.approx(samples.towers(cost).flops.sum())
