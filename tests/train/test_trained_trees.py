"""Runs that compute shared prefixes once: the steps of whole samples, resumed, evaluated, streamed, on processes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from packtool.cli.main import run
from packtool.config.plan import PlanConfig
from packtool.errors import EXIT_USAGE, MismatchError
from packtool.progress import SilentProgress
from packtool.train.prepare.preview import preview
from packtool.train.run import train
from tests.forked import run_ranks
from tests.train.alike import alike_rows, make_alike_world
from tests.train.jobs import Job, run_jobs
from tests.train.test_gradients import DESCENT as STEP
from tests.train.test_gradients import check_before, check_same_step
from tests.train.tiny import TinyWorld, check_same_rest, export_rows, read_metrics

DESCENT: dict[str, Any] = STEP | {"enable_channel_loss": True}
WHOLE: dict[str, Any] = {"share_prefix": "false", "per_device_train_batch_size": 40}
PADDED: dict[str, Any] = {"packing": False, "per_device_train_batch_size": 40}
# 6 packs of 256 tokens: trees of five samples, and samples that share nothing.
ONE_PROCESS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"per_device_train_batch_size": 16},
    "accumulated": {"gradient_accumulation_steps": 16},
    "cut trees": {"gradient_accumulation_steps": 32, "max_rows_per_tree": 2},
    "workers": {"gradient_accumulation_steps": 16, "dataloader_num_workers": 1},
    "checkpointed": {"gradient_accumulation_steps": 16, "gradient_checkpointing": True},
    "compiled": {"gradient_accumulation_steps": 16, "torch_compile": True, "torch_compile_backend": "eager"},
    "in the cache's order": {"gradient_accumulation_steps": 16, "shuffle": False, "packing_algorithm": "sequential"},
}
TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "ddp": {"gradient_accumulation_steps": 8},
    "fsdp": {"gradient_accumulation_steps": 8, "fsdp": ["full_shard"]},
    # Sequences that both share.
    **{
        kind: {"gradient_accumulation_steps": 16, "sequence_parallel_size": 2, "sequence_parallel_type": kind}
        for kind in ("ulysses", "ring", "allgather")
    },
}
COUNTED = ("sample", "source", "row", "channel", "tokens", "target_tokens", "token_accuracy", "first_wrong")
RESUMED: dict[str, Any] = {"num_train_epochs": 2.0, "save_steps": 1, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def alike_world(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_alike_world(tiny, tmp_path_factory.mktemp("alike"))


@pytest.fixture(scope="module")
def reference(alike_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All samples in one padded batch of one process, with transformers' own attention."""
    output_dir = tmp_path_factory.mktemp("reference")
    train(alike_world.config(output_dir, **DESCENT, **PADDED), SilentProgress())
    return output_dir


def check_step(output_dir: Path, reference: Path) -> None:
    """One step like the reference's, with the means of each channel, whose rows share prefixes with the other's."""
    check_same_step(output_dir, reference)
    (line,), (expected,) = read_metrics(output_dir), read_metrics(reference)
    for name in ("loss_a", "loss_b", "loss_none", "token_accuracy_a", "token_accuracy_b", "token_accuracy_none"):
        assert line[name] == pytest.approx(expected[name], rel=1e-6)
    assert len({expected[f"loss_{name}"] for name in ("a", "b", "none")}) == 3


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_step_equals_that_of_unshared_samples(
    name: str, alike_world: TinyWorld, reference: Path, tmp_path: Path
) -> None:
    result = train(alike_world.config(tmp_path, **DESCENT, **ONE_PROCESS[name], share_prefix="true"), SilentProgress())
    assert result.steps == 1
    check_step(tmp_path, reference)
    (line,), (padded,) = read_metrics(tmp_path), read_metrics(reference)
    assert line["tokens"] < 0.75 * padded["tokens"]


def streamed(world: TinyWorld, **settings: Any) -> dict[str, Any]:
    return world.streamed() | {"max_length": 160, "packing_interval": 40} | settings


