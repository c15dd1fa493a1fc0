"""A mixture is trained as it was planned: each source in its share, with its weight, under its name."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cli.main import run
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.prepare.cached import CachedRun, prepare_cached
from packtool.train.run import train
from tests.train.tiny import TinyWorld, check_same_rest, export_rows, read_metrics


@pytest.fixture(scope="module")
def caches(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The tiny world's, and one of the same rows with smaller pictures."""
    other = str(tmp_path_factory.mktemp("mixtures") / "small")
    export_rows(tiny, other, image_max_token_num=6)
    return tiny.cache, other


def recipe(folder: Path, caches: tuple[str, str], **second: Any) -> str:
    path = folder / "mix.yaml"
    sources = [{"path": caches[0], "samples": 2, "channel": "large"}, {"path": caches[1], "samples": 1, **second}]
    path.write_text(json.dumps({"sources": sources}))
    return str(path)


def mixed(tiny: TinyWorld, output_dir: Path, **settings: Any) -> TrainConfig:
    given = {"cached_dataset": (), "num_train_epochs": 2.0, "gradient_accumulation_steps": 4, "save_steps": 2}
    return tiny.config(output_dir, **{**given, "verify_packing": False, **settings})


def prepared(config: TrainConfig, size: int = 1) -> CachedRun:
    return prepare_cached(config, World(size=size))


def test_trained_logged_and_resumed(tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path) -> None:
    mix = recipe(tmp_path, caches, loss_weight=0.5)
    result = train(mixed(tiny, tmp_path / "whole", mix=mix), SilentProgress())
    # An independent count of what the batches held.
    planned, counts = prepared(mixed(tiny, tmp_path / "other", mix=mix)), Counter[str]()
    for step in planned.steps(None).drawn():  # type: ignore[arg-type]
        for micro_batch in step.micro_batches:
            counts.update(str(planned.samples.sample(place).channel) for place in micro_batch.samples)
    assert {name: figures["num_samples"] for name, figures in result.sources.items()} == counts
    assert counts["large"] == 2 * counts["small"]
    assert result.sources["large"]["epochs"] == pytest.approx(2.0)
    assert json.loads((tmp_path / "whole" / "packtool_train.json").read_text())["sources"] == result.sources
    lines = read_metrics(tmp_path / "whole")
    assert sum(line["epochs_large"] for line in lines) == pytest.approx(2.0)
    assert all(line["share_of_samples_large"] + line["share_of_samples_small"] == pytest.approx(1) for line in lines)
    assert {"loss_large", "loss_small"} <= lines[0].keys()
    assert result.target_tokens == sum(line["target_tokens"] for line in lines)
    step = result.steps // 4 * 2 + 2  # in the second epoch, which is another draw
    resume = {"resume_from_checkpoint": str(tmp_path / "whole" / f"checkpoint-{step}")}
    train(mixed(tiny, tmp_path / "rest", mix=mix, **resume), SilentProgress())
    check_same_rest(tmp_path / "whole", tmp_path / "rest", step)
    for number, change in enumerate(({"loss_weight": 1.0}, {"max_length": 100})):
        other = mixed(tiny, tmp_path / f"other-{number}", mix=recipe(tmp_path, caches, **change), **resume)
        with pytest.raises(MismatchError, match="plan: "):
            prepared(other)
    kept = mixed(tiny, tmp_path / "other", mix=recipe(tmp_path, caches, loss_weight=0.5), resample=False, **resume)
    with pytest.raises(MismatchError, match="plan: "):
        prepared(kept)


def test_samples_have_the_weight_and_the_name_of_their_source(
    tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path
) -> None:
    found = prepared(mixed(tiny, tmp_path, mix=recipe(tmp_path, caches, loss_weight=0.5)))
    of_first, of_second = found.samples.sample(0), found.samples.sample(len(found.reader) - 1)
    assert (of_first.channel, of_second.channel) == ("large", "small")
    assert of_first.loss_scale is None
    assert of_second.loss_scale is not None
    assert np.unique(of_second.loss_scale).tolist() == [0.5]
    assert found.tells_channels


def test_other_processes_go_on_with_the_same_epoch(tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path) -> None:
    config = mixed(tiny, tmp_path, cached_dataset=(caches[0], f"{caches[1]}#50%"))
    one, two = (prepared(config, size) for size in (1, 2))
    assert one.state.plan == two.state.plan
    done = one.schedule.steps_per_epoch + 1  # in the second epoch, which is another draw
    rest = two.planner.schedule(((0, 1, 4, 1), (done, 2, 4, 1)))
    left = np.sort(rest.plan_of(1).packs.samples)
    assert len(left)
    assert np.array_equal(left, np.sort(one.schedule.plan_of(1).packs_from(1).samples))


def test_what_is_refused(tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"#0% takes nothing"):
        prepared(mixed(tiny, tmp_path, cached_dataset=(f"{caches[0]}#0%",)))
    with pytest.raises(ConfigError, match=r"--mix none\.yaml: there is no such file"):
        prepared(mixed(tiny, tmp_path, mix="none.yaml"))
    weighed = f"{caches[0]}#50%", caches[1]
    with pytest.raises(ConfigError, match="leave out the #"):
        prepared(mixed(tiny, tmp_path, cached_dataset=weighed, mix_strategy="interleave_under"))


def test_plan_prints_and_draws_the_shares(
    caches: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", f"{caches[0]}#1.5x", f"{caches[1]}#10", "--packing-length", "256"]
    page = tmp_path / "plan.html"
    assert run([*words, "--html", str(page)]) == 0
    assert "what an epoch has of each source" in capsys.readouterr().out
    assert "What the epoch has of each source" in page.read_text()
    assert run([*words, "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert sources["small"]["num_samples"] == 10
    assert sources["cache"]["epochs"] == pytest.approx(1.5, abs=0.05)
    saved = str(tmp_path / "a.plan")
    assert run([*words, "--save", saved]) == 0


def test_rows_that_are_mixed_become_a_cache_each(tiny: TinyWorld, tmp_path: Path) -> None:
    rows = {"cached_dataset": (), "dataset": (tiny.rows, f"{tiny.rows}#50%"), "max_length": 128}
    config = mixed(tiny, tmp_path, **rows, interleave_probs=("0.5", "0.5"), cache_dir=str(tmp_path / "caches"))
    assert not config.problems()
    result = train(dataclasses.replace(config, dry_run=True), SilentProgress())
    assert [each["share_of_samples"] for each in result.sources.values()] == [0.5, 0.5]
