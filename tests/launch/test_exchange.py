from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from packtool.launch.world import all_gather_objects
from tests.forked import run_ranks


def _exchange() -> None:
    dist.init_process_group("gloo")
    assert all_gather_objects({"rank": dist.get_rank()}, 2) == [{"rank": 0}, {"rank": 1}]


def test_every_rank_gets_all_objects_in_order(tmp_path: Path) -> None:
    run_ranks(2, _exchange, scratch=tmp_path)


def test_a_single_process_needs_no_group() -> None:
    assert all_gather_objects("mine", 1) == ["mine"]
