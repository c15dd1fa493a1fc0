"""A mixture is trained as it was planned: each source in its share, with its weight, under its name."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packtool
from packtool.cli.main import run
from packtool.config.mixture import MixOptions, parse_recipe
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.report.tables import train_lines
from packtool.report.trained import step_figures
from packtool.train.prepare.caches import portable_recipe
from packtool.train.prepare.checkpoint import Assignment
from packtool.train.prepare.figures import RankStep
from packtool.train.prepare.history import read_ledger
from packtool.train.prepare.preview import resumed_figures
from packtool.train.prepare.run import Run
from packtool.train.prepare.timeline import Timeline
from packtool.train.run import train
from tests.train.tiny import TinyWorld, check_same_rest, export_rows, read_metrics


@pytest.fixture(scope="module")
def caches(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The tiny world's, and one of the same rows with smaller pictures."""
    other = str(tmp_path_factory.mktemp("mixtures") / "small")
    export_rows(tiny, other, image_max_token_num=6)
    return tiny.cache, other


def recipe(folder: Path, caches: tuple[str, str], **second_source: Any) -> str:
    path = folder / "mix.yaml"
    sources = [
        {"path": caches[0], "samples": 2, "channel": "large"},
        {"path": caches[1], "samples": 1, **second_source},
    ]
    path.write_text(json.dumps({"sources": sources}))
    return str(path)


def mixture_config(tiny: TinyWorld, output_dir: Path, **settings: Any) -> TrainConfig:
    options = {"cached_dataset": (), "num_train_epochs": 2.0, "gradient_accumulation_steps": 4, "save_steps": 2}
    return tiny.config(output_dir, **{**options, "verify_packing": False, **settings})


def prepared(config: TrainConfig, size: int = 1) -> Run:
    return Run.of(config, World(size=size))


def test_trained_logged_and_resumed(tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path) -> None:
    mix = recipe(tmp_path, caches, loss_weight=0.5)
    result = train(mixture_config(tiny, tmp_path / "whole", mix=mix), SilentProgress())
    # An independent count of what the batches held.
    planned, counts = prepared(mixture_config(tiny, tmp_path / "other", mix=mix)), Counter[str]()
    for step in planned.steps(None).rank_steps():  # type: ignore[arg-type]
        for micro_batch in step.micro_batches:
            counts.update(str(planned.source.read(place).channel) for place in micro_batch.samples)
    assert {name: figures["num_samples"] for name, figures in result.sources.items()} == counts
    assert counts["large"] == 2 * counts["small"]
    assert result.sources["large"]["epochs"] == pytest.approx(2.0)
    assert json.loads((tmp_path / "whole" / "packtool_train.json").read_text())["sources"] == result.sources
    lines = read_metrics(tmp_path / "whole")
    assert sum(line["epochs_large"] for line in lines) == pytest.approx(2.0)
    assert all(line["share_of_samples_large"] + line["share_of_samples_small"] == pytest.approx(1) for line in lines)
    for line in lines:
        large, small = (line[f"share_of_target_tokens_{name}"] * line[f"loss_{name}"] for name in ("large", "small"))
        assert line["loss"] == pytest.approx(large + small, rel=1e-5)
        assert line["objective"] == pytest.approx(large + 0.5 * small, rel=1e-5)
    assert result.target_tokens == sum(line["target_tokens"] for line in lines)
    step = result.steps // 4 * 2 + 2  # in the second epoch, which is another draw
    resume = {"resume_from_checkpoint": str(tmp_path / "whole" / f"checkpoint-{step}")}
    train(mixture_config(tiny, tmp_path / "rest", mix=mix, **resume), SilentProgress())
    check_same_rest(tmp_path / "whole", tmp_path / "rest", step)
    for index, change in enumerate(({"loss_weight": 1.0}, {"max_length": 100})):
        other = mixture_config(tiny, tmp_path / f"other-{index}", mix=recipe(tmp_path, caches, **change), **resume)
        with pytest.raises(MismatchError, match="plan: "):
            prepared(other)
    resumed_config = mixture_config(
        tiny, tmp_path / "other", mix=recipe(tmp_path, caches, loss_weight=0.5), resample=False, **resume
    )
    with pytest.raises(MismatchError, match="plan: "):
        prepared(resumed_config)
    # The run's history keeps the recipe, for this file says something else by now.
    full_run = str(tmp_path / "whole")
    assert step_figures(f"{full_run}/checkpoint-{step}", step)["target_tokens"] == lines[step - 1]["target_tokens"]
    only = resumed_figures(PlanConfig(resume=full_run, cached_dataset=(caches[0],)))
    assert [source["fate"] for source in only["sources"]] == ["as before", "gone"]


