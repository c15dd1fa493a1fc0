"""``packtool simulate`` as a user meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.config.simulate import STRATEGIES
from packtool.planning.cost import MODEL_PRESETS
from packtool.report.simulation import duration
from tests.cache.conftest import model as model
from tests.cache.conftest import rows as rows
from tests.cache.conftest import run_export as run_export
from tests.cli.test_plan import Tags

SMALL = ("--steps", "2", "--model", "qwen2.5-0.5b", "--bucket-size", "26K")


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert run(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--distribution", "wikipedia", *SMALL]) == 0
    out = capsys.readouterr().out
    for message in ("Skrull", "context parallel for all", "1.00x", "2 steps were simulated", "n / (n + 300)", "GB/s"):
        assert message in out
    widths = {len(line) for line in out.splitlines()[1 : 2 + len(STRATEGIES)]}
    assert len(widths) == 1


def test_figures_and_their_seed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--distribution", "chatqa2", *SMALL, "--strategies", "context-parallel", "skrull")
    figures = simulated(capsys, *words)
    assert [one["strategy"] for one in figures["strategies"]] == ["context-parallel", "skrull"]
    assert figures["strategies"][0]["speedup"] == 1 < figures["strategies"][1]["speedup"]
    assert figures["bucket_size"] == 26 * 1024
    assert figures["baseline"] == "context-parallel"
    repeated = simulated(capsys, *words)
    assert {**repeated, "seconds": 0} == {**figures, "seconds": 0}
    assert simulated(capsys, *words, "--seed", "7")["strategies"] != figures["strategies"]


def test_dropped_and_local_samples_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--distribution", "wikipedia", *SMALL]) == 0
    out = capsys.readouterr().out
    for message in (
        "not simulated",
        "vision and audio towers",
        "local tokens",
        "(ZeRO-2)",
        "4 of 8 GPUs, by allgather",
    ):
        assert message in out


def test_sharded_weights_and_ways_to_share(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--distribution", "wikipedia", "--steps", "1", "--bucket-size", "8K", "--strategies", "packed-shared")
    times = {}
    for stage in ("2", "3"):
        for parallel_type in ("ulysses", "ring", "allgather"):
            figures = simulated(capsys, *words, "--zero-stage", stage, "--sequence-parallel-type", parallel_type)
            assert (figures["zero_stage"], figures["sequence_parallel_type"]) == (int(stage), parallel_type)
            times[stage, parallel_type] = figures["strategies"][0]["step_seconds"]
    assert len(set(times.values())) == 6
    assert simulated(capsys, *words)["sequence_parallel_type"] == "ulysses"


def test_only_labels_of_a_cache_cost_logits(
    run_export: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_export()
    by_cache = simulated(capsys, str(tmp_path / "cache"), "--steps", "1", "--strategies", "padded")["strategies"][0]
    reader = CacheReader.open((str(tmp_path / "cache"),))
    np.save(tmp_path / "lengths.npy", reader.index.length)
    words = ("--lengths", str(tmp_path / "lengths.npy"), "--model", "8b", "--steps", "1", "--strategies", "padded")
    by_lengths = simulated(capsys, *words)["strategies"][0]
    assert reader.index.target_tokens.sum() < reader.index.length.sum()
    assert by_cache["tokens_per_step"] == by_lengths["tokens_per_step"]
    assert by_cache["mfu"] < by_lengths["mfu"]


def test_lengths_of_a_cache_and_of_a_file(
    run_export: Callable[..., Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_export()
    figures = simulated(capsys, str(tmp_path / "cache"))
    assert (figures["source"], figures["model"]) == (str(tmp_path / "cache"), "8b")  # the cache's model tells no sizes
    assert figures["strategies"][0]["steps"] == 1
    np.save(tmp_path / "lengths.npy", np.array([100, 200, 300, 10**7]))
    words = ("--lengths", str(tmp_path / "lengths.npy"), "--max-length", "250", "--model")
    assert run(["simulate", *words, str(model)]) == 2
    assert "lacks the sizes of the model: 'hidden_size'" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(MODEL_PRESETS["qwen2.5-7b"]))
    figures = simulated(capsys, *words, str(tmp_path))
    assert (figures["num_samples"], figures["filtered"]) == (2, 2)
    assert figures["model_sizes"]["num_layers"] == 28


def test_hardware_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    numbers = "peak_tflops: 100\nmemory_gb: 32\nhbm_gb_per_s: 1000\nintra_node_gb_per_s: 100\n"
    path.write_text(numbers + "inter_node_gb_per_s: 10\nname: mine\n")
    words = ("--distribution", "wikipedia", *SMALL[:4], "--hardware", str(path))
    assert simulated(capsys, *words)["hardware"]["name"] == "mine"
    path.write_text(numbers)
    assert run(["simulate", *words]) == 2
    assert "inter_node_gb_per_s is missing" in capsys.readouterr().err
    path.write_text("[1, 2]")
    assert run(["simulate", *words]) == 2
    assert "not a list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either caches, or --lengths FILE, or --distribution NAME"),
        (("--distribution", "wikipedia", "--world-size", "30"), "--world-size 30 is not a multiple"),
        (("--distribution", "wikipedia", "--bucket-size", "many"), "as in 8192 or 26K"),
        (("--distribution", "wikipedia", "--bucket-size", "1K", "--packing-length", "2000"), "no pack would fit"),
        (("--distribution", "wikipedia", "--strategies", "magic"), "known are padded, packed"),
        (("--distribution", "wikipedia", "--shared-batch-size", "65"), "is greater than --sequences-per-rank 64"),
        (("--distribution", "wikipedia", "--hardware", "b900"), "neither h100, h200, a100, 910b nor"),
        (("--distribution", "wikipedia", "--model", "nowhere"), "no config.json in this directory"),
        (("--distribution", "wikipedia", "--zero-stage", "1"), "--zero-stage"),
        (
            ("--distribution", "wikipedia", "--model", "qwen2.5-0.5b", "--sequence-parallel-type", "ulysses"),
            "14 heads of Q and 2 of K and V cannot be shared evenly by 8 GPUs",
        ),
        (("--distribution", "books"), "books"),
    ],
)
def test_invalid_settings_are_reported(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *words]) == 2
    assert message in capsys.readouterr().err


def test_missing_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--lengths", str(tmp_path / "gone.npy")]) == 5
    assert run(["simulate", "--distribution", "wikipedia", "--hardware", str(tmp_path / "gone.yaml")]) == 5
    assert run(["simulate", "--distribution", "wikipedia", "--bucket-size", "1", "--world-size", "8"]) == 3
    assert "gone.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("world_size", ["32", "256"])
def test_the_page(world_size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    words = ("--distribution", "wikipedia", *SMALL, "--world-size", world_size)
    simulated(capsys, *words, "--html", str(path))
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert "http" not in text
    assert text.count('class="timeline"') == len(STRATEGIES)
    assert ("slowest" in text) == (world_size == "256")
    for message in ("Skrull", "Time for the same tokens", "exposed communication", "Assumptions"):
        assert message in text
    assert len(text) < 3e6


def test_bars_are_to_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of strategies that are slower than any that fits into memory."""
    path = tmp_path / "page.html"
    words = ("--distribution", "chatqa2", "--steps", "2", "--html", str(path))
    strategies = simulated(capsys, *words)["strategies"]
    slow = [one for one in strategies if one["out_of_memory_steps"] and one["speedup"] < 0.9]
    assert len(slow) >= 2
    bars = re.findall('<span class="bar-parts[^>]*>(.*?)</span>', path.read_text())
    lengths = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in bars]
    assert max(lengths) == pytest.approx(100, abs=0.1)
    for one, length in zip(strategies, lengths, strict=True):
        assert length * one["speedup"] == pytest.approx(lengths[0] * strategies[0]["speedup"], rel=2e-3)
    figures = re.findall(r"<b>([\d.]+)x</b>", path.read_text())
    assert figures == [f"{one['speedup']:.2f}" for one in strategies]


def test_a_page_is_named_after_the_cache(
    run_export: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_export()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    simulated(capsys, "../cache", "--steps", "1", "--html", "page.html")
    assert "<title>cache: 8b on 32 x H100" in Path("page.html").read_text()


def test_durations() -> None:
    durations = [duration(seconds) for seconds in (0, 1.2e-5, 0.0363, 0.9994, 1.157, 12.34, 123.4)]
    assert durations == ["0", "0.0120 ms", "36.3 ms", "999 ms", "1.16 s", "12.3 s", "123 s"]
