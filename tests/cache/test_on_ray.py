from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from packtool.cache.export import ExportSummary
from packtool.errors import RowError
from tests.cache.conftest import tree

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray of two cores on this machine."""
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20, logging_level="error"
    )
    yield ray
    ray.shutdown()


def test_a_cluster_writes_the_same_bytes(
    run_export: Callable[..., ExportSummary], tmp_path: Path, cluster: Any
) -> None:
    run_export("local")
    run_export("cluster", executor="ray", dataset_num_proc=2)
    assert tree(tmp_path / "cluster") == tree(tmp_path / "local")
    with pytest.raises(RowError, match=r"rows\.jsonl, row"):
        run_export("strict", executor="ray", dataset_num_proc=2, strict=True)
