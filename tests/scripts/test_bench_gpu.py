"""The benchmark of a GPU, on the CPU: its checks find what is wrong, and its table has every row."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Varlen
from tests.scripts.loading import load_script
from tests.waiting import PATIENCE_S

# As on a machine where pip has installed torch and transformers and nothing else of what packtool needs.
WITHOUT_THE_REST = """
import runpy, sys
from importlib.machinery import PathFinder
ABSENT = "accelerate av binpacking datasets fsspec peft PIL pyarrow ray rich s3fs torchvision typer".split()
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name.split(".")[0] in ABSENT else find(name, *rest))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    torch.set_num_threads(1)
    return load_script("bench_gpu")


def test_checks_and_table_with_torch_and_transformers_alone(repository: Path) -> None:
    script = str(repository / "scripts" / "bench_gpu.py")
    command = [sys.executable, "-c", WITHOUT_THE_REST, script, "--size", "tiny", "--tokens", "256"]
    done = subprocess.run(
        [*command, "--repeats", "1", "--warm-up", "0"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checks, table = done.stdout.split("\nwhat  ")
    assert len(re.findall(r" ok$", checks, re.MULTILINE)) == 11
    assert "FAILED" not in checks
    rows = [line.split("  ") for line in table.splitlines()[1:]]
    labeled_rows = [[part.strip() for part in row if part][:2] for row in rows]
    assert [variant for label, variant in labeled_rows if label == "tiny attention, mixed lengths"][1:] == ["sdpa"]
    for kind in ("text", "vision"):
        variants = [variant for label, variant in labeled_rows if label.startswith(f"tiny {kind}")]
        assert [variant.split(" fill")[0] for variant in variants] == [
            "padded,",
            "padded, grouped,",
            "packed, sdpa",
            "packed, sdpa, all logits",
            "memory",
        ]
    assert len(re.findall(r"not traced: No module named '\w+'", table)) == 2
    assert not re.search("failed|out of memory", table)


def test_without_a_gpu_nothing_is_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 0
    assert "no CUDA device: the checks ran on the CPU, and nothing was measured" in capsys.readouterr().out


def test_leaking_kernel_is_detected_and_not_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = KERNELS["sdpa"]
    attend = kernel.attend

    def leaky(q: Tensor, k: Tensor, v: Tensor, varlen: Varlen, **settings: Any) -> Tensor:
        return attend(q, k, v, Varlen.of_lengths([len(q)]), **settings)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernel, "attend", leaky)
    assert bench.main(["--size", "tiny"]) == 1
    out = capsys.readouterr().out
    assert len(re.findall("a changed sample moves no other .* FAILED", out)) == 2
    assert "tokens/s" not in out


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("tried to allocate 4 GiB"), "out of memory"),
        (RuntimeError("no kernel\nand more"), "failed: RuntimeError: no kernel"),
    ],
)
def test_failed_measurement_is_a_row_with_a_reason(bench: ModuleType, error: Exception, note: str) -> None:
    def fail() -> Any:
        raise error

    options = bench.argparse.Namespace(warm_up=0, repeats=1)
    measurable = bench.Bench(CPU, torch.float32, ["sdpa"], None, options)
    row = bench.measured(measurable, bench.Row("what", "way", 1.0, 1), fail)
    assert (row.ms, row.note) == (None, note)


def test_memory_trace_and_results_are_written_as_json(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "found.json"
    arguments = ["--size", "tiny", "--tokens", "256", "--what", "vision", "--repeats", "1", "--warm-up", "0"]
    assert bench.main([*arguments, "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert {"varlen", "flash_attention_2"} <= results["missing_kernels"].keys()
    assert all(check["passed"] for check in results["checks"])
    assert all(row["tflops"] > 0 and row["mfu"] is None for row in results["rows"])
    (memory,) = results["memory"]
    assert (memory["measured"], memory["ratio"], memory["passed"]) == (None, None, True)
    assert 0 < memory["passing"] < memory["traced"]


@pytest.mark.parametrize(("measured", "passes"), [(10.5, True), (11.2, False), (8.9, False)])
def test_memory_may_be_off_by_a_tenth(
    measured: float,
    passes: bool,
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "rows_of", lambda _: [bench.Memory("8b text", 10.0, measured, 2.0)])
    findings = bench.Findings(None)
    assert bench.measure(None, findings) == passes
    assert ("FAILED" in capsys.readouterr().out) != passes
    assert findings.found["memory"][0]["passed"] == passes


def test_nan_is_null_in_json(bench: ModuleType, tmp_path: Path) -> None:
    from scripts._gpu_checks import Check

    findings = bench.Findings(tmp_path / "found.json")
    findings.add("checks", Check("varlen", "out", float("nan"), 1.0, "RuntimeError: no kernel"), passed=False)
    (check,) = json.loads((tmp_path / "found.json").read_text())["checks"]
    assert check["error"] is None


def test_dense_attention_has_the_same_flops(bench: ModuleType) -> None:
    from scripts._gpu_models import mixed_lengths

    lengths = mixed_lengths(8192)
    assert sum(lengths) == 8192
    assert min(lengths) >= 32
    assert max(lengths) <= 4096
    squares = sum(length * length for length in lengths)
    num_rows, length = bench.dense_shape(8192, squares)
    assert num_rows * length == pytest.approx(8192, rel=0.1)
    assert num_rows * length**2 == pytest.approx(squares, rel=0.1)
    assert bench.dense_shape(8192, 8 * 1024**2) == (8, 1024)


def test_model_sizes_match_their_names() -> None:
    from transformers import Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

    from scripts._gpu_models import SIZES, text_config, vision_config

    billions = {"1b": (1.72, 2.13), "4b": (4.02, 4.44), "8b": (8.19, 8.77)}
    for name, expected_sizes in billions.items():
        with torch.device("meta"):
            models = (
                Qwen3ForCausalLM(text_config(SIZES[name])),
                Qwen3VLForConditionalGeneration(vision_config(SIZES[name])),
            )
        sizes = [sum(parameter.numel() for parameter in model.parameters()) / 1e9 for model in models]
        assert sizes == pytest.approx(expected_sizes, abs=0.01)
