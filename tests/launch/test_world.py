"""The ranks that torchrun names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World, leave_process_group
from packtool.train.loop.checks import check_ranks_agree
from packtool.train.prepare.checkpoint import RunState


@pytest.mark.smoke
def test_without_torchrun_there_is_one_process() -> None:
    assert World.from_environment({}) == World(0, 1)
    assert World().is_first


@pytest.mark.smoke
def test_rank_and_size_come_from_the_environment() -> None:
    world = World.from_environment({"RANK": "3", "WORLD_SIZE": "8"})
    assert (world.rank, world.size, world.is_first) == (3, 8, False)


@pytest.mark.parametrize("environ", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "-1"}])
def test_invalid_ranks_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK="):
        World.from_environment(environ)


STATE = RunState(
    plan="abc",
    cache="c",
    seed=1,
    train_type="full",
    packing=True,
    max_length=10,
    packing_length=10,
    world_size=2,
    gradient_accumulation_steps=1,
    per_device_train_batch_size=1,
)


@pytest.mark.parametrize("plan_of_rank_1", ["abc", "abd"])
def test_ranks_with_different_plans_are_named(monkeypatch: pytest.MonkeyPatch, plan_of_rank_1: str) -> None:
    """The exchange itself happens in every test with two processes."""

    def gather(gathered: list[Any], own_plan: dict[str, Any], **_: Any) -> None:
        gathered[:] = [own_plan, own_plan | {"plan": plan_of_rank_1}]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    if plan_of_rank_1 == "abc":
        check_ranks_agree(STATE, World(0, 2))
    else:
        with pytest.raises(MismatchError, match="plan: abc on rank 0, abd on rank 1"):
            check_ranks_agree(STATE, World(0, 2))


def test_ranks_with_different_sequence_parallelism_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(gathered: list[Any], own_plan: dict[str, Any], **_: Any) -> None:
        gathered[:] = [own_plan, own_plan | {"sequence parallel": "ring over 2"}]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(MismatchError, match="sequence parallel: ulysses over 2 on rank 0, ring over 2 on rank 1"):
        check_ranks_agree(STATE, World(0, 2), "ulysses over 2")


def test_a_rank_closes_its_connections(tmp_path: Path) -> None:
    """Gloo's threads abort some processes that exit with open connections."""
    import torch.distributed as dist

    leave_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    leave_process_group()
    assert not dist.is_initialized()
