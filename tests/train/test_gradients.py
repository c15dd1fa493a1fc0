"""The same samples give the same gradient, however they are packed, padded, accumulated and assigned to processes.

One optimizer step of plain gradient descent with learning rate 1 on all samples: the weights afterwards are the weights
before minus the gradient, so runs with equal checkpoints had equal gradients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from packtool.progress import SilentProgress
from packtool.train.run import train
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics

DESCENT: dict[str, Any] = {
    "learning_rate": 1.0,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "training": {"optim": "sgd"},
}
# 8 packs of 256 tokens, or 40 rows. 8 = 1 x 4 x 2; 40 = 1 x 4 x 10.
ONE_PROCESS: dict[str, dict[str, Any]] = {
    "packed-g1": {"per_device_train_batch_size": 8},
    "packed-g4": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "packed-shorter": {"packing_length": 128, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 4},
    "packed-workers": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "dataloader_num_workers": 2},
    "packed-checkpointed": {"per_device_train_batch_size": 8, "gradient_checkpointing": True},
    "dynamic": {"packing": False, "per_device_train_batch_size": 40, "dynamic_batch_tokens": 300},
    "samples-per-step": {"samples_per_step": 40},
    "grouped": {"packing": False, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 5}
    | {"group_by_length": True},
    "padded-g1": {"packing": False, "per_device_train_batch_size": 40},
    "padded-g4": {"packing": False, "per_device_train_batch_size": 10, "gradient_accumulation_steps": 4},
}
# With 3 and 9 packs or rows in a full micro-batch the ranks get unequal shares, some of them without pictures.
TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "packed-g1": {"per_device_train_batch_size": 4},
    "packed-g4": {"gradient_accumulation_steps": 4},
    "packed-uneven": {"packing_length": 320, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 7},
    "balanced": {"balance": "window", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "dynamic": {"packing": False, "per_device_train_batch_size": 20, "dynamic_batch_tokens": 200}
    | {"dynamic_max_batch_size": 3},
    "samples-per-step": {"samples_per_step": 40, "packing_length": 128, "fsdp": ["full_shard"]},
    "fsdp": {"fsdp": ["full_shard"], "gradient_accumulation_steps": 4},
    "fsdp-uneven": {"fsdp": ["shard_grad_op"], "packing_length": 320, "gradient_accumulation_steps": 7},
    "padded-g1": {"packing": False, "per_device_train_batch_size": 20},
    "padded-g4": {"packing": False, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 4},
    "padded-single": {"packing": False, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 21},
}
# Of these, so many verify packing first.
CHECKED = ("packed-uneven", "fsdp", "padded-g4", "stream")
# 8 packs an epoch, two a step: of one process, or of two with half the accumulation.
FIXED_STEPS: dict[str, Any] = {"num_train_epochs": 2.0, "save_steps": 1, "packs_per_step": 2}
ALONE: dict[str, Any] = {"num_train_epochs": 2.0, "save_steps": 1, "gradient_accumulation_steps": 1}
FSDP_RESUMED: dict[str, Any] = {"fsdp": ["full_shard"], "max_steps": 3, "save_steps": 2}
RESUMED: dict[str, Any] = {"num_train_epochs": 2.0, "save_steps": 1, "gradient_accumulation_steps": 2}
# Three steps an epoch, the third of 12 samples, with AdamW.
KEPT: dict[str, Any] = {"num_train_epochs": 2.0, "save_steps": 2, "packing_length": 128}
UNPACKED: dict[str, Any] = KEPT | {"packing": False, "per_device_train_batch_size": 7, "gradient_accumulation_steps": 2}
SAMPLED: dict[str, Any] = KEPT | {"samples_per_step": 14}


@pytest.fixture(scope="module")
def reference(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All samples in one padded batch of one process, with transformers' own attention."""
    output_dir = tmp_path_factory.mktemp("reference")
    train(tiny.config(output_dir, **DESCENT, **ONE_PROCESS["padded-g1"]), SilentProgress())
    return output_dir