def test_a_stream_shares_within_an_interval(alike_world: TinyWorld, reference: Path, tmp_path: Path) -> None:
    options = streamed(alike_world, **DESCENT, gradient_accumulation_steps=16)
    result = train(alike_world.config(tmp_path, **options), SilentProgress())
    assert (result.steps, result.num_samples) == (1, 36)
    check_step(tmp_path, reference)
    (line,), (padded,) = read_metrics(tmp_path), read_metrics(reference)
    assert result.num_shared_tokens > 0.4 * padded["tokens"]
    assert line["tokens"] == padded["tokens"] - result.num_shared_tokens


def test_a_stream_resumes_exactly(alike_world: TinyWorld, tmp_path: Path) -> None:
    """With prefixes shared in each interval of eleven rows, in the middle of one."""
    options = streamed(alike_world, **RESUMED | {"packing_interval": 11, "shuffle_buffer_size": 3})
    result = train(alike_world.config(tmp_path / "whole", **options), SilentProgress())
    assert result.num_shared_tokens > 0
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    train(alike_world.config(tmp_path / "resumed", **options, resume_from_checkpoint=checkpoint), SilentProgress())
    check_same_rest(tmp_path / "whole", tmp_path / "resumed", 4)
    with pytest.raises(MismatchError, match="shares_prefixes: True in the checkpoint, False now"):
        train(
            alike_world.config(tmp_path / "other", **options, resume_from_checkpoint=checkpoint, share_prefix="false"),
            SilentProgress(),
        )


def test_every_sample_counts_once(alike_world: TinyWorld, tmp_path: Path) -> None:
    """With ``--loss-reduction sample`` a target in a prefix has the weights of all samples that have it."""
    options = DESCENT | {"loss_reduction": "sample"}
    train(alike_world.config(tmp_path / "whole", **options, **PADDED), SilentProgress())
    train(alike_world.config(tmp_path / "tree", **options, gradient_accumulation_steps=16), SilentProgress())
    check_step(tmp_path / "tree", tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "within"),
    [({"train_type": "lora", "lora_dropout": 0.0}, 1e-5), ({"bf16": True}, 1e-2)],
    ids=["lora", "bfloat16"],
)
def test_adapters_and_half_precision(
    settings: dict[str, Any], within: float, alike_world: TinyWorld, tmp_path: Path
) -> None:
    options = DESCENT | settings
    train(alike_world.config(tmp_path / "whole", **options, **WHOLE), SilentProgress())
    train(alike_world.config(tmp_path / "tree", **options, gradient_accumulation_steps=16), SilentProgress())
    (line,), (expected,) = read_metrics(tmp_path / "tree"), read_metrics(tmp_path / "whole")
    assert line["target_tokens"] == expected["target_tokens"]
    assert line["tokens"] < expected["tokens"]
    assert line["loss"] == pytest.approx(expected["loss"], rel=within)
    assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5 * within)


