"""Processes that find the same mistake tell it once; what only one of them has is told as well."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from packtool.launch.processes import is_printed_elsewhere


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """What torchrun tells its processes, with its store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    yield {
        "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "r",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    del store


def test_one_of_several_processes_prints(environ: dict[str, str]) -> None:
    same = [is_printed_elsewhere("error: no such file", {**environ, "RANK": str(rank)}) for rank in (1, 0, 2)]
    assert same == [False, True, True]
    assert not is_printed_elsewhere("error: rank 2 is out of memory", {**environ, "RANK": "2"})
    restarted = {**environ, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert not is_printed_elsewhere("error: no such file", restarted), "another attempt"


def test_without_a_store_every_process_prints(environ: dict[str, str]) -> None:
    for changes in (
        {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"WORLD_SIZE": "1"},
        {"MASTER_PORT": "x"},
        {"MASTER_PORT": "1", "WORLD_SIZE": "x"},
    ):
        for rank in ("0", "1"):
            assert not is_printed_elsewhere("error", {**environ, "RANK": rank, **changes})