def test_relabeled_sources_equal_exports_with_that_loss_scale(tiny: TinyWorld, tmp_path: Path) -> None:
    """Losses, shares and the plan of loss scales in a recipe are those of exports with them."""
    scales, exported = ("last_round", "all"), [str(tmp_path / scale) for scale in ("last_round", "all")]
    for scale, cache in zip(scales, exported, strict=True):
        export_rows(tiny, cache, loss_scale=scale)

    def written(name: str, *sources: dict[str, Any]) -> str:
        shares = zip(sources, (2, 3), scales, strict=True)
        each = [{**source, "target_tokens": weight, "channel": scale} for source, weight, scale in shares]
        (tmp_path / name).write_text(json.dumps({"sources": each}))
        return str(tmp_path / name)

    mixes = {
        "chosen": written("chosen.yaml", *({"path": tiny.cache, "loss_scale": scale} for scale in scales)),
        "exported": written("exported.yaml", *({"path": cache} for cache in exported)),
    }
    run_options: dict[str, Any] = {"max_steps": 2, "save_strategy": "no"}
    relabeled, there = (
        train(mixture_config(tiny, tmp_path / name, mix=mix, **run_options), SilentProgress())
        for name, mix in mixes.items()
    )
    assert (relabeled.target_tokens, relabeled.sources) == (there.target_tokens, there.sources)
    names = ("loss", "grad_norm", "target_tokens", "loss_last_round", "loss_all", "share_of_target_tokens_all")
    relabeled_lines, exported_lines = (
        [[line[name] for name in names] for line in read_metrics(tmp_path / run)] for run in mixes
    )
    assert relabeled_lines == exported_lines
    # plan knows it without a run, and a checkpoint goes on with the same scales only.
    sources = [packtool.plan(mix=mix, packing_length=256).summary["sources"] for mix in mixes.values()]
    assert sources[0] == sources[1]
    assert sources[0]["all"]["share_of_target_tokens"] == pytest.approx(0.6, abs=0.05)
    other = written("other.yaml", {"path": tiny.cache, "loss_scale": "last_round"}, {"path": tiny.cache})
    one, two = (
        prepared(mixture_config(tiny, tmp_path / "other", mix=mix, **run_options)) for mix in (mixes["chosen"], other)
    )
    assert one.state.plan != two.state.plan
    with pytest.raises(ConfigError, match=r"loss scale 'lastround': .* did you mean 'last_round'"):
        prepared(mixture_config(tiny, tmp_path, mix=recipe(tmp_path, (tiny.cache, tiny.cache), loss_scale="lastround")))