@pytest.fixture(scope="module")
def two_processes(alike_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs of two processes, in one process group."""
    root = tmp_path_factory.mktemp("two")
    jobs: list[Job] = [("train", root / name, DESCENT | settings) for name, settings in TWO_PROCESSES.items()]
    full_run = root / "whole"
    jobs.append(("train", full_run, RESUMED))
    jobs.append(("train", root / "resumed", RESUMED | {"resume_from_checkpoint": f"{full_run}/checkpoint-2"}))
    jobs.append(("train", root / "stream", streamed(alike_world, **DESCENT, gradient_accumulation_steps=8)))
    of_both = DESCENT | {"gradient_accumulation_steps": 16, "sequence_parallel_size": 2}
    jobs.append(("train", root / "stream of both", streamed(alike_world, **of_both)))
    jobs = [check_before(job, ("ddp", "ring")) for job in jobs]
    jobs.append(("eval", root / "evaluated", {"max_tokens_per_micro_batch": 300}))
    run_ranks(2, run_jobs, alike_world, jobs, scratch=root)
    return root


@pytest.mark.parametrize("name", [*TWO_PROCESSES, "stream", "stream of both"])
def test_two_processes(name: str, two_processes: Path, reference: Path) -> None:
    check_step(two_processes / name, reference)
    (line,), (padded,) = read_metrics(two_processes / name), read_metrics(reference)
    assert line["tokens"] < 0.75 * padded["tokens"]


def test_two_processes_evaluate_each_sample_as_alone(
    alike_world: TinyWorld, two_processes: Path, tmp_path: Path
) -> None:
    run_jobs(alike_world, [("eval", tmp_path, {"share_prefix": "false", "max_samples_per_micro_batch": 1})])
    tree, single_table = (
        pq.read_table(folder / "eval.parquet").to_pydict() for folder in (two_processes / "evaluated", tmp_path)
    )
    assert {name: tree[name] for name in COUNTED} == {name: single_table[name] for name in COUNTED}
    assert tree["loss"] == pytest.approx(single_table["loss"], abs=1e-5)


def test_two_processes_resume_exactly(two_processes: Path) -> None:
    check_same_rest(two_processes / "whole", two_processes / "resumed", 2)


def test_a_run_resumes_exactly_with_other_processes(
    alike_world: TinyWorld, two_processes: Path, tmp_path: Path
) -> None:
    """The rest of an epoch keeps its trees when one process goes on where two were."""
    options = RESUMED | {"gradient_accumulation_steps": 2}
    checkpoint = str(two_processes / "whole" / "checkpoint-1")
    train(alike_world.config(tmp_path, **options, resume_from_checkpoint=checkpoint), SilentProgress())
    resumed_lines, full_lines = read_metrics(tmp_path), read_metrics(two_processes / "whole")
    assert [line["step"] for line in resumed_lines] == list(range(2, len(full_lines) + 1))
    for line, expected in zip(resumed_lines, full_lines[1:], strict=True):
        assert line["target_tokens"] == expected["target_tokens"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_a_run_resumes_exactly_and_evaluates(
    alike_world: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = dataclasses.replace(alike_world, cache=str(tmp_path / "cache"))
    export_rows(world, world.cache, max_length=160, val_dataset=(world.rows,))
    options = RESUMED | {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    train(world.config(tmp_path / "whole", **options), SilentProgress())
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    train(world.config(tmp_path / "resumed", **options, resume_from_checkpoint=checkpoint), SilentProgress())
    check_same_rest_of_steps(tmp_path / "whole", tmp_path / "resumed", 2)
    evaluations = [line for line in read_metrics(tmp_path / "whole") if "eval_loss" in line]
    assert len(evaluations) == 2
    assert len({line["eval_target_tokens"] for line in evaluations}) == 1
    # The val split begins alike, too: what it says is what it says of whole samples, and of each alone.
    last = tmp_path / "whole" / f"checkpoint-{evaluations[-1]['step']}"
    words = ["eval", "--model", str(last), "--cached-dataset", world.cache]
    words += ["--dataloader-num-workers", "0", "--output", str(tmp_path / "found.parquet")]
    tables = []
    for further in ("", "--share-prefix false", "--share-prefix true", "--max-samples-per-micro-batch 1"):
        assert run([*words, *further.split()]) == 0
        tables.append((pq.read_table(tmp_path / "found.parquet").to_pydict(), capsys.readouterr().err))
    (tree, tree_text), (unshared_table, unshared_text), (requested_table, _), (single_table, why) = tables
    assert "shared prefixes: computed once" in tree_text
    assert "shared prefixes" not in unshared_text
    no_sharing = "could be saved, but each sample is computed in full: that cannot be combined with"
    assert f"{no_sharing} --max-samples-per-micro-batch" in " ".join(why.split())
    assert tree == requested_table
    for other in (unshared_table, single_table):
        assert {name: tree[name] for name in COUNTED} == {name: other[name] for name in COUNTED}
        assert tree["loss"] == pytest.approx(other["loss"], abs=1e-5)
    targets = np.array(single_table["target_tokens"])
    assert evaluations[-1]["eval_loss"] == pytest.approx(targets @ single_table["loss"] / targets.sum(), abs=1e-5)
    assert run([*words, "--share-prefix", "true", "--max-samples-per-micro-batch", "1"]) == EXIT_USAGE
    assert "--share-prefix true cannot be combined with --max-samples-per-micro-batch" in capsys.readouterr().err


def check_same_rest_of_steps(full_run: Path, resumed: Path, step: int) -> None:
    expected = [line for line in read_metrics(full_run) if line["step"] > step]
    assert read_metrics(resumed) == expected


def test_a_saved_plan_trains_as_planned(alike_world: TinyWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.arrow")
    config = PlanConfig(cached_dataset=(alike_world.cache,), packing_length=256, save=path)
    preview(config).save(config.save)
    for name, options in {"direct": {}, "saved": {"plan": path}}.items():
        train(alike_world.config(tmp_path / name, **options, num_train_epochs=1.0), SilentProgress())
    assert read_metrics(tmp_path / "saved") == read_metrics(tmp_path / "direct")


def test_missing_image_drops_all_its_samples(tiny: TinyWorld, tmp_path: Path) -> None:
    """Five samples of one tree, each counted; the step is that of a cache without them."""
    worlds = {}
    for name, rows in {
        "bad": alike_rows(),
        "rest": [row for row in alike_rows() if row["images"] != ["pictures/0002.png"]],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        pictures = Path(tiny.rows).parent / "pictures"
        (folder / "pictures").mkdir()
        for picture in sorted(pictures.iterdir())[:6]:
            (folder / "pictures" / picture.name).write_bytes(picture.read_bytes())
        (folder / "rows.json").write_text(json.dumps(rows))
        worlds[name] = TinyWorld(tiny.model, str(folder / "cache"), str(folder / "rows.json"))
        export_rows(worlds[name], worlds[name].cache, max_length=160)
    os.remove(tmp_path / "bad" / "pictures" / "0002.png")
    options = DESCENT | {"gradient_accumulation_steps": 16}
    result = train(worlds["bad"].config(tmp_path / "skipped", **options, on_bad_media="skip"), SilentProgress())
    assert result.num_skipped == 5
    train(worlds["rest"].config(tmp_path / "without", **options, share_prefix="false"), SilentProgress())
    check_step(tmp_path / "skipped", tmp_path / "without")
    # A step that has nothing but the tree has no loss.
    options = {"packing_length": 160, "shuffle": False, "packing_algorithm": "sequential", "on_bad_media": "skip"}
    result = train(worlds["bad"].config(tmp_path / "each", **options, max_steps=6), SilentProgress())
    *others, empty = read_metrics(tmp_path / "each")
    assert (empty["loss"], empty["target_tokens"], empty["grad_norm"]) == (None, 0, 0.0)
    assert "token_accuracy" not in empty
    assert [result.first_loss, result.last_loss] == [others[0]["loss"], others[-1]["loss"]]


def test_command_reports_the_savings(alike_world: TinyWorld, capsys: pytest.CaptureFixture[str]) -> None:
    run(["plan", alike_world.cache, "--packing-length", "256"])
    output = capsys.readouterr().out
    assert "saved by shared prefixes" in output
    assert "fraction of the towers' FLOPs" in output
    run(["plan", alike_world.cache, "--packing-length", "256", "--max-samples-per-pack", "9"])
    assert "that cannot be combined with --max-samples-per-pack" in capsys.readouterr().out
    run(["plan", alike_world.cache, "--packing-length", "256", "--share-prefix", "false", "--json"])
    assert json.loads(capsys.readouterr().out)["shared_prefixes"] is None
