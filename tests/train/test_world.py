"""The ranks that torchrun names."""

from __future__ import annotations

import pytest

from packtool.errors import ConfigError
from packtool.train.world import World


def test_alone_without_torchrun() -> None:
    assert World.from_environment({}) == World(0, 1)
    assert World().is_first


def test_one_of_many() -> None:
    world = World.from_environment({"RANK": "3", "WORLD_SIZE": "8"})
    assert (world.rank, world.size, world.is_first) == (3, 8, False)


@pytest.mark.parametrize("environ", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "-1"}])
def test_nonsense_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK="):
        World.from_environment(environ)
