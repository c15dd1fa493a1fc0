"""Every recipe trains what ``packtool train`` trains: the losses of its steps are the same."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

import packtool
from tests.examples.conftest import PLAN, Reference
from tests.forked import run_ranks

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MOST_LINES = 60


def load(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples write into the working directory."""
    monkeypatch.chdir(tmp_path)


def test_plain_loop_resumes_exactly(reference: Reference) -> None:
    loop = load("torch_loop")
    first_losses = loop.main(reference.tiny.model, reference.tiny.cache, steps=2, **PLAN)
    remaining_losses = loop.main(reference.tiny.model, reference.tiny.cache, **PLAN)
    assert len(first_losses) == 2
    reference.check(first_losses + remaining_losses)
    assert loop.main(reference.tiny.model, reference.tiny.cache, **PLAN) == []


def test_transformers_trainer_example_has_the_reference_losses(reference: Reference) -> None:
    reference.check(load("transformers_trainer").main(reference.tiny.model, reference.tiny.cache, **PLAN))


def test_torchtitan_example_has_the_reference_losses(reference: Reference, tmp_path: Path) -> None:
    trainer = load("torchtitan_style").Trainer(reference.tiny.model, packtool.plan(reference.tiny.cache, **PLAN))
    reference.check(trainer.train(str(tmp_path / "checkpoint")))
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_trl(reference: Reference) -> None:
    pytest.importorskip("trl")
    reference.check(load("trl_sft").main(reference.tiny.model, reference.tiny.cache, **PLAN))


def test_lightning(reference: Reference) -> None:
    pytest.importorskip("lightning")
    reference.check(load("lightning_module").main(reference.tiny.model, reference.tiny.cache, **PLAN))


# As many packs a step on two ranks: the same steps.
ON_TWO = PLAN | {"gradient_accumulation_steps": PLAN["gradient_accumulation_steps"] // 2}


def _on_each_rank(reference: Reference, folder: Path) -> None:
    """The recipes for several processes on this rank; the last two spread weights."""
    tiny = reference.tiny
    divided = load("transformers_trainer").main(tiny.model, tiny.cache, **ON_TWO)
    AcceleratorState._reset_state(reset_partial_state=True)
    # accelerate only looks for FSDP where it sees accelerators.
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    spread = load("accelerate_fsdp2").main(tiny.model, tiny.cache, **ON_TWO)
    plan = packtool.plan(tiny.cache, world_size=2, **ON_TWO)
    by_hand = load("torchtitan_style").Trainer(tiny.model, plan).train(str(folder / "checkpoint"))
    (folder / f"losses-{PartialState().process_index}.json").write_text(json.dumps([divided, spread, by_hand]))


def test_two_ranks_have_the_reference_losses(reference: Reference, tmp_path: Path) -> None:
    run_ranks(2, _on_each_rank, reference, tmp_path, scratch=tmp_path)
    for rank in range(2):
        trained = json.loads((tmp_path / f"losses-{rank}.json").read_text())
        # The Trainer logs on the first rank.
        for losses in trained[min(rank, 1) :]:
            reference.check(losses)


def test_examples_are_short_and_state_their_command() -> None:
    paths = sorted(EXAMPLES.glob("*.py"))
    assert len(paths) == 6
    for path in paths:
        text = path.read_text()
        assert text.count("\n") <= MOST_LINES, path
        assert f"examples/{path.name} MODEL CACHE" in text, path


def test_an_example_is_a_command(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands behind ``__main__``, with the constants of the file."""
    path = str(EXAMPLES / "torch_loop.py")
    monkeypatch.setattr("sys.argv", [path, reference.tiny.model, reference.tiny.cache])
    runpy.run_path(path, run_name="__main__")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])
