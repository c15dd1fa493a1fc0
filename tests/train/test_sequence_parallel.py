"""Training, evaluation and verify on sequences that several processes share: as if each process had its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from packtool.attention.kernel import Varlen
from packtool.attention.parallel import attend
from packtool.attention.parallel.blocks import ShardLayout, shard_layout
from packtool.batch.shard import SequenceShard
from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.run import train
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.test_gradients import DESCENT, check_before, check_same_step
from tests.train.tiny import TinyWorld, check_same_rest, export_rows, read_metrics

EVALUATING: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
EVALUATED = ("ring", "ulysses")
UNSEEN = DESCENT | {"eval_strategy": "no"}
TYPES = ("ring", "allgather", "ulysses")
# Two packs of 256 tokens a step, two epochs.
NUM_STEPS, HALF = 8, 4
CURVE: dict[str, Any] = {"max_steps": NUM_STEPS, "gradient_accumulation_steps": 2, "save_steps": HALF}
CURVE |= {"num_train_epochs": 2.0, "learning_rate": 3e-3, "eval_strategy": "no"}
LORA: dict[str, Any] = {"train_type": "lora", "learning_rate": 1e-2, "lora_dropout": 0.0, "max_steps": 4}
SKRULL: dict[str, Any] = {"schedule": "skrull", "bucket_size": "96"}
TWO: dict[str, Any] = {"sequence_parallel_size": 2}
# All samples in one step of plain gradient descent: its weights tell the gradient.
STEPS: dict[str, dict[str, Any]] = {
    **{kind: TWO | {"sequence_parallel_type": kind, "per_device_train_batch_size": 8} for kind in TYPES},
    "checkpointed": TWO | {"ring_size": 2, "per_device_train_batch_size": 8, "gradient_checkpointing": True},
    "workers": TWO | {"per_device_train_batch_size": 8, "dataloader_num_workers": 2},
    "sharded": TWO | {"fsdp": ["full_shard"], "gradient_accumulation_steps": 8},
    "samples-per-step": TWO | {"samples_per_step": 40},
    "dynamic": TWO | {"packing": False, "per_device_train_batch_size": 40, "dynamic_batch_tokens": 300},
    "skrull": TWO | SKRULL | {"per_device_train_batch_size": 8},
    "skrull-ranks": SKRULL | {"per_device_train_batch_size": 4},
    "skrull-unpacked": TWO | SKRULL | {"ulysses_size": 2, "packing": False, "per_device_train_batch_size": 40},
}
CURVES: dict[str, dict[str, Any]] = {"ring": TWO | {"sequence_parallel_type": "ring"}}
# Of four processes.
FOUR: dict[str, dict[str, Any]] = {
    "two-groups": TWO | {"gradient_accumulation_steps": 1},
    "skrull": TWO | SKRULL | {"gradient_accumulation_steps": 1, "sequence_parallel_type": "ring"},
}


# Of these, so many verify packing first.
CHECKED = ("curve-ring", "streamed", "both-axes")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny: TinyWorld) -> TinyWorld:
    """The tiny world with a cache that also has a val split."""
    cache = tmp_path_factory.mktemp("split") / "cache"
    export_rows(tiny, cache, val_dataset=(tiny.rows,))
    return dataclasses.replace(tiny, cache=str(cache))


def stage_settings(world: TinyWorld, root: Path, *sizes: int) -> dict[str, Any]:
    """Settings of two stages, with sequences that so many processes share, and steps of the same samples anyhow."""
    stages: list[dict[str, Any]] = [{"until": 2, "packing_length": 128, "sources": [world.cache + "#20"]}]
    stages.append({"sources": [world.cache]})
    for stage, size in zip(stages, sizes, strict=False):
        stage["sequence_parallel_size"] = size
    path = root / f"{len(sizes)}.yaml"
    path.write_text(json.dumps({"stages": stages}))
    return CURVE | {"cached_dataset": (), "mix": str(path), "samples_per_step": 8, "max_steps": 4, "save_steps": 2}


@pytest.fixture(scope="module")
def one_process_run(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, without any of it."""
    root = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    jobs: list[Job] = [
        ("train", root / "step", UNSEEN | {"per_device_train_batch_size": 8}),
        ("train", root / "curve", CURVE),
        ("train", root / "evaluated", CURVE | EVALUATING),
        ("train", root / "lora", CURVE | LORA),
        ("train", root / "stages", stage_settings(world, root)),
        ("eval", root / "eval", {}),
    ]
    run_jobs(world, [check_before(job, ()) for job in jobs])
    return root