class RecordingProgress(SilentProgress):
    """Records all notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_stages_are_trained_shown_and_resumed(
    tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix, full_run, progress = tmp_path / "stages.yaml", tmp_path / "whole", RecordingProgress()
    ratios = ((2, 1), (1, 3))
    stages: list[dict[str, Any]] = [
        {"sources": [{"path": path, "samples": each} for path, each in zip(caches, pair, strict=True)]}
        for pair in ratios
    ]
    mix.write_text(json.dumps({"stages": [{"until": "50%", "packing_length": 128, **stages[0]}, stages[1]]}))
    settings: dict[str, Any] = {"mix": str(mix), "max_steps": 8, "gradient_accumulation_steps": 2}
    result = train(mixture_config(tiny, full_run, **settings), progress)
    assert (len(result.stages), train_lines(result)[0][0]) == (2, "samples of the first stage")
    assert [note for note in progress.notes if " begins" in note] == [
        "stage 1 of 2 begins: steps 1 to 4, packs of 128 tokens",
        "stage 2 of 2 begins: steps 5 to 8, packs of 256 tokens",
    ]
    # Resumed where a stage ends.
    resume = {"resume_from_checkpoint": str(full_run / "checkpoint-4")}
    train(mixture_config(tiny, tmp_path / "rest", **settings, **resume), SilentProgress())
    check_same_rest(full_run, tmp_path / "rest", 4)
    with pytest.raises(MismatchError, match="with stages, also on --max-steps"):
        prepared(mixture_config(tiny, tmp_path / "longer", **{**settings, "max_steps": 9}, **resume))
    # An independent count of what the batches held, by stage; and the ledger.
    planned, counts = prepared(mixture_config(tiny, tmp_path / "other", **settings)), Counter[int]()
    for step_index, step in enumerate(planned.steps(None).rank_steps()):  # type: ignore[arg-type]
        step_samples = [place for micro_batch in step.micro_batches for place in micro_batch.samples]
        counts.update(step_samples)
        lengths = planned.source.reader.index.length
        for micro_batch in step.micro_batches:
            assert all(sum(lengths[list(pack)]) <= (128 if step_index < 4 else 256) for pack in micro_batch.packs)
        figures = step_figures(str(full_run), step_index + 1)
        assert figures["num_samples"] == len(step_samples)
        assert figures["target_tokens"] == read_metrics(full_run)[step_index]["target_tokens"]
    ledger = read_ledger(str(full_run / "checkpoint-8"))
    assert ledger is not None
    trained = np.concatenate([source.trained.counts() for source in ledger.sources])
    assert trained.tolist() == [counts[place] for place in range(len(trained))]
    # Planned, as a loop of one's own has it, and changed from the middle on.
    options = {"packing_length": 256, "max_steps": 8, "gradient_accumulation_steps": 2}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    page = tmp_path / "plan.html"
    assert run(["plan", "--mix", str(mix), "--html", str(page), *words]) == 0
    output = capsys.readouterr().out
    assert re.search(r"stage 2 of 2, steps 5 to 8, packs of 256 tokens, \d+ samples\nsource", output)
    assert "Sources of the run" in page.read_text()
    assert "<h3>Stage 2 of 2, steps 5 to 8" in page.read_text()
    assert run(["plan", "--mix", str(mix), "--sweep", "128,256"]) == 2
    batches = packtool.Batches(packtool.plan(mix=str(mix), **options), model=tiny.model)
    assert (batches.num_steps, len(batches)) == (8, sum(len(step.micro_batches) for step in planned_steps(planned)))
    mix.write_text(json.dumps({"stages": [{"until": 3, **stages[1]}, stages[0]]}))
    other = resumed_figures(PlanConfig(resume=str(full_run / "checkpoint-2"), mix=str(mix)))
    assert [(stage["first_step"], stage["last_step"]) for stage in other["stages"]] == [(3, 3), (4, 8)]


def planned_steps(planned: Run) -> list[RankStep]:
    """The steps of a run, once more."""
    return list(planned.steps(None).rank_steps())  # type: ignore[arg-type]


def test_plan_resume_finds_shares_for_other_caches(
    tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"cached_dataset": caches, "interleave_probs": ("0.5", "0.5")}
    train(mixture_config(tiny, tmp_path, **shares, max_steps=1), SilentProgress())
    capsys.readouterr()
    assert run(["plan", "--resume", str(tmp_path), *caches, caches[0]]) == 2
    assert "2 for 3 caches" in capsys.readouterr().err


def test_portable_recipes_have_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mix.yaml").write_text("temperature: 2\nsources: [a, {path: b#20%, loss_weight: 1e-1}, {path: 's3://c/d'}]")
    recipe = parse_recipe(portable_recipe("mix.yaml").decode(), "mix.yaml", MixOptions())
    assert [source.path for source in recipe.sources] == [str(tmp_path / "a"), str(tmp_path / "b#20%"), "s3://c/d"]
    assert (recipe.temperature, recipe.sources[1].loss_weight) == (2.0, 0.1)


def test_samples_have_the_weight_and_the_name_of_their_source(
    tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path
) -> None:
    run = prepared(mixture_config(tiny, tmp_path, mix=recipe(tmp_path, caches, loss_weight=0.5)))
    of_first, of_second = run.source.read(0), run.source.read(len(run.source.reader) - 1)
    assert (of_first.channel, of_second.channel) == ("large", "small")
    assert of_first.loss_scale is None
    assert of_second.loss_scale is not None
    assert np.unique(of_second.loss_scale).tolist() == [0.5]
    assert run.source.logs_channels


def test_epoch_resumes_on_other_ranks(tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path) -> None:
    config = mixture_config(tiny, tmp_path, cached_dataset=(caches[0], f"{caches[1]}#50%"))
    one, two = (prepared(config, size) for size in (1, 2))
    assert one.state.plan == two.state.plan
    done = one.timeline.steps_per_epoch + 1  # in the second epoch, which is another draw
    resumed_timeline = Timeline.of(two.source.inputs, (Assignment(0, 1, 4, 1), Assignment(done, 2, 4, 1)))
    remaining_samples = np.sort(resumed_timeline.plan_of(1).packs.samples)
    assert len(remaining_samples)
    assert np.array_equal(remaining_samples, np.sort(one.timeline.plan_of(1).packs_from(1).samples))


def test_unsupported_settings_are_refused(tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"#0% takes nothing"):
        prepared(mixture_config(tiny, tmp_path, cached_dataset=(f"{caches[0]}#0%",)))
    with pytest.raises(ConfigError, match=r"--mix none\.yaml: there is no such file"):
        prepared(mixture_config(tiny, tmp_path, mix="none.yaml"))
    weighed = f"{caches[0]}#50%", caches[1]
    with pytest.raises(ConfigError, match="remove the amount"):
        prepared(mixture_config(tiny, tmp_path, cached_dataset=weighed, mix_strategy="interleave_under"))


def test_plan_prints_draws_and_saves_the_shares(
    tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", f"{caches[0]}#1.5x", f"{caches[1]}#10", "--packing-length", "256"]
    page = tmp_path / "plan.html"
    assert run([*words, "--html", str(page)]) == 0
    assert "samples of each source in an epoch" in capsys.readouterr().out
    assert "Sources of the epoch" in page.read_text()
    assert run([*words, "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert sources["small"]["num_samples"] == 10
    assert sources["cache"]["epochs"] == pytest.approx(1.5, abs=0.05)
    saved = str(tmp_path / "a.plan")
    assert run([*words, "--save", saved]) == 0
    loaded_run = prepared(tiny.config(tmp_path, cached_dataset=caches, plan=saved, gradient_accumulation_steps=1))
    trained = loaded_run.timeline.first_plan.packs.samples
    assert len(trained) == sum(each["num_samples"] for each in sources.values())
    summary = loaded_run.timeline.first_plan.summary
    assert (summary.num_filtered, summary.num_not_drawn) == (summary.num_cached - len(np.unique(trained)), 0)


@settings(max_examples=8, deadline=None)
@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=2),
    first_source=st.fixed_dictionaries(
        {}, optional={"min_length": st.just(60), "max_length": st.just(110), "loss_weight": st.just(0.5)}
    ),
    stop=st.sampled_from(["first", "all"]),
    stages=st.booleans(),
)
def test_parts_of_the_samples_add_up_everywhere(
    caches: tuple[str, str], weights: list[int], first_source: dict[str, Any], stop: str, stages: bool
) -> None:
    sources = [{"path": path, "samples": weight} for path, weight in zip(caches, weights, strict=True)]
    sources[0] |= first_source
    recipe: dict[str, Any] = {"sources": sources}
    if stages:
        recipe = {"stages": [{"until": "50%", "sources": sources}, {"sources": sources[::-1]}]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mix.yaml")
        path.write_text(json.dumps(recipe))
        plan = packtool.plan(mix=str(path), packing_length=256, mix_stop=stop, **({"max_steps": 9} if stages else {}))
        plan.page(Path(folder, "plan.html"))
        page = re.sub(r"<[^>]*>", "|", Path(folder, "plan.html").read_text())
    summary, cached = plan.summary, len(plan.preview.inputs.lengths)
    for figures in (summary, *(summary["stages"] or ())):
        assert figures["num_samples_in_caches"] == cached
        assert figures["num_distinct_samples"] + figures["not_drawn"] + figures["filtered"] == cached
        assert min(figures["not_drawn"], figures["filtered"]) >= 0
    figures_by_name = {label.strip(): figure for label, figure in plan.lines}
    names = ("samples", "repeated samples", "not drawn", "filtered by length", "samples in the caches")
    samples, repeats, not_drawn, filtered, in_caches = (int(figures_by_name[name].replace(",", "")) for name in names)
    assert samples - repeats + not_drawn + filtered == in_caches == cached
    section = page[page.index("Use of the samples") : page.index("Sources of the ")]
    assert f"{cached:,} samples in all" in section
    parts = re.findall(r"\|([\d,]+)\|+[<>]? ?[\d.]+%", html.unescape(section))
    assert sum(int(part.replace(",", "")) for part in parts) == cached


@pytest.mark.parametrize("stop", ["first", "all"])
def test_the_table_of_a_run_adds_up(stop: str, tiny: TinyWorld, caches: tuple[str, str], tmp_path: Path) -> None:
    mix = recipe(tmp_path, caches, min_length=60)
    result = train(mixture_config(tiny, tmp_path / "run", mix=mix, mix_stop=stop, dry_run=True), SilentProgress())
    figures_by_name = {label.strip(): figure for label, figure in train_lines(result)}
    names = ("samples", "repeated samples", "not drawn", "filtered by length")
    samples, repeats, not_drawn, filtered = (int(figures_by_name.get(name, "0").replace(",", "")) for name in names)
    assert (repeats if stop == "all" else not_drawn) > 0
    assert filtered > 0
    assert samples - repeats + not_drawn + filtered == 80, "what the two caches hold"


def test_each_mixed_row_source_gets_a_cache(tiny: TinyWorld, tmp_path: Path) -> None:
    rows = {"cached_dataset": (), "dataset": (tiny.rows, f"{tiny.rows}#50%"), "max_length": 128}
    config = mixture_config(tiny, tmp_path, **rows, interleave_probs=("0.5", "0.5"), cache_dir=str(tmp_path / "caches"))
    assert not config.problems()
    result = train(dataclasses.replace(config, dry_run=True), SilentProgress())
    assert [each["share_of_samples"] for each in result.sources.values()] == [0.5, 0.5]
