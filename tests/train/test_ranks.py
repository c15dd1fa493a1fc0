"""Ranks whose micro-batches hold other kinds of media: they run the same towers, and learn what one process learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs
from packtool.batch.dataset import MicroBatches
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.loop.checks import load_spec
from packtool.train.loop.step_loader import RankExchange, required_towers
from packtool.train.model.load import load_model
from packtool.train.model.trainable import make_trainable
from packtool.train.prepare.run import Run
from packtool.train.run import train
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.test_gradients import DESCENT
from tests.train.tiny import TinyWorld, read_metrics
from tests.train.tiny_media import export_kinds, make_media_world

# Rows as they come, one a pack, one pack of each rank a step: what is drawn is what meets.
IN_ORDER: dict[str, Any] = DESCENT | {
    "learning_rate": 0.02,
    "packing_length": 128,
    "packing_algorithm": "sequential",
    "look_ahead": 0,
    "shuffle": False,
    "balance": "none",
    "max_samples_per_pack": 1,
    "verify_packing": False,
}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"freeze_vit": True, "freeze_aligner": True},
    "lora": {"train_type": "lora", "lora_dropout": 0.0},
}
SPREAD: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": ("full_shard",)}}
# Every kind alone and with others; which of them meet in a step is drawn.
ROWS: list[tuple[str, ...]] = [
    ("text",),
    ("sound",),
    ("text",),
    ("video", "sound", "picture"),
    ("picture",),
    ("video",),
]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A model that sees and hears."""
    torch.set_num_threads(1)
    return make_media_world(tmp_path_factory.mktemp("hearing"), hears=True)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A model that sees, with DeepStack."""
    torch.set_num_threads(1)
    return make_media_world(tmp_path_factory.mktemp("seeing"), hears=False)


def check_same_run(output_dir: Path, one_process_run: Path, name: str) -> None:
    """The losses and gradient norms of every step, and the weights in the end."""
    lines, expected = read_metrics(output_dir), read_metrics(one_process_run)
    assert len(lines) == len(expected) > 0, name
    for line, expected_line in zip(lines, expected, strict=True):
        place = f"{name}, step {line['step']}"
        assert line["loss"] == pytest.approx(expected_line["loss"], rel=1e-5), place
        assert line["grad_norm"] == pytest.approx(expected_line["grad_norm"], rel=1e-4), place
    (weights, others) = (_weights(folder, len(expected)) for folder in (output_dir, one_process_run))
    assert weights.keys() == others.keys()
    for key in others:
        torch.testing.assert_close(
            weights[key], others[key], rtol=0, atol=1e-5, msg=lambda text, k=key: f"{name}: {k}: {text}"
        )


def _weights(output_dir: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = output_dir / f"checkpoint-{step}"
    (path,) = [path for name in ("adapter_model", "model") if (path := checkpoint / f"{name}.safetensors").exists()]
    return load_file(path)


def compare(tiny: TinyWorld, rows: Sequence[Sequence[str]], jobs: dict[str, dict[str, Any]], size: int) -> None:
    """Run each job on so many ranks and on one, which takes as many packs a step."""
    root = Path(tiny.model).parent
    root = root / f"run-{len(list(root.glob('run-*')))}"
    tiny = export_kinds(tiny, str(root / "cache"), rows)
    ranks: list[Job] = [("train", root / name, IN_ORDER | job) for name, job in jobs.items()]
    run_ranks(size, run_jobs, tiny, ranks, scratch=root)
    for name, job in jobs.items():
        unsharded_job = {key: value for key, value in job.items() if key not in ("fsdp", "sequence_parallel_size")}
        one_process_run = root / ("alone-" + name.split()[-1])
        if not one_process_run.exists():
            together = size // job.get("sequence_parallel_size", 1)
            train(
                tiny.config(one_process_run, **IN_ORDER | unsharded_job | {"gradient_accumulation_steps": together}),
                SilentProgress(),
            )
        check_same_run(root / name, one_process_run, f"{name} on {rows}")


@settings(max_examples=1, phases=[Phase.generate])
@given(rows=st.permutations(ROWS))
def test_ranks_with_different_media_equal_one_process(hearing: TinyWorld, rows: list[tuple[str, ...]]) -> None:
    jobs = {f"{spread} {kind}": SPREAD[spread] | TRAINED[kind] for spread in SPREAD for kind in TRAINED}
    compare(hearing, rows, jobs, 2)


SHARED: dict[str, dict[str, Any]] = {
    kind: TRAINED[kind] | {"sequence_parallel_size": 2, "fsdp": ("full_shard",)} for kind in ("full", "frozen")
}


@settings(max_examples=1, phases=[Phase.generate])
@given(rows=st.permutations([*ROWS, ("picture", "video"), ("text",)]))
def test_four_ranks_in_sequence_parallel_pairs(hearing: TinyWorld, rows: list[tuple[str, ...]]) -> None:
    compare(hearing, rows, SHARED, 4)


def test_every_trained_parameter_has_a_gradient_in_any_micro_batch(
    hearing: TinyWorld, seeing: TinyWorld, tmp_path: Path
) -> None:
    """Processes wait for all of them; towers that are not to run stay still."""
    for tiny in (hearing, seeing):
        rows = [row for row in ROWS if tiny is hearing or "sound" not in row]
        tiny = export_kinds(tiny, str(tmp_path / Path(tiny.model).parent.name), rows)
        run = Run.of(tiny.config(tmp_path), World())
        spec = load_spec(run)
        model = make_trainable(load_model(tiny.model, spec.config, dtype=torch.float32, packing=True), run.config)
        for position in range(len(rows)):
            sample = run.source.reader.sample(position)
            model.zero_grad()
            model(**collate_packs([sample], spec).model_inputs()).logits.sum().backward()
            bare = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
            assert not bare, (rows[position], bare)
            media = collate_packs([sample], spec, frozenset()).media
            assert ("input_features" in media) == bool(sample.audios)
            assert bool(media.keys() & {"pixel_values", "pixel_values_videos"}) == bool(sample.images or sample.videos)


def test_plan_states_which_towers_run(hearing: TinyWorld, tmp_path: Path) -> None:
    """Frozen ones where some rank has something for them, and trained ones always."""
    rows = [("text",), ("picture",), ("text",), ("text",), ("sound",), ("video", "sound")]
    tiny = export_kinds(hearing, str(tmp_path / "cache"), rows)
    frozen = tiny.config(tmp_path, **IN_ORDER | TRAINED["frozen"])
    run = Run.of(frozen, World(size=2))
    spec = load_spec(run)
    assert required_towers(spec, frozen) == frozenset()
    assert required_towers(spec, tiny.config(tmp_path)) == {"vision", "sound"}
    for rank in range(2):
        run = Run.of(frozen, World(rank, 2))
        wanted_batches = [
            batch for step in run.steps(RankExchange(run.world)).rank_steps() for batch in step.micro_batches
        ]
        assert [batch.towers for batch in wanted_batches] == [{"vision"}, frozenset(), {"vision", "sound"}]
        dataset = MicroBatches(run.source.read, spec, required_towers=required_towers(spec, frozen))
        batches = [dataset[batch] for batch in wanted_batches]
        assert [isinstance(batch, Batch) and "input_features" in batch.media for batch in batches] == [
            False,
            False,
            True,
        ]
        assert [isinstance(batch, Batch) and "input_ids" in batch.model_inputs() for batch in batches] == [True] * 3