@pytest.fixture(scope="module")
def two_process_run(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes."""
    root = tmp_path_factory.mktemp("two")
    jobs: list[Job] = [("train", root / name, UNSEEN | settings) for name, settings in STEPS.items()]
    jobs += [("train", root / f"curve-{name}", CURVE | settings) for name, settings in CURVES.items()]
    jobs.append(("train", root / "evaluated", CURVE | CURVES["ring"] | EVALUATING))
    jobs.append(("train", root / "lora", CURVE | LORA | TWO))
    jobs.append(("train", root / "stages", stage_settings(world, root, 1, 2) | TWO))
    resumed = CURVE | CURVES["ring"] | {"resume_from_checkpoint": str(root / "curve-ring" / f"checkpoint-{HALF}")}
    jobs.append(("train", root / "resumed", resumed))
    jobs.append(("train", root / "streamed", UNSEEN | world.streamed() | {"gradient_accumulation_steps": 12} | TWO))
    jobs += [("eval", root / f"eval-{kind}", TWO | {"sequence_parallel_type": kind}) for kind in EVALUATED]
    jobs += [("verify", root / f"verify-{kind}", TWO | {"sequence_parallel_type": kind}) for kind in TYPES[1:]]
    run_ranks(2, run_jobs, world, [check_before(job, CHECKED) for job in jobs], scratch=root)
    return root


@pytest.fixture(scope="module")
def four_process_run(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four processes."""
    root = tmp_path_factory.mktemp("four")
    jobs: list[Job] = [("train", root / name, CURVE | settings) for name, settings in FOUR.items()]
    both = {"ulysses_size": 2, "ring_size": 2, "per_device_train_batch_size": 8}
    jobs.append(("train", root / "both-axes", UNSEEN | both))
    run_ranks(4, run_jobs, world, [check_before(job, CHECKED) for job in jobs], scratch=root)
    return root


@pytest.mark.parametrize("name", STEPS)
def test_step_equals_that_of_one_process(name: str, two_process_run: Path, one_process_run: Path) -> None:
    """Loss, gradient norm and weights, with pictures in the rows and every part of the model trained."""
    check_same_step(two_process_run / name, one_process_run / "step")


def test_stages_may_differ_in_sequence_parallelism(two_process_run: Path, one_process_run: Path) -> None:
    expected, shared_lines = (read_metrics(folder / "stages") for folder in (one_process_run, two_process_run))
    assert len(shared_lines) == 4
    for line, other in zip(shared_lines, expected, strict=True):
        assert line["target_tokens"] == other["target_tokens"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)


def check_same_curve(output_dir: Path, expected_dir: Path, num_steps: int = NUM_STEPS) -> None:
    """Steps with the same losses, of the same samples."""
    lines, expected = read_metrics(output_dir), read_metrics(expected_dir)
    lines, expected = ([line for line in run_lines if "loss" in line] for run_lines in (lines, expected))
    assert len(lines) == len(expected) == num_steps
    for line, other in zip(lines, expected, strict=True):
        assert line["target_tokens"] == other["target_tokens"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)
    assert lines[0]["loss"] - lines[-1]["loss"] > 0.5, "it learns"


@pytest.mark.parametrize("kind", CURVES)
def test_steps_of_two_processes(kind: str, two_process_run: Path, one_process_run: Path) -> None:
    check_same_curve(two_process_run / f"curve-{kind}", one_process_run / "curve")


def test_steps_of_adapters(two_process_run: Path, one_process_run: Path) -> None:
    check_same_curve(two_process_run / "lora", one_process_run / "lora", num_steps=4)


@pytest.mark.parametrize("name", FOUR)
def test_steps_of_four_processes(name: str, four_process_run: Path, one_process_run: Path) -> None:
    """Two groups of two, with and without Skrull."""
    check_same_curve(four_process_run / name, one_process_run / "curve")


def test_both_parallel_axes_together(four_process_run: Path, one_process_run: Path) -> None:
    check_same_step(four_process_run / "both-axes", one_process_run / "step")


def test_resumed_run_trains_the_remaining_steps(two_process_run: Path) -> None:
    check_same_rest(two_process_run / "curve-ring", two_process_run / "resumed", step=HALF)


def test_streamed_rows_use_sequence_parallelism(two_process_run: Path, one_process_run: Path) -> None:
    (line,), (expected,) = read_metrics(two_process_run / "streamed"), read_metrics(one_process_run / "step")
    assert line["target_tokens"] == expected["target_tokens"]
    assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_evaluation_between_steps(two_process_run: Path, one_process_run: Path) -> None:
    shared_lines, expected = (
        [line for line in read_metrics(folder) if "eval_loss" in line]
        for folder in (two_process_run / "evaluated", one_process_run / "evaluated")
    )
    assert len(shared_lines) == len(expected) == 2
    for line, other in zip(shared_lines, expected, strict=True):
        assert line["eval_target_tokens"] == other["eval_target_tokens"]
        assert line["eval_loss"] == pytest.approx(other["eval_loss"], abs=1e-4)


@pytest.mark.parametrize("kind", EVALUATED)
def test_evaluation_scores_equal_those_of_one_process(kind: str, two_process_run: Path, one_process_run: Path) -> None:
    shared_columns, expected = (
        pq.read_table(folder / "eval.parquet").to_pydict()
        for folder in (two_process_run / f"eval-{kind}", one_process_run / "eval")
    )
    losses, others = shared_columns.pop("loss"), expected.pop("loss")
    assert losses == pytest.approx(others, abs=2e-6)
    for column in ("sample", "source", "row", "tokens", "target_tokens", "first_wrong", "token_accuracy"):
        assert shared_columns[column] == expected[column], column


@pytest.mark.parametrize("kind", TYPES[1:])
def test_verify_reports_no_errors(kind: str, two_process_run: Path) -> None:
    errors = json.loads((two_process_run / f"verify-{kind}" / "verify.json").read_text())
    assert set(errors) == {"isolation", "logits", "loss", "gradients"}
    assert errors["isolation"][0] == 0
    for name, (error, allowed) in errors.items():
        assert error <= allowed, name
        assert error < 2e-5, name


def test_checkpoint_is_saved_once(two_process_run: Path, one_process_run: Path) -> None:
    """By one process, whole."""
    names = sorted(path.name for path in (two_process_run / "curve-ring" / f"checkpoint-{NUM_STEPS}").iterdir())
    expected = sorted(path.name for path in (one_process_run / "curve" / f"checkpoint-{NUM_STEPS}").iterdir())
    assert [name for name in names if not name.startswith("rng_state")] == [
        name for name in expected if not name.startswith("rng_state")
    ]
    weights = load_file(two_process_run / "curve-ring" / f"checkpoint-{NUM_STEPS}" / "model.safetensors")
    others = load_file(one_process_run / "curve" / f"checkpoint-{NUM_STEPS}" / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def test_indivisible_process_counts_are_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 processes cannot be divided into groups of 2"):
        train(tiny.config(tmp_path, **TWO, dry_run=True), SilentProgress(), World(0, 3))


def test_indivisible_heads_are_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 heads of Q and 2 of K and V: ulysses over 3"):
        train(tiny.config(tmp_path, ulysses_size=3, dry_run=True), SilentProgress(), World(0, 3))


def test_kernel_without_blocks_is_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attn-impl flex"):
        train(tiny.config(tmp_path, **TWO, attn_impl="flex", dry_run=True), SilentProgress(), World(0, 2))


def test_a_dry_run_says_how_rows_are_shared(tiny: TinyWorld, tmp_path: Path) -> None:
    notes: list[str] = []

    class Listening(SilentProgress):
        def note(self, message: str) -> None:
            notes.append(message)

    train(tiny.config(tmp_path, **TWO, dry_run=True), Listening(), World(0, 4))
    (line,) = [note for note in notes if note.startswith("sequence parallel")]
    assert "each sequence on 2 processes, ulysses over 2" in line
    assert "2 data-parallel ranks" in line


def test_leak_is_detected_before_training(world: TinyWorld, tmp_path: Path) -> None:
    """Local documents, or sharded ones, that see each other: the check before the first step ends the run."""
    run_ranks(2, train_with_a_leak, world, tmp_path, scratch=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("leak-*")) == ["leak-local", "leak-sharded"]


def train_with_a_leak(world: TinyWorld, root: Path) -> None:
    """On each rank."""
    for part in ("local", "sharded"):

        def leaky(shard: SequenceShard, device: torch.device, part: str = part) -> ShardLayout:
            layout = shard_layout(shard, device)
            joined = Varlen.of_lengths([sum(getattr(layout, part).host_lengths())], device)
            return dataclasses.replace(layout, **{part: joined})

        attend.shard_layout = leaky  # type: ignore[assignment]
        with pytest.raises(MismatchError, match=r"samples leak|differs from its samples alone"):
            train(world.config(root / "leaky", **TWO, ulysses_size=2, verify_packing=True), SilentProgress())
        if World.from_environment().is_first:
            (root / f"leak-{part}").touch()