def check_same_step(output_dir: Path, reference: Path) -> None:
    """One step, with the reference's loss, gradient norm and weights."""
    (line,), (expected,) = read_metrics(output_dir), read_metrics(reference)
    assert line["target_tokens"] == expected["target_tokens"]
    assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    weights, others = (load_file(folder / "checkpoint-1" / "model.safetensors") for folder in (output_dir, reference))
    # FSDP's whole weights hold the tied head a second time.
    assert weights.keys() - {"lm_head.weight"} == others.keys()
    for name in others:
        weight = weights[name]
        torch.testing.assert_close(weight, others[name], rtol=0, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("name", [name for name in ONE_PROCESS if name != "padded-g1"])
def test_one_process(name: str, tiny: TinyWorld, reference: Path, tmp_path: Path) -> None:
    result = train(tiny.config(tmp_path, **DESCENT, **ONE_PROCESS[name]), SilentProgress())
    assert result.steps == 1
    check_same_step(tmp_path, reference)


def test_step_updates_every_part_of_the_model(tiny: TinyWorld, reference: Path) -> None:
    before = load_file(Path(tiny.model) / "model.safetensors")
    after = load_file(reference / "checkpoint-1" / "model.safetensors")
    still = [name for name, weight in after.items() if torch.equal(weight, before[name])]
    assert not still


@pytest.fixture(scope="module")
def one_process_run(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, whose checkpoints two processes go on from."""
    output_dir = tmp_path_factory.mktemp("alone")
    train(tiny.config(output_dir, **FIXED_STEPS), SilentProgress())
    return output_dir


@pytest.fixture(scope="module")
def padded_run(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in padded batches, whose steps ``--samples-per-step`` keeps."""
    output_dir = tmp_path_factory.mktemp("unpacked")
    train(tiny.config(output_dir, **UNPACKED), SilentProgress())
    return output_dir


@pytest.fixture(scope="module")
def samples_per_step_run(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps in packs of one process."""
    output_dir = tmp_path_factory.mktemp("sampled")
    train(tiny.config(output_dir, **SAMPLED), SilentProgress())
    return output_dir


def check_same_curve(run_dir: Path, expected: Path, first_line: int = 0) -> None:
    """Losses, learning rates and target tokens of all steps from ``first`` on, and the weights in the end."""
    lines, others = read_metrics(run_dir), read_metrics(expected)[first_line:]
    assert len(lines) == len(others) > 0
    for line, other in zip(lines, others, strict=True):
        assert [line[name] for name in ("step", "learning_rate", "target_tokens")] == [
            other[name] for name in ("step", "learning_rate", "target_tokens")
        ]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    weights, expected_weights = (load_file(run / "checkpoint-6" / "model.safetensors") for run in (run_dir, expected))
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_packed_steps_equal_unpacked_ones(samples_per_step_run: Path, padded_run: Path) -> None:
    check_same_curve(samples_per_step_run, padded_run)
    assert read_metrics(samples_per_step_run)[0]["fill"] != read_metrics(padded_run)[0]["fill"]


@pytest.mark.parametrize(("name", "first_line"), [("sampled", 0), ("sampled-from-one", 2)])
def test_packed_steps_equal_unpacked_ones_on_two_processes(
    name: str, first_line: int, two_processes: Path, padded_run: Path
) -> None:
    """Resumed, too, by two processes where one had begun."""
    check_same_curve(two_processes / name, padded_run, first_line)


def test_packed_steps_resume_exactly(two_processes: Path) -> None:
    check_same_rest(two_processes / "sampled", two_processes / "sampled-again", 4)


@pytest.fixture(scope="module")
def two_processes(
    tiny: TinyWorld, one_process_run: Path, samples_per_step_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """All jobs of two processes, in one process group."""
    root = tmp_path_factory.mktemp("two")
    jobs: list[Job] = [("train", root / name, DESCENT | settings) for name, settings in TWO_PROCESSES.items()]
    jobs.append(("train", root / "versions", DESCENT | {"add_version": True}))
    full_run = root / "whole"
    jobs.append(("train", full_run, RESUMED))
    # All rows are in one block, so the second rank has none: its packs are empty, and the mean is over true targets.
    jobs.append(("train", root / "streamed", DESCENT | tiny.streamed() | {"gradient_accumulation_steps": 12}))
    rows = root / "rows.jsonl"
    write_lines(tiny, rows, 5)
    streamed = tiny.streamed(str(rows)) | {"save_steps": 4, "gradient_accumulation_steps": 3, "train_type": "lora"}
    jobs.append(("train", root / "stream", streamed))
    checkpoint = str(root / "stream" / "checkpoint-4")
    jobs.append(("train", root / "stream-resumed", streamed | {"resume_from_checkpoint": checkpoint}))
    jobs.append(("train", root / "sharded", FSDP_RESUMED))
    checkpoint = str(root / "sharded" / "checkpoint-2")
    jobs.append(("train", root / "sharded-resumed", FSDP_RESUMED | {"resume_from_checkpoint": checkpoint}))
    jobs.append(
        (
            "train",
            root / "assigned-anew",
            FIXED_STEPS | {"save_steps": 8, "resume_from_checkpoint": f"{one_process_run}/checkpoint-1"},
        )
    )
    larger = ALONE | {"gradient_accumulation_steps": 2, "resume_from_checkpoint": f"{one_process_run}/checkpoint-3"}
    jobs.append(("train", root / "assigned-to-larger-steps", larger))
    jobs.append(("train", root / "sampled", SAMPLED))
    for name, checkpoint in (
        ("again", f"{root}/sampled/checkpoint-4"),
        ("from-one", f"{samples_per_step_run}/checkpoint-2"),
    ):
        jobs.append(("train", root / f"sampled-{name}", SAMPLED | {"resume_from_checkpoint": checkpoint}))
    for step in (1, 3):
        jobs.append(
            ("train", root / f"resumed-{step}", RESUMED | {"resume_from_checkpoint": f"{full_run}/checkpoint-{step}"})
        )
    run_ranks(2, run_jobs, tiny, [check_before(job, CHECKED) for job in jobs], scratch=root)
    return root


def check_before(job: Job, checked: Sequence[str]) -> Job:
    """The job, which verifies packing before its first step if its name is one of these: once for all the others."""
    kind, output_dir, settings = job
    return kind, output_dir, settings | ({"verify_packing": output_dir.name in checked} if kind == "train" else {})


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(name: str, two_processes: Path, reference: Path) -> None:
    check_same_step(two_processes / name, reference)


def write_lines(tiny: TinyWorld, path: Path, copies: int) -> None:
    """The tiny world's rows so many times, one a line, with the pictures where they are."""
    rows = json.loads(Path(tiny.rows).read_text())
    folder = Path(tiny.rows).parent
    for row in rows:
        row["images"] = [str(folder / image) for image in row["images"]]
    path.write_text("\n".join(json.dumps(row) for row in rows * copies))


def test_rank_without_rows_has_no_effect(two_processes: Path, reference: Path) -> None:
    check_same_step(two_processes / "streamed", reference)


def test_two_streams_resume_exactly_and_end_together(two_processes: Path) -> None:
    """Four blocks of rows, of which the last has eight: one rank ends before the other."""
    check_same_rest(two_processes / "stream", two_processes / "stream-resumed", 4)
    result = json.loads((two_processes / "stream" / "packtool_train.json").read_text())
    assert (result["num_samples"], result["num_processes"], result["dropped"]) == (200, 2, {})
    assert 4 < result["steps"] < 1000


def test_remaining_packs_are_assigned_to_other_processes(one_process_run: Path, two_processes: Path) -> None:
    """With the same packs in a step, the same steps; the sums alone may be added in another order."""
    expected_lines, resumed_lines = read_metrics(one_process_run), read_metrics(two_processes / "assigned-anew")
    assert [line["step"] for line in resumed_lines] == list(range(2, len(expected_lines) + 1))
    for line, expected in zip(resumed_lines, expected_lines[1:], strict=True):
        assert line["target_tokens"] == expected["target_tokens"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    state = json.loads((two_processes / "assigned-anew" / "checkpoint-8" / "packtool_state.json").read_text())
    assert state["dealings"] == [[0, 1, 2, 1], [1, 2, 1, 1]]
    larger = read_metrics(two_processes / "assigned-to-larger-steps")
    assert [line["step"] for line in larger] == [4, 5, 6]
    assert sum(line["target_tokens"] for line in larger) == sum(line["target_tokens"] for line in expected_lines[3:])


def test_two_sharded_processes_resume_exactly(two_processes: Path) -> None:
    check_same_rest(two_processes / "sharded", two_processes / "sharded-resumed", 2)


def test_all_ranks_write_into_one_version(two_processes: Path) -> None:
    (version,) = (two_processes / "versions").iterdir()
    (checkpoint,) = version.glob("checkpoint-*")
    assert {"rng_state_0.pth", "rng_state_1.pth", "packtool_state.json"} <= {path.name for path in checkpoint.iterdir()}


def test_jobs_include_uneven_shares(two_processes: Path) -> None:
    result = json.loads((two_processes / "packed-uneven" / "packtool_train.json").read_text())
    assert result["num_processes"] == 2
    assert result["num_packs"] % 2 == 1
    assert result["num_empty_micro_batches"] == 1


@pytest.mark.parametrize("step", [1, 3])
def test_two_processes_resume_exactly(step: int, two_processes: Path) -> None:
    """In the first epoch and in the second: the same losses and weights to the last bit."""
    check_same_rest(two_processes / "whole", two_processes / f"resumed-{step}", step)
