from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtool
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.simulate.hardware import HARDWARE_PRESETS
from tests.cache.conftest import model as model
from tests.cache.conftest import rows as rows
from tests.cache.conftest import run_export as run_export


@pytest.fixture
def cache(run_export: Callable[..., Any], tmp_path: Path) -> str:
    run_export()
    return str(tmp_path / "cache")


def plan_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert run(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["npy", "json", "txt"])
def test_lengths_of_a_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(0).integers(10, 1000, 5000)
    path = tmp_path / f"lengths.{kind}"
    if kind == "npy":
        np.save(path, lengths)
    else:
        path.write_text(json.dumps(lengths.tolist()) if kind == "json" else "\n".join(map(str, lengths)))
    figures = plan_json(
        capsys, "--lengths", str(path), "--packing-length", "2048", "--world-size", "4", "--tflops", "100"
    )
    assert figures["num_samples"] == 5000
    assert figures["tokens"] == int(lengths.sum())
    assert figures["packing_length"] == 2048
    assert figures["lower_bound"] <= figures["num_packs"] <= figures["lower_bound"] * 1.01
    assert figures["fill"] == pytest.approx(figures["tokens"] / figures["num_packs"] / 2048)
    assert figures["over_lower_bound"] == pytest.approx(figures["num_packs"] / figures["lower_bound"] - 1)
    assert figures["steps_per_epoch"] == -(-figures["num_packs"] // 4)
    assert figures["steps_without_packing"] == 1250
    assert 0 < figures["padding_of_plain_batches"] < 1
    assert figures["balance"]["mean"] >= 1
    assert figures["hours"] > 0
    assert figures["plan_seconds"] >= 0
    filtered = plan_json(capsys, "--lengths", str(path), "--packing-length", "512")
    assert filtered["filtered"] == int((lengths > 512).sum())


def test_printed_plan_is_the_one_that_is_trained(cache: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    path = str(tmp_path / "a.plan")
    options = ["--packing-length", "400", "--seed", "3"]
    figures = plan_json(capsys, cache, *options, "--save", path)
    saved = read_plan(path)
    assert len(saved.offsets) - 1 == figures["num_packs"]
    train = ["train", "--model", str(model), "--cached-dataset", cache, "--packing", "true", "--dry-run"]
    train += ["--output-dir", str(tmp_path / "out")]
    assert run([*train, *options]) == 0
    message = capsys.readouterr()
    assert f"packs: {figures['num_packs']}" in message.err + message.out
    assert run([*train, "--plan", path]) == 0
    message = capsys.readouterr()
    assert f"packs: {figures['num_packs']}" in message.err + message.out
    assert run([*train, "--plan", path, "--packing-length", "500"]) == 4
    assert "--packing-length: 400 in the plan, 500 in this run" in capsys.readouterr().err
    assert run([*train, "--plan", cache + "/packtool.json"]) == 4


def test_costs_of_unknown_sizes_are_named(cache: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    """The model of this test has no sizes in its config.json; a copy has."""
    unknown = plan_json(capsys, cache)["cost_model"]
    assert unknown == f"a dense model of 8 billion weights, because the config.json of {model} lacks sizes"
    directory = tmp_path / "sized"
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    config["text_config"] = config.get("text_config", {}) | text
    (directory / "config.json").write_text(json.dumps(config))
    assert plan_json(capsys, cache, "--model", str(directory))["cost_model"] == str(directory)
    config["text_config"]["model_type"] = "other"
    (directory / "config.json").write_text(json.dumps(config))
    estimated = plan_json(capsys, cache, "--model", str(directory))["cost_model"]
    assert (
        estimated == f"{directory}, by formulas for other models, because transformers cannot run a model of its type"
    )


def test_samples_per_step(cache: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    """Planned and trained alike, and sparing the advice that packs call for."""
    options = ["--packing-length", "400", "--world-size", "2"]
    plain, limited = plan_json(capsys, cache, *options), plan_json(capsys, cache, *options, "--samples-per-step", "2")
    assert plain["samples_per_step_without_packing"] == limited["samples_per_step_without_packing"] == 2
    assert plain["samples_per_step"] > 2 >= limited["samples_per_step"]
    assert limited["steps_per_epoch"] == limited["steps_without_packing"] == plain["steps_without_packing"]
    capsys.readouterr()
    assert run(["plan", cache, *options]) == 0
    message = capsys.readouterr().out
    assert "--samples-per-step 2 keeps that batch" in message
    assert "Malladi" in message
    assert "Goyal" in message
    assert run(["plan", cache, *options, "--samples-per-step", "2", "--html", str(tmp_path / "plan.html")]) == 0
    message = capsys.readouterr().out
    assert "as without packing: each has the 2 samples that it has without packing" in message
    assert "Malladi" not in message
    assert run(["plan", cache, *options, "--samples-per-step", "2", "--save", str(tmp_path / "p")]) == 2
    assert "--save writes packs" in capsys.readouterr().err


class Tags(HTMLParser):
    """Counts what is opened, and what it points to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect", "line", "circle", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line", "circle"):
            assert self.open.pop() == tag


def test_page_is_self_contained(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    figures = plan_json(capsys, cache, "--world-size", "4", "--html", str(path))
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.links == []
    assert "http" not in text
    for words in (
        f"{figures['num_packs']:,}",
        figures["plan_fingerprint"],
        "packs to scale",
        "dropped at export: invalid_json",
    ):
        assert words in re.sub("<[^>]*>", "", text)
    assert "<title>cache · packtool plan</title>" in text, "the cache's name, not its path"
    assert text.count("<svg") >= 5


def test_a_sweep_has_a_row_for_each_length(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = plan_json(capsys, cache, "--sweep", "200,400,800")
    assert [row["packing_length"] for row in table] == [200, 400, 800]
    assert table[0]["num_packs"] > table[1]["num_packs"] > table[2]["num_packs"]
    assert run(["plan", cache, "--sweep", "200,400"]) == 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 3
    html = Path(cache).parent / "sweep.html"
    assert run(["plan", cache, "--sweep", "200,400", "--html", str(html)]) == 0
    assert capsys.readouterr().out.endswith(f"written: {html}\n")
    tags = Tags()
    tags.feed(html.read_text())
    assert (tags.open, tags.links) == ([], [])
    assert "<title>cache · packtool plan --sweep</title>" in html.read_text()
    assert run(["plan", cache, "--sweep", "200,400", "--save", str(html)]) == 2
    assert "--save writes one plan" in capsys.readouterr().err


def test_terminal_output(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", cache]) == 0
    message = capsys.readouterr().out
    for words in (
        "above the lower bound",
        "slowest rank ÷ mean rank",
        "samples by tokens",
        "packs by fill in percent",
        "█",
    ):
        assert words in message


def test_skrull(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [cache, "--world-size", "8", "--sequence-parallel-size", "4", "--gradient-accumulation-steps", "4"]
    skrull = [*words, "--schedule", "skrull", "--bucket-size", "256", "--hardware", "a100"]
    plain = plan_json(capsys, *words, "--tflops", "100", "--save", str(tmp_path / "a.plan"))
    html = tmp_path / "plan.html"
    skrull_figures = plan_json(
        capsys, *skrull, "--tflops", "100", "--save", str(tmp_path / "b.plan"), "--html", str(html)
    )
    assert plain["skrull"] is None
    assert skrull_figures["plan_fingerprint"] != plain["plan_fingerprint"]
    same = ("num_samples", "num_packs", "steps_per_epoch", "tokens", "flops_per_epoch", "padding_of_plain_batches")
    for name in same:
        assert skrull_figures[name] == pytest.approx(plain[name]), name
    figures = skrull_figures["skrull"]
    assert figures["hardware"] == HARDWARE_PRESETS["a100"].name
    assert (figures["bucket_size"], figures["sequence_parallel_size"]) == (256, 4)
    assert figures["local_tokens"] + figures["sharded_tokens"] == skrull_figures["tokens"]
    assert 0 < figures["bucket_fill"] <= 1
    assert figures["micro_batches"] >= skrull_figures["tokens"] / (256 * 4)
    assert figures["device_balance"]["worst"] >= figures["device_balance"]["mean"] >= skrull_figures["balance"]["mean"]
    assert skrull_figures["hours"] > 0
    # The packs say what shares a step; Skrull assigns their samples to different ranks.
    of_skrull, saved = (read_plan(str(tmp_path / name)) for name in ("b.plan", "a.plan"))
    assert of_skrull.offsets.tolist() == saved.offsets.tolist()
    assert of_skrull.locations is not None
    assert saved.locations is not None
    assert of_skrull.locations[:, 0].tolist() == saved.locations[:, 0].tolist()
    step, rank, micro_batch = of_skrull.locations[-1].tolist()
    options = {"sequence_parallel_size": 4, "gradient_accumulation_steps": 4, "schedule": "skrull", "bucket_size": 256}
    steps = packtool.plan(cache, world_size=8, hardware="a100", **options).steps
    assert (int(of_skrull.samples[-1]),) in steps[step].micro_batches[rank][micro_batch]
    assert f'{figures["bucket_fill"]:.2%}</p><p class="what">fill of the micro-batches' in html.read_text()
    assert "A rank here is 4 processes" in html.read_text()
    assert run(["plan", *skrull]) == 0
    message = capsys.readouterr().out
    for line in (
        "micro-batches by Skrull",
        "fill of the micro-batches",
        "computed on one process",
        "split over 4 processes",
    ):
        assert line in message
    assert run(["plan", *words, "--schedule", "skrull", "--bucket-size", "10"]) == 2
    assert "--bucket-size 10: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule", "skrull", "--bucket-size", "auto"], "--bucket-size auto measures a GPU"),
        ([], "give either caches"),
        (["--lengths", "x.npy"], "--packing-length is missing"),
        (["--lengths", "x.npy", "--packing-length", "9", "--save", "y"], "--save requires caches"),
        (["--lengths", "x.npy", "--sweep", "a,b"], "--sweep a,b"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_invalid_lengths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("[1, 2.5]")
    (tmp_path / "a.csv").write_text("1")
    assert run(["plan", "--lengths", str(tmp_path / "a.json"), "--packing-length", "9"]) == 3
    assert run(["plan", "--lengths", str(tmp_path / "a.csv"), "--packing-length", "9"]) == 2
    assert run(["plan", "--lengths", str(tmp_path / "gone.npy"), "--packing-length", "9"]) == 5


def test_ctrl_c_prints_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def pressed(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("packtool.library.planned.preview", pressed)
    (tmp_path / "lengths.txt").write_text("3 4 5")
    assert run(["plan", "--lengths", str(tmp_path / "lengths.txt"), "--packing-length", "8"]) == 130
    assert capsys.readouterr().err == "packtool: interrupted\n"


def test_media_of_this_machine(cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [cache, "--packing-length", "400", "--world-size", "2", "--media"]
    figures = plan_json(capsys, *words, "--hardware", "h100")
    (pictures,) = figures["media"]["kinds"]
    assert (pictures["kind"], pictures["measured"]) == ("pictures", 32)
    num_pictures = int(CacheReader.open((cache,)).index.num_images.sum())
    assert figures["filtered"] == 0
    assert pictures["per_step"] == pytest.approx(num_pictures / figures["steps_per_epoch"] / 2)
    sizes = [(tmp_path / f"{i}.png").stat().st_size / 1e6 for i in range(5)]
    assert min(sizes) <= pictures["megabytes"] <= max(sizes)
    assert figures["media"]["waited"][str(figures["media"]["workers"])] == 0
    assert 0 < figures["media"]["waited"]["0"] < 1
    assert run(["plan", *words]) == 0
    message = capsys.readouterr().out
    assert re.search(r"pictures +32 ", message)
    assert re.search(r"--dataloader-num-workers \d+ is fast enough, and reads \S+ MB/s per rank", message)
    (tmp_path / "3.png").unlink()
    assert run(["plan", *words]) == 3
    assert "3.png: there is no such file" in capsys.readouterr().err


def test_media_cannot_be_combined_with_other_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text("5\n6\n")
    assert run(["plan", "--lengths", str(tmp_path / "lengths.txt"), "--packing-length", "9", "--media"]) == 2
    assert "--media requires caches" in capsys.readouterr().err
    assert run(["plan", str(tmp_path), "--sweep", "4K", "--media"]) == 2
    assert "remove --sweep and --fit" in capsys.readouterr().err


def test_padding_of_unpacked_batches_is_estimated_from_some_samples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 20_000)
    np.save(tmp_path / "lengths.npy", lengths)
    command = ["plan", "--lengths", str(tmp_path / "lengths.npy"), "--packing-length", "512", "--json"]
    figures = []
    for max_samples in (20_000, 3_000):
        monkeypatch.setattr("packtool.train.prepare.preview._MAX_PADDED_SAMPLES", max_samples)
        run(command)
        figures.append(json.loads(capsys.readouterr().out))
    every, some = figures
    names = [name for name in every if every[name] != some[name]]
    assert set(names) <= {"padding_of_plain_batches", "tokens_of_plain_batches", "plan_seconds"}
    assert some["padding_of_plain_batches"] == pytest.approx(every["padding_of_plain_batches"], abs=0.01)
